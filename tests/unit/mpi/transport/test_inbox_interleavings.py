"""Push inboxes under every order of their ranks' one-sided operations that hypothesis finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from hpcsync.mpi.transport import push_inbox
from hpcsync.mpi.transport.push_inbox import EMPTY, PushInbox, Received
from hpcsync.mpi.transport.ulfm import RankFailed
from tests.stateful import STATEFUL, assert_caught
from tests.unit.mpi.transport.interleaving import Call, FakeBackoff, FakeTransport, FakeWindow, Memory

MOST_STEPS = 150  # of one push or collection
STEPS = st.sampled_from([1, 1, 2, 3, 5, 8, 30])
SIZE = 3
N_SLOTS = 2  # which are soon full


class Senders(RuleBasedStateMachine):
    """All other ranks push to rank 0. Push number k has the weight 2 ** k, so that a sum tells what it consists of."""

    inbox_class = PushInbox

    @initialize(n_ranks=st.integers(2, 6), mortal=st.sampled_from(["nobody", "senders", "senders", "all"]))
    def begin(self, n_ranks: int, mortal: str) -> None:
        self.mortal = mortal
        self.set_up(n_ranks)
        self.senders = list(range(1, n_ranks))
        self.calls: dict[int, Call] = {}  # by rank; 0 collects
        self.under_way: dict[int, int] = {}  # weight of the push of each rank
        self.n_pushes = 0
        self.arrived = 0  # sum of the weights of all pushes that have ended
        self.begun = 0  # and of those that have begun, and may arrive
        self.collected = 0
        self.receives = True  # rank 0 is alive
        self.torn_by_a_death = False  # a rank died while it added to vectors of others

    def set_up(self, n_ranks: int) -> None:
        self.memory = Memory(n_ranks)
        self.inboxes: list[PushInbox] = []
        self.latest: tuple[Received, list[float]] | None = None  # what was collected last, with its sum
        for rank, comm in enumerate(self.memory.comms):
            self.inboxes.append(
                self.inbox_class(
                    comm, SIZE, torch.float64, FakeTransport(), poll=lambda rank=rank: self.learn(rank), n_slots=N_SLOTS
                )
            )

    def learn(self, rank: int) -> None:
        """Let a rank know who has died."""
        for dead in {*range(len(self.inboxes))} - {*self.senders} - {0} | ({0} if not self.receives else set()):
            self.inboxes[rank].forget(dead)

    def start(self, rank: int) -> None:
        inbox = self.inboxes[rank]
        if rank == 0:
            in_use = self.check_latest()
            body = inbox.release if in_use and self.memory.choice % 2 else inbox.collect
            self.calls[0] = Call(self.memory, 0, body)
            return
        weight, self.n_pushes = 2**self.n_pushes, self.n_pushes + 1
        self.under_way[rank] = weight
        self.begun += weight
        vector = torch.full((SIZE,), float(weight), dtype=torch.float64)
        self.calls[rank] = Call(self.memory, rank, lambda: inbox.send(0, vector, float(weight)))

    @rule(moves=st.lists(st.tuples(st.integers(0, 29), STEPS, st.integers(0, 3)), min_size=1, max_size=6))
    def act(self, moves: list[tuple[int, int, int]]) -> None:
        """Let ranks make some steps; one that is idle begins to push or to collect."""
        actors = [0, *self.senders] if self.receives else self.senders
        for number, steps, choice in moves:
            if actors and self.n_pushes < 45 and not self.torn_by_a_death:
                self.run(actors[number % len(actors)], steps, choice)

    def run(self, rank: int, steps: int, choice: int = 0) -> None:
        self.memory.choice = choice
        if rank not in self.calls:
            self.start(rank)
        call = self.calls[rank]
        for _ in range(steps):
            try:
                call.step()
            except RankFailed:
                self.is_torn()
            assert call.n_steps <= MOST_STEPS, f"rank {rank} does not come to an end"
            if call.done:
                del self.calls[rank]
                self.ended(rank, call)
                return

    def is_torn(self) -> None:
        assert len(self.senders) < len(self.inboxes) - 1, "a failure, although no sender has died"
        self.torn_by_a_death = True

    def ended(self, rank: int, call: Call) -> None:
        if rank != 0:
            self.arrived += self.under_way.pop(rank)
        elif call.result is not None:
            self.see(call.result)

    def see(self, received: Received) -> None:
        assert received.total.tolist() == [received.weight] * SIZE, f"not the pushes' sum: {received}"
        weight = int(received.weight)
        assert received.count == weight.bit_count() > 0, f"a push is counted twice: {received}"
        assert not weight & self.collected, f"a push is collected twice: {received}"
        assert not weight & ~self.begun, f"a push that nobody has made: {received}"
        self.collected += weight
        self.latest = received, received.total.tolist()

    def check_latest(self) -> bool:
        """Return whether a sum is in use; it stays as it is until the next call, whatever others send."""
        latest, self.latest = self.latest, None
        if latest is None:
            return False
        (vector, _, _), total = latest
        rows, begin = self.inboxes[0]._rows, vector.storage_offset()
        if vector.untyped_storage().data_ptr() == rows.local.data_ptr():  # in a slot, rather than kept
            others_wrote = (rows.window.public != rows.window.synced)[begin : begin + SIZE]
            assert not others_wrote.any(), "a sum that is in use has changed"
        assert vector.tolist() == total, "a sum that is in use has changed"
        return True

    @rule(choice=st.integers(0, 11))
    def happens_early(self, choice: int) -> None:
        self.memory.choice = choice
        self.memory.make_one_copy()

    @precondition(lambda self: not self.calls and self.receives and not self.torn_by_a_death)
    @rule()
    def is_kept_for_a_checkpoint(self) -> None:
        """While no rank sends, everything is collected and kept; a run that resumes begins with empty inboxes."""
        try:
            kept = self.inboxes[0].keep()
        except RankFailed:
            self.is_torn()
            return
        weight = 0 if kept is None else int(kept.weight)  # perhaps with the last push of a rank that died
        assert not self.arrived & ~self.collected & ~weight, "a push is not kept"
        n_ranks = len(self.inboxes)
        self.set_up(n_ranks)
        self.inboxes[0].put_back(kept)
        self.learn(0)

    @precondition(lambda self: self.mortal != "nobody" and len(self.senders) > 1)
    @rule(number=st.integers(0, 4))
    def dies(self, number: int) -> None:
        """A push that is not complete then counts as a whole or not at all."""
        held = -1 - self.memory.public[1][0][:N_SLOTS]
        adding = [rank for rank in self.senders if rank + len(self.inboxes) in held]
        likely = adding or [rank for rank in self.senders if rank in self.calls] or self.senders
        rank = likely[number % len(likely)]
        self.senders.remove(rank)
        if (call := self.calls.pop(rank, None)) is not None:
            call.die()
            self.under_way.pop(rank)
        self.learn(0)

    @precondition(lambda self: self.mortal == "all" and self.receives)
    @rule()
    def the_receiver_dies(self) -> None:
        """Senders then come to an end, whatever it has held."""
        self.receives = False
        if (call := self.calls.pop(0, None)) is not None:
            call.die()

    def teardown(self) -> None:
        """All pushes come to an end, and are collected by one call."""
        try:
            if not self.torn_by_a_death and not any(call.done for call in self.calls.values()):
                self.end_all()
                if self.calls and self.receives:  # a slot may be held by the dead, and the other by the receiver
                    self.run(0, MOST_STEPS)
                    self.end_all()
                assert self.torn_by_a_death or not self.calls, "a sender waits forever"
                if self.receives and not self.torn_by_a_death:
                    self.run(0, MOST_STEPS)
                    assert self.torn_by_a_death or self.arrived & ~self.collected == 0, "a push is lost"
        finally:
            for call in self.calls.values():
                call.die()

    def end_all(self) -> None:
        for _ in self.inboxes:  # they may wait for each other
            for rank in [*self.calls]:
                if not self.torn_by_a_death:
                    self.run(rank, MOST_STEPS)


@pytest.fixture(autouse=True)
def _fake_windows(monkeypatch):
    monkeypatch.setattr(push_inbox, "Window", FakeWindow)
    monkeypatch.setattr(push_inbox, "Backoff", FakeBackoff)
    monkeypatch.setattr(push_inbox, "BLOCK_BYTES", 8)


def test_every_push_is_collected_once_in_every_order_of_operations():
    run_state_machine_as_test(Senders, settings=STATEFUL)


class FillsWhatIsHeld(PushInbox):
    """A sender looks for a slot that is empty, and does not claim it."""

    def _claim(self, peer: int) -> Any:
        found = super()._claim(peer)
        if found is not None and found.before == EMPTY:
            self._swap(peer, found.slot, self._filling(self._rank), EMPTY)
        return found

    def _fill(self, peer: int, slot: int, before: int, vector: torch.Tensor, weight: float) -> None:
        super()._fill(peer, slot, before, vector, weight)
        self._swap(peer, slot, EMPTY, push_inbox._full(weight))


class FillsWhatIsFull(PushInbox):
    """A sender takes a slot that is full for one that is empty."""

    def _fill(self, peer: int, slot: int, before: int, vector: torch.Tensor, weight: float) -> None:
        if before != EMPTY:
            self._swap(peer, slot, self._adding(self._rank), self._filling(self._rank))
        super()._fill(peer, slot, EMPTY, vector, weight)


class AddsWithoutHolding(PushInbox):
    """A sender that adds to a slot does not keep others from it."""

    def _adding(self, rank: int) -> int:
        return push_inbox._full(1.0) if rank == self._rank else super()._adding(rank)

    def _fill(self, peer: int, slot: int, before: int, vector: torch.Tensor, weight: float) -> None:
        if before != EMPTY:
            self._swap(peer, slot, self._adding(self._rank), before)
            self._adding = lambda rank: before
        super()._fill(peer, slot, before, vector, weight)
        self.__dict__.pop("_adding", None)


class IsFullTooEarly(PushInbox):
    """A slot is full before its vector is there; its sender may die in between."""

    def _fill(self, peer: int, slot: int, before: int, vector: torch.Tensor, weight: float) -> None:
        flush = self._rows.flush
        self._rows.flush = lambda rank: None
        super()._fill(peer, slot, before, vector, weight)
        self._rows.flush = flush
        flush(peer)


class CountsTooLate(PushInbox):
    def _fill(self, peer: int, slot: int, before: int, vector: torch.Tensor, weight: float) -> None:
        flush = self._words.flush
        self._words.flush = lambda rank: None
        super()._fill(peer, slot, before, vector, weight)
        self._words.flush = flush
        flush(peer)


class ForgetsTheWeightBefore(PushInbox):
    def _swap(self, rank: int, slot: int, expected: int, state: int) -> int:
        if expected == self._adding(self._rank) and rank != self._rank:
            state = push_inbox._full(1.0)
        return super()._swap(rank, slot, expected, state)


class TakesWhatIsHeld(PushInbox):
    """The receiver takes what a sender has not completed."""

    def _take(self, slot: int, state: int) -> bool:
        if state < EMPTY and self._swap(self._rank, slot, state, self._filling(self._rank)) == state:
            return True
        return super()._take(slot, state)


class TakesWithoutHolding(PushInbox):
    """The receiver lets senders add to a slot while it reads it."""

    def _take(self, slot: int, state: int) -> bool:
        takes = super()._take(slot, state)
        if takes:
            self._swap(self._rank, slot, self._filling(self._rank), state)
        return takes

    def _empty(self, slot: int) -> None:
        state = self._swap(self._rank, slot, EMPTY, EMPTY)
        if state > EMPTY:
            self._swap(self._rank, slot, state, self._filling(self._rank))
        super()._empty(slot)


class KeepsTheCount(PushInbox):
    """The count of what was collected stays in a slot that is empty."""

    def _empty(self, slot: int) -> None:
        self._rows.release(0, 0)
        self._swap(self._rank, slot, self._filling(self._rank), EMPTY)


class ReleasesAtOnce(PushInbox):
    def collect(self) -> Received | None:
        received = super().collect()
        self.release()
        return received


class NeverReleases(PushInbox):
    def release(self) -> None:
        self._in_use = None


class WritesAfterOthers(PushInbox):
    """What the receiver has written to a slot may become visible after a sender's put."""

    def _empty(self, slot: int) -> None:
        self._swap(self._rank, slot, self._filling(self._rank), EMPTY)


