"""Reading a trace, also that of a run that did not finish."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import h5py
import numpy as np

from hpcsync.config.errors import JobError, printable
from hpcsync.system.atomic_files import is_folder
from hpcsync.trace.schema import (
    ADDED,
    ATTRIBUTES,
    CHECKSUM,
    ENUMS,
    FORMAT,
    FORMAT_VERSION,
    OPTIONAL,
    READABLE_VERSIONS,
    STATUSES,
    TABLES,
    Rows,
    checksum,
    complete,
)

if TYPE_CHECKING:
    import pandas

    from hpcsync.config.job import Job

SLICE_ROWS = 100_000  # 14 MB of the widest table
MOST_RANKS = 10_000_000  # in a trace that can be read
DYING_S = 30.0  # time in which a rank that has been killed still holds its trace


class TraceError(JobError):
    """A file is no trace, or none that this version can read. The message is one line that names the file."""


class TraceInUse(TraceError):
    """Another process writes a trace: its run is under way."""


@dataclass(frozen=True)
class _Described:
    """Root attributes of a trace, which describe its run.

    Parameters
    ----------
    path
        The trace file.
    attributes
        Root attributes: str, Python numbers, or lists of these.
    """

    path: Path
    attributes: dict[str, Any]

    @property
    def status(self) -> str:
        """State of the run when the file was last written, one of `schema.STATUSES`."""
        return str(self.attributes["status"])

    @property
    def finished(self) -> bool:
        """True if the run came to its end, so that the trace is complete."""
        return self.status == "finished"

    @property
    def n_workers(self) -> int:
        """Number of workers of the run."""
        return int(self.attributes["n_workers"])

    @cached_property
    def job(self) -> Job:
        """The job that was run. Raises TraceError if this version cannot read it."""
        try:
            return _job(self.attributes["job"])
        except JobError as error:
            raise TraceError(f"{self.path}: its job cannot be read: {error}") from None


@lru_cache(maxsize=8)
def _job(text: str) -> Job:
    """Return the job, parsed once for several traces of it: parsing takes a fifth of the audit of a short trace."""
    from hpcsync.config.job import Job

    return Job.from_toml(text)


@dataclass(frozen=True)
class Trace(_Described):
    """A trace in memory.

    Parameters
    ----------
    tables
        Structured arrays of shape (n_rows,) by table name, with the columns of `hpcsync.trace.schema`. The tables of
        an unfinished run end at the same flush. Pushes are sorted by `seq`, all other tables are in the order of
        the file.
    altered
        Tables whose rows are not those that were written, by their checksums; none in a trace of format version 7.
    """

    tables: dict[str, Rows]
    altered: tuple[str, ...] = ()

    def slices(self, table: str) -> Iterator[Rows]:
        """Yield all rows of a table in one slice, as `TraceFile.slices` yields them in several."""
        yield self.tables[table]

    def frame(self, table: str) -> pandas.DataFrame:
        """Return one table as a pandas.DataFrame. Needs pandas.

        Parameters
        ----------
        table
            Name of a table, e.g. ``"pushes"``.

        Returns
        -------
        pandas.DataFrame
            One row per row of the table. Codes (`outcome`, `change`, `phase`) and the names of controllers are
            categories; other text is str.

        Raises
        ------
        JobError
            If pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError:
            raise JobError("Trace.frame: needs pandas, which is not installed: pip install pandas") from None
        rows = self.tables[table]
        frame = pandas.DataFrame(rows)
        for name in frame.columns:
            if name in ENUMS:
                words = {int(code): code.name.lower() for code in ENUMS[name]}
                frame[name] = pandas.Categorical(frame[name].map(words), categories=list(words.values()))
            elif rows.dtype[name].kind == "S":
                frame[name] = frame[name].str.decode("utf-8", errors="replace")
        if "controller" in frame:
            frame["controller"] = frame["controller"].astype("category")
        return frame


class _Table(NamedTuple):
    """Table in an open file: its dataset, its record type, and the rows that belong together as of the last flush.

    The dataset is one of h5py's lower level, which opens it in a fifth of the time.
    """

    id: h5py.h5d.DatasetID
    columns: np.dtype
    n_rows: int


