"""Pair exchange: a rank averages its vector with another rank's, atomically, while that rank computes.

A rank that shares its vector has two rows of memory for it, a lock in a second window and words in a third one:

    lock                  changes * (ranks + 1) + holder: number of changes of the vector so far, and 0 or 1 + the rank
                          that holds the lock; changed by compare-and-swap only. Row changes % 2 holds the vector
    scalar of each row    a number that is averaged along with the vector

Whoever changes a vector, its owner or another rank, holds the vector's lock. It fills the spare row with the new vector
and scalar, flushes, and then releases the lock and counts the change at once, in one word.

Why every change is atomic and none is lost:

- Between reading a vector and replacing it, the lock keeps all others from changing it.
- A rank that dies while it holds a lock has only touched the spare row: the vector is the old one. The others take over
  the lock of a dead rank.

Why nobody waits for ever: a rank holds at most one lock at a time, and waits for nothing while it holds it. A rank that
averages must therefore not share its own vector, which it could not lock as well; it is the only one that changes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.mpi.transport.window import Freed, Window

FREE = 0  # holder of a lock that nobody holds


class Shared(NamedTuple):
    """Vector that a rank shares, as others have left it.

    Attributes
    ----------
    vector : torch.Tensor
        The vector, shape (size,); valid until the next `store`.
    scalar : float
        The number averaged along with it.
    n_averaged : int
        How often others have averaged it since the last `store`.
    """

    vector: torch.Tensor
    scalar: float
    n_averaged: int


class PairExchange(Freed):
    """Vectors that ranks share, and averages of pairs of them.

    Parameters
    ----------
    comm
        Communicator; the constructor and `free` are collective over it.
    size
        Elements of a vector, the same on all ranks.
    dtype
        Type of the elements.
    transport
        Transport of the vectors.
    shares
        True if this rank shares its vector, False if it averages with those that do.
    backoff
        Waiting for a lock.
    poll
        Called while waiting for a lock; it may call `forget`.

    Attributes
    ----------
    waited_s
        Seconds that this rank has waited for locks.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        size: int,
        dtype: torch.dtype,
        transport: Transport = HOST,
        *,
        shares: bool,
        backoff: Backoff | None = None,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank, self._size, self._shares = comm.rank, size, shares
        self._holders = comm.size + 1  # values that the holder can have
        self._backoff, self._poll = backoff or Backoff(comm, passive=transport.passive), poll
        self._rows = transport.window(comm, 2 * size if shares else 0, dtype)
        self._locks = Window(comm, 1, np.int64)
        self._scalars = Window(comm, 2, np.float64)
        self._other = torch.empty(0 if shares else size, dtype=dtype, device=transport.device)
        self.waited_s = 0.0
        self._expected: dict[int, int] = {}  # by rank: its lock as it may be found
        self._changes = 0  # of the vector whose lock this rank holds
        self._changed = False  # by `store`
        self._stored = 0  # changes of this rank's vector up to its own last one
        self._dead: set[int] = set()
        self._locks.local[:] = FREE
        self._locks.sync()
        self._scalars.local[:] = 0.0
        self._scalars.sync()
        comm.Barrier()

    # ---- the rank that averages ----

    def average(self, peer: int, vector: torch.Tensor, scalar: float = 0.0) -> float | None:
        """Set this rank's vector and the peer's to their mean, and so the scalars.

        Parameters
        ----------
        peer
            Rank that shares its vector; it has stored one.
        vector
            This rank's vector, shape (size,); changed in place.
        scalar
            This rank's scalar.

        Returns
        -------
        float or None
            The mean of the scalars. None if the peer has died while it held its lock; nothing has changed then.
        """
        assert not self._shares, "a rank that shares its vector does not average"
        if not self._acquire(peer):
            return None
        row, theirs = self._changes % 2, np.zeros(1)
        self._scalars.get(theirs, peer, row)
        self._rows.get(self._other, peer, row * self._size)
        self._flush(peer)
        vector.add_(self._other).mul_(0.5)
        mean = (scalar + float(theirs[0])) * 0.5
        self._write(peer, vector, mean)
        self._release(peer, True)
        return mean

    def _write(self, peer: int, vector: torch.Tensor, scalar: float) -> None:
        """Write into the spare row of a peer."""
        row, here = 1 - self._changes % 2, np.array([scalar])  # which is read until the flush
        self._scalars.put(here, peer, row)
        self._rows.put(vector, peer, row * self._size)
        self._flush(peer)

    def _flush(self, peer: int) -> None:
        self._scalars.flush(peer)
        self._rows.flush(peer)

    # ---- the rank that shares ----

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep others from averaging with this rank's vector, as a context manager."""
        self._acquire(self._rank)
        self._changed = False
        try:
            yield
        finally:
            self._release(self._rank, self._changed)

    def load(self) -> Shared:
        """Return this rank's vector as it is now; while it is `held`, or nobody averages."""
        self._locks.sync()
        changes = int(self._locks.local[0]) // self._holders
        row = changes % 2
        begin, end = row * self._size, (row + 1) * self._size
        self._rows.acquire(begin, end)
        self._scalars.sync()
        return Shared(self._rows.local[begin:end], float(self._scalars.local[row]), changes - self._stored)

    def store(self, vector: torch.Tensor, scalar: float = 0.0, n_averaged: int = 0) -> None:
        """Replace this rank's vector, shape (size,), and its scalar, as soon as it is no longer `held`.

        Parameters
        ----------
        vector, scalar
            The new ones.
        n_averaged
            Averages that the next `load` counts in addition, in a run that is resumed.
        """
        changes = self._changes + 1
        row = changes % 2
        begin, end = row * self._size, (row + 1) * self._size
        self._rows.local[begin:end] = vector
        self._rows.release(begin, end)
        self._scalars.local[row] = scalar
        self._scalars.sync()
        self._stored, self._changed = changes - n_averaged, True

    # ---- both ----

    def _acquire(self, rank: int) -> bool:
        """Wait for the lock of a rank's vector; return False if the rank has died while it held it."""

        def attempt() -> Literal["taken", "dead"] | None:
            while (found := self._swap(rank, self._expected.get(rank, FREE))) is not None:
                changes, holder = divmod(found, self._holders)
                self._expected[rank] = changes * self._holders  # if it is free, in the next attempt at once
                if holder == FREE:
                    continue
                if holder - 1 not in self._dead:
                    self._poll()
                    return None
                if holder - 1 == rank:
                    return "dead"
                self._expected[rank] = found
            return "taken"

        outcome = attempt()
        if outcome is None:
            begin_s = time.perf_counter()
            outcome = self._backoff.until(attempt)
            self.waited_s += time.perf_counter() - begin_s
        return outcome == "taken"

    def _swap(self, rank: int, expected: int) -> int | None:
        """Take the lock of a rank's vector if that is as expected; return None, or what was found instead."""
        changes = expected // self._holders
        found = self._locks.compare_and_swap(expected, changes * self._holders + self._rank + 1, rank, 0)
        if found != expected:
            return found
        self._changes = changes
        return None

    def _release(self, rank: int, changed: bool) -> None:
        now = self._changes * self._holders
        self._expected[rank] = now + changed * self._holders
        self._locks.compare_and_swap(now + self._rank + 1, self._expected[rank], rank, 0)

    def forget(self, rank: int) -> None:
        """Take over the locks of a rank that died."""
        self._dead.add(rank)

    def free(self) -> None:
        """Free the windows; collective, and harmless when repeated. No rank may still be averaging."""
        self._rows.free()
        self._locks.free()
        self._scalars.free()
