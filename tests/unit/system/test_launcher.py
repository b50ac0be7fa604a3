"""Command line, environment and ends of a launch, with a replacement of the MPI launcher."""

import os
import pwd
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from hpcsync.mpi.transport import subprocess_probe
from hpcsync.system import launched_ranks, launcher, process_cleanup, rank_environment
from hpcsync.system.launcher import Ended, LaunchError
from tests.unit.system.test_rank_environment import (
    BATCH,
    INTERACTIVE,
    MPICH,
    OPEN_MPI,
    PMI2_SHELL,
    SCRIPT,
    SHELL,
    SIGNED_SCRIPT,
    STEP,
)  # fmt: skip

RANKS = ("OMPI_", "PMI", "SLURM_", "PRTE_", "MPI", "PBS_", "HPCSYNC_")


@pytest.fixture(autouse=True)
def _no_launcher_around_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(RANKS):
            monkeypatch.delenv(name)


@pytest.fixture
def mpiexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Launcher that starts its ranks, forwards SIGTERM and SIGUSR1 and ends with the largest status.

    With "stubborn" in its environment it ignores SIGTERM.
    """
    path = tmp_path / "mpiexec"
    path.write_text(
        f"#!{sys.executable}\n"
        + textwrap.dedent(
            """
            import os, signal, subprocess, sys
            _, n, *argv = sys.argv[1:]
            ranks = []
            def end(*_):
                for rank in ranks:
                    rank.terminate()
            signal.signal(signal.SIGUSR1, lambda *_: [rank.send_signal(signal.SIGUSR1) for rank in ranks])
            signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ.get("stubborn") else end)
            for rank in range(int(n)):
                ranks.append(subprocess.Popen(argv, env={**os.environ, "PMI_RANK": str(rank), "PMI_SIZE": n}))
            sys.exit(max(abs(rank.wait()) for rank in ranks))
            """
        )
    )
    path.chmod(0o755)
    monkeypatch.setenv("MPIEXEC", str(path))
    return path


# ---- the command ----


def test_the_launcher_beside_this_python_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(folder: str, *names: str) -> Path:
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text("#!/bin/sh\n")
            (tmp_path / folder / name).chmod(0o755)
        return tmp_path / folder

    beside, on_path, bare = install("beside", "mpiexec", "python"), install("path", "mpiexec"), install("bare")
    monkeypatch.setenv("PATH", str(on_path))
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    assert launcher.mpiexec() == [str(beside / "mpiexec")]
    monkeypatch.setattr(sys, "executable", str(bare / "python"))
    assert launcher.mpiexec() == [str(on_path / "mpiexec")]
    bin_, lib = install("bin", "mpiexec"), install("lib")
    monkeypatch.setenv("MPI4PY_LIBMPI", str(lib / "libmpi.so.40"))
    assert launcher.mpiexec() == [str(bin_ / "mpiexec")]
    monkeypatch.setenv("MPIEXEC", "/opt/my mpi/mpiexec".replace(" ", "\\ ") + " --hostfile h")
    assert launcher.mpiexec() == ["/opt/my mpi/mpiexec", "--hostfile", "h"]


def test_mpiexec_that_is_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIEXEC", 'srun "-N 2')
    for ask in (launcher.mpiexec, launcher.environment, lambda: launcher.outside(os.environ)):
        with pytest.raises(LaunchError, match='^MPIEXEC = srun "-N 2: must be a command line: No closing quotation$'):
            ask()
    monkeypatch.setenv("MPIEXEC", "  ")
    assert launcher.mpiexec()[0].strip()


def test_no_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LaunchError, match="^mpiexec: found neither beside this Python nor on the PATH; "):
        launcher.mpiexec()


def test_python_is_the_running_python(mpiexec: Path) -> None:
    expected = [str(mpiexec), "-n", "3", sys.executable, "-m", "x", "python"]
    assert launcher.command(3, ["python", "-m", "x", "python"]) == expected
    assert launcher.command(2, ["train.sh", "python"]) == [str(mpiexec), "-n", "2", "train.sh", "python"]


@pytest.mark.parametrize(
    ("version", "can"),
    [("mpirun (Open MPI) 5.0.11", True), ("mpirun (Open MPI) 4.1.4", False), ("HYDRA build details:", False)],
    ids=str,
)
def test_tolerant_launch_needs_open_mpi_5(mpiexec: Path, version: str, can: bool) -> None:
    mpiexec.write_text(f"#!/bin/sh\necho '{version}'\n")
    mpiexec.chmod(0o755)
    if can:
        command = launcher.command(3, ["train.sh"], tolerant=True)
        assert command == [str(mpiexec), *launcher.TOLERANT, "-n", "3", "train.sh"]
    else:
        with pytest.raises(
            LaunchError, match="mpiexec: cannot continue when a rank dies; Open MPI can, from version 5"
        ):
            launcher.command(3, ["train.sh"], tolerant=True)


def test_variables_of_the_user_are_kept() -> None:
    environ = launcher.environment({"OMP_NUM_THREADS": "4", "HOME": "/h"})
    assert (environ["OMP_NUM_THREADS"], environ["OPENBLAS_NUM_THREADS"], environ["HOME"]) == ("4", "1", "/h")
    assert environ["OMPI_MCA_osc"] == "^ucx"
    assert environ["MPIR_CVAR_ENABLE_HEAVY_YIELD"] == "1"


def test_ranks_have_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one Open MPI's launcher does not start."""
    assert launcher.environment({})["HOME"] == pwd.getpwuid(os.getuid()).pw_dir
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)  # no user has this number
    assert launcher.environment({})["HOME"] == "/"


