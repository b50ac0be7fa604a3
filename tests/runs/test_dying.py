"""A rank that raises, is killed or is interrupted ends the whole run soon, with a trace that can be read."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.system import launcher
from hpcsync.trace.reader import Trace, TraceError, load
from tests.runs.processes import GONE_S, Program, hpcsync, mpiexec, started

JOB = """
name = "endless"
workload = {{name = "breaking:make", batch_size = 4}}
optimizer = {{name = "sgd", lr = 0.01}}
stop = {{seconds = 600}}
paradigm = {{{paradigm}}}
cluster = {{workers = {workers}, compute = {{model = "constant", seconds = 0.005}}}}
"""
PARADIGMS = {
    "bsp": 'name = "bsp"',
    "dssp": 'name = "dssp", staleness_min = 1, staleness_max = 4',
    "allreduce": 'name = "allreduce"',
    "gossip": 'name = "gossip", mode = "pull"',
}
WITHOUT_SERVER = ("allreduce", "gossip")

# In the workload and in the script, the last rank raises as soon as there is a file `fail`.
WORKLOAD = """
import os
import torch
from hpcsync.system.rank_environment import expected_rank
from hpcsync.workloads.registry import Workload

def loss(model, x):
    if expected_rank() == 2 and os.path.exists("fail"):
        raise KeyError("lost")
    return model(x).mean()

def make():
    data = torch.utils.data.TensorDataset(torch.ones(64, 3))
    return Workload(torch.nn.Linear(3, 1), loss, data, None)
