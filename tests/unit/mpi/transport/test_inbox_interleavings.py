"""Push inboxes under every order of their ranks' one-sided operations that hypothesis finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from hpcsync.mpi.transport import push_inbox
from hpcsync.mpi.transport.push_inbox import FURTHER, TICKETS, TURNS, WEIGHTS, PushInbox, Received
from hpcsync.mpi.transport.ulfm import RankFailed
from tests.stateful import STATEFUL, assert_caught
from tests.unit.mpi.transport.interleaving import Call, FakeBackoff, FakeTransport, FakeWindow, Memory

MOST_STEPS = 150  # of one push or collection
STEPS = st.sampled_from([1, 1, 2, 3, 5, 8, 30])
SIZE = 3


class Senders(RuleBasedStateMachine):
    """All other ranks push to rank 0. Push number k has the weight 2 ** k, so that a sum tells what it consists of."""

    inbox_class = PushInbox
    one_node = True

    @initialize(n_ranks=st.integers(2, 6))
    def begin(self, n_ranks: int) -> None:
        self.set_up(n_ranks)
        self.senders = list(range(1, n_ranks))
        self.calls: dict[int, Call] = {}  # by rank; 0 collects
        self.under_way: dict[int, int] = {}  # weight of the push of each rank
        self.n_pushes = 0
        self.arrived = 0  # sum of the weights of all pushes that have ended
        self.begun = 0  # and of those that have begun, and may arrive
        self.collected = 0
        self.torn_by_a_death = False  # a rank died while it added to a sum

    def set_up(self, n_ranks: int) -> None:
        self.memory = Memory(n_ranks, one_node=self.one_node)
        self.inboxes = [self.inbox_class(comm, SIZE, torch.float64, FakeTransport()) for comm in self.memory.comms]

    def start(self, rank: int) -> None:
        inbox = self.inboxes[rank]
        if rank == 0:
            self.calls[0] = Call(self.memory, 0, inbox.collect)
            return
        weight, self.n_pushes = 2**self.n_pushes, self.n_pushes + 1
        self.under_way[rank] = weight
        self.begun += weight
        vector = torch.full((SIZE,), float(weight), dtype=torch.float64)
        self.calls[rank] = Call(self.memory, rank, lambda: inbox.send(0, vector, float(weight)))

    @rule(moves=st.lists(st.tuples(st.integers(0, 29), STEPS, st.integers(0, 3)), min_size=1, max_size=6))
    def act(self, moves: list[tuple[int, int, int]]) -> None:
        """Let ranks make some steps; one that is idle begins to push or to collect."""
        actors = [0, *self.senders]
        for number, steps, choice in moves:
            if self.n_pushes < 45 and not self.torn_by_a_death:
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
        assert len(self.senders) < len(self.inboxes) - 1, "a failure, although no rank has died"
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

    @rule(choice=st.integers(0, 11))
    def happens_early(self, choice: int) -> None:
        self.memory.choice = choice
        self.memory.make_one_copy()

    @precondition(lambda self: not self.calls and not self.torn_by_a_death)
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
        for dead in set(range(1, n_ranks)) - set(self.senders):
            self.inboxes[0].forget(dead)

    @precondition(lambda self: self.one_node and len(self.senders) > 1)
    @rule(number=st.integers(0, 4))
    def dies(self, number: int) -> None:
        """A push that is not complete then counts as a whole or not at all."""
        rank = self.senders.pop(number % len(self.senders))
        if (call := self.calls.pop(rank, None)) is not None:
            call.die()
            self.under_way.pop(rank)
        self.inboxes[0].forget(rank)

    def teardown(self) -> None:
        """All pushes come to an end, and are collected by one call."""
        try:
            if not self.torn_by_a_death and not any(call.done for call in self.calls.values()):
                for _ in self.inboxes:  # they may wait for each other
                    for rank in [*self.calls]:
                        self.run(rank, MOST_STEPS)
                assert self.torn_by_a_death or not self.calls, "a sender waits forever"
                if not self.torn_by_a_death:
                    self.run(0, MOST_STEPS)
                assert self.torn_by_a_death or self.arrived & ~self.collected == 0, "a push is lost"
        finally:
            for call in self.calls.values():
                call.die()


class SendersOnHosts(Senders):
    """Ranks on several hosts, which take turns to add to a sum, in blocks of one element; none dies."""

    one_node = False


@pytest.fixture(autouse=True)
def _fake_windows(monkeypatch):
    monkeypatch.setattr(push_inbox, "Window", FakeWindow)
    monkeypatch.setattr(push_inbox, "Backoff", FakeBackoff)
    monkeypatch.setattr(push_inbox, "BLOCK_BYTES", 8)


@pytest.mark.parametrize("senders", [Senders, SendersOnHosts])
def test_every_push_is_collected_once_in_every_order_of_operations(senders):
    run_state_machine_as_test(senders, settings=STATEFUL)


class DoesNotWait(PushInbox):
    def _is_complete(self, drained: Any) -> bool:
        return True


class LooksBeforeItTakesATicket(PushInbox):
    """The sender takes the inbox that was active before its ticket is counted."""

    def _ticket(self, peer: int) -> tuple[int, int]:
        ticket, inbox = divmod(int(self._words.fetch_add(0, peer, TICKETS)), 2)
        self._words.fetch_add(2, peer, TICKETS)
        return inbox, ticket


class CountsEarlierTickets(PushInbox):
    """The receiver counts the tickets that it has seen, and not those until the switch."""

    def _switch(self, inbox: int, seen: int) -> Any:
        return super()._switch(inbox, seen)._replace(end=seen)


class BeginsAtTheFirstSlot(PushInbox):
    """The receiver takes the tickets that were left in the word for ones of the other inbox."""

    def _switch(self, inbox: int, seen: int) -> Any:
        drained = super()._switch(inbox, seen)
        self._first = 0
        return drained


class CountsSumsTooEarly(PushInbox):
    def _fill(self, peer: int, inbox: int, ticket: int, vector: torch.Tensor, weight: float) -> None:
        if ticket >= self._slots:
            self._words.fetch_add(1, peer, self._at(inbox, FURTHER))
        super()._fill(peer, inbox, ticket, vector, weight)
        if ticket >= self._slots:
            self._words.fetch_add(-1, peer, self._at(inbox, FURTHER))


class WeighsTooEarly(PushInbox):
    """A vector has a weight before it is there; its sender may die in between."""

    def _fill(self, peer: int, inbox: int, ticket: int, vector: torch.Tensor, weight: float) -> None:
        if ticket < self._slots:
            self._words.fetch_add(weight, peer, self._at(inbox, WEIGHTS + ticket))
            weight = 0.0
        super()._fill(peer, inbox, ticket, vector, weight)


class KeepsWeights(PushInbox):
    def _taken(self, inbox: int, word: int) -> float:
        return self._word(self._at(inbox, word))


class KeepsSums(PushInbox):
    def _vectors(self, drained: Any) -> Iterator[tuple[torch.Tensor, int, float]]:
        found = [(vector.clone(), n, weight) for vector, n, weight in super()._vectors(drained)]
        if self._n_further(drained):
            self._sums.local[drained.inbox * self._size :][: self._size] = found[-1][0].numpy()
            self._sums.sync()
        yield from found


class WaitsForTheDead(PushInbox):
    def forget(self, rank: int) -> None:
        pass


class TakesTheLivingForDead(PushInbox):
    """After a death, no rank is asked whether it still sends."""

    def _sends_here(self, rank: int) -> bool:
        return False


class SaysTooLateThatItSends(PushInbox):
    def _say_sending(self, peer: int) -> None:
        if not peer:
            super()._say_sending(peer)


class ForgetsWhatWasKept(PushInbox):
    def put_back(self, kept: Received | None) -> None:
        pass


class AddsOutOfTurn(PushInbox):
    def _add_in_turn(self, vector: np.ndarray, peer: int, inbox: int) -> None:
        self._backoff.until = lambda poll: poll() or True
        super()._add_in_turn(vector, peer, inbox)


class KeepsTurns(PushInbox):
    def _taken(self, inbox: int, word: int) -> float:
        return 0.0 if word == TURNS else super()._taken(inbox, word)


class DoesNotFlushItsLastBlock(PushInbox):
    def _add_in_turn(self, vector: np.ndarray, peer: int, inbox: int) -> None:
        flush, n_flushed = self._sums.flush, 0

        def all_but_the_last(rank: int) -> None:
            nonlocal n_flushed
            n_flushed += 1
            if n_flushed <= SIZE:
                flush(rank)

        self._sums.flush = all_but_the_last
        super()._add_in_turn(vector, peer, inbox)
        self._sums.flush = flush


@pytest.mark.parametrize(
    ("senders", "broken", "message"),
    [
        (Senders, DoesNotWait, "lost|sum|died|twice|not kept"),
        (Senders, LooksBeforeItTakesATicket, "lost|sum|twice|not kept"),
        (Senders, CountsEarlierTickets, "lost|sum|twice|not kept"),
        (Senders, BeginsAtTheFirstSlot, "lost|not kept"),
        (Senders, CountsSumsTooEarly, "lost|sum|twice|died|not kept"),
        (Senders, WeighsTooEarly, "sum|lost|not kept"),
        (Senders, KeepsWeights, "twice|sum|lost|not kept"),
        (Senders, KeepsSums, "twice|sum|lost|not kept"),
        (Senders, WaitsForTheDead, "lost|not kept"),
        (Senders, TakesTheLivingForDead, "lost|sum|twice|not kept"),
        (Senders, SaysTooLateThatItSends, "lost|sum|twice|not kept"),
        (Senders, ForgetsWhatWasKept, "lost|not kept"),
        (SendersOnHosts, AddsOutOfTurn, "lost|sum|not kept"),
        (SendersOnHosts, KeepsTurns, "waits forever"),
        (SendersOnHosts, DoesNotFlushItsLastBlock, "lost|sum|died before the flush|not kept"),
        (SendersOnHosts, KeepsSums, "twice|sum|lost|not kept"),
    ],
)
def test_a_broken_inbox_is_caught(senders, broken, message):
    assert_caught(type("Broken", (senders,), {"inbox_class": broken}), message)
