"""Starting MPI ranks, and ending them: the launcher beside the running Python, its settings, and nothing left behind.

This module imports no MPI: it runs in the process that starts the ranks, never to become one itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
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

from hpcsync.system import process_cleanup
from hpcsync.system.launch_output import Output
from hpcsync.system.process_cleanup import MARK
from hpcsync.system.signals import LISTENING

TIMED_OUT = 124  # as timeout(1) says it
NOTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# Each only where the user has not set it. The values come from measurements, not from the libraries' defaults.
ONE_THREAD = {  # a rank: ranks share the cores, and a thread pool in each multiplies them
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
MPI_SETTINGS = {
    # Open MPI 5 and 4: more ranks than cores is fine, a waiting rank gives its core away, and no rank is bound to a
    # core, because its helper threads would be bound to the same one. Without "slot", all ranks go to the first node.
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    # Open MPI: osc/ucx does not progress passively; 4.1.4 crashes in Win.Allocate unless osc/rdma outranks osc/pt2pt.
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_osc_rdma_priority": "10",
    # Open MPI refuses root, which is what one is in a container.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # MPICH: a waiting rank gives its core away.
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
}
SETTINGS = {**ONE_THREAD, **MPI_SETTINGS}
# MPICH over UCX gives Slurm's PMI2 long addresses, some of which get lost: ranks do not start, or never hear of others.
# Those of OFI are short.
SLURM_PMI2_SETTINGS = {"MPIR_CVAR_CH4_NETMOD": "ofi"}
ONE_NODE = {"OMPI_MCA_pml": "ob1"}  # shared memory at its best; between nodes Open MPI knows the network better

# Open MPI's mpirun: ranks go on when others die, of which its daemons tell them. Not its ranks' own detector: it takes
# one that computes for a second for dead.
TOLERANT = ("--with-ft", "ulfm", "-x", "EVENT_NOEPOLL=1")

# Open MPI's mpirun keeps files in a folder named after its process, in this one. It cannot start where there is such a
# folder already: that of another one with the same number, which was killed. So each gets another one, unless the user
# says where; but not both, which it refuses.
SESSION_FOLDER, SESSION_FOLDERS = "PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_tmpdir_base"

# What a launcher or a batch system puts into the environment of its ranks, by how the names begin. An mpiexec inside
# would take itself for a part of that job, or look for hosts there.
OF_RANKS = (
    # Open MPI with PMIx and PRRTE; of its settings those that it makes itself, version 5, then 4.
    *("OMPI_", "PMIX_", "PRTE_", "OPAL_USER_PARAMS_GIVEN"),
    *("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs"),
    *("OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_shmem_RUNTIME_QUERY_hint"),
    # MPICH's hydra, and those that descend from it.
    *("PMI_", "HYDI_", "MPI_LOCAL", "GFORTRAN_UNBUFFERED_PRECONNECTED", "MPISPAWN_", "MV2_COMM_WORLD_"),
    # Batch systems.
    *("SLURM", "SRUN_", "PBS_", "LSB_", "PE_HOSTFILE", "PALS_", "FLUX_"),
    # Other hosts that the user named.
    *("HYDRA_HOST_FILE", "PRTE_MCA_prte_default_hostfile"),
    # Of this launch alone.
    *(SESSION_FOLDER, LISTENING),
)
OF_USERS = ("OMPI_MCA_", "OMPI_ALLOW_", "PMIX_MCA_", "PRTE_MCA_", "PRTE_ALLOW_")  # unless a longer one above fits

SRUN_MPI = {"Open MPI": "pmix", "MPICH": "pmi2"}  # what Slurm's srun must be told for ranks to be one world

RANKS_PER_CORE, RANKS_ANYWHERE = 8, 16  # as many start unasked; more cost memory and time that one rarely means
STARTING_GRACE_S = 1.5  # for ranks that have not begun to train, and have nothing to save

TERMINAL = "HPCSYNC_TERMINAL"  # in the environment of the ranks: columns of the terminal that their output ends on


class LaunchError(Exception):
    """Ranks cannot be started, or were started wrongly; told in one line."""


class Ended(NamedTuple):
    """How a launch ended. `signum`: the signal that this process got meanwhile, which ended the ranks."""

    status: int
    signum: int | None = None
    timed_out: bool = False


# ---- the command ----


def mpiexec(environ: Mapping[str, str] | None = None) -> list[str]:
    """The launcher that belongs to the MPI library of this Python, and what MPIEXEC adds to it."""
    environ = os.environ if environ is None else environ
    if environ.get("MPIEXEC"):
        return shlex.split(environ["MPIEXEC"])
    folders = [Path(sys.executable).parent]
    if "/" in environ.get("MPI4PY_LIBMPI", ""):
        folders.insert(0, Path(environ["MPI4PY_LIBMPI"]).parent.parent / "bin")
    for name in ("mpiexec", "mpirun"):
        found = shutil.which(name, path=os.pathsep.join(map(str, folders))) or shutil.which(name)
        if found:
            return [found]
    raise LaunchError("mpiexec: not found beside this Python nor on the PATH; install an MPI, or let MPIEXEC name it")


def command(
    n: int, argv: Sequence[str], environ: Mapping[str, str] | None = None, *, tolerant: bool = False
) -> list[str]:
    """The command line of n ranks of this program. `python` is the Python that runs this.

    tolerant: the others are to go on when one of them dies. Raises LaunchError where this launcher cannot do that.
    """
    argv = [sys.executable, *argv[1:]] if argv and argv[0] == "python" else list(argv)
    start = mpiexec(environ)
    if tolerant:
        _refuse_intolerant(start)
        start += TOLERANT
    return [*start, "-n", str(n), *argv]


def _refuse_intolerant(start: Sequence[str]) -> None:
    try:
        said = subprocess.run([start[0], "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    found = re.search(r"\(Open MPI\) (\d+)", said)
    if found is None or int(found[1]) < 5:
        raise LaunchError(f"{start[0]}: cannot go on when a rank dies; Open MPI can, from version 5 on")


def environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a launch: what is given, and our settings where that is silent.

    If nothing is given it is this process's, a rank's without what makes it one.
    """
    if given is None:
        given = outside(os.environ) if under_launcher() else os.environ
    settings = {**SETTINGS, **(ONE_NODE if on_one_node(given) else {})}
    return {**settings, **given}


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """A rank's environment as it would be without the launcher and the batch system that started the rank.

    What it starts then is no part of their job, and stays on this node. MPIEXEC is kept if it is one word.
    """
    left = {
        name: value for name, value in environ.items() if len(_prefix(name, OF_RANKS)) <= len(_prefix(name, OF_USERS))
    }
    if len(shlex.split(left.get("MPIEXEC", ""))) > 1:
        del left["MPIEXEC"]
    return left


