"""Writing a trace while the run goes on: rows into memory at once, into the file every few seconds.

The deciding server calls `append` in the middle of its work, so that must cost next to nothing: a row is packed
straight into a preallocated array that has the layout of the file. Of the ways to do it (microseconds per push of 16
columns, append and conversion together) `struct.pack_into` takes 0.2, a list of tuples turned into an array later
0.35, and assignment to a structured array 0.35; it also refuses a wrong type at the line that is wrong.

The file must survive a run that is killed at any moment. HDF5's default file format does: what has been flushed can be
read, while the newer formats (libver="latest") leave a file that does not open. But a kill in the middle of a flush can
leave some tables longer than others. So the tables are flushed first and the root attribute `flushed_rows` says after
that how many rows of each table belong together; readers look no further.
"""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import h5py
import numpy as np

from hpcsync.system.atomic_files import aside, naming
from hpcsync.trace.schema import ENUMS, FORMAT, FORMAT_VERSION, STATUSES, TABLES, decisions_dtype

RING_ROWS = 8192  # rows of a table that fit in memory between two flushes
CHUNK_BYTES = 65536  # a chunk is written whole, so not larger than a few seconds of rows are worth
FLUSH_INTERVAL_S = 2.0
COPIED_ROWS = 100_000  # at once
SETTLE_S = 10.0  # a process that imports h5py and changes one attribute, on a busy machine

_STRUCT_CODES = {"<i1": "b", "<i4": "i", "<i8": "q", "<f8": "d", "|i1": "b"}
_ENUMS = {column: {code.name.lower(): int(code) for code in codes} for column, codes in ENUMS.items()}


class _Ring:
    """The rows of one table that wait for the next flush, packed as they will lie in the file."""

    def __init__(self, dtype: np.dtype) -> None:
        self.rows = np.zeros(RING_ROWS, dtype)
        self.used = 0
        columns = [dtype[name].str for name in dtype.names or ()]
        codes = [_STRUCT_CODES.get(column) or f"{column[2:]}s" for column in columns]
        packer = struct.Struct("<" + "".join(codes))
        assert packer.size == dtype.itemsize
        self._pack_into = packer.pack_into
        self._row_bytes = packer.size
        self._buffer = self.rows.view(np.uint8).data
        self._has_text = any(code.endswith("s") for code in codes)

    def append(self, row: Sequence[Any]) -> None:
        if self._has_text:
            row = [value.encode() if isinstance(value, str) else value for value in row]
        self._pack_into(self._buffer, self.used * self._row_bytes, *row)
        self.used += 1


