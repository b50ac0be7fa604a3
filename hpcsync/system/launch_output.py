"""Output of a launch, without redundant notices of the MPI launcher and library about its end.

A notice is buffered until the launch has ended. It is dropped if it adds nothing: that a rank ended the job on purpose,
or that others lost the connection to it, if a rank has printed the reason; or that ranks were ended, if hpcsync ended
them.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import IO, NamedTuple

LONGEST = 20  # lines of a notice, at most
SHOW_CURSOR = b"\x1b[?25h"
DRAIN_S = 2.0  # time to wait for the rest of the pipes when all processes have ended
POLL_S = 0.1
SAME_ERROR_S = 3.0  # time in which rank 0 reports an error that all ranks have in common
READ_S = 1.0  # time that a rank gives the launcher to read what it has printed, before it aborts


class Notice(NamedTuple):
    """Notice of the launcher or the library.

    Attributes
    ----------
    text
        Its lines.
    on_purpose
        True if a rank has aborted the job, ended with a status, or disconnected; False if it ended otherwise, such as
        by a signal.
    """

    text: bytes
    on_purpose: bool


class Kind(NamedTuple):
    """Kind of notice of several lines, recognised by its second line."""

    first: re.Pattern[bytes]
    second: re.Pattern[bytes]
    last: re.Pattern[bytes]
    on_purpose: bool


RULE = re.compile(rb"-{70,}$")
KINDS = (
    Kind(  # Open MPI
        RULE,
        re.compile(
            rb"MPI_ABORT was invoked|(prterun|mpirun) has exited due to process rank|Primary job  terminated normally"
            rb"|(prterun|mpirun) detected that one or more processes exited with non-zero"
            rb"|An MPI communication peer process has unexpectedly disconnected"
        ),
        RULE,
        True,
    ),
    Kind(  # MPICH
        re.compile(rb"={70,}$"),
        re.compile(rb"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"),
        re.compile(rb"Please see the FAQ page"),
        False,
    ),
)
ABORTED = re.compile(  # MPICH; Open MPI, of ranks that abort after the first, some seconds later
    rb"Abort\(-?\d+\) on node \d+ .*application called MPI_Abort|\d+ more process.* help-mpi-api\.txt / mpi-abort$"
)
# Open MPI between hosts, of a rank that is ended while the connection to its daemon closes: six lines with one
# beginning, between which other ranks may print theirs.
CLOSED = re.compile(rb"(\[[\w.-]+:\d+\] \*\*\* )An error occurred in Socket closed$")
MAYBE_CLOSED = re.compile(rb"\[[\w.-]*(:\d*)?$|\[[\w.-]+:\d+\]")
IN_A_LINE = re.compile(rb"(hpcsync: .*[^-])(-{70,}\n)$")  # Open MPI's notice before the end of a rank's line is written
NOISE = re.compile(rb"\[warn\] Epoll ")  # Open MPI's launcher, while it ends
EXPLANATIONS = (b"hpcsync: ", b"Traceback (most recent call last)")
TO_BE_READ_WHOLE = (b"-" * 70, b"=" * 70, b"Abort(", b"[warn] Epoll ", *EXPLANATIONS)


class NoticeFilter:
    """Filter of one stream. Text passes at once, even parts of a line, unless the line may belong to a notice.

    Attributes
    ----------
    notices
        Notices found so far.
    explained
        True if a rank has printed the reason of its end.
    in_line
        True if the beginning of an incomplete line has passed.
    """

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.explained = False
        self._line = b""  # buffered beginning of an incomplete line
        self.in_line = False
        self._block: list[bytes] = []  # lines that are, or may be, the beginning of a notice
        self._kind: Kind | None = None  # kind of notice that the block's first line begins
        self._closed: set[bytes] = set()  # beginnings of the lines of ranks whose connection closed
        self._lacks_end = False  # True if the end of a rank's line follows the notice that interrupts it

    def feed(self, data: bytes) -> bytes:
        """Take more data of the stream; return what can be written now."""
        return b"".join(map(self._part, re.findall(rb"[^\n]*\n|[^\n]+", data)))

    def end(self) -> bytes:
        """Return what remains to be written when the stream has ended."""
        line, self._line = self._line, b""
        return (self._whole(line) if line else b"") + self._released()

    def _part(self, part: bytes) -> bytes:
        """Take a line or the beginning of one; return what can be written now."""
        ends = part.endswith(b"\n")
        if self.in_line:
            self.in_line = not ends
            return part
        line, self._line = self._line + part, b""
        if ends:
            return self._whole(line)
        resembles = any(line.startswith(b) or b.startswith(line) for b in TO_BE_READ_WHOLE)
        if self._block or resembles or MAYBE_CLOSED.match(line):
            self._line = line
            return b""
        self.in_line = True
        return self._passed(line)

    def _whole(self, line: bytes) -> bytes:
        if self._kind is not None and self._belongs(self._kind, line):
            self._block.append(line)
            if len(self._block) > 2 and self._kind.last.match(line.rstrip()):
                self.notices.append(Notice(b"".join(self._block), self._kind.on_purpose))
                self._block, self._kind = [], None
            return b""
        if interrupted := IN_A_LINE.match(line):
            self._lacks_end = True
            return self._whole(interrupted[1] + b"\n") + self._whole(interrupted[2])
        if self._lacks_end and line == b"\n":
            self._lacks_end = False
            return self._released()
        released = self._released()
        self._kind = next((kind for kind in KINDS if kind.first.match(line.rstrip())), None)
        if closed := CLOSED.match(line.rstrip()):
            self._closed.add(closed[1])
        if self._kind is not None:
            self._block = [line]
        elif ABORTED.match(line) or line.startswith(tuple(self._closed)):
            self.notices.append(Notice(line, True))
        elif not NOISE.match(line):
            return released + self._passed(line)
        return released

    def _belongs(self, kind: Kind, line: bytes) -> bool:
        """Return True if the block, extended by this line, may still be a notice."""
        return kind.second.match(line) is not None if len(self._block) == 1 else len(self._block) < LONGEST

    def _released(self) -> bytes:
        """Return the lines of the block, which is not a notice."""
        block, self._block, self._kind = self._block, [], None
        return b"".join(map(self._passed, block))

    def _passed(self, line: bytes) -> bytes:
        self.explained |= line.startswith(EXPLANATIONS)
        return line


def write(target: int, data: bytes) -> None:
    """Write all of the data; ignore a closed stream, so that the ranks continue without output."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(target, data) :]


