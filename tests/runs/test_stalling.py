"""A process that stands still for a while: the report names it, and says what it was doing and who waits."""

from __future__ import annotations

import re
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.system import launcher
from hpcsync.trace.reader import load
from hpcsync.trace.schema import Phase
from tests.runs.processes import Program, hpcsync, started

STOPPED_S = 4.0  # the deadline is at 1.2 s, on a busy machine later; the third report is at four times that

# The last worker, which will stand still, is the slowest: it never waits.
JOB = """
name = "stalling"
workload = {{name = "linear", batch_size = 4}}
optimizer = {{name = "sgd", lr = 0.001}}
stop = {{seconds = 600}}
paradigm = {{{paradigm}}}
cluster = {{workers = {workers}, compute = {{model = "constant", seconds = {seconds}}}}}
"""
RUNS = {
    "ssp": ('name = "ssp", staleness = 3', "a worker more than 3 iterations ahead of the slowest waits for it", {0}),
    "allreduce": ('name = "allreduce"', "all workers wait for each other in every iteration", {0, 1}),
}
STALLS = re.compile(
    r"hpcsync: worker (\d+) stalls \(rank (\d+) on (\S+), (\w+)\): its iteration (\d+) has lasted ([\d.]+) s "
    r"\(usually ([\d.]+) s, limit ([\d.]+) s\)\nhpcsync:   blocked: (.*); (.*)\n"
)
CONTINUES = re.compile(r"hpcsync: worker (\d+) continues: its iteration (\d+) took ([\d.]+) s\n")


def command(folder: Path, name: str) -> list[str]:
    folder.mkdir()
    workers = 3 if name == "allreduce" else 2
    seconds = [0.05] * (workers - 1) + [0.2]
    job = JOB.format(paradigm=RUNS[name][0], workers=workers, seconds=seconds)
    (folder / "job.toml").write_text(job)
    return hpcsync("run", "job.toml", "--out", "out")


@pytest.mark.once
@pytest.mark.flaky(reruns=3)  # on a busy machine others stall too
def test_who_stands_still_is_named_and_nobody_else(tmp_path: Path) -> None:
    """All runs at once, since they mostly wait."""
    folders = [tmp_path / name for name in RUNS]
    environ = launcher.environment()
    with ExitStack() as stack:
        programs = [
            stack.enter_context(started(command(folder, name), cwd=folder, environ=environ))
            for name, folder in zip(RUNS, folders, strict=True)
        ]
        for program in programs:
            program.wait_for(lambda said: " samples/s" in said.out)
        assert not any("stalls" in program.err for program in programs)
        for program in programs:
            program.rank(2).send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        for program in programs:
            program.rank(2).send_signal(signal.SIGCONT)
        for program in programs:
            program.wait_for(lambda said: CONTINUES.search(said.err) is not None)
            program.process.send_signal(signal.SIGINT)
        for name, folder, program in zip(RUNS, folders, programs, strict=True):
            assert program.status != 0
            check(name, folder, program)


def check(name: str, folder: Path, program: Program) -> None:
    _, bound, blocked = RUNS[name]
    found = STALLS.findall(program.err)
    assert 1 <= len(found) <= 2 and program.err.count("stalls") == len(found), program.err
    worker, rank, host, phase, iteration, lasted_s, usual_s, deadline_s, printed_blocked, said_bound = found[0]
    assert (rank, host, said_bound) == ("2", socket.gethostname(), bound)
    assert phase in ("computing", "waiting"), "what it did when it was stopped, which on a busy machine may be to wait"
    waited = {int(w): float(s) for w, s in re.findall(r"worker (\d+) for ([\d.]+) s", printed_blocked)}
    assert waited.keys() == blocked and all(s <= float(lasted_s) for s in waited.values())
    assert 0.19 < float(usual_s) < 0.8 and float(deadline_s) <= float(lasted_s) < STOPPED_S
    ((continued, ended, took_s),) = CONTINUES.findall(program.err)
    assert (continued, ended) == (worker, iteration) and STOPPED_S <= float(took_s) < STOPPED_S + 10
    trace = load(folder / "out" / "trace.h5")
    rows = trace.tables["stalls"]
    assert len(rows) == len(found)
    for row in rows:
        assert (row["worker"], row["iteration"], row["phase"]) == (int(worker), int(iteration), Phase[phase.upper()])
        assert row["n_waiting"] == len(blocked)
    assert [check for check in audit(trace) if not check.passed] == []
    print(program.err)
