"""What happened in a run, in a few numbers: for `summary.json` and for the table at its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpcsync.traces.counting import Recount
from hpcsync.traces.reading import Trace
from hpcsync.traces.schema import DROPPED

MANY_WORKERS = 20  # more are not shown one by one


class WorkerSummary(BaseModel):
    """One worker. Shares are of compute + wait + communication time and add up to 1; None before the first push.

    staleness_mean, staleness_max: over applied pushes, in updates. start_gap_max_iters: pushes ahead of the slowest
    when an iteration began; push_gap_max_iters: right after a push.
    """

    model_config = ConfigDict(frozen=True)

    worker: int
    pushes: int
    dropped: int
    compute_share: float | None
    wait_share: float | None
    comm_share: float | None
    staleness_mean: float | None
    staleness_max: int | None
    start_gap_max_iters: int
    push_gap_max_iters: int


class Summary(BaseModel):
    """One run. What does not exist is None: a target that was not asked for or not met, an evaluation never made.

    duration_s: up to the last push, grant or update, evaluations not counted. samples_per_s: samples over that.
    wait_share: of all workers' time together. Means and maxima are over all workers.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    paradigm: str
    engine: str | None
    status: str
    n_servers: int | None
    n_workers: int
    target: str | None
    time_to_target_s: float | None
    duration_s: float
    updates: int
    samples: int
    samples_per_s: float | None
    final_accuracy: float | None
    best_accuracy: float | None
    final_loss: float | None
    best_loss: float | None
    pushes: int
    dropped: int
    wait_share: float | None
    staleness_mean: float | None
    staleness_max: int | None
    start_gap_max_iters: int
    push_gap_max_iters: int
    tracing_overhead_s: float
    workers: tuple[WorkerSummary, ...]

    def as_dict(self) -> dict[str, Any]:
        """Only what JSON has."""
        return self.model_dump(mode="json")


def summarize(trace: Trace) -> Summary:
    """The summary of a trace, whatever its status. Raises TraceError if the job in it cannot be read."""
    tables = trace.tables
    pushes, updates = tables["pushes"], tables["updates"]
    recount = Recount(trace)
    workers = tuple(_workers(trace, recount))
    target, time_to_target_s = _target(trace)
    duration_s = max(float(tables[name]["now_s"].max(initial=0.0)) for name in ("pushes", "grants", "updates"))
    samples = int(updates["samples"].max(initial=0))
    losses, accuracies = (_known(tables["evaluations"][column]) for column in ("loss", "accuracy"))
    return Summary(
        name=trace.job.name,
        paradigm=trace.job.paradigm.name,
        engine=trace.attributes.get("engine"),
        status=trace.status,
        n_servers=trace.attributes.get("n_servers"),
        n_workers=trace.n_workers,
        target=target,
        time_to_target_s=time_to_target_s,
        duration_s=duration_s,
        updates=len(updates),
        samples=samples,
        samples_per_s=samples / duration_s if duration_s else None,
        final_accuracy=accuracies[-1] if accuracies else None,
        best_accuracy=max(accuracies, default=None),
        final_loss=losses[-1] if losses else None,
        best_loss=min(losses, default=None),
        tracing_overhead_s=float(trace.attributes.get("tracing_overhead_s", 0.0)),
        workers=workers,
        start_gap_max_iters=max((worker.start_gap_max_iters for worker in workers), default=0),
        push_gap_max_iters=max((worker.push_gap_max_iters for worker in workers), default=0),
        **_pushes(pushes, "wait"),
    )


def _pushes(pushes: np.ndarray, *shares: str) -> dict[str, Any]:
    """The numbers that are about a set of pushes, those of one worker or of all."""
    dropped = pushes["outcome"] == DROPPED
    staleness = pushes["staleness"][~dropped]
    parts_s = {part: float(pushes[f"{part}_s"].sum()) for part in ("compute", "wait", "comm")}
    total_s = sum(parts_s.values())
    return {
        "pushes": len(pushes),
        "dropped": int(dropped.sum()),
        "staleness_mean": float(staleness.mean()) if len(staleness) else None,
        "staleness_max": int(staleness.max()) if len(staleness) else None,
        **{f"{part}_share": parts_s[part] / total_s if total_s else None for part in shares},
    }


def _workers(trace: Trace, recount: Recount) -> Iterator[WorkerSummary]:
    pushes, grants = trace.tables["pushes"], trace.tables["grants"]
    by_worker = zip(
        _split(pushes, pushes["worker"], trace.n_workers),
        _split(grants, grants["worker"], trace.n_workers),
        _split(recount.push_gap, recount.pushes["worker"], trace.n_workers),
        strict=True,
    )
    for worker, (own, granted, gaps) in enumerate(by_worker):
        starts = granted[granted["local_steps"] > 0]
        yield WorkerSummary(
            worker=worker,
            start_gap_max_iters=int(starts["gap_iters"].max(initial=0)),
            push_gap_max_iters=int(gaps.max(initial=0)),
            **_pushes(own, "compute", "wait", "comm"),
        )