@dataclass(frozen=True)
class TraceFile(_Described):
    """A trace in its open file, for traces too large for memory. Rows are in the order of the file.

    Parameters
    ----------
    stored
        Dataset, record type and number of rows of each table, by its name.
    slice_rows
        Rows of a slice; the last slice of a table may have fewer.
    flushed
        The last flush: rows of each table and, since format version 8, their checksums.
    """

    stored: dict[str, _Table]
    slice_rows: int
    flushed: np.void

    def slices(self, table: str) -> Iterator[Rows]:
        """Yield the rows of a table slice by slice; one empty slice for a table without rows."""
        for begin in range(0, max(self.stored[table].n_rows, 1), self.slice_rows):
            rows = self.read(table, begin, begin + self.slice_rows)
            if len(rows) and "worker" in (rows.dtype.names or ()):
                with _reporting_damage(self.path):
                    _check_workers(table, rows["worker"], self.n_workers)
            yield rows

    def checksum(self, table: str) -> int | None:
        """Return the CRC-32 of the rows of a table when they were written; None in a trace of format version 7."""
        name = f"{table}{CHECKSUM}"
        return int(self.flushed[name]) if name in (self.flushed.dtype.names or ()) else None

    def verify(self) -> None:
        """Read all rows, and raise TraceError if they are not those that were written."""
        for table in TABLES:
            found = 0
            for begin in range(0, self.stored[table].n_rows, self.slice_rows):
                found = checksum(self._as_written(table, begin, begin + self.slice_rows), found)
            if self.checksum(table) not in (None, found):
                raise TraceError(f"{self.path}: a damaged trace: the rows of /{table} are not those that were written")

    def read(self, table: str, begin: int = 0, end: int | None = None) -> Rows:
        """Return the rows [begin, end) of a table, with the columns of this version; `end` None is its last row."""
        rows = self._as_written(table, begin, end)
        return complete(rows, TABLES[table]) if self.attributes["format_version"] < FORMAT_VERSION else rows

    def is_altered(self, table: str, rows: Rows) -> bool:
        """Return True if these, all rows of a table as `read` returns them, are not those that were written."""
        written = self.checksum(table)
        if written is None:
            return False
        if self.attributes["format_version"] < FORMAT_VERSION:
            rows = self._as_written(table)
        return checksum(rows) != written

    def _as_written(self, table: str, begin: int = 0, end: int | None = None) -> Rows:
        dataset, columns, n_rows = self.stored[table]
        begin, end, _ = slice(begin, end).indices(n_rows)
        rows = np.empty(max(end - begin, 0), columns)
        if len(rows):  # as `dataset[begin:end]`, which derives the record type again
            with _reporting_damage(self.path):
                chosen = dataset.get_space()
                chosen.select_hyperslab((begin,), rows.shape)
                dataset.read(h5py.h5s.create_simple(rows.shape), chosen, rows, dataset.get_type())
        return rows


def trace_path(path: str | Path) -> Path:
    """Return the trace file: `path`, or the trace in it if `path` is the folder of a run."""
    path = Path(path)
    return path / "trace.h5" if is_folder(path) else path


@contextmanager
def opened(path: str | Path, slice_rows: int = SLICE_ROWS) -> Iterator[TraceFile]:
    """Open a trace to read it in slices, as a context manager.

    Parameters
    ----------
    path
        A trace file, or the folder of a run.
    slice_rows
        Rows of a slice.

    Raises
    ------
    TraceError
        If there is no trace, or it cannot be read.
    """
    path = trace_path(path)
    with _open(path, "r") as file:
        with _reporting_damage(path):
            values = _attributes(file)
            flushed = values.pop("flushed_rows", None)
            attributes = {name: _shown(name, _plain(value)) for name, value in values.items()}
            _check_attributes(attributes)
            stored = {table: _table(file, table, flushed, attributes["format_version"]) for table in TABLES}
        yield TraceFile(path, attributes, stored, slice_rows, flushed)


def _attributes(file: h5py.File) -> dict[str, Any]:
    """Return the root attributes as `dict(file.attrs)` does, which derives the type of each again in 1.2 ms in all."""
    values = {}
    for index in range(h5py.h5a.get_num_attrs(file.id)):
        attribute = h5py.h5a.open(file.id, index=index)
        name = attribute.name.decode()
        dtype, in_memory, is_text = _attribute_type(attribute.get_type().encode())
        if attribute.shape is None or dtype.subdtype is not None:
            values[name] = file.attrs[name]
            continue
        value = np.zeros(attribute.shape, dtype)
        attribute.read(value, mtype=in_memory)
        if is_text:
            words = [text.decode("utf-8", "surrogateescape") for text in value.flat]
            value = np.array(words, dtype).reshape(value.shape)
        values[name] = value[()] if value.ndim == 0 else value
    return values


