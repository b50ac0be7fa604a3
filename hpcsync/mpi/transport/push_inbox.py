"""Vectors pushed to a peer one-sided, which collects their sum whenever it likes.

Each rank has two inboxes. Senders fill the active one; the other is empty, or waits for those who are still at work in
it. An inbox has a few slots, into which vectors are put, and a sum in host memory, to which all further ones are added:
an atomic sum of a vector needs no slot, but between hosts it takes many times as long as a put, and MPI does not have
it for GPU memory. The words, all float64 and
all changed by atomic sums alone:

    flips                  how often the receiver has changed inboxes; the active one is flips % 2
    and of each inbox
    tickets                vectors that have a place in it
    weight of each slot    of the vector that lies there; 0 until it is there as a whole
    further, weight        vectors that have been added to the sum, and the sum of their weights
    writers                senders at work, a bit for each of them: 2 ** sender, in as many words as that takes

The sender: add its bit to the writers of the active inbox; look again whether it is still active, else withdraw and go
to the other; take a ticket, which is the number of a slot; put the vector there; flush; add the weight; withdraw. The
receiver: change inboxes once the active one has given tickets; then, as soon as nobody is at work in the one it has
left, add up what lies there and take the tickets and the weights away.

Why nothing is lost and nothing counted twice. A sender announces itself, then looks at `flips`; the receiver changes
`flips`, then looks at the writers. All of these are atomic sums, each complete before the next begins, so at least one
sees the other: either the sender finds the inbox inactive and takes no ticket, or the receiver finds the sender at work
and takes nothing until it has withdrawn, by when its vector and weight are there. A sender that saw the inbox active
both times, with two changes in between, is no exception: it was emptied before it became active again, and stays as
long as the sender is at work. One that finds its inbox inactive has changed nothing but the writers, which the receiver
only reads.

A sender that dies stays at work for ever, but its bit tells that it is nobody any more (`forget`). What it has put into
a slot has a weight, or it is not there as a whole and discarded. Only of a sum nobody can tell what has been added: if
a sender dies at that, the receiver raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.node_memory import numpy_dtype
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.mpi.transport.ulfm import RankFailed
from hpcsync.mpi.transport.window import Window

SLOTS = 3  # of an inbox at most: rarely do more peers than that choose the same one between two of its collections
FLIPS = 0
TICKETS, WEIGHTS, FURTHER, WEIGHT, WRITERS = 0, 1, 1 + SLOTS, 2 + SLOTS, 3 + SLOTS  # of an inbox's words
BITS = 52  # of a float64 that holds whole numbers exactly


class Received(NamedTuple):
    """What had arrived. total: the sum of `count` vectors, shape (size,), memory that the next `collect` overwrites."""

    total: torch.Tensor
    count: int  # type: ignore[assignment]  # as a field it hides a tuple's method, which nobody needs here
    weight: float


class PushInbox:
    """This rank's inboxes, and those of all others to send to.

    comm:  collective over it, `free` too. What nobody has collected by then is lost.
    size:  elements of a vector, the same on all ranks.
    dtype: theirs.
    """

    def __init__(self, comm: MPI.Intracomm, size: int, dtype: torch.dtype, transport: Transport = HOST) -> None:
        self._rank, self._size = comm.rank, size
        self._slots = min(comm.size - 1, SLOTS)
        self._rows = transport.window(comm, 2 * self._slots * size, dtype)
        self._sums = Window(comm, 2 * size, numpy_dtype(dtype))
        self._n_writers = -(-comm.size // BITS)
        self._words = Window(comm, 1 + 2 * (WRITERS + self._n_writers), np.float64)
        self._dead = [0] * self._n_writers  # the bits of those who have died
        self._total = torch.zeros(size, dtype=dtype, device=transport.device)
        self._left: int | None = None  # the inbox that senders have been sent away from, until it is empty
        self._kept: Received | None = None  # collected, but not given away
        self._sums.local[:] = 0
        self._words.local[:] = 0
        self._sums.sync()
        self._words.sync()
        comm.Barrier()

    # ---- the sender's side ----

    def send(self, peer: int, vector: torch.Tensor, weight: float = 1.0) -> None:
        """Add `vector`, shape (size,), to what `peer` will collect; when this returns it is there, and may be reused.

        weight: greater than 0; added up beside the vectors, which it does not change: a weighted vector comes
        multiplied. Raises ValueError for oneself, and for another shape or dtype.
        """
        if peer == self._rank:
            raise ValueError("a rank sends nothing to itself")
        if vector.shape != self._total.shape or vector.dtype != self._total.dtype:
            expected = f"{self._total.dtype}[{self._size}]"
            raise ValueError(f"{vector.dtype}{list(vector.shape)} is not {expected}")
        inbox = self._enter(peer)
        self._fill(peer, inbox, self._ticket(peer, inbox), vector, weight)
        self._leave(peer, inbox)

    def _enter(self, peer: int) -> int:
        """Be at work in an inbox that is active."""
        inbox = self._active(peer)
        while True:
            self._announce(peer, inbox)
            active = self._active(peer)
            if active == inbox:
                return inbox
            self._leave(peer, inbox)
            inbox = active

    def _announce(self, peer: int, inbox: int, times: int = 1) -> None:
        word, bit = divmod(self._rank, BITS)
        self._words.fetch_add(times * 2.0**bit, peer, self._at(inbox, WRITERS + word))

    def _ticket(self, peer: int, inbox: int) -> int:
        return int(self._words.fetch_add(1, peer, self._at(inbox, TICKETS)))

    def _fill(self, peer: int, inbox: int, ticket: int, vector: torch.Tensor, weight: float) -> None:
        if ticket < self._slots:
            self._rows.put(vector, peer, self._offset(inbox, ticket))
            self._rows.flush(peer)
            self._words.fetch_add(weight, peer, self._at(inbox, WEIGHTS + ticket))
        else:
            here = vector.cpu()
            self._sums.accumulate(here.numpy(), peer, inbox * self._size)
            self._sums.flush(peer)
            self._words.fetch_add(weight, peer, self._at(inbox, WEIGHT))
            self._words.fetch_add(1, peer, self._at(inbox, FURTHER))

    def _leave(self, peer: int, inbox: int) -> None:
        self._announce(peer, inbox, -1)

    def _active(self, rank: int) -> int:
        return int(self._words.fetch_add(0, rank, FLIPS)) % 2

    # ---- the receiver's side; its own words, which others change, it too reads and changes by atomic sums ----

    def collect(self) -> Received | None:
        """Everything that has arrived, or None; never waits.

        What arrived in an inbox where another sender is still at work comes with a later call.
        """
        received, self._kept = self._kept, None
        if received is not None:
            received = received._replace(total=self._total.copy_(received.total))
        if self._left is not None:
            received = self._take(self._left, received)
        if self._left is None:
            active = self._active(self._rank)
            if self._word(active, TICKETS):
                self._words.fetch_add(1, self._rank, FLIPS)
                self._left = active
                received = self._take(active, received)
        return received

    def keep(self) -> Received | None:
        """When nobody sends: everything that has arrived, which stays here for the next `collect`."""
        if (received := self.collect()) is not None:
            self._kept = received._replace(total=received.total.clone())
        return self._kept

    def put_back(self, kept: Received | None) -> None:
        """Let there be what was kept in a run that goes on."""
        self._kept = kept

    def forget(self, rank: int) -> None:
        """This rank has died: nobody waits for it any more."""
        word, bit = divmod(rank, BITS)
        self._dead[word] |= 1 << bit

    def _take(self, inbox: int, received: Received | None) -> Received | None:
        """`received` with what is in an inactive inbox, which is empty then; as it was if somebody is at work there.

        Raises RankFailed.
        """
        if self._writers(inbox):
            return received
        count, weight = (0, 0.0) if received is None else received[1:]
        for vector, n, its_weight in self._vectors(inbox, int(self._taken(inbox, TICKETS))):
            if count == 0:
                self._total.copy_(vector)
            else:
                self._total.add_(vector)
            count, weight = count + n, weight + its_weight
        cuda.ready(self._total)  # nothing is read there any more when others may write again
        self._left = None
        return Received(self._total, count, weight) if count else None

    def _vectors(self, inbox: int, tickets: int) -> Iterator[tuple[torch.Tensor, int, float]]:
        """What lies there: each vector, of how many it is the sum, and their weight."""
        for slot in range(min(tickets, self._slots)):
            if weight := self._taken(inbox, WEIGHTS + slot):  # else its sender has died before it was there
                begin = self._offset(inbox, slot)
                self._rows.acquire(begin, begin + self._size)
                yield self._rows.local[begin : begin + self._size], 1, weight
        if tickets > self._slots:
            n = int(self._taken(inbox, FURTHER))
            if n < tickets - self._slots:
                raise RankFailed("a rank has died while it added to what others have sent")
            self._sums.sync()
            further = self._sums.local[inbox * self._size :][: self._size]
            yield torch.from_numpy(further).to(self._total.device), n, self._taken(inbox, WEIGHT)
            further[:] = 0  # what is added to must be zero; what is put into need not
            self._sums.sync()

    def _writers(self, inbox: int) -> bool:
        """Whether somebody is at work there."""
        return any(int(self._word(inbox, WRITERS + word)) & ~dead for word, dead in enumerate(self._dead))

    def _word(self, inbox: int, word: int) -> float:
        return float(self._words.fetch_add(0, self._rank, self._at(inbox, word)))

    def _taken(self, inbox: int, word: int) -> float:
        """What is there, taken away: nobody else changes it now."""
        found = self._word(inbox, word)
        if found:
            self._words.fetch_add(-found, self._rank, self._at(inbox, word))
        return found

    # ---- both ----

    def _at(self, inbox: int, word: int) -> int:
        return 1 + inbox * (WRITERS + self._n_writers) + word

    def _offset(self, inbox: int, slot: int) -> int:
        """Of a slot in the rows."""
        return (inbox * self._slots + slot) * self._size

    def free(self) -> None:
        """Collective, and harmless when repeated; nobody may be sending any more."""
        self._rows.free()
        self._sums.free()
        self._words.free()

    def __enter__(self) -> PushInbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()
