"""Processes that end when their parent does, however it ends (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # of prctl(2)


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def end_with_parent() -> Callable[[], None] | None:
    """Return a `preexec_fn` with which the kernel sends SIGTERM to a process when this thread has ended (Linux)."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: after the fork of a process with threads nothing may be loaded
    parent = os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent had already ended
            os._exit(1)

    return ask
