"""Recount of a trace with servers from its rows alone, without the paradigms' code.

The trace of an unfinished run ends at an arbitrary point. Its tables end together, but a push gets its row only
when it is applied or dropped. Contributions that were pending at the end are therefore missing, and the rows that
follow them cannot be interpreted (these may be many where a push waits while others are applied). The counts stop at
the first missing `seq`; `invariants` checks that the rest is the end of the trace and not a gap.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from hpcsync.audit.check import Part
from hpcsync.audit.clock_errors import clock_errors_s
from hpcsync.paradigms.records import UNTIL
from hpcsync.trace.iteration_counts import NEVER, follow, running_count
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import ELAPSED, EVALUATED, EVENTS, Change, Outcome, Rows

NUMBERED = ("pushes", "grants", "decisions", "membership")  # tables with a `seq`


class Recount:
    """Rows of a trace up to the first missing one, and quantities that follow from their order.

    Events are pushes, departures and joins in the order of `seq`, with indices from 0.

    Attributes
    ----------
    trace
        The trace.
    pushes, grants, decisions, membership
        Structured arrays in the order of `seq`, with `seq` < `horizon`.
    updates, evaluations
        As in the trace.
    horizon
        First missing `seq`; NEVER in a finished trace.
    continues
        True if an unfinished trace has later rows of workers that continued while a push waited to be applied. Its
        updates and evaluations then are those before the horizon.
    grants_first
        True if a push is granted before the update that it takes part in. The grant then names the version from which
        that update starts, not the one that it makes.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.job = trace.job
        self.finished = trace.finished
        self.n_workers = trace.n_workers
        self.grants_first = trace.job.paradigm.grants_first
        tables = trace.tables
        numbered = [tables[name] for name in NUMBERED]
        self.seqs = np.sort(np.concatenate([table["seq"] for table in numbered]))
        self.horizon = NEVER if trace.finished else _first_missing(self.seqs)
        kept = [table[table["seq"] < self.horizon] for table in numbered]
        self.pushes, self.grants, self.decisions, self.membership = (
            table[np.argsort(table["seq"], kind="stable")] for table in kept
        )
        self.updates, self.evaluations = tables["updates"], tables["evaluations"]
        self.continues = trace.job.paradigm.applies_at_release and self.horizon <= int(self.seqs.max(initial=0))
        if self.continues:  # where each update is of one push
            self.updates = self.updates[: len(self.applied)]
            self.evaluations = self.evaluations[self.evaluations["version"] <= len(self.updates)]

    def push_name(self, row: int) -> str:
        """Return the name of a push for messages."""
        push = self.pushes[row]
        return f"push of worker {push['worker']}, iteration {push['iteration']}, seq {push['seq']}"

    def grant_name(self, row: int) -> str:
        """Return the name of a grant for messages."""
        grant = self.grants[row]
        return f"grant to worker {grant['worker']}, iteration {grant['iteration']}, seq {grant['seq']}"

    # ---- events ----------------------------------------------------------------------------------------------------

    @cached_property
    def events(self) -> Rows:
        """Pushes, departures and joins: `seq, now_s, worker, is_push, joins`, shape (n_events,)."""
        dtype = [("seq", "<i8"), ("now_s", "<f8"), ("worker", "<i8"), ("is_push", "?"), ("joins", "?")]
        events = np.zeros(len(self.pushes) + len(self.membership), dtype)
        for rows, is_push in ((self.pushes, True), (self.membership, False)):
            part = events[: len(self.pushes)] if is_push else events[len(self.pushes) :]
            part["seq"], part["now_s"], part["worker"] = rows["seq"], rows["now_s"], rows["worker"]
            part["is_push"], part["joins"] = is_push, False if is_push else rows["change"] == Change.JOINED
        return events[np.argsort(events["seq"], kind="stable")]

    @cached_property
    def _is_choice(self) -> Rows:
        return ~np.isin(self.decisions["controller"], [name.encode() for name in EVENTS])

    @cached_property
    def choices(self) -> Rows:
        """Rows of /decisions that are choices of controllers."""
        return self.decisions[self._is_choice]

    @cached_property
    def own_events(self) -> Rows:
        """Rows of /decisions that are events: times that a paradigm set, and evaluations that it uses."""
        return self.decisions[~self._is_choice]

    @cached_property
    def evaluated(self) -> Rows:
        """Rows of /decisions for evaluations that the paradigm uses."""
        return self.decisions[self.decisions["controller"] == EVALUATED.encode()]

    def event_at(self, seq: Rows) -> Rows:
        """Return the last event before each seq, as an index into `events`; -1 if there is none."""
        return np.searchsorted(self.events["seq"], seq, side="left") - 1

    @cached_property
    def push_event(self) -> Rows:
        """Index into `events` of each push, shape (n_pushes,)."""
        return np.flatnonzero(self.events["is_push"])

    @cached_property
    def push_count(self) -> Rows:
        """Number of pushes of the worker up to and including each push, shape (n_pushes,)."""
        return running_count(self.pushes["worker"])

    @cached_property
    def leaves(self) -> Rows:
        """Events that are departures, bool of shape (n_events,)."""
        return ~self.events["is_push"] & ~self.events["joins"]

    def left_after(self, worker: Rows, event: Rows) -> Rows:
        """Return each worker's first departure after an event, as an index into `events`, or NEVER."""
        return next_of(self.events["worker"], np.flatnonzero(self.leaves), worker, event)

    def is_active(self, worker: Rows, event: Rows) -> Rows:
        """Return whether each worker is active after an event (-1: before all events)."""
        change = last_of(self.events["worker"], self._changes, worker, event)
        return self._joins[change]

    @cached_property
    def _changes(self) -> Rows:
        """Events that are departures and joins, as indices into `events`."""
        return np.flatnonzero(~self.events["is_push"])

    @cached_property
    def _joins(self) -> Rows:
        """Events that are joins; at index -1 True, as all workers are active before their first change."""
        return np.append(self.events["joins"], True)

    def active(self, event: int) -> Rows:
        """Return the workers that are active after this event, ascending."""
        workers = np.arange(self.n_workers)
        return np.flatnonzero(self.is_active(workers, np.full(self.n_workers, event)))

    @cached_property
    def n_active(self) -> Rows:
        """Number of active workers after each event, and at index -1 before all events; shape (n_events + 1,)."""
        change = np.where(self.events["is_push"], 0, np.where(self.events["joins"], 1, -1))
        return self.n_workers + np.append(np.cumsum(change), 0)

    @cached_property
    def _followed(self) -> tuple[Rows, Rows]:
        return follow(self.n_workers, self.events, self.events["is_push"])

    @cached_property
    def push_iters(self) -> Rows:
        """Iteration count of the worker after each push, shape (n_pushes,).

        It is the number of its pushes; a join raises it to the count of the slowest active worker.
        """
        return self._followed[0][self.push_event]

    @cached_property
    def min_iters(self) -> Rows:
        """Iteration count of the slowest active worker after each event, shape (n_events,)."""
        return self._followed[1]

    @cached_property
    def push_lead(self) -> Rows:
        """Lead of the worker over the slowest active one right after each push, shape (n_pushes,)."""
        return self.push_iters - self.min_iters[self.push_event]

    # ---- grants ----------------------------------------------------------------------------------------------------

    @cached_property
    def is_stop(self) -> Rows:
        """Stop grants, bool of shape (n_grants,)."""
        return self.grants["local_steps"] == 0

    @cached_property
    def stop_seq(self) -> int:
        """`seq` of the first stop grant, or NEVER."""
        stops = self.grants["seq"][self.is_stop]
        return int(stops[0]) if len(stops) else NEVER

    @cached_property
    def grant_event(self) -> Rows:
        """Event in whose answer each grant was made, shape (n_grants,)."""
        return self.event_at(self.grants["seq"])

    @cached_property
    def grant_count(self) -> Rows:
        """Number of pushes of the worker before each grant, shape (n_grants,)."""
        before = np.searchsorted(self.pushes["seq"], self.grants["seq"]) - 1
        last = last_of(self.pushes["worker"], np.arange(len(self.pushes)), self.grants["worker"], before)
        return np.append(self.push_count, 0)[last]  # row -1, none before, is the 0

    @cached_property
    def answered(self) -> Rows:
        """Event that each grant answers: the worker's last push or join before it, or -1; shape (n_grants,)."""
        return last_of(self.events["worker"], np.flatnonzero(~self.leaves), self.grants["worker"], self.grant_event)

    @cached_property
    def grant_lead(self) -> Rows:
        """Lead of the worker over the slowest active one at each grant, shape (n_grants,)."""
        if not len(self.events):
            return np.zeros(len(self.grants), np.int64)
        own = np.append(self._followed[0], 0)[self.answered]
        return own - np.where(self.grant_event >= 0, self.min_iters[self.grant_event], 0)

    @cached_property
    def push_grant(self) -> Rows:
        """Row in `grants` that answers each push, or -1; shape (n_pushes,)."""
        return _lookup(self.answered, self.push_event)

    @cached_property
    def push_permit(self) -> Rows:
        """Row in `grants` that started the iteration of each push, or -1; shape (n_pushes,)."""
        before = np.searchsorted(self.grants["seq"], self.pushes["seq"]) - 1
        return last_of(self.grants["worker"], np.arange(len(self.grants)), self.pushes["worker"], before)

    @cached_property
    def begins_anew(self) -> Rows:
        """Pushes of iterations that started with a grant given at once to a join, bool of shape (n_pushes,)."""
        at_once = np.append(self.events["joins"], False)[self.answered] & (self.answered == self.grant_event)
        return np.append(at_once, False)[self.push_permit]

    @cached_property
    def following(self) -> Rows:
        """Next event of the same worker after each event, or NEVER; shape (n_events,)."""
        every = np.arange(len(self.events))
        return next_of(self.events["worker"], every, self.events["worker"], every)

    @cached_property
    def is_last(self) -> Rows:
        """Events after which the worker leaves, or may leave in an unfinished trace; bool of shape (n_events,)."""
        known = self.following != NEVER
        return np.where(known, self.leaves[np.where(known, self.following, 0)], not self.finished)

    @cached_property
    def may_be_cut(self) -> Rows:
        """Pushes that may have fewer local steps than granted, because their workers leave afterwards."""
        return self.is_last[self.push_event]

    def in_force(self, controller: str, worker: Rows, seq: Rows, first: Rows | float) -> Rows:
        """Return what a controller last chose for each worker before each seq.

        Parameters
        ----------
        controller
            Name in the column `controller` of /decisions.
        worker, seq
            Shape (n,).
        first
            Value before the controller's first choice, for all or of shape (n,).
        """
        rows = self.decisions[self.decisions["controller"] == controller.encode()]
        last = last_of(rows["worker"], np.arange(len(rows)), worker, np.searchsorted(rows["seq"], seq) - 1)
        return np.where(last >= 0, np.append(rows["chosen"], np.nan)[last], first)

    @cached_property
    def switch_seq(self) -> int:
        """`seq` of the decision with which a second paradigm begins, or NEVER."""
        rows = self.decisions[self.decisions["controller"] == b"switch"]
        return int(rows["seq"][0]) if len(rows) else NEVER

    @cached_property
    def clock_error_s(self) -> Rows:
        """Largest error of each push's times on the deciding server's clock, in seconds; shape (n_pushes,)."""
        clocks, n_servers = self.trace.tables["clocks"], self.job.cluster.servers
        return clock_errors_s(clocks, n_servers, self.pushes["worker"], self.pushes["now_s"])

    # ---- versions --------------------------------------------------------------------------------------------------

    @cached_property
    def applied_after(self) -> Rows:
        """`seq` of the row after which each push is applied, if it is: its own, or the one before a later grant.

        Where pushes are applied when their workers are released, it is the row before a blocked worker's grant, or that
        of its departure. In an unfinished trace that grant may be missing at the end, or come after the horizon. Shape
        (n_pushes,).
        """
        own, grant, event = self.pushes["seq"], self.push_grant, self.push_event
        if not self.job.paradigm.applies_at_release:
            return own
        last, last_seq = len(self.events) - 1, int(self.seqs.max(initial=0))
        departure = np.minimum(self.left_after(self.pushes["worker"], event), len(self.events))
        released = np.append(self.grants["seq"] - 1, NEVER)[grant]
        released = np.where(grant >= 0, released, np.append(self.events["seq"], last_seq)[departure])
        at_once = np.append(self.grant_event, NEVER if self.continues else last)[grant] == event  # -1: no grant
        return np.where(at_once, own, released)

    @cached_property
    def applied(self) -> Rows:
        """Rows in `pushes` of applied contributions, in the order in which updates consume them."""
        rows = np.flatnonzero((self.pushes["outcome"] == Outcome.APPLIED) & (self.applied_after < self.horizon))
        return rows[np.argsort(self.applied_after[rows], kind="stable")]

    @cached_property
    def settled(self) -> Rows:
        """Pushes that are dropped, or applied before the horizon, bool of shape (n_pushes,)."""
        settled = self.pushes["outcome"] == Outcome.DROPPED
        settled[self.applied] = True
        return settled

    @cached_property
    def applied_version(self) -> Rows:
        """Version made by the update of each applied push, shape (n_applied,)."""
        used = np.cumsum(self.updates["n_contributions"])
        return np.searchsorted(used, np.arange(len(self.applied)), side="right") + 1

    @cached_property
    def complete_seq(self) -> Rows:
        """`seq` of the last contribution of each complete update, shape (n_complete_updates,)."""
        return self.pushes["seq"][self.applied[self._last]]

    @cached_property
    def _last(self) -> Rows:
        """Index into `applied` of the last contribution of each complete update."""
        last = np.cumsum(self.updates["n_contributions"]) - 1
        return last[last < len(self.applied)]

    @cached_property
    def k(self) -> Rows | None:
        """Value of k for each update and for the one after the last, or None outside the k family.

        The first value is the job's. If k may change, a decision sets it for the updates after the one that it follows.
        """
        paradigm = self.job.paradigm
        if (k_at_first := paradigm.k_at_first(self.n_workers)) is None:
            return None
        rows = self.decisions[(self.decisions["controller"] == b"k") & bool(paradigm.k_rules)]
        changed = np.searchsorted(self.complete_seq, rows["seq"], side="left")
        chosen = np.append(k_at_first, rows["chosen"])
        return chosen[np.searchsorted(changed, np.arange(1, len(self.updates) + 2), side="left")]

    @cached_property
    def update_event(self) -> Rows:
        """Event in whose answer each complete update was made, shape (n_complete_updates,).

        It is the update's last contribution, with one exception. An update of one contribution of every worker, or of k
        workers, is also made without inactive workers, so it may have waited for a departure. NEVER if an update lacks
        contributions that could still have come. Where contributors wait for the update, their grants tell the event.
        """
        paradigm, last = self.job.paradigm, self._last
        event = self.push_event[self.applied[last]].astype(np.int64)
        if paradigm.waits_for_update:
            return self._event_of_grants(event)
        lacks = np.zeros(len(last), bool)
        if self.k is not None:
            lacks = self.updates["n_contributions"][: len(last)] < self.k[: len(last)]
        if paradigm.counts_workers:
            version = self.applied_version[self.applied_version <= len(last)] - 1
            worker = self.pushes["worker"][self.applied[: len(version)]]
            there = np.bincount(version[self.is_active(worker, event[version])], minlength=len(last))
            lacks = (there < self.n_active[event]) & (lacks | (self.k is None)) & (self.complete_seq < self.switch_seq)
        departures = np.flatnonzero(self.leaves)
        for row in np.flatnonzero(lacks):
            first = last[row] + 1 - self.updates["n_contributions"][row]
            contributors = self.pushes["worker"][self.applied[first : last[row] + 1]]
            later = departures[departures > event[row]].tolist() if paradigm.counts_workers else []
            event[row] = next((e for e in later if np.isin(self.active(e), contributors).all()), NEVER)
        return event

    def _event_of_grants(self, event: Rows) -> Rows:
        """Return the event in whose answer contributors are granted, for each complete update.

        If none is granted, since all have left, it is the first event at the update's time.

        Parameters
        ----------
        event
            The update's last contribution.
        """
        grant = self.push_grant[self.applied]
        granted = np.where(grant >= 0, np.append(self.grant_event, 0)[grant], NEVER)
        made = np.full(len(event), NEVER)
        known = self.applied_version <= len(event)
        np.minimum.at(made, self.applied_version[known] - 1, granted[known])
        for update in np.flatnonzero(made == NEVER):
            now_s = self.events["now_s"][event[update] :]
            same = np.flatnonzero(now_s == self.updates["now_s"][update])
            made[update] = event[update] + (same[0] if len(same) else 0)
        return made

    @cached_property
    def current_version(self) -> Rows:
        """Version that is current when each grant is made, shape (n_grants,)."""
        version = self.version_at(self.grants["seq"])
        if self.grants_first:
            # Find the grant after which the contributing worker continues. A worker that had left may have joined again
            # and been blocked with this contribution.
            push = self.push_event[self.applied]
            after = np.searchsorted(self.grant_event, push)
            grant = next_of(
                self.grants["worker"], np.arange(len(self.grants)), self.pushes["worker"][self.applied], after - 1
            )
            known = grant != NEVER
            grant, push = grant[known], push[known]
            waited = (self.answered[grant] == push) | (self.answered[grant] != self.grant_event[grant])
            version[grant[waited]] = self.applied_version[known][waited] - 1
        return version

    def version_at(self, seq: Rows) -> Rows:
        """Return the number of updates made before each seq."""
        return np.searchsorted(np.maximum.accumulate(self.update_seq), seq, side="left")

    @cached_property
    def update_seq(self) -> Rows:
        """`seq` of the row in whose answer each complete update was made, shape (n_complete_updates,); or NEVER.

        The row is an event, or a time that elapsed (a row of /decisions). Where an answer may make several updates, it
        is the row after which each is made.
        """
        if self.job.paradigm.applies_at_release:
            return self.applied_after[self.applied[self._last]]
        made = np.append(self.events["seq"], NEVER)[np.minimum(self.update_event, len(self.events))]
        rows = self.decisions[self.decisions["controller"] == ELAPSED.encode()]
        update = np.searchsorted(self.complete_seq, rows["seq"]) - 1  # the latest whose contributions are all there
        rows, update = rows[update >= 0], update[update >= 0]
        there = self.updates["now_s"][update] == rows["now_s"]
        made[update[there]] = rows["seq"][there]
        return made


