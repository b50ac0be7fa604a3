"""Checkpoints under pushes, departures, joins, deaths and resumed runs in any order: no message is lost or repeated."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpcsync.config.checkpoint import Checkpoint
from hpcsync.mpi.rank0.checkpointing import Checkpointer, Record
from hpcsync.mpi.transport.messages import InfoKind
from hpcsync.run_dir.checkpoint import RUN
from hpcsync.system.signals import Suspended
from tests.stateful import STATEFUL, assert_caught

EVERY = 4  # updates between two checkpoints
SERVERS = 2  # ranks 0 and 1; worker w is rank SERVERS + w


class Folder:
    """The checkpoints of a run, in memory."""

    def __init__(self) -> None:
        self.resumed: Path | None = None
        self.unfinished: dict[int, dict[str, Any]] = {}
        self.finished: dict[int, dict[str, Any]] = {}

    def begin(self, number: int) -> None:
        assert self.unfinished.keys() <= {number}, "two checkpoints are unfinished"
        assert number == len(self.finished) + 1, f"checkpoint {number} after {len(self.finished)}"
        self.unfinished[number] = {}

    def write(self, number: int, name: str, state: Mapping[str, Any]) -> None:
        assert number in self.unfinished, f"checkpoint {number} has not begun"
        self.unfinished[number][name] = copy.deepcopy(dict(state))

    def commit(self, number: int) -> None:
        self.finished[number] = self.unfinished.pop(number)


@dataclass
class Server:
    """What server 0 knows of the workers. A worker's push is answered at once or, with a barrier, by the last one."""

    active: set[int]
    handled: dict[int, int]  # messages of each worker
    barrier: bool
    blocked: set[int] = field(default_factory=set)
    updates: int = 0

    def handle(self, kind: InfoKind, worker: int) -> set[int]:
        """Return the workers that may continue."""
        self.handled[worker] += 1
        if kind == InfoKind.LEFT:
            self.active.discard(worker)
            self.blocked.discard(worker)
        elif kind == InfoKind.JOINED:
            self.active.add(worker)
            return {worker}
        else:
            self.updates += 1
            if not self.barrier:
                return {worker}
            self.blocked.add(worker)
        released = self.blocked if self.blocked == self.active else set()
        self.blocked = self.blocked - released
        return released

    def computing(self) -> set[int]:
        return self.active - self.blocked


