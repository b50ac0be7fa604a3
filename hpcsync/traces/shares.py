"""Batch sizes that workers in step agree on: whether they follow from what was said, and were then computed.

How sizes follow from what workers expect is asked of the code that plans them; all else is recounted from the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hpcsync.planning.batches import Batches, Estimate, equal_finish, whole
from hpcsync.traces.checks import Check, Part, check_all, teller
from hpcsync.traces.reports import SAME_TIME_S, Reports

FIELDS = ("iteration", *Batches.decision_fields)
SAME_GAIN = 1e-9


def check_shares(run: Reports) -> list[Check]:
    """All checks of this module. If the first fails, the values cannot be counted with and it is the only one."""
    first = sizes_are_possible(run)
    if not first.passed:
        return [first]
    shares = Shares(run)
    return [first, sizes_are_those_agreed_on(shares), sizes_follow(shares), sizes_are_agreed_on_when_due(shares)]


class Allocation(NamedTuple):
    """Rows of /decisions that belong together: one for each worker that takes part from then on.

    iteration: the one after which it was made. without: workers that took part before, and do not any more.
    before: sizes of all workers until then.
    """

    rows: np.ndarray
    iteration: int
    without: frozenset[int]
    before: np.ndarray

    @property
    def for_a_departure(self) -> bool:
        """Nobody then asks what is gained."""
        return bool(np.isnan(self.rows["gain"]).all())


class Shares:
    """The allocations of a run, in their order, and the sizes after each of them.

    Of a run that did not finish the latest, after which nothing was reported, may be there in part: it is left out.
    """

    def __init__(self, run: Reports) -> None:
        self.run = run
        settings = run.job.batches
        assert run.job.batch_total is not None
        self.total, self.minimum = run.job.batch_total, settings.minimum
        self.maxima: Sequence[float] = settings.maxima(run.n_workers) or [math.inf] * run.n_workers
        self.last = int(run.count.max(initial=0))
        self.first = np.array(self.planned(range(run.n_workers), [Estimate(0.0, 1.0)] * run.n_workers))

    def planned(self, workers: Sequence[int], estimates: Sequence[Estimate]) -> list[int]:
        """The sizes of these workers that expect this."""
        minima, maxima = [self.minimum] * len(workers), [self.maxima[worker] for worker in workers]
        return whole(equal_finish(estimates, self.total, minima, maxima), self.total, minima, maxima)

    def room(self, workers: np.ndarray) -> float:
        """What these workers are to compute together."""
        return min(self.total, sum(self.maxima[worker] for worker in workers))

    @cached_property
    def allocations(self) -> list[Allocation]:
        rows = self.run.decisions
        if not self.run.finished:
            rows = rows[rows["iteration"] < self.last]
        # Each is of the same workers as the one before, or of some of them: its first one is not beyond the last.
        begins = np.flatnonzero((np.diff(rows["worker"]) <= 0) | (np.diff(rows["iteration"]) != 0)) + 1
        active, sizes, found = frozenset(range(self.run.n_workers)), self.first, []
        for group in np.split(rows, begins) if len(rows) else []:
            members = frozenset(group["worker"].tolist())
            found.append(Allocation(group, int(group["iteration"][0]), active - members, sizes))
            active, sizes = members, np.zeros_like(sizes)
            sizes[group["worker"]] = group["chosen"]
        return found

    @cached_property
    def in_force(self) -> np.ndarray:
        """Every worker's size in each iteration, shape (1 + n_iterations, n_workers)."""
        sizes = np.tile(self.first, (self.last + 1, 1))
        for allocation in self.allocations:
            sizes[allocation.iteration + 1 :] = 0
            sizes[allocation.iteration + 1 :, allocation.rows["worker"]] = allocation.rows["chosen"]
        return sizes


def sizes_are_possible(run: Reports) -> Check:
    """Decisions are of workers that exist, about batches, and in whole samples."""
    rows, name = run.decisions, "values of /decisions are possible"
    if not set(FIELDS) <= set(rows.dtype.names or ()):
        return Check(name, False, 0, f"/decisions has not the columns {', '.join(FIELDS)}")
    exist = (rows["worker"] >= 0) & (rows["worker"] < run.n_workers) & np.isfinite(rows["now_s"])
    exist &= rows["controller"] == b"batches"
    parts: list[Part] = [(~exist, teller("/decisions", rows, "worker", "now_s", "controller"))]
    for column in ("chosen", "batch_before", "iteration"):
        counted = (rows[column] >= 1) & (rows[column] == np.floor(rows[column])) & (rows[column] < 2**53)
        parts.append((~counted, teller("/decisions", rows, "worker", column)))
    foretold = np.isfinite(rows["fixed_s"]) & (rows["fixed_s"] >= 0)
    foretold &= np.isfinite(rows["sample_s"]) & (rows["sample_s"] > 0)
    foretold |= np.isnan(rows["fixed_s"]) & np.isnan(rows["sample_s"])
    parts.append((~foretold, teller("/decisions", rows, "worker", "fixed_s", "sample_s")))
    return check_all(name, *parts)


