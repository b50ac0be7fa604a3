"""One-sided windows over memory that MPI allocates, or is given."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from hpcsync.mpi.transport import shm_budget


class Window:
    """An RMA window, locked by everybody for its whole life; ordering comes from `flush`.

    `MPI_Win_allocate` with one lock for the whole life is what makes transfers passive on a node, on Open MPI and MPICH
    alike: the target's core is not needed. Memory that nobody touches is never committed, so a window may be sized for
    the worst case.

    comm:   collective over it; freed with `free` by all of its ranks.
    count:  elements that this rank exposes, zero allowed.
    memory: where these lie, a contiguous buffer of any kind that mpi4py takes, and `local` is empty. By default MPI
            allocates it, and only then transfers are passive.

    Raises JobError, on all ranks, where a node has no room for it.
    """

    def __init__(self, comm: MPI.Intracomm, count: int, dtype: Any, memory: Any = None) -> None:
        self._dtype = np.dtype(dtype)
        itemsize = self._dtype.itemsize
        self._win: MPI.Win | None
        self._taken = 0
        if memory is None:
            self._taken = shm_budget.take(comm, count * itemsize)
            self._win = MPI.Win.Allocate(count * itemsize, itemsize, comm=comm)
            self.local = np.frombuffer(self._win.tomemory(), self._dtype, count)  # type: ignore[call-overload]
            """This rank's exposed memory, shape (count,)."""
        else:
            self._win = MPI.Win.Create(memory if count else None, itemsize, comm=comm)
            self.local = np.empty(0, self._dtype)
        self._win.Lock_all()
        comm.Barrier()

    def put(self, source: Any, rank: int, offset: int) -> None:
        """Begin to copy `source`, 1-D, to element `offset` of `rank`; it may be reused after `flush(rank)`."""
        self._open.Put(source, rank, (offset, len(source)))

    def get(self, into: Any, rank: int, offset: int) -> None:
        """Begin to copy from element `offset` of `rank` into `into`, 1-D; it is there after `flush(rank)`."""
        self._open.Get(into, rank, (offset, len(into)))

    def accumulate(self, source: np.ndarray, rank: int, offset: int) -> None:
        """Begin to add `source` to what is at element `offset` of `rank`; atomic for each element, among sums."""
        self._open.Accumulate(source, rank, (offset, source.size), MPI.SUM)

    def fetch_add(self, value: float, rank: int, offset: int) -> Any:
        """Add `value` to element `offset` of `rank` in one atomic step, and wait; what was there before.

        Adding 0 reads. The only atomic operations on a window are sums, because MPI promises nothing about a mixture.
        """
        operand, before = np.array([value], self._dtype), np.zeros(1, self._dtype)
        self._open.Fetch_and_op(operand, before, rank, offset, MPI.SUM)
        self._open.Flush(rank)
        return before[0]

    def flush(self, rank: int) -> None:
        """Wait until this rank's operations on `rank` are complete, here and there."""
        self._open.Flush(rank)

    def sync(self) -> None:
        """Make what others have put into `local` visible here."""
        self._open.Sync()

    @property
    def _open(self) -> MPI.Win:
        if self._win is None:
            raise ValueError("the window has been freed")
        return self._win

    def free(self) -> None:
        """Unlock and free; collective, and harmless when repeated. `local` must not be used afterwards."""
        if self._win is not None:
            win, self._win = self._win, None
            self.local = np.empty(0, self._dtype)
            win.Unlock_all()
            win.Free()
            shm_budget.give_back(self._taken)

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()
