"""`hpcsync simulate` from the command line, and beside real ranks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from hpcsync.audit.trace_audit import audit
from hpcsync.config import job as jobs
from hpcsync.report.compare import compare
from hpcsync.simulator.simulate import simulate
from hpcsync.trace.reader import load
from tests.runs.processes import ended, hpcsync, started

pytestmark = pytest.mark.once

JOB = """
name = "both"
seed = 1
workload = {name = "linear", batch_size = 4, samples = 96, features = 7}
optimizer = {name = "sgd", lr = 0.05, momentum = 0.9}
evaluation.every_samples = 100
stop.updates = 120
paradigm = {name = "bsp"}
cluster = {servers = 1, workers = 2, compute = {model = "lognormal", seconds = [0.004, 0.008]}}
"""
PARADIGMS = {
    "bsp": 'paradigm={name="bsp"}',
    "dssp": 'paradigm={name="dssp", staleness_min=1, staleness_max=5}',
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "both.toml"
    path.write_text(JOB)
    return path


def weights(folder: Path) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in sorted(load_file(folder / "weights.safetensors").items())])


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_a_run_and_its_simulation(tmp_path, path, paradigm):
    """One job, on ranks and in virtual time from their trace. Where decisions do not depend on who is first, and for
    one sequence of updates, the weights are the same bits."""
    real, simulated = tmp_path / "real", tmp_path / "simulated"
    setting = ("--set", PARADIGMS[paradigm])
    assert ended(hpcsync("run", path, *setting, "--out", real), cwd=tmp_path).status == 0
    arguments = ("simulate", path, *setting, "--out", simulated, "--times-from", real / "trace.h5")
    program = ended(hpcsync(*arguments), cwd=tmp_path)
    assert program.status == 0, program.err
    traces = [load(folder / "trace.h5") for folder in (real, simulated)]
    assert [trace.attributes["engine"] for trace in traces] == ["mpi", "simulator"]
    for trace in traces:
        assert [check for check in audit(trace) if not check.passed] == []
    comparison = compare(*traces)
    assert comparison.time_ratio == pytest.approx(1.0, abs=0.05)
    assert comparison.same_order > 0.9
    assert "ratio" in program.out and "in the same order" in program.out
    if paradigm == "bsp":
        assert torch.equal(weights(real), weights(simulated))
        losses = [trace.tables["pushes"]["loss"][:240].tolist() for trace in traces]
        assert sorted(losses[0]) == sorted(losses[1])
        other = tmp_path / "other"
        assert simulate(jobs.load(path, [*setting[1:], "seed=2"]), other, Console(quiet=True)) == 0
        assert not torch.equal(weights(real), weights(other))


def test_a_signal_ends_it_and_leaves_a_trace(tmp_path, path):
    out = tmp_path / "out"
    arguments = ("--set", "stop.updates=100000000", "--set", "evaluation.every_samples=0", "--out", out)
    with started(hpcsync("simulate", path, *arguments)) as program:
        program.wait_for(lambda p: "updates" in p.out)
        program.process.send_signal(signal.SIGTERM)
        assert program.status == 1
    assert f"interrupted: SIGTERM; the trace so far is {out / 'trace.h5'}" in program.err
    trace = load(out / "trace.h5")
    assert trace.status == "interrupted"
    assert len(trace.tables["pushes"]) > 0
    assert [check for check in audit(trace) if not check.passed] == []


def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, path):
    program = ended(hpcsync("simulate", path, "--times-from", "both.toml"), cwd=tmp_path)
    assert program.status == 2
    assert len(program.err.splitlines()) == 1
    assert "both.toml: not a trace" in program.err
    assert not (tmp_path / "runs").exists()


def test_a_real_run_takes_its_own_times(tmp_path, path):
    program = ended(hpcsync("run", path, "--set", f"cluster.times_from={path}"), cwd=tmp_path)
    assert program.status == 2
    assert len(program.err.splitlines()) == 1
    assert "cluster.times_from" in program.err
