"""Worker processes of data loaders beside MPI.

A process that has initialised MPI must not be forked: with some transports parent or child crash. Hence a server is
forked from the training script before MPI is initialised, and the worker processes are forked from it. It is the server
of the standard library's "forkserver" start method, except that it is not a new interpreter: it has the script's
modules and definitions already, so that worker processes start in milliseconds and the script needs no guard of its
main part. Worker processes know neither MPI nor the launcher, and end with their rank.

Where MPI has been imported before `connect`, worker processes are new interpreters ("spawn"). They do not know the
launcher either, so that MPI, which the script may import there again, is a world of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

import torch

from hpcsync.config.errors import JobError
from hpcsync.system.parent_death import end_with
from hpcsync.system.rank_environment import OF_RANKS
from hpcsync.system.signals import LISTENING

GUARD = 'put the training under `if __name__ == "__main__":`'
LONGEST = 107 - len("/pymp-12345678/listener-12345678")  # bytes of the path above that of a socket

_hiding = threading.Lock()  # held while the environment lacks the launcher: two threads may start loaders
_started = False


def start(unneeded: Iterable[torch.Tensor] = ()) -> None:
    """Fork the server; called before MPI is initialised.

    Parameters
    ----------
    unneeded
        Tensors whose memory the server frees in itself, such as the model's.
    """
    global _started
    if _started or "mpi4py.MPI" in sys.modules:
        return
    _start_tracker(_choose_folder_of_sockets())
    sys.stdout.flush()
    sys.stderr.flush()
    rank = os.getpid()

    def fork(_: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's threads are idle
            pid = os.fork()
        if pid == 0:
            try:
                _serve(rank, arguments[-1], descriptors, unneeded)
            finally:
                os._exit(0)
        return pid

    forkserver.set_forkserver_preload([])  # Python 3.14 would run the script in it, as "__main__"
    with _starting_with(fork):
        forkserver.ensure_running()
    _started = True


def _choose_folder_of_sockets() -> str:
    """Choose the folder in which the standard library creates its own one for sockets, and return the path of that.

    It is the folder of the launch, else the one for temporary files, or /tmp if the path is long.
    """
    before = tempfile.tempdir
    of_launch = Path(os.environ.get(LISTENING, "")).parent
    if of_launch.is_absolute() and of_launch.is_dir():  # it is on this host
        tempfile.tempdir = str(of_launch)
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST:
        tempfile.tempdir = "/tmp"
    try:
        return util.get_temp_dir()
    finally:
        tempfile.tempdir = before


def _serve(rank: int, command: str, descriptors: Sequence[int], unneeded: Iterable[torch.Tensor]) -> None:
    """Serve until the rank ends."""
    os.setsid()  # signals to the ranks do not reach worker processes
    end_with(rank)
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2 and descriptor not in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    for name in _of_launcher():
        del os.environ[name]
    for tensor in unneeded:
        if tensor.device.type == "cpu":
            with contextlib.suppress(RuntimeError):
                tensor.untyped_storage().resize_(0)
    path = spawn.get_preparation_data("").get("init_main_from_path")
    if path is not None:
        sys.modules["__main__"].__file__ = path  # as worker processes know it: otherwise they would run the script
    exec(command, {})


def _of_launcher() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(OF_RANKS)}


class _Process(SpawnProcess):
    """A new interpreter without the variables of the launcher."""

    @staticmethod
    def _Popen(process: Any) -> Any:
        with _hiding:
            hidden = _of_launcher()
            try:
                for name in hidden:
                    del os.environ[name]
                return SpawnProcess._Popen(process)
            finally:
                os.environ.update(hidden)


class _Spawn(SpawnContext):
    Process = _Process


@contextlib.contextmanager
def _starting_with(launch: Callable[..., int]) -> Iterator[None]:
    """Let the standard library start its helpers with this function."""
    before, util.spawnv_passfds = util.spawnv_passfds, launch
    try:
        yield
    finally:
        util.spawnv_passfds = before


def _start_tracker(folder: str | None = None) -> None:
    """Start the process that removes what killed processes leave behind, and let it do so without a warning.

    It is in a session of its own: launchers kill the process groups of their ranks. Nothing is done if a script has
    started one.

    Parameters
    ----------
    folder
        Folder that it removes, too; None: none.
    """
    launch = util.spawnv_passfds

    def start(path: Any, given: Sequence[str], passed: Sequence[int]) -> int:
        code = f"import os; os.setsid(); {given[-1]}"
        if folder is not None:
            code = f"import atexit, shutil; atexit.register(shutil.rmtree, {folder!r}, True); {code}"
        return launch(path, [given[0], "-W", "ignore", *given[1:-1], code], passed)

    with _starting_with(start):
        resource_tracker.ensure_running()


def settings(loader: torch.utils.data.DataLoader[Any], say: Callable[[str], None]) -> Mapping[str, Any]:
    """Return the arguments with which a data loader like this one starts its processes safely.

    Parameters
    ----------
    loader
        Data loader of the script.
    say
        Called with a line for the user if the script's own choice is replaced.

    Raises
    ------
    JobError
        If worker processes would run the script again.
    """
    given = loader.multiprocessing_context
    unchanged = {"multiprocessing_context": given, "worker_init_fn": loader.worker_init_fn}
    mpi = sys.modules.get("mpi4py.MPI")
    if loader.num_workers == 0 or mpi is None or not mpi.Is_initialized():
        return unchanged
    asked = None if given is None else given.get_start_method()
    method = "forkserver" if _started and asked != "spawn" else "spawn"
    if asked not in (None, method):
        say(f'multiprocessing_context = "{asked}": "{method}" is used, because a process with MPI must not be forked')
    _start_tracker()
    if method == "spawn":
        _refuse_unguarded(loader.num_workers)
    context = _Spawn() if method == "spawn" else multiprocessing.get_context(method)
    return {"multiprocessing_context": context, "worker_init_fn": _Beginning(loader.worker_init_fn)}


class _Beginning:
    """What a worker process does first, before the script's own `worker_init_fn`."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, number: int) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            if parent.pid != os.getppid():  # forked from the server
                end_with(os.getppid())
            if not parent.is_alive():  # the rank has ended since it started this process, and so has the server
                os._exit(0)
        if self._then is not None:
            self._then(number)


def _refuse_unguarded(num_workers: int) -> None:
    """Raise if the script does not look as if new interpreters could import it."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not path.endswith(".py") or not Path(path).is_file():
        return
    if "__main__" not in Path(path).read_text(encoding="utf-8", errors="replace"):
        raise JobError(
            f"shard: num_workers = {num_workers} starts processes that import the script, because MPI was imported "
            f"before connect: {GUARD}"
        )


def refuse_within() -> None:
    """Raise if this process is a worker process that imports the script.

    Raises
    ------
    JobError
        If it is.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise JobError(f"connect: a worker process of a data loader runs the script: {GUARD}")