"""
SCRIPT = """
import os
import torch
import hpcsync

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
compute = {{"model": "constant", "seconds": 0.005}}
with hpcsync.connect(model, optimizer, out="out", compute=compute, **dict({paradigm})) as sync:
    data = torch.utils.data.TensorDataset(torch.ones(64, 3))
    for (x,) in sync.shard(data, batch_size=4, epochs=None):
        if sync.rank == 2 and os.path.exists("fail"):
            raise KeyError("lost")
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        sync.step(loss)
"""


class Death(NamedTuple):
    """Under what, started by what, what happens to it, what its trace may say of it afterwards, and among how many."""

    paradigm: str
    by: str
    cause: Callable[[Program, Path], object]
    statuses: set[str]
    n_ranks: int = 3


def one_raises(program: Program, folder: Path) -> None:
    (folder / "fail").touch()


def killed(rank: int) -> Callable[[Program, Path], None]:
    return lambda program, folder: program.rank(rank).send_signal(signal.SIGKILL)


def told(signum: int) -> Callable[[Program, Path], None]:
    return lambda program, folder: program.process.send_signal(signum)


# Each in both of the ways to start ranks. After a death under mpiexec alone there is nobody who could say in the trace
# what server 0 could not. Two runs die in each test, to save time: they wait more than they work.
DEATHS = {
    "a worker or a peer raises": (
        Death("bsp", "hpcsync run", one_raises, {"failed"}),
        Death("gossip", "script", one_raises, {"failed"}),
    ),
    "a worker is killed": (
        Death("dssp", "hpcsync run", killed(2), {"failed"}),
        Death("bsp", "mpiexec", killed(1), {"failed", "interrupted", "running"}, n_ranks=2),
    ),
    "server 0 is killed": (
        Death("bsp", "hpcsync run", killed(0), {"failed"}),
        Death("dssp", "mpiexec", killed(0), {"running"}, n_ranks=2),
    ),
    "a signal to hpcsync run": (
        Death("dssp", "hpcsync run", told(signal.SIGINT), {"interrupted"}, n_ranks=2),
        Death("bsp", "hpcsync run", told(signal.SIGTERM), {"interrupted"}),
    ),
    "a signal to hpcsync launch": (
        Death("bsp", "hpcsync launch", told(signal.SIGINT), {"interrupted"}),
        Death("gossip", "hpcsync launch", told(signal.SIGINT), {"interrupted"}, n_ranks=2),
    ),
    "a signal to mpiexec": (
        Death("dssp", "mpiexec", told(signal.SIGTERM), {"interrupted", "running"}, n_ranks=2),
        Death("bsp", "mpiexec", told(signal.SIGINT), {"interrupted", "running"}),
    ),
    "a peer is killed, or told to end": (
        Death("allreduce", "hpcsync run", killed(0), {"failed"}),
        Death("gossip", "mpiexec", told(signal.SIGTERM), {"interrupted", "running"}, n_ranks=2),
    ),
}
ONCE = ("a worker or a peer raises", "a peer is killed, or told to end")  # what launchers have no part in


def command(folder: Path, death: Death) -> list[str]:
    """What is started in `folder`; the job lies in another."""
    beside = folder / "beside"
    beside.mkdir(parents=True)
    (beside / "breaking.py").write_text(WORKLOAD)
    job = beside / "job.toml"
    workers = death.n_ranks - (death.paradigm not in WITHOUT_SERVER)
    job.write_text(JOB.format(paradigm=PARADIGMS[death.paradigm], workers=workers))
    script = folder / "script.py"
    script.write_text(SCRIPT.format(paradigm=PARADIGMS[death.paradigm].replace("name", "paradigm")))
    if death.by == "script":
        return mpiexec(death.n_ranks, script)
    if death.by == "hpcsync launch":
        return hpcsync("launch", "-n", death.n_ranks, "--", "python", script)
    if death.by == "mpiexec":
        return mpiexec(death.n_ranks, "-m", "mpi4py", "-m", "hpcsync", "run", job, "--out", "out")
    return hpcsync("run", job, "--out", "out")


@pytest.mark.flaky(reruns=2, only_rerun="loaded before the run")
@pytest.mark.parametrize(
    "deaths",
    [pytest.param(deaths, id=how, marks=[pytest.mark.once] * (how in ONCE)) for how, deaths in DEATHS.items()],
)
def test_the_run_ends_and_its_trace_can_be_read(deaths: tuple[Death, ...], tmp_path: Path) -> None:
    folders = [tmp_path / str(i) for i in range(len(deaths))]
    environ, begin_s = launcher.environment(), time.monotonic()
    with ExitStack() as stack:
        programs = [
            stack.enter_context(started(command(folder, death), cwd=folder, environ=environ))
            for death, folder in zip(deaths, folders, strict=True)
        ]
        for program in programs:
            program.wait_for(lambda said: " samples/s" in said.out)  # which is said right after the trace's first flush
        starting_s = time.monotonic() - begin_s
        for death, folder, program in zip(deaths, folders, programs, strict=True):
            assert len(program.left()) > death.n_ranks, "all ranks and a launcher are alive until something happens"
            die(program, folder, death, starting_s)


def loaded(path: Path) -> Trace:
    """Load a trace; a rank that ends may still hold it when its environment has gone."""
    deadline_s = time.monotonic() + GONE_S
    while True:
        try:
            return load(path)
        except TraceError as error:
            if "another process" not in str(error) or time.monotonic() > deadline_s:
                raise
        time.sleep(0.05)


def die(program: Program, folder: Path, death: Death, starting_s: float) -> None:
    death.cause(program, folder)
    begin_s = time.monotonic()
    assert program.status != 0
    program.gone_s()
    took_s = time.monotonic() - begin_s
    assert took_s < GONE_S
    if death.cause is one_raises:
        assert "KeyError: 'lost'" in program.err
        assert "rank 2 failed" in program.err
    if death.by == "hpcsync launch":  # by this process, or by rank 0 if its launcher still shows what it prints
        assert "hpcsync: interrupted; " in program.err
    trace = loaded(folder / "out" / "trace.h5")
    assert trace.status in death.statuses
    rows = trace.tables["exchanges" if death.paradigm in WITHOUT_SERVER else "pushes"]
    assert rows["begin_s"].min() < 0.25 * starting_s, "what has to be loaded was loaded before the run"
    assert [found for found in audit(trace) if not found.passed] == []
    assert not (folder / "out" / "summary.json").exists()
    print(f"{death.by}, {death.paradigm}: gone after {took_s:.1f} s, status {program.status}, trace {trace.status}")