@lru_cache(maxsize=64)
def _attribute_type(encoded: bytes) -> tuple[np.dtype, h5py.h5t.TypeID, bool]:
    """Return the NumPy type of an attribute, that of HDF5 for it in memory, and whether it is text of any length."""
    dtype = h5py.h5t.decode(encoded).dtype
    text = h5py.h5t.check_string_dtype(dtype)
    return dtype, h5py.h5t.py_create(dtype), text is not None and text.length is None


def _check_attributes(attributes: Mapping[str, Any]) -> None:
    """Raise ValueError if an attribute is missing or has another type or value than those that are written."""
    for name, kind in ATTRIBUTES.items():
        if name not in attributes:
            if name in OPTIONAL:
                continue
            raise ValueError(f"the attribute {name} is missing")
        if type(attributes[name]) is not kind:
            raise ValueError(f"the attribute {name} must be {kind.__name__}, it is {type(attributes[name]).__name__}")
    if attributes["status"] not in STATUSES:
        raise ValueError(f"the attribute status must be one of {', '.join(STATUSES)}")
    for name, least in (("n_workers", 1), ("n_servers", 0)):
        if not least <= attributes[name] <= MOST_RANKS:
            raise ValueError(f"the attribute {name} must be {least} to {MOST_RANKS:,}")


def _check_workers(table: str, worker: Rows, n_workers: int) -> None:
    if worker.min() < -1 or worker.max() >= n_workers:
        raise ValueError(f"/{table} names a worker that is none of {n_workers}")


def _table(file: h5py.File, table: str, flushed: Any, version: int) -> _Table:
    """Return a table. Raises ValueError if it has not the columns of its schema, or not the rows that were flushed."""
    try:
        dataset = h5py.h5d.open(file.id, table.encode())
    except KeyError:  # there is none, or it is a group
        dataset = None
    if dataset is None or dataset.rank != 1:
        raise ValueError(f"/{table} must be a table")
    dtype = _record_type(dataset.get_type().encode(), table, version)
    if table not in (getattr(flushed, "dtype", np.dtype(int)).names or ()):
        raise ValueError(f"the attribute flushed_rows must have the rows of {table}")
    (length,) = dataset.shape
    if not 0 <= (n_rows := int(flushed[table])) <= length:
        raise ValueError(f"flushed_rows must be 0 to {length} for {table}, it is {n_rows}")
    return _Table(dataset, dtype, n_rows)


@lru_cache(maxsize=64)
def _record_type(encoded: bytes, table: str, version: int) -> np.dtype:
    """Return the NumPy type of a table's type in HDF5: deriving and checking it is slow, and many traces have the same.

    Raises ValueError if it has not the columns of its schema.
    """
    dtype: np.dtype = h5py.h5t.decode(encoded).dtype
    if dtype.names is None:
        raise ValueError(f"/{table} must be a table")
    found = [(name, dtype[name].str) for name in dtype.names]
    wanted = [(name, TABLES[table][name].str) for name in TABLES[table].names or ()]
    wanted = [column for column in wanted if column[0] in dtype.names or ADDED.get(column[0], 0) <= version]
    if table == "decisions":  # further columns are the inputs of the controllers
        wanted = wanted + [(name, "<f8") for name, _ in found[len(wanted) :]]
    if found != wanted:
        raise ValueError(f"/{table} must have the columns {', '.join(f'{name} ({kind})' for name, kind in wanted)}")
    return dtype


def load(path: str | Path) -> Trace:
    """Read a whole trace into memory; public as `hpcsync.load_trace`.

    Parameters
    ----------
    path
        A trace file, or the folder of a run, which holds a trace.h5.

    Returns
    -------
    Trace
        The tables as NumPy structured arrays (`tables`) or pandas frames (`frame`), the job (`job`) and what describes
        the run (`attributes`).

    Raises
    ------
    TraceError
        If there is no trace, or it cannot be read.

    Examples
    --------
    >>> trace = hpcsync.load_trace("runs/digits-20260101-120000")
    >>> trace.job.paradigm.name
    'ssp'
    >>> trace.frame("pushes").groupby("worker")["wait_s"].sum()
    >>> trace.tables["updates"]["lr"]
    """
    with opened(path) as file:
        tables = {table: file.read(table) for table in TABLES}
        altered = tuple(table for table in TABLES if file.is_altered(table, tables[table]))
    tables["pushes"] = tables["pushes"][np.argsort(tables["pushes"]["seq"], kind="stable")]
    return Trace(file.path, file.attributes, tables, altered)