def _first_missing(seqs: Rows) -> int:
    holes = np.flatnonzero(seqs != np.arange(1, len(seqs) + 1))
    return int(holes[0]) + 1 if len(holes) else len(seqs) + 1


def next_of(worker_of: Rows, among: Rows, worker: Rows, after: Rows) -> Rows:
    """Return the first of the rows `among` after each `after` that is the worker's, or NEVER. among: ascending."""
    return _beside(worker_of, among, worker, after, 0, NEVER)


def other_steps(recount: Recount, first: int) -> Part:
    """Return which pushes do not have the granted local steps; what a departure or the end cuts short may have fewer.

    Parameters
    ----------
    first
        Local steps of a push without a grant; UNTIL, as in a grant: as many as fit into a time.
    """
    pushes = recount.pushes
    made, granted = pushes["local_steps"], np.append(recount.grants["local_steps"], first)[recount.push_permit]
    cut = recount.may_be_cut | (pushes["outcome"] == Outcome.DROPPED)
    return (
        (granted != UNTIL) & ((made > granted) | ((made < granted) & ~cut)),
        lambda i: f"{recount.push_name(i)} has {made[i]} local steps, granted {granted[i]}",
    )


def last_of(worker_of: Rows, among: Rows, worker: Rows, upto: Rows) -> Rows:
    """Return the last of the rows `among` up to each `upto` that is the worker's, or -1. among: ascending."""
    return _beside(worker_of, among, worker, upto, -1, -1)


def _beside(worker_of: Rows, among: Rows, worker: Rows, row: Rows, offset: int, otherwise: int) -> Rows:
    """Return the worker's row at this offset from its first one after each `row`; `otherwise` if there is none."""
    stride = len(worker_of) + 2
    ordered = among[np.argsort(worker_of[among], kind="stable")]  # by worker, then by row
    keys = worker_of[ordered].astype(np.int64) * stride + ordered
    wanted = worker.astype(np.int64) * stride + np.minimum(row, len(worker_of))
    place = np.searchsorted(keys, wanted, side="right") + offset
    own = np.append(worker_of[ordered], -1)[place] == worker
    return np.where(own, np.append(ordered, otherwise)[place], otherwise)


def _lookup(keys: Rows, wanted: Rows) -> Rows:
    """Return the first index in `keys` of each wanted key, or -1."""
    if not len(keys):
        return np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    place = np.searchsorted(keys, wanted, sorter=order)
    found = order[np.minimum(place, len(keys) - 1)]
    return np.where(keys[found] == wanted, found, -1)