def sizes_are_those_agreed_on(shares: Shares) -> Check:
    """Everybody computes what the latest allocation says, and what all compute is the total."""
    steps, count, run = shares.run.steps, shares.run.count, shares.run
    given = shares.in_force[count, steps["worker"]]
    computed = np.bincount(count, steps["batch_size"], minlength=shares.last + 1)
    due = np.array([shares.room(np.flatnonzero(sizes)) for sizes in shares.in_force])
    present = np.bincount(count, minlength=shares.last + 1)
    whole = present == (shares.in_force > 0).sum(1)
    return check_all(
        "batch sizes are those agreed on",
        (
            steps["batch_size"] != given,
            lambda i: (
                f"iteration {count[i]} of worker {steps['worker'][i]} is of {steps['batch_size'][i]} samples, "
                f"agreed on were {given[i]}"
            ),
        ),
        (
            whole & (computed != due),
            lambda i: f"iteration {i} of {run.n_workers} workers is of {computed[i]:g} samples, not {due[i]:g}",
        ),
    )


def sizes_follow(shares: Shares) -> Check:
    """Sizes are those by which all are expected to finish together, and worth the change."""
    allocations = shares.allocations
    wrong = [_not_following(shares, allocation) for allocation in allocations]
    return check_all("batch sizes follow from what was expected", _told(allocations, wrong))


def _not_following(shares: Shares, allocation: Allocation) -> str:
    """What is wrong with it, or nothing."""
    rows, settings = allocation.rows, shares.run.job.batches
    workers, before = rows["worker"].tolist(), allocation.before[rows["worker"]].tolist()
    if rows["batch_before"].tolist() != before:
        return f"sizes were {before}, told are {rows['batch_before'].tolist()}"
    foretold = list(map(Estimate, rows["fixed_s"].tolist(), rows["sample_s"].tolist()))
    n_known = int((~np.isnan(rows["sample_s"])).sum())
    if n_known not in (0, len(rows)) or (n_known == 0 and not allocation.for_a_departure):
        return f"{n_known} of {len(rows)} workers expect anything"
    if settings.policy == "proportional" and (rows["fixed_s"] > 0).any():
        return "there are fixed costs, and sizes are to be proportional to speeds"
    sizes = shares.planned(workers, foretold if n_known else [Estimate(0.0, 1.0)] * len(rows))
    if rows["chosen"].tolist() != sizes:
        return f"chosen are {rows['chosen'].tolist()}, planned {sizes}"
    if allocation.for_a_departure:
        return ""
    now_s, then_s = (max(map(Estimate.seconds, foretold, of)) for of in (before, sizes))
    gain = (now_s - then_s) / now_s
    if not (np.abs(rows["gain"] - gain) <= SAME_GAIN).all() or not gain > settings.gain:
        return f"the gain is {gain}, told is {rows['gain'][0]}; more than {settings.gain} is needed"
    return ""


def sizes_are_agreed_on_when_due(shares: Shares) -> Check:
    """Every so many iterations at most, and after the first one that lacks somebody; before the next is reported."""
    run, allocations = shares.run, shares.allocations
    reported_s = np.full(shares.last + 2, np.inf)
    np.minimum.at(reported_s, run.count, run.steps["now_s"])
    wrong, missed = [], {worker for worker in range(run.n_workers) if run.made[worker] + 1 < shares.last}
    iteration, again, departed = 0, False, False
    for allocation in allocations:
        departed = allocation.for_a_departure or (departed and allocation.iteration == iteration)
        wrong.append(_not_due(shares, allocation, departed, reported_s))
        if allocation.iteration < iteration or (again and allocation.iteration == iteration):
            wrong[-1] = wrong[-1] or f"it comes after one of iteration {iteration}"
        iteration, again = allocation.iteration, not allocation.for_a_departure
        missed -= allocation.without
    left = sorted(missed) if run.finished else []
    return check_all(
        "batch sizes are agreed on when it is time",
        _told(allocations, wrong),
        (np.ones(len(left), bool), lambda i: f"worker {left[i]} had left, and nobody took over its samples"),
    )


def _not_due(shares: Shares, allocation: Allocation, departed: bool, reported_s: np.ndarray) -> str:
    run, iteration = shares.run, allocation.iteration
    if iteration > shares.last:
        return f"it is of iteration {iteration:,}, the last one was {shares.last:,}"
    if (allocation.rows["now_s"] > reported_s[iteration + 1] + SAME_TIME_S).any():
        return f"it is at {allocation.rows['now_s'].max()} s, and used before {reported_s[iteration + 1]} s"
    if allocation.for_a_departure:
        if len(allocation.without) != 1:
            return f"{len(allocation.without)} workers have left, it is for one"
        (worker,) = allocation.without
        made = int(run.made[worker])
        return "" if made + 1 == iteration else f"worker {worker} made {made} iterations, it is of {iteration}"
    if allocation.without:
        return f"workers {sorted(allocation.without)} are left out"
    if not departed and iteration % run.job.batches.interval:
        return f"it is of iteration {iteration}, only every {run.job.batches.interval} is one due"
    return ""


def _told(allocations: list[Allocation], wrong: list[str]) -> Part:
    def tell(i: int) -> str:
        return f"allocation of seq {allocations[i].rows['seq'][0]}: {wrong[i]}"

    return np.array(list(map(bool, wrong)), bool), tell
