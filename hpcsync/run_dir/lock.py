"""One run in one folder: a lock that a run holds from before its ranks start until its last process has ended.

The lock is a file, `run.lock` in the run's folder, that names its owner. It appears complete and already locked: it is
written under another name, locked with flock(2) and then linked, so that exactly one of several runs wins. The kernel
releases flock when the last process that has the file open ends, however it ends; what is left is a file that nobody
locks, and the next run removes it.

Not every file system has flock between hosts: NFS and GPFS do, Lustre does if it is mounted with `flock`, others lock
within a node or not at all. So that a run of another host is recognised there too, the owner touches the file every
`BEAT_S`. A lock that flock does not protect, and whose owner or its ranks may live, counts as left behind only after
`PATIENCE_S` without a touch.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import errno
import fcntl
import json
import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcsync.config.errors import JobError
from hpcsync.system import rank_environment

NAME = "run.lock"
OWNER_BYTES = 4096  # more than an owner has
BEAT_S = 5.0
PATIENCE_S = 4 * BEAT_S
CLEARING_S = 60.0  # in which the guard of a killed process ends its ranks and settles its trace
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # what file systems without flock answer


@dataclass(frozen=True)
class Owner:
    """Process that holds a lock.

    Parameters
    ----------
    token
        Unique text of this lock.
    host
        Name of the host.
    kernel
        Identity of the host's kernel since its start; "" if unknown.
    processes
        Identity of the process namespace; "" if unknown.
    pid
        Process id.
    started
        When the process started, in clock ticks since the kernel did; "" if unknown.
    job
        Id of the batch job; "" outside of one.
    restarts
        How often the batch system has restarted the job.
    """

    token: str
    host: str
    kernel: str
    processes: str
    pid: int
    started: str
    job: str
    restarts: str

    def __str__(self) -> str:
        job = f" (job {self.job})" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"


class Verdict(enum.Enum):
    """What can be said about the owner of a lock."""

    ALIVE = enum.auto()
    DEAD = enum.auto()
    UNKNOWN = enum.auto()  # watch whether it touches the lock


def this_process() -> Owner:
    """Return this process as the owner of a new lock."""
    pid = os.getpid()
    return Owner(
        token=uuid.uuid4().hex[:12],
        host=platform.node(),
        kernel=_text(Path("/proc/sys/kernel/random/boot_id")),
        processes=_link(Path("/proc/self/ns/pid")),
        pid=pid,
        started=start_of(pid),
        job=rank_environment.batch_job(),
        restarts=os.environ.get("SLURM_RESTART_COUNT", "0"),
    )


def start_of(pid: int) -> str:
    """Return when a process of this host started, in clock ticks since the kernel did; "" if there is none."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def judge(owner: Owner | None, mine: Owner, start: str, *, locked: bool | None) -> Verdict:
    """Judge the owner of a lock.

    Parameters
    ----------
    owner
        The owner; None if the file does not say.
    mine
        This process.
    start
        Start of the process with the owner's id on this host; "" if there is none.
    locked
        Whether flock protects the lock; None if the file system has none.
    """
    if locked:
        return Verdict.ALIVE
    if owner is None:
        return Verdict.UNKNOWN
    if owner.job and owner.job == mine.job and owner.restarts != mine.restarts:
        return Verdict.DEAD  # a batch system runs a job once at a time
    if owner.kernel and owner.kernel == mine.kernel:
        if locked is False:  # flock is exact on one kernel
            return Verdict.DEAD
        if owner.processes and owner.processes == mine.processes and start and start == owner.started:
            return Verdict.ALIVE
    return Verdict.UNKNOWN  # also if only its guard lives, which ends its ranks and then deletes the lock


class Lock:
    """A lock that this process holds.

    Parameters
    ----------
    path
        The file.
    owner
        This process.
    handle
        Descriptor of the file. Whoever inherits it holds the lock too.
    """

    def __init__(self, path: Path, owner: Owner, handle: int) -> None:
        self.path = path
        self.owner = owner
        self.handle = handle
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def release(self) -> None:
        """Delete the file and close it. Repeated calls have no effect, and neither has one in a forked process."""
        if self._released.is_set() or os.getpid() != self.owner.pid:
            return
        self._released.set()
        with contextlib.suppress(OSError):
            if _same(self.handle, self.path):
                self.path.unlink()
        os.close(self.handle)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.path)


_held: dict[Path, Lock] = {}
_of_launcher = ""  # token of the lock that the process which started this rank holds


def inherit(token: str) -> None:
    """Note the lock under which this rank was started."""
    global _of_launcher
    _of_launcher = token


