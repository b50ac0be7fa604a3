"""Summary of a run: the numbers in `summary.json` and in the table at its end.

The rows are read in slices, so the memory for a summary grows with the number of workers and with the iterations of one
worker, not with the length of the trace.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpcsync.config.cluster import ClusterEvent
from hpcsync.config.predicted import Prediction
from hpcsync.report import between
from hpcsync.report.aggregate import Tally
from hpcsync.report.lead import push_leads
from hpcsync.report.wording import TO_LAST_ITERATION, plural
from hpcsync.trace import schema
from hpcsync.trace.reader import Trace, TraceFile
from hpcsync.trace.schema import Rows

MANY_WORKERS = 20  # largest number of workers shown
MANY_DEATHS = 5  # largest number of deaths shown
EVENTS_NAMED = 3  # largest number of events that did not occur shown by name
SMALL_SHARE = 0.01  # share of a worker's time from which on loading, and the time between iterations, has a column


class WorkerSummary(BaseModel):
    """Summary of one worker. A field that does not apply to the run is None.

    Attributes
    ----------
    layers
        Layers that the worker trains, if they are separated.
    pushes, dropped
        Number of pushes, and of those dropped; only with servers.
    exchanges
        Number of exchanges with other workers; only without servers.
    averages
        Number of averages in which the worker took part, whichever side began them; only where pairs average.
    load_share, compute_share, wait_share, comm_share, between_share
        Shares of loading, compute, wait, communication, and of compression and the time between iterations, in their
        sum, which is the time to the worker's last iteration (push): its wait for the end of the run is in none. None
        before the first iteration.
    staleness_mean, staleness_max
        Staleness of the applied pushes, in updates.
    start_gap_max_iters, push_gap_max_iters
        Largest lead over the slowest worker at the start of an iteration and right after a push, in pushes.
    batch_size
        Last allocated batch size.
    local_steps, data_share, ratio
        Last plan of ASHL: local steps per push, share of all workers' data, and share of the elements that are pushed.
    """

    model_config = ConfigDict(frozen=True)

    worker: int
    layers: str | None
    iterations: int
    pushes: int | None
    dropped: int | None
    exchanges: int | None
    averages: int | None
    wire_bytes: int
    load_share: float | None
    compute_share: float | None
    wait_share: float | None
    comm_share: float | None
    between_share: float | None
    staleness_mean: float | None
    staleness_max: int | None
    start_gap_max_iters: int | None
    push_gap_max_iters: int | None
    batch_size: int | None
    local_steps: int | None
    data_share: float | None
    ratio: float | None


class Death(BaseModel):
    """Death of a worker's process in a run that continued; `left` is the number of workers that remained."""

    model_config = ConfigDict(frozen=True)

    worker: int
    now_s: float
    left: int


class Summary(BaseModel):
    """Summary of a run.

    A field that does not apply is None, such as a target that the job does not have or that was not reached. Means and
    maxima are over all workers.

    Attributes
    ----------
    duration_s
        Time of the last push, grant, exchange or update, in seconds, without evaluations.
    samples_per_s
        Samples divided by `duration_s`.
    events, events_missed
        Number of the events of the job, and descriptions of those that did not occur before the run ended.
    wait_share, between_share
        Shares of all workers' time, without their waits for the end: waiting; compression and the time between
        iterations.
    final_loss
        Loss of the last evaluation; None if it is not finite.
    diverged_at
        Update from which on no loss was finite until the end.
    buffers
        Choice of the buffers, such as running statistics, of models that have any: `evaluation.buffers` of the job.
    consensus_distance
        Distance of the workers' weights from their mean, at the end.
    dropped, dropped_share
        Number of contributions in no update, and their share of all samples that were computed.
    late, discarded, cancelled
        Contributions that the k family dropped before the last update: too old for its synchronous forms, staler than
        the bound of its asynchronous forms, or cancelled early. The other dropped ones were left over at the end.
    k_last, k_least, k_most
        k of the next update after the end, and the smallest and largest k of the run, including `k_last`.
    coarse_s, fine_s
        Times at which these stages of ASHL began, in seconds.
    commits, commits_apart
        Commits per worker and period that ADSP chose last, or that the job sets; and the difference between the
        workers that committed most and least, of those that were in the run from its start to its last update (None if
        fewer than two were).
    encode_share
        Share of all workers' time spent on compression.
    predicted
        What `hpcsync advise` predicted of the job, if it has written it.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    paradigm: str
    mode: str | None
    engine: str | None
    status: str
    n_servers: int | None
    n_workers: int
    target: str | None
    time_to_target_s: float | None
    predicted: Prediction | None
    events: int
    events_missed: tuple[str, ...]
    duration_s: float
    updates: int
    samples: int
    samples_per_s: float | None
    final_accuracy: float | None
    best_accuracy: float | None
    final_loss: float | None
    best_loss: float | None
    diverged_at: int | None
    buffers: str
    consensus_distance: float | None
    iterations: int
    pushes: int | None
    dropped: int | None
    dropped_share: float | None
    late: int | None
    discarded: int | None
    cancelled: int | None
    k_last: int | None
    k_least: int | None
    k_most: int | None
    coarse_s: float | None
    fine_s: float | None
    commits: int | None
    commits_apart: int | None
    encode_share: float | None
    exchanges: int | None
    wire_bytes: int
    wait_share: float | None
    between_share: float | None
    staleness_mean: float | None
    staleness_max: int | None
    start_gap_max_iters: int | None
    push_gap_max_iters: int | None
    tracing_overhead_s: float
    deaths: tuple[Death, ...]
    workers: tuple[WorkerSummary, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as types of JSON."""
        return self.model_dump(mode="json")