@pytest.mark.parametrize(
    ("given", "one_node"),
    [
        ({}, True),
        ({"MPIEXEC": "/usr/bin/mpiexec"}, True),
        ({"MPIEXEC": "mpiexec --hostfile hosts"}, False),
        ({"SLURM_JOB_NUM_NODES": "1"}, True),
        ({"SLURM_JOB_NUM_NODES": "2"}, False),
        ({"SLURM_NNODES": "2"}, False),
        ({"SLURM_NNODES": "", "SLURM_JOB_NUM_NODES": "", "PBS_NODEFILE": ""}, True),
        ({"OMPI_COMM_WORLD_SIZE": ""}, True),
        ({"PMI_SIZE": ""}, True),
        ({"MPI_LOCALNRANKS": ""}, True),
        ({"PBS_NODEFILE": "/var/nodes"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False),
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, True),
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, False),
        ({"PMI_SIZE": "4"}, True),
    ],
)
def test_some_settings_depend_on_the_number_of_nodes(given: dict[str, str], one_node: bool) -> None:
    assert launcher.on_one_node(given) is one_node
    environ, of_rank = launcher.environment(given), launcher.settings_of_rank(given)
    assert environ.get("OMPI_MCA_pml") == ("ob1" if one_node else None)
    for name, value in launcher.SEVERAL_NODES.items():
        assert environ.get(name) == of_rank.get(name) == (None if one_node else value)
        assert launcher.environment({**given, name: "the user's"})[name] == "the user's"


@pytest.mark.parametrize(
    ("device", "over_ofi", "has_ofi"),
    [
        ("ch4:ucx ofi", True, True),
        ("ch4:ofi,ucx", True, True),
        ("ch4:ucx", False, False),
        ("ch4:ofi", False, True),
        ("ch3:nemesis", False, False),
    ],
)
@pytest.mark.parametrize(
    "given",
    [{"MPIEXEC": "mpiexec -f hosts"}, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "PMI_JOBID": "7.0"}, {}],
)
def test_mpich_with_both_netmods_uses_ofi_and_never_sockets(
    device: str, over_ofi: bool, has_ofi: bool, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "mpi_library", lambda: f"MPICH Version:      5.0.2\nMPICH Device:       {device}\n")
    found = launcher.settings_of_rank(given).get("MPIR_CVAR_CH4_NETMOD")
    assert found == ("ofi" if over_ofi and given else None)
    provider = launcher.settings_of_rank(given).get("FI_PROVIDER")
    assert provider == ("^sockets" if has_ofi and given else None)
    if "MPIEXEC" in given:
        environ = launcher.environment(given)
        assert (environ.get("MPIR_CVAR_CH4_NETMOD"), environ.get("FI_PROVIDER")) == (found, provider)
        for name, value in {"MPIR_CVAR_CH4_NETMOD": "ucx", "FI_PROVIDER": "verbs"}.items():
            assert launcher.environment({**given, name: value})[name] == value, "the user's"


