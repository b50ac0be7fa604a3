"""Status of a run that is under way: what `hpcsync watch` shows, computed from its rows as they are written."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict

from hpcsync.config.errors import printable
from hpcsync.paradigms.records import Problem
from hpcsync.report.between import PARTS, Between
from hpcsync.trace.schema import EVENTS, Change, Outcome, Phase, Rows

VERSION = 1  # of the file's layout
RECENT_S = 60.0  # least wall-clock time from which rate and time left are estimated
WINDOWS = 6  # parts of it, whose rates give the interval of the time left
MANY_STALLS = 3
PHASES = {int(phase): phase.name.lower() for phase in Phase}
KINDS_NOT_FINITE = {Problem.LOSS_NOT_FINITE: "loss", Problem.GRADIENT_NOT_FINITE: "gradient"}
Text = Annotated[str, AfterValidator(printable)]  # the file may be anybody's


class Decision(BaseModel):
    """Latest choice of a controller, and the inputs that it is based on."""

    model_config = ConfigDict(frozen=True)

    controller: Text
    worker: int
    chosen: float | None
    now_s: float
    inputs: dict[Text, float]


class Stall(BaseModel):
    """Report of an iteration that lasts much longer than expected."""

    model_config = ConfigDict(frozen=True)

    worker: int
    iteration: int
    now_s: float
    lasted_s: float
    phase: Text


class NotFinite(BaseModel):
    """Steps of a worker that have not been finite, up to its latest one.

    Attributes
    ----------
    what
        "loss", or "gradient" of a step without a recorded loss.
    iteration
        The first of these steps.
    """

    model_config = ConfigDict(frozen=True)

    worker: int
    what: Text
    iteration: int


class Workers(BaseModel):
    """Columns of all workers, each a list in the order of the workers.

    Attributes
    ----------
    state
        Activity, or "left", "died" or "stalled".
    iteration
        Iterations (pushes) ended.
    lead
        Lead over the slowest active worker, in iterations; None for a worker that has left or died.
    staleness
        Mean staleness of the applied pushes, in updates; None without servers, or before the first push.
    load, compute, wait, comm
        Shares of the worker's time, from 0 to 1, of which the rest is compression or lies between iterations, as in a
        summary; None before the first iteration.
    """

    model_config = ConfigDict(frozen=True)

    host: tuple[Text, ...]
    state: tuple[Text, ...]
    iteration: tuple[int, ...]
    lead: tuple[int | None, ...]
    staleness: tuple[float | None, ...]
    load: tuple[float | None, ...]
    compute: tuple[float | None, ...]
    wait: tuple[float | None, ...]
    comm: tuple[float | None, ...]


class Status(BaseModel):
    """Status of a run at one moment.

    Attributes
    ----------
    status
        One of `hpcsync.trace.schema.STATUSES`.
    written_s
        Time of the status, in seconds since the epoch on rank 0's host.
    every_s
        Seconds until the next status of a running run.
    now_s
        Time of the run, in seconds.
    share
        Share of the training that is done; None if only a target ends the run.
    left_s
        Expected time left, in seconds: by the mean rate of the last minute, and by its fastest and slowest part. None
        if it is not known.
    lead_bound
        Largest lead at which a worker starts; None without a bound.
    bound
        The paradigm's rule for which workers wait, as a sentence.
    loss
        Loss of the latest step; None if its worker recorded none, or if it is not finite (`not_finite`).
    not_finite
        Workers that have diverged: those whose latest loss or gradient was not finite.
    """

    model_config = ConfigDict(frozen=True)

    version: int = VERSION
    name: Text
    paradigm: Text
    n_servers: int
    status: Text
    written_s: float
    every_s: float
    now_s: float
    updates: int
    samples: int
    samples_per_s: float | None
    loss: float | None
    accuracy: float | None
    target: Text | None
    share: float | None
    left_s: tuple[float, float, float] | None
    lead_bound: float | None
    bound: Text
    decisions: tuple[Decision, ...]
    stalls: tuple[Stall, ...]
    not_finite: tuple[NotFinite, ...] = ()  # a status of an earlier release has none
    workers: Workers


class Moment(NamedTuple):
    """Progress at one moment: `clock_s` is wall-clock time, `now_s` the run's own time."""

    clock_s: float
    now_s: float
    samples: int
    share: float


