"""A run on ranks, and its simulation with the times of its trace."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from hpcsync.audit.trace_audit import audit
from hpcsync.cli.rank_main import train
from hpcsync.config.job import Job
from hpcsync.report.trace_pair import compare
from hpcsync.simulator.simulate import simulate
from hpcsync.trace.reader import load

PARADIGMS: dict[str, dict[str, Any]] = {
    "bsp": {"name": "bsp"},
    "dssp": {"name": "dssp", "staleness_min": 1, "staleness_max": 5},
}


def job(paradigm: str, **tables: Any) -> Job:
    table = {
        "name": "both",
        "seed": 1,
        "workload": {"name": "linear", "batch_size": 4, "samples": 96, "features": 7},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "evaluation": {"every_samples": 100},
        "stop": {"updates": 120},
        "paradigm": PARADIGMS[paradigm],
        "cluster": {"workers": 2, "compute": {"model": "lognormal", "seconds": [0.004, 0.008]}},
    }
    return Job.from_table(table | tables)


def weights(folder: Path) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in sorted(load_file(folder / "weights.safetensors").items())])


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_a_run_and_its_simulation(comm, only, folder, paradigm):
    """Where decisions do not depend on who is first, and for one sequence of updates, the weights are the same bits."""
    only(3)
    real, simulated, other = folder / "real", folder / "simulated", folder / "other"
    train(comm, job(paradigm), real)
    if comm.rank > 0:
        return
    said = StringIO()
    again = job(paradigm, cluster={"workers": 2, "times_from": str(real / "trace.h5")})
    assert simulate(again, simulated, Console(file=said, width=120)) == 0
    traces = [load(at / "trace.h5") for at in (real, simulated)]
    assert [trace.attributes["engine"] for trace in traces] == ["mpi", "simulator"]
    for trace in traces:
        assert [check for check in audit(trace) if not check.passed] == []
    comparison = compare(*traces)
    assert comparison.time_ratio == pytest.approx(1.0, abs=0.05)
    assert comparison.same_order > 0.9
    assert "ratio" in said.getvalue() and "in the same order" in said.getvalue()
    if paradigm == "bsp":
        assert torch.equal(weights(real), weights(simulated))
        losses = [trace.tables["pushes"]["loss"][:240].tolist() for trace in traces]
        assert sorted(losses[0]) == sorted(losses[1])
        assert simulate(job(paradigm, seed=2), other, Console(quiet=True)) == 0
        assert not torch.equal(weights(real), weights(other))
