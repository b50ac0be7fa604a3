"""Where nothing can be written: runs are refused in one line, traces are read all the same."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from hpcsync.audit import trace_audit
from hpcsync.config.errors import JobError
from hpcsync.report.summary import summarize
from hpcsync.run_dir import layout, unfinished
from hpcsync.simulator.simulate import simulate
from hpcsync.trace.reader import TraceError, load, settle
from hpcsync.trace.writer import TraceWriter
from tests.unit.jobs import make_job, refusal
from tests.unit.trace import recorder

JOB = recorder.job_of("bsp", 2)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that can only be read, with an empty folder and the trace of a run that was killed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", disk]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs a mount of its own, which only root can make")
    try:
        (disk / "empty").mkdir()
        trace = TraceWriter(disk / "trace.h5", recorder.attributes(JOB))
        trace.flush()
        del trace
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("name", ["empty", "new", "new/below"])
def test_a_read_only_file_system(disk: Path, name: str) -> None:
    assert refusal(layout.choose, JOB, disk / name) == f"out {disk / name}: Read-only file system"


def test_the_usual_folder_in_a_read_only_place(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(disk)
    with pytest.raises(JobError, match="^out runs: Read-only file system$"):
        layout.choose(JOB, None)


def test_a_simulation_is_refused_too(disk: Path) -> None:
    compute = {"model": "constant", "seconds": 1.0}
    job = make_job(cluster={"workers": 2, "compute": compute})
    with pytest.raises(JobError, match="Read-only file system$"):
        simulate(job, disk / "new", Console(quiet=True))


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=": File name too long$"):
        layout.choose(JOB, tmp_path / ("x" * 300))


def test_a_folder_in_which_nobody_may_write(tmp_path: Path) -> None:
    """Root may everywhere, unless the file system itself has marked the folder."""
    folder = tmp_path / "immutable"
    folder.mkdir()
    if os.geteuid():
        folder.chmod(0o500)
    elif not shutil.which("chattr"):
        pytest.skip("needs chattr")
    elif subprocess.run(["chattr", "+i", folder], capture_output=True, check=False).returncode:
        pytest.skip("this file system marks nothing immutable")
    try:
        for out in (folder, folder / "new"):
            with pytest.raises(JobError, match=r": (Permission denied|Operation not permitted)$"):
                layout.choose(JOB, out)
    finally:
        if os.geteuid():
            folder.chmod(0o700)
        else:
            subprocess.run(["chattr", "-i", folder], check=True)


def test_a_trace_is_read_where_nothing_can_be_written(disk: Path) -> None:
    trace = load(disk / "trace.h5")
    assert trace.status == "running"
    assert summarize(trace).as_dict()
    assert trace_audit.main(disk / "trace.h5") == 0


def test_what_became_of_a_run_cannot_be_written_there(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TraceError, match="Read-only file system") as caught:
        settle(disk / "trace.h5", "failed")
    unfinished.close(disk, "failed")
    assert capsys.readouterr().err == f"hpcsync: {caught.value}\n"
    assert len(str(caught.value).splitlines()) == 1
