"""A reader gets one publication as a whole, however fast the owner publishes, and neither waits for the other.

Every rank publishes vectors that hold their serial number in every element, so a read must be uniformly its serial
number.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from hpcsync.mpi.transport import cuda, published_replica
from hpcsync.mpi.transport.published_replica import EVALUATED_ROWS, PEERS_ROWS, UNREAD_ROWS, PublishedReplica
from hpcsync.mpi.transport.tensor_window import HOST

SIZE = (1 << 19) + 3
BUSY_S = 0.3
LIMIT_S = 200.0


def filled(value: float, size: int = 5, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.full((size,), float(value), dtype=dtype)


class Reading(threading.Thread):
    """Reads all ranks in turn as one reader; counts reads that were mixed or went back."""

    def __init__(self, exposed: PublishedReplica, peers: list[int], reader: int, into: torch.Tensor) -> None:
        super().__init__()
        self.exposed, self.peers, self.reader = exposed, peers, reader
        self.into = into
        self.reads = self.mixed = self.back = 0
        self.done = threading.Event()
        self.start()

    def run(self) -> None:
        with cuda.own_stream(self.into.device):
            self.read()

    def read(self) -> None:
        last = dict.fromkeys(self.peers, 0)
        while not self.done.is_set():
            for peer in self.peers:
                serial = self.exposed.read(peer, self.into, self.reader)
                self.reads += 1
                self.mixed += not (self.into == serial).all()
                self.back += serial < last[peer]
                last[peer] = serial


def hammer(comm, dtype, transport=HOST, *, until_mixed: bool) -> tuple[int, int, int, int]:
    """(publications refused, reads, mixed, back) of all ranks: each publishes without pause, and a thread reads."""
    refused, serial = 0, 0
    everybody = list(range(comm.size))
    vector = torch.zeros(SIZE, dtype=dtype, device=transport.device)
    with PublishedReplica(comm, SIZE, dtype, transport) as exposed:
        peers = [peer for peer in everybody if peer != comm.rank]
        readers = [Reading(exposed, peers, comm.rank, vector.clone())] if peers else []
        if comm.rank == 0:
            readers.append(Reading(exposed, everybody, comm.size, vector.clone()))
        deadline_s = time.monotonic() + (LIMIT_S if until_mixed else BUSY_S)
        enough = None  # no rank stops publishing before all readers have finished
        while enough is None or not enough.Test():
            vector[:] = serial + 1
            if exposed.publish(vector):
                serial += 1
            else:
                refused += 1
            assert exposed.serial == serial
            over = time.monotonic() > deadline_s or (until_mixed and all(reader.mixed for reader in readers))
            if enough is None and over:
                enough = comm.Ibarrier()
        for reader in readers:
            reader.done.set()
        for reader in readers:
            reader.join()
        comm.Barrier()
    counts = [refused, *(sum(getattr(r, name) for r in readers) for name in ("reads", "mixed", "back"))]
    return tuple(np.sum(comm.allgather(counts), axis=0).tolist())


def test_no_read_is_mixed_and_serial_numbers_never_go_back(comm, transport):
    refused, reads, mixed, back = hammer(comm, torch.float32, transport, until_mixed=False)
    if comm.rank == 0:
        print(f"{reads} reads, {refused} publications refused")
    assert (mixed, back) == (0, 0) and reads > 0


def test_reads_are_mixed_when_the_current_row_is_filled(comm, transport, monkeypatch):
    monkeypatch.setattr(PublishedReplica, "_free_row", lambda self: 0)
    assert hammer(comm, torch.float32, transport, until_mixed=True)[2] > 0


def test_extra_elements_are_of_the_same_publication(comm, transport):
    """Their bits arrive, whatever numbers they are; readers that do not want them get the replica alone."""
    words = torch.tensor([-1, 2**62 + comm.rank, 0x7FF0000000000001], dtype=torch.int64, device=transport.device)
    with PublishedReplica(comm, 3, torch.float32, transport, extra=6) as exposed:
        comm.Barrier()
        vector = torch.full((3,), float(comm.rank), device=transport.device)
        for serial in (1, 2, 3):
            assert exposed.publish(vector + serial, serial, 0.5 * serial, (words + serial).view(torch.float32))
        comm.Barrier()
        for peer in range(comm.size):
            for reader in {comm.rank, comm.size if comm.rank == 0 else comm.rank}:
                into, weight = torch.empty_like(vector), vector.new_empty(1)
                found = torch.zeros_like(words)
                assert exposed.read(peer, into, reader, weight, found.view(torch.float32)) == 3
                assert (into == peer + 3).all() and weight == 1.5
                assert found.tolist() == [2, 2**62 + peer + 3, 0x7FF0000000000004]
                assert exposed.read(peer, into, reader) == 3 and (into == peer + 3).all()
        comm.Barrier()


# ---- the protocol step by step ----


def after_ten_publications(comm) -> tuple[torch.Tensor, int]:
    """What the evaluator copies of the last rank that has published 1, had it claimed, and published 2 to 11."""
    into, serial, owner = filled(-1), -1, comm.size - 1
    with PublishedReplica(comm, 5, torch.float64) as exposed:
        if comm.rank == owner:
            assert exposed.publish(filled(1))
        comm.Barrier()
        if comm.rank == 0:
            row = exposed._claim(owner)
        comm.Barrier()
        if comm.rank == owner:
            assert all(exposed.publish(filled(value)) for value in range(2, 12))
        comm.Barrier()
        if comm.rank == 0:
            serial = exposed._copy(owner, row, into)
            exposed._finish(owner, row)
            latest = filled(0)
            assert exposed.read(owner, latest, comm.size) == 11 and (latest == 11).all()
        comm.Barrier()
    return comm.bcast((into, serial))


def test_a_claimed_row_is_unchanged_by_ten_publications(comm):
    into, serial = after_ten_publications(comm)
    assert serial == 1 and (into == 1).all()


def test_a_claimed_row_is_overwritten_when_the_owner_ignores_claims(comm, monkeypatch):
    monkeypatch.setattr(PublishedReplica, "_n_readers", lambda self, row: 0)
    into, serial = after_ten_publications(comm)
    assert serial != 1 and (into != 1).all()


def copies_what_is_being_filled(comm) -> bool:
    """Return whether a reader copies a row that the owner has chosen before it is claimed and fills afterwards."""
    with PublishedReplica(comm, 5, torch.float64) as exposed:
        add, chosen = exposed._words.fetch_add, []

        def slow_add(value: int, peer: int, offset: int) -> int:
            if not chosen:
                chosen.append(None)
                assert exposed.publish(filled(1))
                chosen[:] = [exposed._free_row()]
            return add(value, peer, offset)

        exposed._words.fetch_add = slow_add
        row = exposed._claim(comm.rank)
        exposed._words.fetch_add = add
        comm.Barrier()
    return row in chosen


def test_a_row_that_was_chosen_before_the_claim_is_not_copied(comm):
    assert not copies_what_is_being_filled(comm)


def test_a_reader_that_looks_before_it_claims_copies_it(comm, monkeypatch):
    def hasty(self: PublishedReplica, peer: int) -> int:
        _, row = self._unpack(self._words.get_word(peer, published_replica.CURRENT))
        self._words.fetch_add(self._n_rows, peer, published_replica.CURRENT)
        return row

    monkeypatch.setattr(PublishedReplica, "_claim", hasty)
    assert copies_what_is_being_filled(comm)


@pytest.mark.parametrize("n_rows", [PEERS_ROWS, EVALUATED_ROWS])
def test_without_a_free_row_the_last_publication_stands(comm, n_rows):
    with PublishedReplica(comm, 5, torch.float64, n_rows=n_rows) as exposed:
        slow = exposed._n_rows - 1  # readers, each of which holds another publication
        for reader in range(slow):
            assert exposed.publish(filled(reader + 1))
            assert exposed._claim(comm.rank) == exposed._current
        held = exposed._current
        assert exposed.publish(filled(slow + 1))
        assert not exposed.publish(filled(99)) and exposed.serial == slow + 1
        into = filled(-1)
        assert exposed.read(comm.rank, into) == slow + 1 and (into == slow + 1).all()
        exposed._finish(comm.rank, held)
        assert exposed.publish(filled(6)) and exposed.serial == slow + 2
        comm.Barrier()


# ---- the interface ----


def test_before_the_first_publication_there_are_zeros(comm):
    with PublishedReplica(comm, 3, torch.float32) as exposed:
        for peer in range(comm.size):
            into = filled(-1, 3, torch.float32)
            assert exposed.read(peer, into) == 0 and (into == 0).all()
        comm.Barrier()


@pytest.mark.parametrize("n_rows", [PEERS_ROWS, UNREAD_ROWS])
@pytest.mark.parametrize("size", [1, 7, 1001])
def test_all_ranks_read_all_ranks(comm, size, n_rows, transport):
    counting = torch.arange(size, dtype=torch.float32, device=transport.device)
    with PublishedReplica(comm, size, torch.float32, transport, n_rows=n_rows) as exposed:
        for turn in range(1, 6):
            assert exposed.publish(counting + 100 * comm.rank + turn, weight=turn / 2)
            comm.Barrier()
            for peer in range(comm.size):
                into, weight = torch.zeros_like(counting), torch.zeros_like(counting[:1])
                assert exposed.serial_of(peer, comm.rank) == turn
                assert exposed.read(peer, into, weight=weight) == turn
                assert (into == counting + 100 * peer + turn).all() and weight == turn / 2
            comm.Barrier()


def test_wrong_vectors_and_readers_are_refused(comm):
    with PublishedReplica(comm, 3, torch.float32) as exposed:
        with pytest.raises(ValueError, match=r"float64\[3\]: must be torch.float32\[3\]"):
            exposed.publish(filled(1, 3))
        with pytest.raises(ValueError, match=r"float32\[2\]: must be"):
            exposed.read(0, filled(1, 2, torch.float32))
        with pytest.raises(ValueError, match="reader"):
            exposed.read(0, filled(1, 3, torch.float32), comm.size + 1)


def test_free_is_idempotent_and_a_freed_replica_raises(comm):
    exposed = PublishedReplica(comm, 3, torch.float64)
    exposed.free()
    exposed.free()
    with pytest.raises(ValueError, match="freed"):
        exposed.publish(filled(1, 3))