@pytest.mark.parametrize(
    ("library", "osc"), [("Open MPI v4.1.4, package: x", "^pt2pt"), ("Open MPI v5.0.11", "^ucx"), ("MPICH", "^ucx")]
)
def test_open_mpi_4_has_ucx_alone_between_nodes(library: str, osc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "mpi_library", lambda: library)
    between, on_one = {"MPIEXEC": "mpiexec --hostfile hosts"}, {}
    for settings in (launcher.environment, launcher.settings_of_rank):
        assert settings(between)["OMPI_MCA_osc"] == osc
        assert ("OMPI_MCA_btl_tcp_flags" in settings(between)) is (osc == "^ucx"), "version 4 does not know all flags"
        assert settings(on_one)["OMPI_MCA_osc"] == "^ucx"
    assert launcher.environment({**between, "OMPI_MCA_osc": "rdma"})["OMPI_MCA_osc"] == "rdma", "the user's"


def test_a_shell_of_srun_shares_its_cpus_and_not_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for shell in (SHELL, PMI2_SHELL):
        assert launcher.environment(shell)["SLURM_OVERLAP"] == "1"
    for outside in ({}, BATCH, INTERACTIVE, SCRIPT, SIGNED_SCRIPT):
        assert "SLURM_OVERLAP" not in launcher.environment(outside)
    for name, value in PMI2_SHELL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PMI_DEBUG", "1")
    assert not [name for name in launcher.environment() if name.startswith("PMI_")]
    monkeypatch.setenv("PMI_JOBID", "8.0")  # the control: not of this step
    monkeypatch.delenv("PMI_SIZE")
    assert "PMI_DEBUG" in launcher.environment()


def test_one_node_may_be_another_node() -> None:
    """A shell on a login node may hold an allocation of one other node."""
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    assert launcher.on_this_node({})
    assert launcher.on_one_node(allocation)
    assert not launcher.on_this_node(allocation)
    assert launcher.on_this_node({**allocation, "SLURMD_NODENAME": "n1"})
    assert not launcher.on_this_node({**allocation, "SLURMD_NODENAME": "n1", "SLURM_JOB_NUM_NODES": "2"})


# ---- ends ----


