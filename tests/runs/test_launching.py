"""The launcher with the MPI of this environment: ranks that run, end and are never left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hpcsync import launcher

# A rank that is up says so at once: MPICH mixes what comes in pieces.
HANG = "import os, time; from mpi4py import MPI; os.write(1, b'ready\\n'); time.sleep({})"


def test_ranks_are_one_world_with_our_settings(capfd: pytest.CaptureFixture[str]) -> None:
    """More ranks than cores, each with the size that its launcher told it, and with threads for the evaluation."""
    n = 2 * (os.cpu_count() or 1) + 1
    code = (
        "import os; from mpi4py import MPI; from hpcsync import launcher as l; w = MPI.COMM_WORLD\n"
        "facts = (w.rank == l.expected_rank(), w.size, l.expected_size(), l.under_launcher(), "
        "os.environ['OMP_NUM_THREADS'], MPI.Query_thread() == MPI.THREAD_MULTIPLE)\n"
        "os.write(1, ' '.join(map(str, ('rank', *facts, chr(10)))).encode())"  # at once: MPICH mixes lines otherwise
    )
    assert launcher.launch(n, ["python", "-c", code], timeout_s=60).status == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("rank ")]
    assert lines == [f"rank True {n} {n} True 1 True "] * n


def test_one_rank_s_exception_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    code = "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1: raise KeyError('lost')\nMPI.COMM_WORLD.Barrier()"
    begin_s = time.monotonic()
    ended = launcher.launch(3, ["python", "-m", "mpi4py", "-c", code], timeout_s=60)
    assert ended.status not in (0, launcher.TIMED_OUT)
    assert time.monotonic() - begin_s < 15
    assert "KeyError: 'lost'" in capfd.readouterr().err


def test_one_rank_s_violent_death_ends_all() -> None:
    code = (
        "import os, time; from mpi4py import MPI; time.sleep(600) if MPI.COMM_WORLD.rank else os.kill(os.getpid(), 9)"
    )
    begin_s = time.monotonic()
    assert launcher.launch(3, ["python", "-c", code], timeout_s=60).status not in (0, launcher.TIMED_OUT)
    assert time.monotonic() - begin_s < 15


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_front_ends_the_ranks(signum: int) -> None:
    seconds = 600 + int(signum)
    with start(3, HANG.format(seconds)) as front:
        try:
            assert front.stdout is not None
            for _ in range(1 + 3):  # the command, and three ranks that are up
                front.stdout.readline()
            assert len(ranks(seconds)) == 3
            front.send_signal(signum)
            assert front.wait(10) != 0
            deadline_s = time.monotonic() + 10
            while ranks(seconds):
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        finally:
            front.kill()


def test_ranks_that_ignore_every_plea_are_killed() -> None:
    code = "import signal; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; " + HANG.format(555)
    ended = launcher.launch(2, ["python", "-c", code], timeout_s=3)
    assert ended.timed_out
    assert not ranks(555)


def test_another_mpi_s_launcher_is_refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    environments = {".venv": ".venv-mpich", ".venv-mpich": ".venv"}
    other = Path(sys.prefix).with_name(environments.get(Path(sys.prefix).name, "none")) / "bin/mpiexec"
    if not other.exists():
        pytest.skip("there is no second environment with another MPI")
    mine = launcher.mpiexec()[0]
    monkeypatch.setenv("MPIEXEC", str(other))
    code = (
        "import os; from mpi4py import MPI; from hpcsync import launcher as l; del os.environ['MPIEXEC']\n"
        "try: l.refuse_singletons(MPI.COMM_WORLD.size, MPI.Get_library_version())\n"
        "except l.LaunchError as error: os.write(1, f'refused: {error}{chr(10)}'.encode()); raise\n"
    )
    assert launcher.launch(2, ["python", "-c", code], timeout_s=60).status not in (0, launcher.TIMED_OUT)
    captured = capfd.readouterr()
    if "unsupported PMI version PMIx" in captured.err:
        return  # MPICH says by itself that this is not its launcher
    message = "refused: 2 processes were started, but each is a world of its own: start them with "
    lines = [line for line in captured.out.splitlines() if line.startswith("refused")]
    assert f"{message}{mine}, which belongs to this Python's MPI library" in lines


def start(n: int, code: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "hpcsync.launcher", "-n", str(n), "--", "python", "-c", code]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def ranks(seconds: int) -> list[psutil.Process]:
    """Processes of this Python that run HANG for so many seconds: not their launchers."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        cmdline = process.info["cmdline"] or []
        if cmdline[1:2] == ["-c"] and cmdline[2:] and cmdline[2].endswith(HANG.format(seconds)):
            found.append(process)
    return found
