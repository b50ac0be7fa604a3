"""Files of a run: there as a whole or not at all, and what the system refuses told in one line that names the file."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class NotWritten(OSError):
    """A file of the run cannot be written: a full disk, most often."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Whatever is raised because the system refuses to write this file becomes NotWritten; that a file is there already
    stays as it is."""
    try:
        yield
    except FileExistsError:
        raise
    except Exception as error:
        if (number := _number(error)) is None:
            raise
        raise NotWritten(number, os.strerror(number), str(path)) from None


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file that is then at `path` and has reached the disk, or is not there at all.

    Raises NotWritten.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    with naming(path), removing(unfinished):
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)


@contextmanager
def removing(path: Path) -> Iterator[None]:
    """After an exception the file is not there, as far as it can be helped."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def aside(path: Path) -> Path:
    """A free name for a file that another is to replace: trace.h5 becomes trace.lost-1.h5, or the next number."""
    return next(p for i in itertools.count(1) if not (p := path.with_suffix(f".lost-{i}{path.suffix}")).exists())


def sync(path: Path) -> None:
    """Let a file, or what a folder lists, reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _number(error: BaseException | None) -> int | None:
    """The system's number for what went wrong: libraries hide it in their words, or raise something of their own."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"errno = (\d+)|os error (\d+)", str(error))  # HDF5's words, and safetensors'
    return int(found[1] or found[2]) if found else _number(error.__context__)  # torch's own hide what the file raised
