"""A worker is killed and the others go on, where the MPI can do that; where it cannot, one line says so."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.paradigms.ad_psgd import is_active
from hpcsync.system import launcher
from hpcsync.system.signals import TO_BE_RESUMED
from hpcsync.trace.reader import Trace, load
from hpcsync.trace.schema import Change
from tests.runs.processes import GONE_S, Program, ended, hpcsync, mpiexec, started

JOB = """
name = "surviving"
seed = 3
workload = {{name = "linear", batch_size = 4, features = 40, samples = 400}}
optimizer = {{name = "sgd", lr = 0.01}}
stop = {{seconds = 8}}
evaluation = {{every_samples = 400}}
paradigm = {{{paradigm}}}
cluster = {{{servers} workers = {workers}, on_death = "continue", compute = {{model = "constant", seconds = 0.004}}}}
"""
PARADIGMS = {
    "bsp": 'name = "bsp"',
    "dssp": 'name = "dssp", staleness_min = 1, staleness_max = 4',
    "pull": 'name = "gossip", mode = "pull"',
    "push-sum": 'name = "gossip", mode = "push-sum"',
    "ad-psgd": 'name = "ad-psgd"',
}
WITHOUT_SERVERS = ("pull", "push-sum", "ad-psgd")
TWO_SERVERS = ("dssp",)

SCRIPT = """
import sys
import torch
import hpcsync

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
compute = {"model": "constant", "seconds": 0.004}


def train(**options):
    with hpcsync.connect(model, optimizer, compute=compute, on_death="continue", **options) as sync:
        data = torch.utils.data.TensorDataset(torch.ones(64, 3))
        for (x,) in sync.shard(data, batch_size=4, epochs=None):
            loss = model(x).mean()
            optimizer.zero_grad()
            loss.backward()
            sync.step(loss)
    return sync.rank


