"""A run that is asked to end by a signal closes its trace first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupted(Exception):
    """The run was asked to end by a signal."""


@contextmanager
def on_signals(note: Callable[[int], None]) -> Iterator[None]:
    """Call `note` with SIGINT or SIGTERM instead of dying of it, so that the trace can be closed in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda n, _: note(n)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def interrupt(number: int) -> None:
    """End what is being done, where nothing else looks whether a signal has come. Raises Interrupted."""
    raise Interrupted(signal.Signals(number).name)
