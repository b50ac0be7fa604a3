"""Checks of the file as a whole: every value of every table, and the attributes that repeat the job."""

import dataclasses

import h5py
import numpy as np
import pytest

from hpcsync.audit.description import check_clocks
from hpcsync.audit.trace_audit import audit
from hpcsync.core.assignments import decision_fields
from hpcsync.trace.reader import load
from hpcsync.trace.schema import TABLES
from hpcsync.trace.writer import TraceWriter
from tests.unit.trace.recorder import attributes, job_of, play, record, with_rows

JOB = "attributes agree with the job"
ROWS = "rows are those that were written"


def failing(trace):
    return {check.name for check in audit(trace) if not check.passed}


@pytest.fixture
def path(tmp_path):
    job, path = job_of("dssp", updates=20), tmp_path / "trace.h5"
    with TraceWriter(path, {**attributes(job), "seed": job.seed}, decision_fields(job)) as trace:
        for table in ("clocks", "starts"):
            trace.append(table, np.zeros((), TABLES[table]).item())
        play(job, trace, (1.0, 1.3, 2.1), jitter=0.3, changes=[(7.0, 1), (9.0, 1)])
    return path


def test_the_trace_itself_passes(path):
    assert failing(load(path)) == set()


@pytest.mark.parametrize(
    ("start", "now_s", "seq", "right"),
    [
        ((0, 1), (0.0, 2.0), (0, 5), True),
        ((0, 2), (0.0, 2.0), (0, 5), False),
        ((0, 1), (0.0, -1.0), (0, 5), False),
        ((0, 1), (0.0, 2.0), (5, 4), False),
        ((0, 1), (0.0, 2.0), (1, 5), False),
        ((0, 1), (0.5, 2.0), (0, 5), False),
    ],
)
def test_starts_are_numbered_and_follow_each_other(path, start, now_s, seq, right):
    rows = np.zeros(2, TABLES["starts"])
    rows["start"], rows["now_s"], rows["seq"] = start, now_s, seq
    (check,) = check_clocks(with_rows(load(path), "starts", rows))
    assert check.passed == right


def test_every_changed_value_is_found(path):
    rng = np.random.default_rng(1)
    n_changed = 0
    for table, dtype in TABLES.items():
        for column in dtype.names:
            with h5py.File(path, "r+") as file:
                if not len(file[table]):
                    continue
                rows = file[table][:]
                before = rows.copy()
                values = rows[column].view(f"V{rows.dtype[column].itemsize}")
                row = int(rng.integers(len(rows)))
                value = np.frombuffer(rng.bytes(values.dtype.itemsize), values.dtype)
                values[row] = value[0]
                file[table][:] = rows
            if rows.tobytes() != before.tobytes():
                n_changed += 1
                assert load(path).altered == (table,), column
            with h5py.File(path, "r+") as file:
                file[table][:] = before
    assert n_changed > 50
    assert load(path).altered == ()


def test_an_evaluation_that_was_changed_fails_the_audit(path):
    with h5py.File(path, "r+") as file:
        rows = file["evaluations"][:]
        rows["accuracy"][-1] += 0.001
        file["evaluations"][:] = rows
    assert failing(load(path)) == {ROWS}


def test_rows_that_were_removed_or_added_are_found(path):
    with h5py.File(path, "r+") as file:
        flushed = file.attrs["flushed_rows"].copy()
        flushed["evaluations"] -= 1
        file.attrs.modify("flushed_rows", flushed)
    assert ROWS in failing(load(path))


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 7), ("n_workers", 4), ("n_workers", 2), ("n_servers", 2), ("paradigm", "ssp")]
)
def test_an_attribute_that_disagrees_with_the_job(name, value):
    trace = record("dssp")
    trace = dataclasses.replace(trace, attributes={**trace.attributes, "seed": 0, name: value})
    assert failing(trace) == {JOB}
