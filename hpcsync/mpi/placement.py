"""Where a run's tensors lie and how they move between ranks: what was asked for, what serves here, and why.

Of the ways of moving a GPU's tensors that serve on rank 0's node (`rehearsal`) the fastest is chosen, and tried again
among all ranks of the run.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from hpcsync import gpus
from hpcsync.job import Job
from hpcsync.job_errors import JobError, shown
from hpcsync.mpi.node_memory import MemoryUnreachable
from hpcsync.mpi.patience import Patience
from hpcsync.mpi.tensor_window import HOST, Transport
from hpcsync.rehearsal import ON_A_NODE, Trial, fastest, reason, rehearse

BETWEEN_NODES = ("staged",)  # and mpi if it is asked for: a trial on one node says nothing of others
TRIAL_COUNT = 1_000_000  # float32, 4 MB
TURNS = 3


class Placement(NamedTuple):
    """why: the reason for the transport's kind. used: which ranks compute on which GPU, a line for each GPU."""

    transport: Transport = HOST
    why: str = "tensors are in host memory"
    used: tuple[str, ...] = ()

    def attributes(self) -> dict[str, Any]:
        """For the trace's root."""
        found = {
            "device": self.transport.device.type,
            "window": self.transport.kind,
            "window_reason": self.why,
            "gpus": "\n".join(self.used),
        }
        return {**found, **gpus.versions()} if self.used else found

    def lines(self) -> list[str]:
        """What the user is told when the run starts: nothing where there was nothing to choose."""
        return [*self.used, f"window: {self.transport.kind} ({self.why})"] if self.used else []


def place(comm: MPI.Intracomm, job: Job, device: torch.device) -> Placement:
    """How tensors of this device, of the same type on every rank, move in this run. Collective.

    Raises JobError, on all ranks, where what the job asks for does not serve here.
    """
    if device.type == "cpu":
        return Placement()
    found = gpus.common(comm.allgather((comm.rank, socket.gethostname(), gpus.found())))
    gpus.choose("cuda", job.cluster.window, found)
    used = comm.allgather((comm.rank, socket.gethostname(), gpus.describe(device)))
    patience = Patience(comm)
    kinds = _kinds(job.cluster.window, patience.one_node)
    trials = rehearse(kinds) if comm.rank == 0 else []
    patience.barrier()  # it takes seconds
    trials = _confirmed(comm, device, comm.bcast(trials))
    kind = fastest(trials)
    if kind is None:
        raise JobError(f"cluster.window = {shown(job.cluster.window)}: must be another here: {reason(trials)}")
    return Placement(Transport(kind, device), reason(trials, kind), tuple(gpus.users(used)))


def attempt(comm: MPI.Intracomm, transport: Transport, count: int = TRIAL_COUNT) -> Trial:
    """Every rank puts a pattern into the next one's window, and gets what that one shows; all have the same result.

    took_s: rank 0's fastest put and get of `count` elements. Collective.
    """
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    kind, times, right = transport.kind, [], True
    try:
        window = transport.window(comm, 2 * count, torch.float32)
    except MemoryUnreachable as error:
        return Trial(kind, failure=str(error))
    patience = Patience(comm, passive=transport.passive)  # as the ranks of a run wait
    here = torch.zeros(count, device=transport.device)
    for turn in range(TURNS):
        here.copy_(_pattern(comm.rank, turn, count))
        window.local[count:].copy_(_pattern(comm.rank, ~turn, count))
        window.release(0, 2 * count)
        patience.barrier()
        begin_s = time.perf_counter()
        window.put(here, to, 0)
        window.flush(to)
        window.get(here, to, count)
        window.flush(to)
        times.append(time.perf_counter() - begin_s)
        patience.barrier()
        window.acquire(0, count)
        right &= torch.equal(window.local[:count].cpu(), _pattern(source, turn, count))
        right &= torch.equal(here.cpu(), _pattern(to, ~turn, count))
        window.release(0, count)
        patience.barrier()
    note = window.note
    window.free()
    if not comm.allreduce(right, MPI.LAND):
        return Trial(kind, failure="what arrives is not what was sent")
    took_s, note = comm.bcast((min(times), note))
    return Trial(kind, took_s, note=note)


def _pattern(rank: int, turn: int, count: int) -> torch.Tensor:
    """Whole numbers that float32 holds exactly, of which no two ranks and turns have the same."""
    return (torch.arange(count) % 65521 + 7 * turn + 101 * rank).float()


def _kinds(asked: str, one_node: bool) -> Sequence[str]:
    """What to try. Raises JobError for CUDA IPC between nodes."""
    if asked == "auto":
        return ON_A_NODE if one_node else BETWEEN_NODES
    if asked == "ipc" and not one_node:
        raise JobError('cluster.window = "ipc": must be "auto", "mpi" or "staged" here: the ranks are on several nodes')
    return [asked]


def _confirmed(comm: MPI.Intracomm, device: torch.device, trials: list[Trial]) -> list[Trial]:
    """The trials, after the best of them has succeeded among all ranks of the run too; the others as they were."""
    while (kind := fastest(trials)) is not None:
        again = attempt(comm, Transport(kind, device), count=TRIAL_COUNT // 4)
        if again.took_s is not None:
            break
        trials = [again if trial.kind == kind else trial for trial in trials]
    return trials
