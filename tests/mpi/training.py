"""Whole runs on some of the ranks, and the result of the same job in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcsync.api.ranks import agree
from hpcsync.audit.trace_audit import audit
from hpcsync.cli.rank_main import train
from hpcsync.config.job import Job
from hpcsync.core.job_validation import check
from hpcsync.core.session import Session
from hpcsync.mpi.session_base import RankSession
from hpcsync.mpi.transport import window_selection
from hpcsync.mpi.transport.tensor_window import Transport
from hpcsync.run_dir import layout
from hpcsync.simulator import cluster
from hpcsync.simulator.server_run import ServerSimulation
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import Outcome
from hpcsync.workloads.registry import Workload
from tests.plain import on_batches, samples


def on_some(comm: MPI.Intracomm, job: Job, folder: Any, resume: bool = False) -> np.ndarray | None:
    """The final weights of the job, run on as many of the ranks as it needs; None on the others."""
    some = comm.Split(0 if comm.rank < job.cluster.ranks else MPI.UNDEFINED, comm.rank)
    if some == MPI.COMM_NULL:
        return None
    session = resume_run(some, job, folder) if resume else train(some, job, folder)
    weights = session.flat.weights.cpu().numpy().copy()
    assert all((other == weights).all() for other in some.allgather(weights)), "all ranks end with the same weights"
    some.Free()
    return weights


def resume_run(comm: MPI.Intracomm, job: Job, folder: Path) -> Session:
    """The run in this folder, from its newest checkpoint on."""
    return train(comm, job, folder, agree(comm, lambda: layout.resuming(folder, True)))


def route(monkeypatch: pytest.MonkeyPatch, transport: Transport) -> None:
    """Let the tensors of runs on this device move so, without a trial."""
    place = window_selection.place

    def placed(comm: MPI.Intracomm, job: Job, device: torch.device) -> window_selection.WindowSelection:
        if device.type != transport.device.type:
            return place(comm, job, device)
        return window_selection.WindowSelection(transport, "the test wants it")

    monkeypatch.setattr(window_selection, "place", placed)


def one_process(job: Job, batches_per_step: int) -> np.ndarray:
    """The same training by plain torch in one process, with batches so many times as large."""
    steps = [range(step * batches_per_step, (step + 1) * batches_per_step) for step in range(job.stop.updates)]
    return on_batches(job, steps)


def alone(job: Job, worker: int, iterations: int) -> np.ndarray:
    """What one of the job's workers would come to by itself."""
    return on_batches(job, [[iteration * job.cluster.workers + worker] for iteration in range(iterations)])


def recomputed(job: Job, trace: Trace) -> np.ndarray:
    """Return the weights that follow from the contributions in this trace.

    Each contribution is the gradient of its samples at the version that it was computed from, times its recorded
    weight.
    """
    workload = check(job)
    data, parameters = workload.train.tensors, list(workload.model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=job.optimizer.lr, **job.optimizer.options)
    updates: dict[int, list[Any]] = {}
    for push in trace.tables["pushes"]:
        if push["outcome"] == Outcome.APPLIED:
            updates.setdefault(int(push["version_read"] + push["staleness"]), []).append(push)
    versions = [[p.detach().clone() for p in parameters]]
    for version in range(len(trace.tables["updates"])):
        total = [torch.zeros_like(p) for p in parameters]
        for push in updates[version]:
            optimizer.zero_grad()
            _set(parameters, versions[push["version_read"]])
            at = torch.from_numpy(samples(job, trace, push))
            workload.loss(workload.model, *(tensor[at] for tensor in data)).backward()
            for part, p in zip(total, parameters, strict=True):
                part.add_(p.grad, alpha=float(push["weight"]))
        _set(parameters, versions[-1])
        for p, gradient in zip(parameters, total, strict=True):
            p.grad = gradient
        optimizer.step()
        versions.append([p.detach().clone() for p in parameters])
    return torch.cat([p.flatten() for p in versions[-1]]).numpy()


def _set(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    for p, value in zip(parameters, values, strict=True):
        p.data.copy_(value)


class Nothing:
    def append(self, table: str, row: Any) -> None: ...

    def amend(self, table: str, back: int, column: str, value: float) -> None: ...


def simulated(job: Job) -> np.ndarray:
    """The final weights of this job in virtual time."""
    workload = check(job)
    ServerSimulation(job, workload, cluster.build(job, workload), Nothing()).run()
    return torch.cat([p.detach().flatten() for p in workload.model.parameters()]).numpy()


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
