"""Where a run's tensors lie and how they move between ranks: what was asked for, what serves here, and why.

Of the ways of moving a GPU's tensors that serve on rank 0's node (`rehearsal`) the fastest is chosen, and tried again
among all ranks of the run.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Job
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.mpi.transport.window_test import COUNT, attempt
from hpcsync.mpi.transport.window_trials import ON_A_NODE, WindowTrial, fastest, reason, rehearse
from hpcsync.system import gpu_selection

BETWEEN_NODES = ("staged",)  # and mpi if it is asked for: a trial on one node says nothing of others


class WindowSelection(NamedTuple):
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
        return {**found, **gpu_selection.versions()} if self.used else found

    def lines(self) -> list[str]:
        """What the user is told when the run starts: nothing where there was nothing to choose."""
        return [*self.used, f"window: {self.transport.kind} ({self.why})"] if self.used else []


def gpus_of_all(comm: MPI.Intracomm) -> gpu_selection.Found:
    """What every rank can use. Collective."""
    return gpu_selection.common(comm.allgather((comm.rank, socket.gethostname(), gpu_selection.found())))


def place(comm: MPI.Intracomm, job: Job, device: torch.device) -> WindowSelection:
    """How tensors of this device, of the same type on every rank, move in this run. Collective.

    Raises JobError, on all ranks, where what the job asks for does not serve here.
    """
    if device.type == "cpu":
        return WindowSelection()
    if lacking := gpus_of_all(comm).why:
        raise JobError(f"model: must be on the CPU: {lacking}")
    used = comm.allgather((comm.rank, socket.gethostname(), gpu_selection.describe(device)))
    asked, backoff = job.cluster.window, Backoff(comm)
    kinds = _kinds(asked, backoff.one_node)
    found = rehearse(kinds) if comm.rank == 0 else []
    backoff.barrier()  # it takes seconds
    found = _confirmed(comm, device, comm.bcast(found))
    kind = fastest(found)
    if kind is None and asked == "auto":
        raise JobError(f'cluster.device = "cuda": must be "cpu" here, no kind of window serves: {reason(found)}')
    if kind is None:
        raise JobError(f"cluster.window = {shown(asked)}: must be another here: {reason(found)}")
    return WindowSelection(Transport(kind, device), reason(found, kind), tuple(gpu_selection.users(used)))


def _kinds(asked: str, one_node: bool) -> Sequence[str]:
    """What to try. Raises JobError for CUDA IPC between nodes."""
    if asked == "auto":
        return ON_A_NODE if one_node else BETWEEN_NODES
    if asked == "ipc" and not one_node:
        raise JobError('cluster.window = "ipc": must be "auto", "mpi" or "staged" here: the ranks are on several nodes')
    return [asked]


def _confirmed(comm: MPI.Intracomm, device: torch.device, found: list[WindowTrial]) -> list[WindowTrial]:
    """What was found, after the best of it has succeeded among all ranks of the run too; the others as they were."""
    while (kind := fastest(found)) is not None:
        again = attempt(comm, Transport(kind, device), count=COUNT // 4)
        served = again.took_s is not None
        changed = {"note": again.note} if served else {"took_s": None, "failure": again.failure}
        found = [one._replace(**changed) if one.kind == kind else one for one in found]
        if served:
            break
    return found
