"""Writing a trace during a run: rows go to memory at once and to the file every few seconds.

The deciding server calls `append` in the middle of its work, so an append must cost next to nothing: it packs the row
into an array that has the layout of the file. `struct.pack_into` takes 0.2 us per push of 16 columns, append and
conversion together; a list of tuples converted to an array later takes 0.35 us, and so does assignment to a structured
array. It also raises on a wrong type where the wrong row is appended.

The file must survive a run that is killed at any moment. HDF5's default file format does: flushed data can be read,
while the newer formats (libver="latest") leave a file that does not open. A kill during a flush can still leave some
tables longer than others. Therefore the tables are flushed first, and then the root attribute `flushed_rows` records
how many rows of each table belong together; readers ignore later rows. It also holds a checksum of these rows of each
table (CRC-32), with which `hpcsync audit` finds rows that have changed since. A checksum of HDF5 in every chunk would
make a chunk unreadable that a kill has left half written.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import h5py
import numpy as np

from hpcsync.paradigms.records import layout
from hpcsync.system.atomic_files import aside, naming, removing, whole
from hpcsync.system.interpreter import python
from hpcsync.trace.schema import (
    CHECKSUM,
    ENUMS,
    FORMAT,
    FORMAT_VERSION,
    SCHEMA,
    STATUSES,
    Rows,
    TableSchema,
    checksum,
    complete,
    decisions_table,
    hdf5_attributes,
)

DUE_ROWS = 8192  # rows in memory with which a flush is due
CHUNK_BYTES = 65536  # a chunk is written whole, so it should hold no more than a few seconds of rows
FLUSH_INTERVAL_S = 2.0
COPIED_ROWS = 100_000  # copied at once
SETTLE_S = 10.0  # time limit of a process that imports h5py and changes one attribute, on a busy machine

_TEXT = h5py.string_dtype()
_FLOAT = layout(["<f8"])
_ENUMS = {column: {code.name.lower(): int(code) for code in codes} for column, codes in ENUMS.items()}


class _Buffer:
    """Rows of one table that wait for the next flush, packed in the layout of the file."""

    def __init__(self, dtype: np.dtype, stored: h5py.h5t.TypeID) -> None:
        self.used = 0
        self.stored = stored
        columns = [dtype[name].str for name in dtype.names or ()]
        packer = layout(columns)
        assert packer.size == dtype.itemsize
        self._fields = dict(dtype.fields or {})
        self._pack_into = packer.pack_into
        self._row_bytes = packer.size
        self._text = [i for i, column in enumerate(columns) if "S" in column]
        self._hold(np.zeros(DUE_ROWS, dtype))

    def _hold(self, rows: Rows) -> None:
        """Pack into these rows from now on."""
        self.rows, self._size, self._bytes = rows, len(rows), rows.view(np.uint8).data

    def append(self, row: Sequence[Any]) -> None:
        """Pack one row; text is encoded."""
        if self.used == self._size:
            self._hold(np.concatenate([self.rows, np.zeros_like(self.rows)]))
        if self._text:
            row = [*row]
            for i in self._text:
                if isinstance(row[i], str):
                    row[i] = row[i].encode()
        self._pack_into(self._bytes, self.used * self._row_bytes, *row)
        self.used += 1

    def amend(self, back: int, column: str, value: float) -> None:
        """Set a float64 of the row that is so far from the latest one, if it is still here."""
        if back < self.used:
            _FLOAT.pack_into(self._bytes, (self.used - 1 - back) * self._row_bytes + self._fields[column][1], value)


class TraceWriter:
    """A trace being written by one thread of one process. As a context manager it closes the trace on exit.

    Parameters
    ----------
    path
        File to create. It must not exist unless the run resumes: a trace is never overwritten.
    attributes
        Root attributes that describe the run; those that are None are left out. `format`, `format_version`, `status`,
        `flushed_rows` and `tracing_overhead_s` are the writer's own.
    decision_fields
        Further columns of /decisions, (unit, description) by name: the paradigm's, then those of batch allocation.
    resumed_rows
        Rows of each table with which a resumed trace begins, and their checksums if they are known (`flushed`). They
        are copied from the file at `path`, which is kept beside the new one, with its later rows, as
        trace.lost-NUMBER.h5.

    Raises
    ------
    FileExistsError
        If `path` exists and the run does not resume.
    NotWritten
        If the file cannot be created.

    Notes
    -----
    The root attribute `tracing_overhead_s` is what tracing has cost the deciding server so far: the measured time of
    all flushes, plus for each appended row the cost of an append measured on opening. The last flush, on closing, is
    not included: the run is over by then.

    Each dataset describes its columns in attributes (`hpcsync.trace.schema`).
    """

    def __init__(
        self,
        path: str | Path,
        attributes: Mapping[str, Any],
        decision_fields: Mapping[str, tuple[str, str]] | None = None,
        resumed_rows: Mapping[str, int] | None = None,
    ) -> None:
        # Called with the rows of each table at each flush, /membership first: it tells of absences between iterations.
        self.observer: Callable[[str, Rows], None] | None = None
        tables = {**SCHEMA, "decisions": decisions_table(decision_fields or {})}
        empty_file, types = _empty_file(tuple(tables.items()))
        self._buffers = {name: _Buffer(*of_rows) for name, of_rows in types.items()}
        self._n_waiting = 0  # rows in the buffers
        self._append_s = self._time_append()
        self._spent_s = 0.0  # on all flushes, and on appending the rows that they have written
        self._flushed_at_s = 0.0
        self._n_rows = dict.fromkeys(tables, 0)
        self._checksums = dict.fromkeys(tables, 0)  # of the rows in the file
        # Held open: h5py only prints errors of closing a handle. Of its lower level, which takes a third of the time.
        self._datasets: dict[str, h5py.h5d.DatasetID] = {}
        self.path = Path(path)
        self._abandoned = self._unsettled = False
        if resumed_rows is None and self.path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.path))
        unfinished = self.path.with_suffix(".unfinished")  # until the file is complete enough to be opened
        # Parallel file systems often refuse locks. There is no other writer, so a lock is optional.
        with naming(self.path), removing(unfinished):
            unfinished.write_bytes(empty_file)
            self._file = h5py.File(unfinished, "r+", locking="best-effort")
        try:
            with naming(self.path):
                self._datasets.update((name, h5py.h5d.open(self._file.id, name.encode())) for name in tables)
                self._begin(attributes)
                if resumed_rows is not None:
                    self._copy_rows(resumed_rows)
                self._fsync()
                unfinished.replace(self.path)
        except BaseException:
            self._abandon()
            unfinished.unlink()
            raise

    def _copy_rows(self, n_rows: Mapping[str, int]) -> None:
        """Copy the first rows of each table from the existing trace, and rename that.

        They keep their checksums, so that rows that have changed meanwhile are still found.
        """
        with h5py.File(self.path, "r", locking="best-effort") as before:
            same_format = before.attrs["format_version"] == FORMAT_VERSION
            for table, dataset in self._datasets.items():
                dataset.set_extent((n_rows[table],))
                for begin in range(0, n_rows[table], COPIED_ROWS):
                    end = min(begin + COPIED_ROWS, n_rows[table])
                    rows = complete(before[table][begin:end], SCHEMA[table].dtype)
                    _write(dataset, begin, rows, h5py.h5t.py_create(rows.dtype))
                    self._checksums[table] = checksum(rows, self._checksums[table])
                if same_format:
                    self._checksums[table] = n_rows.get(f"{table}{CHECKSUM}", self._checksums[table])
                self._n_rows[table] = n_rows[table]
            self._spent_s = float(before.attrs["tracing_overhead_s"])
            self._file.attrs["created"] = before.attrs["created"]
            hosts = [*before.attrs["hosts"].split(","), *self._file.attrs["hosts"].split(",")]
            self._file.attrs["hosts"] = ",".join(dict.fromkeys(hosts))
        self._file.flush()
        self._write_progress()
        self._file.flush()
        lost = aside(self.path)
        try:
            lost.hardlink_to(self.path)
        except OSError:  # a file system without hard links
            with whole(lost) as copy:
                shutil.copyfile(self.path, copy)

    def sync(self) -> None:
        """Flush, and wait until the file has reached the disk."""
        self.flush()
        if self._file:
            self._fsync()

    def _fsync(self) -> None:
        os.fsync(self._file.id.get_vfd_handle())

    def flushed(self) -> dict[str, int]:
        """Return the number of rows of each table in the file, and their checksums, as `flushed_rows` has them."""
        return self._n_rows | {f"{table}{CHECKSUM}": crc32 for table, crc32 in self._checksums.items()}

    def written(self) -> Iterator[tuple[str, Rows]]:
        """Yield the rows in the file with their tables' names, in slices, as an observer would have seen them."""
        for table in _membership_first(self._datasets):
            for begin in range(0, self._n_rows[table], COPIED_ROWS):
                yield table, h5py.Dataset(self._datasets[table])[begin : begin + COPIED_ROWS]

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Add root attributes that only became known during the run; the next flush writes them."""
        if self._writable:
            self._file.attrs.update(attributes)

    def append(self, table: str, row: Sequence[Any]) -> None:
        """Append one row to a table.

        Parameters
        ----------
        table
            Name of the table.
        row
            Values in the order of the table's columns; text columns take str.

        Raises
        ------
        KeyError
            For an unknown table.
        struct.error
            For a wrong number or type of values.
        """
        self._buffers[table].append(row)
        self._n_waiting += 1

    def amend(self, table: str, back: int, column: str, value: float) -> None:
        """Set a float64 of a row that was appended before it was known; without effect once the row is in the file.

        Parameters
        ----------
        table, column
            Names of the table and of the column.
        back
            0 for the latest row of the table, 1 for the one before it, and so on.
        value
            The value.
        """
        self._buffers[table].amend(back, column, value)

    def flush_if_due(self, now_s: float) -> None:
        """Flush if the last flush is FLUSH_INTERVAL_S ago, or DUE_ROWS rows are in memory.

        To be called when no worker waits for the server. Nothing else flushes during a run, so that the rows of one
        event reach the file together, and `amend` finds those that it completes.

        Parameters
        ----------
        now_s
            Seconds on a clock that advances with real time, the same at each call.
        """
        if self._n_waiting >= DUE_ROWS or now_s - self._flushed_at_s >= FLUSH_INTERVAL_S:
            self.flush()
            self._flushed_at_s = now_s

    def flush(self) -> None:
        """Hand every appended row to the operating system, so that it survives the end of this process.

        Raises
        ------
        NotWritten
            If the file cannot be written (or another exception of HDF5). The writer then abandons the file: it ends at
            the flush before, and later rows are dropped.
        """
        begin_s = time.perf_counter()
        if not self._writable:
            self._drop_rows()
        elif self._n_waiting:
            with self._or_abandon():
                self._write_rows()
                self._file.flush()
                self._write_progress()
                self._file.flush()
        self._spent_s += time.perf_counter() - begin_s

    def close(self, status: str = "finished") -> None:
        """Flush, set the trace's final status and close the file. A second call does nothing.

        If an earlier flush failed, only the status is written, if that is possible.
        """
        if status not in STATUSES or status == "running":
            raise ValueError(f"status is {status!r}; a closed trace is one of {', '.join(STATUSES[1:])}")
        try:
            if self._writable:
                self.flush()
                with self._or_abandon():
                    self._file.attrs.modify("status", status)
                    self._file.flush()
        finally:
            if not self._abandoned:
                self._file.close()
            elif self._unsettled and status != "finished":
                self._unsettled = False
                _settle_elsewhere(self.path, status)

    @property
    def _writable(self) -> bool:
        return not self._abandoned and bool(self._file)

    @property
    def tracing_overhead_s(self) -> float:
        """Seconds that tracing has cost the deciding server so far."""
        return self._spent_s + self._n_waiting * self._append_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.close("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")
            return
        try:
            self.close()
        except (OSError, RuntimeError):
            with suppress(OSError, RuntimeError):
                self.close("failed")
            raise

    def _time_append(self) -> float:
        """Return the seconds that one append of the widest row takes: the best of a few tries (under 1 ms in all)."""
        row = np.zeros((), SCHEMA["pushes"].dtype).item()
        rows, took_s = 100, []
        for _ in range(5):
            begin_s = time.perf_counter()
            for _ in range(rows):
                self.append("pushes", row)
            took_s.append(time.perf_counter() - begin_s)
            self._drop_rows()
        return min(took_s) / rows

    def _begin(self, attributes: Mapping[str, Any]) -> None:
        own = {"format": FORMAT, "format_version": FORMAT_VERSION, "status": "running", "tracing_overhead_s": 0.0}
        for name, value in {**attributes, **own}.items():
            if value is not None:
                self._create(name, value)
        self._create("flushed_rows", self._flushed_rows())
        self._file.flush()

    def _create(self, name: str, value: Any) -> None:
        if isinstance(value, str | int | float | np.ndarray):
            _create(self._file.id, name, value)
        else:
            self._file.attrs[name] = value

    def _write_rows(self) -> None:
        for table in _membership_first(self._buffers):
            if (buffer := self._buffers[table]).used:
                begin, end = self._n_rows[table], self._n_rows[table] + buffer.used
                dataset = self._datasets[table]
                dataset.set_extent((end,))
                _write(dataset, begin, buffer.rows[: buffer.used], buffer.stored)
                self._checksums[table] = checksum(buffer.rows[: buffer.used], self._checksums[table])
                self._n_rows[table], buffer.used = end, 0
                if self.observer is not None:
                    self.observer(table, buffer.rows[: end - begin])
        self._spent_s += self._n_waiting * self._append_s
        self._n_waiting = 0

    @contextmanager
    def _or_abandon(self) -> Iterator[None]:
        try:
            with naming(self.path):
                yield
        except (OSError, RuntimeError):
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Leave the file as it is after a failed write (a full disk), and close its handles.

        Closing writes what is still in memory, and HDF5 crashes when that fails. Therefore the file descriptor is first
        replaced by that of a file that accepts and discards everything.
        """
        self._abandoned = self._unsettled = True
        with suppress(OSError, RuntimeError), _nowhere() as nowhere:
            os.dup2(nowhere.fileno(), self._file.id.get_vfd_handle(), inheritable=False)
            self._file.close()

    def _drop_rows(self) -> None:
        for buffer in self._buffers.values():
            buffer.used = 0
        self._n_waiting = 0

    def _write_progress(self) -> None:
        # Modified in place, so that the attributes exist at every moment.
        for name, value in (("flushed_rows", self._flushed_rows()), ("tracing_overhead_s", self.tracing_overhead_s)):
            data = np.asarray(value)
            h5py.h5a.open(self._file.id, name.encode()).write(data, mtype=_attribute_types(data.dtype)[1])

    def _flushed_rows(self) -> Rows:
        flushed = self.flushed()
        fields = [(name, "<u4" if name.endswith(CHECKSUM) else "<i8") for name in flushed]
        return np.array(tuple(flushed.values()), fields)


