"""Traces of small runs without servers, simulated in memory."""

from hpcsync.core.assignments import decision_fields
from hpcsync.simulator import peer_transfers
from hpcsync.simulator.factory import simulation
from hpcsync.workloads.registry import build
from tests.unit.jobs import make_job
from tests.unit.recorder import Recorder
from tests.unit.trace.recorder import as_trace

PARADIGMS = {
    "allreduce": {"name": "allreduce"},
    "local-sgd": {"name": "local-sgd", "steps": 4},
    "pull": {"name": "gossip", "mode": "pull"},
    "push": {"name": "gossip", "mode": "push"},
    "push-sum": {"name": "gossip", "mode": "push-sum", "period": 2},
    "permutation": {"name": "gossip", "mode": "permutation", "period": 3},
    "pull-together": {"name": "gossip", "mode": "pull", "synchronous": True, "period": 2},
    "push-together": {"name": "gossip", "mode": "push", "synchronous": True},
    "push-sum-together": {"name": "gossip", "mode": "push-sum", "synchronous": True},
    "ad-psgd": {"name": "ad-psgd"},
    "ring": {"name": "gossip", "mode": "permutation", "topology": "ring", "include_self": False},
    "exponential": {"name": "gossip", "mode": "push-sum", "topology": "exponential"},
}
BATCHES = {"policy": "equal-finish", "predictor": "last", "total": 24, "interval": 4}
LINEAR = {"name": "linear", "batch_size": 4, "features": 3, "samples": 64}


def peer_job(paradigm, seconds=(1.0, 1.3, 2.1), *, samples=320, leave=None, network=True, jitter=0.3, **tables):
    """Return a job; `leave` maps a worker to the iteration instead of which it leaves."""
    cluster = {
        "workers": len(seconds),
        "compute": {"model": "lognormal", "seconds": list(seconds), "jitter": jitter},
        "events": [{"worker": w, "at_iteration": at, "change": "leave"} for w, at in (leave or {}).items()],
    }
    if network:
        cluster["network"] = {"bandwidth_gbit": 1e-6, "latency_us": 20_000}
    defaults = {
        "seed": 2,  # with this seed some models arrive after their receiver's end in each push mode
        "workload": LINEAR,
        "optimizer": {"name": "sgd", "lr": 0.05},
        "stop": {"samples": samples},
        "evaluation": {"every_samples": 40},
        "paradigm": PARADIGMS[paradigm] if isinstance(paradigm, str) else paradigm,
        "cluster": cluster,
    }
    return make_job(**{**defaults, **tables})


def simulated(job):
    """Return the rows of all tables, in order."""
    trace, workload = Recorder(), build(job)
    for rank in range(job.cluster.ranks):
        trace.append("clocks", (0, rank, b"virtual", 0.0, 0.0))
    simulation(job, workload, peer_transfers.build(job, workload), trace).run()
    return trace.rows


def record(paradigm, seconds=(1.0, 1.3, 2.1), **how):
    """Return a finished trace in memory."""
    job = peer_job(paradigm, seconds, **how)
    return in_memory(job, simulated(job))


def in_memory(job, rows, status="finished"):
    return as_trace(job, rows, decision_fields(job), status)
