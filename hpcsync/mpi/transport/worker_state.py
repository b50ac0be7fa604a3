"""Worker states: the activity of every rank, in memory of rank 0 that has one word per rank.

On one node every rank stores its word there. Between hosts it puts it and continues without waiting for completion. MPI
may read the source of a put until the next flush, so words are taken from a ring, and a flush is needed only when the
ring wraps around: one wait in `RING` phases. Between two flushes MPI does not order puts: rank 0 may see an earlier
phase until the next put arrives, which only reports of stragglers would show. Open MPI delays a put until the next MPI
call, which may be late during a computation; a probe therefore follows the put.
"""

from __future__ import annotations

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.mpi.transport.node_memory import HostMemory
from hpcsync.mpi.transport.window import Window

RING = 256
N_PHASES = 8


class WorkerStates:
    """Activities of all ranks.

    Parameters
    ----------
    comm
        Communicator; the constructor and `free` are collective over it.
    one_node
        Whether all ranks of `comm` share a node.

    Notes
    -----
    A phase is a number below `N_PHASES`, a `trace.schema.Phase`, and is 0 before the first `enter`.
    """

    def __init__(self, comm: MPI.Intracomm, *, one_node: bool) -> None:
        self._comm, self._rank = comm, comm.rank
        n_words = comm.size if comm.rank == 0 else 0
        self._memory: HostMemory | Window
        self._words: np.ndarray  # of all ranks; empty where they are on another host
        if one_node:
            self._memory = HostMemory(comm, n_words, torch.int64)
            self._words = self._memory.of[0].numpy()
        else:
            self._memory = Window(comm, n_words, np.int64)
            self._words = self._memory.local
        if comm.rank == 0:
            self._words[:] = 0
        self._memory.sync()
        comm.Barrier()
        self._ring = list(np.zeros((RING, 1), np.int64))
        self._next = 0
        self._iteration = 0

    def enter(self, phase: int, iteration: int | None = None) -> None:
        """Set this rank's phase and, if it changes, its iteration."""
        if iteration is not None:
            self._iteration = iteration
        word = self._iteration * N_PHASES + phase
        if isinstance(self._memory, HostMemory):
            self._words[self._rank] = word
        else:
            self._put(self._memory, word)

    def _put(self, window: Window, word: int) -> None:
        if self._next == RING:
            window.flush(0)
            self._next = 0
        source = self._ring[self._next]
        self._next += 1
        source[0] = word
        window.put(source, 0, self._rank)
        self._comm.Iprobe()

    def seen(self) -> list[tuple[int, int]]:
        """Return (iteration, phase) of every rank; on rank 0 only."""
        self._memory.sync()
        return [divmod(word, N_PHASES) for word in self._words.tolist()]

    def free(self) -> None:
        """Free the memory; collective, and harmless when repeated."""
        self._words = np.empty(0, np.int64)
        self._memory.free()
