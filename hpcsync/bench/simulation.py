"""Cost of simulations: decisions and events without arithmetic, and the overhead over real arithmetic."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpcsync.bench.event_loop import BARE, bare, random_delays
from hpcsync.bench.figures import Figure, in_turn
from hpcsync.config.job import Job, Script
from hpcsync.core.assignments import decision_fields
from hpcsync.simulator import cluster
from hpcsync.simulator.server_run import ServerSimulation
from hpcsync.trace.writer import TraceWriter
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.gradient import Replica
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.sampler import batches
from hpcsync.workloads.registry import build

DSSP = {"name": "dssp", "staleness_min": 3, "staleness_max": 15}
NETWORK = {"bandwidth_gbit": 10.0, "latency_us": 50.0}


SCALE, SCALE_AIM = (100, 1_000, 10_000), 0.8


def measure(
    workers: int = 1000,
    iterations: int = 50,
    gradients: int = 1000,
    repetitions: int = 5,
    scale: Sequence[int] = SCALE,
) -> list[Figure]:
    """Measure simulations without and with arithmetic.

    Without arithmetic, the events of `workers` workers are measured, and the iterations of each number of workers in
    `scale`; with it, `gradients` gradients of digits, small and large, of few workers and of many.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with_arithmetic = [_with(*size, gradients, repetitions) for size in ((4, 32), (4, 128), (64, 128))]
        return [*_without(workers, iterations, repetitions), *_at_scale(scale, repetitions), *with_arithmetic]
    finally:
        torch.set_num_threads(threads)


def _without(workers: int, iterations: int, repetitions: int) -> list[Figure]:
    figures = []
    for words, network in (("no network", {}), ("10 Gbit/s", {"network": NETWORK})):
        job = _job({"name": "timing"}, workers, workers * iterations, **network)
        per_iteration = simulate(job)[0] / (workers * iterations)
        events, alone = in_turn(
            repetitions, partial(_rate, job), partial(bare, random_delays(10_000), workers, 4 * iterations)
        )
        what = f"dssp, {workers} workers, {words}: events, {per_iteration:.1f} an iteration"
        figures.append(Figure(what, "k/s", events, BARE, alone))
    return figures


def _at_scale(scale: Sequence[int], repetitions: int) -> list[Figure]:
    """Measure as many iterations, 10 of each with the most workers, of every number of workers on shared links."""
    jobs = [_job({"name": "timing"}, n, 10 * max(scale), network=NETWORK) for n in scale]
    rates = in_turn(repetitions, *(partial(_iteration_rate, job) for job in jobs))
    limit = f"with {scale[0]} workers"
    return [
        Figure(f"dssp, {n:,} workers, 10 Gbit/s: iterations", "k/s", values, limit, rates[0], aim=SCALE_AIM)
        for n, values in zip(scale, rates, strict=True)
    ]


def _iteration_rate(job: Job) -> float:
    return 1e-3 * (job.stop.updates or 0) / simulate(job)[1]


def _rate(job: Job) -> float:
    n_events, took_s = simulate(job)
    return 1e-3 * n_events / took_s


def _with(workers: int, batch_size: int, gradients: int, repetitions: int) -> Figure:
    workload = {"name": "digits", "batch_size": batch_size}
    job = _job(workload, workers, gradients, evaluation={"every_samples": 0}, network=NETWORK)
    simulated, alone = in_turn(repetitions, lambda: 1e3 * simulate(job)[1], lambda: 1e3 * arithmetic_alone(job))
    what = f"dssp, {workers} workers, {gradients:,} gradients of {batch_size} digits"
    return Figure(what, "ms", simulated, "as many batches, gradients and optimizer steps", alone, aim=1.1)


def _job(workload: dict[str, Any], workers: int, updates: int, **tables: Any) -> Job:
    network = {"network": tables.pop("network")} if "network" in tables else {}
    compute = {"model": "lognormal", "seconds": 0.02}
    return Job.from_table(
        {
            "name": "bench",
            "workload": workload,
            "optimizer": {"name": "sgd", "lr": 1e-6},
            "stop": {"updates": updates},
            "paradigm": DSSP,
            "cluster": {"workers": workers, "compute": compute, **network},
            **tables,
        }
    )


def simulate(job: Job) -> tuple[int, float]:
    """Return the number of events of a whole simulation with its trace, and its seconds.

    The final evaluation is left out.
    """
    workload = replace(build(job), evaluate=None)
    virtual = cluster.build(job, workload)
    with (
        tempfile.TemporaryDirectory() as folder,
        TraceWriter(Path(folder) / "trace.h5", {}, decision_fields(job)) as trace,
    ):
        simulation = ServerSimulation(job, workload, virtual, trace)
        begin_s = time.perf_counter()
        simulation.run()
        trace.flush()
        return virtual.loop.n_events, time.perf_counter() - begin_s


def arithmetic_alone(job: Job) -> float:
    """Return the seconds of as many batches, gradients and optimizer steps of one worker, without copies."""
    workload, seed = build(job), job.seed
    assert not isinstance(job.workload, Script) and workload.train is not None
    flat = FlatModel(workload.model)
    replica = Replica(flat, workload.loss)
    parameter = torch.nn.Parameter(flat.weights)
    parameter.grad = flat.gradient
    optimizer = OptimizerSpec.of_job(job).build(parameter)
    size = job.workload.batch_size
    mine = batches(workload.train, seed, 0, n_workers=1, batch_size=size, epochs=range(sys.maxsize))
    begin_s = time.perf_counter()
    for _ in range(job.stop.updates or 0):
        replica.compute(next(mine))
        optimizer.step()
    return time.perf_counter() - begin_s
