"""Push inbox: vectors pushed one-sided to a peer, which collects their sum at any time.

Each rank has a few slots for vectors. Two words of 8 bytes belong to each:

    state    0: empty; greater than 0: full, and the bits of its float64 weight; less than 0: held by a rank
    count    number of vectors whose sum the slot contains when it is full; 1 while it is empty

A sender claims a slot by a compare-and-swap of its state: one that is empty, into which it puts its vector, or else one
that is full, of which it gets the content, adds its vector and puts the sum back. It then flushes, and sets the state
to the weight of all vectors in the slot. The receiver claims the full ones likewise, adds them up in the first one's
memory, and sets each to empty when it no longer uses it. A sender finds neither kind only while other ranks hold all
slots, and waits for them then, at most for as long as they transfer or mix. It does not wait for a rank that computes.

Why no vector is lost or counted twice: only the rank that holds a slot changes what is in it, and a slot changes hands
by its state alone, one word, once everything before is complete.

A rank that dies may leave a slot held. If it was filling it, or has collected it, nothing in it counts, and another
sender takes the slot over once it knows of the death (`forget`). If it was adding to it, vectors of others may be torn,
and the receiver raises when it collects. Between hosts no death is tolerated.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.mpi.transport.ulfm import RankFailed
from hpcsync.mpi.transport.window import PIECE_BYTES, Freed, Window
from hpcsync.training.local_update import Received

SLOTS = 4  # with fewer of them more vectors are added to others, which takes twice as long as a put between hosts
NODE_SLOTS = 2  # on one node, where it does not
EMPTY = 0  # a state
STATE, COUNT = 0, SLOTS  # indices of the words of slot 0
BLOCK_BYTES = 8 * PIECE_BYTES  # of a vector that is added to a slot: one is on its way there, the next on its way here


class _Claimed(NamedTuple):
    """A slot that this rank holds, and its state before."""

    slot: int
    before: int


GONE = _Claimed(-1, EMPTY)  # no slot: the receiver has died


class PushInbox(Freed):
    """Inbox of this rank, and access to those of all other ranks.

    Parameters
    ----------
    comm
        Communicator; the constructor and `free` are collective over it. Vectors not collected before `free` are lost.
    size
        Elements of a vector, the same on all ranks.
    dtype
        Type of the elements.
    transport
        Transport of the vectors.
    backoff
        Waiting for a slot.
    poll
        Called while waiting for a slot; it may call `forget`.
    n_slots
        Number of slots, at most `SLOTS`; the same on all ranks.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        size: int,
        dtype: torch.dtype,
        transport: Transport = HOST,
        *,
        backoff: Backoff | None = None,
        poll: Callable[[], None] = lambda: None,
        n_slots: int = SLOTS,
    ) -> None:
        self._rank, self._n_ranks, self._size = comm.rank, comm.size, size
        self._n_slots = n_slots
        self._dtype, self._device = dtype, transport.device
        self._backoff, self._poll = backoff or Backoff(comm, passive=transport.passive), poll
        self._rows = transport.window(comm, (n_slots if comm.size > 1 else 0) * size, dtype)
        self._words = Window(comm, 2 * SLOTS, np.int64)
        self._dead: set[int] = set()
        self._in_use: int | None = None  # slot whose memory holds what was collected last
        self._kept: Received | None = None  # collected by `keep`, for the next `collect`
        self._words.local[:COUNT], self._words.local[COUNT:] = EMPTY, 1
        self._words.sync()
        comm.Barrier()

    # ---- the sender's side ----

    def send(self, peer: int, vector: torch.Tensor, weight: float = 1.0) -> None:
        """Add `vector`, shape (size,), to the sum that `peer` will collect; on return it has arrived and may be reused.

        What is sent to a rank that has died is lost.

        Parameters
        ----------
        peer
            Receiving rank.
        vector
            Vector to add, already multiplied by its weight.
        weight
            Weight, greater than 0; weights are added up beside the vectors and do not scale them.

        Raises
        ------
        ValueError
            If `peer` is this rank, or the shape, dtype or weight does not fit.
        """
        if peer == self._rank:
            raise ValueError(f"rank {peer} cannot send to itself")
        if vector.shape != (self._size,) or vector.dtype != self._dtype:
            raise ValueError(f"{vector.dtype}{list(vector.shape)}: must be {self._dtype}[{self._size}]")
        if not weight > 0:
            raise ValueError(f"weight {weight}: must be greater than 0")
        claimed = self._backoff.until(lambda: self._claim(peer))
        if claimed != GONE:
            self._fill(peer, *claimed, vector, weight)

    def _claim(self, peer: int) -> _Claimed | None:
        """Claim a slot of the peer; return None if all are held, or `GONE` if the peer has died meanwhile."""
        found = [EMPTY] * self._n_slots
        for slot in range(self._n_slots):
            for unused in (EMPTY, *map(self._filling, self._dead)):
                found[slot] = self._swap(peer, slot, unused, self._filling(self._rank))
                if found[slot] == unused:
                    return _Claimed(slot, EMPTY)
        for slot, state in enumerate(found):
            if state > EMPTY and self._swap(peer, slot, state, self._adding(self._rank)) == state:
                return _Claimed(slot, state)
        self._poll()
        return GONE if peer in self._dead else None

    def _fill(self, peer: int, slot: int, before: int, vector: torch.Tensor, weight: float) -> None:
        """Put or add a vector to a slot that this rank holds, and set its state."""
        if before == EMPTY:
            self._rows.put(vector, peer, slot * self._size)
            self._rows.flush(peer)
            self._swap(peer, slot, self._filling(self._rank), _full(weight))
        else:
            self._add(peer, slot, vector)
            count = np.array([self._words.get_word(peer, COUNT + slot) + 1])  # which is read until the flush
            self._words.put(count, peer, COUNT + slot)
            self._words.flush(peer)
            self._swap(peer, slot, self._adding(self._rank), _full(_weight(before) + weight))

    def _add(self, peer: int, slot: int, vector: torch.Tensor) -> None:
        n = BLOCK_BYTES // vector.itemsize
        blocks = torch.empty((2, min(n, self._size)), dtype=self._dtype, device=self._device)
        for number, begin in enumerate(range(0, self._size, n)):
            part = vector[begin : begin + n]
            block, at = blocks[number % 2, : len(part)], slot * self._size + begin
            self._rows.get(block, peer, at)
            self._rows.flush(peer)  # and complete the put of the block before
            block.add_(part)
            self._rows.put(block, peer, at)
        self._rows.flush(peer)

    # ---- the receiver's side ----

    def collect(self) -> Received | None:
        """Return the sum of all vectors that have arrived, or None if there are none; never wait.

        The sum is in a slot's memory, and valid until `release` or the next call. What another rank is sending, and
        what is in a slot that it adds to, comes with a later call.

        Raises
        ------
        RankFailed
            If a rank died while it added to vectors of others.
        """
        self.release()
        received, self._kept = self._kept, None
        self._words.sync()
        for slot, state in enumerate(self._words.local[: self._n_slots].tolist()):  # as last seen; a swap decides
            if not self._take(slot, state):
                continue
            begin, end = slot * self._size, (slot + 1) * self._size
            self._rows.acquire(begin, end)
            self._words.sync()
            found = Received(self._rows.local[begin:end], int(self._words.local[COUNT + slot]), _weight(state))
            if received is None:
                received, self._in_use = found, slot
            else:
                received = received.plus(found)
                self._empty(slot)
        return received

    def _take(self, slot: int, state: int) -> bool:
        """Hold a slot of this rank if it is full; return False if it is not, or its state has changed since."""
        if state in map(self._adding, self._dead):
            raise RankFailed("a rank died while it added to other ranks' vectors")
        return state > EMPTY and self._swap(self._rank, slot, state, self._filling(self._rank)) == state

    def release(self) -> None:
        """Let others use the memory of what was collected last."""
        if self._in_use is not None:
            self._empty(self._in_use)
            self._in_use = None

    def _empty(self, slot: int) -> None:
        self._rows.release(0, 0)  # this rank has read it, and what it wrote there is not to come after others' puts
        self._words.local[COUNT + slot] = 1
        self._words.sync()
        self._swap(self._rank, slot, self._filling(self._rank), EMPTY)

    def keep(self) -> Received | None:
        """Collect all vectors that have arrived, and keep them for the next `collect`; for use while no rank sends."""
        if (received := self.collect()) is not None:
            self._kept = received._replace(total=received.total.clone())
            self.release()
        return self._kept

    def put_back(self, kept: Received | None) -> None:
        """Restore the vectors that were kept at a checkpoint, in a run that is resumed."""
        self._kept = kept

    # ---- both ----

    def _filling(self, rank: int) -> int:
        """Return the state of a slot that `rank` holds, to fill it or because it has collected it."""
        return -1 - rank

    def _adding(self, rank: int) -> int:
        """Return the state of a slot that `rank` holds, to add to its content."""
        return -1 - self._n_ranks - rank

    def _swap(self, rank: int, slot: int, expected: int, state: int) -> int:
        """Set the state of a slot if it is as expected; return what it was."""
        return self._words.compare_and_swap(expected, state, rank, STATE + slot)

    def forget(self, rank: int) -> None:
        """Take over what a rank that died has left."""
        self._dead.add(rank)

    def free(self) -> None:
        """Free the windows; collective, and harmless when repeated. No rank may still be sending."""
        self._rows.free()
        self._words.free()


def _full(weight: float) -> int:
    """Return the state of a full slot: the bits of a positive number are those of a positive integer."""
    return int(struct.unpack("=q", struct.pack("=d", weight))[0])


def _weight(state: int) -> float:
    """Return the weight of what is in a full slot."""
    return float(struct.unpack("=d", struct.pack("=q", state))[0])