def recent(moments: Sequence[Moment], moment: Moment) -> list[Moment]:
    """Return the moments of the last `RECENT_S` seconds, at least `WINDOWS` + 1 if known; this one is the last."""
    n_recent = sum(m.clock_s >= moment.clock_s - RECENT_S for m in moments)
    return [*moments[-max(n_recent, WINDOWS) :], moment]


def samples_per_s(moments: Sequence[Moment]) -> float | None:
    """Return the samples per second of the run's own time; None if it is not known."""
    first, last = moments[0], moments[-1]
    return (last.samples - first.samples) / (last.now_s - first.now_s) if last.now_s > first.now_s else None


def time_left(moments: Sequence[Moment]) -> tuple[float, float, float] | None:
    """Return the expected seconds left: by the mean rate, by that of the fastest and that of the slowest window.

    None if the share is not known, or if there is a window without progress, whose rate says nothing.
    """
    if len(moments) <= WINDOWS or math.isnan(moments[-1].share):
        return None
    bounds = [moments[i * (len(moments) - 1) // WINDOWS] for i in range(WINDOWS + 1)]
    rates = [(b.share - a.share) / (b.clock_s - a.clock_s) for a, b in pairwise(bounds)]
    mean = (bounds[-1].share - bounds[0].share) / (bounds[-1].clock_s - bounds[0].clock_s)
    left = 1 - moments[-1].share
    return (left / mean, left / max(rates), left / min(rates)) if min(rates) > 0 else None


class RowTally:
    """Sums over the rows of a trace, by worker, as they are written.

    Parameters
    ----------
    n_workers
        Number of workers.

    Attributes
    ----------
    seconds
        Time spent, float64 of shape (len(PARTS), n_workers).
    between
        Time of compressing and between iterations.
    """

    def __init__(self, n_workers: int) -> None:
        self.seconds = np.zeros((len(PARTS), n_workers))
        self.between = Between(n_workers)
        self._staleness, self._n_applied = np.zeros(n_workers), np.zeros(n_workers)
        self._changes: dict[int, str] = {}  # latest change of membership of a worker
        self._decisions: dict[str, Decision] = {}
        self._stalls: dict[int, Stall] = {}
        self._not_finite: dict[int, NotFinite] = {}

    def add(self, table: str, rows: Rows) -> None:
        """Add rows of a table, in the order of the trace; changes of membership precede other rows of their time."""
        if table in ("pushes", "exchanges"):
            self._add_times(rows)
            self._add_problems(rows)
            self.between.add(rows)
        if table == "pushes":
            applied = rows["outcome"] == Outcome.APPLIED
            # Another thread reads both: in this order it never divides by zero.
            self._n_applied += self._sums(rows["worker"], applied)
            self._staleness += self._sums(rows["worker"], rows["staleness"] * applied)
        elif table == "membership":
            for row in rows:
                self._changes[int(row["worker"])] = Change(row["change"]).name.lower()
                self.between.add_change(row)
        elif table == "decisions":
            rows = rows[~np.isin(rows["controller"], [name.encode() for name in EVENTS])]
            own = set(rows.dtype.names or ()) - {"seq", "now_s", "controller", "worker", "chosen"}
            _, last = np.unique(rows["controller"][::-1], return_index=True)
            for row in rows[::-1][last]:
                inputs = {name: float(row[name]) for name in own if not math.isnan(row[name])}
                controller, chosen = row["controller"].decode(), known(row["chosen"])
                self._decisions[controller] = Decision(
                    controller=controller, worker=row["worker"], chosen=chosen, now_s=row["now_s"], inputs=inputs
                )
        elif table == "stalls":
            for row in rows:
                self._stalls[int(row["worker"])] = Stall(
                    worker=row["worker"],
                    iteration=row["iteration"],
                    now_s=row["now_s"],
                    lasted_s=row["lasted_s"],
                    phase=PHASES[int(row["phase"])],
                )

    def _add_times(self, rows: Rows) -> None:
        for seconds, part in zip(self.seconds, PARTS, strict=True):
            seconds += self._sums(rows["worker"], np.nan_to_num(rows[f"{part}_s"]))

    def _add_problems(self, rows: Rows) -> None:
        found = np.isin(rows["problem"], [*KINDS_NOT_FINITE])
        if not (self._not_finite or found.any()):
            return
        for row in rows[found | (rows["problem"] == Problem.NONE) & (rows["batch_size"] > 0)]:
            worker, what = int(row["worker"]), KINDS_NOT_FINITE.get(row["problem"])
            if what is None:
                self._not_finite.pop(worker, None)
            elif worker not in self._not_finite:
                self._not_finite[worker] = NotFinite(worker=worker, what=what, iteration=row["iteration"])

    def _sums(self, worker: Rows, values: Rows) -> Rows:
        return np.bincount(worker, values, len(self._n_applied))

    @property
    def staleness(self) -> Rows:
        """Mean staleness of the applied pushes of each worker; NaN before the first, shape (n_workers,)."""
        with np.errstate(invalid="ignore"):
            return self._staleness / self._n_applied

    @property
    def shares(self) -> Rows:
        """Shares of `seconds` in each worker's time; NaN before the first iteration."""
        seconds = np.copy(self.seconds)  # which another thread may change
        with np.errstate(invalid="ignore"):
            return seconds / (seconds.sum(0) + self.between.seconds)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Latest decision of each controller."""
        return tuple(self._decisions.values())

    @property
    def stalls(self) -> tuple[Stall, ...]:
        """Latest stalls of different workers, the newest first."""
        return tuple(sorted(self._stalls.values(), key=lambda stall: -stall.now_s)[:MANY_STALLS])

    @property
    def not_finite(self) -> tuple[NotFinite, ...]:
        """Workers whose latest step was not finite, in the order in which that began."""
        return tuple(self._not_finite.values())

    def states(self, phases: Sequence[int], done: Sequence[int], active: Container[int]) -> tuple[str, ...]:
        """Return the state of each worker, given its phase, the iterations that it has ended, and who takes part."""
        states = [PHASES[phase] for phase in phases]
        for worker, stall in [*self._stalls.items()]:  # which another thread may change
            if done[worker] < stall.iteration:
                states[worker] = "stalled"
        for worker in range(len(states)):
            if worker not in active:
                states[worker] = "died" if self._changes.get(worker) == "died" else "left"
        return tuple(states)


def columns(
    tally: RowTally,
    hosts: Sequence[str],
    phases: Sequence[int],
    done: Sequence[int],
    iters: Sequence[int],
    active: Container[int],
) -> Workers:
    """Return the columns of all workers.

    Parameters
    ----------
    tally
        Their rows so far.
    hosts, phases
        Host and phase of each worker; the last workers may be missing, if a run has resumed with fewer ranks.
    done
        Number of ended iterations of each worker.
    iters
        Iterations of each worker by which leads are counted: those of a worker that has joined include what it missed.
    active
        Workers that take part: the others have left or died.
    """
    missing = len(done) - len(hosts)
    hosts, phases = [*hosts, *[""] * missing], [*phases, *[Phase.UNKNOWN] * missing]
    least = min((n for worker, n in enumerate(iters) if worker in active), default=0)
    parts: dict[str, Any] = {part: _rounded(row) for part, row in zip(PARTS, tally.shares, strict=True)}
    return Workers.model_construct(  # not checked: of a thousand workers that takes as long as all else
        host=tuple(hosts),
        state=tally.states(phases, done, active),
        iteration=tuple(done),
        lead=tuple(n - least if worker in active else None for worker, n in enumerate(iters)),
        staleness=_rounded(tally.staleness),
        **parts,
    )


def _rounded(values: Rows) -> tuple[float | None, ...]:
    """Return the values to three digits; JSON has null for NaN."""
    return tuple(values.round(3).tolist())


def known(value: float) -> float | None:
    """Return the value, None if it is not finite."""
    return float(value) if math.isfinite(value) else None
