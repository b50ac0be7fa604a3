"""Traces of small simulated runs without arithmetic."""

from pathlib import Path
from typing import Any

from rich.console import Console

from hpcsync.simulator.simulate import simulate
from hpcsync.trace.reader import Trace, load
from tests.unit.jobs import make_job


def simulated(
    folder: Path, paradigm: dict[str, Any], seconds: list[float], *, updates: int = 40, jitter: float = 0.0, **how: Any
) -> Trace:
    """Return the trace of a run whose workers' iterations take these seconds.

    `how` has further keys of [cluster], or whole tables "batches", "optimizer", "stop" and "workload".
    """
    tables = {name: how.pop(name) for name in ("batches", "optimizer", "stop", "workload") if name in how}
    compute = {"model": "lognormal", "seconds": seconds, "jitter": jitter}
    job = make_job(
        **{
            "workload": {"name": "timing", "batch_size": 8, "parameters": 1000},
            "stop": {"updates": updates},
            "paradigm": paradigm,
            "cluster": {"workers": len(seconds), "compute": compute, **how},
            **tables,
        }
    )
    out = folder / f"run-{len(list(folder.iterdir()))}"
    assert simulate(job, out, Console(quiet=True)) == 0
    return load(out)
