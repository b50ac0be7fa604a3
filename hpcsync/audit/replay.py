"""Replay of a trace's events through a fresh paradigm, whose answers must equal the recorded ones.

Where batch sizes are allocated, pushes first go through a fresh allocator, as in the run.

A run ends when its stopping rule becomes true: after an update, or from outside between two events. From then on
every grant is a stop grant (zero local steps): first the paradigm's remaining grants of that answer, then one for
each other blocked worker. Further updates of that answer are not made, and the paradigm sees no later event. The trace
does not record when a rule became true, only what followed; the replay accepts exactly what can have followed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import merge
from typing import Any

import numpy as np

from hpcsync.audit.check import Check
from hpcsync.audit.server_recount import Recount
from hpcsync.core.assignments import Assignments
from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import (
    Accumulate,
    Action,
    Apply,
    Decision,
    Drop,
    Elapsed,
    Evaluated,
    Event,
    Grant,
    Joined,
    Left,
    PushInfo,
)
from hpcsync.paradigms.worker_counts import WorkerCounts
from hpcsync.planning.batch_allocation import Allocated, Estimate
from hpcsync.trace.schema import EVALUATED, EVENTS, Change, Outcome

Row = dict[str, Any]
KINDS = ("grants", "decisions", "updates")
SLICE_ROWS = 10_000  # in memory as dictionaries


class _Differs(Exception):
    """The replay and the trace differ; `kind` is one of KINDS."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def replay(recount: Recount, paradigm: Paradigm, assignments: Assignments) -> list[Check]:
    """Compare every grant, decision and update with the answers of a paradigm.

    Parameters
    ----------
    recount
        Recount of the trace.
    paradigm, assignments
        New instances for the trace's job.

    Returns
    -------
    list of Check
        One for each of grants, decisions and updates.
    """
    run = _Replay(recount, paradigm, assignments)
    differs = None
    try:
        run.run()
    except _Differs as error:
        differs = error
    checks = []
    for kind in KINDS:
        failed = differs is not None and differs.kind == kind
        detail = str(differs) if failed else "up to the first difference" if differs else ""
        checks.append(Check(f"replay gives the same {kind}", not failed, run.n_same[kind], detail))
    return checks


