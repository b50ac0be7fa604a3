"""Trying a transfer to or from a rank that computes, at the start of a run or for `hpcsync doctor`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from mpi4py import MPI

from hpcsync.mpi.transport.backoff import Backoff


class Trial(NamedTuple):
    """took_s: the transfer. ended_s: its end, since the target began to compute. rate: rounds computed in a second."""

    took_s: float
    ended_s: float
    rate: float


def while_busy(
    comm: MPI.Intracomm, target: int, transfer: Callable[[], None], compute: Callable[[], object], busy_s: float
) -> Trial:
    """What happens when rank 0 calls `transfer` while rank `target` calls `compute` again and again; collective."""
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
        time.sleep(busy_s / 8)  # the target has begun by then
        before_s = time.perf_counter()
        transfer()
        ended_s = time.perf_counter() - begin_s
        took_s = ended_s - (before_s - begin_s)
    backoff.barrier()  # without taking the core from the target
    took_s, ended_s = comm.bcast((took_s, ended_s))
    return Trial(took_s, ended_s, comm.bcast(rate, target))


def farthest(comm: MPI.Intracomm) -> int:
    """A rank on another node than rank 0, or the last one of its node."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    nodes = comm.allgather(node.bcast(comm.rank))
    node.Free()
    return next((rank for rank, it in enumerate(nodes) if it != nodes[0]), comm.size - 1)
