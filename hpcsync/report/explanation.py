"""Why a run took its time, in words and numbers: who waited for whom, and what it would have taken otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from hpcsync.config.errors import printable
from hpcsync.planning.layer_groups import Groups
from hpcsync.report.between import PARTS, Between
from hpcsync.report.between import WORDS as BETWEEN
from hpcsync.report.waiting import Waits, waits
from hpcsync.trace.reader import Trace, TraceFile
from hpcsync.trace.schema import Rows

WORDS = {"load": "loading", "compute": "computation", "wait": "waiting", "comm": "transfers"}
STRAGGLES = 1.2  # times the median from which on a worker is said to be slow
MANY_WORKERS = 8  # largest number of workers in the matrix, for a terminal of 80 columns
CULPRITS = 3  # workers named
WORTH_S = 0.01  # share of the run from which on a cost is named


class WhatIf(NamedTuple):
    """Duration of the same training in virtual time, with the recorded times and with others.

    Attributes
    ----------
    samples
        Samples trained in each simulation.
    real_s
        Time of the run until it had trained them.
    replayed_s
        Simulated with the recorded times.
    even_s
        With the median of all workers and iterations in place of every time.
    without_worker_s
        With these medians in place of one worker's times, by worker.
    without_operation_s
        With the median in place of all times of one operation, by operation.
    by_speed_s
        With batches by speed, which are allocated during the run; None where the run's batches already follow it, and
        for a short run.
    others_s
        Under other paradigms, by name.
    assumed
        Those of these whose transfers are of another kind than the recorded ones, which are taken in their place.
    left_early
        Workers that had left or died well before the end, without an event of the job; simulated, they train on.
    """

    samples: int
    real_s: float
    replayed_s: float
    even_s: float
    without_worker_s: Mapping[int, float]
    without_operation_s: Mapping[str, float]
    by_speed_s: float | None
    others_s: Mapping[str, float]
    assumed: tuple[str, ...]
    left_early: tuple[int, ...]

    @property
    def slowdown(self) -> float:
        """Slowdown S of the run by stragglers: 1 without."""
        return self.replayed_s / self.even_s

    def of_worker(self, worker: int) -> float:
        """Return the slowdown S_w by this worker."""
        return self.replayed_s / self.without_worker_s[worker]

    def of_operation(self, operation: str) -> float:
        """Return the slowdown S_t by this operation."""
        return self.replayed_s / self.without_operation_s[operation]


class Explanation(NamedTuple):
    """What a run's time went to.

    Attributes
    ----------
    paradigm, waiting
        Name of the paradigm, and when its workers wait, in words.
    duration_s
        Time of the last row of the trace.
    parts_s
        Seconds of each part of the iterations, shape (n_workers, 4), in the order of `PARTS`.
    between_s
        Time of each worker between its iterations, such as that of its optimizer's step, with that of compressing;
        shape (n_workers,).
    iteration_s
        Mean time of a local step of each worker without waiting and transfers, shape (n_workers,); NaN without one.
    waits
        Who waited for whom.
    hosts
        Host of each worker.
    groups
        Workers that train different layers; None if all train the whole model.
    """

    paradigm: str
    waiting: str
    duration_s: float
    parts_s: Rows
    between_s: Rows
    iteration_s: Rows
    waits: Waits
    hosts: tuple[str, ...]
    groups: Groups | None = None

    @property
    def cost_s(self) -> Rows:
        """Mean time for which another worker waited for each worker, shape (n_workers,)."""
        return self.waits.caused_s / max(1, len(self.hosts) - 1)

    @property
    def slowness(self) -> Rows:
        """Mean time of a local step in medians of all workers that train the same layers, shape (n_workers,)."""
        n, slowness = len(self.iteration_s), np.full(len(self.iteration_s), np.nan)
        for alike in (range(n),) if self.groups is None else (self.groups.fc, self.groups.convolution):
            own_s = self.iteration_s[list(alike)]
            median_s = float(np.nanmedian(own_s)) if np.isfinite(own_s).any() else np.nan
            if median_s:
                slowness[list(alike)] = own_s / median_s
        return slowness

    @property
    def culprits(self) -> list[int]:
        """Workers for which others waited longest, the first one longest."""
        order = np.argsort(-self.cost_s, kind="stable")[:CULPRITS].tolist()
        return [worker for worker in order if self.cost_s[worker] > WORTH_S * self.duration_s]

    def name(self, worker: int) -> str:
        """Return the name of a worker, with its host if there are several."""
        return f"worker {worker} ({self.hosts[worker]})" if len(set(self.hosts)) > 1 else f"worker {worker}"


def explain(trace: Trace | TraceFile) -> Explanation:
    """Return what the time of a run went to. The trace is read in slices."""
    n_workers, served = trace.n_workers, trace.job.has_servers
    parts_s, n_steps, duration_s = np.zeros((n_workers, len(PARTS))), np.zeros(n_workers), 0.0
    others = Between.of(trace)
    for rows in trace.slices("pushes" if served else "exchanges"):
        for i, part in enumerate(PARTS):
            parts_s[:, i] += np.bincount(rows["worker"], np.nan_to_num(rows[f"{part}_s"]), n_workers)
        steps = rows["local_steps"] * rows["share"] if served else rows["batch_size"] > 0
        n_steps += np.bincount(rows["worker"], steps, n_workers)
        others.add(rows)
        duration_s = max(duration_s, float(rows["now_s"].max(initial=0.0)))
    for rows in trace.slices("updates"):
        duration_s = max(duration_s, float(rows["now_s"].max(initial=0.0)))
    with np.errstate(invalid="ignore"):
        iteration_s = (parts_s[:, 0] + parts_s[:, 1]) / np.where(n_steps > 0, n_steps, np.nan)
    paradigm = trace.job.paradigm
    return Explanation(
        paradigm.label,
        paradigm.bound,
        duration_s,
        parts_s,
        others.seconds,
        iteration_s,
        waits(trace),
        hosts_of(trace),
        paradigm.groups(n_workers),
    )


def hosts_of(trace: Trace | TraceFile) -> tuple[str, ...]:
    """Return the host of each worker; "" where it is not known."""
    hosts = [""] * trace.n_workers
    n_servers = int(trace.attributes.get("n_servers") or 0)
    for rows in trace.slices("clocks"):
        for row in rows:
            if 0 <= (worker := int(row["rank"]) - n_servers) < trace.n_workers:
                hosts[worker] = printable(row["host"].decode(errors="replace"))
    return tuple(hosts)


def sentences(found: Explanation, what_if: WhatIf | None) -> Iterator[str]:
    """Yield what a user would want to know, one sentence each."""
    total_s = np.append(found.parts_s.sum(axis=0), found.between_s.sum())
    if not total_s.any():
        yield "The trace has no iterations, so there is nothing to explain."
        return
    shares = total_s / total_s.sum()
    words = (*(WORDS[part] for part in PARTS), BETWEEN)
    named = [f"{word} {_percent(share)}" for word, share in zip(words, shares, strict=True) if share >= 0.005]
    yield f"The run took {_seconds(found.duration_s)}. Time of all workers: {', '.join(named)}."
    yield from _on_waits(found)
    if what_if is not None:
        yield from _on_stragglers(what_if)
        if what_if.left_early:
            who = _listed([found.name(worker) for worker in what_if.left_early])
            yield (
                f"{_capital(who)} left or died before the end. In the simulations all workers train to the end, which "
                f"takes {_seconds(what_if.replayed_s)} instead of {_seconds(what_if.real_s)}."
            )
        if what_if.assumed and shares[PARTS.index("comm")] >= WORTH_S:
            yield (
                f"Transfers under {' and '.join(what_if.assumed)} are assumed to take as long as those under "
                f"{found.paradigm}, although they move other amounts of data over other links; to predict their time, "
                "simulate the job with [cluster.network]."
            )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 4 else f"{len(names)} workers"


def _on_waits(found: Explanation) -> Iterator[str]:
    culprits = found.culprits
    for worker in culprits:
        slowness = float(found.slowness[worker])
        among = "" if found.groups is None else " of those that train the same layers"
        why = f", whose iterations take {slowness:.2g} times the median{among}" if slowness >= STRAGGLES else ""
        yield (
            f"On average, each other worker waited {_seconds(float(found.cost_s[worker]))} of "
            f"{_seconds(found.duration_s)} for {found.name(worker)}{why}."
        )
    if culprits:
        yield f"Waiting under {found.paradigm}: {found.waiting}."
    elif not found.waits.caused_s.any():
        yield "No worker waited for another one to compute."
    else:
        yield "On average, no worker made the others wait for more than 1 % of the run."
    others = (
        ("until a time set by the paradigm", found.waits.timed_s),
        ("for the server (messages under way, or the server busy with others)", found.waits.messages_s),
        ("for a cause that the trace does not record", found.waits.unknown_s),
    )
    for what, seconds in others:
        share = float(seconds.sum()) / (float(found.parts_s.sum() + found.between_s.sum()) or 1.0)
        if share >= WORTH_S:
            yield f"{_percent(share)} of all workers' time was spent waiting {what}."


def _on_stragglers(what_if: WhatIf) -> Iterator[str]:
    without = what_if.even_s / what_if.replayed_s
    text = (
        f"Simulated without stragglers, the run takes {without:.2f} times as long (slowdown S = {what_if.slowdown:.2f})"
    )
    if what_if.by_speed_s is not None:
        share = what_if.by_speed_s / what_if.replayed_s
        text += f', with batches by speed (batches.policy = "equal-finish") {share:.2f}'
    for paradigm, seconds in what_if.others_s.items():
        text += f", under {paradigm} {seconds / what_if.replayed_s:.2f}"
    yield f"{text}."


def view(found: Explanation, lines: Sequence[str], what_if: WhatIf | None) -> RenderableType:
    """Return the explanation for a terminal: the sentences, who waited for whom, and the simulations."""
    parts: list[RenderableType] = [Text("\n".join(lines))]
    if found.waits.caused_s.any():
        parts += [Text(), _matrix(found)]
    if what_if is not None:
        parts += [Text(), _simulations(found, what_if)]
    return Group(*parts)


def _matrix(found: Explanation) -> RenderableType:
    """Return the table of waiting times between the workers with the largest ones."""
    between_s = found.waits.between_s
    involved = found.waits.caused_s + np.asarray(between_s.sum(axis=1)).ravel()
    shown = sorted(np.argsort(-involved, kind="stable")[:MANY_WORKERS].tolist())
    left_out = "" if len(shown) == len(found.hosts) else f" ({len(shown)} of {len(found.hosts)} workers)"
    table = Table(box=box.SIMPLE, collapse_padding=True)
    table.add_column("worker", justify="right", no_wrap=True)
    for worker in shown:
        table.add_column(str(worker), justify="right", no_wrap=True)
    some = between_s[shown][:, shown].toarray()
    decimals = max(0, 2 - math.floor(math.log10(some.max() or 1.0)))  # the largest time has three digits
    for worker, row in zip(shown, some, strict=True):
        table.add_row(str(worker), *(f"{seconds:,.{decimals}f}" if seconds else "" for seconds in row))
    return Group(Text(f"Seconds for which a worker (row) waited for another (column){left_out}:"), table)


def _simulations(found: Explanation, what_if: WhatIf) -> RenderableType:
    """Return the table of the simulated durations."""
    table = Table(box=box.SIMPLE)
    for column, justify in (("simulated with", "left"), ("time", "right"), ("share", "right"), ("slowdown", "right")):
        table.add_column(column, justify=cast(JustifyMethod, justify))

    def add(what: str, seconds: float, slowdown: str = "") -> None:
        table.add_row(Text(what), _seconds(seconds), f"{seconds / what_if.replayed_s:.2f}", slowdown)

    add("the recorded times", what_if.replayed_s)
    add("the median in place of every time", what_if.even_s, f"S = {what_if.slowdown:.2f}")
    for operation, seconds in what_if.without_operation_s.items():
        add(f"the median in place of {operation}", seconds, f"S_t = {what_if.of_operation(operation):.2f}")
    for worker, seconds in what_if.without_worker_s.items():
        add(f"the median in place of {found.name(worker)}", seconds, f"S_w = {what_if.of_worker(worker):.2f}")
    if what_if.by_speed_s is not None:
        add("batches by speed", what_if.by_speed_s)
    for paradigm, seconds in what_if.others_s.items():
        add(paradigm, seconds)
    real = f"The first {what_if.samples:,} samples, which took {_seconds(what_if.real_s)} in the run:"
    return Group(Text(real), table)


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def _seconds(seconds: float) -> str:
    return f"{_digits(seconds)} s"


def _digits(number: float) -> str:
    return f"{number:#.3g}".rstrip(".") if number < 999.5 else f"{number:,.0f}"
