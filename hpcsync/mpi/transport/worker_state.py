"""What every rank is doing, where rank 0 sees it without asking: a word per rank in a window on rank 0.

A rank puts its word and goes on; it does not wait until it is there. MPI may read what is put until the next flush: so
words are taken from a ring, and only when that begins anew there is a flush, one wait in `RING` phases. Between hosts
Open MPI keeps what is put back until the next call of MPI, which in a computation is long to come: hence the probe.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from hpcsync.mpi.transport.window import Window

RING = 256
N_PHASES = 8


class WorkerStates:
    """Made collectively over `comm`. one_node: whether all its ranks are on one.

    A phase is a number below 8 (`traces.schema.PHASES`), 0 before the first.
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
        """This rank is from now on in this phase, of this iteration, or the one that it is in."""
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
        """On rank 0: (iteration, phase) of every rank."""
        self._window.sync()
        return [divmod(word, N_PHASES) for word in self._window.local.tolist()]

    def free(self) -> None:
        """Collective, and harmless when repeated."""
        self._window.free()
