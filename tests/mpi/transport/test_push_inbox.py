"""Every vector sent is collected once and as a whole, with counts and weights, while many ranks send."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcsync.mpi.transport.push_inbox import SLOTS, TICKETS, PushInbox
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


def exchange(comm, size: int, transport=HOST, *, compute) -> tuple[bool, int, int]:
    """Return (whether none is lost or counted twice, vectors sent, collections) of random pushes in all directions."""
    generator = np.random.default_rng(comm.rank)
    received, n_collections = Received(size), 0
    sent, counts, weights = np.zeros((comm.size, size)), np.zeros(comm.size), np.zeros(comm.size)
    with PushInbox(comm, size, torch.float64, transport) as inbox:
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


@pytest.mark.parametrize("size", [1, SIZE])
def test_nothing_is_lost_and_nothing_is_counted_twice(comm, needs, size, transport):
    needs(2)
    kept, sent, taken = exchange(comm, size, transport, compute=lambda: None)
    if comm.rank == 0:
        print(f"{sent} vectors of {size} in {taken} collections")
    assert kept and sent > 0


def test_the_receiver_may_compute_meanwhile(comm, needs):
    needs(2)
    matrix = np.ones((300, 300))
    kept, sent, taken = exchange(comm, SIZE, compute=lambda: matrix @ matrix)
    assert kept and sent > taken


# ---- the protocol step by step: rank 1 sends to rank 0, and stops in the middle ----


def collected_around_a_sender(comm) -> tuple[list[tuple[float, int, float]], tuple[float, int, float]]:
    """Return what rank 0 collects while rank 1 writes, in a second call, and after rank 1 has left; and their sum."""
    taken, received = [], Received(5)
    with PushInbox(comm, 5, torch.float64) as inboxes:

        def collect() -> None:
            comm.Barrier()
            if comm.rank == 0:
                found = inboxes.collect()
                taken.append((float(found.total[0]), found.count, found.weight) if found else None)
                received.take(found)
            comm.Barrier()

        if comm.rank == 1:
            inboxes.send(0, filled(1.0), 10.0)
            inbox, ticket = inboxes._ticket(0)  # a place is reserved, but the vector is not there yet
        collect()
        if comm.rank == 1:
            inboxes.send(0, filled(4.0), 40.0)  # by another sender, as it were: to the inbox that is active now
        collect()
        if comm.rank == 1:
            inboxes._fill(0, inbox, ticket, filled(2.0), 20.0)
        collect()
        collect()
    summary = (float(received.total[0]), received.count, received.weight)
    return comm.bcast((taken, summary))


def test_an_inbox_is_not_emptied_while_a_sender_writes_to_it(comm, needs):
    needs(2)
    taken, summary = collected_around_a_sender(comm)
    assert taken == [None, None, (7.0, 3, 70.0), None]
    assert summary == (7.0, 3, 70.0)


def test_a_receiver_that_does_not_wait_misses_an_incomplete_vector(comm, needs, monkeypatch):
    needs(3)  # so that there is a slot for it
    monkeypatch.setattr(PushInbox, "_is_complete", lambda self, drained: True)
    taken, summary = collected_around_a_sender(comm)
    assert taken[0] == (1.0, 1, 10.0)
    assert summary == (5.0, 2, 50.0)


def sent_across_a_switch(comm) -> tuple[float, int]:
    """Return what rank 0 collects of 1 and 2 if it switches inboxes around the moment when 2's sender takes a ticket.

    A sender that looks which inbox is active before it takes its ticket sees the one that rank 0 takes in between.
    """
    received = Received(5)
    with PushInbox(comm, 5, torch.float64) as inbox:
        if comm.rank == 1:
            inbox.send(0, filled(1.0))
            add, adds = inbox._words.fetch_add, []

            def slow_add(value: float, rank: int, offset: int) -> float:
                before = add(value, rank, offset)
                if not adds:
                    comm.Barrier()  # rank 0 takes the inbox that is active
                    comm.Barrier()
                adds.append(value)
                return before

            inbox._words.fetch_add = slow_add
            inbox.send(0, filled(2.0))
            inbox._words.fetch_add = add
        else:
            comm.Barrier()
            if comm.rank == 0:
                received.take(inbox.collect())
            comm.Barrier()
        comm.Barrier()
        if comm.rank == 0:
            received.take(inbox.collect())
            received.take(inbox.collect())
        comm.Barrier()
    return comm.bcast((float(received.total[0]), received.count))


def test_a_ticket_is_of_the_inbox_that_was_active(comm, needs):
    needs(2)
    assert sent_across_a_switch(comm) == (3.0, 2)


def test_a_sender_that_looks_before_it_takes_a_ticket_loses_its_vector(comm, needs, monkeypatch):
    needs(3)  # so that the slots of an inbox are more than one

    def hasty(self: PushInbox, peer: int) -> tuple[int, int]:
        ticket, inbox = divmod(int(self._words.fetch_add(0, peer, TICKETS)), 2)
        self._words.fetch_add(2, peer, TICKETS)
        return inbox, ticket

    monkeypatch.setattr(PushInbox, "_ticket", hasty)
    assert sent_across_a_switch(comm) != (3.0, 2)


def test_tickets_that_the_receiver_has_not_seen_leave_slots_empty(comm, needs):
    """Those that are taken between the receiver's look and its switch; slots that are left out are no loss."""
    needs(2)
    received = Received(5)
    with PushInbox(comm, 5, torch.float64) as inbox:
        look = inbox._switch

        def slow_switch(active: int, seen: int):
            comm.Barrier()
            comm.Barrier()
            inbox._switch = look
            return look(active, seen)

        if comm.rank == 1:
            inbox.send(0, filled(1.0))
        comm.Barrier()
        if comm.rank == 0:
            inbox._switch = slow_switch
            received.take(inbox.collect())
            assert received.count == 3 and inbox._first == 2
        else:
            comm.Barrier()
            if comm.rank == 1:
                inbox.send(0, filled(2.0))
                inbox.send(0, filled(4.0))
            comm.Barrier()
        comm.Barrier()
        if comm.rank == 1:
            inbox.send(0, filled(8.0))
            inbox.send(0, filled(16.0))
        comm.Barrier()
        if comm.rank == 0:
            received.take(inbox.collect())
            assert received.count == 5 and inbox._first == 0
            assert inbox.collect() is None
        comm.Barrier()
    assert comm.bcast(float(received.total[0])) == 31.0


