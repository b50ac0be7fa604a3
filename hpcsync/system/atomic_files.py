"""Files of a run: written completely or not at all; errors of the system name the file in one line."""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class NotWritten(OSError):
    """A file of the run cannot be written, most often because the disk is full."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Convert any exception that the system raised while this file was written into NotWritten.

    FileExistsError and exceptions without a system error number propagate unchanged.
    """
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
    """Write a file completely or not at all; a pipe or a device is written directly.

    Parameters
    ----------
    path : Path
        File to be created or replaced.

    Yields
    ------
    Path
        Temporary file to write to. On exit it is flushed to disk and renamed to `path`; after an exception it is
        deleted. `path` itself if it exists and is no file, such as /dev/stdout.

    Raises
    ------
    NotWritten
        If the system refuses to write.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # unlike Path.exists, False where the system refuses to look
        with naming(path):
            yield path
        return
    unfinished = path.with_name(f"{path.name}.unfinished")
    with naming(path), removing(unfinished):
        with permitted(unfinished):
            yield unfinished
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)


def replace(path: Path, text: str) -> None:
    """Create or replace a file as a whole. It is not flushed to the disk."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with removing(unfinished):
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)


def try_to_write(path: Path) -> None:
    """Raise NotWritten if `whole` could not write a file, before the work whose result it gets. Nothing is created."""
    with naming(path):
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():  # a pipe or a device
            return
        folder = next(above for above in path.absolute().parents if above.exists())
        tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def permitted(path: Path) -> Iterator[None]:
    """Give a new file the permissions of the umask; safetensors alone creates files for their owner only."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


@contextmanager
def removing(path: Path) -> Iterator[None]:
    """Delete the file after an exception, if possible."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def is_folder(path: Path) -> bool:
    """Return whether there is such a folder; False, unlike Path.is_dir, where the system refuses to look."""
    return os.path.isdir(path)


def below(folder: Path, name: str) -> list[Path]:
    """Return the files of this name in a folder and in those below it; unlike Path.rglob if some vanish meanwhile."""
    return sorted(Path(above, name) for above, _, files in os.walk(folder) if name in files)


def aside(path: Path) -> Path:
    """Return a free name to move a file to: trace.lost-1.h5 for trace.h5, or the next number."""
    return next(p for i in itertools.count(1) if not (p := path.with_suffix(f".lost-{i}{path.suffix}")).exists())


def sync(path: Path) -> None:
    """Flush a file to disk, or the entries of a folder where the file system can do so; not all shared folders can."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(handle)


def _number(error: BaseException | None) -> int | None:
    """Return the system's error number, which libraries put into their messages or into the causes of their errors."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"errno = (\d+)|os error (\d+)", str(error))  # formats of HDF5 and safetensors
    return int(found[1] or found[2]) if found else _number(error.__context__)  # torch hides the exception of the file
