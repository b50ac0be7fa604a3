"""A run that is asked by a signal to end writes a checkpoint, or at least closes its trace, first."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

SAVING = signal.SIGUSR1  # write a checkpoint, and go on
HEARD = (signal.SIGINT, signal.SIGTERM, SAVING)

LISTENING = "HPCSYNC_LISTENING"  # in the environment of ranks: the file that says that rank 0 listens

TO_BE_RESUMED = 75  # exit status: EX_TEMPFAIL of sysexits.h

_came: list[int] = []  # what was left to rank 0, which has not listened yet


class Interrupted(Exception):
    """The run was asked to end by a signal."""


class Terminated(Interrupted):
    """By SIGTERM: it is to be resumed."""


class Suspended(Terminated):
    """It goes on from the checkpoint that the message names."""


@contextmanager
def on_signals(note: Callable[[int], None]) -> Iterator[None]:
    """Call `note` with a signal of HEARD instead of dying of it, so that the trace can be closed in order."""
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
    """Let SIGINT end this process without an exception, which might get lost in what is being imported."""
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


def left_to_rank_0() -> Callable[[], None]:
    """Let this rank leave to rank 0 what a batch system sends to all ranks; call what it returns to undo that.

    Rank 0 hears of it as soon as it listens. A second SIGTERM ends any rank: its time is over, or rank 0 is gone. Slurm
    sends SIGTERM also when a rank has ended with another status than 0, and forgets that status if others, who are just
    ending themselves, die of it.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and number in _came:
            os._exit(TO_BE_RESUMED)
        _came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, SAVING)}
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # from then on Python would let it kill

    def undo() -> None:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])
        signal.signal(SAVING, signal.SIG_IGN)  # one that comes too late is not to kill what has done its work

    return undo


def tell_listening() -> None:
    """Let the process that launched the ranks know that rank 0 will end the run in order when it is told to."""
    if LISTENING in os.environ:
        with suppress(OSError):  # on another host
            Path(os.environ[LISTENING]).touch()


class SignalListener:
    """From now on notes the signals of HEARD instead of dying of them, even while the main thread is in a long call.

    Any thread may ask for them. Made outside the main thread, it hears nothing.
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
        """The next signal that has come, or None."""
        try:
            numbers = os.read(self._reading, 1)
        except BlockingIOError:
            return None
        return numbers[0] if numbers and numbers[0] in HEARD else None

    def close(self) -> None:
        """Let signals do what they did before; in the thread that made it. Harmless when repeated."""
        if self._handlers:
            signal.set_wakeup_fd(self._before)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers = {}


def interrupt(number: int) -> None:
    """End what is being done, where nothing else looks whether a signal has come. Raises Interrupted, but for SAVING:
    where there is nothing to save."""
    if number == signal.SIGTERM:
        raise Terminated("SIGTERM")
    if number != SAVING:
        raise Interrupted(signal.Signals(number).name)