class _Replay:
    """A replay in progress: the recorded events and answers, and the state of the run."""

    def __init__(self, recount: Recount, paradigm: Paradigm, assignments: Assignments) -> None:
        self.n_same = dict.fromkeys(KINDS, 0)
        self._paradigm = paradigm
        self._assignments = assignments
        self._allocator = assignments.allocator
        self._finished, self._continues = recount.finished, recount.continues
        applied = recount.pushes["seq"][recount.pushes["outcome"] == Outcome.APPLIED]
        self._last_applied = int(applied.max(initial=0))
        self._updates = recount.updates["n_contributions"].tolist()
        own = list(_rows(recount.own_events))
        # The paradigm is given every evaluation until the run stops.
        judged = recount.evaluations[["version", "now_s"]].tolist()
        for row, (version, current_s) in zip(filter(_is_evaluated, own), judged, strict=False):
            row |= {"version": version, "current_s": current_s}
        tables = recount.pushes, recount.membership, recount.own_events
        seqs = np.sort(np.concatenate([table["seq"] for table in tables])).tolist()
        self._n_events = len(seqs)
        self._events = merge(_rows(recount.pushes), _rows(recount.membership), own, key=_seq)
        self._answers = _split(merge(_rows(recount.grants), _rows(recount.choices), key=_seq), seqs)
        self._version = 0
        self._stopping = False
        self._progress = WorkerCounts(recount.n_workers)
        self._pending: dict[int, Row] = {}  # contributions neither applied nor dropped
        self._accumulated: list[Row] = []  # contributions whose slots are free again
        self._blocked: dict[int, Row] = {}  # pushes and joins without a grant

    def run(self) -> None:
        """Replay all events. Raises _Differs at the first difference."""
        before = next(self._answers)
        if before:
            raise _Differs(_kind(before[0]), f"{_describe(before[0])} answers no event")
        for index, (event, answer) in enumerate(zip(self._events, self._answers, strict=True)):
            # The trace of an unfinished run may end within its last answer.
            cut = not self._finished and index == self._n_events - 1
            self._count(event)
            self._stopping = self._stopping or self._was_stopped_silently(event, answer, cut)
            if self._stopping:
                self._expect_stops(answer, cut)
            else:
                self._compare(event, answer, cut)
        self._check_end()

    def _count(self, event: Row) -> None:
        worker = event["worker"]
        if _is_evaluated(event):
            if self._stopping or not self._progress.active:
                raise _Differs("decisions", f"seq {event['seq']}: evaluated after the end of the run")
            if "version" not in event:
                raise _Differs("decisions", f"seq {event['seq']}: /evaluations lacks the evaluation")
            self.n_same["decisions"] += 1
            return
        if _is_own(event):
            due = self._paradigm.due
            if self._stopping or due is None or (due.now_s, due.worker) != (event["chosen"], worker):
                raise _Differs("decisions", f"seq {event['seq']}: at {event['chosen']} s is due: {due}")
            self.n_same["decisions"] += 1
            return
        if _joins(event) == (worker in self._progress.active):
            raise _Differs("grants", f"seq {event['seq']}: worker {worker} has {'not ' * _joins(event)}left")
        if _joins(event):
            self._progress.join(worker)
            self._blocked[worker] = event
        elif "change" in event:
            self._progress.leave(worker)
            self._blocked.pop(worker, None)
        else:
            self._progress.push(worker)
            self._assignments.pushed(worker, event["batch_size"], event["local_steps"])
            self._blocked[worker] = self._pending[worker] = event

    def _was_stopped_silently(self, event: Row, answer: list[Row], cut: bool) -> bool:
        """Return True if the run was stopped from outside while no worker was blocked that could get a stop grant."""
        if _is_own(event):
            return False
        alone = "change" not in event and self._blocked.keys() == {event["worker"]}
        stops = _is_stop(answer[0]) if answer else cut
        return alone and event["outcome"] == Outcome.DROPPED and stops

    def _was_over(self, event: Row) -> bool:
        """Return True if the run may have been over before this departure.

        It was then stopped from outside while no worker was blocked, and the departure is the first event afterwards.
        """
        return "change" in event and not self._blocked and event["seq"] > self._last_applied

    def _compare(self, event: Row, answer: list[Row], cut: bool) -> None:
        rows = iter(answer)
        can_stop = False
        for action in self._actions(event):
            match action:
                case Apply() if can_stop and self._version == len(self._updates):
                    self._stopping = True  # by the update before it in this answer
                case Apply(workers):
                    self._apply(event, workers)
                    can_stop = True
                case Accumulate(worker):
                    self._accumulated.append(self._pending.pop(worker))
                case Drop(worker):
                    self._settle(event, self._pending.pop(worker), Outcome.DROPPED)
                case Grant() | Decision():
                    row = next(rows, None)
                    if row is None:
                        if cut or self._was_over(event):
                            self._stopping = not cut
                            return
                        name = "grants" if isinstance(action, Grant) else "decisions"
                        raise _Differs(name, f"seq {event['seq']} is not answered by {action}")
                    self._same(action, row, can_stop)
        self._expect_stops(list(rows), cut)

    def _actions(self, event: Row) -> list[Action]:
        """Return the actions that the run must have taken, beginning with new batch sizes as decisions."""
        unknown = (math.nan,)
        try:
            allocated = self._allocated(event)
            actions = self._paradigm.handle(_happened(event))
        except ValueError as error:
            raise _Differs("grants", f"the paradigm rejects seq {event['seq']}: {error}") from None
        n_others = len(self._paradigm.decision_fields)
        n_own = 0 if self._allocator is None else len(self._allocator.decision_fields)
        return [
            *(
                Decision("batches", worker, float(size), (*unknown * n_others, *inputs))
                for worker, size, inputs in allocated
            ),
            *(
                action._replace(inputs=(*action.inputs, *unknown * n_own)) if isinstance(action, Decision) else action
                for action in actions
            ),
        ]

    def _allocated(self, event: Row) -> list[Allocated]:
        if self._allocator is None or _is_own(event):
            return []
        if "change" in event:
            return (self._allocator.joined if _joins(event) else self._allocator.left)(event["worker"])
        estimate = Estimate(event["predicted_fixed_s"], event["predicted_sample_s"])
        return self._allocator.pushed(event["worker"], estimate)

    def _apply(self, event: Row, workers: tuple[int, ...]) -> None:
        self._version += 1
        if self._version > len(self._updates):
            raise _Differs("updates", f"seq {event['seq']} makes version {self._version}, which is not recorded")
        taken, self._accumulated = [*self._accumulated, *(self._pending.pop(worker) for worker in workers)], []
        recorded = self._updates[self._version - 1]
        if recorded != len(taken):
            detail = f"version {self._version} has {recorded} contributions, the replay gives {len(taken)}"
            raise _Differs("updates", detail)
        for push in taken:
            self._settle(event, push, Outcome.APPLIED)
        self.n_same["updates"] += 1

    def _settle(self, event: Row, push: Row, outcome: int) -> None:
        if push["outcome"] != outcome:
            names = ("applied", "dropped")
            detail = f"the push of seq {push['seq']} is {names[push['outcome']]}, in the replay it is {names[outcome]}"
            raise _Differs("updates", f"{detail} at seq {event['seq']}")

    def _same(self, action: Grant | Decision, row: Row, can_stop: bool) -> None:
        kind = "decisions" if isinstance(action, Decision) else "grants"
        if kind != _kind(row):
            raise _Differs(kind, f"{_describe(row)}: the replay gives {action}")
        if isinstance(action, Decision):
            others = () if self._allocator is None else self._allocator.decision_fields
            names = ("controller", "worker", "chosen", *self._paradigm.decision_fields, *others)
            expected = (action.controller, action.worker, action.chosen, *action.inputs)
            self._equal("decisions", row, tuple(row.get(name) for name in names), expected)
            self.n_same["decisions"] += 1
            return
        stops = _is_stop(row)
        if stops and not (can_stop or self._stopping):
            raise _Differs("grants", f"{_describe(row)} is a stop grant, but no update can have ended the run there")
        if self._stopping and not stops:
            raise _Differs("grants", f"{_describe(row)} lets a worker continue after the end of the run")
        self._stopping = stops
        self._grant(row, action)

    def _expect_stops(self, answer: list[Row], cut: bool) -> None:
        """Compare the rest of an answer: nothing, or a stop grant for each blocked worker."""
        for row in answer:
            blocked = self._blocked.get(row["worker"])
            if blocked is None or not _is_stop(row):
                raise _Differs(_kind(row), f"{_describe(row)} answers no event")
            self._stopping = True
            iteration, gap_iters = self._progress.pushes[row["worker"]] + 1, self._progress.lead(row["worker"])
            held_s = row["now_s"] - blocked["now_s"]
            self._grant(row, Grant(row["worker"], iteration, gap_iters=gap_iters, held_s=held_s))
        if self._stopping and self._blocked and not cut:
            push = next(iter(self._blocked.values()))
            raise _Differs("grants", f"the run is over, but the push of seq {push['seq']} has no stop grant")

    def _grant(self, row: Row, grant: Grant) -> None:
        of_version = grant._replace(version=self._version)
        grant = of_version.stop() if self._stopping else self._assignments.next(grant, self._version)
        self._equal("grants", row, tuple(row[name] for name in Grant._fields), grant)
        del self._blocked[row["worker"]]
        self.n_same["grants"] += 1

    def _equal(self, kind: str, row: Row, recorded: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
        # NaN means unknown and equals itself here.
        if any(a != b and (a == a or b == b) for a, b in zip(recorded, expected, strict=True)):
            raise _Differs(kind, f"{_describe(row)}: recorded {recorded}, the replay gives {expected}")

    def _check_end(self) -> None:
        extra = len(self._updates) - self._version
        if extra > (0 if self._finished else 1):
            raise _Differs("updates", f"version {self._version + 1} is recorded, but the replay does not make it")
        # Pending contributions are dropped, unless the trace ends within the rows of their update, or before it.
        for push in [*self._accumulated, *self._pending.values()]:
            if push["outcome"] == Outcome.APPLIED and not (extra or self._continues):
                raise _Differs("updates", f"the push of seq {push['seq']} is applied, the replay never applies it")


def _rows(table: Any) -> Iterator[Row]:
    """Yield the rows as dictionaries of Python numbers, which are much faster to read one by one."""
    names = table.dtype.names
    for begin in range(0, len(table), SLICE_ROWS):
        for values in table[begin : begin + SLICE_ROWS].tolist():
            row = dict(zip(names, values, strict=True))
            if "controller" in row:
                row["controller"] = row["controller"].decode()
            yield row


def _split(rows: Iterator[Row], seqs: list[int]) -> Iterator[list[Row]]:
    """Yield the rows before the first seq, then those between each seq and the next."""
    row = next(rows, None)
    for seq in [*seqs, math.inf]:
        found = []
        while row is not None and row["seq"] < seq:
            found.append(row)
            row = next(rows, None)
        yield found


def _seq(row: Row) -> int:
    return int(row["seq"])


def _happened(event: Row) -> Event:
    if "change" in event:
        return (Joined if _joins(event) else Left)(event["now_s"], event["worker"])
    if _is_evaluated(event):
        return Evaluated(event["now_s"], event["worker"], event["chosen"], event["version"], event["current_s"])
    if _is_own(event):
        return Elapsed(event["now_s"], event["worker"])
    return PushInfo(*(event[name] for name in PushInfo._fields))


def _is_own(row: Row) -> bool:
    """Return whether a row of /decisions is an event: a time that elapsed, or an evaluation."""
    return row.get("controller") in EVENTS


def _is_evaluated(row: Row) -> bool:
    return row.get("controller") == EVALUATED


def _joins(event: Row) -> bool:
    return event.get("change") == Change.JOINED


def _is_stop(row: Row) -> bool:
    return row.get("local_steps") == 0


def _kind(row: Row) -> str:
    return "decisions" if "controller" in row else "grants"


def _describe(row: Row) -> str:
    kind = "decision for" if "controller" in row else "grant to"
    return f"{kind} worker {row['worker']}, seq {row['seq']}"