def print_at_once(text: str) -> None:
    """Write lines to the standard error in one piece, so that they do not mix with those of other ranks."""
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()


def let_rank_0_report(rank: int, n_ranks: int) -> None:
    """Wait on another rank as long as rank 0 may take to report the same error and to end this rank."""
    if rank > 0:
        time.sleep(SAME_ERROR_S * (1 + rank / n_ranks))  # one after the other


def wait_until_read(streams: tuple[int, ...] = (1, 2), limit_s: float = READ_S) -> None:
    """Wait until the launcher has read what this rank has printed, for `limit_s` at most.

    MPICH's launcher handles an abort before it reads the pipes of the rank, whose last lines are then lost now and
    then.

    Parameters
    ----------
    streams : tuple of int
        File descriptors; those that are no pipes are ignored.
    limit_s : float
        Seconds.
    """
    deadline_s = time.monotonic() + limit_s
    while any(map(_unread, streams)) and time.monotonic() < deadline_s:
        time.sleep(0.001)


def _unread(stream: int) -> int:
    """Return the number of bytes of a pipe that nobody has read; 0 for other files."""
    try:
        if not stat.S_ISFIFO(os.fstat(stream).st_mode):
            return 0
    except OSError:  # closed
        return 0
    return int.from_bytes(fcntl.ioctl(stream, termios.FIONREAD, bytes(4)), sys.byteorder)


class Output:
    """Both output streams of a launch, which threads of this process read from pipes and filter.

    Parameters
    ----------
    write
        Writes bytes to file descriptor 1 or 2.
    """

    def __init__(self, write: Callable[[int, bytes], None] = write) -> None:
        self._write = write
        self._filters = [NoticeFilter(), NoticeFilter()]
        self._threads: dict[int, threading.Thread] = {}
        self._reads_since_s = {1: math.inf, 2: math.inf}  # infinite while a thread writes, to a reader that may be slow

    def forward(self, out: IO[bytes], err: IO[bytes]) -> None:
        """Start to copy these pipes to the standard output and the standard error of this process."""
        for pipe, target, notices in zip((out, err), (1, 2), self._filters, strict=True):
            thread = threading.Thread(target=self._forward, args=(pipe, target, notices), daemon=True)
            thread.start()
            self._threads[target] = thread

    def end(self, stopped: bool, on_terminal: bool, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Write the rest of the streams and the notices that are not redundant.

        A reader such as a pager may take any time, unless the ranks were ended.

        Parameters
        ----------
        stopped : bool
            True if hpcsync has ended the ranks.
        on_terminal : bool
            True if the standard output is a user's terminal, on which ranks may have shown a progress bar.
        interrupted : callable
            Returns True once a slow reader is not to be waited for.
        """
        begin_s = time.monotonic()
        for target, thread in self._threads.items():
            while thread.is_alive():
                waits = not (stopped or interrupted())
                idle_s = max(begin_s, self._reads_since_s[target]) if waits else begin_s
                if time.monotonic() >= idle_s + DRAIN_S:
                    break
                thread.join(POLL_S)
        if stopped and on_terminal and self._filters[0].in_line:
            self._write(1, b"\n")  # below a bar that was not closed
        explained = stopped or any(found.explained for found in self._filters)
        for notice in (notice for found in self._filters for notice in found.notices):
            if not (explained if notice.on_purpose else stopped):
                self._write(2, notice.text)
        if on_terminal:
            write(1, SHOW_CURSOR)  # ranks that were killed while they showed a bar have left it hidden

    def _forward(self, pipe: IO[bytes], target: int, notices: NoticeFilter) -> None:
        with pipe:
            while data := self._read(pipe.fileno(), target):
                # Open MPI's launcher writes a zero byte after its notice of an abort.
                self._write(target, notices.feed(data.replace(b"\0", b"") if target == 2 else data))
        self._write(target, notices.end())

    def _read(self, pipe: int, target: int) -> bytes:
        self._reads_since_s[target] = time.monotonic()
        data = os.read(pipe, 1 << 16)
        self._reads_since_s[target] = math.inf
        return data
