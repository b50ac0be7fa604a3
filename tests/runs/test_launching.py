"""The launcher with the MPI of this environment: ranks that run, end and are never left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from hpcsync.system import launched_ranks, launcher, rank_environment
from tests.runs.processes import RANK_VARIABLES, ended, started

WITHOUT_RANK_1 = (
    "from hpcsync.api.ranks import world; from hpcsync.system.rank_environment import expected_rank\n"
    "if expected_rank() == 1: raise KeyError('lost')\n"
    "{}"
)
# A rank that is up says so at once: MPICH mixes what comes in pieces.
HANG = "import os, time; from mpi4py import MPI; os.write(1, b'ready\\n'); time.sleep({})"


def test_ranks_are_one_world_with_our_settings(capfd: pytest.CaptureFixture[str]) -> None:
    """More ranks than cores, each with the size that its launcher told it, and with threads for the evaluation."""
    n = 2 * (os.cpu_count() or 1) + 1
    code = (
        "import os; from mpi4py import MPI; from hpcsync.system import rank_environment as l; w = MPI.COMM_WORLD\n"
        "facts = (w.rank == l.expected_rank(), w.size, l.expected_size(), l.under_launcher(), "
        "os.environ['OMP_NUM_THREADS'], MPI.Query_thread() == MPI.THREAD_MULTIPLE)\n"
        "os.write(1, ' '.join(map(str, ('rank', *facts, chr(10)))).encode())"  # at once: MPICH mixes lines otherwise
    )
    assert launcher.launch(n, ["python", "-c", code], timeout_s=200).status == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("rank ")]
    assert lines == [f"rank True {n} {n} True 1 True "] * n


def test_what_killed_launchers_have_left_is_in_nobody_s_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI's leave folders with the numbers of their processes, which come again."""
    first = subprocess.Popen(["true"])
    first.wait()
    greatest = int(Path("/proc/sys/kernel/pid_max").read_text())
    for pid in (pid % greatest for pid in range(first.pid, first.pid + 8000)):
        (tmp_path / f"ompi.{pid}").mkdir()
        (tmp_path / f"ompi.{pid}" / f"pmix.{os.uname().nodename}.tool").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = set(tmp_path.iterdir())
    assert launcher.launch(1, ["true"], timeout_s=200).status == 0
    assert set(tmp_path.iterdir()) == before
    monkeypatch.setenv(rank_environment.SESSION_FOLDER, str(tmp_path))
    needs_its_own = b"Open MPI" in subprocess.check_output([*launcher.mpiexec(), "--version"])
    assert (launcher.launch(1, ["true"], timeout_s=200).status != 0) == needs_its_own, "the control"


def test_one_rank_s_exception_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    code = "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1: raise KeyError('lost')\nMPI.COMM_WORLD.Barrier()"
    ended = launcher.launch(3, ["python", "-m", "mpi4py", "-c", code], timeout_s=200)
    assert ended.status not in (0, launcher.TIMED_OUT)
    assert "KeyError: 'lost'" in capfd.readouterr().err


@pytest.fixture
def _soon_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched_ranks, "SCRIPT_LOST_S", 1.0)


@pytest.mark.usefixtures("_soon_lost")
def test_a_rank_that_fails_before_connect_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    """The others would wait for it within MPI_Init."""
    ended = launcher.launch(3, ["python", "-c", WITHOUT_RANK_1.format("world()")], timeout_s=200)
    assert ended.status not in (0, launcher.TIMED_OUT)
    assert "KeyError: 'lost'" in capfd.readouterr().err


@pytest.mark.usefixtures("_soon_lost")
def test_ranks_without_mpi_end_when_they_like() -> None:
    waiting = "import time; time.sleep(4)"
    late = WITHOUT_RANK_1.format(waiting).replace("raise KeyError('lost')", "raise SystemExit")
    assert launcher.launch(3, ["python", "-c", late], timeout_s=200).status == 0


