"""A run that is asked to end by a signal closes its trace first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """The run was asked to end by a signal."""


@contextmanager
def on_signals(note: Callable[[int], None]) -> Iterator[None]:
    """Call `note` with SIGINT or SIGTERM instead of dying of it, so that the trace can be closed in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, lambda n, _: note(n)) for number in STOPPING]
    try:
        yield
    finally:
        for number, handler in zip(STOPPING, before, strict=True):
            signal.signal(number, handler)


class SignalListener:
    """From now on notes SIGINT and SIGTERM instead of dying of them, even while the main thread is inside a long call.

    Any thread may ask for them. Made outside the main thread, it hears nothing.
    """

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, lambda n, _: None) for number in STOPPING}
            self._before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)

    def received(self) -> int | None:
        """The next signal that has come, or None."""
        try:
            numbers = os.read(self._reading, 1)
        except BlockingIOError:
            return None
        return numbers[0] if numbers and numbers[0] in STOPPING else None

    def close(self) -> None:
        """Let signals do what they did before; in the thread that made it. Harmless when repeated."""
        if self._handlers:
            signal.set_wakeup_fd(self._before)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers = {}


def interrupt(number: int) -> None:
    """End what is being done, where nothing else looks whether a signal has come. Raises Interrupted."""
    raise Interrupted(signal.Signals(number).name)
