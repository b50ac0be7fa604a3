"""Simulations for tests: from a job in memory to a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcsync.audit.trace_audit import audit
from hpcsync.config.job import Job
from hpcsync.core.assignments import decision_fields
from hpcsync.simulator.simulate import prepare
from hpcsync.trace.provenance import provenance
from hpcsync.trace.reader import Trace, load
from hpcsync.trace.writer import TraceWriter
from hpcsync.workloads.registry import Workload, build
from tests.unit.jobs import make_job

TIMING = {"name": "timing", "batch_size": 4, "parameters": 1000}
PARADIGMS: list[dict[str, Any]] = [
    {"name": "bsp"},
    {"name": "asp"},
    {"name": "ssp", "staleness": 2},
    {"name": "dssp", "staleness_min": 1, "staleness_max": 5},
    {"name": "easgd", "period": 3},
    {"name": "easgd", "period": 3, "synchronous": True},
]
WITHOUT_SERVER: list[dict[str, Any]] = [
    {"name": "allreduce"},
    {"name": "local-sgd", "steps": 3},
    {"name": "local-sgd", "steps": 3, "outer_lr": 0.7, "outer_momentum": 0.9},
    {"name": "gossip", "mode": "pull"},
    {"name": "ad-psgd"},
    {"name": "gossip", "mode": "push", "period": 2},
    {"name": "gossip", "mode": "push-sum", "topology": "exponential"},
    {"name": "gossip", "mode": "permutation"},
    {"name": "gossip", "mode": "permutation", "period": 3, "beta": 0.3},
    {"name": "gossip", "mode": "push", "synchronous": True},
]


def timing_job(*, workers: int = 2, seconds: Any = 1.0, model: str = "constant", **tables: Any) -> Job:
    """A job without arithmetic, whose iterations take `seconds`. `cluster` adds keys to that table."""
    more = tables.pop("cluster", {})
    return make_job(
        **{
            "workload": TIMING,
            "stop": {"updates": 20},
            "cluster": {"workers": workers, "compute": {"model": model, "seconds": seconds}, **more},
            **tables,
        }
    )


def simulate(job: Job, path: Path, workload: Workload | None = None) -> Trace:
    """Simulate this job and return its trace; `path` must not exist."""
    workload = workload or build(job)
    begin = prepare(job, workload)
    attributes = provenance(job, engine="simulator", mpi_library=None, hosts=["virtual"])
    with TraceWriter(path, attributes, decision_fields(job)) as trace:
        simulation = begin(trace)
        trace.describe(getattr(simulation, "attributes", {}))
        simulation.run()
    return load(path)


def failed(trace: Trace) -> list[str]:
    return [f"{check.name}: {check.detail}" for check in audit(trace) if not check.passed]