def summarize(trace: Trace | TraceFile) -> Summary:
    """Summarize a trace of any status; a trace in a file gives the same summary as one in memory.

    Raises
    ------
    TraceError
        If its job cannot be read, or if the iterations in its pushes do not count them.
    """
    tally = Tally(trace)
    evaluations = np.concatenate(list(trace.slices("evaluations")))  # few: each cost a pass over the test data
    losses, accuracies = (_known(evaluations[column]) for column in ("loss", "accuracy"))
    distances = _known(evaluations["consensus_distance"])
    leads = push_leads(trace, int(tally.pushes.max(initial=0))) if tally.served else None
    workers = tuple(_workers(tally, leads))
    return Summary(
        name=trace.job.name,
        paradigm=trace.job.paradigm.name,
        mode=None if trace.job.has_servers else getattr(trace.job.paradigm, "mode", None),
        engine=trace.attributes.get("engine"),
        status=trace.status,
        n_servers=trace.attributes.get("n_servers"),
        n_workers=trace.n_workers,
        target=trace.job.stop.target,
        events=len(trace.job.cluster.events),
        events_missed=tuple(_in_words(event) for event in trace.job.cluster.events if not tally.has_occurred(event)),
        time_to_target_s=_time_to_target_s(trace, evaluations),
        predicted=trace.job.predicted,
        duration_s=tally.duration_s,
        updates=tally.updates,
        samples=tally.samples,
        samples_per_s=tally.samples / tally.duration_s if tally.duration_s else None,
        final_accuracy=accuracies[-1] if accuracies else None,
        best_accuracy=max(accuracies, default=None),
        final_loss=losses[-1] if losses and math.isfinite(evaluations["loss"][-1]) else None,
        best_loss=min(losses, default=None),
        diverged_at=_diverged_at(trace, tally, evaluations),
        buffers=trace.job.evaluation.buffers,
        consensus_distance=distances[-1] if distances else None,
        tracing_overhead_s=float(trace.attributes.get("tracing_overhead_s", 0.0)),
        deaths=tuple(_deaths(trace)),
        workers=workers,
        start_gap_max_iters=int(tally.start_gap_max.max(initial=0)) if tally.served else None,
        push_gap_max_iters=int(leads.max(initial=0)) if leads is not None else None,
        **tally.about(slice(None), "wait", "between"),
        **tally.about_drops(),
        **tally.about_k(),
        **tally.about_commits(),
    )


def beside_prediction(summary: Summary) -> str:
    """Return in words what was predicted of the run and what came of it; empty without a prediction."""
    predicted = summary.predicted
    if predicted is None:
        return ""
    said = f"{predicted.seconds:.2f} s to the target"
    if predicted.low_s is not None:
        said += f" ({predicted.low_s:.2f} to {predicted.high_s:.2f} s, 80 %)"
    came = "did not reach it"
    if summary.time_to_target_s is not None:
        came = f"took {summary.time_to_target_s / predicted.seconds:.2f} times as long"
    if predicted.samples_per_s and summary.samples_per_s:
        came += f" and trained {summary.samples_per_s / predicted.samples_per_s:.2f} times as many samples per second"
    return f"{said}; it {came}"


