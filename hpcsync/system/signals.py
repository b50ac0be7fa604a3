"""Signals: a run that receives one writes a checkpoint, or at least closes its trace, before it ends."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

SAVING = signal.SIGUSR1  # write a checkpoint and continue
HEARD = (signal.SIGINT, signal.SIGTERM, SAVING)

LISTENING = "HPCSYNC_LISTENING"  # environment variable of ranks: file of a `Listener` once rank 0 listens

MPICH_PROXY = "hydra_pmi_proxy"

TO_BE_RESUMED = 75  # exit status: EX_TEMPFAIL of sysexits.h

_came: list[int] = []  # signals received before the listener of rank 0 exists


class Interrupted(BaseException):
    """A signal asked the run to end: no error of the code that it meets, which must not catch it as one."""


class Terminated(Interrupted):
    """SIGTERM asked the run to end: the run is to be resumed."""


class Suspended(Terminated):
    """The run can be resumed from the checkpoint that the message names."""


@contextmanager
def on_signals(note: Callable[[int], None]) -> Iterator[None]:
    """Call `note` with each signal of HEARD instead of being killed by it, so that the trace can be closed in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, lambda n, _: note(n)) for number in HEARD]
    try:
        while _came:
            note(_came.pop(0))
        yield
    finally:
        for number, handler in zip(HEARD, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let SIGINT end this process at once: an exception might be swallowed by a module that is being imported."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before != signal.default_int_handler:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, b"hpcsync: interrupted\n")
        os._exit(1)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def left_to_rank_0(*, starting: bool = False) -> Callable[[], None]:
    """Let rank 0 handle the signals that a batch system sends to all ranks; this rank only notes them.

    Rank 0 handles them as soon as it has a listener. A second SIGTERM ends any rank: its time is over, or rank 0 has
    ended.

    Parameters
    ----------
    starting
        True while there is nothing to save. SIGTERM then ends a rank of MPICH's launcher at once. That launcher only
        forwards the signal, where others also end the ranks, and unlike Slurm sends none when a rank has ended.

    Returns
    -------
    callable
        Restores the handlers.

    Notes
    -----
    Slurm also sends SIGTERM when a rank has ended with a status other than 0, and loses that status if the signal kills
    ranks that are just ending.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and (ends or number in _came):
            os._exit(TO_BE_RESUMED)
        _came.append(number)

    ends = starting and _parent() == MPICH_PROXY
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, SAVING)}
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # after that Python restores the default: to kill

    def undo() -> None:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])
        signal.signal(SAVING, signal.SIG_IGN)  # a late one must not kill a process that has finished its work

    return undo


def told_to_end() -> bool:
    """Return True if this rank has noted a SIGTERM, which it leaves to rank 0."""
    return signal.SIGTERM in _came


def _parent() -> str:
    """Return the name of the process that has started this one; the kernel may have cut it within a character."""
    with suppress(OSError):
        return os.fsdecode(Path(f"/proc/{os.getppid()}/comm").read_bytes()).strip()
    return ""


class Listener(NamedTuple):
    """Rank 0's process, which ends the run in order on a signal, and the folder of the run."""

    pid: int
    folder: Path


def listeners(path: Path) -> list[Listener]:
    """Return what rank 0 has written into the file of `LISTENING`: a line for each run."""
    with suppress(FileNotFoundError):
        fields = [line.split(" ", 1) for line in path.read_text().splitlines()]
        return [Listener(int(pid), Path(json.loads(folder))) for pid, folder in fields]
    return []


@contextmanager
def telling_that_mpi_starts() -> Iterator[None]:
    """Let the process that launched the ranks know that this one waits for all others within MPI_Init."""
    if LISTENING not in os.environ or "mpi4py.MPI" in sys.modules:
        yield
        return
    waiting = waiting_for_all(Path(os.environ[LISTENING]))
    with suppress(OSError):  # on another host
        waiting.touch()
    yield
    with suppress(OSError):
        waiting.unlink()  # all others are there


def waiting_for_all(listening: Path) -> Path:
    """Return the file beside that of `LISTENING` that exists while ranks wait within MPI_Init."""
    return listening.with_name("starting-mpi")


def tell_listening(folder: Path) -> None:
    """Tell the process that launched the ranks that rank 0 now ends the run in this folder in order on a signal."""
    if LISTENING in os.environ:
        with suppress(OSError), Path(os.environ[LISTENING]).open("a") as file:  # on another host
            file.write(f"{os.getpid()} {json.dumps(str(folder.absolute()))}\n")  # whatever characters it has


class SignalListener:
    """Queue of the signals of HEARD, which no longer kill this process, even while its main thread is in a long call.

    Any thread may read it. Created outside the main thread, it stays empty.
    """

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, lambda n, _: None) for number in HEARD}
            self._before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            os.write(self._writing, bytes(_came))
            _came.clear()

    def received(self) -> int | None:
        """Return the next signal, or None."""
        try:
            numbers = os.read(self._reading, 1)
        except BlockingIOError:
            return None
        return numbers[0] if numbers and numbers[0] in HEARD else None

    def close(self) -> None:
        """Restore the handlers, in the thread that created the listener; nobody may read it any more."""
        if self._handlers:
            signal.set_wakeup_fd(self._before)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        for end in (self._reading, self._writing):
            os.close(end)


def interrupt(number: int) -> None:
    """Handle a signal in code that has nothing to save: raise Interrupted, or ignore SAVING.

    Raises
    ------
    Terminated
        For SIGTERM.
    Interrupted
        For SIGINT.
    """
    if number == signal.SIGTERM:
        raise Terminated("SIGTERM")
    if number != SAVING:
        raise Interrupted(signal.Signals(number).name)
