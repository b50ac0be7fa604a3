"""Counting again what a trace says, from its rows alone: nothing here knows the paradigms' code.

A trace of a run that did not finish ends somewhere in the middle. Its tables end together, but a push has its row only
once it is applied or dropped, so the contributions that were pending at that moment are missing, and with them the
sense of what follows. The counts therefore stop at the first missing `seq`; that this is the tail, and not a hole, is
for `invariants` to check.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from hpcsync.job_paradigms import Easgd, FirstK
from hpcsync.traces.reading import Trace
from hpcsync.traces.schema import APPLIED

NEVER = np.iinfo(np.int64).max
DISTINCT = ("k-sync", "k-async")  # of the k family: those that count workers, not mini-batches


class Recount:
    """The rows of a trace up to the first missing one, and what follows from their order.

    Events are pushes and departures, in the order of `seq`; index e counts them from 0.

    pushes, grants, decisions, membership: structured arrays, in the order of `seq`, with `seq` < `horizon`.
    updates, evaluations: as in the trace.
    grants_first: whether a push is granted before the update that it takes part in, so that the grant names the version
                  from which that update starts, and not the one that it makes.
    """

    def __init__(self, trace: Trace) -> None:
        self.job = trace.job
        self.finished = trace.finished
        self.n_workers = trace.n_workers
        self.grants_first = isinstance(trace.job.paradigm, Easgd)
        tables = trace.tables
        numbered = [tables[name] for name in ("pushes", "grants", "decisions", "membership")]
        self.seqs = np.sort(np.concatenate([table["seq"] for table in numbered]))
        self.horizon = NEVER if trace.finished else _first_missing(self.seqs)
        kept = [table[table["seq"] < self.horizon] for table in numbered]
        self.pushes, self.grants, self.decisions, self.membership = (
            table[np.argsort(table["seq"], kind="stable")] for table in kept
        )
        self.updates, self.evaluations = tables["updates"], tables["evaluations"]

    # ---- events ----------------------------------------------------------------------------------------------------

    @cached_property
    def events(self) -> np.ndarray:
        """Pushes and departures: `seq, now_s, worker, is_push`, shape (n_events,)."""
        dtype = [("seq", "<i8"), ("now_s", "<f8"), ("worker", "<i8"), ("is_push", "?")]
        events = np.zeros(len(self.pushes) + len(self.membership), dtype)
        for rows, is_push in ((self.pushes, True), (self.membership, False)):
            part = events[: len(self.pushes)] if is_push else events[len(self.pushes) :]
            part["seq"], part["now_s"], part["worker"] = rows["seq"], rows["now_s"], rows["worker"]
            part["is_push"] = is_push
        return events[np.argsort(events["seq"], kind="stable")]

    def event_at(self, seq: np.ndarray) -> np.ndarray:
        """The last event before each seq: an index into `events`, -1 where there is none."""
        return np.searchsorted(self.events["seq"], seq, side="left") - 1

    @cached_property
    def push_event(self) -> np.ndarray:
        """Each push's own index into `events`, shape (n_pushes,)."""
        return np.flatnonzero(self.events["is_push"])

    @cached_property
    def push_count(self) -> np.ndarray:
        """Of each push: how many pushes its worker has made, this one included. Shape (n_pushes,)."""
        return running_count(self.pushes["worker"])

    @cached_property
    def left_event(self) -> np.ndarray:
        """Of each worker: the event of its departure, or NEVER. Shape (n_workers,)."""
        left = np.full(self.n_workers, NEVER)
        departures = np.flatnonzero(~self.events["is_push"])
        np.minimum.at(left, self.events["worker"][departures], departures)
        return left

    @cached_property
    def min_count(self) -> np.ndarray:
        """After each event: fewest pushes of a worker that has not left. Shape (n_events,).

        The minimum reaches k with the last of the workers' k-th pushes; one that leaves is not waited for any more.
        """
        return fewest(self.push_count, self.pushes["worker"], self.push_event, self)

    @cached_property
    def push_gap(self) -> np.ndarray:
        """Of each push: its worker's pushes minus the fewest of an active worker, just after it. Shape (n_pushes,)."""
        return self.push_count - self.min_count[self.push_event]

    # ---- grants ----------------------------------------------------------------------------------------------------

    @cached_property
    def is_stop(self) -> np.ndarray:
        """Grants that end a worker's part, shape (n_grants,)."""
        return self.grants["local_steps"] == 0

    @cached_property
    def stop_seq(self) -> int:
        """When the run was over: the first such grant, or NEVER."""
        stops = self.grants["seq"][self.is_stop]
        return int(stops[0]) if len(stops) else NEVER

    @cached_property
    def grant_event(self) -> np.ndarray:
        """Of each grant: the event in whose answer it was made, shape (n_grants,)."""
        return self.event_at(self.grants["seq"])

    @cached_property
    def grant_count(self) -> np.ndarray:
        """Of each grant: how many pushes its worker had made, shape (n_grants,)."""
        order = np.lexsort((self.pushes["seq"], self.pushes["worker"]))
        stride = int(max(self.seqs[-1], 0)) + 1 if len(self.seqs) else 1
        before = self.pushes["worker"][order] * stride + self.pushes["seq"][order]
        worker = self.grants["worker"].astype(np.int64)
        upto = np.searchsorted(before, worker * stride + self.grants["seq"])
        return upto - np.searchsorted(before, worker * stride)

    @cached_property
    def grant_gap(self) -> np.ndarray:
        """Of each grant: its worker's pushes minus the fewest of an active worker, at that moment. (n_grants,)."""
        if not len(self.events):
            return np.zeros(len(self.grants), np.int64)
        fewest = np.where(self.grant_event >= 0, self.min_count[self.grant_event], 0)
        return self.grant_count - fewest

    @cached_property
    def push_grant(self) -> np.ndarray:
        """Of each push: the row in `grants` that answers it, or -1. Shape (n_pushes,)."""
        return self._find_grant(self.pushes["iteration"] + 1)

    @cached_property
    def push_permit(self) -> np.ndarray:
        """Of each push: the row in `grants` that let its iteration begin, or -1. Shape (n_pushes,)."""
        return self._find_grant(self.pushes["iteration"])

    def _find_grant(self, iteration: np.ndarray) -> np.ndarray:
        keys = self.grants["iteration"] * self.n_workers + self.grants["worker"]
        return _lookup(keys, iteration * self.n_workers + self.pushes["worker"])

    @cached_property
    def may_be_cut(self) -> np.ndarray:
        """Which pushes may be of fewer local steps than granted: the last ones of workers that leave."""
        last = self.push_count == np.bincount(self.pushes["worker"], minlength=self.n_workers)[self.pushes["worker"]]
        left = self.left_event[self.pushes["worker"]] != NEVER
        return last & (left | (not self.finished))

    # ---- versions --------------------------------------------------------------------------------------------------

    @cached_property
    def applied(self) -> np.ndarray:
        """Rows in `pushes` of the applied contributions: updates consume them in this order."""
        return np.flatnonzero(self.pushes["outcome"] == APPLIED)

    @cached_property
    def applied_version(self) -> np.ndarray:
        """Of each applied push: the version that its update made. Shape (n_applied,)."""
        used = np.cumsum(self.updates["n_contributions"])
        return np.searchsorted(used, np.arange(len(self.applied)), side="right") + 1

    @cached_property
    def complete_seq(self) -> np.ndarray:
        """Of each update with all its contributions here: the last one's seq. Shape (n_complete_updates,)."""
        return self.pushes["seq"][self.applied[self._last]]

    @cached_property
    def _last(self) -> np.ndarray:
        """Of each update with all its contributions here: which of the applied is its last."""
        last = np.cumsum(self.updates["n_contributions"]) - 1
        return last[last < len(self.applied)]

    @cached_property
    def k(self) -> np.ndarray | None:
        """Of each update, and the one that was not made any more: the k that holds. None outside the k family.

        The first one is the job's; if it may change, a decision changes it for the updates after the one it follows.
        """
        paradigm = self.job.paradigm
        if not isinstance(paradigm, FirstK):
            return None
        rows = self.decisions[(self.decisions["controller"] == b"k") & isinstance(paradigm.k, str)]
        changed = np.searchsorted(self.complete_seq, rows["seq"], side="left")
        chosen = np.append(paradigm.k_at_first(self.n_workers), rows["chosen"])
        return chosen[np.searchsorted(changed, np.arange(1, len(self.updates) + 2), side="left")]

    @cached_property
    def is_short(self) -> np.ndarray:
        """Of each update with all its contributions here: whether it has fewer than k. (n_complete_updates,)."""
        n_complete = len(self._last)
        if self.k is None:
            return np.zeros(n_complete, bool)
        return self.updates["n_contributions"][:n_complete] < self.k[:n_complete]

    @cached_property
    def update_event(self) -> np.ndarray:
        """Of each update with all its contributions here: the event in whose answer it was made, as far as one can
        tell from them; NEVER for one of fewer than k when there could have been more. Shape (n_complete_updates,).

        That is the last contribution. But where k workers are counted an update has fewer when all others have left,
        and waits for that. (One of all workers may wait for it too; nothing can happen in between.)
        """
        last = self._last
        event = self.push_event[self.applied[last]].astype(np.int64)
        for row in np.flatnonzero(self.is_short):
            left = self.left_event.copy()
            if self.job.paradigm.name in DISTINCT:
                first = last[row] + 1 - self.updates["n_contributions"][row]
                left[self.pushes["worker"][self.applied[first : last[row] + 1]]] = -1
            else:
                left[:] = NEVER
            event[row] = max(event[row], left.max())
        return event

    @cached_property
    def current_version(self) -> np.ndarray:
        """Of each grant: the version that is current when it is made. Shape (n_grants,)."""
        version = self.version_at(self.grants["seq"])
        if self.grants_first:
            grant = self.push_grant[self.applied]
            version[grant[grant >= 0]] = self.applied_version[grant >= 0] - 1
        return version

    def version_at(self, seq: np.ndarray) -> np.ndarray:
        """The number of updates made before each seq."""
        made = np.append(self.events["seq"], NEVER)[np.minimum(self.update_event, len(self.events))]
        return np.searchsorted(np.maximum.accumulate(made), seq, side="left")


