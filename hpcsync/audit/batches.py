"""Checks of batch sizes with servers: contribution weights, allocations and sample ranges.

Everything is recounted from the rows, except how sizes follow from predicted times (`batch_decisions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hpcsync.audit.batch_decisions import not_following
from hpcsync.audit.check import Check, alike, check_all
from hpcsync.audit.phases import by_phase
from hpcsync.audit.server_recount import Recount
from hpcsync.config.job import Job, Script
from hpcsync.core.batch_sizes import sizes_at_first
from hpcsync.paradigms.records import UNUSED
from hpcsync.planning.batch_allocation import Allocator
from hpcsync.trace.schema import Outcome, Rows


def check_sizes(recount: Recount) -> list[Check]:
    """Return the checks of this module that apply to the trace's job."""
    if recount.job.batches.policy == "equal":
        checks = [nothing_is_allocated(recount)]
        weights = by_phase(recount, lambda part: [weights_follow_sizes(part)])
        return checks if recount.job.commits else [*weights, *checks]
    return [weights_follow_sizes(recount), allocations_are_planned(recount), samples_are_allocated_once(recount)]


# ---- weights ---------------------------------------------------------------------------------------------------------


def weights_follow_sizes(recount: Recount) -> Check:
    """Check that contributions are weighted by their batch sizes.

    In an update of one version, a contribution's weight is its share of the samples; the weights add up to 1. In other
    updates it is 1 / n_contributions (1 where an update is the sum of pushes that met), times the ratio of its batch
    size to the mean one (if that is known), divided by its staleness (if the job requires it). A dropped push has
    weight 0, and so has one with a problem because of which it does not count.
    """
    job, pushes = recount.job, recount.pushes
    n_complete = len(recount.complete_seq)
    complete = recount.applied_version <= n_complete
    rows, version = recount.applied[complete], recount.applied_version[complete] - 1
    used = ~np.isin(pushes["problem"][rows], [*UNUSED])
    size = pushes["batch_size"][rows] * used
    if job.paradigm.of_one_version:
        expected = size / np.maximum(np.bincount(version, size, n_complete)[version], 1)
    else:
        n_skipped = np.bincount(version, ~used, n_complete)[version]
        divisor = np.maximum(recount.updates["n_contributions"][version] - n_skipped, 1)
        expected = used / (1 if job.paradigm.merges else divisor)
        if job.batch_total is not None and not job.paradigm.steps_on_workers:
            expected *= size * (recount.n_workers / job.batch_total)
        if job.paradigm.discounts:
            expected /= np.maximum(pushes["staleness"][rows], 1)
    weight = pushes["weight"][rows]
    dropped = pushes[pushes["outcome"] == Outcome.DROPPED]
    return check_all(
        "weights follow from batch sizes",
        (
            ~alike(weight, expected),
            lambda i: f"push of seq {pushes['seq'][rows[i]]} has weight {weight[i]}, the recount gives {expected[i]}",
        ),
        (dropped["weight"] != 0, lambda i: f"push of seq {dropped['seq'][i]} is dropped, but has a weight"),
    )


# ---- allocated samples -----------------------------------------------------------------------------------------------


def nothing_is_allocated(recount: Recount) -> Check:
    """Check that nothing is allocated where all batch sizes are equal.

    The samples then follow from worker and iteration. The exception is a paradigm
    whose grants take the next samples, such as ASHL: see `ashl`.
    """
    grants, pushes, decisions = recount.grants, recount.pushes, recount.decisions
    allocates = recount.job.paradigm.shares_samples and not isinstance(recount.job.workload, Script)
    return check_all(
        "no batches are allocated",
        (
            (grants["first_sample"] != -1) & (not allocates),
            lambda i: f"grant of seq {grants['seq'][i]} has first_sample {grants['first_sample'][i]}",
        ),
        (~np.isnan(pushes["predicted_sample_s"]), lambda i: f"push of seq {pushes['seq'][i]} has a prediction"),
        (decisions["controller"] == b"batches", lambda i: f"decision of seq {decisions['seq'][i]} concerns batches"),
    )


