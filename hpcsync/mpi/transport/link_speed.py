"""Bandwidth and latency between ranks, measured at the start of a run."""

from __future__ import annotations

import time
from statistics import median

import numpy as np
from mpi4py import MPI

from hpcsync.mpi.transport.busy_target import farthest
from hpcsync.planning.stanza_planner import Link

SMALL, LARGE = 8, 1 << 22  # bytes
REPEATED = 5


def measured_link(comm: MPI.Intracomm) -> Link:
    """Measure the link from rank 0 to the rank farthest from it by round trips; collective.

    Returns
    -------
    Link
        The same on all ranks.
    """
    if comm.size == 1:
        return Link(float("inf"), 0.0)
    target = farthest(comm)
    small_s, large_s = (_there_s(comm, target, n_bytes) for n_bytes in (SMALL, LARGE))
    return comm.bcast(Link(LARGE / max(large_s - small_s, 1e-9), small_s))


def _there_s(comm: MPI.Intracomm, target: int, n_bytes: int) -> float:
    """Return half of the round-trip time of a message of `n_bytes`, in seconds: the median, after one warm-up round."""
    message, times = np.zeros(n_bytes, np.uint8), []
    for _ in range(1 + REPEATED):
        begin_s = time.perf_counter()
        if comm.rank == 0:
            comm.Send(message, target)
            comm.Recv(message, target)
        elif comm.rank == target:
            comm.Recv(message, 0)
            comm.Send(message, 0)
        times.append(time.perf_counter() - begin_s)
    return median(times[1:]) / 2
