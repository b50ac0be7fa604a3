"""A published replica under every order of its ranks' one-sided operations that hypothesis finds."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from hpcsync.mpi.transport import published_replica
from hpcsync.mpi.transport.published_replica import CURRENT, PublishedReplica
from tests.stateful import STATEFUL, assert_caught
from tests.unit.mpi.transport.interleaving import Call, FakeTransport, FakeWindow, Memory, operate

MOST_STEPS = 60  # of one read or publication
STEPS = st.sampled_from([1, 1, 2, 3, 5, 8, 30])


class SteppedReplica(PublishedReplica):
    """Other ranks may also act between two stores of the owner to a row."""

    def _row(self, row: int) -> torch.Tensor:
        operate()
        return super()._row(row)


class Readers(RuleBasedStateMachine):
    """Rank 0 publishes vectors of their serial number; the other ranks and an evaluator on rank 0 read them."""

    replica_class = SteppedReplica

    @initialize(n_ranks=st.integers(2, 4), n_rows=st.integers(2, 4))
    def begin(self, n_ranks: int, n_rows: int) -> None:
        self.memory = Memory(n_ranks)
        self.replicas = [
            self.replica_class(comm, 2, torch.float64, FakeTransport(), n_rows=n_rows) for comm in self.memory.comms
        ]
        self.readers = list(range(1, n_ranks + 1))  # the last one is the evaluator
        self.calls: dict[int, Call] = {}  # by reader; 0 publishes
        self.seen = dict.fromkeys(self.readers, 0)  # what each reader must see at least
        self.published = 0

    def start(self, reader: int) -> None:
        if reader == 0:
            vector = torch.full((2,), self.published + 1.0, dtype=torch.float64)
            weight = self.published + 1.0
            body = lambda: self.replicas[0].publish(vector, weight=weight)  # noqa: E731
            self.calls[0] = Call(self.memory, 0, body)
            return
        self.seen[reader] = max(self.seen[reader], self.published)
        rank = reader % len(self.replicas)
        self.calls[reader] = Call(self.memory, rank, partial(self.read, self.replicas[rank], reader))

    def read(self, replica: PublishedReplica, reader: int) -> tuple[int, list[float]]:
        into, weight = torch.full((2,), -1.0, dtype=torch.float64), torch.full((1,), -1.0, dtype=torch.float64)
        return replica.read(0, into, reader, weight), [*into.tolist(), weight.item()]

    @rule(moves=st.lists(st.tuples(st.integers(0, 29), STEPS, st.integers(0, 3)), min_size=1, max_size=6))
    def act(self, moves: list[tuple[int, int, int]]) -> None:
        """Let ranks make some steps; one that is idle begins to publish or to read."""
        actors = [0, 0, *self.readers]
        for number, steps, choice in moves:
            self.run(actors[number % len(actors)], steps, choice)

    def run(self, reader: int, steps: int, choice: int = 0) -> None:
        self.memory.choice = choice
        if reader not in self.calls:
            self.start(reader)
        call = self.calls[reader]
        for _ in range(steps):
            call.step()
            assert call.n_steps <= MOST_STEPS, f"reader {reader} does not come to an end"
            if call.done:
                del self.calls[reader]
                self.ended(reader, call)
                return

    def ended(self, reader: int, call: Call) -> None:
        if reader == 0:
            self.published += call.result
            assert call.result or self.calls, "refused, although no rank reads"
            return
        serial, values = call.result
        assert values == [serial] * 3, f"a torn read: {values} of publication {serial}"
        assert self.seen[reader] <= serial <= self.published + 1, f"publication {serial} after {self.seen[reader]}"
        self.seen[reader] = serial

    @rule(choice=st.integers(0, 11), early=st.sampled_from(["copy", "store"]))
    def happens_early(self, choice: int, early: str) -> None:
        self.memory.choice = choice
        if early == "copy":
            self.memory.make_one_copy()
        else:
            self.memory.drain_one_store()

    @precondition(lambda self: len(self.readers) > 1)
    @rule(number=st.integers(0, 3))
    def dies(self, number: int) -> None:
        reader = self.readers.pop(number % (len(self.readers) - 1))
        if (call := self.calls.pop(reader, None)) is not None:
            call.die()
        self.replicas[0].forget(reader)

    def teardown(self) -> None:
        """All calls come to an end, and a last publication is read by all."""
        try:
            if not any(call.done for call in self.calls.values()):  # none has failed
                for reader in [*self.calls, 0, 0, *self.readers]:
                    self.run(reader, MOST_STEPS)
        finally:
            for call in self.calls.values():
                call.die()


@pytest.fixture(autouse=True)
def _fake_windows(monkeypatch):
    monkeypatch.setattr(published_replica, "Window", FakeWindow)


def test_no_order_of_operations_tears_a_read():
    run_state_machine_as_test(Readers, settings=STATEFUL)


class Lookers(Readers):
    """Ranks look at the serial number alone."""

    def read(self, replica: PublishedReplica, reader: int) -> tuple[int, list[float]]:
        serial = replica.serial_of(0, reader)
        return serial, [serial] * 3


def test_no_order_of_operations_gives_a_wrong_serial_number():
    run_state_machine_as_test(Lookers, settings=STATEFUL)


class FillsTheCurrentRow(SteppedReplica):
    def _free_row(self) -> int:
        return 0


class IgnoresClaims(SteppedReplica):
    def _n_readers(self, row: int) -> int:
        return 0


class LooksBeforeItClaims(SteppedReplica):
    """The reader takes the row that was current before its claim is counted."""

    def _claim(self, peer: int) -> int:
        row = self._unpack(self._words.get_word(peer, CURRENT))[1]
        super()._claim(peer)
        return row


class FinishesTooEarly(SteppedReplica):
    def _copy(self, peer: int, row: int, *destinations: Any) -> int:
        self._finish(peer, row)
        serial = super()._copy(peer, row, *destinations)
        self._words.fetch_add(-1, peer, self._done + row)
        return serial


class CountsEarlierClaims(SteppedReplica):
    """The owner counts the claims until now, and not until the row is replaced."""

    def _make_current(self, row: int) -> None:
        before = self._words.fetch_add(0, self._rank, CURRENT)
        self._words.fetch_add(row - self._current, self._rank, CURRENT)
        claims, _ = self._unpack(before)
        self._claimed[self._current] += claims - self._claims
        self._current, self._claims = row, claims


class AnnouncesTooEarly(SteppedReplica):
    def _fill(self, row: int, *content: Any) -> None:
        self._make_current(row)
        super()._fill(row, *content)


class DoesNotReleaseRows(SteppedReplica):
    def __init__(self, *args, **rows) -> None:
        super().__init__(*args, **rows)
        self._rows.release = lambda begin, end: None


class NeverFinishes(SteppedReplica):
    def _finish(self, peer: int, row: int) -> None:
        pass


class RemembersTheDead(SteppedReplica):
    def forget(self, rank: int) -> None:
        pass


class TakesTheLivingForDead(SteppedReplica):
    """After a death, no rank is asked whether it still reads."""

    def _reads_from_here(self, reader: int) -> bool:
        return False


class SaysTooLateThatItReads(SteppedReplica):
    def _say_reading(self, reader: int, peer: int) -> None:
        if not peer:
            super()._say_reading(reader, peer)


class CountsBeforeItLooks(SteppedReplica):
    """What an idle reader has finished in the meantime is not counted before its claim is discounted."""

    def _discount_the_dead(self) -> None:
        sync, self._words.sync = self._words.sync, lambda: None
        super()._discount_the_dead()
        self._words.sync = sync


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (FillsTheCurrentRow, "torn"),
        (IgnoresClaims, "torn"),
        (LooksBeforeItClaims, "torn|refused"),
        (FinishesTooEarly, "torn"),
        (CountsEarlierClaims, "torn|refused"),
        (AnnouncesTooEarly, "torn|after"),
        (DoesNotReleaseRows, "torn"),
        (NeverFinishes, "refused"),
        (RemembersTheDead, "refused"),
        (TakesTheLivingForDead, "torn"),
        (SaysTooLateThatItReads, "torn"),
        (CountsBeforeItLooks, "refused"),
    ],
)
def test_a_broken_replica_is_caught(broken, message):
    assert_caught(type("Broken", (Readers,), {"replica_class": broken}), message)


def test_one_who_looks_without_an_end_is_caught():
    assert_caught(type("Broken", (Lookers,), {"replica_class": NeverFinishes}), "refused")
