"""on_death = "restart": `hpcsync run` starts the ranks again, from the last checkpoint; workers_min: with how few."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.run_dir import checkpoint
from hpcsync.system import launcher
from hpcsync.trace.reader import Trace, load
from tests.runs.processes import ended, hpcsync, mpiexec, started

JOB = """
name = "restarted"
workload = {{name = "{workload}", batch_size = 4}}
optimizer = {{name = "sgd", lr = 0.01}}
stop = {{updates = 400}}
evaluation = {{every_samples = 0}}
checkpoint = {{updates = 50}}
paradigm = {{{paradigm}}}
cluster = {{workers = {workers}, {cluster}}}
"""
RESTART = 'on_death = "restart", compute = {model = "constant", seconds = 0.01}'
PARADIGMS = {
    "bsp": 'name = "bsp"',
    "allreduce": 'name = "allreduce"',
}
BREAKING = """
import os
import signal
import time
import torch
from hpcsync.system.rank_environment import expected_rank
from hpcsync.workloads.registry import Workload

def loss(model, x):
    if expected_rank() == 1:
        {end}
    return model(x).mean()

def make():
    data = torch.utils.data.TensorDataset(torch.ones(64, 3))
    return Workload(torch.nn.Linear(3, 1), loss, data, None)
"""


def write(folder: Path, paradigm: str, workers: int, cluster: str = RESTART, end: str = "pass") -> None:
    (folder / "breaking.py").write_text(BREAKING.format(end=end))
    text = JOB.format(workload="breaking:make", paradigm=PARADIGMS[paradigm], workers=workers, cluster=cluster)
    (folder / "job.toml").write_text(text)


def checked(folder: Path) -> Trace:
    trace = load(folder / "out" / "trace.h5")
    assert trace.status == "finished"
    assert [found for found in audit(trace) if not found.passed] == []
    return trace


@pytest.mark.parametrize("paradigm", ["bsp", pytest.param("allreduce", marks=pytest.mark.once)])
def test_a_run_of_which_a_rank_is_killed_starts_again(tmp_path: Path, paradigm: str) -> None:
    held = 'while os.path.exists("out/checkpoints/1") and not os.path.exists("go"): time.sleep(0.01)'
    write(tmp_path, paradigm, workers=1 if paradigm == "bsp" else 2, end=held)
    with started(hpcsync("run", "job.toml", "--out", "out"), tmp_path) as run:
        run.wait_for(lambda _: (tmp_path / "out" / "checkpoints" / "1").exists())
        with started(hpcsync("watch", "out", "--json"), tmp_path) as watch:
            watch.wait_for(lambda watch: watch.out)
            run.rank(1).send_signal(signal.SIGKILL)
            (tmp_path / "go").touch()
            assert run.status == 0, run.err
            assert watch.status == 0, watch.err
            assert json.loads(watch.out.splitlines()[-1])["status"] == "finished"
    assert run.err.count("hpcsync: restarting 2 of 2 ranks\n") == 1
    assert "use --resume" not in run.err
    trace = checked(tmp_path)
    assert len(trace.tables["starts"]) == 2


@pytest.mark.once
def test_a_rank_that_raises_is_not_started_again(tmp_path: Path) -> None:
    write(tmp_path, "bsp", workers=1, end='raise KeyError("lost")')
    run = ended(hpcsync("run", "job.toml", "--out", "out"), tmp_path)
    assert run.status == 1
    assert "restarting" not in run.err


@pytest.mark.once
def test_a_run_of_which_rank_0_is_interrupted_is_not_started_again(tmp_path: Path) -> None:
    write(tmp_path, "bsp", workers=1)
    with started(hpcsync("run", "job.toml", "--set", "stop.updates=100_000", "--out", "out"), tmp_path) as run:
        run.wait_for(lambda _: checkpoint.newest(tmp_path / "out") is not None)
        run.rank(0).send_signal(signal.SIGINT)
        assert run.status == 1
    assert "restarting" not in run.err


@pytest.mark.once
def test_another_launcher_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "bsp", workers=1)
    line = mpiexec(2, "-m", "mpi4py", "-m", "hpcsync", "run", "job.toml", "--out", "out")
    run = ended(line, tmp_path, launcher.environment())
    assert run.status != 0
    assert run.err.count('hpcsync: cluster.on_death = "restart": needs hpcsync run as the process that starts') == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.once
def test_a_run_starts_with_fewer_workers_and_resumes_with_more(tmp_path: Path) -> None:
    write(tmp_path, "bsp", workers=2, cluster="workers_min = 1")
    few = ended(hpcsync("run", "job.toml", "--out", "out", "-n", "1"), tmp_path)
    assert few.status == 2
    assert few.err == (
        "hpcsync: cluster.workers = 2, cluster.workers_min = 1: with cluster.servers = 1 this takes 2 to 3 ranks, but "
        "there are 1\n"
    )
    first = ended(hpcsync("run", "job.toml", "--out", "out", "-n", "2", "--set", "stop.updates=100"), tmp_path)
    assert first.status == 0, first.err
    assert set(checked(tmp_path).tables["pushes"]["worker"]) == {0}
    (tmp_path / "out" / "summary.json").unlink()  # as if it had not finished
    second = ended(hpcsync("run", "job.toml", "--out", "out", "-n", "3", "--resume"), tmp_path)
    assert second.status == 0, second.err
    trace = checked(tmp_path)
    assert set(trace.tables["pushes"]["worker"]) == {0, 1}
    assert len(trace.tables["starts"]) == 2
