"""A run that is watched: on the terminal that started it, from another process, and after a rank was killed."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest

from hpcsync.run_dir.status_file import STATUS
from hpcsync.system.atomic_files import replace
from tests.runs.processes import ended, hpcsync, started
from tests.unit.report.test_live import status as a_status

pytestmark = pytest.mark.once

JOB = """
name = "watched"
workload = {name = "linear", batch_size = 4, features = 20, samples = 400}
optimizer = {name = "sgd", lr = 0.01}
stop = {seconds = 2}
evaluation = {every_samples = 400}
paradigm = {name = "ssp", staleness = 2}
cluster = {workers = 2, compute = {model = "lognormal", seconds = [0.01, 0.03]}}
"""
LIMIT_S = 240.0


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def on_a_terminal(argv: list[str], kind: str = "xterm-256color") -> tuple[int, str]:
    """Return exit status and output of a program on a terminal of 80 columns and 24 lines."""
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environ = {**os.environ, "TERM": kind}
    process = subprocess.Popen(argv, stdin=its, stdout=its, stderr=its, env=environ, start_new_session=True)
    os.close(its)
    seen, deadline_s = b"", time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < deadline_s:
            try:
                data = os.read(own, 1 << 16)
            except OSError:  # the other end is closed
                break
            seen += data
        return process.wait(LIMIT_S), seen.decode()
    finally:
        os.close(own)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_run_on_a_terminal_shows_its_status(job: Path, tmp_path: Path) -> None:
    status, shown = on_a_terminal(hpcsync("run", job, "--out", tmp_path / "run", "--set", "stop.seconds=5"))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert status == 0, text
    assert "starting 3 ranks" in text
    assert re.search(r"worker +state +iteration +lead +staleness +compute +wait +comm", text)
    assert re.search(r"0 +(waiting|computing|reading|pushing) ", text)
    assert re.search(r"time +([2-9]|\d\d+)\.\d+ s", text)  # the summary
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is shown again"


def test_a_terminal_whose_lines_cannot_change_is_written_as_a_file(job: Path, tmp_path: Path) -> None:
    status, shown = on_a_terminal(hpcsync("run", job, "--out", tmp_path / "run", "--set", "stop.seconds=5"), "dumb")
    assert status == 0, shown
    assert re.search(r"^ +[2-5]\.\d s +\d+ % .* left ", shown, re.MULTILINE), shown
    assert "\x1b" not in shown
    status, shown = on_a_terminal(hpcsync("watch", tmp_path), "dumb")
    assert (status, shown.count("finished"), "\x1b" in shown) == (0, 1, False)


def test_another_process_watches_it_until_it_dies(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(hpcsync("run", job, "--out", out, "--set", "stop.seconds=600")) as program:
        program.wait_for(lambda _: (out / STATUS).exists() and json.loads((out / STATUS).read_text())["updates"] > 20)
        shown = ended(hpcsync("watch", tmp_path, "--once", "--json"))
        assert shown.status == 0, shown.err
        status = json.loads(shown.out)
        assert status["status"] == "running"
        assert status["workers"]["lead"][0] <= 3
        assert sum(status["left_s"] or [90]) > 60
        program.rank(0).send_signal(signal.SIGKILL)
        assert program.status == 1
    shown = ended(hpcsync("watch", out))
    assert shown.status == 1
    assert "failed" in shown.out


@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux")
def test_a_thousand_workers_in_a_session_of_tmux(tmp_path: Path) -> None:
    def write(**values: object) -> None:
        written_s = time.time() + 3600  # so that no line tells its age
        status = a_status(1000, written_s=written_s, **values)  # type: ignore[no-untyped-call]
        replace(tmp_path / STATUS, status.model_dump_json())

    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}

    def tmux(*argv: str) -> str:
        command = ["tmux", "-f", "/dev/null", "-S", str(tmp_path / "tmux"), *argv]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S, env=environ).stdout

    def seen(*words: str) -> list[str]:
        deadline_s = time.monotonic() + LIMIT_S
        screen = ""
        while not all(each in screen for each in words):
            screen = tmux("capture-pane", "-p", "-S", "-5")
            assert time.monotonic() < deadline_s, screen
            time.sleep(0.2)
        return screen.splitlines()

    write(accuracy=0.5)
    command = f"{shlex.join(map(str, hpcsync('watch', tmp_path)))}; echo ended with $?; exec sleep 600"
    tmux("new-session", "-d", "-x", "90", "-y", "30", command)
    try:
        lines = seen("accuracy 0.5000", "faster workers: iteration")
        assert re.match(r"digits +dssp, 1 server, 1000 workers +running", lines[0])
        workers = [line.split()[0] for line in lines if "computing" in line]
        assert workers == [str(worker) for worker in range(len(workers))] and len(workers) > 20  # the slowest first
        assert any(re.match(rf"and {1000 - len(workers)} faster workers: iteration", line) for line in lines)
        write(accuracy=0.75)
        assert sum("1000 workers" in line for line in seen("accuracy 0.7500")) == 1  # in place, not below
        write(accuracy=0.875, status="failed")
        assert any("failed" in line for line in seen("ended with 1"))
    finally:
        tmux("kill-server")
