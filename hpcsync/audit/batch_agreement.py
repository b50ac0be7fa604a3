"""Batch sizes that workers in step agree on: whether they follow from what was said, and were then computed.

All but how sizes follow from what workers expect is recounted from the rows.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from hpcsync.audit.batch_decisions import not_following, possible
from hpcsync.audit.check import Check, Part, check_all, teller
from hpcsync.audit.peer_recount import SAME_TIME_S, PeerRecount
from hpcsync.core.batch_sizes import maxima, sizes_at_first
from hpcsync.planning.batch_allocation import Allocator

FIELDS = ("iteration", *Allocator.decision_fields)


def check_agreed_sizes(run: PeerRecount) -> list[Check]:
    """All checks of this module. If the first fails, the values cannot be counted with and it is the only one."""
    first = sizes_are_possible(run)
    if not first.passed:
        return [first]
    agreed = AgreedSizes(run)
    return [first, sizes_are_those_agreed_on(agreed), sizes_follow(agreed), sizes_are_agreed_on_when_due(agreed)]


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


class AgreedSizes:
    """The allocations of a run, in their order, and the sizes after each of them.

    Of a run that did not finish the latest, after which nothing was reported, may be there in part: it is left out.
    """

    def __init__(self, run: PeerRecount) -> None:
        self.run = run
        self.last = int(run.count.max(initial=0))
        self.first = sizes_at_first(run.job)

    def room(self, workers: np.ndarray) -> float:
        """What these workers are to compute together."""
        job, largest = self.run.job, maxima(self.run.job)
        return min(job.batch_total or 0, sum(largest[worker] for worker in workers))

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


def sizes_are_possible(run: PeerRecount) -> Check:
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
    parts.append((~possible(rows, "fixed_s", "sample_s"), teller("/decisions", rows, "worker", "fixed_s", "sample_s")))
    return check_all(name, *parts)


def sizes_are_those_agreed_on(agreed: AgreedSizes) -> Check:
    """Everybody computes what the latest allocation says, and what all compute is the total."""
    steps, count, run = agreed.run.steps, agreed.run.count, agreed.run
    given = agreed.in_force[count, steps["worker"]]
    computed = np.bincount(count, steps["batch_size"], minlength=agreed.last + 1)
    due = np.array([agreed.room(np.flatnonzero(sizes)) for sizes in agreed.in_force])
    present = np.bincount(count, minlength=agreed.last + 1)
    whole = present == (agreed.in_force > 0).sum(1)
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


def sizes_follow(agreed: AgreedSizes) -> Check:
    """Sizes are those by which all are expected to finish together, and worth the change."""
    allocations = agreed.allocations
    wrong = [not_following(agreed.run.job, a.rows, a.before[a.rows["worker"]], a.for_a_departure) for a in allocations]
    return check_all("batch sizes follow from what was expected", _told(allocations, wrong))


def sizes_are_agreed_on_when_due(agreed: AgreedSizes) -> Check:
    """Every so many iterations at most, and after the first one that lacks somebody; before the next is reported."""
    run, allocations = agreed.run, agreed.allocations
    reported_s = np.full(agreed.last + 2, np.inf)
    np.minimum.at(reported_s, run.count, run.steps["now_s"])
    wrong, missed = [], {worker for worker in range(run.n_workers) if run.made[worker] + 1 < agreed.last}
    iteration, again, departed = 0, False, False
    for allocation in allocations:
        departed = allocation.for_a_departure or (departed and allocation.iteration == iteration)
        wrong.append(_not_due(agreed, allocation, departed, reported_s))
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


def _not_due(agreed: AgreedSizes, allocation: Allocation, departed: bool, reported_s: np.ndarray) -> str:
    run, iteration = agreed.run, allocation.iteration
    if iteration > agreed.last:
        return f"it is of iteration {iteration:,}, the last one was {agreed.last:,}"
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
