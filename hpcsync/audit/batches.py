"""Batch sizes: what a contribution counts for its own, who was given which, and of which samples.

All but how sizes follow from what workers expect is recounted from the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hpcsync.audit.batch_decisions import SAME, not_following
from hpcsync.audit.check import Check, check_all
from hpcsync.audit.server_recount import Recount
from hpcsync.config.job import Job, Script
from hpcsync.config.paradigms import AshlOptions, BspOptions, FirstKOfAnyOptions, FirstKOfAVersionOptions
from hpcsync.core.batch_sizes import sizes_at_first
from hpcsync.planning.batch_allocation import Allocator
from hpcsync.trace.schema import Outcome


def check_sizes(recount: Recount) -> list[Check]:
    """The checks of this module that the trace's job calls for."""
    if recount.job.batches.policy == "equal":
        checks = [nothing_is_allocated(recount)]
        return checks if recount.job.commits else [weights_follow_sizes(recount), *checks]
    return [weights_follow_sizes(recount), allocations_are_planned(recount), samples_are_allocated_once(recount)]


# ---- what counts how much --------------------------------------------------------------------------------------------


def weights_follow_sizes(recount: Recount) -> Check:
    """In an update of one version a contribution counts by its share of the samples, and all together 1.

    In other updates it counts by how much larger than the mean batch its own is, if that is known, by its staleness,
    if the job says so, and as one of all contributions. What is dropped does not count.
    """
    job, pushes = recount.job, recount.pushes
    n_complete = len(recount.complete_seq)
    complete = recount.applied_version <= n_complete
    rows, version = recount.applied[complete], recount.applied_version[complete] - 1
    size = pushes["batch_size"][rows]
    if isinstance(job.paradigm, BspOptions | FirstKOfAVersionOptions):
        expected = size / np.bincount(version, size, n_complete)[version]
    else:
        expected = 1 / recount.updates["n_contributions"][version]
        if job.batch_total is not None and not job.steps_on_workers:
            expected *= size * (recount.n_workers / job.batch_total)
        if isinstance(job.paradigm, FirstKOfAnyOptions) and job.paradigm.staleness_weight == "inverse":
            expected /= np.maximum(pushes["staleness"][rows], 1)
    weight = pushes["weight"][rows]
    dropped = pushes[pushes["outcome"] == Outcome.DROPPED]
    return check_all(
        "weights follow from batch sizes",
        (
            ~(np.abs(weight - expected) <= SAME * expected),
            lambda i: f"push of seq {pushes['seq'][rows[i]]} counts {weight[i]}, a recount gives {expected[i]}",
        ),
        (dropped["weight"] != 0, lambda i: f"push of seq {dropped['seq'][i]} is dropped, and counts all the same"),
    )


# ---- who computes what -----------------------------------------------------------------------------------------------


def nothing_is_allocated(recount: Recount) -> Check:
    """Where batches are alike, which samples are in them follows from worker and iteration, and nobody is asked.

    But for ASHL, whose workers make different numbers of local steps: see `stages`.
    """
    grants, pushes, decisions = recount.grants, recount.pushes, recount.decisions
    dealt = isinstance(recount.job.paradigm, AshlOptions) and not isinstance(recount.job.workload, Script)
    return check_all(
        "no batches are given out",
        (
            (grants["first_sample"] != -1) & (not dealt),
            lambda i: f"grant of seq {grants['seq'][i]} says {grants['first_sample'][i]}",
        ),
        (~np.isnan(pushes["predicted_sample_s"]), lambda i: f"push of seq {pushes['seq'][i]} predicts"),
        (decisions["controller"] == b"batches", lambda i: f"decision of seq {decisions['seq'][i]} is about batches"),
    )


def samples_are_allocated_once(recount: Recount) -> Check:
    """From the first sample on none is left out and none given twice, and everybody computes what it was given."""
    grants, pushes = recount.grants[~recount.is_stop], recount.pushes
    first = sizes_at_first(recount.job) * recount.job.local_steps
    n_samples = grants["batch_size"].astype(np.int64)
    begin = int(first.sum()) + np.cumsum(n_samples) - n_samples
    size = _sizes_in_force(recount, grants)
    stops = recount.grants[recount.is_stop]
    permit = recount.push_permit
    given = np.append(recount.grants["batch_size"], 0)[permit]
    given = np.where(permit < 0, first[pushes["worker"]], given)
    known = (permit >= 0) | (pushes["iteration"] == 1)
    return check_all(
        "samples are given out once, and none is left out",
        (
            grants["first_sample"] != begin,
            lambda i: f"grant of seq {grants['seq'][i]} gives from {grants['first_sample'][i]} on, not {begin[i]}",
        ),
        (
            n_samples != size * grants["local_steps"],
            lambda i: f"grant of seq {grants['seq'][i]} gives {n_samples[i]} samples, its worker has {size[i]}",
        ),
        (stops["first_sample"] != -1, lambda i: f"stop grant of seq {stops['seq'][i]} gives samples"),
        (
            known & (pushes["batch_size"] != given),
            lambda i: f"push of seq {pushes['seq'][i]} is of {pushes['batch_size'][i]} samples, given were {given[i]}",
        ),
    )


class _Allocation(NamedTuple):
    """Rows of /decisions that belong together: all that one event has brought.

    n_pushes: since the one before. active: workers; predicted: what each of all expects, (fixed_s, sample_s).
    """

    rows: np.ndarray
    after_push: bool
    n_pushes: int
    before: np.ndarray
    active: np.ndarray
    predicted: np.ndarray


def allocations_are_planned(recount: Recount) -> Check:
    """Sizes are those by which all finish together, as far as their workers had foretold, and worth the change."""
    name, n_allocations = "batch sizes are those by which all finish together", 0
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
    """What is wrong with it, or nothing."""
    rows, active, settings = allocation.rows, allocation.active, job.batches
    if rows["worker"].tolist() != active.tolist():
        return f"workers {active.tolist()} were active, it is of {rows['worker'].tolist()}"
    predicted = allocation.predicted[active]
    known = not np.isnan(predicted).any()
    told = np.stack([rows["fixed_s"], rows["sample_s"]], axis=1)
    if not np.array_equal(told, predicted if known else np.full_like(predicted, np.nan), equal_nan=True):
        return f"workers had foretold {predicted.tolist()}, told are {told.tolist()}"
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
            return  # the end of the trace came while it was being recorded
        n_pushes = int(is_push[last + 1 : at + 1].sum())
        yield _Allocation(rows[begin:end], bool(at >= 0 and is_push[at]), n_pushes, sizes.copy(), active, predicted)
        sizes[:] = 0  # of whoever is away
        sizes[rows["worker"][begin:end]] = rows["chosen"][begin:end]
        seen, last = upto, at


def _runs(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where runs of equal values begin and end."""
    if len(values):
        edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
        yield from pairwise(edges)


def _sizes_in_force(recount: Recount, grants: np.ndarray) -> np.ndarray:
    """Of each of these grants: the batch size that its worker was allocated last."""
    rows = recount.decisions[recount.decisions["controller"] == b"batches"]
    stride = np.int64(max(recount.seqs[-1], 0)) + 2 if len(recount.seqs) else np.int64(1)
    workers = np.arange(recount.n_workers)
    key = np.concatenate([workers * stride, rows["worker"] * stride + rows["seq"] + 1])
    size = np.concatenate([sizes_at_first(recount.job), rows["chosen"]])
    order = np.argsort(key, kind="stable")
    wanted = grants["worker"] * stride + grants["seq"]
    return size[order][np.searchsorted(key[order], wanted, side="right") - 1]