def _workers(tally: Tally, push_leads: Rows | None) -> Iterator[WorkerSummary]:
    for worker in range(len(tally.iterations)):
        yield WorkerSummary(
            worker=worker,
            layers=tally.layers[worker],
            start_gap_max_iters=int(tally.start_gap_max[worker]) if push_leads is not None else None,
            push_gap_max_iters=int(push_leads[worker]) if push_leads is not None else None,
            batch_size=tally.last_batch_size(worker),
            averages=None if tally.averages is None else int(tally.averages[worker]),
            **tally.plan(worker),
            **tally.about(slice(worker, worker + 1), *between.PARTS, "between"),
        )


def _deaths(trace: Trace | TraceFile) -> Iterator[Death]:
    present = set(range(trace.n_workers))
    for row in np.concatenate(list(trace.slices("membership"))):
        worker = int(row["worker"])
        if row["change"] == schema.Change.JOINED:
            present.add(worker)
        else:
            present.discard(worker)
        if row["change"] == schema.Change.DIED:
            yield Death(worker=worker, now_s=float(row["now_s"]), left=len(present))


# ---- evaluations -----------------------------------------------------------------------------------------------------


def _time_to_target_s(trace: Trace | TraceFile, evaluations: Rows) -> float | None:
    """Return when an evaluation first reached the job's target; with two targets, either of them."""
    stop, met = trace.job.stop, np.zeros(len(evaluations), bool)
    if stop.target_accuracy is not None:
        met |= evaluations["accuracy"] >= stop.target_accuracy
    if stop.target_loss is not None:
        met |= evaluations["loss"] <= stop.target_loss
    times_s = evaluations["now_s"][met]
    return float(times_s.min()) if len(times_s) else None


def _diverged_at(trace: Trace | TraceFile, tally: Tally, evaluations: Rows) -> int | None:
    """Return the update from which on the losses of steps, or else those of evaluations, were not finite."""
    if tally.diverged_s is not None:
        return sum(int((rows["now_s"] <= tally.diverged_s).sum()) for rows in trace.slices("updates"))
    finite = np.flatnonzero(np.isfinite(evaluations["loss"]))
    after = evaluations["version"][finite[-1] + 1 :] if len(finite) else evaluations[:0]
    return int(after[0]) if len(after) else None


def _known(values: Rows) -> list[float]:
    return [float(value) for value in values if math.isfinite(value)]


# ---- table -----------------------------------------------------------------------------------------------------------


def table(summary: Summary) -> RenderableType:
    """Return the run in a few lines and its workers in a table, within 80 columns for up to a million pushes."""
    return Group(_head(summary), Text(), *_worker_table(summary))


def _head(summary: Summary) -> RenderableType:
    servers = f"{plural(summary.n_servers, 'server')}, " if summary.n_servers else ""
    status = Text(summary.status, "green" if summary.status == "finished" else "bold red")
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim", no_wrap=True)
    head.add_column()
    head.add_row("run", Text.assemble((summary.name, "bold"), ", ", status))
    mode = f" ({summary.mode})" if summary.mode else ""
    crew = f"{servers}{plural(summary.n_workers, 'worker')}{_groups(summary)}"
    head.add_row("paradigm", f"{summary.paradigm}{mode}, {crew}")
    if summary.deaths:
        head.add_row("died", _died(summary.deaths))
    if summary.target:
        reached = "not reached" if summary.time_to_target_s is None else f"after {summary.time_to_target_s:.2f} s"
        head.add_row("target", f"{summary.target} {reached}")
    if predicted := beside_prediction(summary):
        head.add_row("predicted", predicted)
    if summary.events_missed:
        head.add_row("events", _missed(summary.events_missed, summary.events))
    head.add_row("time", f"{summary.duration_s:.2f} s (tracing took {_tiny(summary.tracing_overhead_s)})")
    rate = f" ({summary.samples_per_s:,.0f} per second)" if summary.samples_per_s else ""
    head.add_row("work", f"{plural(summary.updates, 'update')}, {plural(summary.samples, 'sample')}{rate}")
    if summary.k_last is not None:
        changed = (
            f" at the end, from {summary.k_least} to {summary.k_most}" if summary.k_least != summary.k_most else ""
        )
        head.add_row("k", f"{summary.k_last}{changed}")
        head.add_row("dropped", _drops(summary))
    if summary.coarse_s is not None:
        fine = "" if summary.fine_s is None else f", fine from {summary.fine_s:.2f} s on"
        head.add_row("stages", f"coarse from {summary.coarse_s:.2f} s on{fine}")
    if summary.commits is not None:
        apart = "" if summary.commits_apart is None else f", workers {summary.commits_apart:,} apart at the end"
        head.add_row("commits", f"{summary.commits:,} per period planned{apart}")
    if summary.encode_share is not None:
        moved = f"{1e-3 * summary.wire_bytes / max(1, summary.pushes or 0):,.1f} kB per push, including the read"
        head.add_row("compression", f"{moved}; takes {_percent(summary.encode_share)} of the time")
    if summary.exchanges is None and (summary.between_share or 0.0) >= SMALL_SHARE:  # else the table has a column
        head.add_row("other", f"{_percent(summary.between_share)} of the workers' time: {between.WORDS}")
    if sizes := [worker.batch_size for worker in summary.workers if worker.batch_size is not None]:
        head.add_row("batches", f"{_sizes(sizes)} samples at the end")
    for name, final, best in (
        ("accuracy", summary.final_accuracy, summary.best_accuracy),
        ("loss", None if summary.diverged_at is not None else summary.final_loss, summary.best_loss),
    ):
        if final is not None:
            head.add_row(name, f"{final:.4g} at the end, best {best:.4g}{_BUFFERS[summary.buffers]}")
    if summary.diverged_at is not None:
        before = "" if summary.best_loss is None else f", best {summary.best_loss:.4g} before"
        head.add_row("loss", Text(f"not finite since update {summary.diverged_at:,}{before}", "bold red"))
    if summary.consensus_distance is not None:
        head.add_row("weights", f"{summary.consensus_distance:.4g} apart at the end (consensus distance)")
    return head


