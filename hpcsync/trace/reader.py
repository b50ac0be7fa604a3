"""Reading a trace, whatever became of the run that wrote it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from hpcsync.trace.schema import ENUMS, FORMAT, FORMAT_VERSION, STATUSES, TABLES

if TYPE_CHECKING:
    import pandas

    from hpcsync.config.job import Job

SLICE_ROWS = 100_000  # of the widest table 14 MB

_WORDS = {column: {int(code): code.name.lower() for code in codes} for column, codes in ENUMS.items()}


class TraceError(Exception):
    """A file that is not a trace, or not one that this version can read; told in one line that names the file."""


@dataclass(frozen=True)
class _Described:
    """What a trace says of its run.

    attributes: the root attributes; text is str, numbers are Python's.
    """

    path: Path
    attributes: dict[str, Any]

    @property
    def status(self) -> str:
        return str(self.attributes["status"])

    @property
    def finished(self) -> bool:
        """Whether the run came to its end, so that nothing may be missing."""
        return self.status == "finished"

    @property
    def n_workers(self) -> int:
        return int(self.attributes["n_workers"])

    @cached_property
    def job(self) -> Job:
        """The job that was run. Raises TraceError if this version cannot read it."""
        from hpcsync.config.job import Job, JobError

        try:
            return Job.from_toml(self.attributes["job"])
        except JobError as error:
            raise TraceError(f"{self.path}: its job cannot be read: {error}") from None


@dataclass(frozen=True)
class Trace(_Described):
    """A trace in memory.

    tables: structured arrays of shape (n_rows,) by table name, with the columns of `schema`. Those of a run that did
            not finish end together, at a flush. Pushes are in the order of `seq`, all others as written.
    """

    tables: dict[str, np.ndarray]

    def slices(self, table: str) -> Iterator[np.ndarray]:
        """All rows of a table in one slice, for what can also read a TraceFile."""
        yield self.tables[table]

    def frame(self, table: str) -> pandas.DataFrame:
        """One table as a pandas.DataFrame, with words for what is a code in the file. Needs pandas."""
        import pandas

        frame = pandas.DataFrame(self.tables[table])
        for name in frame.columns:
            if name in _WORDS:
                frame[name] = frame[name].map(_WORDS[name])
            elif self.tables[table].dtype[name].kind == "S":
                frame[name] = frame[name].str.decode("utf-8", errors="replace")
        return frame


@dataclass(frozen=True)
class TraceFile(_Described):
    """A trace in its open file, for what is too much for the memory. Rows are as written: pushes not in order of `seq`.

    n_rows:     how many rows of each table belong together, after the last flush.
    slice_rows: how many rows a slice has; a table's last one may have fewer.
    """

    file: h5py.File
    n_rows: dict[str, int]
    slice_rows: int

    def slices(self, table: str) -> Iterator[np.ndarray]:
        """The rows of a table, slice by slice; of a table without rows one empty slice."""
        for begin in range(0, max(self.n_rows[table], 1), self.slice_rows):
            yield self.read(table, begin, begin + self.slice_rows)

    def read(self, table: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """The rows of a table from `begin` up to, without it, `end`; up to the last one if that is None."""
        last = self.n_rows[table]
        with _telling_damage(self.path):
            return self.file[table][begin : last if end is None else min(end, last)]


def trace_path(path: str | Path) -> Path:
    """The trace's own file: `path`, or the trace in it where `path` is the folder of a run."""
    path = Path(path)
    return path / "trace.h5" if path.is_dir() else path


@contextmanager
def opened(path: str | Path, slice_rows: int = SLICE_ROWS) -> Iterator[TraceFile]:
    """A trace to be read in slices, for a `with` block. `path` is the trace, or the folder of its run.

    Raises TraceError if the file is none or cannot be opened.
    """
    path = trace_path(path)
    with _open(path, "r") as file:
        attributes = {name: _plain(value) for name, value in file.attrs.items() if name != "flushed_rows"}
        with _telling_damage(path):
            flushed = file.attrs["flushed_rows"]
            n_rows = {table: int(flushed[table]) for table in TABLES}
        for name in ("status", "n_workers", "paradigm", "job"):
            if name not in attributes:
                raise TraceError(f"{path}: a damaged trace: the attribute {name} is missing")
        yield TraceFile(path, attributes, file, n_rows, slice_rows)


def load(path: str | Path) -> Trace:
    """Read a whole trace. `path` is the trace, or the folder of its run.

    Raises TraceError if the file is none or cannot be opened.
    """
    with opened(path) as file:
        tables = {table: file.read(table) for table in TABLES}
    tables["pushes"] = tables["pushes"][np.argsort(tables["pushes"]["seq"], kind="stable")]
    return Trace(file.path, file.attributes, tables)


def settle(path: str | Path, status: str) -> bool:
    """Say what became of a run that could not say so itself: for a launcher whose ranks have died.

    Sets the status of a trace that is `running` or `interrupted`; a `finished` or `failed` one stays as it is, and a
    missing file is no error: ranks can die before there is one. Returns whether the status was set.

    Raises TraceError for a file that is not a trace, that another process still writes, or that cannot be written.
    """
    if status not in STATUSES or status == "running":
        raise ValueError(f"status is {status!r}; must be one of {', '.join(STATUSES[1:])}")
    path = Path(path)
    if not path.exists():
        return False
    try:
        with _open(path, "r+") as file:
            open_end = file.attrs.get("status") in ("running", "interrupted")
            if open_end:
                file.attrs.modify("status", status)
    except (OSError, RuntimeError) as error:
        raise TraceError(f"{path}: its status cannot be written: {_first_line(error)}") from None
    return open_end


def _open(path: Path, mode: str) -> h5py.File:
    """The file, known to be a trace that this version can read."""
    if not path.is_file():
        raise TraceError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    if not h5py.is_hdf5(path):
        raise TraceError(f"{path}: not a trace (not an HDF5 file)")
    try:
        file = h5py.File(path, mode, locking="best-effort")
    except OSError as error:
        raise TraceError(f"{path}: cannot be opened: {_first_line(error)}") from None
    if file.attrs.get("format") != FORMAT:
        problem = f"not a trace (an HDF5 file whose format is not {FORMAT})"
    elif file.attrs.get("format_version") != FORMAT_VERSION:
        version = file.attrs.get("format_version")
        problem = f"a trace of format version {version}; this hpcsync reads version {FORMAT_VERSION}"
    else:
        return file
    file.close()
    raise TraceError(f"{path}: {problem}")


@contextmanager
def _telling_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError, OSError) as error:
        raise TraceError(f"{path}: a damaged trace: {_first_line(error)}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return value.item() if isinstance(value, np.generic) else value


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return (str(error.args[0]) if error.args else type(error).__name__).splitlines()[0]