def test_one_rank_s_violent_death_ends_all() -> None:
    code = (
        "import os, time; from mpi4py import MPI; time.sleep(600) if MPI.COMM_WORLD.rank else os.kill(os.getpid(), 9)"
    )
    assert launcher.launch(3, ["python", "-c", code], timeout_s=200).status not in (0, launcher.TIMED_OUT)


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
            assert front.wait(200) != 0
            deadline_s = time.monotonic() + 200
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
        "import os; from mpi4py import MPI; from hpcsync.system import launcher as l; del os.environ['MPIEXEC']\n"
        "try: l.refuse_singletons(MPI.COMM_WORLD.size, MPI.Get_library_version())\n"
        "except l.LaunchError as error: os.write(1, f'refused: {error}{chr(10)}'.encode()); raise\n"
    )
    assert launcher.launch(2, ["python", "-c", code], timeout_s=200).status not in (0, launcher.TIMED_OUT)
    captured = capfd.readouterr()
    if "unsupported PMI version PMIx" in captured.err:
        return  # MPICH says by itself that this is not its launcher
    message = "refused: 2 processes were started, but each is a world of its own: start them with "
    lines = [line for line in captured.out.splitlines() if line.startswith("refused")]
    assert any(line.startswith(f"{message}{mine}, which belongs to this Python's MPI library") for line in lines)


# ---- ranks that launch ranks ----

PROBE = """
import os
from mpi4py import MPI
from hpcsync.mpi.transport.subprocess_probe import probe
world = MPI.COMM_WORLD
found = (probe("world", ranks=2), probe("library")["thread"]) if world.rank == 0 else None
os.write(1, f"rank {world.size} {world.bcast(found)}{chr(10)}".encode())
"""
CRASH = """
import os, time
from mpi4py import MPI
MPI.COMM_WORLD.rank == 0 or os.kill(os.getpid(), 11)
time.sleep(600)
"""
TRY = f"""
import os
from mpi4py import MPI
from hpcsync.system import launcher
world = MPI.COMM_WORLD
ended = None
if world.rank == 0:
    with open(os.devnull, "wb") as output:
        ended = launcher.launch(2, ["python", "-c", {CRASH!r}], timeout_s=100, output=output)
ended = world.bcast(ended)
os.write(1, f"rank {{ended.status not in (0, launcher.TIMED_OUT)}}{{chr(10)}}".encode())
"""
INNER = HANG.format(700)
OUTER = f"""
import sys
from mpi4py import MPI
from hpcsync.system import launcher
if MPI.COMM_WORLD.rank == 0:
    sys.exit(launcher.launch(2, ["python", "-c", {INNER!r}]).status)
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize(("code", "said"), [(PROBE, "2 ({'size': 2}, 'MPI_THREAD_MULTIPLE')"), (TRY, "True")])
def test_a_rank_tries_what_may_crash_on_ranks_of_its_own(code: str, said: str) -> None:
    """Rank 0 does, while the other waits for it in MPI; and outlives a crash."""
    program = ended(launching(2, "-c", code))
    assert program.status == 0, program.err
    assert [line for line in program.out.splitlines() if line.startswith("rank ")] == [f"rank {said}"] * 2


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("victim", ["front", "rank"])
def test_a_launch_within_a_launch_ends_with_it(victim: str, signum: int) -> None:
    """Whether the outer launch is ended, or the rank that launches: no process is left of either."""
    with started(launching(2, "-m", "mpi4py", "-c", OUTER)) as program:
        program.wait_for(lambda program: program.out.splitlines().count("ready") == 2)
        processes = {process: process.cmdline()[1:] for process in program.left()}
        assert list(processes.values()).count(["-c", INNER]) == 2
        rank_0 = next(p for p, line in processes.items() if line[-1:] == [OUTER] and line[0] == "-m" and is_rank_0(p))
        (rank_0 if victim == "rank" else program.process).send_signal(signum)
        assert program.status != 0


def launching(n: int, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "hpcsync",
        "launch",
        "-n",
        str(n),
        "--timeout",
        "200",
        "--",
        "python",
        *arguments,
    ]


def is_rank_0(process: psutil.Process) -> bool:
    return "0" in [process.environ().get(name) for name in RANK_VARIABLES]


def start(n: int, code: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "hpcsync", "launch", "-n", str(n), "--", "python", "-c", code]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def ranks(seconds: int) -> list[psutil.Process]:
    """Processes of this Python that run HANG for so many seconds: not their launchers."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        cmdline = process.info["cmdline"] or []
        if cmdline[1:2] == ["-c"] and cmdline[2:] and cmdline[2].endswith(HANG.format(seconds)):
            found.append(process)
    return found