# Appended to the result of evaluations, by `evaluation.buffers`.
_BUFFERS = {"worker": "", "mean": " (mean of the workers' buffers)", "recompute": " (recomputed statistics)"}


def _missed(missed: Sequence[str], n_events: int) -> str:
    """Describe the events that did not occur, only a few of them by name."""
    named = "; ".join(missed[:EVENTS_NAMED])
    more = f"; and {len(missed) - EVENTS_NAMED:,} more" if len(missed) > EVENTS_NAMED else ""
    return f"{len(missed):,} of {n_events:,} did not occur before the run ended: {named}{more}"


def _in_words(event: ClusterEvent) -> str:
    when = f"{event.at_s:g} s" if event.at_s is not None else f"its iteration {event.at_iteration:,}"
    return f"worker {event.worker}, {event.change} at {when}"


def _groups(summary: Summary) -> str:
    """Return the number of workers for each group of layers."""
    counts = Counter(worker.layers for worker in summary.workers if worker.layers is not None)
    return ": " + ", ".join(f"{n} {layers}" for layers, n in counts.items()) if counts else ""


def _drops(summary: Summary) -> str:
    """Return the number of contributions in no update, and the reasons."""
    known = [("late", summary.late), ("discarded", summary.discarded), ("cancelled", summary.cancelled)]
    at_the_end = (summary.dropped or 0) - sum(n or 0 for _, n in known)
    why = ", ".join(f"{n:,} {name}" for name, n in [*known, ("at the end", at_the_end)] if n)
    share = f" ({_percent(summary.dropped_share)} of all samples)" if why else ""
    return f"{plural(summary.dropped or 0, 'contribution')}{share}{why and ': '}{why}"


def _died(deaths: Sequence[Death]) -> str:
    shown = [f"worker {death.worker} after {death.now_s:.2f} s ({death.left} left)" for death in deaths[:MANY_DEATHS]]
    more = [f"and {len(deaths) - MANY_DEATHS} more ({deaths[-1].left} left)"] if len(deaths) > MANY_DEATHS else []
    return ", ".join(shown + more)


def _sizes(sizes: list[int]) -> str:
    if len(sizes) > MANY_WORKERS:
        return f"{min(sizes):,} to {max(sizes):,}"
    return ", ".join(f"{size:,}" for size in sizes)


