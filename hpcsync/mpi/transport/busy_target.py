"""Timing of a transfer to or from a rank that computes, for the start of a run and for `hpcsync doctor`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from mpi4py import MPI

from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.node_topology import on_this_node


class Trial(NamedTuple):
    """Result of one timed transfer.

    Attributes
    ----------
    took_s : float
        Duration of the transfer, in seconds.
    ended_s : float
        End of the transfer, in seconds since the target began to compute.
    rate : float
        Computation rounds per second on the target.
    """

    took_s: float
    ended_s: float
    rate: float


def while_busy(
    comm: MPI.Intracomm, target: int, transfer: Callable[[], None], compute: Callable[[], object], busy_s: float
) -> Trial:
    """Time `transfer` on rank 0 while rank `target` calls `compute` repeatedly; collective.

    Parameters
    ----------
    comm
        Communicator of all participating ranks.
    target
        Rank that computes.
    transfer
        Transfer to time, called once by rank 0.
    compute
        One round of computation, called by `target` for `busy_s` seconds.
    busy_s
        Duration of the computation, in seconds.

    Returns
    -------
    Trial
        The same on all ranks.
    """
    backoff = Backoff(comm)
    took_s = ended_s = rate = 0.0
    comm.Barrier()
    begin_s = time.perf_counter()
    if comm.rank == target:
        rounds = 0
        while (now_s := time.perf_counter()) < begin_s + busy_s:
            compute()
            rounds += 1
        rate = rounds / max(now_s - begin_s, 1e-9)
    elif comm.rank == 0:
        time.sleep(busy_s / 8)  # until the target computes
        before_s = time.perf_counter()
        transfer()
        ended_s = time.perf_counter() - begin_s
        took_s = ended_s - (before_s - begin_s)
    backoff.barrier()  # leaves the core to the target
    took_s, ended_s = comm.bcast((took_s, ended_s))
    return Trial(took_s, ended_s, comm.bcast(rate, target))


def farthest(comm: MPI.Intracomm) -> int:
    """Return a rank on another node than rank 0 or, if there is none, the last rank; collective."""
    beside_rank_0 = comm.bcast(on_this_node(comm))
    return next((rank for rank in range(comm.size) if rank not in beside_rank_0), comm.size - 1)
