"""Selection of the kind of window for a run's tensors: what the job asks for, what works here, and why.

Of the kinds that work for a GPU's tensors on rank 0's node (`window_trials`), the fastest is chosen and tried again
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

BETWEEN_NODES = ("staged",)  # "mpi" only on request: a trial on one node does not show that it works between nodes


class WindowSelection(NamedTuple):
    """Selected transport.

    Attributes
    ----------
    transport : Transport
        Method of moving tensors.
    why : str
        Reason for the kind of window.
    used : tuple of str
        For each GPU in use, a line that names its ranks.
    """

    transport: Transport = HOST
    why: str = "tensors are in host memory"
    used: tuple[str, ...] = ()

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the trace's root."""
        found = {
            "device": self.transport.device.type,
            "window": self.transport.kind,
            "window_reason": self.why,
            "gpus": "\n".join(self.used),
        }
        return {**found, **gpu_selection.versions()} if self.used else found

    def lines(self) -> list[str]:
        """Return the lines to print at the start of the run; none on the CPU, where there is no choice."""
        return [*self.used, f"window: {self.transport.kind} ({self.why})"] if self.used else []


def gpus_of_all(comm: MPI.Intracomm) -> gpu_selection.Found:
    """Return the GPUs that every rank can use; collective."""
    return gpu_selection.common(comm.allgather((comm.rank, socket.gethostname(), gpu_selection.found())))


def place(comm: MPI.Intracomm, job: Job, device: torch.device) -> WindowSelection:
    """Select how tensors of `device` move between the ranks of this run; collective.

    Parameters
    ----------
    comm
        Communicator of the run.
    job
        The job; `cluster.window` may name a kind.
    device
        Device of this rank's tensors, of the same type on every rank.

    Raises
    ------
    JobError
        On all ranks, if what the job asks for does not work here.
    """
    if device.type == "cpu":
        return WindowSelection()
    if lacking := gpus_of_all(comm).why:
        raise JobError(f"model: must be on the CPU: {lacking}")
    used = comm.allgather((comm.rank, socket.gethostname(), gpu_selection.describe(device)))
    asked, backoff = job.cluster.window, Backoff(comm)
    kinds = _kinds(asked, backoff.one_node)
    found = rehearse(kinds) if comm.rank == 0 else []
    backoff.barrier()  # the trials take seconds
    found = _confirmed(comm, device, comm.bcast(found))
    kind = fastest(found)
    if kind is None and asked == "auto":
        raise JobError(f'cluster.device = "cuda": must be "cpu" here, no kind of window works: {reason(found)}')
    if kind is None:
        raise JobError(f"cluster.window = {shown(asked)}: must be another here: {reason(found)}")
    return WindowSelection(Transport(kind, device), reason(found, kind), tuple(gpu_selection.users(used)))


def _kinds(asked: str, one_node: bool) -> Sequence[str]:
    """Return the kinds to try.

    Raises
    ------
    JobError
        For "ipc" with ranks on several nodes.
    """
    if asked == "auto":
        return ON_A_NODE if one_node else BETWEEN_NODES
    if asked == "ipc" and not one_node:
        raise JobError('cluster.window = "ipc": must be "auto", "mpi" or "staged" here: the ranks are on several nodes')
    return [asked]


def _confirmed(comm: MPI.Intracomm, device: torch.device, found: list[WindowTrial]) -> list[WindowTrial]:
    """Return `found` after its fastest kind has succeeded among all ranks of the run.

    Kinds that fail there are marked as failed; the others stay as they were.
    """
    while (kind := fastest(found)) is not None:
        again = attempt(comm, Transport(kind, device), count=COUNT // 2)
        succeeded = again.took_s is not None
        changed = {"note": again.note} if succeeded else {"took_s": None, "failure": again.failure}
        found = [one._replace(**changed) if one.kind == kind else one for one in found]
        if succeeded:
            break
    return found
