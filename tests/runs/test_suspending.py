"""A run without servers that is told to save, then to end, and then goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from rich.console import Console

from hpcsync.audit.trace_audit import audit
from hpcsync.config.job import load as load_job
from hpcsync.run_dir import checkpoint
from hpcsync.simulator.simulate import simulate
from hpcsync.system.signals import TO_BE_RESUMED
from hpcsync.trace.reader import load
from tests.runs.processes import ended, hpcsync, started

MORE = 400  # updates after resuming
JOB = """
name = "suspending"
workload = {name = "linear", batch_size = 4, features = 20, samples = 400}
optimizer = {name = "sgd", lr = 0.01, momentum = 0.9}
stop = {updates = 1_000_000}
evaluation = {every_samples = 400}
paradigm = {name = "allreduce"}
cluster = {workers = 2, compute = {model = "lognormal", seconds = 0.005}}
"""


def test_what_was_interrupted_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """That it computes what a simulation does, to the bit, holds for every run of such a job."""
    job, out = tmp_path / "job.toml", tmp_path / "out"
    job.write_text(JOB)
    with started(hpcsync("run", job, "--out", out)) as program:
        program.wait_for(lambda said: " samples/s" in said.out)
        program.process.send_signal(signal.SIGUSR1)
        program.wait_for(lambda _: checkpoint.newest(out) is not None)
        program.process.send_signal(signal.SIGTERM)
        assert program.status == TO_BE_RESUMED, program.err
    said = "hpcsync: interrupted; use --resume to resume from checkpoint 2"
    assert program.complaints == [said], "nothing from the MPI"
    trace = load(out / "trace.h5")
    assert trace.status == "interrupted"
    updates = len(trace.tables["updates"]) + MORE
    stop = f"stop.updates={updates}"
    resumed = ended(hpcsync("run", job, "--out", out, "--set", stop, "--resume"))
    assert resumed.status == 0, resumed.err
    trace = load(out / "trace.h5")
    assert (len(trace.tables["starts"]), len(trace.tables["updates"])) == (2, updates)
    assert [found.name for found in audit(trace) if not found.passed] == []
    assert simulate(load_job(job, [stop]), tmp_path / "simulated", Console(quiet=True)) == 0
    weights = [(folder / "weights.safetensors").read_bytes() for folder in (out, tmp_path / "simulated")]
    assert weights[0] == weights[1]


SCRIPT = """
import os, time, torch, hpcsync
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with hpcsync.connect(model, optimizer, out="out", resume=True) as sync:
    for x in sync.shard(torch.ones(600, 3), batch_size=2):
        time.sleep(float(os.environ["ITERATION_S"]))
        optimizer.zero_grad()
        model(x).mean().backward()
        sync.step()
"""


def test_a_launched_script_that_is_told_to_end_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    line = hpcsync("launch", "-n", "2", "--", "python", "train.py")
    with started(line, tmp_path, {**os.environ, "ITERATION_S": "0.1"}) as program:
        program.wait_for(lambda said: " samples/s" in said.out)
        program.process.send_signal(signal.SIGTERM)
        assert program.status == TO_BE_RESUMED, program.err
    said = 'hpcsync: interrupted; use connect(..., out="out", resume=True) to resume from checkpoint 1'
    assert program.complaints == [said]
    assert (resumed := ended(line, tmp_path, {**os.environ, "ITERATION_S": "0"})).status == 0, resumed.err
    trace = load(tmp_path / "out" / "trace.h5")
    assert (len(trace.tables["starts"]), len(trace.tables["updates"])) == (2, 300)