def _shown(workers: Sequence[WorkerSummary]) -> Sequence[WorkerSummary]:
    """Return the workers to show: all, or those that waited least and most."""
    if len(workers) <= MANY_WORKERS:
        return workers
    by_wait = sorted(workers, key=lambda worker: worker.wait_share or 0.0)
    return [*by_wait[: MANY_WORKERS // 2], *by_wait[-MANY_WORKERS // 2 :]]


def _worker_table(summary: Summary) -> tuple[Table, Text]:
    """Return the table of the workers, and the lines below it, which may be wider."""
    workers = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    columns, about = (_PUSHING, _ABOUT_PUSHING) if summary.exchanges is None else (_EXCHANGING, _ABOUT_EXCHANGING)
    if any(worker.layers is not None for worker in summary.workers):
        columns, about = _SEPARATED, _ABOUT_SEPARATED
    if summary.coarse_s is not None:
        columns, about = _COMMITTING, _ABOUT_COMMITTING
    if any(worker.averages is not None for worker in summary.workers):
        columns, about = _AVERAGING, _ABOUT_AVERAGING
    for name, shares in (
        ("load", [worker.load_share for worker in summary.workers]),
        ("other", [worker.between_share for worker in summary.workers]),
    ):
        if not any((share or 0.0) >= SMALL_SHARE for share in shares):
            columns = {other: cell for other, cell in columns.items() if other != name}
    about = f"{about}\n{_ABOUT_SHARES}"
    if "other" in columns:
        about = f"{about}\nother: {between.WORDS}"
    wide = {"load", "staleness"} <= columns.keys()  # with headings of one line it would have more than 80 columns
    for name in columns:
        heading = name.replace(" ", "\n") if wide else name
        workers.add_column(heading, justify="left" if name in ("worker", "layers") else "right", no_wrap=True)
    for row in _shown(summary.workers):
        workers.add_row(*(cell(row) for cell in columns.values()))
    if len(summary.workers) > MANY_WORKERS:
        about = f"the {MANY_WORKERS // 2} workers that waited least and most; {about}"
    return workers, Text(about, "dim")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _staleness(mean: float | None, largest: int | None) -> str:
    return "-" if mean is None else f"{mean:.2f} ({largest})"


def _tiny(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


_SHARES: dict[str, Callable[[WorkerSummary], str]] = {
    "load": lambda row: _percent(row.load_share),
    "compute": lambda row: _percent(row.compute_share),
    "wait": lambda row: _percent(row.wait_share),
    "comm": lambda row: _percent(row.comm_share),
}
_PUSHING: dict[str, Callable[[WorkerSummary], str]] = {
    "worker": lambda row: str(row.worker),
    "pushes": lambda row: f"{row.pushes:,}",
    "dropped": lambda row: f"{row.dropped:,}",
    **_SHARES,
    "staleness": lambda row: _staleness(row.staleness_mean, row.staleness_max),
    "start lead": lambda row: str(row.start_gap_max_iters),
    "push lead": lambda row: str(row.push_gap_max_iters),
}
_COMMITTING: dict[str, Callable[[WorkerSummary], str]] = {  # at most one push of a worker is dropped, at the end
    **{name: cell for name, cell in _PUSHING.items() if name not in ("dropped", "start lead", "push lead")},
    "steps": lambda row: "-" if row.local_steps is None else f"{row.local_steps:,}",
    "of data": lambda row: _percent(row.data_share),
    "sent": lambda row: _percent(row.ratio),
}
_EXCHANGING: dict[str, Callable[[WorkerSummary], str]] = {
    "worker": lambda row: str(row.worker),
    "iterations": lambda row: f"{row.iterations:,}",
    "exchanges": lambda row: f"{row.exchanges:,}",
    **_SHARES,
    "other": lambda row: _percent(row.between_share),
    "kB moved": lambda row: f"{1e-3 * row.wire_bytes:,.0f}",
}
_AVERAGING: dict[str, Callable[[WorkerSummary], str]] = {
    {"exchanges": "averages"}.get(name, name): cell for name, cell in _EXCHANGING.items()
} | {"averages": lambda row: f"{row.averages:,}"}
_SEPARATED: dict[str, Callable[[WorkerSummary], str]] = {
    "worker": lambda row: str(row.worker),
    "layers": lambda row: row.layers or "-",
    **{name: cell for name, cell in _EXCHANGING.items() if name not in ("worker", "exchanges")},
}
_ABOUT_SHARES = f"shares: {TO_LAST_ITERATION}"
_ABOUT_PUSHING = "staleness: mean (largest), in updates; leads: the largest, in pushes"
_ABOUT_COMMITTING = "staleness: mean (largest), in updates; steps, of data, sent: as last planned"
_ABOUT_EXCHANGING = "exchanges: with another worker or with all of them"
_ABOUT_AVERAGING = "averages: begun by either side, which then moves the bytes"
_ABOUT_SEPARATED = "wait: for the other side of the cut or the own group; comm: sums of gradients"
