"""One-sided (RMA) windows over memory that MPI allocates or that the caller provides.

Between hosts, large transfers are made in pieces of which a few are under way at a time. A link then holds little of
them in its queues, and messages and words, which travel on the same connections, do not wait for whole models.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from mpi4py import MPI

from hpcsync.config.errors import JobError
from hpcsync.mpi.transport import communicator, shm_budget
from hpcsync.mpi.transport.communicator import RawWindow
from hpcsync.mpi.transport.node_topology import on_this_node

PIECE_BYTES = 1 << 17
PIECES_UNDER_WAY = 4  # fills 20 Gbit/s if a round trip takes 0.2 ms


class Freed(ABC):
    """What all ranks create and free together, at the latest at the end of a `with` block.

    After an exception a `with` block frees nothing: a rank that fails cannot wait for the others.
    """

    @abstractmethod
    def free(self) -> None:
        """Free it; collective, and harmless when repeated. Its memory must not be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.free()


class _Transfer:
    """Transfers of one thread with one rank that are made in pieces, in their order.

    Each call in `pieces` begins one, and returns its request.
    """

    def __init__(self) -> None:
        self.pieces: deque[Callable[[], Any]] = deque()
        self.requests: deque[Any] = deque()

    def advance(self) -> bool:
        """Begin the pieces that may begin; return whether all are complete."""
        while self.requests and self.requests[0].Test():
            self.requests.popleft()
        while self.pieces and len(self.requests) < PIECES_UNDER_WAY:
            self.requests.append(self.pieces.popleft()())
        return not self.requests


def _allocated(comm: MPI.Intracomm, n_bytes: int, unit: int) -> RawWindow:
    try:
        return communicator.allocate(comm, n_bytes, unit)
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_WIN:
            raise
        raise JobError(
            f"MPI: needs windows over all ranks, which this library cannot create here ({error}); between nodes Open "
            "MPI 4 creates them over UCX only"
        ) from None