rank = train(paradigm="k-async", k=2, out="out", stop={"seconds": 8})
print("weights", sum(p.double().sum().item() for p in model.parameters()))
"""


def tolerates() -> bool:
    try:
        return bool(launcher.command(1, ["true"], tolerant=True))
    except launcher.LaunchError:
        return False


needs_tolerance = pytest.mark.skipif(not tolerates(), reason="this MPI does not go on when a rank dies")


def write_job(folder: Path, name: str, workers: int = 3) -> Path:
    servers = "" if name in WITHOUT_SERVERS else f"servers = {1 + (name in TWO_SERVERS)},"
    folder.mkdir()
    (folder / "job.toml").write_text(JOB.format(paradigm=PARADIGMS[name], servers=servers, workers=workers))
    return folder


def kill_one(program: Program, ranks: range, dice: random.Random) -> int:
    """At a random moment of the run; its rank."""
    program.wait_for(lambda said: " samples/s" in said.out)  # a second after its begin
    time.sleep(dice.uniform(0.1, 1.6))
    rank = dice.choice(ranks)
    program.rank(rank).send_signal(signal.SIGKILL)
    return rank


def faulty_shrink(said: str) -> bool:
    """Whether a rank has had a segmentation fault within MPIX_Comm_shrink itself.

    Open MPI 5.0.11 has one, seldom, if it hears of a death while it shrinks: in ompi_errhandler_proc_failed_internal.
    """
    faults = said.split("Signal: Segmentation fault")[1:]
    return any("ompi_comm_shrink_internal" in fault.partition("End of error message")[0] for fault in faults)


@needs_tolerance
@pytest.mark.parametrize("told", ["all ranks", "the run"])
def test_sigterm_ends_the_run_as_to_be_resumed(tmp_path: Path, told: str) -> None:
    """Rank 0 handles it and is then dead to the others, one of which returns the status."""
    folder = write_job(tmp_path / "told", "bsp", workers=2)
    options = ["--set", "stop.seconds=60", "--out", folder / "out"]
    with started(hpcsync("run", folder / "job.toml", *options)) as program:
        program.wait_for(lambda said: " samples/s" in said.out)
        for process in [program.rank(rank) for rank in (2, 1, 0)] if told == "all ranks" else [program.process]:
            process.send_signal(signal.SIGTERM)
        assert program.status == TO_BE_RESUMED, program.err
        assert "cannot continue" not in program.err, "rank 0 has said why it ended the run"
        assert program.err.count("to resume from") == program.err.count("interrupted") == 1
    assert load(folder / "out" / "trace.h5").status == "interrupted"


class Deadly(NamedTuple):
    """A program that has ended after the death of one of its ranks."""

    program: Program
    folder: Path
    rank: int


def deadly(argv: list[str], folder: Path, ranks: range, dice: random.Random) -> Deadly:
    """Run it in a copy of this folder, and kill one of these ranks. It gets a second chance, and only one, in a fresh
    copy, if its end was a fault of Open MPI: see `faulty_shrink`."""
    for chance in ("first", "second"):
        copy = folder.with_name(f"{folder.name}-{chance}")
        shutil.copytree(folder, copy)
        with started(argv, copy, launcher.environment()) as program:
            rank = kill_one(program, ranks, dice)
        if not faulty_shrink(program.err):
            break
    return Deadly(program, copy, rank)


def has_gone_on(program: Program, folder: Path, worker: int) -> Trace:
    """The trace of a run that ended in order, without this worker."""
    assert program.status == 0, f"{program.out}\n{program.err}"
    program.gone_s()
    assert "died; the other ranks continue" in program.err
    (death,) = json.loads((folder / "out" / "summary.json").read_text())["deaths"]
    assert (death["worker"], death["left"]) == (worker, 2)
    assert f"worker {worker} after {death['now_s']:.2f} s (2 left)" in program.out
    trace = load(folder / "out" / "trace.h5")
    assert trace.finished
    assert [found for found in audit(trace) if not found.passed] == []
    membership = trace.tables["membership"]
    assert [row["worker"] for row in membership if row["change"] == Change.DIED] == [worker]
    rows = trace.tables["pushes" if trace.job.has_servers else "exchanges"]
    (died_s,) = membership["now_s"][membership["change"] == Change.DIED]
    assert len(rows[rows["worker"] == worker]) > 0
    assert rows["now_s"][rows["worker"] == worker].max() <= died_s
    for other in {0, 1, 2} - {worker}:
        assert rows["now_s"][rows["worker"] == other].max() > died_s + 0.5
    return trace


def as_if_it_had_left(trace: Trace) -> Trace:
    membership = trace.tables["membership"].copy()
    membership["change"] = Change.LEFT
    return replace(trace, tables={**trace.tables, "membership": membership})


# Two at a time: they wait more than they work.
@needs_tolerance
@pytest.mark.parametrize("names", [("bsp", "push-sum"), ("dssp", "pull"), ("ad-psgd", "ad-psgd")], ids=" and ".join)
def test_the_others_go_on(names: tuple[str, str], tmp_path: Path) -> None:
    dice = random.Random()
    folders = [write_job(tmp_path / f"{number}-{name}", name) for number, name in enumerate(names)]
    servers = [0 if name in WITHOUT_SERVERS else 1 + (name in TWO_SERVERS) for name in names]
    ranks = [range(max(1, n), n + 3) for n in servers]  # rank 0 keeps the books
    lines = [hpcsync("run", "job.toml", "--out", "out")] * len(names)
    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(deadly, lines, folders, ranks, [dice] * len(names)))
    for name, (program, folder, rank), n in zip(names, ended, servers, strict=True):
        trace = has_gone_on(program, folder, rank - n)
        if name in WITHOUT_SERVERS:
            exchanges, (died,) = trace.tables["exchanges"], trace.tables["membership"][:1]
            late = exchanges[exchanges["now_s"] > died["now_s"] + 0.5]
            assert died["worker"] not in late["peer"]
            if name == "ad-psgd" and is_active(int(died["worker"])):
                continue  # nobody draws it
            assert not np.all([found.passed for found in audit(as_if_it_had_left(trace))]), "it would be drawn"


@needs_tolerance
def test_a_script_goes_on_and_has_the_weights(tmp_path: Path) -> None:
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text(SCRIPT)
    line = mpiexec(4, "script.py")
    line[1:1] = launcher.TOLERANT
    program, folder, rank = deadly(line, tmp_path / "script", range(1, 4), random.Random())
    has_gone_on(program, folder, rank - 1)
    weights = [said for said in program.out.splitlines() if said.startswith("weights")]
    assert len(weights) == 3 and len(set(weights)) == 1


# What a script does before and after training, and what a run does at its end.
AROUND = (
    "import atexit, os, signal, sys, time",
    "atexit.register(print, 'handled', flush=True)",
    "from mpi4py import MPI",
)
AFTER = "kept = open(f'kept-{rank}', 'w')\nkept.write('in a buffer')"
END_WITH = """
from hpcsync.mpi.transport import ulfm
rank = MPI.COMM_WORLD.rank
ulfm.end_with(MPI.COMM_WORLD, ulfm.survivors(MPI.COMM_WORLD))
"""
UNTRAINED = ("one fails and the others are not at their end", "one fails")  # they start without torch
# What its ranks do at their end, the status of all, and what is said.
ENDS = {
    "one is killed": ("if rank == 2: os.kill(os.getpid(), signal.SIGKILL)", 1, "rank 2 died after the end"),
    "one fails and the others are not at their end": ("time.sleep(5) if rank else 1 / 0", 1, "rank 0 died after"),
    "one fails": ("sys.exit(3 if rank == 1 else 0)", 3, ""),
    "all end well, some after a second run": (
        "part = MPI.COMM_WORLD.Split(rank == 2)\n"
        "if rank < 2: train(paradigm='asp', out='part', comm=part, stop={'updates': 3})\n"
        "part.Free()\n"
        "if rank == 0: sys.stdout = open('said', 'w'); sys.stdout.close()",
        0,
        "",
    ),
}


@needs_tolerance
@pytest.mark.once
def test_processes_end_together_after_training(tmp_path: Path) -> None:
    """Without `ulfm.end_with` the others would wait within MPI_Finalize for one that dies or fails."""
    line = mpiexec(3, "-m", "mpi4py", "script.py")
    line[1:1] = launcher.TOLERANT

    def run(name: str) -> tuple[Program, Path]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        script = END_WITH if name in UNTRAINED else SCRIPT.replace('"seconds": 8', '"seconds": 0.5')
        (folder / "script.py").write_text("\n".join([*AROUND, script, AFTER, ENDS[name][0]]))
        return ended(line, folder, launcher.environment()), folder

    with ThreadPoolExecutor(2) as pool:
        programs = list(pool.map(run, ENDS))
    for name, (program, folder) in zip(ENDS, programs, strict=True):
        _, status, said = ENDS[name]
        assert (program.status, said in program.err) == (status, True), f"{name}: {program.out}\n{program.err}"
        assert program.err.count("died") == bool(said), name
        left = {0, 1, 2} - ({2} if name == "one is killed" else set())
        assert {rank for rank in left if (folder / f"kept-{rank}").read_text() == "in a buffer"} == left, name
        assert program.out.count("handled") == len(left) - (folder / "said").exists(), name


FAULT = """[vm:04220] Signal: Segmentation fault (11)
[vm:04220] [ 1] /lib/libmpi.so.40(ompi_errhandler_proc_failed_internal+0x32)[0x7f19e287f222]
[vm:04220] [12] /lib/libmpi.so.40(mca_coll_ftagree_era_intra+0x28c)[0x7f19e292deec]
[vm:04220] [13] /lib/libmpi.so.40({function}+0xcc)[0x7f19e2871adc]
[vm:04220] *** End of error message ***
"""


@pytest.mark.once
def test_only_a_fault_of_open_mpi_s_shrink_gives_a_second_chance() -> None:
    ours = FAULT.format(function="PMPI_Win_lock")
    later = "[vm:1] Signal: Aborted (6)\n[vm:1] [ 1] libmpi.so.40(ompi_comm_shrink_internal+0xcc)[0x7f]\n"
    assert faulty_shrink(f"{ours}{FAULT.format(function='ompi_comm_shrink_internal')}")
    assert not faulty_shrink(ours + later)
    assert not faulty_shrink("hpcsync: rank 2 died; the other ranks continue\n")


@needs_tolerance
def test_without_server_0_or_any_worker_the_run_ends(tmp_path: Path) -> None:
    folders = [write_job(tmp_path / name, "bsp", workers=2) for name in ("server", "workers")]
    endless = hpcsync("run", "job.toml", "--out", "out", "--set", "stop.seconds=600")
    with ExitStack() as stack:
        programs = [stack.enter_context(started(endless, folder)) for folder in folders]
        for program, ranks in zip(programs, ([0], [1, 2]), strict=True):
            program.wait_for(lambda said: " samples/s" in said.out)
            for process in [program.rank(rank) for rank in ranks]:
                process.send_signal(signal.SIGKILL)
        for program, folder, said in zip(programs, folders, ("rank 0 died", "no worker is left"), strict=True):
            assert program.status == 1
            assert said in program.err
            assert load(folder / "out" / "trace.h5").status == "failed"


@needs_tolerance
@pytest.mark.once
def test_a_rank_that_dies_before_mpi_knows_it_ends_the_run(tmp_path: Path) -> None:
    """The others would wait for it within MPI_Init."""
    folder = write_job(tmp_path / "job", "bsp", workers=2)
    with started(hpcsync("run", "job.toml", "--out", "out"), folder) as program:
        program.wait_for(lambda it: "loading libraries" in it.out and bool(it.ranks(2)))  # rank 0 says so
        rank = program.hold(2)
        begin_s = time.monotonic()
        rank.kill()
        assert program.status == 1
        assert time.monotonic() - begin_s < GONE_S
    assert "hpcsync: a rank died before training began\n" in program.err
    assert "Traceback" not in program.err


def test_where_nobody_can_go_on_one_line_says_so(tmp_path: Path) -> None:
    folder = write_job(tmp_path / "bsp", "bsp", workers=1)
    arguments = ["-m", "mpi4py", "-m", "hpcsync", "run", "job.toml", "--out", "out"]
    program = ended(mpiexec(2, *arguments), folder, launcher.environment())  # without what it takes to go on
    assert program.status == 2
    assert [line for line in program.err.splitlines() if "hpcsync: " in line] == [
        'hpcsync: cluster.on_death = "continue": must be "end" with this MPI, or this way to start it; "continue" '
        "needs Open MPI 5 or later, started as hpcsync run does, with mpirun --with-ft ulfm -x EVENT_NOEPOLL=1"
    ]
    if not tolerates():
        found = subprocess.run(hpcsync("run", "job.toml", "--out", "out"), cwd=folder, capture_output=True, text=True)
        assert found.returncode == 2
        assert found.stderr.endswith("cannot continue when a rank dies; Open MPI can, from version 5 on\n")
        assert found.stderr.count("\n") == 1
    assert not (folder / "out").exists()