def samples_are_allocated_once(recount: Recount) -> Check:
    """Check that samples are allocated in sequence and that each worker computes what it was allocated."""
    grants, pushes = recount.grants[~recount.is_stop], recount.pushes
    first = sizes_at_first(recount.job) * recount.job.local_steps
    n_samples = grants["batch_size"].astype(np.int64)
    begin = int(first.sum()) + np.cumsum(n_samples) - n_samples
    at_first = sizes_at_first(recount.job)[grants["worker"]]
    size = recount.in_force("batches", grants["worker"], grants["seq"], at_first)
    stops = recount.grants[recount.is_stop]
    permit = recount.push_permit
    allocated = np.append(recount.grants["batch_size"], 0)[permit]
    allocated = np.where(permit < 0, first[pushes["worker"]], allocated)
    known = (permit >= 0) | (pushes["iteration"] == 1)
    return check_all(
        "each sample is allocated exactly once",
        (
            grants["first_sample"] != begin,
            lambda i: (
                f"grant of seq {grants['seq'][i]} allocates from sample {grants['first_sample'][i]}, not {begin[i]}"
            ),
        ),
        (
            n_samples != size * grants["local_steps"],
            lambda i: (
                f"grant of seq {grants['seq'][i]} allocates {n_samples[i]} samples, its worker's size is {size[i]}"
            ),
        ),
        (stops["first_sample"] != -1, lambda i: f"stop grant of seq {stops['seq'][i]} allocates samples"),
        (
            known & (pushes["batch_size"] != allocated),
            lambda i: (
                f"push of seq {pushes['seq'][i]} has {pushes['batch_size'][i]} samples, {allocated[i]} were allocated"
            ),
        ),
    )


class _Allocation(NamedTuple):
    """Rows of /decisions that one event caused.

    Attributes
    ----------
    n_pushes
        Pushes since the previous allocation.
    before
        Sizes of all workers before the allocation, shape (n_workers,).
    active
        Workers that are active after the event.
    predicted
        Latest prediction (fixed_s, sample_s) of every worker, shape (n_workers, 2).
    """

    rows: Rows
    after_push: bool
    n_pushes: int
    before: Rows
    active: Rows
    predicted: Rows


def allocations_are_planned(recount: Recount) -> Check:
    """Check that sizes equalise the predicted finishing times and that the gain justifies the change."""
    name, n_allocations = "batch sizes follow from the predicted times", 0
    needed = set(Allocator.decision_fields)
    if not needed <= set(recount.decisions.dtype.names or ()):
        return Check(name, False, 0, f"/decisions lacks one of {', '.join(sorted(needed))}")
    for allocation in _allocations(recount):
        wrong = _wrong(recount.job, allocation)
        if wrong:
            return Check(name, False, n_allocations, f"allocation of seq {allocation.rows['seq'][0]}: {wrong}")
        n_allocations += 1
    return Check(name, True, n_allocations)


def _wrong(job: Job, allocation: _Allocation) -> str:
    """Return what is wrong with an allocation, or ""."""
    rows, active, settings = allocation.rows, allocation.active, job.batches
    if rows["worker"].tolist() != active.tolist():
        return f"workers {active.tolist()} were active, it names {rows['worker'].tolist()}"
    predicted = allocation.predicted[active]
    known = not np.isnan(predicted).any()
    recorded = np.stack([rows["fixed_s"], rows["sample_s"]], axis=1)
    if not np.array_equal(recorded, predicted if known else np.full_like(predicted, np.nan), equal_nan=True):
        return f"workers had predicted {predicted.tolist()}, recorded are {recorded.tolist()}"
    if wrong := not_following(job, rows, allocation.before[active], not allocation.after_push):
        return wrong
    if not allocation.after_push:
        return ""
    due = settings.interval * len(active)
    return "" if allocation.n_pushes >= due else f"it comes after {allocation.n_pushes} pushes, not {due}"


def _allocations(recount: Recount) -> Iterator[_Allocation]:
    rows = recount.decisions[recount.decisions["controller"] == b"batches"]
    event = recount.event_at(rows["seq"])
    pushes, is_push = recount.pushes, recount.events["is_push"]
    predicted = np.full((recount.n_workers, 2), np.nan)
    sizes, seen, last = sizes_at_first(recount.job).astype(float), 0, -1
    for begin, end in _runs(event):
        at = int(event[begin])
        upto = int(np.searchsorted(recount.push_event, at, side="right"))
        for push in pushes[seen:upto][~np.isnan(pushes["predicted_sample_s"][seen:upto])]:
            predicted[push["worker"]] = push["predicted_fixed_s"], push["predicted_sample_s"]
        active = recount.active(at)
        if not recount.finished and at == len(recount.events) - 1 and end - begin < len(active):
            return  # the trace ends within this allocation
        n_pushes = int(is_push[last + 1 : at + 1].sum())
        yield _Allocation(rows[begin:end], bool(at >= 0 and is_push[at]), n_pushes, sizes.copy(), active, predicted)
        sizes[:] = 0  # of workers that are not active
        sizes[rows["worker"][begin:end]] = rows["chosen"][begin:end]
        seen, last = upto, at


def _runs(values: Rows) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each run of equal values."""
    if len(values):
        edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
        yield from pairwise(edges)