def _membership_first(tables: Iterable[str]) -> list[str]:
    return sorted(tables, key=lambda table: table != "membership")


def _nowhere() -> IO[bytes]:
    """Return a file whose content is lost. Unlike /dev/null it can be truncated, which HDF5 does on closing."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("abandoned"), "r+b")
    return tempfile.TemporaryFile()


def _settle_elsewhere(path: Path, status: str) -> None:
    """Set a trace's status from another process.

    In this one HDF5 still holds pieces of the file that it could not write; opening it again would crash.
    """
    code = "import sys; from hpcsync.trace.reader import settle; settle(*sys.argv[1:])"
    quiet = subprocess.DEVNULL
    with suppress(OSError, subprocess.SubprocessError):
        argv = python("-c", code, str(path), status)
        subprocess.run(argv, timeout=SETTLE_S, stdin=quiet, stdout=quiet, stderr=quiet, check=False)


def _write(dataset: h5py.h5d.DatasetID, begin: int, rows: Rows, stored: h5py.h5t.TypeID) -> None:
    """Write rows into a table from the row `begin` on; `stored` is the type of HDF5 of their record type."""
    chosen = dataset.get_space()
    chosen.select_hyperslab((begin,), rows.shape)
    dataset.write(h5py.h5s.create_simple(rows.shape), chosen, rows, stored)


@lru_cache(maxsize=8)
def _empty_file(
    tables: tuple[tuple[str, TableSchema], ...],
) -> tuple[bytes, dict[str, tuple[np.dtype, h5py.h5t.TypeID]]]:
    """Return the bytes of an HDF5 file with empty tables, and the types of their rows in NumPy and in HDF5.

    They are made once for the many short simulations of a process.
    """
    types = {}
    with h5py.File("empty", "w", driver="core", backing_store=False) as file:
        for name, table in tables:
            dtype = _with_enums(table.dtype)
            types[name] = dtype, h5py.h5t.py_create(dtype)
            chunk_rows = CHUNK_BYTES // dtype.itemsize
            dataset = file.create_dataset(name, shape=(0,), maxshape=(None,), chunks=(chunk_rows,), dtype=dtype)
            _describe(dataset, hdf5_attributes(table))
        file.flush()
        return file.id.get_file_image(), types


@lru_cache(maxsize=8)
def _attribute_types(dtype: np.dtype) -> tuple[h5py.h5t.TypeID, h5py.h5t.TypeID]:
    """Return the types of HDF5 of an attribute, in the file and in memory."""
    return h5py.h5t.py_create(dtype, logical=True), h5py.h5t.py_create(dtype)


def _describe(dataset: h5py.Dataset, attributes: Mapping[str, str]) -> None:
    """Add text attributes to a dataset."""
    for name, text in attributes.items():
        _create(dataset.id, name, text)


def _create(owner: h5py.h5g.GroupID | h5py.h5d.DatasetID, name: str, value: str | float | np.ndarray) -> None:
    """Create an attribute, as `attrs` does in three times the time or more."""
    data = np.asarray(value, _TEXT if isinstance(value, str) else None)
    stored, in_memory = _attribute_types(data.dtype)
    h5py.h5a.create(owner, name.encode(), stored, h5py.h5s.create_simple(data.shape)).write(data, mtype=in_memory)


def _with_enums(dtype: np.dtype) -> np.dtype:
    """Return the same layout with HDF5 enumerations, which name the codes, for the columns of `ENUMS`."""
    return np.dtype(
        [
            (name, h5py.enum_dtype(_ENUMS[name], basetype=dtype[name]) if name in _ENUMS else dtype[name])
            for name in dtype.names or ()
        ]
    )