class WaitsForTheDead(PushInbox):
    def forget(self, rank: int) -> None:
        pass


class TakesOverFromTheLiving(PushInbox):
    """After a death, a slot that any rank fills is taken over."""

    def forget(self, rank: int) -> None:
        self._dead.update(range(self._n_ranks))


class IgnoresWhatIsTorn(PushInbox):
    """The receiver does not notice that a rank has died while it added."""

    def _take(self, slot: int, state: int) -> bool:
        dead, self._dead = self._dead, set()
        takes = super()._take(slot, state)
        self._dead = dead
        return takes


class ReadsBeforeItIsVisible(PushInbox):
    def collect(self) -> Received | None:
        acquire, self._rows.acquire = self._rows.acquire, lambda begin, end: None
        received = super().collect()
        self._rows.acquire = acquire
        return received


class CountsBeforeItIsVisible(PushInbox):
    def collect(self) -> Received | None:
        sync, self._words.sync = self._words.sync, lambda: None
        received = super().collect()
        self._words.sync = sync
        return received


class ForgetsTheCountBefore(PushInbox):
    def _fill(self, peer: int, slot: int, before: int, vector: torch.Tensor, weight: float) -> None:
        self._words.get_word = lambda rank, offset: 0
        super()._fill(peer, slot, before, vector, weight)
        del self._words.get_word