def test_a_launch_prints_its_command_line_and_ends_like_its_ranks(
    mpiexec: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = launcher.launch(2, ["python", "-c", "import os; print('r' + os.environ['PMI_RANK'])"])
    line, _, out = capfd.readouterr().out.partition("\n")
    assert line.startswith(f"starting 2 ranks: {mpiexec} -n 2 {sys.executable} -c ")
    # Two processes write at once: what each writes may come between the other's words and their end of line.
    assert (sorted(re.findall(r"r\d", out)), ended) == (["r0", "r1"], Ended(0))
    assert launcher.launch(2, ["python", "-c", "import os; exit(3 * int(os.environ['PMI_RANK']))"]).status == 3


def test_output_can_be_written_to_a_file(mpiexec: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with open(tmp_path / "out", "wb") as file:
        launcher.launch(1, ["python", "-c", "print('hello')"], output=file)
    assert ((tmp_path / "out").read_text(), capfd.readouterr().out) == ("hello\n", "")


def test_every_launch_has_its_own_folder(mpiexec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = f"import os; folder = os.environ[{rank_environment.SESSION_FOLDER!r}]; print(folder, os.path.isdir(folder))"

    def told() -> str:
        with open(tmp_path / "out", "w+b") as file:
            launcher.launch(1, ["python", "-c", code], output=file)
        return (tmp_path / "out").read_text()

    one, other = told(), told()
    assert one != other and one.startswith(str(tmp_path)) and one.endswith(" True\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", os.curdir)  # TMPDIR=.; any other relative path is made absolute
    assert (relative := told()).startswith(f"{tmp_path}/hpcsync-") and relative.endswith(" True\n")
    assert list(tmp_path.glob("hpcsync-*")) == []
    monkeypatch.setenv(rank_environment.SESSION_FOLDER, "mine")
    assert told() == "mine False\n"


def test_a_launch_without_a_folder_for_temporary_files_is_refused(
    mpiexec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nonexistent"])
    for start in (lambda: launcher.launch(2, [sys.executable, "-c", ""]), lambda: subprocess_probe.probe("packages")):
        with pytest.raises(LaunchError, match=r"^temporary folder: No usable .* in \['/nonexistent'\]; set TMPDIR$"):
            start()


def test_a_launcher_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIEXEC", "/no/mpiexec")
    with pytest.raises(LaunchError, match="^/no/mpiexec: No such file or directory$"):
        launcher.launch(1, ["true"])


def test_the_time_limit_ends_every_rank(mpiexec: Path) -> None:
    begin_s = time.monotonic()
    ended = launcher.launch(2, ["sleep", "4321"], timeout_s=0.3)
    assert (ended.status, ended.timed_out, time.monotonic() - begin_s < 60) == (124, True, True)
    assert not sleepers("4321")


def test_a_launcher_that_ignores_sigterm_is_killed(mpiexec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("stubborn", "1")
    ended = launcher.launch(2, ["sleep", "4322"], timeout_s=0.3, grace_s=0.3)
    assert ended.timed_out
    assert not sleepers("4322")


TOLERANT = f"""#!{sys.executable}
import os, signal, subprocess, sys, threading, time
if "--version" in sys.argv:
    sys.exit(print("mpirun (Open MPI) 5.0.11"))
rank = subprocess.Popen(sys.argv[-2:], env={{**os.environ, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}})
waits = os.environ["waits"]
if waits != "with a rank":
    rank.wait()
if waits != "for a lock":
    signal.signal(signal.SIGALRM, lambda *_: os._exit(3))
    signal.alarm(1)
if waits != "for a time":
    (lock := threading.Lock()).acquire()
    lock.acquire()
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what a process waits for is known on Linux only")
@pytest.mark.parametrize("waits", ["for a lock", "for a time", "with a rank"])
def test_a_launcher_is_killed_that_waits_for_a_lock_without_ranks(
    waits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mpiexec").write_text(TOLERANT)
    (tmp_path / "mpiexec").chmod(0o755)
    monkeypatch.setenv("MPIEXEC", str(tmp_path / "mpiexec"))
    monkeypatch.setenv("waits", waits)
    monkeypatch.setattr(launched_ranks, "HUNG_S", 0.2)
    ended = launcher.launch(1, ["sleep", "4327" if waits == "with a rank" else "0"], tolerant=True)
    is_killed = waits == "for a lock"
    assert ended == Ended(128 + signal.SIGKILL if is_killed else 3)
    assert ("their launcher hangs" in capfd.readouterr().err) == is_killed
    assert not sleepers("4327")


def test_leftover_processes_of_a_dead_launcher_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program outside of the launch is not killed."""
    path = tmp_path / "mpiexec"
    path.write_text('#!/bin/sh\nshift 2\nsetsid "$@" &\nexit 9\n')
    path.chmod(0o755)
    monkeypatch.setenv("MPIEXEC", str(path))
    bystander = subprocess.Popen(["sleep", "4323"])
    try:
        assert launcher.launch(1, ["sleep", "4323"]).status == 9
        assert [process.pid for process in sleepers("4323")] == [bystander.pid]
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_every_rank(mpiexec: Path, signum: int) -> None:
    front = start(3, "sleep", "4324")
    await_sleepers("4324", 3)
    front.send_signal(signum)
    assert front.wait(200) > 0
    assert not sleepers("4324")


RANK = """
import os, pathlib, signal, sys, time
from hpcsync.system.signals import tell_listening
rank = os.environ["PMI_RANK"]
def note(signum, frame):
    pathlib.Path(f"{signum:d}-{rank}").touch()
for signum in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, note)
if os.environ["listens"] == "True":
    tell_listening(pathlib.Path("o"))
if rank == os.environ["over"]:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
pathlib.Path(f"ready-{rank}").touch()
while not os.path.exists("over"):
    time.sleep(0.01)
sys.exit(75 if rank == "0" else 0)
"""
FRONT = "import sys; from hpcsync.system.launcher import launch; print(launch(2, sys.argv[1:]))"


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are found on Linux only")
@pytest.mark.parametrize(("listens", "over"), [(True, False), (False, False), (True, True)])
def test_sigterm_goes_to_rank_0_alone_while_it_listens(
    mpiexec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listens: bool, over: bool
) -> None:
    """When its run is over it has no handler any more, and all are ended."""
    monkeypatch.chdir(tmp_path)
    line = [sys.executable, "-c", FRONT, "python", "-c", RANK]
    environ = {
        **os.environ,
        "PYTHONPATH": str(Path(launcher.__file__).parents[2]),
        "listens": str(listens),
        "over": "0" if over else "",
    }
    front = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environ)
    while len(list(tmp_path.glob("ready-*"))) < 2:
        time.sleep(0.02)
    front.send_signal(signal.SIGTERM)
    expected = ["15-1"] if over else ["15-0"] if listens else ["15-0", "15-1"]
    deadline_s = time.monotonic() + 60
    while not all((tmp_path / name).exists() for name in expected) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    (tmp_path / "over").touch()
    out, _ = front.communicate(timeout=200)
    assert sorted(path.name for path in tmp_path.glob("15-*")) == expected
    assert ("Ended(status=75, signum=15, timed_out=False, runs=" in out) != over
    assert (f"PosixPath('{tmp_path}/o')" in out) == listens


STARTING = """
import os, pathlib, signal, time
rank = os.environ["PMI_RANK"]
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)
pathlib.Path(f"up-{rank}").touch()
wait_for("go")
signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path(f"heard-{rank}").touch())
pathlib.Path(f"ready-{rank}").touch()
wait_for(f"heard-{rank}")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="handlers of other processes are known on Linux only")
def test_a_request_for_a_checkpoint_kills_no_rank_that_is_starting(mpiexec: Path, tmp_path: Path) -> None:
    """It is dropped; a later one reaches all ranks."""
    line = [sys.executable, "-c", FRONT, "python", "-c", STARTING]
    environ = {**os.environ, "PYTHONPATH": str(Path(launcher.__file__).parents[2])}
    front = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environ, cwd=tmp_path)

    def wait_for_all(names: str) -> None:
        while len(list(tmp_path.glob(names))) < 2:
            assert front.poll() is None
            time.sleep(0.02)

    wait_for_all("up-*")
    front.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    (tmp_path / "go").touch()
    wait_for_all("ready-*")
    front.send_signal(signal.SIGUSR1)
    assert "Ended(status=0, signum=None" in front.communicate(timeout=200)[0]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells the launcher on Linux only")
def test_ranks_end_when_the_launching_process_is_killed(mpiexec: Path) -> None:
    front = start(2, "sleep", "4325")
    await_sleepers("4325", 2)
    front.kill()
    front.wait()
    await_sleepers("4325", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are found on Linux only")
@pytest.mark.parametrize("guards", [True, False])
def test_guard_kills_leftover_processes(mpiexec: Path, monkeypatch: pytest.MonkeyPatch, guards: bool) -> None:
    """This launcher ends on SIGTERM without ending its ranks."""
    mpiexec.write_text('#!/bin/sh\nshift 2\nsetsid "$@" &\nexec sleep 4329\n')
    front = start(1, "sleep", "4328")
    await_sleepers("4328", 1)
    if not guards:
        for process in psutil.Process(front.pid).children():
            if process.cmdline()[2:3] == [process_cleanup.__file__]:
                process.kill()
    front.kill()
    front.wait()
    await_sleepers("4329", 0)
    if guards:
        await_sleepers("4328", 0)
    else:
        time.sleep(process_cleanup.GRACE_S + 1.0)
    left = sleepers("4328")
    for process in left:
        process.kill()
    assert len(left) == (0 if guards else 1)


def test_signal_handlers_are_restored(mpiexec: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    launcher.launch(1, ["true"])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("ignored", [True, False])
def test_a_launch_under_nohup_outlives_its_terminal(mpiexec: Path, ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        front = start(1, "sleep", "4330")
    finally:
        signal.signal(signal.SIGHUP, before)
    await_sleepers("4330", 1)
    front.send_signal(signal.SIGHUP)
    if ignored:
        time.sleep(1.0)
        assert len(sleepers("4330")) == 1
        front.terminate()
    await_sleepers("4330", 0)
    front.wait(200)


def test_ctrl_backslash_ends_the_ranks_in_order(mpiexec: Path) -> None:
    front = start(1, "sleep", "4332")
    await_sleepers("4332", 1)
    front.send_signal(signal.SIGQUIT)
    assert front.wait(200) > 0
    await_sleepers("4332", 0)


def start(n: int, *argv: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "hpcsync", "launch", "-n", str(n), "--", *argv])


def sleepers(seconds: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])  # leaves out those that end meanwhile
        if process.info["cmdline"] == ["sleep", seconds] and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def await_sleepers(seconds: str, n: int) -> None:
    deadline_s = time.monotonic() + 100
    while len(sleepers(seconds)) != n:
        assert time.monotonic() < deadline_s, f"{len(sleepers(seconds))} ranks, expected {n}"
        time.sleep(0.02)


# ---- more ranks than anybody means ----


@pytest.mark.parametrize(("n_cores", "most"), [(1, 16), (2, 16), (64, 512)])
def test_many_more_ranks_than_cores_of_this_node_are_refused(
    n_cores: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(n_cores)))
    launcher.refuse_crowd(most, "-n", {})
    launcher.refuse_crowd(99999, "-n", {"MPIEXEC": "mpiexec --hostfile hosts"})
    cores = "1 core" if n_cores == 1 else f"{n_cores} cores"
    message = f"^-n {most + 1}: must be at most {most} ranks on the {cores} here; --oversubscribe allows more$"
    with pytest.raises(LaunchError, match=message):
        launcher.refuse_crowd(most + 1, f"-n {most + 1}", {})


# ---- ranks that launch ranks ----

OF_THE_USER = {
    **launcher.SETTINGS,
    **launcher.ONE_NODE,
    "PATH": "/bin",
    "LD_LIBRARY_PATH": "/l",
    "OPAL_PREFIX": "/p",
    "CUDA_VISIBLE_DEVICES": "1",
    "MPI4PY_LIBMPI": "/l/libmpi.so",
    "MPIEXEC": "/b/mpiexec",
    "MPIR_CVAR_X": "1",
    "PMIX_MCA_gds": "hash",
    "HPCSYNC_LAUNCH": "/a",
}
OF_THE_LAUNCHER = {
    **OPEN_MPI,
    **MPICH,
    **STEP,
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_num_procs": "3",
    "OMPI_MCA_PREFIXES": "mca,ompi",
    "OMPI_MCA_orte_hnp_uri": "1.0;tcp",
    "OMPI_MCA_ess": "^singleton",
    "OMPI_MCA_ess_base_vpid": "1",
    "PMIX_SERVER_URI2": "x;tcp4://127.0.0.1:1",
    "PMIX_NAMESPACE": "x@1",
    "PRTE_LAUNCHED": "1",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "PMI_FD": "9",
    "SLURMD_NODENAME": "n1",
    "PBS_NODEFILE": "/n",
    "HYDRA_HOST_FILE": "/h",
    "HPCSYNC_TERMINAL": "80",
}


def test_outside_removes_the_variables_of_launchers() -> None:
    assert launcher.outside({**OF_THE_USER, **OF_THE_LAUNCHER}) == OF_THE_USER
    assert "MPIEXEC" not in launcher.outside({"MPIEXEC": "mpiexec --hostfile h"})
    assert launcher.on_this_node(launcher.outside(STEP))


def test_a_rank_launches_outside_of_its_job(
    mpiexec: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**OPEN_MPI, **STEP, "OMPI_MCA_pml": "x"}.items():
        monkeypatch.setenv(name, value)
    names = ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "SLURM_JOB_ID", "PMI_SIZE", "OMPI_MCA_pml"]
    launcher.launch(1, ["python", "-c", f"import os; print(*map(os.environ.get, {names}))"])
    assert capfd.readouterr().out.splitlines()[-1] == "None None None 1 x"
    monkeypatch.setenv("MPIEXEC", f"{mpiexec} --hostfile h")
    monkeypatch.setenv("PATH", str(mpiexec.parent))
    monkeypatch.setattr(sys, "executable", str(mpiexec.with_name("python")))
    assert launcher.command(1, ["true"], launcher.environment()) == [str(mpiexec), "-n", "1", "true"]


def test_a_launch_kills_leftover_processes_of_inner_launches(mpiexec: Path) -> None:
    """The process and the launcher of the inner launch are killed; only the outer launch can find its ranks."""
    code = (
        "import os, signal; from hpcsync.system import launcher; from pathlib import Path\n"
        "path = Path(os.environ['MPIEXEC']).with_name('deserter')\n"
        "path.write_text('#!/bin/sh\\nshift 2\\nsetsid \"$@\" &\\nkill -9 $PPID\\n'); path.chmod(0o755)\n"
        "os.environ['MPIEXEC'] = str(path); launcher.launch(1, ['sleep', '4331'])"
    )
    assert launcher.launch(1, ["python", "-c", code]).status == 9
    assert not sleepers("4331")


def test_nodes_of_several_kinds_are_several_nodes() -> None:
    one = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    assert launcher.on_one_node(one)
    assert not launcher.on_one_node({**one, "SLURM_HET_SIZE": "2"})


@pytest.mark.parametrize(
    ("environ", "library", "remedy"),
    [
        (STEP, "Open MPI v5.0.11", "srun --mpi=pmix, or {} inside the allocation"),
        (STEP, "MPICH Version: 5.0.2", "srun --mpi=pmi2, or {} inside the allocation"),
        (STEP, "MPI VERSION    : CRAY MPICH version 8.1", "srun --mpi=cray_shasta, or {} inside the allocation"),
        (
            STEP,
            "",
            "srun --mpi=pmix or srun --mpi=cray_shasta or srun --mpi=pmi2, or {} inside the allocation",
        ),
        (
            OPEN_MPI,
            "MPICH Version: 5.0.2",
            "{}, which belongs to this Python's MPI library; without a launcher, unset OMPI_COMM_WORLD_SIZE",
        ),
        (
            MPICH,
            "Open MPI v5.0.11",
            "{}, which belongs to this Python's MPI library; without a launcher, unset PMI_SIZE",
        ),
    ],
)
def test_several_worlds_of_one_rank_are_refused(
    environ: dict[str, str], library: str, remedy: str, mpiexec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    launcher.refuse_singletons(3, library)
    with pytest.raises(LaunchError) as caught:
        launcher.refuse_singletons(1, library)
    message = "3 processes were started, but each is a world of its own: start them with "
    assert str(caught.value) == message + remedy.format(mpiexec)


@pytest.mark.parametrize("environ", [{}, {**MPICH, "PMI_SIZE": "1"}, SHELL, BATCH])
def test_one_world_of_one_rank_is_accepted(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    launcher.refuse_singletons(1)
