"""Standard output whose reader may leave, as in `hpcsync simulate JOB | head -1`, or whose disk may be full."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

READER_LEFT = 128 + signal.SIGPIPE  # exit status that shells give a program which SIGPIPE has ended


class _Output(io.FileIO):
    """Output that accepts all data; after an error of writing, such as that its reader has left, data is dropped."""

    error: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Write data; drop it after an error."""
        try:
            return super().write(data) or 0
        except OSError as error:
            self.error = error
            return len(data)

    @property
    def reader_left(self) -> bool:
        return isinstance(self.error, BrokenPipeError)


def reader_left() -> bool:
    """Return True if the reader of the standard output has left, as far as a write has shown."""
    return isinstance(raw := getattr(getattr(sys.stdout, "buffer", None), "raw", None), _Output) and raw.reader_left


def prepare() -> None:
    """Prepare the standard streams for any command.

    The null device takes the place of closed ones; else another file would get their number. Characters that the
    encoding of the standard output lacks, such as those of a file's name, are written as escape sequences.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if os.environ.get("COLUMNS") == "0":  # unknown; rich would print nothing
        del os.environ["COLUMNS"]


def is_terminal() -> bool:
    """Return True if the standard output is a terminal on which lines can change."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def at_least_80_columns(console: Console) -> Console:
    """Return the console, widened for tables: a narrower terminal breaks their lines, and no number is cut off."""
    console.width = max(console.width, 80)
    return console


@contextmanager
def may_fail() -> Iterator[None]:
    """Let a command come to its end although nothing can be written any more, so that no run is lost.

    If the reader has left, the command then exits with `READER_LEFT` in place of 0; after another error it says so in
    one line and exits with 1 in place of 0. The output is replaced unless it is a terminal.
    """
    try:
        number = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # it is no file
        yield
        return
    if os.isatty(number):
        yield
        return
    own, output = sys.stdout, _Output(number, "wb", closefd=False)
    by_line = getattr(own, "write_through", False)  # with PYTHONUNBUFFERED a line is written when it is printed
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(output), own.encoding, own.errors, line_buffering=by_line)
    status: Any = 0
    try:
        yield
    except SystemExit as error:
        status = error.code
    sys.stdout.flush()
    sys.stdout = own
    if output.error is not None and not output.reader_left:
        print(f"hpcsync: standard output: {output.error.strerror}", file=sys.stderr)
        sys.exit(status or 1)
    sys.exit(status or (READER_LEFT if output.reader_left else 0))
