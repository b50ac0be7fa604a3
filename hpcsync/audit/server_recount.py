"""Counting again what a trace says, from its rows alone: nothing here knows the paradigms' code.

A trace of a run that did not finish ends somewhere in the middle. Its tables end together, but a push has its row only
once it is applied or dropped, so the contributions that were pending at that moment are missing, and with them the
sense of what follows. The counts therefore stop at the first missing `seq`; that this is the tail, and not a hole, is
for `invariants` to check.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from hpcsync.config.paradigms import EasgdOptions, FirstKOptions
from hpcsync.trace.iteration_counts import NEVER, follow, running_count
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import Change, Outcome

DISTINCT = ("k-sync", "k-async")  # of the k family: those that count workers, not mini-batches
COUNTED = (*DISTINCT, "bsp", "easgd")  # whose updates may take all workers that there are


class Recount:
    """The rows of a trace up to the first missing one, and what follows from their order.

    Events are pushes, departures and returns, in the order of `seq`; index e counts them from 0.

    pushes, grants, decisions, membership: structured arrays, in the order of `seq`, with `seq` < `horizon`.
    updates, evaluations: as in the trace.
    grants_first: whether a push is granted before the update that it takes part in, so that the grant names the version
                  from which that update starts, and not the one that it makes.
    """

    def __init__(self, trace: Trace) -> None:
        self.job = trace.job
        self.finished = trace.finished
        self.n_workers = trace.n_workers
        self.grants_first = isinstance(trace.job.paradigm, EasgdOptions)
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
        """Pushes, departures and returns: `seq, now_s, worker, is_push, joins`, shape (n_events,)."""
        dtype = [("seq", "<i8"), ("now_s", "<f8"), ("worker", "<i8"), ("is_push", "?"), ("joins", "?")]
        events = np.zeros(len(self.pushes) + len(self.membership), dtype)
        for rows, is_push in ((self.pushes, True), (self.membership, False)):
            part = events[: len(self.pushes)] if is_push else events[len(self.pushes) :]
            part["seq"], part["now_s"], part["worker"] = rows["seq"], rows["now_s"], rows["worker"]
            part["is_push"], part["joins"] = is_push, False if is_push else rows["change"] == Change.JOINED
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
    def leaves(self) -> np.ndarray:
        """Which events are departures, shape (n_events,)."""
        return ~self.events["is_push"] & ~self.events["joins"]

    def left_after(self, worker: np.ndarray, event: np.ndarray) -> np.ndarray:
        """The first departure of each of these workers after these events: an index into `events`, or NEVER."""
        return _next(self.events["worker"], np.flatnonzero(self.leaves), worker, event)

    def is_active(self, worker: np.ndarray, event: np.ndarray) -> np.ndarray:
        """Whether each of these workers takes part after each of these events (-1: before all)."""
        joined = _next(self.events["worker"], np.flatnonzero(self.events["joins"]), worker, event)
        # Its next change says what it is now. One that changes no more is as its last change has left it.
        left, active = self.left_after(worker, event), np.ones(self.n_workers, bool)
        for change in np.flatnonzero(~self.events["is_push"]).tolist():
            active[self.events["worker"][change]] = self.events["joins"][change]
        return np.where((left == NEVER) & (joined == NEVER), active[worker], left < joined)

    def active(self, event: int) -> np.ndarray:
        """The workers that take part after this event, in their order."""
        workers = np.arange(self.n_workers)
        return np.flatnonzero(self.is_active(workers, np.full(self.n_workers, event)))

    @cached_property
    def n_active(self) -> np.ndarray:
        """How many workers take part after each event, and at first, at index -1. Shape (n_events + 1,)."""
        change = np.where(self.events["is_push"], 0, np.where(self.events["joins"], 1, -1))
        return self.n_workers + np.append(np.cumsum(change), 0)

    @cached_property
    def _followed(self) -> tuple[np.ndarray, np.ndarray]:
        return follow(self.n_workers, self.events, self.events["is_push"])

    @cached_property
    def push_iters(self) -> np.ndarray:
        """Of each push: how far its worker is, this one included. Shape (n_pushes,).

        That is its pushes; but a worker that joins is as far as the slowest active one, if it is not farther.
        """
        return self._followed[0][self.push_event]

    @cached_property
    def min_iters(self) -> np.ndarray:
        """After each event: how far the slowest active worker is. Shape (n_events,)."""
        return self._followed[1]

    @cached_property
    def push_lead(self) -> np.ndarray:
        """Of each push: how far its worker is ahead of the slowest active one, just after it. Shape (n_pushes,)."""
        return self.push_iters - self.min_iters[self.push_event]

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
    def answered(self) -> np.ndarray:
        """Of each grant: the last push or return of its worker before it, which it answers; an event, or -1."""
        return _last(self.events["worker"], np.flatnonzero(~self.leaves), self.grants["worker"], self.grant_event)

    @cached_property
    def grant_lead(self) -> np.ndarray:
        """Of each grant: how far its worker is ahead of the slowest active one, at that moment. Shape (n_grants,)."""
        if not len(self.events):
            return np.zeros(len(self.grants), np.int64)
        own = np.append(self._followed[0], 0)[self.answered]
        return own - np.where(self.grant_event >= 0, self.min_iters[self.grant_event], 0)

    @cached_property
    def push_grant(self) -> np.ndarray:
        """Of each push: the row in `grants` that answers it, or -1. Shape (n_pushes,)."""
        return _lookup(self.answered, self.push_event)

    @cached_property
    def push_permit(self) -> np.ndarray:
        """Of each push: the row in `grants` that let its iteration begin, or -1. Shape (n_pushes,)."""
        before = np.searchsorted(self.grants["seq"], self.pushes["seq"]) - 1
        return _last(self.grants["worker"], np.arange(len(self.grants)), self.pushes["worker"], before)

    @cached_property
    def begins_anew(self) -> np.ndarray:
        """Which pushes are of iterations that a return let begin, which was answered at once. Shape (n_pushes,)."""
        at_once = np.append(self.events["joins"], False)[self.answered] & (self.answered == self.grant_event)
        return np.append(at_once, False)[self.push_permit]

    @cached_property
    def following(self) -> np.ndarray:
        """Of each event: the next one of the same worker, or NEVER. Shape (n_events,)."""
        every = np.arange(len(self.events))
        return _next(self.events["worker"], every, self.events["worker"], every)

    @cached_property
    def is_last(self) -> np.ndarray:
        """After which events their workers leave, as far as the trace tells. Shape (n_events,)."""
        known = self.following != NEVER
        return np.where(known, self.leaves[np.where(known, self.following, 0)], not self.finished)

    @cached_property
    def may_be_cut(self) -> np.ndarray:
        """Which pushes may be of fewer local steps than granted: those after which their workers leave."""
        return self.is_last[self.push_event]

    # ---- versions --------------------------------------------------------------------------------------------------

    @cached_property
    def applied(self) -> np.ndarray:
        """Rows in `pushes` of the applied contributions: updates consume them in this order."""
        return np.flatnonzero(self.pushes["outcome"] == Outcome.APPLIED)

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
        if not isinstance(paradigm, FirstKOptions):
            return None
        rows = self.decisions[(self.decisions["controller"] == b"k") & isinstance(paradigm.k, str)]
        changed = np.searchsorted(self.complete_seq, rows["seq"], side="left")
        chosen = np.append(paradigm.k_at_first(self.n_workers), rows["chosen"])
        return chosen[np.searchsorted(changed, np.arange(1, len(self.updates) + 2), side="left")]

    @cached_property
    def update_event(self) -> np.ndarray:
        """Of each update with all its contributions here: the event in whose answer it was made, as far as one can
        tell from them; NEVER for one that lacks some when there could have been more. Shape (n_complete_updates,).

        That is the last contribution. But an update of one contribution of each of all workers, or of k of them, is
        also made without those who do not take part: it may wait until somebody leaves.
        """
        paradigm, last = self.job.paradigm, self._last
        event = self.push_event[self.applied[last]].astype(np.int64)
        lacks = np.zeros(len(last), bool)
        if self.k is not None:
            lacks = self.updates["n_contributions"][: len(last)] < self.k[: len(last)]
        if (
            paradigm.name in DISTINCT
            or paradigm.name == "bsp"
            or (isinstance(paradigm, EasgdOptions) and paradigm.synchronous)
        ):
            version = self.applied_version[self.applied_version <= len(last)] - 1
            worker = self.pushes["worker"][self.applied[: len(version)]]
            there = np.bincount(version[self.is_active(worker, event[version])], minlength=len(last))
            lacks = (there < self.n_active[event]) & (lacks | (self.k is None))
        departures = np.flatnonzero(self.leaves)
        for row in np.flatnonzero(lacks):
            first = last[row] + 1 - self.updates["n_contributions"][row]
            contributors = self.pushes["worker"][self.applied[first : last[row] + 1]]
            later = departures[departures > event[row]].tolist() if paradigm.name in COUNTED else []
            event[row] = next((e for e in later if np.isin(self.active(e), contributors).all()), NEVER)
        return event

    @cached_property
    def current_version(self) -> np.ndarray:
        """Of each grant: the version that is current when it is made. Shape (n_grants,)."""
        version = self.version_at(self.grants["seq"])
        if self.grants_first:
            # The grant that lets a contribution's worker go on. One that had left may have joined, and waited with it.
            push = self.push_event[self.applied]
            after = np.searchsorted(self.grant_event, push)
            grant = _next(
                self.grants["worker"], np.arange(len(self.grants)), self.pushes["worker"][self.applied], after - 1
            )
            known = grant != NEVER
            grant, push = grant[known], push[known]
            waited = (self.answered[grant] == push) | (self.answered[grant] != self.grant_event[grant])
            version[grant[waited]] = self.applied_version[known][waited] - 1
        return version

    def version_at(self, seq: np.ndarray) -> np.ndarray:
        """The number of updates made before each seq."""
        made = np.append(self.events["seq"], NEVER)[np.minimum(self.update_event, len(self.events))]
        return np.searchsorted(np.maximum.accumulate(made), seq, side="left")


def _first_missing(seqs: np.ndarray) -> int:
    holes = np.flatnonzero(seqs != np.arange(1, len(seqs) + 1))
    return int(holes[0]) + 1 if len(holes) else len(seqs) + 1


def _next(worker_of: np.ndarray, among: np.ndarray, worker: np.ndarray, after: np.ndarray) -> np.ndarray:
    """For each worker the first of these rows after this one that is its, or NEVER. among: ascending."""
    key, wanted, order = _keys(worker_of, among, worker, after)
    place = np.searchsorted(key, wanted, side="right")
    row = np.append(among[order], 0)[place]
    return (
        np.where((place < len(key)) & (worker_of[row] == worker), row, NEVER)
        if len(among)
        else np.full(len(wanted), NEVER)
    )


def _last(worker_of: np.ndarray, among: np.ndarray, worker: np.ndarray, upto: np.ndarray) -> np.ndarray:
    """For each worker the last of these rows, up to this one, that is its, or -1. among: ascending."""
    key, wanted, order = _keys(worker_of, among, worker, upto)
    place = np.searchsorted(key, wanted, side="right") - 1
    row = np.append(among[order], 0)[place]
    return np.where((place >= 0) & (worker_of[row] == worker), row, -1) if len(among) else np.full(len(wanted), -1)


def _keys(
    worker_of: np.ndarray, among: np.ndarray, worker: np.ndarray, row: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers that order by worker, and then by row: of these rows, ordered, and of these pairs; and their order."""
    stride = np.int64(len(worker_of) + 2)
    key = worker_of[among].astype(np.int64) * stride + among + 1
    order = np.argsort(key, kind="stable")
    return key[order], worker * stride + np.minimum(row, len(worker_of)) + 1, order


def _lookup(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The first index in `keys` of each wanted one, or -1."""
    if not len(keys):
        return np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    place = np.searchsorted(keys, wanted, sorter=order)
    found = order[np.minimum(place, len(keys) - 1)]
    return np.where(keys[found] == wanted, found, -1)
