"""The engine as a run has it, without a model: asynchronous workers that push what they are given, and a trace."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from mpi4py import MPI

from hpcsync.config.job import Stop
from hpcsync.core.assignments import Assignment
from hpcsync.core.coordinator import Coordinator
from hpcsync.core.roles import Roles
from hpcsync.mpi.server.channel import ServerChannel
from hpcsync.mpi.server.leader import Leader
from hpcsync.mpi.server.shard import Shard
from hpcsync.mpi.server.worker import Worker
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.paradigms import create
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
    """Rank 0 serves `size` float32 parameters; every other rank returns work(worker, its weights, its gradient).

    All of them lie where the transport says.

    Collective; ranks leave it together and quietly.
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


def _serve(link: ServerChannel, optimizer: OptimizerSpec, weights: torch.Tensor) -> None:
    n_workers = link.roles.n_workers
    shard = Shard(link, Descent(optimizer), weights, [Assignment()] * n_workers)
    with tempfile.TemporaryDirectory() as folder, TraceWriter(Path(folder) / "trace.h5", {}) as trace:
        coordinator = Coordinator(
            create("asp", n_workers), trace, n_workers=n_workers, lr=lambda *_: optimizer.lr, stop=Stop()
        )
        leader = Leader(link, shard, coordinator, None, trace.flush_if_due)
        leader.serve()
        leader.finish()
    shard.free()
