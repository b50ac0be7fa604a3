"""Parameter-server engine without a model: asynchronous workers that push constant gradients, and a trace."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from mpi4py import MPI

from hpcsync.config.job import Stop
from hpcsync.core.coordinator import Coordinator
from hpcsync.core.roles import Roles
from hpcsync.mpi.rank0.run_recorder import RunRecorder
from hpcsync.mpi.server.channel import ServerChannel
from hpcsync.mpi.server.leader import Leader
from hpcsync.mpi.server.shard import Shard
from hpcsync.mpi.server.worker import Worker
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.paradigms import create
from hpcsync.paradigms.records import Grant
from hpcsync.trace.writer import TraceWriter
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.update_rules import Descent

T = TypeVar("T")


def with_engine(
    comm: MPI.Intracomm,
    size: int,
    optimizer: OptimizerSpec,
    work: Callable[[Worker, torch.Tensor, torch.Tensor], T],
    transport: Transport = HOST,
) -> T | None:
    """Serve parameters on rank 0 while every other rank calls `work`; collective.

    Parameters
    ----------
    comm
        Communicator; rank 0 is the server, the others are workers.
    size
        Number of float32 parameters.
    optimizer
        Optimizer of the server.
    work
        Called with the worker, its weights and its gradient.
    transport
        Transport of the tensors, which also determines their device.

    Returns
    -------
    object
        Result of `work`; None on rank 0. All ranks return together, after waiting with backoff.
    """
    weights, gradient = torch.zeros(size, device=transport.device), torch.full((size,), 1e-3, device=transport.device)
    link = ServerChannel(comm, Roles(1, comm.size - 1), size, weights.dtype, transport)
    result = None
    if comm.rank == 0:
        _serve(link, optimizer, weights)
    else:
        worker = Worker(link, weights, gradient)
        result = work(worker, weights, gradient)
        worker.leave()
    link.backoff.barrier()
    link.free()
    return result


class _Unrecorded(RunRecorder[Coordinator]):
    """Records of a run that has only a trace."""

    evaluator = None

    def __init__(self, coordinator: Coordinator, trace: TraceWriter) -> None:
        self.coordinator, self.trace = coordinator, trace

    def chores(self, now_s: float, *, halted: bool) -> None:
        """Flush the trace."""
        self.trace.flush_if_due(now_s)


def _serve(link: ServerChannel, optimizer: OptimizerSpec, weights: torch.Tensor) -> None:
    n_workers = link.roles.n_workers
    shard = Shard(
        link, Descent(optimizer.on_server), weights, [Grant(worker, 1, local_steps=1) for worker in range(n_workers)]
    )
    with tempfile.TemporaryDirectory() as folder, TraceWriter(Path(folder) / "trace.h5", {}) as trace:
        coordinator = Coordinator(
            create("asp", n_workers), trace, n_workers=n_workers, lr=lambda *_: optimizer.lr, stop=Stop()
        )
        leader = Leader(link, shard, _Unrecorded(coordinator, trace))
        leader.serve()
        leader.finish()
