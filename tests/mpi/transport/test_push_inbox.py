"""Every vector sent is collected once and as a whole, with counts and weights, while many ranks send."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcsync.mpi.transport import push_inbox
from hpcsync.mpi.transport.push_inbox import EMPTY, GONE, NODE_SLOTS, SLOTS, PushInbox
from hpcsync.mpi.transport.tensor_window import HOST
from hpcsync.mpi.transport.ulfm import RankFailed

SIZE = 30_001
BUSY_S = 0.3


def filled(value: float) -> torch.Tensor:
    return torch.full((5,), value, dtype=torch.float64)


class Received:
    """Sums of what one rank has collected."""

    def __init__(self, size: int) -> None:
        self.total = np.zeros(size)
        self.count, self.weight = 0, 0.0

    def take(self, received) -> bool:
        if received is None:
            return False
        assert received.count > 0
        self.total += received.total.cpu().numpy()
        self.count += received.count
        self.weight += received.weight
        return True


def other(comm, generator) -> int:
    return int((comm.rank + 1 + generator.integers(comm.size - 1)) % comm.size)


def exchange(comm, size: int, transport=HOST, *, n_slots: int = SLOTS, compute) -> tuple[bool, int, int]:
    """Return (whether none is lost or counted twice, vectors sent, collections) of random pushes in all directions."""
    generator = np.random.default_rng(comm.rank)
    received, n_collections = Received(size), 0
    sent, counts, weights = np.zeros((comm.size, size)), np.zeros(comm.size), np.zeros(comm.size)
    with PushInbox(comm, size, torch.float64, transport, n_slots=n_slots) as inbox:
        end_s = time.monotonic() + BUSY_S
        while time.monotonic() < end_s:
            for _ in range(generator.integers(4)):
                peer, weight = other(comm, generator), float(generator.integers(1, 9))
                vector = generator.integers(-1000, 1000) + np.arange(float(size))
                inbox.send(peer, torch.from_numpy(vector).to(transport.device), weight)
                sent[peer] += vector
                counts[peer] += 1
                weights[peer] += weight
            compute()
            n_collections += received.take(inbox.collect())
        comm.Barrier()
        n_collections += received.take(inbox.collect())  # while no rank sends, one call returns all
        assert inbox.collect() is None
        comm.Barrier()
    expected = np.zeros(size)
    for numbers in (sent, counts, weights):
        comm.Allreduce(MPI.IN_PLACE, numbers)
    expected[:] = sent[comm.rank]
    kept = bool((received.total == expected).all())
    kept &= received.count == counts[comm.rank] and received.weight == weights[comm.rank]
    return comm.allreduce(kept, MPI.LAND), int(counts.sum()), comm.allreduce(n_collections)


@pytest.mark.parametrize(("size", "n_slots"), [(1, NODE_SLOTS), (SIZE, NODE_SLOTS), (SIZE, SLOTS)])
def test_nothing_is_lost_and_nothing_is_counted_twice(comm, needs, size, n_slots, transport):
    needs(2)
    kept, sent, taken = exchange(comm, size, transport, n_slots=n_slots, compute=lambda: None)
    if comm.rank == 0:
        print(f"{sent} vectors of {size} in {taken} collections")
    assert kept and sent > 0


def test_the_receiver_may_compute_meanwhile(comm, needs):
    needs(2)
    matrix = np.ones((300, 300))
    kept, sent, taken = exchange(comm, SIZE, compute=lambda: matrix @ matrix)
    assert kept and sent > taken


# ---- the protocol step by step: rank 1 sends to rank 0, and stops in the middle ----


def collected_around_a_sender(comm) -> list[tuple[float, int, float] | None]:
    """Return what rank 0 collects while rank 1 fills a slot, and sends more as others would, and afterwards."""
    taken = []
    with PushInbox(comm, 5, torch.float64) as inbox:
        if comm.rank == 1:
            inbox.send(0, filled(1.0), 10.0)
            claimed = inbox._claim(0)  # a slot is reserved, but the vector is not there yet
            inbox.send(0, filled(4.0), 40.0)  # added to the other one
        collect(comm, inbox, taken)
        if comm.rank == 1:
            inbox.send(0, filled(8.0), 80.0)
        collect(comm, inbox, taken)
        if comm.rank == 1:
            inbox._fill(0, *claimed, filled(2.0), 20.0)
        collect(comm, inbox, taken)
        collect(comm, inbox, taken)
    return comm.bcast(taken)


def collect(comm, inbox: PushInbox, taken: list[tuple[float, int, float] | None]) -> None:
    comm.Barrier()
    if comm.rank == 0:
        found = inbox.collect()
        taken.append((float(found.total[0]), found.count, found.weight) if found else None)
        inbox.release()
    comm.Barrier()


def test_a_vector_that_is_on_its_way_comes_with_a_later_collection(comm, needs):
    needs(2)
    assert collected_around_a_sender(comm) == [(5.0, 2, 50.0), (8.0, 1, 80.0), (2.0, 1, 20.0), None]


def test_a_receiver_that_takes_what_is_held_counts_an_incomplete_vector(comm, needs, monkeypatch):
    needs(2)
    take = PushInbox._take

    def hasty(self: PushInbox, slot: int, state: int) -> bool:
        if state < EMPTY and self._swap(self._rank, slot, state, self._filling(self._rank)) == state:
            return True
        return take(self, slot, state)

    monkeypatch.setattr(PushInbox, "_take", hasty)
    taken = collected_around_a_sender(comm)
    assert sum(found[0] for found in taken if found) != 15.0 or taken[0] != (5.0, 2, 50.0)


def in_use(comm, *, release_early: bool) -> tuple[float, float]:
    """Return an element of what rank 0 has collected, and the same after others have sent more."""
    before = after = 0.0
    with PushInbox(comm, 5, torch.float64) as inbox:
        if comm.rank == 1:
            for _ in range(SLOTS):
                inbox.send(0, filled(1.0))
        comm.Barrier()
        if comm.rank == 0:
            received = inbox.collect()
            before = float(received.total[0])
            if release_early:
                inbox.release()
        comm.Barrier()
        if comm.rank == 1:
            for _ in range(2 * SLOTS):
                inbox.send(0, filled(10.0))
        comm.Barrier()
        if comm.rank == 0:
            inbox._rows.acquire(0, 0)
            after = float(received.total[0])
        comm.Barrier()
    return comm.bcast((before, after))


def test_what_is_in_use_stays_as_it_is_while_others_send(comm, needs):
    needs(2)
    assert in_use(comm, release_early=False) == (SLOTS, SLOTS)


def test_what_is_released_is_overwritten(comm, needs):
    needs(2)
    before, after = in_use(comm, release_early=True)
    assert before == SLOTS and after % 10 == 0


def test_senders_wait_only_while_all_slots_are_held(comm, needs):
    needs(2)
    seen = None
    with PushInbox(comm, 5, torch.float64) as inbox:
        if comm.rank == 1:
            held = [inbox._claim(0) for _ in range(SLOTS)]
            waits = inbox._claim(0) is None
            inbox._fill(0, *held[0], filled(1.0), 1.0)
            claimed = inbox._claim(0)
            inbox._fill(0, *claimed, filled(2.0), 2.0)
            for rest in held[1:]:
                inbox._fill(0, *rest, filled(4.0), 4.0)
            seen = None not in held, waits, claimed == (held[0].slot, push_inbox._full(1.0))
        taken = []
        collect(comm, inbox, taken)
    total = 3.0 + 4.0 * (SLOTS - 1)
    assert comm.bcast(seen, 1) == (True, True, True)
    assert comm.bcast(taken) == [(total, SLOTS + 1, total)]


# ---- a sender that dies: rank 1 stops in the middle, and does not continue ----


def collected_beside_the_dead(comm, before: int, *, completes: bool = False) -> list[tuple[float, int, float] | None]:
    """Return what rank 0 collects after rank 1 sent `before` ones, claimed a slot for a 2, and died.

    Then rank 2, if there is one, sends as many fours as there are slots, and rank 0 collects again.
    """
    taken = []
    with PushInbox(comm, 5, torch.float64) as inbox:
        if comm.rank == 1:
            for _ in range(before):
                inbox.send(0, filled(1.0), 10.0)
            claimed = inbox._claim(0)
            if completes:
                inbox._fill(0, *claimed, filled(2.0), 20.0)
        comm.Barrier()
        inbox.forget(1)
        collect(comm, inbox, taken)
        if comm.rank == 2:
            for _ in range(SLOTS):
                inbox.send(0, filled(4.0), 40.0)
        collect(comm, inbox, taken)
    return comm.bcast(taken)


def test_a_dead_senders_vector_is_complete_or_discarded_and_its_slot_is_used_again(comm, needs):
    needs(2)
    later = (4.0 * SLOTS, SLOTS, 40.0 * SLOTS) if comm.size > 2 else None
    assert collected_beside_the_dead(comm, 0) == [None, later]
    assert collected_beside_the_dead(comm, 0, completes=True) == [(2.0, 1, 20.0), later]
    for before in range(1, SLOTS):  # it is in a slot of its own
        assert collected_beside_the_dead(comm, before) == [(1.0 * before, before, 10.0 * before), later]


def test_a_sender_does_not_wait_for_a_dead_sender(comm, needs):
    needs(3)
    with PushInbox(comm, 5, torch.float64) as inbox:
        if comm.rank == 1:
            for _ in range(SLOTS):
                inbox._claim(0)
        comm.Barrier()
        if comm.rank == 2:
            waits = inbox._claim(0) is None
            inbox._poll = lambda: inbox.forget(1)
            inbox.send(0, filled(4.0))
        comm.Barrier()
        received = inbox.collect()
        found = comm.bcast(float(received.total[0]) if comm.rank == 0 else None)
        waited = comm.bcast(waits if comm.rank == 2 else None, 2)
    assert waited and found == 4.0


def test_a_sender_does_not_wait_for_a_dead_receiver(comm, needs):
    needs(2)
    with PushInbox(comm, 5, torch.float64) as inbox:
        if comm.rank == 1:
            for slot in range(SLOTS):
                inbox._fill(0, *inbox._claim(0), filled(slot), 1.0)
        comm.Barrier()
        if comm.rank == 0:
            for slot in range(SLOTS):
                assert inbox._take(slot, push_inbox._full(1.0))
        comm.Barrier()
        if comm.rank == 1:
            waits = inbox._claim(0) is None
            inbox._poll = lambda: inbox.forget(0)
            gone = inbox._claim(0) == GONE
            inbox.send(0, filled(4.0))
        assert comm.bcast(waits and gone if comm.rank == 1 else None, 1)


def test_a_sum_interrupted_by_a_death_raises(comm, needs):
    needs(2)
    expected = (SLOTS + 2.0, SLOTS + 1, 10.0 * SLOTS + 20.0)
    assert collected_beside_the_dead(comm, SLOTS, completes=True)[0] == expected
    if comm.rank == 0:
        with pytest.raises(RankFailed, match="died while it added"):
            collected_alone(comm)
    else:
        collected_alone(comm)


def collected_alone(comm) -> None:
    inbox = PushInbox(comm, 5, torch.float64)
    try:
        if comm.rank == 1:
            for _ in range(SLOTS):
                inbox.send(0, filled(1.0))
            inbox._claim(0)
        comm.Barrier()
        if comm.rank == 0:
            inbox.forget(1)
            inbox.collect()
    finally:
        inbox.free()


# ---- the interface ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_collect_returns_all_earlier_vectors(comm, dtype, transport):
    counting = torch.arange(7, dtype=dtype, device=transport.device)
    with PushInbox(comm, 7, dtype, transport) as inbox:
        for turn in range(1, 4):
            for peer in range(comm.size):
                if peer != comm.rank:
                    inbox.send(peer, counting + turn, 0.5)
            comm.Barrier()
            received = inbox.collect()
            others = comm.size - 1
            if others:
                assert received.total.dtype == dtype and (received.total == others * (counting + turn)).all()
                assert received.count == others and received.weight == 0.5 * others
            else:
                assert received is None
            assert inbox.collect() is None
            comm.Barrier()


def test_more_vectors_than_slots_all_arrive(comm, needs, transport):
    needs(2)
    with PushInbox(comm, 7, torch.float32, transport) as inbox:
        for n in (SLOTS, SLOTS + 1, 1, 4 * SLOTS):
            for value in range(n):
                vector = torch.full((7,), float(value), device=transport.device)
                inbox.send((comm.rank + 1) % comm.size, vector, value + 1)
            comm.Barrier()
            received = inbox.collect()
            expected = n * (n - 1) / 2
            assert (received.total == expected).all() and received[1:] == (n, expected + n)
            comm.Barrier()


def test_wrong_vectors_and_sending_to_itself_are_refused(comm):
    with PushInbox(comm, 3, torch.float32) as inbox:
        with pytest.raises(ValueError, match="itself"):
            inbox.send(comm.rank, torch.zeros(3))
        with pytest.raises(ValueError, match=r"float64\[3\]: must be torch.float32\[3\]"):
            inbox.send((comm.rank + 1) % (comm.size + 1), torch.zeros(3, dtype=torch.float64))
        for weight in (0.0, float("nan")):
            with pytest.raises(ValueError, match=f"weight {weight}: must be greater than 0"):
                inbox.send((comm.rank + 1) % (comm.size + 1), torch.zeros(3), weight)
        assert inbox.collect() is None


def test_free_is_idempotent_and_a_freed_inbox_raises(comm):
    inbox = PushInbox(comm, 3, torch.float64)
    inbox.free()
    inbox.free()
    with pytest.raises(ValueError, match="freed"):
        inbox.collect()
