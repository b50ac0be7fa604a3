"""Programs as users start them: with a time limit, and with proof that they leave no process behind.

Every program gets a mark into its environment, which all that it starts inherits: whatever carries it belongs to it,
even when its parent is long dead.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from hpcsync.system import launched_ranks, launcher, rank_environment

MARK = "HPCSYNC_TEST"
LIMIT_S = 240.0  # on a busy machine
GONE_S = 60.0  # likewise; what is gone at once on a free one takes 6 s where a core is five times slower
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def hpcsync(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "hpcsync", *map(str, arguments)]


def mpiexec(n: int, *arguments: object) -> list[str]:
    """n ranks of this Python, started without `hpcsync run`. It needs the environment that `launcher` makes."""
    return [*launcher.mpiexec(), "-n", str(n), sys.executable, *map(str, arguments)]


class Program:
    """A program that has been started. `out`, `err`: what it has said so far."""

    def __init__(self, argv: list[str], cwd: Path | None, environ: Mapping[str, str]) -> None:
        self._mark = uuid.uuid4().hex
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self._session = tempfile.TemporaryDirectory(prefix="mpiexec-")  # as `launcher` gives each of its own
        session = {rank_environment.SESSION_FOLDER: self._session.name} if argv[:1] == launcher.mpiexec()[:1] else {}
        self.process = subprocess.Popen(
            argv,
            cwd=cwd,
            env={**environ, **session, MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    @property
    def out(self) -> str:
        return _text(self._out)

    @property
    def err(self) -> str:
        return _text(self._err)

    @property
    def complaints(self) -> list[str]:
        """The lines of `err` except about stalls, which happen on a busy machine."""
        stalls = (" stalls (", " continues: ", "hpcsync:   blocked: ")
        return [line for line in self.err.splitlines() if not any(words in line for words in stalls)]

    @property
    def status(self) -> int:
        """The exit status; waits for it."""
        return self.process.wait(LIMIT_S)

    def left(self) -> list[psutil.Process]:
        """Every process of this program that is alive."""
        needle = f"{MARK}={self._mark}".encode()
        return list(_processes(pid for pid, environ in _environments() if needle in environ))

    def ranks(self, rank: int) -> list[psutil.Process]:
        """The process that is this rank, once it has been started and until it ends."""
        needles = {f"{name}={rank}".encode() for name in RANK_VARIABLES}
        own = f"{MARK}={self._mark}".encode()
        pids = [pid for pid, environ in _environments() if own in environ and needles & set(environ)]
        ranks = []
        for process in _processes(pids):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if "python" in process.name() and process.ppid() not in pids:  # not what the rank has started
                    ranks.append(process)
        return ranks

    def rank(self, rank: int) -> psutil.Process:
        """The process that is this rank."""
        ranks = self.ranks(rank)
        assert len(ranks) == 1, f"rank {rank}: {ranks}"
        return ranks[0]

    def hold(self, rank: int) -> psutil.Process:
        """Stop this rank, and wait until `hpcsync run` has seen it."""
        process = self.rank(rank)
        process.suspend()
        time.sleep(4 * launched_ranks.LOOK_S)
        return process

    def wait_for(self, sign: Callable[[Program], bool]) -> None:
        """Wait until what the program has said shows this; it must not end before."""
        deadline_s = time.monotonic() + LIMIT_S
        while not sign(self):
            assert self.process.poll() is None, f"ended with {self.status}:\n{self.out}\n{self.err}"
            assert time.monotonic() < deadline_s, f"in vain after {LIMIT_S} s:\n{self.out}\n{self.err}"
            time.sleep(0.05)

    def gone_s(self) -> float:
        """Wait until no process of this program is left; the seconds that it took."""
        begin_s = time.monotonic()
        while (left := self._alive()) and time.monotonic() < begin_s + GONE_S:
            time.sleep(0.05)
        assert not left, f"left behind after {GONE_S} s: {left}\n{self.out}\n{self.err}"
        return time.monotonic() - begin_s

    def _alive(self) -> list[psutil.Process]:
        self.process.poll()  # a zombie of ours is no process left behind
        return self.left()

    def kill(self) -> None:
        for process in self.left():
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                process.send_signal(signal.SIGKILL)
        self.process.wait(GONE_S)


@contextmanager
def started(argv: list[str], cwd: Path | None = None, environ: Mapping[str, str] = os.environ) -> Iterator[Program]:
    """The program while it runs; at the end it is waited for, and whatever is left of it is an error, and killed."""
    program = Program(argv, cwd, environ)
    try:
        yield program
        assert program.status is not None
        program.gone_s()
    finally:
        program.kill()


def ended(argv: list[str], cwd: Path | None = None, environ: Mapping[str, str] = os.environ) -> Program:
    """The program after its end."""
    with started(argv, cwd, environ) as program:
        pass
    return program


def _processes(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """Yield the processes of these that have not ended meanwhile."""
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile, or belongs to somebody else
            continue
        if environ != [b""]:  # a zombie has none
            yield int(folder.name), environ


def _text(file: tempfile._TemporaryFileWrapper[bytes]) -> str:
    return os.pread(file.fileno(), 1 << 22, 0).decode(errors="replace")
