"""What a launch writes, without what the MPI's launcher and library say about an end that the ranks have explained.

A notice of the launcher or the library is held back until the launch has ended, and dropped if it says nothing new:
that a rank has ended the job on purpose, after a rank has said why, or that ranks were ended, after they were told to.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from typing import IO, NamedTuple

LONGEST = 20  # lines of a notice
SHOW_CURSOR = b"\x1b[?25h"
DRAIN_S = 2.0  # in which what is left in the pipes is read when all processes have ended


class Notice(NamedTuple):
    """on_purpose: a rank has aborted the job or ended with a status; otherwise a signal has ended it, for example."""

    text: bytes
    on_purpose: bool


class Kind(NamedTuple):
    """A notice of several lines, which is recognised by its second one."""

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
ABORTED = re.compile(rb"Abort\(-?\d+\) on node \d+ .*application called MPI_Abort")  # MPICH
NOISE = re.compile(rb"\[warn\] Epoll ")  # of Open MPI's launcher, while it ends
EXPLANATIONS = (b"hpcsync: ", b"Traceback (most recent call last)")
TO_BE_READ_WHOLE = (b"-" * 70, b"=" * 70, b"Abort(", b"[warn] Epoll ", *EXPLANATIONS)


class NoticeFilter:
    """Of one stream. Text passes at once, a part of a line too, unless the line may be one of those that matter here.

    notices: what was held back. explained: whether a rank has said what went wrong.
    """

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.explained = False
        self._line = b""  # its end is not there yet, and its beginning is held back
        self._in_line = False  # its end is not there yet, and its beginning has passed
        self._block: list[bytes] = []  # lines that are, or may be, the beginning of a notice
        self._kind: Kind | None = None  # of the block's first line

    def feed(self, data: bytes) -> bytes:
        """What of this, and of what was held back, is to be written now."""
        return b"".join(map(self._part, re.findall(rb"[^\n]*\n|[^\n]+", data)))

    def end(self) -> bytes:
        """What is left to be written when the stream has ended."""
        line, self._line = self._line, b""
        return (self._whole(line) if line else b"") + self._released()

    def _part(self, part: bytes) -> bytes:
        """Of a line, up to its end or as much as there is."""
        ends = part.endswith(b"\n")
        if self._in_line:
            self._in_line = not ends
            return part
        line, self._line = self._line + part, b""
        if ends:
            return self._whole(line)
        if self._block or any(line.startswith(b) or b.startswith(line) for b in TO_BE_READ_WHOLE):
            self._line = line
            return b""
        self._in_line = True
        return self._passed(line)

    def _whole(self, line: bytes) -> bytes:
        if self._kind is not None and self._belongs(self._kind, line):
            self._block.append(line)
            if len(self._block) > 2 and self._kind.last.match(line.rstrip()):
                self.notices.append(Notice(b"".join(self._block), self._kind.on_purpose))
                self._block, self._kind = [], None
            return b""
        released = self._released()
        self._kind = next((kind for kind in KINDS if kind.first.match(line.rstrip())), None)
        if self._kind is not None:
            self._block = [line]
        elif ABORTED.match(line):
            self.notices.append(Notice(line, True))
        elif not NOISE.match(line):
            return released + self._passed(line)
        return released

    def _belongs(self, kind: Kind, line: bytes) -> bool:
        """Whether the block with this line may still be a notice."""
        return kind.second.match(line) is not None if len(self._block) == 1 else len(self._block) < LONGEST

    def _released(self) -> bytes:
        """The block, which is no notice."""
        block, self._block, self._kind = self._block, [], None
        return b"".join(map(self._passed, block))

    def _passed(self, line: bytes) -> bytes:
        self.explained |= line.startswith(EXPLANATIONS)
        return line


class Output:
    """Both streams of a launch, which go through this process: threads read them from pipes."""

    def __init__(self) -> None:
        self._filters = [NoticeFilter(), NoticeFilter()]
        self._threads: list[threading.Thread] = []

    def forward(self, out: IO[bytes], err: IO[bytes]) -> None:
        """From now on write what comes from these pipes, where this process writes."""
        for pipe, target, notices in zip((out, err), (1, 2), self._filters, strict=True):
            thread = threading.Thread(target=_forward, args=(pipe, target, notices), daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self, stopped: bool) -> None:
        """Write the rest, and of the notices those that say something new. stopped: the ranks were told to end."""
        for thread in self._threads:
            thread.join(DRAIN_S)
        explained = stopped or any(found.explained for found in self._filters)
        for notice in (notice for found in self._filters for notice in found.notices):
            if not (explained if notice.on_purpose else stopped):
                _write(2, notice.text)
        if os.isatty(1):
            _write(1, SHOW_CURSOR)  # ranks that were killed while they showed a bar have left it hidden


def _forward(pipe: IO[bytes], target: int, notices: NoticeFilter) -> None:
    with pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            # Open MPI's launcher writes a zero byte after its notice of an abort.
            _write(target, notices.feed(data.replace(b"\0", b"") if target == 2 else data))
    _write(target, notices.end())


def _write(target: int, data: bytes) -> None:
    """All of it. Nobody may be there to read it: then the ranks go on in silence."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(target, data) :]
