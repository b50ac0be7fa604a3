"""The workers' buffers on server 0: two rows a worker, which it fills in turn.

A worker puts its buffers into the row of its iteration's parity, and then sends its push info. It fills the same row
again two iterations later, once it has been granted an iteration that follows from the push info between. Server 0
reads the row of the latest push info that it has handled, in the thread that handles them: no worker writes it
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.mpi.transport.window import Window
from hpcsync.state import restore_arrays


class BufferRows:
    """Rows of all workers; collective, like `free`.

    Parameters
    ----------
    comm
        Communicator of all ranks, whose rank 0 is server 0.
    n_workers
        Number of workers.
    n_words
        Words of 8 bytes of a row; with 0 there is nothing to send.
    """

    def __init__(self, comm: MPI.Intracomm, n_workers: int, n_words: int) -> None:
        self._n_words = n_words
        count = 2 * n_workers * n_words if comm.rank == 0 else 0
        self._window = Window(comm, count, np.int64) if n_words else None
        if self._window is not None:
            self._window.local[:] = 0
            self._window.sync()
            comm.Barrier()  # before the first put

    def put(self, worker: int, iteration: int, vector: torch.Tensor) -> None:
        """Put a worker's buffers as of its push of this iteration; on return they have arrived."""
        assert self._window is not None
        row = vector.cpu().numpy()  # kept until the flush
        self._window.put(row, 0, self._begin(worker, iteration))
        self._window.flush(0)

    def latest(self, workers: Sequence[int], n_pushes: Sequence[int]) -> list[torch.Tensor]:
        """Return copies of the buffers of these workers as of their latest pushes; on server 0.

        Parameters
        ----------
        workers
            Workers that have pushed.
        n_pushes
            Pushes of each worker that have been handled.
        """
        if self._window is None:
            return []
        self._window.sync()
        begins = [self._begin(worker, n_pushes[worker]) for worker in workers]
        return [torch.from_numpy(self._window.local[begin : begin + self._n_words].copy()) for begin in begins]

    def state(self) -> torch.Tensor:
        """Return all rows while every worker waits; empty except on server 0."""
        if self._window is None:
            return torch.zeros(0, dtype=torch.int64)
        self._window.sync()
        return torch.from_numpy(self._window.local)

    def restore(self, state: torch.Tensor) -> None:
        """Restore the rows."""
        restore_arrays({"buffers": self.state()}, {"buffers": state})
        if self._window is not None:
            self._window.sync()

    def _begin(self, worker: int, iteration: int) -> int:
        return (2 * worker + iteration % 2) * self._n_words

    def free(self) -> None:
        """Free the rows; harmless when repeated."""
        if self._window is not None:
            self._window.free()
