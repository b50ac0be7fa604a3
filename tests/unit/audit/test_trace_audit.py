"""The whole audit: correct traces pass, wherever they end, and changed ones fail."""

import random

import numpy as np
import pytest
from rich.console import Console

from hpcsync.audit import trace_audit as auditing
from hpcsync.audit.invariants import INVARIANTS, values_are_possible
from hpcsync.audit.server_recount import Recount
from hpcsync.audit.trace_audit import audit, main
from hpcsync.config.errors import JobError
from hpcsync.core.assignments import decision_fields
from hpcsync.trace.reader import load
from hpcsync.trace.schema import Outcome
from hpcsync.trace.writer import TraceWriter
from tests.unit.recorder import Recorder
from tests.unit.trace.recorder import (
    PARADIGMS,
    as_trace,
    attributes,
    edit,
    job_of,
    play,
    record,
    with_rows,
    with_status,
)


def failed(trace):
    return [check for check in audit(trace) if not check.passed]


def is_found(trace):
    """Return whether the audit finds a change: at the first of its invariants that does, or else by all of it."""
    if not values_are_possible(trace).passed:
        return True
    recount = Recount(trace)
    return any(not check(recount).passed for check in INVARIANTS) or failed(trace) != []


def scenario(seed):
    """Return random durations and events: equal workers and ties, jitter, departures and joins, stops from outside."""
    rng = random.Random(seed)
    n_workers = rng.randint(1, 5)
    return {
        "seconds": [rng.choice([1.0, 1.0, 1.5, 2.0, 3.0]) for _ in range(n_workers)],
        "jitter": rng.choice([0.0, rng.random()]),
        "stop_s": rng.choice([None, None, rng.uniform(3.01, 20.0)]),
        "leave": rng.choice([{}, {rng.randrange(n_workers): rng.randint(1, 8) for _ in range(2)}]),
        "changes": [(rng.uniform(0, 20.0), rng.randrange(n_workers)) for _ in range(rng.choice([0, 0, 4, 8]))],
        "seed": seed,
    }


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_correct_traces_pass(paradigm):
    for seed in range(20):
        how = scenario(seed)
        assert failed(record(paradigm, updates=random.Random(seed).randint(1, 60), **how)) == [], how


@pytest.mark.parametrize("paradigm", PARADIGMS)
@pytest.mark.parametrize("seed", range(2))
def test_a_trace_that_ends_after_any_row_passes(paradigm, seed):
    """The last flush may come after any row, also within an answer."""
    how = scenario(1000 + seed)
    job, rows = job_of(paradigm, len(how["seconds"]), updates=20), Recorder()
    fields = play(job, rows, **how)
    for n_rows in range(len(rows.rows) + 1):
        trace = as_trace(job, rows.rows[:n_rows], fields, "running")
        assert failed(trace) == [], f"{n_rows} rows of {how}"


def test_a_trace_in_a_file(tmp_path):
    path, job = tmp_path / "trace.h5", job_of("dssp")
    with TraceWriter(path, attributes(job), decision_fields(job)) as trace:
        play(job, trace, (1.0, 1.3, 2.1), jitter=0.4)
    assert all(check.passed for check in audit(path))
    in_memory = record("dssp", jitter=0.4)
    for table, rows in load(path).tables.items():
        assert rows.tobytes() == in_memory.tables[table].tobytes()


# fmt: off
AUDITED = {
    "pushes": (
        "seq", "now_s", "worker", "iteration", "version_read", "staleness", "batch_size", "share", "weight", "outcome",
        "wire_bytes", "pull_s", "encode_s", "local_steps", "begin_s", "end_s", "compute_s", "load_s",
    ),
    "grants": (
        "seq", "now_s", "worker", "iteration", "version", "gap_iters", "credits", "held_s", "batch_size", "local_steps",
        "first_sample", "commit_s", "ratio",
    ),
    "updates": ("version", "n_contributions", "samples", "lr"),
    "decisions": (
        "seq", "now_s", "controller", "worker", "chosen",
        "gap_iters", "interval_s", "r_star",
        "version", "k_before", "k_state", "k_loss", "active", "stuck", "median_s", "loss", "loss_start",
        "batch_before", "fixed_s", "sample_s", "gain",
        "iteration_s", "push_s", "pull_s", "encode_s", "reward", "loss_middle", "loss_end",
    ),
    "membership": ("seq", "now_s", "worker", "change"),
    "evaluations": ("version", "samples", "accuracy"),
}
# fmt: on


