"""Common clock of all ranks: seconds since the start of the run on rank 0's clock."""

from __future__ import annotations

import socket
import time

import numpy as np
from mpi4py import MPI

ROUNDS = 12
TAG = 5


class Clock:
    """Clock whose readings are comparable between ranks to within `uncertainty_s`.

    Parameters
    ----------
    comm
        Communicator of all ranks. The constructor is collective; the run starts on all ranks when it returns.
    begin_s
        Time at which the clock starts, in seconds, as given on rank 0; not 0 in a run that is resumed.

    Attributes
    ----------
    offset_s : float
        Rank 0's clock minus this rank's, in seconds.
    uncertainty_s : float
        Error bound of `offset_s`: half of the fastest round trip, in seconds.

    Notes
    -----
    Rank 0 exchanges a few messages with every other rank. The fastest round trip bounds the error: its midpoint on rank
    0 equals its midpoint here to within half the round trip.

    References
    ----------
    F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989.
    """

    def __init__(self, comm: MPI.Intracomm, begin_s: float = 0.0) -> None:
        self.offset_s, self.uncertainty_s = _offset_to_rank_0(comm)
        comm.Barrier()
        self._start = comm.bcast(time.perf_counter() - begin_s) - self.offset_s

    def rows(self, comm: MPI.Intracomm) -> list[tuple[int, str, float, float]] | None:
        """Gather the rows of the trace's /clocks on rank 0; return None on other ranks. Collective."""
        return comm.gather((comm.rank, socket.gethostname(), self.offset_s, self.uncertainty_s))

    def now(self) -> float:
        """Return the time in seconds since the start of the run."""
        return time.perf_counter() - self._start


def _offset_to_rank_0(comm: MPI.Intracomm) -> tuple[float, float]:
    """Return (rank 0's clock minus this rank's, half of the fastest round trip), in seconds."""
    there = np.zeros(1)
    if comm.rank == 0:
        for rank in range(1, comm.size):
            for _ in range(ROUNDS):
                comm.Recv(there, rank, TAG)
                there[0] = time.perf_counter()
                comm.Send(there, rank, TAG)
        return 0.0, 0.0
    best = (0.0, float("inf"))
    for _ in range(ROUNDS):
        sent = time.perf_counter()
        comm.Send(there, 0, TAG)
        comm.Recv(there, 0, TAG)
        received = time.perf_counter()
        half = (received - sent) / 2
        if half < best[1]:
            best = (float(there[0]) - sent - half, half)
    return best