def _prefix(name: str, prefixes: Sequence[str]) -> str:
    return max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default="")


def on_this_node(environ: Mapping[str, str]) -> bool:
    """Whether all ranks of a launch will be on the node of this process, which may be outside its own allocation."""
    if not on_one_node(environ):
        return False
    return "SLURMD_NODENAME" in environ or not {"SLURM_JOB_ID", "SLURM_JOBID"} & environ.keys()


def on_one_node(environ: Mapping[str, str]) -> bool:
    """Whether all ranks of a launch will be on one node: no batch system and no option of MPIEXEC says otherwise."""
    if int(environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", "1"))) > 1 or "SLURM_HET_SIZE" in environ:
        return False
    if any(name in environ for name in ("PBS_NODEFILE", "PE_HOSTFILE", "LSB_DJOB_HOSTFILE")):
        return False
    return len(shlex.split(environ.get("MPIEXEC", ""))) <= 1


def refuse_crowd(n: int, asked: str, environ: Mapping[str, str] | None = None) -> None:
    """Raise LaunchError for more ranks than a small multiple of the cores, where all of them will be on this node.

    Parameters
    ----------
    n : int
        The number of ranks.
    asked : str
        The key and the value that ask for them, such as "-n 500".
    """
    if not on_this_node(os.environ if environ is None else environ):
        return
    n_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    most = max(RANKS_ANYWHERE, RANKS_PER_CORE * n_cores)
    if n > most:
        cores = f"{n_cores} core{'s' * (n_cores > 1)}"
        raise LaunchError(f"{asked}: must be at most {most} ranks on the {cores} here; --oversubscribe allows more")


# ---- starting and ending ----


def launch(
    n: int,
    argv: Sequence[str],
    *,
    timeout_s: float | None = None,
    grace_s: float = 5.0,
    output: IO[bytes] | None = None,
    suspends: bool = False,
    tolerant: bool = False,
) -> Ended:
    """Run n ranks of this program to their end, and print the command line first; or into `output`, without that.

    Interrupted (SIGINT, SIGTERM, SIGHUP) or out of time, it asks the launcher to end its ranks, and after `grace_s`
    kills whatever is left. Should this process itself be killed, the kernel tells the launcher, and another process
    kills whatever is left a while later. SIGUSR1 is passed on.

    suspends: whether rank 0 ends the run in order when it gets SIGTERM. Then the first one is passed on to it, if it is
    on this node and says that it listens (`signals.tell_listening`), and nothing else is done. Before that the ranks
    have nothing to save, and less than `grace_s`.

    Notices of the MPI's launcher and library on ends that a rank has explained are left out: see `launch_output`.

    A rank may launch ranks too, in its main thread: they are a world of their own on its node, and end with it.
    """
    environ = environment()
    line = command(n, argv, environ, tolerant=tolerant)
    mark = os.environ.get(MARK, "") + "/" + uuid.uuid4().hex  # begins with that of the launch around this one
    if output is None:
        print(f"starting {n} rank{'s' * (n > 1)}: {shlex.join(line)}", flush=True)
    written = Output()
    with _noted_signals() as signums, _own_folder() as folder, process_cleanup.guarded(mark):
        listening = folder / "listening"
        try:
            process = subprocess.Popen(
                line,
                env={**environ, **_session(environ, folder), **_terminal(), LISTENING: str(listening), MARK: mark},
                stdout=output or subprocess.PIPE,
                stderr=output or subprocess.PIPE,
                stdin=subprocess.DEVNULL,  # in a group of its own it may not read the terminal
                process_group=0,  # Ctrl-C is for us alone: we pass it on once, in order
                preexec_fn=_end_with_parent(),
            )
        except OSError as error:
            raise LaunchError(f"{line[0]}: {error.strerror}") from None
        if process.stdout is not None and process.stderr is not None:
            written.forward(process.stdout, process.stderr)
        timed_out = _wait(process, signums, timeout_s, _passing_on(process, mark, suspends, listening))
        stopped = process.returncode is None
        if stopped:
            _stop(process, STARTING_GRACE_S if suspends and not listening.exists() else grace_s)
        process_cleanup.kill(mark)
        written.end(stopped)
    if timed_out:
        return Ended(TIMED_OUT, None, True)
    signum = next((signum for signum in signums if signum != signal.SIGUSR1), None)
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Ended(128 + signum if stopped and signum and status == 0 else status, signum)


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    try:
        folder = tempfile.TemporaryDirectory(prefix="hpcsync-", ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(f"temporary folder: {error.strerror}") from None
    with folder as name:
        yield Path(name)


def _session(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    return {} if SESSION_FOLDER in environ or SESSION_FOLDERS in environ else {SESSION_FOLDER: str(folder)}


def _terminal() -> dict[str, str]:
    return {TERMINAL: str(shutil.get_terminal_size().columns)} if sys.stdout.isatty() else {}


def _passing_on(process: subprocess.Popen[bytes], mark: str, suspends: bool, listening: Path) -> Callable[[int], bool]:
    """What passes a signal on to the ranks, and says whether that is all that is to be done."""
    suspended = not suspends

    def pass_on(signum: int) -> bool:
        nonlocal suspended
        if signum == signal.SIGUSR1:
            process.send_signal(signum)  # both MPIs' launchers pass it on to all ranks
            return True
        if signum != signal.SIGTERM or suspended or not listening.exists():
            return False
        suspended = True
        for pid in (pids := _rank_0(mark)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return bool(pids)

    return pass_on


def _wait(
    process: subprocess.Popen[bytes],
    signums: list[int],
    timeout_s: float | None,
    passed_on: Callable[[int], bool] = lambda signum: False,
) -> bool:
    """Wait until the process ends, a signal comes that is not passed on or the time is over; whether it was the
    time."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    heard = 0
    while True:
        while heard < len(signums):
            if not passed_on(signums[heard]):
                return False
            heard += 1
        try:
            process.wait(0.1)
            return False
        except subprocess.TimeoutExpired:
            if deadline is not None and time.monotonic() >= deadline:
                return True


def _stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Both MPIs' launchers end their ranks on SIGTERM; one that does not is killed, and its ranks are found by mark."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _rank_0(mark: str) -> list[int]:
    """The process of this launch that is rank 0, if it is on this node."""
    return [
        pid
        for pid, environ in process_cleanup.find(mark).items()
        if environ[MARK] == mark and under_launcher(environ) and expected_rank(environ) == 0
    ]


def _end_with_parent() -> Callable[[], None] | None:
    """For the launcher, before it starts: let the kernel send it SIGTERM when this thread is gone (Linux)."""
    if sys.platform != "linux":
        return None
    PR_SET_PDEATHSIG = 1
    prctl = ctypes.CDLL(None).prctl  # found here: the copy of a process with threads, as ranks are, must load nothing
    parent = os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was gone before
            os._exit(1)

    return ask


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Signals that would end this process are put on the list instead."""
    signums: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        signums.append(signum)

    before = {signum: signal.signal(signum, note) for signum in NOTED}
    try:
        yield signums
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# ---- am I a rank? ----


def expected_size(environ: Mapping[str, str] | None = None) -> int | None:
    """How many ranks the launcher that started this process says it started; None if no launcher did."""
    environ = os.environ if environ is None else environ
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if name in environ:
            return int(environ[name])
    # A Slurm batch script and an interactive shell are steps too, with numbers from the top of 32 bits.
    if int(environ.get("SLURM_STEP_ID", 2**32 - 1)) < 2**32 - 16:
        return int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    return None


def expected_rank(environ: Mapping[str, str] | None = None) -> int:
    """This process's number among those that the launcher started; 0 if none did."""
    environ = os.environ if environ is None else environ
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
    return next((int(environ[name]) for name in names if name in environ), 0)


def local_rank(environ: Mapping[str, str] | None = None) -> int:
    """This process's number among those of its node that the launcher started; 0 if none did."""
    environ = os.environ if environ is None else environ
    names = (
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",  # MPICH's hydra and Intel's
        "MV2_COMM_WORLD_LOCAL_RANK",
        "PALS_LOCAL_RANKID",
        "FLUX_TASK_LOCAL_ID",
        "SLURM_LOCALID",  # last: a batch script has it too, and passes it on to the launchers that it starts
    )
    return next((int(environ[name]) for name in names if name in environ), 0)


def under_launcher(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is one rank of a job. A shell in a Slurm step of one task is not."""
    environ = os.environ if environ is None else environ
    size = expected_size(environ)
    if size is None:
        return "PMIX_RANK" in environ
    return size > 1 or "OMPI_COMM_WORLD_SIZE" in environ or "PMI_SIZE" in environ


def under_pmi2_of_slurm(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is a rank that srun --mpi=pmi2 has started."""
    environ = os.environ if environ is None else environ
    return environ.get("PMI_JOBID") == f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"


def batch_job(environ: Mapping[str, str] | None = None) -> str:
    """What the batch system calls the job that this process is in, as on its own command lines; "" outside of one."""
    environ = os.environ if environ is None else environ
    if "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    if environ.get("LSB_JOBINDEX", "0") != "0":
        return f"{environ['LSB_JOBID']}[{environ['LSB_JOBINDEX']}]"
    names = ("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")  # PBS says 12[3] of an array's
    return next((environ[name] for name in names if name in environ), "")


def refuse_singletons(world_size: int, library: str = "") -> None:
    """N processes that are each a world of one would train N times: the launcher is of another MPI than the library."""
    expected = expected_size()
    if world_size != 1 or expected is None or expected <= 1:
        return
    if "OMPI_COMM_WORLD_SIZE" not in os.environ and "SLURM_STEP_ID" in os.environ:
        options = {name: f"srun --mpi={kind}" for name, kind in SRUN_MPI.items()}
        remedy = next((option for name, option in options.items() if name in library), " or ".join(options.values()))
        remedy += f", or {shlex.join(mpiexec())} inside the allocation"
    else:
        remedy = f"{shlex.join(mpiexec())}, which belongs to this Python's MPI library"
    raise LaunchError(f"{expected} processes were started, but each is a world of its own: start them with {remedy}")
