"""Vectors pushed to a peer one-sided, added up where they arrive, and collected whenever that peer likes.

Each rank has two inboxes. Senders add to the active one; the other is empty, or waits for those who are still at work
in it. The words, all float64 and all changed by atomic sums alone:

    flips                       how often the receiver has changed inboxes; the active one is flips % 2
    writers, count, weight      of each inbox: senders at work, vectors in it, and the sum of their weights

The sender: add 1 to the writers of the active inbox; look again whether it is still active, else withdraw and go to the
other; add the vector; flush; add to count and weight; withdraw. The receiver: change inboxes once something is there;
then, as soon as nobody is at work in the one it has left, copy it, zero it and take count and weight away.

Why nothing is lost and nothing counted twice. A sender announces itself, then looks at `flips`; the receiver changes
`flips`, then looks at the writers. All of these are atomic sums, each complete before the next begins, so at least one
sees the other: either the sender finds the inbox inactive and adds nothing, or the receiver finds the sender at work
and takes nothing until it has withdrawn, by when vector, count and weight are there. A sender that saw the inbox active
both times, with two changes in between, is no exception: it was emptied before it became active again, and stays as
long as the sender is at work. One that finds its inbox inactive has changed nothing but the writers, which the receiver
only reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hpcsync.mpi.window import Window

FLIPS = 0
WRITERS, COUNT, WEIGHT = 1, 3, 5  # of inbox 0; inbox 1's follow each
N_WORDS = 7


class Parcel(NamedTuple):
    """What had arrived. total: the sum of `count` vectors, shape (size,), memory that the next `collect` overwrites."""

    total: np.ndarray
    count: int  # type: ignore[assignment]  # as a field it hides a tuple's method, which nobody needs here
    weight: float


class Parcels:
    """This rank's inboxes, and those of all others to send to.

    comm:  collective over it, `free` too. What nobody has collected by then is lost.
    size:  elements of a vector, the same on all ranks.
    dtype: theirs.
    """

    def __init__(self, comm: MPI.Intracomm, size: int, dtype: Any) -> None:
        self._rank, self._size = comm.rank, size
        self._inboxes = Window(comm, 2 * size, dtype)
        self._words = Window(comm, N_WORDS, np.float64)
        self._total = np.zeros(size, dtype)
        self._left: int | None = None  # the inbox that senders have been sent away from, until it is empty
        self._inboxes.local[:] = 0
        self._words.local[:] = 0
        self._inboxes.sync()
        self._words.sync()
        comm.Barrier()

    # ---- the sender's side ----

    def send(self, peer: int, vector: np.ndarray, weight: float = 1.0) -> None:
        """Add `vector`, shape (size,), to what `peer` will collect; when this returns it is there, and may be reused.

        weight: added up beside the vectors, which it does not change: a weighted vector comes multiplied. Raises
        ValueError for oneself, and for another shape or dtype.
        """
        if peer == self._rank:
            raise ValueError("a rank sends nothing to itself")
        if vector.shape != self._total.shape or vector.dtype != self._total.dtype:
            expected = f"{self._total.dtype}[{self._size}]"
            raise ValueError(f"{vector.dtype}{list(vector.shape)} is not {expected}")
        inbox = self._enter(peer)
        self._add(peer, inbox, vector, weight)
        self._leave(peer, inbox)

    def _enter(self, peer: int) -> int:
        """Be at work in an inbox that is active."""
        inbox = self._active(peer)
        while True:
            self._words.fetch_add(1, peer, WRITERS + inbox)
            active = self._active(peer)
            if active == inbox:
                return inbox
            self._leave(peer, inbox)
            inbox = active

    def _add(self, peer: int, inbox: int, vector: np.ndarray, weight: float) -> None:
        self._inboxes.accumulate(vector, peer, inbox * self._size)
        self._inboxes.flush(peer)
        self._words.fetch_add(1, peer, COUNT + inbox)
        self._words.fetch_add(weight, peer, WEIGHT + inbox)

    def _leave(self, peer: int, inbox: int) -> None:
        self._words.fetch_add(-1, peer, WRITERS + inbox)

    def _active(self, rank: int) -> int:
        return int(self._words.fetch_add(0, rank, FLIPS)) % 2

    # ---- the receiver's side; its own words, which others change, it too reads and changes by atomic sums ----

    def collect(self) -> Parcel | None:
        """Everything that has arrived, or None; never waits.

        What arrived in an inbox where another sender is still at work comes with a later call.
        """
        parcel = None
        if self._left is not None:
            parcel = self._take(self._left, parcel)
        if self._left is None:
            active = self._active(self._rank)
            if self._word(COUNT + active):
                self._words.fetch_add(1, self._rank, FLIPS)
                self._left = active
                parcel = self._take(active, parcel)
        return parcel

    def _take(self, inbox: int, parcel: Parcel | None) -> Parcel | None:
        """`parcel` with what is in an inactive inbox, which is empty then; as it was if somebody is at work there."""
        if self._writers(inbox):
            return parcel
        self._inboxes.sync()
        row = self._inboxes.local[inbox * self._size : (inbox + 1) * self._size]
        if parcel is None:
            self._total[:] = row
            parcel = Parcel(self._total, 0, 0.0)
        else:
            self._total += row
        row[:] = 0
        self._inboxes.sync()
        count, weight = self._word(COUNT + inbox), self._word(WEIGHT + inbox)
        self._words.fetch_add(-count, self._rank, COUNT + inbox)
        self._words.fetch_add(-weight, self._rank, WEIGHT + inbox)
        self._left = None
        return Parcel(self._total, parcel.count + int(count), parcel.weight + weight)

    def _writers(self, inbox: int) -> float:
        return self._word(WRITERS + inbox)

    def _word(self, word: int) -> float:
        return float(self._words.fetch_add(0, self._rank, word))

    # ---- both ----

    def free(self) -> None:
        """Collective, and harmless when repeated; nobody may be sending any more."""
        self._inboxes.free()
        self._words.free()

    def __enter__(self) -> Parcels:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()
