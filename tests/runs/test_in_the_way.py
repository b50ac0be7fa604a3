"""A full disk, too little shared memory, a folder that cannot be written: one clear line, and what is written stays."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.trace.reader import Trace, load
from tests.runs.processes import Program, ended, hpcsync

JOB = """
name = "small"
workload = {{name = "timing", parameters = {parameters}, batch_size = 1}}
optimizer = {{name = "sgd", lr = 0.1}}
stop = {{{stop}}}
paradigm = {{{paradigm}}}
cluster = {{workers = {workers}, compute = {{model = "constant", seconds = {seconds}}}}}
"""


def in_the_way(folder: Path, mounts: str, *argv: object) -> Program:
    """hpcsync's end, in `folder`, where these mounts are made that nobody else sees; what is then in out/ lies in
    copy/."""
    script = f'{mounts} || exit 99; "$@"; status=$?; cp -r out/. copy 2>/dev/null; exit $status'
    return ended(["unshare", "--mount", "sh", "-c", script, "sh", *hpcsync(*argv)], cwd=folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Empty but for out/ and copy/."""
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs mounts of its own, which only root can make")
    for name in ("out", "copy"):
        (tmp_path / name).mkdir()
    return tmp_path


ASP, GOSSIP = 'name = "asp"', 'name = "gossip", mode = "pull"'


def job(folder: Path, parameters: int = 3, stop: str = "updates = 20", paradigm: str = ASP) -> Path:
    path = folder / "job.toml"
    workers = 1 if paradigm == ASP else 2
    path.write_text(JOB.format(parameters=parameters, stop=stop, paradigm=paradigm, workers=workers, seconds=1e-4))
    return path


def said(program: Program) -> list[str]:
    assert "Traceback" not in program.err, program.err
    lines = "\n".join(program.complaints)
    return re.findall(r"hpcsync: .*", lines)  # Open MPI's launcher may have said something on the same line


def intact(path: Path) -> Trace:
    trace = load(path)
    assert [finding for finding in audit(trace) if not finding.passed] == []
    return trace


DISK = "mount -t tmpfs -o size={} tmpfs out"
FULL = "No space left on device"


@pytest.mark.once
@pytest.mark.parametrize(
    ("command", "paradigm", "stop"),
    [("run", GOSSIP, "seconds = 600"), ("simulate", ASP, "updates = 1_000_000")],
    ids=["run", "simulate"],
)
def test_a_disk_that_fills_with_the_trace(folder: Path, command: str, paradigm: str, stop: str) -> None:
    path = job(folder, stop=stop, paradigm=paradigm)
    program = in_the_way(folder, DISK.format("500k"), command, path, "--out", "out")
    assert program.status == 1, program.err
    assert len(said(program)) == 1, program.out + program.err
    (line,) = said(program)
    assert line.endswith(f"out/trace.h5: {FULL}; the trace so far is {line.split()[-1]}"), program.out + program.err
    trace = intact(folder / "copy" / "trace.h5")
    assert trace.status == "failed" and (command == "run" or len(trace.tables["pushes"]) > 100)
    assert {file.name for file in (folder / "copy").iterdir()} - {"status.json"} == {"job.toml", "trace.h5"}


@pytest.mark.once
def test_a_disk_without_room_for_the_weights(folder: Path) -> None:
    program = in_the_way(folder, DISK.format("2m"), "simulate", job(folder, parameters=1_000_000), "--out", "out")
    assert program.status == 1, program.err
    assert len(said(program)) == 1, program.out + program.err
    (line,) = said(program)
    assert f"out/weights.safetensors: {FULL}; the trace so far is " in line
    assert len(intact(folder / "copy" / "trace.h5").tables["updates"]) >= 20
    assert {file.name for file in (folder / "copy").iterdir()} == {"job.toml", "trace.h5"}


@pytest.mark.once
def test_a_disk_without_room_for_a_checkpoint(folder: Path) -> None:
    path = job(folder, parameters=1_000_000, stop="seconds = 600")
    settings = ("--set", "checkpoint.updates=5")
    program = in_the_way(folder, DISK.format("2m"), "run", path, *settings, "--out", "out")
    assert program.status == 1, program.err
    assert any("out/checkpoints/1.unfinished/" in line and FULL in line for line in said(program)), program.err
    assert intact(folder / "copy" / "trace.h5").status == "failed"


ABANDONED = """
import errno, time, torch, hpcsync
from hpcsync.run_dir.checkpoint import Checkpoints
from hpcsync.system.atomic_files import NotWritten

write = Checkpoints.write

def after_rank_0(self, number, name, state):
    folder = self.folder / "checkpoints" / f"{number}.unfinished"
    if name == "worker-0":
        raise NotWritten(errno.ENOSPC, "No space left on device", str(folder / name))
    while folder.exists():
        time.sleep(0.01)
    write(self, number, name, state)

Checkpoints.write = after_rank_0
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with hpcsync.connect(model, optimizer, "allreduce", out="out", checkpoint={"updates": 2}) as sync:
    for x in sync.shard(torch.utils.data.DataLoader(torch.ones(64, 3), batch_size=4)):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.once
def test_of_a_checkpoint_that_rank_0_has_abandoned_only_the_cause_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ABANDONED)
    program = ended(hpcsync("launch", "-n", "2", "--", "python", "train.py"), cwd=tmp_path)
    assert program.status == 1, program.err
    (line,) = said(program)
    assert f"out/checkpoints/1.unfinished/worker-0: {FULL}; the trace so far is " in line


@pytest.mark.once
def test_files_that_are_named_as_modules_of_python_do_not_stop_the_ranks(tmp_path: Path) -> None:
    for name in ("types", "mpi4py", "random", "torch"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    program = ended([sys.executable, "-P", *hpcsync("run", job(tmp_path), "--out", "out")[1:]], cwd=tmp_path)
    assert (program.status, said(program)) == (0, []), program.err
    intact(tmp_path / "out" / "trace.h5")


WINDOWS = "mount -t tmpfs -o size={} tmpfs /dev/shm"


@pytest.mark.parametrize("paradigm", [ASP, pytest.param(GOSSIP, marks=pytest.mark.once)])
def test_shared_memory_too_small_for_the_windows(folder: Path, paradigm: str) -> None:
    """And, the control, once more with room, in the same folder. MPICH itself crashes now and then with 24 MiB."""
    path = job(folder, parameters=6_000_000, stop="updates = 4", paradigm=paradigm)
    program = in_the_way(folder, WINDOWS.format("64m"), "run", path, "--out", "out/1")
    assert program.status == 2, program.err
    assert len(said(program)) == 1, program.out + program.err
    (line,) = said(program)
    assert line.startswith(f"hpcsync: shared memory of {os.uname().nodename}: the windows of its ")
    assert " MiB of /dev/shm, and " in line and line.endswith("or start fewer ranks there")
    assert not (folder / "out" / "1").exists()
    if paradigm != ASP:
        return
    program = in_the_way(folder, WINDOWS.format("300m"), "run", path, "--out", "out/1")
    assert (program.status, said(program)) == (0, []), program.err