class Messages(RuleBasedStateMachine):
    """Workers that send numbered messages to server 0, whose loop is that of `mpi/server/leader.py`."""

    saver_class = Checkpointer

    @initialize(n_workers=st.integers(1, 3), barrier=st.booleans())
    def begin(self, n_workers: int, barrier: bool) -> None:
        self.workers = range(n_workers)
        self.folder = Folder()
        self.doing = ["computing"] * n_workers  # or waiting, away, dead
        self.sent = [0] * n_workers  # messages
        self.server = Server(set(self.workers), dict.fromkeys(self.workers, 0), barrier)
        self.start(())

    def start(self, unheard: Iterable[Record]) -> None:
        """Start the run, or resume it."""
        self.under_way: deque[Record] = deque()
        self.removed: set[int] = set()  # workers whose death the server has handled
        self.to_save: set[int] = set()  # ranks that have been asked to
        self.suspended = False
        settings = Checkpoint(seconds=0, updates=EVERY)
        self.saver = self.saver_class(
            self.folder, settings, lambda: {"server": self.server}, unheard, 0.0, self.server.updates, self.removed
        )

    def those(self, doing: str) -> list[int]:
        return [worker for worker in self.workers if self.doing[worker] == doing]

    # ---- workers ----

    def send(self, kind: InfoKind, worker: int, doing: str) -> None:
        self.sent[worker] += 1
        self.under_way.append((kind, worker, self.sent[worker]))
        self.doing[worker] = doing

    @precondition(lambda self: self.those("computing"))
    @rule(number=st.integers(0, 5))
    def pushes(self, number: int) -> None:
        computing = self.those("computing")
        self.send(InfoKind.PUSHED, computing[number % len(computing)], "waiting")

    @precondition(lambda self: self.those("computing"))
    @rule(number=st.integers(0, 5))
    def leaves(self, number: int) -> None:
        computing = self.those("computing")
        self.send(InfoKind.LEFT, computing[number % len(computing)], "away")

    @precondition(lambda self: self.those("away"))
    @rule(number=st.integers(0, 5))
    def joins(self, number: int) -> None:
        away = self.those("away")
        self.send(InfoKind.JOINED, away[number % len(away)], "waiting")

    @precondition(lambda self: self.to_save)
    @rule(number=st.integers(0, 5))
    def saves(self, number: int) -> None:
        rank = sorted(self.to_save)[number % len(self.to_save)]
        self.to_save.remove(rank)
        worker = rank - SERVERS
        if worker < 0:
            self.folder.write(self.saver.number, "server", {})
        elif self.doing[worker] == "dead":
            return
        else:
            state = {"doing": self.doing[worker], "sent": self.sent[worker]}
            self.folder.write(self.saver.number, f"worker {worker}", state)
        self.under_way.append((InfoKind.SAVED, rank, 0))

    @precondition(lambda self: len(self.those("dead")) < len(self.workers) - 1)
    @rule(number=st.integers(0, 5))
    def dies(self, number: int) -> None:
        living = sorted(set(self.workers) - set(self.those("dead")))
        self.doing[living[number % len(living)]] = "dead"  # its messages are still under way

    # ---- server 0 ----

    @precondition(lambda self: not self.suspended and not self.saver.holding and not self.saver.suspending)
    @rule(suspending=st.sampled_from([False, False, False, True]))
    def is_signalled(self, suspending: bool) -> None:
        self.saver.ask(suspending=suspending)

    @precondition(lambda self: not self.suspended)
    @rule(times=st.integers(1, 9), slow=st.sampled_from([None, 1, 2, 3, 4]))
    def serves(self, times: int, slow: int | None) -> None:
        """Run the loop a few times, while the messages of rank `slow` have not arrived yet."""
        for _ in range(times):
            try:
                record = self.next_record(self.poll(slow))
            except Suspended:
                self.suspended = True
                return
            if record is not None:
                self.handle(*record)
            else:
                self.remove_dead()

    def newly_dead(self) -> set[int]:
        return set(self.those("dead")) - self.removed

    def poll(self, slow: int | None) -> Record | None:
        arrived = (record for record in self.under_way if self.rank_of(record) != slow)
        record = next(arrived, None)
        if record is not None:
            self.under_way.remove(record)
        return record

    def rank_of(self, record: Record) -> int:
        return record[1] if record[0] == InfoKind.SAVED else SERVERS + record[1]

    def next_record(self, record: Record | None) -> Record | None:
        saver = self.saver
        if not (saver.holding or self.newly_dead()):
            saver.hold_if_due(0.0, self.server.updates)
        if saver.holding:
            if record is not None and record[0] == InfoKind.SAVED:
                saver.saved(record[1])
            elif record is not None and not saver.keeps_back(record):
                return record
            self.save()
            return None
        if saver.unheard:
            if record is not None:
                saver.unheard.append(record)
            return saver.unheard.popleft()
        return record

    def save(self) -> None:
        if self.saver.can_begin(self.server.computing()):
            ranks = {1, *(SERVERS + worker for worker in set(self.workers) - self.removed)}
            self.saver.begin(ranks)
            self.to_save = ranks
        number = len(self.folder.finished) + 1
        committed = True
        try:
            committed = self.saver.commit_if_complete()
        finally:
            assert (number in self.folder.finished) == committed
            if committed:
                self.assert_complete(self.folder.finished[number])

    def handle(self, kind: InfoKind, worker: int, number: int) -> None:
        if kind == InfoKind.SAVED or worker in self.removed:
            return
        assert not self.saver.holding, "a message is handled during a checkpoint"
        assert number == self.server.handled[worker] + 1, f"message {number} of worker {worker} is lost or repeated"
        self.go_on(self.server.handle(kind, worker))

    def go_on(self, released: set[int]) -> None:
        for worker in released - set(self.those("dead")):
            assert self.doing[worker] == "waiting", f"worker {worker} is answered, but is {self.doing[worker]}"
            self.doing[worker] = "computing"

    def remove_dead(self) -> None:
        for worker in self.newly_dead():
            if self.saver.holding:
                self.saver.lost(SERVERS + worker)
                continue
            self.removed.add(worker)
            if worker in self.server.active:
                self.go_on(self.server.handle(InfoKind.LEFT, worker))

    # ---- what must hold ----

    @invariant()
    def no_message_is_lost_or_repeated(self) -> None:
        unhandled = [*self.saver.unheard, *self.under_way]
        for worker in set(self.workers) - set(self.those("dead")):
            numbers = [number for kind, of, number in unhandled if of == worker and kind != InfoKind.SAVED]
            expected = list(range(self.server.handled[worker] + 1, self.sent[worker] + 1))
            assert numbers == expected, f"unhandled messages of worker {worker} are {numbers}, not {expected}"

    @invariant()
    def an_abandoned_checkpoint_leaves_nothing(self) -> None:
        assert self.saver.holding or self.saver.number == len(self.folder.finished), "the number of one abandoned"

    def assert_complete(self, checkpoint: dict[str, Any]) -> None:
        """Assert that the run can be resumed from a checkpoint that has just been finished."""
        workers = set(self.workers) - self.removed
        assert checkpoint.keys() == {RUN, "server", *(f"worker {worker}" for worker in workers)}, "parts are missing"
        unheard, server = checkpoint[RUN]["unheard"], checkpoint[RUN]["server"]
        strangers = {worker for _, worker, _ in unheard} - workers
        assert not strangers, f"messages of the dead workers {strangers} would be handled"
        for worker in workers:
            state = checkpoint[f"worker {worker}"]
            mine = [number for _, of, number in unheard if of == worker]
            assert state["doing"] in ("waiting", "away"), f"worker {worker} was {state['doing']} when it saved"
            assert mine[: 1 + state["sent"] - server.handled[worker]] == mine, "more than one message of a worker"
            answer_due = bool(mine) or worker in server.blocked
            assert state["doing"] == "away" or answer_due, f"worker {worker} would wait for ever"

    @precondition(lambda self: self.folder.finished)
    @rule()
    def is_killed_and_resumes(self) -> None:
        number = max(self.folder.finished)
        checkpoint = copy.deepcopy(self.folder.finished[number])
        self.folder.resumed = Path(str(number))
        self.server, unheard = checkpoint[RUN]["server"], checkpoint[RUN]["unheard"]
        for worker in self.workers:
            # A worker that had died joins again. So does one that had left, unless it already waits to join.
            state = checkpoint.get(f"worker {worker}", {"doing": "away", "sent": self.server.handled[worker]})
            mine = [(kind, number) for kind, of, number in unheard if of == worker]
            self.sent[worker] = max(state["sent"], *(number for _, number in mine), 0)
            self.doing[worker] = "waiting" if mine and mine[-1][0] == InfoKind.JOINED else state["doing"]
        self.start(unheard)

    def ends_well(self) -> None:
        """Whatever has happened, the workers are answered once they all push and save."""
        self.no_message_is_lost_or_repeated()
        self.an_abandoned_checkpoint_leaves_nothing()
        for _ in range(40):
            while self.saver.holding and self.those("computing"):
                self.pushes(0)
            while self.to_save:
                self.saves(0)
            if not self.suspended:
                self.serves(1, None)
        waiting = set(self.those("waiting")) - self.server.blocked
        assert self.suspended or not (self.saver.holding or self.under_way or waiting), "the run stands still"

    teardown = ends_well


