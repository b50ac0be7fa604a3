"""What a simulation costs: its decisions and events without arithmetic, and what it adds to real arithmetic."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpcsync.bench.events import BARE, bare, random_delays
from hpcsync.bench.figures import Figure, in_turn
from hpcsync.coordinator import Update, create_paradigm
from hpcsync.job import Job
from hpcsync.learning.workloads import build
from hpcsync.simulator import cluster
from hpcsync.simulator.arithmetic import RealArithmetic
from hpcsync.simulator.simulation import Simulation
from hpcsync.traces.writer import TraceWriter

DSSP = {"name": "dssp", "staleness_min": 3, "staleness_max": 15}
NETWORK = {"bandwidth_gbit": 10.0, "latency_us": 50.0}


def measure(workers: int = 1000, iterations: int = 50, gradients: int = 1000, repetitions: int = 5) -> list[Figure]:
    """Without arithmetic: the events of `workers` workers. With it: so many gradients of digits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [*_without(workers, iterations, repetitions), _with(gradients, repetitions)]
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


def _rate(job: Job) -> float:
    n_events, took_s = simulate(job)
    return 1e-3 * n_events / took_s


def _with(gradients: int, repetitions: int) -> Figure:
    job = _job({"name": "digits", "batch_size": 32}, 4, gradients, evaluation={"every_samples": 0}, network=NETWORK)
    simulated, alone = in_turn(repetitions, lambda: 1e3 * simulate(job)[1], lambda: 1e3 * arithmetic_alone(job))
    what = f"dssp, 4 workers, {gradients:,} gradients of digits"
    return Figure(what, "ms", simulated, "the gradients and updates alone", alone, aim=1.1)


def _job(workload: dict[str, Any], workers: int, updates: int, **tables: Any) -> Job:
    network = {"network": tables.pop("network")} if "network" in tables else {}
    compute = {"model": "lognormal", "seconds": 0.02}
    return Job.from_table(
        {
            "name": "bench",
            "workload": workload,
            "optimizer": {"name": "sgd", "lr": 0.01},
            "stop": {"updates": updates},
            "paradigm": DSSP,
            "cluster": {"workers": workers, "compute": compute, **network},
            **tables,
        }
    )


def simulate(job: Job) -> tuple[int, float]:
    """Events of a whole simulation with its trace, and the seconds that it takes, evaluation at its end left out."""
    workload = build(job)
    workload = type(workload)(workload.model, workload.loss, workload.train, None)
    paradigm = create_paradigm(job)
    with tempfile.TemporaryDirectory() as folder:
        trace = TraceWriter(Path(folder) / "trace.h5", {}, paradigm.decision_fields)
        with trace:
            virtual = cluster.build(job, workload)
            simulation = Simulation(job, workload, virtual, paradigm, trace)
            begin_s = time.perf_counter()
            simulation.run()
            trace.flush()
            return virtual.loop.n_events, time.perf_counter() - begin_s


def arithmetic_alone(job: Job) -> float:
    """Seconds of as many gradients and updates, one after the other."""
    numbers = RealArithmetic(job, build(job))
    begin_s = time.perf_counter()
    for step in range(job.stop.updates or 0):
        worker = step % job.cluster.workers
        numbers.promise(worker)
        numbers.contribute(worker)
        numbers.apply(Update((worker,), 0.01))
    return time.perf_counter() - begin_s