def hold(folder: Path) -> Lock | None:
    """Lock the folder of a run for this process, until `release` or its end.

    Returns
    -------
    Lock or None
        The lock, also if this process held it already; None if the process that started this rank holds it.

    Raises
    ------
    JobError
        If another run holds it.
    OSError
        If the folder cannot be written.
    """
    path = folder.absolute() / NAME
    if path in _held:
        return _held[path]
    if _of_launcher and (owner := _owner(path)) is not None and owner.token == _of_launcher:
        return None
    _held[path] = lock = take(path, this_process())
    if len(_held) == 1:
        atexit.register(release_all)
    return lock


def release(folder: Path) -> None:
    """Release the lock of this folder, if this process holds it."""
    if (lock := _held.pop(folder.absolute() / NAME, None)) is not None:
        lock.release()


def release_all() -> None:
    """Release all locks of this process."""
    atexit.unregister(release_all)
    while _held:
        _held.popitem()[1].release()


@contextlib.contextmanager
def releasing() -> Iterator[None]:
    """Release all locks of this process at the end."""
    try:
        yield
    finally:
        release_all()


@contextlib.contextmanager
def released_on_error() -> Iterator[None]:
    """Release all locks of this process after an exception."""
    try:
        yield
    except BaseException:
        release_all()
        raise


def take(path: Path, mine: Owner) -> Lock:
    """Take a lock, after removing one that was left behind. Raises JobError if another process holds it."""
    deadline_s, waits = time.monotonic() + CLEARING_S, False
    while (handle := _created(path, mine)) is None:
        try:
            other = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            owner, locked = _owner_in(os.pread(other, OWNER_BYTES, 0)), _busy(other)  # that at the path may be another
            start = start_of(owner.pid) if owner is not None else ""
            verdict = judge(owner, mine, start, locked=locked)
            if verdict is Verdict.UNKNOWN:
                verdict = _watched(path, owner)
            if verdict is Verdict.ALIVE:
                if locked and _is_being_cleared(owner, mine, start) and time.monotonic() < deadline_s:
                    if not waits:
                        print(f"hpcsync: {path}: waiting for the ranks of {owner} to end", file=sys.stderr)
                    waits = True
                    time.sleep(0.1)
                    continue
                raise _refused(path, owner)
            with contextlib.suppress(FileNotFoundError):
                if _same(other, path):  # nobody else removes it meanwhile: this process has locked it
                    path.unlink()
        finally:
            os.close(other)
    return Lock(path, mine, handle)


def _created(path: Path, owner: Owner) -> int | None:
    """Create the lock, locked and complete from the first moment on; None if there is one."""
    draft = path.with_name(f"{path.name}.{owner.token}")
    handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.write(handle, json.dumps(asdict(owner)).encode())
        _busy(handle)
        try:
            os.link(draft, path)
        except FileExistsError:
            os.close(handle)
            return None
        except OSError:  # a file system without links: the lock is incomplete for a moment
            os.close(handle)
            return _created_in_place(path, owner)
    finally:
        draft.unlink()
    return handle


def _created_in_place(path: Path, owner: Owner) -> int | None:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return None
    _busy(handle)
    os.write(handle, json.dumps(asdict(owner)).encode())
    return handle


def _busy(handle: int) -> bool | None:
    """Lock an open file; return True if another process has locked it, None if the file system has no such locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None
    return False


def _is_being_cleared(owner: Owner | None, mine: Owner, start: str) -> bool:
    """Return True if the owner has ended on this host, and only its guard still holds the lock."""
    return (
        owner is not None
        and (owner.kernel, owner.processes) == (mine.kernel, mine.processes) != ("", "")
        and (start != owner.started)
    )


def _watched(path: Path, owner: Owner | None) -> Verdict:
    """Wait until the lock is touched or vanishes, or has not been touched for long."""
    who = "a process" if owner is None else str(owner)
    print(f"hpcsync: {path}: waiting {PATIENCE_S:g} s to see whether {who} still runs", file=sys.stderr, flush=True)
    before, deadline_s = _touched(path), time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        time.sleep(BEAT_S / 10)
        if (now := _touched(path)) != before:
            return Verdict.DEAD if now is None else Verdict.ALIVE
    return Verdict.DEAD


def _touched(path: Path) -> int | None:
    """Return the modification time as the file server has it: opening a file refreshes what this host remembers."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return os.fstat(handle).st_mtime_ns
    finally:
        os.close(handle)


def _owner(path: Path) -> Owner | None:
    with contextlib.suppress(OSError):
        return _owner_in(path.read_bytes())
    return None


def _owner_in(content: bytes) -> Owner | None:
    try:
        return Owner(**json.loads(content))
    except (ValueError, TypeError):
        return None


def _same(handle: int, path: Path) -> bool:
    return os.path.samestat(os.fstat(handle), path.stat())


def _refused(path: Path, owner: Owner | None) -> JobError:
    who = "another process" if owner is None else str(owner)
    return JobError(f"out {path.parent}: must be a folder that no other process uses: {who} holds {path.name}")


def _text(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes()).strip()  # a process may have any name
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