class Window(Freed):
    """RMA window, locked by all ranks for its whole life; ordering comes from `flush`.

    Parameters
    ----------
    comm
        Communicator. The constructor and `free` are collective over it.
    count
        Elements that this rank exposes, zero allowed.
    dtype
        Type of the elements.
    memory
        Contiguous buffer of any kind that mpi4py takes, to expose instead of allocated memory; `local` is then empty.
        By default MPI allocates the memory, and only then are transfers passive and made in pieces: MPI libraries
        need not take device pointers for operations with requests.

    Attributes
    ----------
    local : numpy.ndarray
        Exposed memory of this rank, shape (count,).

    Raises
    ------
    JobError
        On all ranks, if a node has too little shared memory, or MPI cannot create the window.

    Notes
    -----
    `MPI_Win_allocate` with one lock for the whole life makes transfers passive in a job on one node, with Open MPI and
    MPICH alike: the target's core is not needed. Memory that is never touched is never committed, so a window may be
    sized for the worst case.

    The owner loads and stores `local` while others access it, which is defined in the unified memory model only
    (MPI_WIN_UNIFIED). MPI has it where memory is coherent.
    """

    def __init__(self, comm: MPI.Intracomm, count: int, dtype: Any, memory: Any = None) -> None:
        self._dtype = np.dtype(dtype)
        itemsize = self._dtype.itemsize
        self._win: RawWindow | None
        self._taken = 0
        if memory is None:
            self._taken = shm_budget.take(comm, count * itemsize)
            self._win = _allocated(comm, count * itemsize, itemsize)
            self.local = np.frombuffer(self._win.tomemory(), self._dtype, count)
        else:
            self._win = communicator.expose(comm, memory if count else None, itemsize)
            self.local = np.empty(0, self._dtype)
        self._whole = set(range(comm.size) if memory is not None else on_this_node(comm))  # ranks without pieces
        self._between_nodes = len(self._whole) < comm.size
        self._seen: dict[tuple[int, int], Any] = {}  # words as they were last seen, by rank and offset
        self._transfers: dict[int, dict[int, _Transfer]] = {}  # by thread and rank
        self._win.Lock_all()
        comm.Barrier()

    def put(self, source: Any, rank: int, offset: int) -> None:
        """Begin to copy `source`, 1-D, to element `offset` of `rank`; it may be reused after `flush(rank)`."""
        self._transfer(self._open.Put, self._open.Rput, source, rank, offset)

    def get(self, into: Any, rank: int, offset: int) -> None:
        """Begin to copy from element `offset` of `rank` into `into`, 1-D; the data is there after `flush(rank)`."""
        self._transfer(self._open.Get, self._open.Rget, into, rank, offset)

    def get_word(self, rank: int, offset: int) -> Any:
        """Return element `offset` of `rank`, which nobody changes atomically."""
        word = np.zeros(1, self.local.dtype)
        self.get(word, rank, offset)
        self.flush(rank)
        return word[0]

    def _transfer(
        self, whole: Callable[..., None], piece: Callable[..., Any], buffer: Any, rank: int, offset: int
    ) -> None:
        n = PIECE_BYTES // self._dtype.itemsize
        if len(buffer) <= n or rank in self._whole:
            whole(buffer, rank, (offset, len(buffer)))
            return
        transfer = self._transfers.setdefault(threading.get_ident(), {}).setdefault(rank, _Transfer())
        for begin in range(0, len(buffer), n):
            part = buffer[begin : begin + n]
            transfer.pieces.append(functools.partial(piece, part, rank, (offset + begin, len(part))))
        transfer.advance()

    def fetch_add(self, value: float, rank: int, offset: int) -> Any:
        """Add `value` to element `offset`, of 8 bytes, of `rank` atomically, and return the previous value.

        Adding 0 reads. MPI guarantees nothing about mixed atomic operations: a window uses `fetch_add` or
        `compare_and_swap`.
        """
        if not self._between_nodes:
            operand, before = np.array([value], self._dtype), np.zeros(1, self._dtype)
            self._open.Fetch_and_op(operand, before, rank, offset, MPI.SUM)
            self._open.Flush(rank)
            return before[0]
        # Between hosts a fetch-and-op of Open MPI takes three round trips, a compare-and-swap one.
        before = self._seen.get((rank, offset), self._dtype.type(0))
        while True:
            after = self._dtype.type(before + value)
            operands = np.array([after, before]).view(np.int64)
            found = self._swap(operands, rank, offset)
            if found[0] == operands[1]:
                self._seen[rank, offset] = after
                return before
            before = found.view(self._dtype)[0]

    def compare_and_swap(self, expected: int, value: int, rank: int, offset: int) -> int:
        """Replace element `offset` of `rank`, an integer, by `value` if it is `expected`; return the previous value."""
        return int(self._swap(np.array([value, expected], self._dtype), rank, offset)[0])

    def _swap(self, operands: np.ndarray, rank: int, offset: int) -> np.ndarray:
        before = np.zeros(1, operands.dtype)
        self._open.Compare_and_swap(operands[:1], operands[1:], before, rank, offset)
        self._open.Flush(rank)
        return before

    def flush(self, rank: int) -> None:
        """Wait until this thread's operations on `rank` are complete on both sides."""
        mine = self._transfers.get(threading.get_ident(), {})
        try:
            while rank in mine:
                for other in [other for other, transfer in mine.items() if transfer.advance()]:
                    del mine[other]
                if rank in mine:
                    communicator.wait_any([transfer.requests[0] for transfer in mine.values()])
        except MPI.Exception:  # a rank has died
            mine.clear()
            raise
        self._open.Flush(rank)

    def sync(self) -> None:
        """Make other ranks' puts visible in `local`."""
        self._open.Sync()

    @property
    def _open(self) -> RawWindow:
        if self._win is None:
            raise ValueError("the window has been freed")
        return self._win

    def free(self) -> None:
        """Unlock and free the window; collective, and harmless when repeated. `local` must not be used afterwards."""
        if self._win is not None:
            win, self._win = self._win, None
            self.local = np.empty(0, self._dtype)
            win.Unlock_all()
            win.Free()
            shm_budget.give_back(self._taken)
