"""Kill leftover processes of a launch on this node, which are found by a mark in their environment.

A launcher that is killed leaves ranks behind, and so may Open MPI's launcher if it is ended while it still starts them.
The process that launched them kills them when the launcher has ended. If that process is killed itself, a guard does:

    python process_cleanup.py MARK       waits until its standard input ends, then kills

This module imports the standard library only, so that the guard starts at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "HPCSYNC_LAUNCH"  # environment variable of every process of a launch
GRACE_S = 3.0  # time for the launcher, to which the kernel sends SIGTERM, to end in order
PROCESSES = Path("/proc")  # Linux only: elsewhere no process is found


def find(mark: str) -> dict[int, dict[str, str]]:
    """Return the environments of all processes of this launch and of launches within it, by process id."""
    found = {}
    for folder in PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
            pairs = os.fsdecode((folder / "environ").read_bytes()).split("\0")
            environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            if environ.get(MARK, "").startswith(mark):
                found[int(folder.name)] = environ
    return found


def kill(mark: str) -> None:
    """Kill the leftover processes of this launch, which have lost their parent if the launcher died."""
    deadline_s = time.monotonic() + 2.0  # a process that is in a system call does not end at once
    empty_searches = 0
    while empty_searches < 3 and time.monotonic() < deadline_s:  # a process that is being started has no environment
        pids = find(mark)
        empty_searches = 0 if pids else empty_searches + 1
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


@contextlib.contextmanager
def guarded(mark: str) -> Iterator[None]:
    """Start a guard: if this process is killed, the guard kills the leftover processes `GRACE_S` later."""
    if not PROCESSES.is_dir():
        yield
        return
    guard = subprocess.Popen(
        [sys.executable, "-P", __file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals of the terminal do not reach it
    )
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


if __name__ == "__main__":
    sys.stdin.read()  # returns when the process at the other end has ended
    time.sleep(GRACE_S)
    kill(sys.argv[1])