def settle(path: str | Path, status: str) -> str | None:
    """Set the final status of a trace whose run could not set it itself; for a launcher whose ranks have died.

    A trace that is `running` or `interrupted` gets the status; a `finished` or `failed` one keeps its own. A missing
    file is no error: ranks can die before they create it. While another process holds the file, it is tried again for
    `DYING_S`.

    Parameters
    ----------
    path
        The trace file.
    status
        One of `schema.STATUSES` other than ``"running"``.

    Returns
    -------
    str or None
        The status before, if it was changed.

    Raises
    ------
    TraceError
        If the file is no trace, another process is still writing it, or it cannot be written.
    """
    if status not in STATUSES or status == "running":
        raise ValueError(f"status is {status!r}; must be one of {', '.join(STATUSES[1:])}")
    path = Path(path)
    if not path.exists():
        return None
    try:
        with _open_when_free(path) as file:
            before = file.attrs.get("status")
            open_end = before in ("running", "interrupted")
            if open_end:
                file.attrs.modify("status", status)
    except (OSError, RuntimeError) as error:
        raise TraceError(f"{path}: its status cannot be written: {_first_line(error)}") from None
    return str(before) if open_end else None


def _open_when_free(path: Path) -> h5py.File:
    deadline_s = time.monotonic() + DYING_S
    while True:
        try:
            return _open(path, "r+")
        except TraceInUse:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(0.1)


def _open(path: Path, mode: str) -> h5py.File:
    """Open a file after checking that it is a trace which this version can read."""
    try:
        if not path.is_file():
            raise TraceError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        path.open("rb").close()  # h5py does not say why it cannot
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    if not h5py.is_hdf5(path):
        raise TraceError(f"{path}: not a trace (not an HDF5 file)")
    try:
        file = h5py.File(path, mode, locking="best-effort")
    except BlockingIOError:
        hint = "; `hpcsync watch` shows a run under way" * (mode == "r")
        raise TraceInUse(f"{path}: another process uses it{hint}") from None
    except OSError as error:
        problem = f"cannot be opened: {_first_line(error)}"
        if found := re.search(r"truncated file: eof = (\d+),.* stored_eof = (\d+)", str(error)):
            problem = f"truncated: it has {int(found[1]):,} of {int(found[2]):,} bytes"
        raise TraceError(f"{path}: {problem}") from None
    kind, version = (_attribute(file, name) for name in ("format", "format_version"))
    if kind != FORMAT:
        problem = f"not a trace (an HDF5 file whose format is not {FORMAT})"
    elif version not in READABLE_VERSIONS:
        problem = f"a trace of format version {version}; this hpcsync reads {' and '.join(map(str, READABLE_VERSIONS))}"
    else:
        return file
    file.close()
    raise TraceError(f"{path}: {problem}")


def _attribute(file: h5py.File, name: str) -> Any:
    """Return an attribute's value as one of Python's types; None if it is missing or cannot be read."""
    try:
        return _plain(file.attrs.get(name))
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        return None


@contextmanager
def _reporting_damage(path: Path) -> Iterator[None]:
    """Turn errors of reading into a TraceError of one line."""
    try:
        yield
    except (KeyError, IndexError, ValueError, TypeError, OSError, RuntimeError) as error:
        raise TraceError(f"{path}: a damaged trace: {_first_line(error)}") from None


def _plain(value: Any) -> Any:
    """Return an attribute's value as Python's own types."""
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return value.item() if isinstance(value, np.generic) else value


def _shown(name: str, value: Any) -> Any:
    """Return an attribute's value with control characters escaped in text, which readers print; the job is parsed."""
    if isinstance(value, list):
        return [_shown(name, item) for item in value]
    return printable(value) if isinstance(value, str) and name != "job" else value


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return (str(error.args[0]) if error.args else type(error).__name__).splitlines()[0]
