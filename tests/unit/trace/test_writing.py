"""A trace under appends, flushes, kills and resumed runs in any order: it reads as the rows that were written."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from hpcsync.trace import reader, writer
from hpcsync.trace.schema import SCHEMA, TABLES
from hpcsync.trace.writer import TraceWriter
from tests.stateful import SEARCH, STATEFUL, assert_caught

DUE_ROWS = 4  # so few that appends enlarge the buffers
FILES = settings(STATEFUL, max_examples=20, stateful_step_count=20)
ATTRIBUTES = {"job": "", "n_servers": 1, "n_workers": 2, "paradigm": "asp", "hosts": "a", "created": "now"}
NAMES = ["decisions", "pushes", "updates"]  # the others would only take time


def make_row(table: str, number: int) -> tuple[Any, ...]:
    """Return a row whose values are that number, as far as the type of each column allows."""
    return tuple(np.array(number % 100, SCHEMA[table].dtype[name]).item() for name in SCHEMA[table].dtype.names)


class Rows(RuleBasedStateMachine):
    """A writer beside lists of rows: those appended, and how many of them the last flush has written."""

    writer_class = TraceWriter

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "trace.h5"
        self.appended: dict[str, list[tuple]] = {table: [] for table in NAMES}
        self.flushed = dict.fromkeys(NAMES, 0)
        self.described: dict[str, int] = {}
        self.status = "running"
        self.writer = self.writer_class(self.path, ATTRIBUTES)
        self.append("updates", 1)

    def expect(self, path: Path) -> None:
        """Assert that a trace has the rows up to the last flush, the attributes and the status."""
        trace = reader.load(path)
        for table in NAMES:
            found, expected = trace.tables[table].tolist(), self.appended[table][: self.flushed[table]]
            assert found == expected, f"{table}: {len(found)} rows are not the {len(expected)} that were flushed"
        assert trace.status == self.status, f"status {trace.status}, not {self.status}"
        assert trace.attributes.items() >= self.described.items(), "an attribute is missing"

    @precondition(lambda self: self.status == "running")
    @rule(table=st.sampled_from(NAMES), n=st.sampled_from([1, 2, 5]))
    def append(self, table: str, n: int) -> None:
        rows = self.appended[table]
        for _ in range(n):
            self.writer.append(table, make_row(table, len(rows)))
            rows.append(make_row(table, len(rows)))

    def has_flushed(self) -> None:
        self.flushed = {table: len(rows) for table, rows in self.appended.items()}

    @precondition(lambda self: self.status == "running")
    @rule(sync=st.booleans())
    def flush(self, sync: bool) -> None:
        (self.writer.sync if sync else self.writer.flush)()
        self.has_flushed()
        assert self.flushed.items() <= self.writer.flushed().items(), "rows are not the flushed ones"

    @precondition(lambda self: self.status == "running")
    @rule()
    def flush_if_due(self) -> None:
        due = sum(len(rows) - self.flushed[table] for table, rows in self.appended.items()) >= DUE_ROWS
        self.writer.flush_if_due(0.0)
        if due:
            self.has_flushed()
        assert self.flushed.items() <= self.writer.flushed().items(), "rows are not the flushed ones"

    @precondition(lambda self: self.status == "running")
    @rule(name=st.sampled_from(["version", "speed"]), value=st.integers(0, 9))
    def describe(self, name: str, value: int) -> None:
        self.writer.describe({name: value})
        self.append("updates", 1)
        self.flush(sync=False)
        self.described[name] = value

    @precondition(lambda self: self.status == "running")
    @rule(status=st.sampled_from(["finished", "failed", "interrupted"]))
    def close(self, status: str) -> None:
        self.writer.close(status)
        self.has_flushed()
        self.status = status
        self.expect(self.path)

    @precondition(lambda self: self.status == "running")
    @rule()
    def is_killed_during_a_flush(self) -> None:
        """Rows are in the file, but it does not say so yet."""
        images = []
        write = self.writer._write_progress

        def copy_first() -> None:
            images.append(self.image())
            write()

        self.writer._write_progress = copy_first
        self.writer.flush()
        self.writer._write_progress = write
        for image in images:
            self.expect(image)
        self.has_flushed()

    def image(self) -> Path:
        """Return a copy of the file as it is, which is what a kill would leave."""
        image = self.path.with_name("image.h5")
        shutil.copyfile(self.path, image)
        return image

    @rule()
    def a_kill_leaves_what_was_flushed(self) -> None:
        self.expect(self.image())

    @rule(share=st.sampled_from([0.0, 0.3, 1.0]))
    def resume(self, share: float) -> None:
        """Resume the run from a checkpoint that names fewer rows than the file has, after a kill or an end."""
        if self.status == "running":
            self.writer._abandon()  # closes the handles; the killed process wrote no more
        self.path = self.image().rename(Path(tempfile.mkdtemp(dir=self.folder.name)) / "trace.h5")
        keep = {table: int(share * n) for table, n in self.flushed.items()}
        self.writer = self.writer_class(self.path, ATTRIBUTES, resumed_rows=keep)
        self.expect(self.path.with_name("trace.lost-1.h5"))
        self.flushed, self.status, self.described = keep, "running", {}
        self.appended = {table: rows[: keep[table]] for table, rows in self.appended.items()}

    def teardown(self) -> None:
        if self.status == "running":
            self.close("finished")
        self.folder.cleanup()


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(writer, "DUE_ROWS", DUE_ROWS)
    monkeypatch.setattr(writer, "SCHEMA", {name: SCHEMA[name] for name in NAMES})
    monkeypatch.setattr(reader, "TABLES", {name: TABLES[name] for name in NAMES})
    monkeypatch.setattr(TraceWriter, "_time_append", lambda self: 0.0)


def test_a_trace_reads_as_it_was_written():
    run_state_machine_as_test(Rows, settings=FILES)


class TellsTooEarly(TraceWriter):
    """The number of rows reaches the file before the rows."""

    def flush(self) -> None:
        self._n_rows, n_rows = {table: n + self._buffers[table].used for table, n in self._n_rows.items()}, self._n_rows
        self._write_progress()
        self._file.flush()
        self._n_rows = n_rows
        super().flush()


class ForgetsToTell(TraceWriter):
    def _write_progress(self) -> None:
        pass


class LosesFullBuffers(TraceWriter):
    def append(self, table: str, row: Sequence[Any]) -> None:
        if self._buffers[table].used == writer.DUE_ROWS:
            self._buffers[table].used = 0
        super().append(table, row)


class KeepsLaterRows(TraceWriter):
    """A resumed trace begins with all rows of the trace before."""

    def _copy_rows(self, n_rows: Mapping[str, int]) -> None:
        with h5py.File(self.path) as before:
            n_rows = {table: before.attrs["flushed_rows"][table] for table in n_rows}
        super()._copy_rows(n_rows)


class ClosesUnflushed(TraceWriter):
    def close(self, status: str = "finished") -> None:
        self._drop_rows()
        super().close(status)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (TellsTooEarly, "rows are not the"),
        (ForgetsToTell, "rows are not the"),
        (LosesFullBuffers, "rows are not the"),
        (KeepsLaterRows, "rows are not the"),
        (ClosesUnflushed, "rows are not the"),
    ],
)
def test_a_broken_writer_is_caught(broken, message):
    assert_caught(
        type("Broken", (Rows,), {"writer_class": broken}),
        message,
        search=settings(SEARCH, stateful_step_count=20),
    )