TestMessages = Messages.TestCase
TestMessages.settings = STATEFUL


class KeepsNothingBack(Checkpointer):
    def keeps_back(self, record: Record) -> bool:
        return False


class BeginsTooEarly(Checkpointer):
    def can_begin(self, computing: Collection[int]) -> bool:
        return super().can_begin(())


class TakesOneRankForAll(Checkpointer):
    def saved(self, rank: int) -> None:
        for missing in list(self._missing or ()):
            super().saved(missing)


class TakesTheDeadToHaveSaved(Checkpointer):
    def lost(self, rank: int) -> None:
        if self._missing is not None:
            self._missing.discard(rank)


class NeverGivesUp(Checkpointer):
    def lost(self, rank: int) -> None:
        pass


class ForgetsNobody(Checkpointer):
    def __init__(self, *of_the_run: Any) -> None:
        super().__init__(*of_the_run[:-1], dead=())


class LosesDeferred(Checkpointer):
    def commit_if_complete(self) -> bool:
        committed = super().commit_if_complete()
        if committed:
            self.unheard.clear()
        return committed


class ResumesWithoutDeferred(Checkpointer):
    def __init__(self, checkpoints, settings, run, unheard, now_s, version, dead) -> None:
        super().__init__(checkpoints, settings, run, (), now_s, version, dead)


class UsesUpNumbers(Checkpointer):
    def commit_if_complete(self) -> bool:
        number = self.number
        committed = super().commit_if_complete()
        self.number = number
        return committed


@pytest.mark.parametrize(
    ("saver", "message"),
    [
        (KeepsNothingBack, "handled during a checkpoint|stands still"),
        (BeginsTooEarly, "when it saved|would wait for ever|stands still"),
        (TakesOneRankForAll, "parts are missing|has not begun"),
        (TakesTheDeadToHaveSaved, "parts are missing|has not begun|stands still"),
        (NeverGivesUp, "stands still"),
        (ForgetsNobody, "messages of the dead"),
        (LosesDeferred, "unhandled messages|stands still"),
        (ResumesWithoutDeferred, "unhandled messages|stands still"),
        (UsesUpNumbers, "one abandoned|are unfinished|stands still"),
    ],
)
def test_a_broken_saver_is_caught(saver, message):
    assert_caught(type("Broken", (Messages,), {"saver_class": saver}), message)