class TraceWriter:
    """A trace being written, by one thread of one process. Leaving the `with` block closes it.

    path:            must not exist, unless the run goes on: a trace is never overwritten (FileExistsError).
    attributes:      the root attributes that describe the run; one that is None is left out. `format`,
                     `format_version`, `status`, `flushed_rows` and `tracing_overhead_s` are the writer's own.
    going_on:        the trace goes on where its tables had so many rows. `path` has them and those that followed, which
                     stay beside it in trace.lost-NUMBER.h5.
    decision_fields: names of the numbers that decisions come with: the paradigm's, then those of batch sizes.

    The root attribute `tracing_overhead_s` is what tracing has cost the deciding server so far: the time spent in
    flushes, measured, and for each appended row the cost of an append that was measured on opening. The last flush, on
    closing, is not in it: the run is over by then.
    """

    def __init__(
        self,
        path: str | Path,
        attributes: Mapping[str, Any],
        decision_fields: Sequence[str] = (),
        going_on: Mapping[str, int] | None = None,
    ) -> None:
        dtypes = {**TABLES, "decisions": decisions_dtype(decision_fields)}
        dtypes = {table: _with_enums(dtype) for table, dtype in dtypes.items()}
        self._rings = {table: _Ring(dtype) for table, dtype in dtypes.items()}
        self._append_s = self._time_append()
        self._flush_s = 0.0
        self._flushed_at_s = 0.0
        self._n_rows = dict.fromkeys(dtypes, 0)
        self._datasets: dict[str, h5py.Dataset] = {}  # held open: h5py only prints what fails when a handle goes
        self.path = Path(path)
        self._abandoned = self._unsettled = False
        if going_on is None and self.path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.path))
        unfinished = self.path.with_suffix(".unfinished")  # until it opens
        # Parallel file systems often refuse locks, and nobody else writes here: a lock is welcome, not needed.
        with naming(self.path):
            self._file = h5py.File(unfinished, "w", locking="best-effort")
        try:
            with naming(self.path):
                self._lay_out(dtypes, attributes)
                if going_on is not None:
                    self._take_over(going_on)
                self._fsync()
                unfinished.replace(self.path)
        except BaseException:
            self._abandon()
            unfinished.unlink()
            raise

    def _take_over(self, n_rows: Mapping[str, int]) -> None:
        """Begin with so many rows of the trace that is there, which gets another name."""
        with h5py.File(self.path, "r", locking="best-effort") as before:
            for table, dataset in self._datasets.items():
                dataset.resize((n_rows[table],))
                for begin in range(0, n_rows[table], COPIED_ROWS):
                    end = min(begin + COPIED_ROWS, n_rows[table])
                    dataset[begin:end] = before[table][begin:end]
                self._n_rows[table] = n_rows[table]
            self._flush_s = before.attrs["tracing_overhead_s"]
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
            self.path.rename(lost)

    def sync(self) -> None:
        """Flush, and wait until what is in the file has reached the disk."""
        self.flush()
        if self._file:
            self._fsync()

    def _fsync(self) -> None:
        os.fsync(self._file.id.get_vfd_handle())

    def n_rows(self) -> dict[str, int]:
        """Of each table, in the file."""
        return dict(self._n_rows)

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """More root attributes, which are only known now; in the file with the next flush."""
        if self._writable:
            self._file.attrs.update(attributes)

    def append(self, table: str, row: Sequence[Any]) -> None:
        """Add one row, its values in the order of the table's columns; text columns take str.

        Raises KeyError for an unknown table and struct.error for a wrong number or type of values.
        """
        ring = self._rings[table]
        if ring.used == RING_ROWS:
            self.flush()
        ring.append(row)

    def flush_if_due(self, now_s: float) -> None:
        """Flush if the last one is FLUSH_INTERVAL_S ago. For moments at which nobody waits for the server.

        now_s: seconds on any clock that advances with real time, the same at each call.
        """
        if now_s - self._flushed_at_s >= FLUSH_INTERVAL_S:
            self.flush()
            self._flushed_at_s = now_s

    def flush(self) -> None:
        """Hand every appended row to the operating system: from here on it survives the end of this process.

        Raises NotWritten, or what else HDF5 raises, when it cannot be written. From then on the writer leaves it alone:
        the file ends at the flush before, and later rows are dropped.
        """
        begin_s = time.perf_counter()
        if not self._writable:
            self._drop_rows()
        elif any(ring.used for ring in self._rings.values()):
            with self._or_abandon():
                self._write_rows()
                self._file.flush()
                self._write_progress()
                self._file.flush()
        self._flush_s += time.perf_counter() - begin_s

    def close(self, status: str = "finished") -> None:
        """Flush, set the trace's final status and close the file. A second call does nothing.

        A file that could not be written any more is given its status by itself, if that is possible.
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
        """Seconds that tracing has cost so far."""
        n_rows = sum(self._n_rows.values()) + sum(ring.used for ring in self._rings.values())
        return self._flush_s + n_rows * self._append_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.close("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")

    def _time_append(self, rows: int = 100, repeats: int = 5) -> float:
        """Seconds that one append of the widest row takes here: the least of a few tries, well under a millisecond."""
        row = np.zeros((), TABLES["pushes"]).item()
        took_s = []
        for _ in range(repeats):
            begin_s = time.perf_counter()
            for _ in range(rows):
                self.append("pushes", row)
            took_s.append(time.perf_counter() - begin_s)
            self._rings["pushes"].used = 0
        return min(took_s) / rows

    def _lay_out(self, dtypes: Mapping[str, np.dtype], attributes: Mapping[str, Any]) -> None:
        own = {"format": FORMAT, "format_version": FORMAT_VERSION, "status": "running", "tracing_overhead_s": 0.0}
        for name, value in {**attributes, **own}.items():
            if value is not None:
                self._file.attrs[name] = value
        for table, dtype in dtypes.items():
            chunk_rows = CHUNK_BYTES // dtype.itemsize
            self._datasets[table] = self._file.create_dataset(
                table, shape=(0,), maxshape=(None,), chunks=(chunk_rows,), dtype=dtype
            )
        self._file.attrs["flushed_rows"] = self._flushed_rows()
        self._file.flush()

    def _write_rows(self) -> None:
        for table, ring in self._rings.items():
            if ring.used:
                begin, end = self._n_rows[table], self._n_rows[table] + ring.used
                dataset = self._datasets[table]
                dataset.resize((end,))
                dataset[begin:end] = ring.rows[: ring.used]
                self._n_rows[table] = end
                ring.used = 0

    @contextmanager
    def _or_abandon(self) -> Iterator[None]:
        try:
            with naming(self.path):
                yield
        except (OSError, RuntimeError):
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Leave the file as it is after a failed write (a full disk), and give its handles back.

        Closing writes what is still in memory, and HDF5 crashes when that fails. So it writes to where nothing fails.
        """
        self._abandoned = self._unsettled = True
        with suppress(OSError, RuntimeError), _nowhere() as nowhere:
            os.dup2(nowhere.fileno(), self._file.id.get_vfd_handle(), inheritable=False)
            self._file.close()

    def _drop_rows(self) -> None:
        for ring in self._rings.values():
            ring.used = 0

    def _write_progress(self) -> None:
        # Modified in place: the attribute never goes missing.
        self._file.attrs.modify("flushed_rows", self._flushed_rows())
        self._file.attrs.modify("tracing_overhead_s", self.tracing_overhead_s)

    def _flushed_rows(self) -> np.ndarray:
        counts = np.zeros((), [(table, "<i8") for table in self._n_rows])
        for table, n_rows in self._n_rows.items():
            counts[table] = n_rows
        return counts


def _nowhere() -> IO[bytes]:
    """Where whatever is written is lost, and a length can be set as for any file: HDF5 does that on closing."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("abandoned"), "r+b")
    return tempfile.TemporaryFile()


def _settle_elsewhere(path: Path, status: str) -> None:
    """In this process HDF5 still has pieces of the file that it could not write: opening it again would crash."""
    code = "import sys; from hpcsync.trace.reader import settle; settle(*sys.argv[1:])"
    quiet = subprocess.DEVNULL
    with suppress(OSError, subprocess.SubprocessError):
        argv = [sys.executable, "-c", code, str(path), status]
        subprocess.run(argv, timeout=SETTLE_S, stdin=quiet, stdout=quiet, stderr=quiet, check=False)


def _with_enums(dtype: np.dtype) -> np.dtype:
    """The same layout, with the columns that stand for words saying which."""
    return np.dtype(
        [
            (name, h5py.enum_dtype(_ENUMS[name], basetype=dtype[name]) if name in _ENUMS else dtype[name])
            for name in dtype.names or ()
        ]
    )
