"""Whole runs on some of the ranks, and what plain torch makes of the same job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcsync.job import Job
from hpcsync.learning.data import batch_indices
from hpcsync.learning.validation import check
from hpcsync.learning.workloads import Workload
from hpcsync.mpi import placement
from hpcsync.mpi.rank_session import RankSession
from hpcsync.mpi.tensor_window import Transport
from hpcsync.rank import train
from hpcsync.traces.audit import audit


def on_some(comm: MPI.Intracomm, job: Job, folder: Any) -> np.ndarray | None:
    """The final weights of the job, run on as many of the ranks as it needs; None on the others."""
    some = comm.Split(0 if comm.rank < job.cluster.ranks else MPI.UNDEFINED, comm.rank)
    if some == MPI.COMM_NULL:
        return None
    session = train(some, job, folder)
    weights = session.flat.weights.cpu().numpy().copy()
    assert all((other == weights).all() for other in some.allgather(weights)), "all ranks end with the same weights"
    some.Free()
    return weights


def route(monkeypatch: pytest.MonkeyPatch, transport: Transport) -> None:
    """Let the tensors of runs on this device move so, without a trial."""
    place = placement.place

    def placed(comm: MPI.Intracomm, job: Job, device: torch.device) -> placement.Placement:
        if device.type != transport.device.type:
            return place(comm, job, device)
        return placement.Placement(transport, "the test wants it")

    monkeypatch.setattr(placement, "place", placed)


def one_process(job: Job, batches_per_step: int) -> np.ndarray:
    """The same training by plain torch in one process, with batches so many times as large."""
    steps = [range(step * batches_per_step, (step + 1) * batches_per_step) for step in range(job.stop.updates)]
    return plain(job, steps)


def alone(job: Job, worker: int, iterations: int) -> np.ndarray:
    """What one of the job's workers would come to by itself."""
    return plain(job, [[iteration * job.cluster.workers + worker] for iteration in range(iterations)])


def plain(job: Job, steps: Iterable[Iterable[int]]) -> np.ndarray:
    """Each step on these batches together."""
    workload = check(job)
    model, data = workload.model, workload.train
    optimizer = torch.optim.SGD(model.parameters(), lr=job.optimizer.lr, **job.optimizer.options)
    for numbers in steps:
        shape = {"batch_size": job.workload.batch_size, "size": len(data)}
        indices = np.concatenate([batch_indices(job.seed, j, **shape) for j in numbers])
        optimizer.zero_grad()
        workload.loss(model, *(t[torch.from_numpy(indices)] for t in data.tensors)).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def failures(path: Any) -> list[Any]:
    return [found for found in audit(path) if not found.passed]


def leaving(session: RankSession, job: Job, workload: Workload, iterations: int) -> None:
    """Train in a script's loop, and leave after so many iterations; 0 on a server."""
    for x, y in session.shard(workload.train, job.workload.batch_size, epochs=None):
        session.flat.zero_gradient()
        loss = workload.loss(workload.model, x, y)
        loss.backward()
        session.step(loss)
        iterations -= 1
        if iterations == 0:
            break
