"""Worker states: the activity of every rank, in a window on rank 0 that has one word per rank.

A rank puts its word and continues without waiting for completion. MPI may read the source of a put until the next
flush, so words are taken from a ring, and a flush is needed only when the ring wraps around: one wait in `RING` phases.
Between hosts, Open MPI delays a put until the next MPI call, which may be late during a computation; a probe therefore
follows the put.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

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
        self._probes = not one_node
        self._window = Window(comm, comm.size if comm.rank == 0 else 0, np.int64)
        self._window.local[:] = 0
        self._window.sync()
        comm.Barrier()
        self._ring = list(np.zeros((RING, 1), np.int64))
        self._next = 0
        self._iteration = 0

    def enter(self, phase: int, iteration: int | None = None) -> None:
        """Set this rank's phase and, if it changes, its iteration."""
        if iteration is not None:
            self._iteration = iteration
        if self._next == RING:
            self._window.flush(0)
            self._next = 0
        word = self._ring[self._next]
        self._next += 1
        word[0] = self._iteration * N_PHASES + phase
        self._window.put(word, 0, self._rank)
        if self._probes:
            self._comm.Iprobe()

    def seen(self) -> list[tuple[int, int]]:
        """Return (iteration, phase) of every rank; on rank 0 only."""
        self._window.sync()
        return [divmod(word, N_PHASES) for word in self._window.local.tolist()]

    def free(self) -> None:
        """Free the window; collective, and harmless when repeated."""
        self._window.free()