@pytest.mark.parametrize("table", AUDITED)
@pytest.mark.parametrize("paradigm", [name for name in PARADIGMS if name != "paper"])
def test_every_change_of_an_audited_value_is_found(paradigm, table):
    updates = 21 if paradigm in ("adaptive", "k-batches") else 10
    trace = record(paradigm, jitter=0.3, updates=updates, leave={2: 2})
    for column in AUDITED[table]:
        if column not in trace.tables[table].dtype.names:
            continue
        if column in ("wire_bytes", "encode_s") and trace.job.compresses:
            continue  # the codec decides
        values = trace.tables[table][column]
        first_row = len(column) % 3
        for row in range(first_row, len(values), 1 + len(values) // 6):
            value = values[row]
            if column == "batch_size" and table == "pushes" and trace.tables[table]["outcome"][row] == Outcome.DROPPED:
                continue  # a script may change it, and a dropped push is counted nowhere
            for other in (b"other",) if values.dtype.kind == "S" else (value + 1, value - 1):
                if other != other or other == value or (column == "local_steps" and value and other > 0):
                    continue  # NaN and inf stay the same; no other row determines the number of steps
                if (table, column, row) == ("membership", "now_s", len(values) - 1) and other > value:
                    continue  # nothing follows the last departure
                finds = failed if row == first_row else is_found
                assert finds(edit(trace, table, row, **{column: other})), f"{column} {value} -> {other} in row {row}"


@pytest.mark.parametrize("seed", range(40))
def test_damage_is_reported_and_never_raises(seed):
    rng = np.random.default_rng(seed)
    trace = record(rng.choice(list(PARADIGMS)), jitter=0.3, updates=15, leave={0: 3})
    for _ in range(rng.integers(1, 4)):
        table = rng.choice(["pushes", "grants", "updates"])
        rows = trace.tables[table].copy()
        kind = rng.integers(4)
        if kind == 0:
            rows = np.delete(rows, rng.integers(len(rows), size=3))
        elif kind == 1:
            rows = rows[rng.permutation(len(rows))]
        elif kind == 2:
            rows = np.concatenate([rows, rows[rng.integers(len(rows), size=3)]])
        else:
            column = rng.choice([name for name in rows.dtype.names if name not in ("lr", "loss", "wire_bytes")])
            rows[column] = rng.integers(0, 5, size=len(rows))
        trace = with_rows(trace, table, rows)
    for status in ("finished", "running"):
        assert audit(with_status(trace, status))


def test_check_names_are_unique():
    for paradigm in PARADIGMS:
        names = [check.name for check in audit(record(paradigm))]
        assert len(names) == len(set(names)) >= 15


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def console():
    return Console(width=80, color_system=None, record=True, quiet=False)


def write(path, status="finished", n_updates=20, tamper=lambda table, row: row):
    class Tampering:
        def append(self, table, row):
            trace.append(table, tamper(table, row))

    job = job_of("ssp", updates=n_updates)
    with TraceWriter(path, attributes(job)) as trace:
        play(job, Tampering(), (1.0, 1.3, 2.1))
        trace.close(status)
    return path


def test_a_trace_that_passes(tmp_path, console):
    assert main(write(tmp_path / "t.h5"), console) == 0
    shown = console.export_text()
    assert "all 39 checks passed" in shown
    assert "FAILED" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_folder_of_a_run_stands_for_its_trace(tmp_path, console):
    write(tmp_path / "trace.h5")
    assert main(tmp_path, console) == 0
    assert "all 39 checks passed" in console.export_text()


def test_an_unfinished_trace_is_reported(tmp_path, console):
    assert main(write(tmp_path / "t.h5", "interrupted"), console) == 0
    assert "interrupted" in console.export_text()


def test_a_trace_that_fails(tmp_path, console):
    def tamper(table, row):
        return (*row[:5], row[5] + 1, *row[6:]) if table == "pushes" and row[0] == 5 else row

    assert main(write(tmp_path / "t.h5", tamper=tamper), console) == 1
    shown = console.export_text()
    assert "FAILED  staleness equals the recount" in shown
    assert "seq 5 has staleness" in " ".join(shown.split())
    assert "1 of 39 checks failed" in shown


def test_a_file_that_is_not_a_trace(tmp_path, console):
    path = tmp_path / "t.h5"
    path.write_text("no trace")
    with pytest.raises(JobError, match=rf"^{path}: not a trace \(not an HDF5 file\)$"):
        main(path, console)
    with pytest.raises(JobError, match="none.h5: no such file"):
        auditing.main(tmp_path / "none.h5", console)
