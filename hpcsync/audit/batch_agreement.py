"""Checks of batch sizes that synchronous workers agree on without a server.

Everything is recounted from the rows, except how sizes follow from predicted times (`batch_decisions`).
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from hpcsync.audit.batch_decisions import not_following, possible
from hpcsync.audit.check import SAME_TIME_S, Check, Part, check_all, describe_columns
from hpcsync.audit.peer_recount import PeerRecount
from hpcsync.core.batch_sizes import maxima, sizes_at_first
from hpcsync.planning.batch_allocation import Allocator
from hpcsync.trace.schema import Rows

FIELDS = ("iteration", *Allocator.decision_fields)


def check_agreed_sizes(run: PeerRecount) -> list[Check]:
    """Return all checks of this module.

    If the first one fails, the values cannot be used in computations, and it is the only one returned.
    """
    first = sizes_are_possible(run)
    if not first.passed:
        return [first]
    agreed = AgreedSizes(run)
    return [first, sizes_are_those_agreed_on(agreed), sizes_follow(agreed), sizes_are_agreed_on_when_due(agreed)]


class Allocation(NamedTuple):
    """Rows of /decisions that form one allocation, one for each worker that is active afterwards.

    Attributes
    ----------
    iteration
        The iteration after which the allocation was made.
    without
        Workers that were active before and no longer are.
    before
        Sizes of all workers up to then, shape (n_workers,).
    """

    rows: Rows
    iteration: int
    without: frozenset[int]
    before: Rows

    @property
    def for_a_departure(self) -> bool:
        """True if a departure caused the allocation, which then has no gain."""
        return bool(np.isnan(self.rows["gain"]).all())


class AgreedSizes:
    """The allocations of a run in order, and the sizes after each of them.

    The last allocation of an unfinished run, after which no iteration was recorded, may be incomplete: it is left out.
    """

    def __init__(self, run: PeerRecount) -> None:
        self.run = run
        self.last = int(run.count.max(initial=0))
        self.first = sizes_at_first(run.job)

    def room(self, workers: Rows) -> float:
        """Return the total batch size of these workers, in samples."""
        job, largest = self.run.job, maxima(self.run.job)
        return min(job.batch_total or 0, sum(largest[worker] for worker in workers))

    @cached_property
    def allocations(self) -> list[Allocation]:
        """All complete allocations, in order."""
        rows = self.run.decisions
        if not self.run.finished:
            rows = rows[rows["iteration"] < self.last]
        # The workers of an allocation are a subset of those before, in ascending order. A new one therefore begins
        # where the worker number does not increase.
        begins = np.flatnonzero((np.diff(rows["worker"]) <= 0) | (np.diff(rows["iteration"]) != 0)) + 1
        active, sizes, found = frozenset(range(self.run.n_workers)), self.first, []
        for group in np.split(rows, begins) if len(rows) else []:
            members = frozenset(group["worker"].tolist())
            found.append(Allocation(group, int(group["iteration"][0]), active - members, sizes))
            active, sizes = members, np.zeros_like(sizes)
            sizes[group["worker"]] = group["chosen"]
        return found

    @cached_property
    def in_force(self) -> Rows:
        """Size of every worker in each iteration, shape (1 + n_iterations, n_workers)."""
        sizes = np.tile(self.first, (self.last + 1, 1))
        begins = [allocation.iteration + 1 for allocation in self.allocations]
        for allocation, begin, end in zip(self.allocations, begins, [*begins[1:], self.last + 1], strict=False):
            sizes[begin:end] = 0
            sizes[begin:end, allocation.rows["worker"]] = allocation.rows["chosen"]
        return sizes


def sizes_are_possible(run: PeerRecount) -> Check:
    """Check that decisions name existing workers, concern batches, and are whole numbers of samples."""
    rows, name = run.decisions, "values of /decisions are valid"
    if not set(FIELDS) <= set(rows.dtype.names or ()):
        return Check(name, False, 0, f"/decisions lacks one of the columns {', '.join(FIELDS)}")
    exist = (rows["worker"] >= 0) & (rows["worker"] < run.n_workers) & np.isfinite(rows["now_s"])
    exist &= rows["controller"] == b"batches"
    parts: list[Part] = [(~exist, describe_columns("/decisions", rows, "worker", "now_s", "controller"))]
    for column in ("chosen", "batch_before", "iteration"):
        counted = (rows[column] >= 1) & (rows[column] == np.floor(rows[column])) & (rows[column] < 2**53)
        parts.append((~counted, describe_columns("/decisions", rows, "worker", column)))
    parts.append(
        (~possible(rows, "fixed_s", "sample_s"), describe_columns("/decisions", rows, "worker", "fixed_s", "sample_s"))
    )
    return check_all(name, *parts)


def sizes_are_those_agreed_on(agreed: AgreedSizes) -> Check:
    """Check that each worker computes its size of the latest allocation, and that the sizes add up to the total."""
    steps, count, run = agreed.run.steps, agreed.run.count, agreed.run
    allocated = agreed.in_force[count, steps["worker"]]
    computed = np.bincount(count, steps["batch_size"], minlength=agreed.last + 1)
    due = np.array([agreed.room(np.flatnonzero(sizes)) for sizes in agreed.in_force])
    present = np.bincount(count, minlength=agreed.last + 1)
    whole = present == (agreed.in_force > 0).sum(1)
    return check_all(
        "batch sizes equal the agreed sizes",
        (
            steps["batch_size"] != allocated,
            lambda i: (
                f"iteration {count[i]} of worker {steps['worker'][i]} has {steps['batch_size'][i]} samples, "
                f"the agreed size is {allocated[i]}"
            ),
        ),
        (
            whole & (computed != due),
            lambda i: f"iteration {i} of {run.n_workers} workers has {computed[i]:g} samples, not {due[i]:g}",
        ),
    )


def sizes_follow(agreed: AgreedSizes) -> Check:
    """Check that sizes equalise the predicted finishing times and that the gain justifies the change."""
    allocations = agreed.allocations
    wrong = [not_following(agreed.run.job, a.rows, a.before[a.rows["worker"]], a.for_a_departure) for a in allocations]
    return check_all("batch sizes follow from the predicted times", _part(allocations, wrong))


def sizes_are_agreed_on_when_due(agreed: AgreedSizes) -> Check:
    """Check when sizes are agreed on.

    An allocation is due at most once per interval, and after the first iteration that lacks a worker. It is made after
    all have computed that iteration, and recorded before the next one is.
    """
    run, allocations = agreed.run, agreed.allocations
    reported_s = np.full(agreed.last + 2, np.inf)
    np.minimum.at(reported_s, run.count, run.steps["now_s"])
    computed_s = np.full(agreed.last + 1, -np.inf)
    np.maximum.at(computed_s, run.count, run.steps["end_s"] - run.uncertain_s)
    wrong, missed = [], {worker for worker in range(run.n_workers) if run.made[worker] + 1 < agreed.last}
    iteration, again, departed = 0, False, False
    for allocation in allocations:
        departed = allocation.for_a_departure or (departed and allocation.iteration == iteration)
        wrong.append(_not_due(agreed, allocation, departed, computed_s, reported_s))
        if allocation.iteration < iteration or (again and allocation.iteration == iteration):
            wrong[-1] = wrong[-1] or f"it follows an allocation of iteration {iteration}"
        iteration, again = allocation.iteration, not allocation.for_a_departure
        missed -= allocation.without
    left = sorted(missed) if run.finished else []
    return check_all(
        "batch sizes are agreed on when due",
        _part(allocations, wrong),
        (np.ones(len(left), bool), lambda i: f"worker {left[i]} had left, but no allocation took over its samples"),
    )


def _not_due(agreed: AgreedSizes, allocation: Allocation, departed: bool, computed_s: Rows, reported_s: Rows) -> str:
    run, iteration = agreed.run, allocation.iteration
    if iteration > agreed.last:
        return f"it names iteration {iteration:,}, the last one is {agreed.last:,}"
    if (allocation.rows["now_s"] > reported_s[iteration + 1] + SAME_TIME_S).any():
        return f"it was made at {allocation.rows['now_s'].max()} s, but used before {reported_s[iteration + 1]} s"
    if (allocation.rows["now_s"] < computed_s[iteration]).any():
        made_s, since_s = allocation.rows["now_s"].min(), computed_s[iteration]
        return f"it was made at {made_s} s, but all had computed iteration {iteration} only at {since_s} s"
    if allocation.for_a_departure:
        if len(allocation.without) != 1:
            return f"{len(allocation.without)} workers have left, it must be for one"
        (worker,) = allocation.without
        made = int(run.made[worker])
        return "" if made + 1 == iteration else f"worker {worker} made {made} iterations, it names {iteration}"
    if allocation.without:
        return f"workers {sorted(allocation.without)} are left out"
    if not departed and iteration % run.job.batches.interval:
        return f"it names iteration {iteration}, but one is due only every {run.job.batches.interval}"
    return ""


def _part(allocations: list[Allocation], wrong: list[str]) -> Part:
    def describe(i: int) -> str:
        return f"allocation of seq {allocations[i].rows['seq'][0]}: {wrong[i]}"

    return np.array(list(map(bool, wrong)), bool), describe
