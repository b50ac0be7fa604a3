"""Slots lent to workers, for any order of events: no contribution is lost, and no paradigm can keep workers waiting."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hpcsync.mpi.server.slot_pool import SlotPool
from tests.stateful import STATEFUL, assert_caught

NUMBERS = st.integers(0, 60)
BEING_WRITTEN = -1


class Workers(RuleBasedStateMachine):
    """Workers that ask, put a number in two halves and push, and a server that uses contributions in any order."""

    pool_class = SlotPool

    @initialize(n_slots=st.integers(1, 3), n_workers=st.integers(2, 6))
    def begin(self, n_slots: int, n_workers: int) -> None:
        self.pool = self.pool_class(n_slots)
        self.slots = [0] * n_slots
        self.private: dict[int, int] = {}
        self.idle = set(range(n_workers))
        self.waiting: list[int] = []
        self.putting: dict[int, tuple[int, int]] = {}  # by worker: slot and number
        self.pushed: dict[int, int] = {}  # by worker: number, which the server can use from now on
        self.n = 0

    def pick(self, candidates, number: int) -> int:
        candidates = sorted(candidates)
        return candidates[number % len(candidates)]

    @precondition(lambda self: self.idle)
    @rule(number=NUMBERS)
    def asks(self, number: int) -> None:
        worker = self.pick(self.idle, number)
        self.idle.discard(worker)
        self.waiting.append(worker)
        self.pool.ask(worker)
        self.lends()

    def lends(self) -> None:
        """What a server does each time that it looks for requests."""
        while (loan := self.pool.loan()) is not None:
            worker, slot = loan
            assert worker in self.waiting, "a slot for a worker that has not asked"
            self.waiting.remove(worker)
            moved = self.pool.lend(worker, slot)
            if moved is not None:
                self.private[moved] = self.slots[slot]
            self.n += 1
            self.slots[slot] = BEING_WRITTEN
            self.putting[worker] = (slot, self.n)

    @precondition(lambda self: self.putting)
    @rule(number=NUMBERS, at_once=st.booleans(), again=st.booleans())
    def pushes(self, number: int, at_once: bool, again: bool) -> None:
        worker = self.pick(self.putting, number)
        slot, value = self.putting.pop(worker)
        self.slots[slot] = value
        self.pushed[worker] = value
        if at_once:
            self.is_used(worker)
            return
        for _ in range(1 + again):  # once while a checkpoint is made, and once after it
            self.pool.arrived(worker)
        self.lends()

    @precondition(lambda self: self.pushed)
    @rule(number=NUMBERS)
    def uses(self, number: int) -> None:
        self.is_used(self.pick(self.pushed, number))

    def is_used(self, worker: int) -> None:
        slot, private = self.pool.slot(worker), self.private.pop(worker, None)
        assert (slot is None) != (private is None), "a contribution is in two places or nowhere"
        found = private if slot is None else self.slots[slot]
        assert found == self.pushed.pop(worker), "another contribution, or half of one"
        self.pool.free(worker)
        self.idle.add(worker)
        self.lends()

    @rule(number=NUMBERS)
    def dies(self, number: int) -> None:
        alive = self.idle | set(self.waiting) | self.putting.keys()
        if len(alive) < 2:
            return
        worker = self.pick(alive, number)
        self.pool.discard(worker)
        self.idle.discard(worker)
        self.putting.pop(worker, None)
        if worker in self.waiting:
            self.waiting.remove(worker)
        self.lends()

    @invariant()
    def a_worker_waits_only_while_others_put(self) -> None:
        if self.waiting:
            assert len(self.putting) == len(self.slots), "a worker waits for a paradigm, or for a dead worker"

    def teardown(self) -> None:
        while self.putting:
            worker = min(self.putting)
            slot, self.pushed[worker] = self.putting.pop(worker)
            self.slots[slot] = self.pushed[worker]
            self.pool.arrived(worker)
            self.lends()
        assert not self.waiting, "a worker never gets a slot"


def test_every_contribution_is_used_as_it_was_put():
    run_state_machine_as_test(Workers, settings=STATEFUL)


class MovesIncomplete(SlotPool):
    def loan(self) -> tuple[int, int] | None:
        self._arrived = dict.fromkeys(self._slots)
        return super().loan()


class DoesNotMove(SlotPool):
    def lend(self, worker: int, slot: int) -> int | None:
        super().lend(worker, slot)
        return None


class NeverMoves(SlotPool):
    def arrived(self, worker: int) -> None:
        pass


class KeepsSlotsOfTheDead(SlotPool):
    def discard(self, worker: int) -> None:
        pass


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (MovesIncomplete, "half of one|two places|nowhere"),
        (DoesNotMove, "nowhere|half of one"),
        (NeverMoves, "waits for a paradigm|never gets a slot"),
        (KeepsSlotsOfTheDead, "dead worker|has not asked|never gets a slot"),
    ],
)
def test_a_broken_pool_is_caught(broken, message):
    assert_caught(type("Broken", (Workers,), {"pool_class": broken}), message)
