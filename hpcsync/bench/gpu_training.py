"""Training a transformer by two workers under several paradigms, beside two plain trainings on the same device."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.api.ranks import join
from hpcsync.bench.figures import Figure, in_turn
from hpcsync.config.job import Job
from hpcsync.mpi.collectives.bucket_reducer import BucketReducer
from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.trace.reader import load
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.gradient import Replica
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.workloads.registry import build

WORKERS = 2
WARM_UP = 5  # iterations in which memory is allocated, kernels are chosen and clocks rise
BATCH = 16
STEPS = 10  # iterations of a repetition
MODELS = {
    "cpu": {"layers": 2, "width": 96, "heads": 4, "context": 64},
    "cuda": {"layers": 12, "width": 832, "heads": 13, "context": 256},  # 100 million parameters
}
PARADIGMS: dict[str, dict[str, Any]] = {
    "bsp": {"name": "bsp"},
    "dssp": {"name": "dssp", "staleness_min": 3, "staleness_max": 15},
    "all-reduce": {"name": "allreduce"},
    "gossip": {"name": "gossip", "mode": "pull"},
}


def measure(comm: MPI.Intracomm, transport: Transport = HOST, repetitions: int = 5) -> list[Figure]:
    """Measure with up to three ranks: two workers and, for a paradigm that has one, a server.

    Returns
    -------
    list of Figure
        On rank 0; empty on the others.
    """
    backoff, figures = Backoff(comm), []
    workers = comm.Split(0 if comm.rank < WORKERS else MPI.UNDEFINED)
    job = _job(PARADIGMS["all-reduce"], transport, repetitions)
    size, plain_ms, reduce_ms = 0, [0.0], [0.0]
    if comm.rank < WORKERS:
        assert isinstance(workers, MPI.Intracomm)
        size, plain_ms = _plain_ms(workers, job, transport, repetitions)
        reduce_ms = _reduce_ms(workers, job, transport, repetitions)
        workers.Free()
    backoff.barrier()
    for name, paradigm in PARADIGMS.items():
        took_ms = _trained_ms(comm, _job(paradigm, transport, repetitions), transport.device, repetitions)
        what = f"{size / 1e6:.3g} million float32, {name}"
        figures.append(Figure(f"iteration, {what}", "ms", took_ms, "plain training", plain_ms))
        if name == "all-reduce" and comm.rank == 0:
            figures.append(Figure(f"mean of all gradients alone, {what}", "ms", reduce_ms))
            added = zip(took_ms, plain_ms, reduce_ms, strict=True)
            hidden = [100 * (1 - (ours - plain) / alone) for ours, plain, alone in added]
            figures.append(Figure(f"hidden behind the backward pass, {what}", "%", hidden))
        backoff.barrier()
    return figures if comm.rank == 0 else []


def _job(paradigm: dict[str, Any], transport: Transport, repetitions: int) -> Job:
    """Return a job of so many iterations that every worker makes what is measured."""
    servers = int(paradigm["name"] in ("bsp", "dssp"))
    n_iterations = WARM_UP + repetitions * STEPS + 1
    table = {
        "name": "bench",
        "workload": {"name": "text", "batch_size": BATCH, **MODELS[transport.device.type]},
        "optimizer": {"name": "sgd", "lr": 1e-3, "momentum": 0.9},
        "stop": {"samples": 2 * WORKERS * BATCH * n_iterations},  # twice as many: workers are not alike
        "evaluation": {"every_samples": 0},
        "paradigm": paradigm,
        "cluster": {
            "servers": servers,
            "workers": WORKERS,
            "device": transport.device.type,
            "window": transport.kind,
        },
    }
    return Job.from_table(table)


def _trained_ms(comm: MPI.Intracomm, job: Job, device: torch.device, repetitions: int) -> list[float]:
    """Run the job; return the duration of an iteration of worker 0 in each repetition, on rank 0."""
    part = comm.Split(0 if comm.rank < job.cluster.ranks else MPI.UNDEFINED)
    if comm.rank >= job.cluster.ranks:
        return []
    assert isinstance(part, MPI.Intracomm)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(part.bcast(folder)) / "run"
        _train(part, job, out, device)
        if comm.rank == 0:
            tables = load(out / "trace.h5").tables
            rows = tables["pushes"] if job.cluster.servers else tables["exchanges"]
            begin_s = np.sort(rows["begin_s"][rows["worker"] == 0])
        part.Barrier()  # the folder is that of rank 0
    part.Free()
    if comm.rank > 0:
        return []
    at = WARM_UP + STEPS * np.arange(repetitions + 1)
    return (1e3 * np.diff(begin_s[at]) / STEPS).tolist()


def _train(comm: MPI.Intracomm, job: Job, out: Path, device: torch.device) -> None:
    workload = build(job)
    assert workload.loss is not None
    model = workload.model.to(device)
    with join(comm, job, model, OptimizerSpec.of_job(job), None, out) as sync:
        replica = Replica(sync.flat, sync.loss_here(workload.loss))
        for batch in sync.shard(workload.train, BATCH, epochs=None):
            sync.step(replica.compute_in_pieces(batch, 1, sync.cancelled))


def _plain_ms(comm: MPI.Intracomm, job: Job, transport: Transport, repetitions: int) -> tuple[int, list[float]]:
    """Train on every rank by itself, all at once; return the model's size and the duration of an iteration."""
    workload, device = build(job), transport.device
    model = workload.model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    assert workload.train is not None and workload.loss is not None
    loader = torch.utils.data.DataLoader(workload.train, BATCH, shuffle=True, drop_last=True)
    batches = _for_ever(loader)

    def trained_ms(n_steps: int = STEPS) -> float:
        begin_s = time.perf_counter()
        for _ in range(n_steps):
            batch = [tensor.to(device) for tensor in next(batches)]
            optimizer.zero_grad()
            workload.loss(model, *batch).backward()  # type: ignore[misc]
            optimizer.step()
        cuda.ready(next(model.parameters()))
        return 1e3 * (time.perf_counter() - begin_s) / n_steps

    trained_ms(WARM_UP)
    comm.Barrier()
    (values,) = in_turn(repetitions, trained_ms)
    return sum(parameter.numel() for parameter in model.parameters()), values


def _for_ever(loader: torch.utils.data.DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _reduce_ms(comm: MPI.Intracomm, job: Job, transport: Transport, repetitions: int) -> list[float]:
    """Return the duration of the mean of a gradient that is complete."""
    flat = FlatModel(build(job).model.to(transport.device))
    with BucketReducer(comm, flat, transport=transport) as reducer:

        def reduced_ms() -> float:
            comm.Barrier()
            begin_s = time.perf_counter()
            for _ in range(STEPS):
                reducer.finish()
            return 1e3 * (time.perf_counter() - begin_s) / STEPS

        (values,) = in_turn(repetitions, reduced_ms)
    return values
