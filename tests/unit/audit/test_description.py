"""Checks of the file as a whole: every value of every table, and the attributes that repeat the job."""

import dataclasses

import h5py
import numpy as np
import pytest

from hpcsync.audit.description import check_clocks
from hpcsync.audit.trace_audit import audit
from hpcsync.core.assignments import decision_fields
from hpcsync.paradigms.records import Problem
from hpcsync.trace.reader import load
from hpcsync.trace.schema import TABLES
from hpcsync.trace.writer import TraceWriter
from tests.unit.audit.failing import failing
from tests.unit.trace.recorder import attributes, edit, job_of, on_ranks, play, record, with_rows

JOB = "attributes agree with the job"
ROWS = "rows are those that were written"
CLOCKS = "clocks are those of the ranks"
ABSENT = "only what the job can have is recorded"


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
    trace = dataclasses.replace(trace, attributes={**trace.attributes, name: value})
    assert failing(trace) == {JOB}


@pytest.mark.parametrize("name", ["seed", "n_workers", "n_servers", "paradigm", "engine"])
def test_an_attribute_that_is_missing(name):
    trace = record("dssp")
    others = {key: value for key, value in trace.attributes.items() if key != name}
    assert failing(dataclasses.replace(trace, attributes=others)) == {JOB}


def test_an_unknown_engine():
    trace = record("dssp")
    assert failing(dataclasses.replace(trace, attributes={**trace.attributes, "engine": "other"})) == {JOB}


def test_each_rank_has_a_clock_at_each_start():
    trace = on_ranks(record("dssp"), 1e-5, starts=((0.0, 0), (5.0, 20)))
    assert failing(trace) == set()
    clocks, starts = trace.tables["clocks"], trace.tables["starts"]
    for row in range(len(clocks)):
        assert failing(with_rows(trace, "clocks", np.delete(clocks, row))) == {CLOCKS}
    assert failing(with_rows(trace, "clocks", clocks[:0])) == {CLOCKS}
    for row in range(len(starts)):
        assert failing(with_rows(trace, "starts", np.delete(starts, row))) == {CLOCKS}
    assert failing(with_rows(trace, "starts", starts[:0])) == {CLOCKS}
    for column in ("offset_s", "uncertainty_s"):
        assert failing(edit(trace, "clocks", 0, **{column: 1.0})) == {CLOCKS}, "rank 0's own clock"


@pytest.mark.parametrize("column", ["rank", "start"])
@pytest.mark.parametrize("value", [-9, 9])
def test_clocks_of_unknown_ranks_and_starts(column, value):
    trace = on_ranks(record("dssp"), 1e-5, starts=((0.0, 0), (5.0, 20)))
    further = trace.tables["clocks"][-1:].copy()
    further[column] = value
    assert failing(with_rows(trace, "clocks", np.append(trace.tables["clocks"], further))) == {CLOCKS}


def test_a_start_may_lack_a_worker_that_is_away():
    trace = record("dssp", changes=[(7.0, 1)])
    died_seq = trace.tables["membership"]["seq"][0]
    for seq in (died_seq - 1, died_seq, died_seq + 1):
        resumed = on_ranks(trace, 1e-5, starts=((0.0, 0), (7.0, seq)))
        for rank, worker in enumerate((None, 0, 1, 2)):
            fewer = with_rows(resumed, "clocks", np.delete(resumed.tables["clocks"], 4 + rank))
            assert failing(fewer) == (set() if worker == 1 else {CLOCKS})
    assert CLOCKS in failing(with_rows(resumed, "clocks", np.delete(resumed.tables["clocks"], 2))), "it began"


def test_problems_of_scripts_are_none_of_jobs():
    trace = record("dssp")
    for row in (7, -1):
        assert failing(edit(trace, "pushes", row, problem=Problem.SKIPPED)) >= {ABSENT}


def test_no_worker_dies_where_a_death_ends_the_run():
    trace = record("dssp", changes=[(7.0, 1)])
    assert failing(trace) == set()
    ends = trace.job.model_copy(update={"cluster": trace.job.cluster.model_copy(update={"on_death": "end"})})
    trace = dataclasses.replace(trace, attributes={**trace.attributes, "job": ends.to_toml()})
    assert failing(trace) == {ABSENT}
    died_seq = trace.tables["membership"]["seq"][0]
    assert failing(on_ranks(trace, 1e-5, starts=((0.0, 0), (7.0, died_seq + 1)))) == set(), "before it, by another job"
    fewer = on_ranks(trace, 1e-5, starts=((0.0, 0), (7.0, died_seq - 1)))
    assert failing(fewer) == {ABSENT}
    fewer = with_rows(fewer, "clocks", np.delete(fewer.tables["clocks"], 4 + 2))
    assert failing(fewer) == set(), "resumed without it"


def test_an_older_format_has_no_later_columns():
    """The checks of an older format are fewer."""
    trace = record("dssp")
    for version in (7, 8):
        norm = edit(trace, "updates", 3, gradient_sq=1.0)
        assert failing(dataclasses.replace(norm, attributes={**trace.attributes, "format_version": version})) == {
            ABSENT
        }
    assert failing(dataclasses.replace(trace, attributes={**trace.attributes, "format_version": 7})) == {ABSENT}


def test_checksums_count_in_every_format(path):
    with h5py.File(path, "r+") as file:
        rows = file["evaluations"][:]
        rows["accuracy"][-1] += 0.001
        file["evaluations"][:] = rows
        file.attrs["format_version"] = 7
    assert failing(load(path)) == {ROWS}


@pytest.mark.parametrize("table", ["pushes", "grants", "updates"])
def test_a_table_without_rows_is_named(table):
    trace = record("dssp")
    empty = with_rows(trace, table, trace.tables[table][:0])
    details = [check.detail for check in audit(empty) if check.name == "rows can be followed"]
    assert all(detail.startswith(f"/{table} has no rows") for detail in details)
    assert failing(empty)