def _first_missing(seqs: np.ndarray) -> int:
    holes = np.flatnonzero(seqs != np.arange(1, len(seqs) + 1))
    return int(holes[0]) + 1 if len(holes) else len(seqs) + 1


def fewest(count: np.ndarray, worker: np.ndarray, event: np.ndarray, recount: Recount) -> np.ndarray:
    """After each event: the least count of a worker that has not left. Shape (n_events,).

    count, worker, event: each worker's counts 1, 2, ... and the events with which they are reached. The minimum reaches
    k with the last of the workers' k; one that leaves is not waited for any more.
    """
    n_events = len(recount.events)
    if not len(count):
        return np.zeros(n_events, np.int64)
    done = np.tile(recount.left_event, (int(count.max()), 1))
    done[count - 1, worker] = np.minimum(done[count - 1, worker], event)
    return np.searchsorted(done.max(axis=1), np.arange(n_events), side="right")


def running_count(labels: np.ndarray) -> np.ndarray:
    """For each element the number of equal ones up to and with it."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    first_of_run = np.searchsorted(ordered, ordered, side="left")
    counts = np.empty(len(labels), np.int64)
    counts[order] = np.arange(len(labels)) - first_of_run + 1
    return counts


def _lookup(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The index in `keys` (unique) of each wanted one, or -1."""
    if not len(keys):
        return np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    place = np.searchsorted(keys, wanted, sorter=order)
    found = order[np.minimum(place, len(keys) - 1)]
    return np.where(keys[found] == wanted, found, -1)
