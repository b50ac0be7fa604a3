"""A signal ends a run that has not begun to train, whatever it is doing, and soon."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.runs.processes import GONE_S, Program, hpcsync, started

SEED = 20
JOB = """
name = "starting"
workload = {name = "slow:make", batch_size = 4}
optimizer = {name = "sgd", lr = 0.01}
stop = {seconds = 600}
paradigm = {name = "bsp"}
cluster = {workers = 1}
"""
WORKLOAD = """
import os, time
import torch
from hpcsync.system.rank_environment import under_launcher
from hpcsync.workloads.registry import Workload

def make():
    time.sleep(under_launcher() * float(os.environ["LOADING_S"]))
    data = torch.utils.data.TensorDataset(torch.ones(64, 3))
    return Workload(torch.nn.Linear(3, 1), lambda model, x: model(x).mean(), data, None)
"""
# What it says last before the signal: nothing, or what is being done then; and how long ranks load their data.
STEPS = {
    "": 600,
    "starting 2 ranks: ": 600,
    "loading libraries": 600,
    "loading model and data": 600,
    "setting up communication": 0,
}


def end(program: Program, step: str, signum: int, delay_s: float) -> float:
    """Send the signal some time after this step has begun; the seconds until nothing is left."""
    program.wait_for(lambda program: step in program.out)
    time.sleep(delay_s)
    begin_s = time.monotonic()
    program.process.send_signal(signum)
    assert program.status != 0
    program.gone_s()
    return time.monotonic() - begin_s


def handles(pid: int, signum: int) -> bool:
    """Whether this process has a handler of its own for the signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (signum - 1) & 1)


@pytest.mark.once
def test_a_signal_ends_every_step_of_the_start(tmp_path: Path) -> None:
    """All at once, to save time: on as many cores as there are, so that each is slower than alone."""
    dice = random.Random(SEED)
    (tmp_path / "slow.py").write_text(WORKLOAD)
    (tmp_path / "job.toml").write_text(JOB)
    signums = [signal.SIGTERM, signal.SIGINT]
    moments = [(step, signums[i % 2], dice.uniform(0, 1)) for i, step in enumerate(STEPS)]
    print(f"seed {SEED}: {moments}")
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        programs = [
            stack.enter_context(
                started(
                    hpcsync("run", "job.toml", "--out", f"out-{i}"),
                    tmp_path,
                    {**os.environ, "LOADING_S": str(loading_s)},
                )
            )
            for i, loading_s in enumerate(STEPS.values())
        ]
        took_s = list(pool.map(end, programs, *zip(*moments, strict=True)))
        print("took", took_s)
        assert max(took_s) < GONE_S
        for program in programs[1:]:
            assert program.complaints[0].startswith("hpcsync: interrupted")


def test_a_rank_that_ends_before_mpi_knows_it_ends_the_start(tmp_path: Path) -> None:
    """MPICH's launcher lets the others wait for it within MPI_Init."""
    (tmp_path / "slow.py").write_text(WORKLOAD)
    (tmp_path / "job.toml").write_text(JOB)
    with started(hpcsync("run", "job.toml", "--out", "out"), tmp_path, {**os.environ, "LOADING_S": "0"}) as program:
        program.wait_for(lambda program: "loading libraries" in program.out)  # rank 0 says so
        program.wait_for(lambda program: any(handles(rank.pid, signal.SIGTERM) for rank in program.ranks(1)))
        rank = program.hold(1)
        begin_s = time.monotonic()
        rank.send_signal(signal.SIGINT)
        rank.resume()
        assert program.status == 1
        assert time.monotonic() - begin_s < GONE_S
        assert program.err.startswith("hpcsync: interrupted\n")