class AddsBeforeItHasRead(PushInbox):
    """The get of a block is complete only when the block has been put back."""

    def _add(self, peer: int, slot: int, vector: torch.Tensor) -> None:
        flush, put = self._rows.flush, self._rows.put
        self._rows.flush = lambda rank: None
        self._rows.put = lambda block, rank, offset: (put(block, rank, offset), flush(rank))
        super()._add(peer, slot, vector)
        self._rows.flush, self._rows.put = flush, put


class ForgetsWhatWasKept(PushInbox):
    def put_back(self, kept: Received | None) -> None:
        pass


class DoesNotFlushItsLastBlock(PushInbox):
    def _add(self, peer: int, slot: int, vector: torch.Tensor) -> None:
        flush, n_flushed = self._rows.flush, 0

        def all_but_the_last(rank: int) -> None:
            nonlocal n_flushed
            n_flushed += 1
            if n_flushed <= SIZE:
                flush(rank)

        self._rows.flush = all_but_the_last
        super()._add(peer, slot, vector)
        self._rows.flush = flush


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (FillsWhatIsHeld, "lost|sum|twice|not kept"),
        (FillsWhatIsFull, "lost|not kept"),
        (AddsWithoutHolding, "lost|sum|twice|not kept"),
        (IsFullTooEarly, "sum|lost|not kept"),
        (CountsTooLate, "twice|sum|lost|died before the flush|not kept"),
        (ForgetsTheWeightBefore, "sum|lost|not kept"),
        (TakesWhatIsHeld, "lost|sum|twice|died|not kept"),
        (KeepsTheCount, "twice|sum|lost|not kept"),
        (TakesWithoutHolding, "lost|twice|in use|sum|not kept"),
        (ReleasesAtOnce, "in use"),
        (NeverReleases, "waits forever"),
        (WritesAfterOthers, "sum|lost|not kept"),
        (WaitsForTheDead, "waits forever"),
        (TakesOverFromTheLiving, "lost|sum|twice|not kept"),
        (IgnoresWhatIsTorn, "lost|waits forever|not kept"),
        (ReadsBeforeItIsVisible, "sum|lost|not kept"),
        (CountsBeforeItIsVisible, "twice|sum|lost|not kept"),
        (ForgetsTheCountBefore, "twice|sum|lost|not kept"),
        (AddsBeforeItHasRead, "sum|lost|not kept"),
        (ForgetsWhatWasKept, "lost|not kept"),
        (DoesNotFlushItsLastBlock, "lost|sum|died before the flush|not kept"),
    ],
)
def test_a_broken_inbox_is_caught(broken, message):
    assert_caught(type("Broken", (Senders,), {"inbox_class": broken}), message)
