"""One time for all ranks: seconds since the start of the run on rank 0's clock."""

from __future__ import annotations

import socket
import time

import numpy as np
from mpi4py import MPI

ROUNDS = 12
TAG = 5


class Clock:
    """`now()` is comparable between ranks to within `uncertainty_s`.

    Rank 0 exchanges a few messages with every other rank; of these the fastest round trip bounds the error: its
    midpoint there is its midpoint here, give or take half the round trip (Cristian, 1989). Collective over comm; the
    run starts for everybody when it returns, or goes on from `begin_s`, of rank 0.
    """

    def __init__(self, comm: MPI.Intracomm, begin_s: float = 0.0) -> None:
        self.offset_s, self.uncertainty_s = _offset_to_rank_0(comm)
        comm.Barrier()
        self._start = comm.bcast(time.perf_counter() - begin_s) - self.offset_s

    def rows(self, comm: MPI.Intracomm) -> list[tuple[int, str, float, float]] | None:
        """Of all ranks, for the trace's /clocks, on rank 0; collective."""
        return comm.gather((comm.rank, socket.gethostname(), self.offset_s, self.uncertainty_s))

    def now(self) -> float:
        return time.perf_counter() - self._start


def _offset_to_rank_0(comm: MPI.Intracomm) -> tuple[float, float]:
    """(rank 0's clock minus this rank's, half the fastest round trip), in seconds."""
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
