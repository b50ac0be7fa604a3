"""Test of a kind of window: a round trip whose every element is compared."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from mpi4py import MPI

from hpcsync.config.errors import JobError
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.node_memory import MemoryUnreachable
from hpcsync.mpi.transport.tensor_window import Transport

COUNT = 2_000_000  # float32, 8 MB: less is mostly latency; more has no room in the 64 MiB of a container
TURNS = 3


class WindowTest(NamedTuple):
    """Result of a test.

    Attributes
    ----------
    took_s : float or None
        Duration of rank 0's fastest put and get, while other ranks wait, in seconds; None after a failure.
    failure : str
        Reason of the failure, "" without one.
    note : str
        Remark for the user, "" if there is none.
    """

    took_s: float | None = None
    failure: str = ""
    note: str = ""


def attempt(comm: MPI.Intracomm, transport: Transport, count: int = COUNT) -> WindowTest:
    """Test a transport: every rank puts a pattern to the next rank and gets that rank's pattern; collective.

    Parameters
    ----------
    comm
        Communicator of the test.
    transport
        Transport to test.
    count
        Elements in each direction.

    Returns
    -------
    WindowTest
        The same on all ranks.
    """
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    times, right = [], True
    try:
        window = transport.window(comm, 2 * count, torch.float32)
    except (MemoryUnreachable, JobError) as error:
        return WindowTest(failure=str(error))
    backoff = Backoff(comm, passive=transport.passive)  # waits as the ranks of a run do
    here = torch.zeros(count, device=transport.device)
    for turn in range(TURNS):
        here.copy_(_pattern(comm.rank, turn, count))
        window.local[count:].copy_(_pattern(comm.rank, ~turn, count))
        window.release(0, 2 * count)
        for turn_of_rank_0 in (True, False):
            backoff.barrier()
            if turn_of_rank_0 != (comm.rank == 0):
                continue
            begin_s = time.perf_counter()
            window.put(here, to, 0)
            window.flush(to)
            window.get(here, to, count)
            window.flush(to)
            times.append(time.perf_counter() - begin_s)
        backoff.barrier()
        window.acquire(0, count)
        right &= torch.equal(window.local[:count].cpu(), _pattern(source, turn, count))
        right &= torch.equal(here.cpu(), _pattern(to, ~turn, count))
        window.release(0, count)
        backoff.barrier()
    results = comm.allgather((right, min(times), window.note))
    window.free()
    if not all(right for right, _, _ in results):
        return WindowTest(failure="the data received differs from the data sent")
    return WindowTest(results[0][1], note=next((note for _, _, note in results if note), ""))


def _pattern(rank: int, turn: int, count: int) -> torch.Tensor:
    """Return integers that float32 represents exactly, different for each rank and turn."""
    return (torch.arange(count) % 65521 + 7 * turn + 101 * rank).float()
