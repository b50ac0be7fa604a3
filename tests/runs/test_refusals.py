"""The user's mistakes among ranks: one line from one of them. Before any rank: tests/unit/cli/test_refusals.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcsync.system import launcher
from tests.runs.processes import ended, hpcsync, mpiexec

pytestmark = pytest.mark.once

JOB = Path(__file__).parents[2] / "jobs" / "digits-dssp.toml"
SMALL = ("--set", 'workload={name="linear"}', "--set", "stop={updates=5}")


def test_what_torch_must_check_is_told_by_rank_0(tmp_path: Path) -> None:
    settings = (*SMALL, "--set", "cluster={workers=1}", "--set", "optimizer.momentum=-1")
    program = ended(hpcsync("run", JOB, *settings, "--out", tmp_path / "out"))
    assert program.status == 2
    assert program.err.startswith('hpcsync: optimizer = {"momentum": -1}: torch says: ')
    assert program.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


SCRIPT = """
import torch, hpcsync
model = torch.nn.Linear(3, 1)
hpcsync.connect(model, torch.optim.SGD(model.parameters(), lr=0.01), paradigm="nope")
"""


def test_a_script_s_mistake_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    program = ended(hpcsync("launch", "-n", "2", "--", "python", "train.py"), cwd=tmp_path)
    assert program.status == 2
    assert program.out.startswith("starting 2 ranks: ") and program.out.count("\n") == 1
    assert program.err.startswith('hpcsync: paradigm.name = "nope": must be one of bsp, ')
    assert program.err.count("\n") == 1


WITHOUT_SHARD = """
import sys, torch, hpcsync
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.ones(64, 3), batch_size=4)
with hpcsync.connect(model, optimizer, sys.argv[1], out="out") as sync:
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("paradigm", ["asp", "allreduce"])
def test_a_loop_that_forgets_the_shard_is_told_in_one_line(tmp_path: Path, paradigm: str) -> None:
    (tmp_path / "train.py").write_text(WITHOUT_SHARD)
    program = ended(hpcsync("launch", "-n", "2", "--", "python", "train.py", paradigm), cwd=tmp_path)
    assert program.status == 1
    assert program.err.startswith("hpcsync: failed: step was called without a batch: the loop must run over sync.s")
    assert program.err.endswith("; the trace so far is out/trace.h5\n") and program.err.count("\n") == 1, program.err


AFTER_THE_LOOP = """
import torch, hpcsync
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with hpcsync.connect(model, optimizer, out="out") as sync:
    for x in sync.shard(torch.ones(64, 3), batch_size=4):
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
print(loss.item())
"""


def test_an_exception_on_a_server_after_the_with_block_says_that_it_is_a_server(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(AFTER_THE_LOOP)
    program = ended(hpcsync("launch", "-n", "2", "--", "python", "train.py"), cwd=tmp_path)
    assert program.status == 1
    assert "NameError: name 'loss' is not defined" in program.err
    assert "\nhpcsync: rank 0 is a server: sync.shard yields no batch there, so what the loop" in program.err


def test_a_folder_that_holds_a_trace_is_refused_among_ranks_too(tmp_path: Path) -> None:
    (tmp_path / "trace.h5").write_bytes(b"precious")
    settings = (*SMALL, "--set", "cluster={workers=1}")
    program = ended(
        mpiexec(2, "-m", "mpi4py", "-m", "hpcsync", "run", JOB, *settings, "--out", tmp_path),
        environ=launcher.environment(),
    )
    assert program.status != 0
    lines = [line for line in program.err.splitlines() if line.startswith("hpcsync:")]
    assert lines == [f"hpcsync: out {tmp_path}: must not hold a trace.h5 already: runs are never overwritten"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"trace.h5": b"precious"}


def test_many_worlds_of_one_are_refused(tmp_path: Path) -> None:
    """What a launcher of another MPI makes: a process that was told of three ranks and sees one.

    What every launcher tells is in tests/unit/system/test_rank_environment.py.
    """
    environ = {**os.environ, "PMI_SIZE": "3", "PMI_RANK": "0"}
    program = ended(hpcsync("run", JOB, "--out", tmp_path / "out"), environ=environ)
    assert program.status == 2, program.err
    lines = [line for line in program.err.splitlines() if line.startswith("hpcsync:")]
    assert len(lines) == 1
    assert lines[0].startswith(
        "hpcsync: 3 processes were started, but each is a world of its own: start them with "
        f"{launcher.mpiexec()[0]}, which belongs to this Python's MPI library"
    )
    assert not (tmp_path / "out").exists()


LATE = """
import sys, time
from mpi4py import MPI
from hpcsync.api import user_errors
from hpcsync.cli import rank_main
from hpcsync.system import launch_output

launch_output.SAME_ERROR_S = 60

def late(text):
    time.sleep(0 if MPI.COMM_WORLD.rank else 2)
    print_at_once(f"rank {MPI.COMM_WORLD.rank}: {text}")

print_at_once, user_errors.print_at_once = user_errors.print_at_once, late
sys.exit(rank_main.main(sys.argv[1], ["optimizer.momentun=1"], None, None))
"""


def test_another_rank_leaves_the_line_to_rank_0(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    program = ended(mpiexec(2, "-m", "mpi4py", "late.py", JOB), tmp_path, launcher.environment())
    assert program.status != 0
    lines = [line for line in program.err.splitlines() if "hpcsync:" in line]
    assert len(lines) == 1 and lines[0].startswith("rank 0: hpcsync: optimizer.momentun = 1: must be "), program.err
