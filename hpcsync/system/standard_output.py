"""Standard output into a pipe whose reader may leave, as in `hpcsync simulate JOB | head -1`."""

from __future__ import annotations

import io
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import fstat
from typing import Any

READER_LEFT = 128 + signal.SIGPIPE  # exit status that shells give a program which SIGPIPE has ended


class _Pipe(io.FileIO):
    """Pipe that accepts all data; once its reader has left, the data is dropped."""

    reader_left = False

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Write data; drop it once the reader has left."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            self.reader_left = True
            return len(data)


def reader_left() -> bool:
    """Return True if the reader of the standard output has left, as far as a write has shown."""
    return isinstance(raw := getattr(getattr(sys.stdout, "buffer", None), "raw", None), _Pipe) and raw.reader_left


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Let a command come to its end, so that no run is lost, and then exit with `READER_LEFT` in place of 0.

    The output is replaced only if it is a pipe.
    """
    try:
        is_pipe = stat.S_ISFIFO(fstat(sys.stdout.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):  # there is no standard output, or it is no file
        is_pipe = False
    if not is_pipe:
        yield
        return
    own, pipe = sys.stdout, _Pipe(sys.stdout.fileno(), "wb", closefd=False)
    by_line = getattr(own, "write_through", False)  # with PYTHONUNBUFFERED a line is written when it is printed
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(pipe), own.encoding, own.errors, line_buffering=by_line)
    status: Any = 0
    try:
        yield
    except SystemExit as error:
        status = error.code
    sys.stdout.flush()
    sys.stdout = own
    sys.exit(status or (READER_LEFT if pipe.reader_left else 0))