def _split(rows: np.ndarray, workers: np.ndarray, n_workers: int) -> list[np.ndarray]:
    """The rows of each worker, in their order. workers: whose they are, shape (n_rows,)."""
    order = np.argsort(workers, kind="stable")
    return np.split(rows[order], np.searchsorted(workers[order], np.arange(1, n_workers)))


def _target(trace: Trace) -> tuple[str | None, float | None]:
    """The job's target in words, and when an evaluation first met it; with two targets, the first to be met."""
    stop, evaluations = trace.job.stop, trace.tables["evaluations"]
    words, met = [], np.zeros(len(evaluations), bool)
    if stop.target_accuracy is not None:
        words.append(f"accuracy {stop.target_accuracy:g}")
        met |= evaluations["accuracy"] >= stop.target_accuracy
    if stop.target_loss is not None:
        words.append(f"loss {stop.target_loss:g}")
        met |= evaluations["loss"] <= stop.target_loss
    times_s = evaluations["now_s"][met]
    return " or ".join(words) or None, float(times_s.min()) if len(times_s) else None


def _known(values: np.ndarray) -> list[float]:
    return [float(value) for value in values if math.isfinite(value)]


# ---- for people ------------------------------------------------------------------------------------------------------


def table(summary: Summary) -> RenderableType:
    """The run in a few lines and its workers in a table, not wider than 80 columns for up to a million pushes."""
    return Group(_head(summary), Text(), _worker_table(summary))


def _head(summary: Summary) -> RenderableType:
    servers = f"{summary.n_servers} server{'s' if summary.n_servers != 1 else ''}, " if summary.n_servers else ""
    status = Text(summary.status, "green" if summary.status == "finished" else "bold red")
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim", no_wrap=True)
    head.add_column()
    head.add_row("run", Text.assemble((summary.name, "bold"), ", ", status))
    head.add_row("paradigm", f"{summary.paradigm}, {servers}{summary.n_workers} workers")
    if summary.target:
        reached = "not reached" if summary.time_to_target_s is None else f"after {summary.time_to_target_s:.2f} s"
        head.add_row("target", f"{summary.target} {reached}")
    head.add_row("time", f"{summary.duration_s:.2f} s (tracing took {_tiny(summary.tracing_overhead_s)})")
    rate = f" ({summary.samples_per_s:,.0f} a second)" if summary.samples_per_s else ""
    head.add_row("work", f"{summary.updates:,} updates, {summary.samples:,} samples{rate}")
    for name, final, best in (
        ("accuracy", summary.final_accuracy, summary.best_accuracy),
        ("loss", summary.final_loss, summary.best_loss),
    ):
        if final is not None:
            head.add_row(name, f"{final:.4g} at the end, best {best:.4g}")
    return head


def _shown(workers: Sequence[WorkerSummary]) -> Sequence[WorkerSummary]:
    """As many as people read: all, or of very many the extremes."""
    if len(workers) <= MANY_WORKERS:
        return workers
    by_wait = sorted(workers, key=lambda worker: worker.wait_share or 0.0)
    return [*by_wait[: MANY_WORKERS // 2], *by_wait[-MANY_WORKERS // 2 :]]


def _worker_table(summary: Summary) -> Table:
    workers = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    names = ("worker", "pushes", "dropped", "compute", "wait", "comm", "staleness", "start gap", "push gap")
    for name in names:
        workers.add_column(name, justify="left" if name == "worker" else "right", no_wrap=True)
    for row in _shown(summary.workers):
        workers.add_row(
            str(row.worker),
            f"{row.pushes:,}",
            f"{row.dropped:,}",
            _percent(row.compute_share),
            _percent(row.wait_share),
            _percent(row.comm_share),
            _staleness(row.staleness_mean, row.staleness_max),
            str(row.start_gap_max_iters),
            str(row.push_gap_max_iters),
        )
    workers.caption = "staleness: mean (largest), in updates; gaps: the largest, in pushes"
    if len(summary.workers) > MANY_WORKERS:
        workers.caption = f"the {MANY_WORKERS // 2} workers that waited least and most; {workers.caption}"
    workers.caption_justify = "left"
    return workers


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _staleness(mean: float | None, largest: int | None) -> str:
    return "-" if mean is None else f"{mean:.2f} ({largest})"


def _tiny(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
