"""Two runs in one folder: one is refused in one line, at once, and the other does not notice."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.run_dir import checkpoint, lock
from hpcsync.system import launcher
from hpcsync.trace.reader import load
from tests.runs.processes import ended, hpcsync, mpiexec, started

JOB = """
name = "locking"
workload = {name = "linear", batch_size = 4, features = 20, samples = 400}
optimizer = {name = "sgd", lr = 0.01}
stop = {updates = 300}
checkpoint = {seconds = 0.3, keep = 1}
paradigm = {name = "bsp"}
cluster = {workers = 1, compute = {model = "constant", seconds = 0.01}}
"""
UNDER_WAY = "must be a folder that no other process uses: process "


@pytest.mark.once
def test_one_of_two_runs_wins_and_its_folder_is_its_own_until_its_last_rank_has_ended(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    run = hpcsync("run", "job.toml", "--out", "out")
    by_rank_0 = mpiexec(2, "-m", "mpi4py", "-m", "hpcsync", "run", "job.toml", "--out", "out")
    with ExitStack() as stack:
        first, second = (stack.enter_context(started([*run, "--set", "stop.updates=100_000"], tmp_path)) for _ in "12")
        while first.process.poll() is None and second.process.poll() is None:
            time.sleep(0.05)
        loser, winner = (first, second) if first.process.poll() is not None else (second, first)
        winner.wait_for(lambda _: checkpoint.newest(tmp_path / "out") is not None)
        assert loser.out == "", "it has started no rank"
        lines = [by_rank_0, [*run, "--resume"], hpcsync("simulate", "job.toml", "--out", "out")]
        refused = [loser] + [stack.enter_context(started(line, tmp_path, launcher.environment())) for line in lines]
        for program in refused:
            assert program.status == 2, program.err
            assert UNDER_WAY in program.err and "Traceback" not in program.err
        winner.process.send_signal(signal.SIGKILL)
        resumed = ended([*run, "--resume"], tmp_path)
        assert resumed.status == 0, resumed.err
        assert not winner.left()
    trace = load(tmp_path / "out" / "trace.h5")
    assert len(trace.tables["starts"]) == 2
    assert [found for found in audit(trace) if not found.passed] == []
    assert not (tmp_path / "out" / lock.NAME).exists()
