"""What is left of a launch of ranks on this node is found by a mark that all its processes have, and killed.

A launcher that is killed leaves ranks, and so may Open MPI's if it is told to end while it still starts them. The
process that launches looks for them when the launcher has ended. Should it be killed itself, a guard does.

    python stragglers.py MARK       the guard: waits until its standard input ends

It imports the standard library only, so that it is there at once.
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

MARK = "HPCSYNC_LAUNCH"  # in the environment of every process of a launch
GRACE_S = 3.0  # in which a launcher that the kernel tells to end does so in order
PROCESSES = Path("/proc")  # outside Linux there is none: then nothing is found


def find(mark: str) -> dict[int, dict[str, str]]:
    """The processes of this launch and of launches within it, and their environments."""
    found = {}
    for folder in PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
            pairs = os.fsdecode((folder / "environ").read_bytes()).split("\0")
            environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            if environ.get(MARK, "").startswith(mark):
                found[int(folder.name)] = environ
    return found


def kill(mark: str) -> None:
    """Kill what is left of this launch: ranks whose launcher died are nobody's children any more."""
    deadline_s = time.monotonic() + 2.0  # the kernel takes its time to end a process that is busy in it
    in_vain = 0
    while in_vain < 3 and time.monotonic() < deadline_s:  # one that is just being started shows no environment
        pids = find(mark)
        in_vain = 0 if pids else in_vain + 1
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


@contextlib.contextmanager
def guarded(mark: str) -> Iterator[None]:
    """Should this process be killed meanwhile, a guard kills what is left of the launch `GRACE_S` later."""
    if not PROCESSES.is_dir():
        yield
        return
    guard = subprocess.Popen(
        [sys.executable, "-P", __file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what is sent to all of a terminal's processes is not for it
    )
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


if __name__ == "__main__":
    sys.stdin.read()  # it ends with the process that has the other end
    time.sleep(GRACE_S)
    kill(sys.argv[1])
