"""Remove what a launch leaves on this node: processes, found by a mark in their environment, files and shared memory.

A launcher that is killed leaves ranks behind, and so may Open MPI's launcher if it is ended while it still starts them.
The process that launched them kills them when the launcher has ended. If that process is killed itself, a guard does:

    python process_cleanup.py MARK TIME  reads a `Will`, waits until its standard input ends, then carries it out

This module imports the standard library only, so that the guard starts at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MARK = "HPCSYNC_LAUNCH"  # environment variable of every process of a launch
GRACE_S = 2.0  # time for the launcher, to which the kernel sends SIGTERM, to end in order
TICK_NS = 10_000_000  # times of files are those of the latest tick of the kernel, 1 to 10 ms ago
PROCESSES = Path("/proc")  # Linux only: elsewhere no process is found
MEMORY = Path("/dev/shm")
TOPOLOGIES = Path("/tmp")
PROXY = "hydra_pmi_proxy"  # of MPICH's launcher

# Names of segments: Open MPI's with the host (those of windows, osc, only until all ranks have attached them), MPICH's,
# and the semaphores of Python's multiprocessing.
SEGMENT = re.compile(
    rf"(sm_segment|vader_segment|osc_sm|osc_rdma)\.{re.escape(platform.node())}\.|mpich_shm_|mpich_shar_tmp|sem\.mp-"
)
ATTACHED = re.compile(rf" {MEMORY}/mpich_shm_\w+$")  # in /proc/PID/maps, where "(deleted)" follows an unlinked name


class Will(NamedTuple):
    """What the guard does for a killed process once its processes on this node have ended.

    Attributes
    ----------
    argv
        Command to run; empty: none.
    removed
        Files and folders to remove after that. With `kept`, a file only if it is still one of those.
    kept
        Descriptors of files that stay open until then.
    """

    argv: Sequence[str] = ()
    removed: Sequence[str] = ()
    kept: Sequence[int] = ()


NO_WILL = Will()


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


def remove_left(since_ns: int) -> None:
    """Remove the shared memory, folders and files that killed processes of a launch have left since a time."""
    remove_segments(since_ns)
    remove_sessions(since_ns)
    remove_topologies(since_ns)


def remove_segments(since_ns: int) -> None:
    """Remove the segments of shared memory that killed MPI processes of this user have left since a time.

    A segment of a living process is mapped by it, or open while the process makes it.
    """
    left = {path for path in MEMORY.glob("*") if SEGMENT.match(path.name) and _is_ours(path, since_ns)}
    used = _used() if left else set()
    for path in left:
        with contextlib.suppress(OSError):
            if path.stat().st_ino not in used:
                path.unlink()


@contextlib.contextmanager
def removing_segments() -> Iterator[None]:
    """Remove the segments of shared memory that MPI processes of this block leave."""
    since_ns = time.time_ns()
    try:
        yield
    finally:
        remove_segments(since_ns)


def unlink_attached() -> None:
    """Unlink the file of MPICH's segment, which every rank of this node has attached; nobody opens it again.

    MPICH unlinks it when it finalizes, which a killed rank never does. Where there is no `hpcsync run` to remove it, on
    the other nodes, it would use memory until somebody deletes it. To be called by a rank once all have started.
    """
    for line in _maps(PROCESSES / "self") if PROCESSES.is_dir() else ():
        if ATTACHED.search(line):
            Path(line.split()[-1]).unlink(missing_ok=True)  # another rank may be faster


def remove_sessions(since_ns: int) -> None:
    """Remove the empty folders that Open MPI's ranks have left since a time in the folder for temporary files.

    A rank that starts while its launcher is being killed makes folders of its own: ompi.HOST.USER/jf.0/JOB/RANK.
    """
    temporary = next((os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "/tmp")
    top = Path(temporary) / f"ompi.{platform.node()}.{os.getuid()}"
    for job in top.glob("jf.*/*"):
        if _is_ours(job, since_ns):
            for folder in (*job.glob("*"), job, job.parent, top):
                with contextlib.suppress(OSError):  # it is not empty
                    folder.rmdir()


def remove_topologies(since_ns: int) -> None:
    """Remove the files in which killed proxies of MPICH's launcher have left the node's topology since a time.

    They are in /tmp wherever temporary files are. A file that is there before a look that finds no living proxy of this
    user belongs to a dead one.
    """
    left = [path for path in TOPOLOGIES.glob("hydra_hwloc_xmlfile_*") if _is_ours(path, since_ns)]
    if left and not any(_is_own_proxy(folder) for folder in PROCESSES.glob("[0-9]*")):
        for path in left:
            path.unlink(missing_ok=True)


def _is_own_proxy(process: Path) -> bool:
    with contextlib.suppress(OSError):  # it ended meanwhile
        program = (process / "cmdline").read_bytes().split(b"\0")[0]  # empty once it has ended
        return process.stat().st_uid == os.getuid() and Path(os.fsdecode(program)).name == PROXY
    return False


def _is_ours(path: Path, since_ns: int) -> bool:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_uid == os.getuid() and found.st_ctime_ns >= since_ns - TICK_NS
    return False


def _used() -> set[int]:
    """Return the inodes of files in shared memory that a process has mapped or open.

    A process opens a segment, maps it and closes it, so open files are listed first. Names would not do: a semaphore
    is mapped under a temporary one.
    """
    device, used = MEMORY.stat().st_dev, set()
    numbers = f"{os.major(device):02x}:{os.minor(device):02x}"
    for folder in PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for handle in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found = handle.stat()
                    if found.st_dev == device:
                        used.add(found.st_ino)
            for line in _maps(folder):
                _, _, _, of_device, inode, *_ = line.split(maxsplit=5)
                if of_device == numbers:
                    used.add(int(inode))
    return used


def _maps(process: Path) -> list[str]:
    """Return the lines of a process's map; files in it may have any name, but the kernel escapes the ends of lines."""
    return os.fsdecode((process / "maps").read_bytes()).split("\n")[:-1]


@contextlib.contextmanager
def guarded(mark: str, will: Will) -> Iterator[None]:
    """Start a guard, which acts if this process is killed.

    It kills the leftover processes at most `GRACE_S` later, removes their shared memory, and carries out the will.
    """
    if not PROCESSES.is_dir():
        yield
        return
    guard = subprocess.Popen(
        [sys.executable, "-P", __file__, mark, str(time.time_ns())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals of the terminal do not reach it
        pass_fds=will.kept,
    )
    assert guard.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # somebody has killed it
        guard.stdin.write(json.dumps(will).encode() + b"\n")
        guard.stdin.flush()
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


def _guard(mark: str, since_ns: int) -> None:
    will = Will(*json.loads(sys.stdin.readline() or "[]"))
    sys.stdin.read()  # returns when the process at the other end has ended
    deadline_s = time.monotonic() + GRACE_S
    while find(mark) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    kill(mark)
    remove_left(since_ns)
    if will.argv:
        with contextlib.suppress(OSError):
            subprocess.run(will.argv, stdin=subprocess.DEVNULL, check=False)
    for path in will.removed:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            if not will.kept or any(os.path.samestat(os.fstat(handle), os.stat(path)) for handle in will.kept):
                os.unlink(path)


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]))