# ---- a sender that dies: rank 1 stops in the middle, and does not continue ----


def collected_without(
    comm, steps: int, before: int = 0, forgetting: bool = True
) -> list[tuple[float, int, float] | None]:
    """Return two collections of rank 0 after rank 1 sent `before` ones, made `steps` steps of sending a 2, and died."""
    taken = []
    with PushInbox(comm, 5, torch.float64) as inboxes:
        if comm.rank == 1:
            for _ in range(before):
                inboxes.send(0, filled(1.0), 10.0)
            inboxes._say_sending(1)
            inbox, ticket = inboxes._ticket(0) if steps > 0 else (None, None)
            if steps > 1:
                inboxes._fill(0, inbox, ticket, filled(2.0), 20.0)
        comm.Barrier()
        if comm.rank == 0:
            if forgetting:
                inboxes.forget(1)
            for _ in range(2):
                found = inboxes.collect()
                taken.append((float(found.total[0]), found.count, found.weight) if found else None)
        comm.Barrier()
    return comm.bcast(taken)


def test_a_dead_senders_vector_is_complete_or_discarded(comm, needs):
    needs(2)
    assert collected_without(comm, 0) == [None, None]
    assert collected_without(comm, 1) == [None, None]
    assert collected_without(comm, 2) == [(2.0, 1, 20.0), None]
    slots = min(comm.size - 1, SLOTS)
    for before in range(slots):  # it is in a slot of its own
        expected = (1.0 * before, before, 10.0 * before) if before else None
        assert collected_without(comm, 1, before) == [expected, None]


def test_a_dead_sender_is_waited_for_until_it_is_forgotten(comm, needs):
    needs(3)  # so that there is a slot
    assert collected_without(comm, 1, 1, forgetting=False) == [None, None]


def collected_beside_the_dead(comm) -> list[tuple[float, int] | None]:
    """Return what rank 0 collects after rank 1 has died with a ticket, before and after rank 2 completes its vector."""
    taken = []
    with PushInbox(comm, 5, torch.float64) as inboxes:
        if comm.rank == 1:
            inboxes._say_sending(1)
            inboxes._ticket(0)
        comm.Barrier()
        if comm.rank == 2:
            inboxes._say_sending(1)
            inbox, ticket = inboxes._ticket(0)
        comm.Barrier()
        for turn in range(2):
            if turn and comm.rank == 2:
                inboxes._fill(0, inbox, ticket, filled(4.0), 1.0)
                inboxes._say_sending(0)
            comm.Barrier()
            if comm.rank == 0:
                inboxes.forget(1)
                found = inboxes.collect()
                taken.append((float(found.total[0]), found.count) if found else None)
            comm.Barrier()
    return comm.bcast(taken)


def test_a_living_sender_is_waited_for_beside_a_dead_one(comm, needs):
    needs(3)
    assert collected_beside_the_dead(comm) == [None, (4.0, 1)]


def test_without_asking_the_living_their_vectors_are_lost(comm, needs, monkeypatch):
    needs(3)
    monkeypatch.setattr(PushInbox, "_sends_here", lambda self, rank: False)
    assert collected_beside_the_dead(comm) == [None, None]


def test_a_sum_interrupted_by_a_death_raises(comm, needs):
    needs(2)
    slots = min(comm.size - 1, SLOTS)
    assert collected_without(comm, 2, slots) == [(slots + 2.0, slots + 1, 10.0 * slots + 20.0), None]
    if comm.rank == 0:
        with pytest.raises(RankFailed, match="died while it added"):
            collected_alone(comm, slots)
    else:
        collected_alone(comm, slots)


def collected_alone(comm, before: int) -> None:
    inbox = PushInbox(comm, 5, torch.float64)
    try:
        if comm.rank == 1:
            for _ in range(before):
                inbox.send(0, filled(1.0))
            inbox._ticket(0)
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
        assert inbox.collect() is None


def test_free_is_idempotent_and_a_freed_inbox_raises(comm):
    inbox = PushInbox(comm, 3, torch.float64)
    inbox.free()
    inbox.free()
    with pytest.raises(ValueError, match="freed"):
        inbox.collect()
