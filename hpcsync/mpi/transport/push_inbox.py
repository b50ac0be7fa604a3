"""Push inbox: vectors pushed one-sided to a peer, which collects their sum at any time.

Each rank has two inboxes. Senders fill the active one; the other is empty, or waits for vectors that are still on their
way. An inbox has a few slots, into which vectors are put, and a sum in host memory, to which all further vectors are
added. The words, all float64, are:

    tickets                2 * tickets + inbox: the number of tickets of the active inbox, and which one that is
    sending                1 + the rank that this rank is sending to; 0: none
    and for each inbox
    weight of each slot    weight of the vector in the slot; 0 until the whole vector is there
    further, weight        number of vectors added to the sum, and the sum of their weights
    turns                  number of turns to add to the sum, between hosts

A sender takes a ticket by an atomic sum, which returns the active inbox and the ticket, the number of a slot. It puts
the vector there, flushes, and adds the weight, both to words of that inbox. The receiver, once the active inbox has
issued tickets, makes the other one active by an atomic sum on the same word, and learns from it how many tickets the
first one has issued in all. It adds up the vectors there when that many have arrived, and resets the words.

Why no vector is lost or counted twice: a ticket and a switch change one word, so they have an order. Every ticket of an
inbox is issued before the switch, and is counted then; the inbox is not emptied before as many vectors are complete,
and not active again before it is empty.

The switch also takes the tickets that the receiver has seen from the word, so that those of the other inbox begin at
0. Tickets that were issued between that look and the switch are left in the word: the other inbox begins after them,
and its first slots stay empty this time.

A vector is added to the sum by `MPI_Accumulate` on one node, which MPI does not support for GPU memory. Between hosts,
where that takes many times as long as a put (Open MPI, two senders at once), senders take turns, and each gets the sum
and puts it back: turn n begins when n vectors have been added. Either takes longer than a put into a slot.

A sender that dies leaves a ticket without a vector. Every rank therefore says in its own memory to which rank it is
sending; nobody looks there until a rank has died (`forget`) and an inbox is not complete. What is missing once every
living rank has been seen without a vector for this one, after the switch, is that of a dead one. A vector that it has
put into a slot either has a weight or is incomplete, and is then discarded. For the sum, there is no way to tell what
has been added: if a sender dies while it adds to the sum, the receiver raises. Between hosts no death is tolerated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.node_memory import numpy_dtype
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.mpi.transport.ulfm import RankFailed
from hpcsync.mpi.transport.window import PIECE_BYTES, Window
from hpcsync.training.local_update import Received

SLOTS = 3  # at most, per inbox: more peers rarely choose the same receiver between two of its calls of `collect`
TICKETS, SENDING = 0, 1
WEIGHTS, FURTHER, WEIGHT, TURNS, WORDS = 0, *range(SLOTS, SLOTS + 4)  # indices of an inbox's words, and their number
BLOCK_BYTES = 8 * PIECE_BYTES  # of a sum: one is on its way back while the next one is on its way here


class _Drained(NamedTuple):
    """Inbox that is not active, until it is emptied, and the tickets that it has issued: from `first` to `end`."""

    inbox: int
    first: int
    end: int


class PushInbox:
    """Inboxes of this rank, and access to those of all other ranks.

    Parameters
    ----------
    comm
        Communicator; the constructor and `free` are collective over it. Vectors not collected before `free` are lost.
    size
        Elements of a vector, the same on all ranks.
    dtype
        Type of the elements.
    transport
        Transport of the slots.
    """

    def __init__(self, comm: MPI.Intracomm, size: int, dtype: torch.dtype, transport: Transport = HOST) -> None:
        self._rank, self._n_ranks, self._size = comm.rank, comm.size, size
        self._slots = min(comm.size - 1, SLOTS)
        self._rows = transport.window(comm, 2 * self._slots * size, dtype)
        self._sums = Window(comm, 2 * size, numpy_dtype(dtype))
        self._words = Window(comm, 2 + 2 * WORDS, np.float64)
        self._backoff = Backoff(comm)
        self._dead: set[int] = set()
        self._suspects: set[int] = set()  # living ranks that may still send to the inbox that is drained
        self._total = torch.zeros(size, dtype=dtype, device=transport.device)
        self._first = 0  # ticket of the active inbox
        self._draining: _Drained | None = None
        self._kept: Received | None = None  # collected by `keep`, for the next `collect`
        self._sums.local[:] = 0
        self._words.local[:] = 0
        self._sums.sync()
        self._words.sync()
        comm.Barrier()

    # ---- the sender's side ----

    def send(self, peer: int, vector: torch.Tensor, weight: float = 1.0) -> None:
        """Add `vector`, shape (size,), to the sum that `peer` will collect; on return it has arrived and may be reused.

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
            If `peer` is this rank, or the shape or dtype does not fit.
        """
        if peer == self._rank:
            raise ValueError(f"rank {peer} cannot send to itself")
        if vector.shape != self._total.shape or vector.dtype != self._total.dtype:
            expected = f"{self._total.dtype}[{self._size}]"
            raise ValueError(f"{vector.dtype}{list(vector.shape)}: must be {expected}")
        self._say_sending(1 + peer)
        inbox, ticket = self._ticket(peer)
        self._fill(peer, inbox, ticket, vector, weight)
        self._say_sending(0)

    def _say_sending(self, peer: int) -> None:
        self._words.local[SENDING] = peer
        self._words.sync()

    def _ticket(self, peer: int) -> tuple[int, int]:
        """Take a ticket of the peer's active inbox; return the inbox and the ticket."""
        ticket, inbox = divmod(int(self._words.fetch_add(2, peer, TICKETS)), 2)
        return inbox, ticket

    def _fill(self, peer: int, inbox: int, ticket: int, vector: torch.Tensor, weight: float) -> None:
        if ticket < self._slots:
            self._rows.put(vector, peer, self._offset(inbox, ticket))
            self._rows.flush(peer)
            self._words.fetch_add(weight, peer, self._at(inbox, WEIGHTS + ticket))
        else:
            add = self._accumulate if self._backoff.one_node else self._add_in_turn
            add(vector.cpu().numpy(), peer, inbox)
            self._words.fetch_add(weight, peer, self._at(inbox, WEIGHT))
            self._words.fetch_add(1, peer, self._at(inbox, FURTHER))

    def _accumulate(self, vector: np.ndarray, peer: int, inbox: int) -> None:
        self._sums.accumulate(vector, peer, inbox * self._size)
        self._sums.flush(peer)

    def _add_in_turn(self, vector: np.ndarray, peer: int, inbox: int) -> None:
        """Add `vector` to the sum of the peer's inbox after all senders that have come before."""
        turn = self._words.fetch_add(1, peer, self._at(inbox, TURNS))
        further = self._at(inbox, FURTHER)
        self._backoff.until(lambda: self._words.fetch_add(0, peer, further) == turn)
        n = BLOCK_BYTES // vector.itemsize
        blocks = np.empty((2, n), vector.dtype)
        for number, begin in enumerate(range(0, self._size, n)):
            part = vector[begin : begin + n]
            block, at = blocks[number % 2, : len(part)], inbox * self._size + begin
            self._sums.get(block, peer, at)
            self._sums.flush(peer)  # and complete the put of the block before
            block += part
            self._sums.put(block, peer, at)
        self._sums.flush(peer)

    # ---- the receiver's side; it also reads and changes the words of its inboxes by atomic sums, as senders do ----

    def collect(self) -> Received | None:
        """Return the sum of all vectors that have arrived, or None if there are none; never wait.

        Vectors in an inbox to which another sender is still writing come with a later call.
        """
        received, self._kept = self._kept, None
        if received is not None:
            received = received._replace(total=self._total.copy_(received.total))
        if self._draining is not None:
            received = self._take(self._draining, received)
        if self._draining is None:
            seen, inbox = divmod(int(self._word(TICKETS)), 2)
            if seen > self._first:
                self._draining = self._switch(inbox, seen)
                received = self._take(self._draining, received)
        return received

    def _switch(self, inbox: int, seen: int) -> _Drained:
        """Make the other inbox active; `seen` tickets of this one are known."""
        before = self._words.fetch_add(1 - 2 * (inbox + seen), self._rank, TICKETS)
        drained = _Drained(inbox, self._first, int(before) // 2)
        self._first = drained.end - seen
        self._suspects = {*range(self._n_ranks)} - {self._rank}
        return drained

    def keep(self) -> Received | None:
        """Collect all vectors that have arrived, and keep them for the next `collect`; for use while no rank sends."""
        if (received := self.collect()) is not None:
            self._kept = received._replace(total=received.total.clone())
        return self._kept

    def put_back(self, kept: Received | None) -> None:
        """Restore the vectors that were kept at a checkpoint, in a run that is resumed."""
        self._kept = kept

    def forget(self, rank: int) -> None:
        """Do not wait for the vectors of a rank that died."""
        self._dead.add(rank)

    def _take(self, drained: _Drained, received: Received | None) -> Received | None:
        """Add the content of an inactive inbox to `received` and empty the inbox.

        While vectors are on their way there, return `received` unchanged.

        Raises
        ------
        RankFailed
            If a rank died while it added to the inbox's sum.
        """
        if not self._is_complete(drained) and not (self._dead and self._living_have_sent()):
            return received
        count, weight = (0, 0.0) if received is None else received[1:]
        for vector, n, its_weight in self._vectors(drained):
            if count == 0:
                self._total.copy_(vector)
            else:
                self._total.add_(vector)
            count, weight = count + n, weight + its_weight
        cuda.ready(self._total)  # all reads of the inbox are complete before senders may write there again
        self._draining = None
        return Received(self._total, count, weight) if count else None

    def _is_complete(self, drained: _Drained) -> bool:
        weights = [self._word(self._at(drained.inbox, WEIGHTS + slot)) for slot in self._used_slots(drained)]
        return all(weights) and self._word(self._at(drained.inbox, FURTHER)) == self._n_further(drained)

    def _living_have_sent(self) -> bool:
        """Return whether every living rank has been seen, since the switch, without a vector for this one."""
        self._suspects -= self._dead
        self._suspects = {rank for rank in self._suspects if self._sends_here(rank)}
        return not self._suspects

    def _sends_here(self, rank: int) -> bool:
        return bool(self._words.get_word(rank, SENDING) == 1 + self._rank)

    def _used_slots(self, drained: _Drained) -> range:
        return range(drained.first, min(drained.end, self._slots))

    def _n_further(self, drained: _Drained) -> int:
        return max(0, drained.end - max(drained.first, self._slots))

    def _vectors(self, drained: _Drained) -> Iterator[tuple[torch.Tensor, int, float]]:
        """Yield for each vector of the inbox: the vector, the number of vectors that it sums, and their weight."""
        inbox = drained.inbox
        for slot in self._used_slots(drained):
            if weight := self._taken(inbox, WEIGHTS + slot):  # 0 if its sender died before the vector was complete
                begin = self._offset(inbox, slot)
                self._rows.acquire(begin, begin + self._size)
                yield self._rows.local[begin : begin + self._size], 1, weight
        if expected := self._n_further(drained):
            n = int(self._taken(inbox, FURTHER))
            if n < expected:
                raise RankFailed("a rank died while it added to the sum of other ranks' vectors")
            self._sums.sync()
            further = self._sums.local[inbox * self._size :][: self._size]
            self._taken(inbox, TURNS)
            yield torch.from_numpy(further).to(self._total.device), n, self._taken(inbox, WEIGHT)
            further[:] = 0  # the sum must start from zero; slots are overwritten
            self._sums.sync()

    def _word(self, at: int) -> float:
        return float(self._words.fetch_add(0, self._rank, at))

    def _taken(self, inbox: int, word: int) -> float:
        """Return the value of a word of an inbox and reset it to 0; no sender changes it now."""
        if found := self._word(self._at(inbox, word)):
            self._words.fetch_add(-found, self._rank, self._at(inbox, word))
        return found

    # ---- both ----

    def _at(self, inbox: int, word: int) -> int:
        return 2 + inbox * WORDS + word

    def _offset(self, inbox: int, slot: int) -> int:
        """Return the first element of a slot in the rows."""
        return (inbox * self._slots + slot) * self._size

    def free(self) -> None:
        """Free the windows; collective, and harmless when repeated. No rank may still be sending."""
        self._rows.free()
        self._sums.free()
        self._words.free()

    def __enter__(self) -> PushInbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()
