"""The replay finds the first difference and attributes it to the right kind of row."""

import numpy as np
import pytest

from hpcsync.audit.replay import replay
from hpcsync.audit.server_recount import Recount
from hpcsync.core.assignments import create_assignments, create_paradigm
from tests.unit.trace.recorder import (
    BATCHES,
    PARADIGMS,
    edit,
    job_of,
    record,
    remove,
    with_job,
    with_rows,
    with_status,
)


def replayed(trace):
    return {
        check.name.split()[-1]: check
        for check in replay(Recount(trace), create_paradigm(trace.job), create_assignments(trace.job))
    }


def failing(trace):
    return {kind for kind, check in replayed(trace).items() if not check.passed}


@pytest.fixture(scope="module")
def dssp():
    return record("dssp", jitter=0.3)


def test_all_rows_are_compared(dssp):
    checks = replayed(dssp)
    for kind, check in checks.items():
        assert check.passed
        assert check.n_checked == len(dssp.tables[kind]) > 5
        assert check.detail == ""


@pytest.mark.parametrize(
    ("column", "by"),
    [("worker", 1), ("iteration", 1), ("version", -1), ("gap_iters", 1), ("credits", 1), ("held_s", 1e-9)],
)
def test_a_grant_that_differs(dssp, column, by):
    value = dssp.tables["grants"][column][20]
    changed = edit(dssp, "grants", 20, **{column: (value + by) % 3 if column == "worker" else value + by})
    checks = replayed(changed)
    assert failing(changed) == {"grants"}
    assert checks["grants"].n_checked == 20
    assert f"seq {dssp.tables['grants']['seq'][20]}" in checks["grants"].detail
    assert checks["updates"].detail == "up to the first difference"


@pytest.mark.parametrize(
    ("column", "value"),
    [("controller", b"other"), ("worker", 1), ("chosen", 9.0), ("gap_iters", 7.0), ("r_star", 7.0), ("slowest", 0.5)],
)
def test_a_decision_that_differs(dssp, column, value):
    decisions = dssp.tables["decisions"]
    row = np.flatnonzero((decisions["worker"] == 0) & ~np.isnan(decisions["slowest"]))[2]
    assert failing(edit(dssp, "decisions", row, **{column: value})) == {"decisions"}


def test_a_decision_that_is_missing(dssp):
    assert failing(remove(dssp, "decisions", 2)) == {"decisions"}


def test_a_decision_too_many(dssp):
    rows = dssp.tables["decisions"]
    again = rows[-1:].copy()
    again["seq"] = dssp.tables["grants"]["seq"][-1] + 1
    assert failing(with_rows(dssp, "decisions", np.concatenate([rows, again]))) == {"decisions"}


def test_a_grant_that_is_missing(dssp):
    assert failing(remove(dssp, "grants", 12)) == {"grants"}


def test_a_grant_before_any_event(dssp):
    assert failing(edit(dssp, "grants", 0, seq=0)) == {"grants"}


def test_grants_in_another_order():
    trace = record("bsp")
    first, second = trace.tables["grants"]["seq"][[3, 4]]
    assert failing(edit(edit(trace, "grants", 3, seq=second), "grants", 4, seq=first)) == {"grants"}


def test_a_push_that_the_paradigm_rejects(dssp):
    worker = dssp.tables["pushes"]["worker"][20]
    checks = replayed(edit(dssp, "pushes", 20, worker=(worker + 1) % 3))
    assert not all(check.passed for check in checks.values())
    trace = record("bsp")
    again = replayed(edit(trace, "pushes", 1, worker=trace.tables["pushes"]["worker"][0]))
    assert "rejects" in again["grants"].detail


def test_a_wrong_number_of_contributions():
    trace = record("bsp")
    checks = replayed(edit(trace, "updates", 5, n_contributions=2))
    assert not checks["updates"].passed
    assert checks["updates"].detail == "version 6 has 2 contributions, the replay gives 3"


def test_an_update_too_many_or_too_few(dssp):
    rows = dssp.tables["updates"]
    assert failing(with_rows(dssp, "updates", np.concatenate([rows, rows[-1:]]))) == {"updates"}
    assert failing(with_rows(dssp, "updates", rows[:-1])) == {"updates"}


def test_an_applied_push_recorded_as_dropped():
    trace = record("ssp", jitter=0.3, updates=41)
    assert failing(edit(trace, "pushes", 10, outcome=1)) == {"updates"}


def test_a_pending_push_recorded_as_applied():
    trace = record("bsp", stop_s=11.05)
    row = np.flatnonzero(trace.tables["pushes"]["outcome"])[0]
    assert failing(trace) == set()
    assert failing(edit(trace, "pushes", row, outcome=0)) == {"updates"}


def test_another_paradigm():
    trace = record("ssp")
    assert failing(with_job(trace, "asp")) == {"grants"}
    assert failing(with_job(trace, "bsp")) == {"grants"}
    assert failing(with_job(trace, 'name = "dssp"\nstaleness_min = 2\nstaleness_max = 5')) == {"decisions"}
    assert failing(with_job(trace, 'name = "dssp"\nstaleness_min = 2\nstaleness_max = 2')) == set(), "it is SSP"


# ---- the end of a run ------------------------------------------------------------------------------------------------


def test_a_stop_that_no_update_can_have_caused():
    # A departure releases a blocked worker; no push is applied, so the rule cannot have become true there.
    trace = record('name = "ssp"\nstaleness = 1', (1.0, 5.0), leave={1: 1})
    grants = trace.tables["grants"]
    row = np.flatnonzero(grants["held_s"] > 0)[0]
    stopped = edit(trace, "grants", row, batch_size=0, local_steps=0)
    assert "no update can have ended the run" in replayed(stopped)["grants"].detail


def test_continuing_after_the_stop():
    trace = record("bsp")
    assert (trace.tables["grants"]["local_steps"][-3:] == 0).all()
    assert failing(edit(trace, "grants", -1, batch_size=8, local_steps=1)) == {"grants"}


def test_a_blocked_worker_without_a_stop_grant():
    trace = record('name = "ssp"\nstaleness = 0', (1.0, 10.0), updates=2)
    assert failing(trace) == set()
    assert (trace.tables["grants"]["local_steps"] == 0).all()
    # Without the stop grant that the paradigm would not have given.
    trace = record('name = "ssp"\nstaleness = 0', (1.0, 1.1, 10.0), updates=2)
    row = np.flatnonzero(trace.tables["grants"]["held_s"] > 0)[0]
    checks = replayed(remove(trace, "grants", row))
    assert "has no stop grant" in checks["grants"].detail


@pytest.mark.parametrize("paradigm", PARADIGMS)
@pytest.mark.parametrize("stop_s", [0.5, 1.0, 2.05, 4.3, 6.5, 11.05])
def test_a_run_that_was_stopped_from_outside(paradigm, stop_s):
    if paradigm == "adsp":
        stop_s += 3.0  # its check period
    assert failing(record(paradigm, stop_s=stop_s)) == set()


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_a_failed_run_drops_pending_pushes_without_grants(paradigm):
    for die_s in np.arange(0.5, 8.0, 0.75):
        trace = record(paradigm, die_s=die_s)
        assert failing(with_status(trace, "failed")) == set()


def test_only_the_last_answer_of_an_unfinished_trace_may_be_incomplete():
    trace = with_status(record("bsp"), "running")
    assert failing(remove(trace, "grants", -1)) == set()
    assert job_of("bsp").cluster.workers == 3
    middle = remove(remove(remove(trace, "grants", 5), "grants", 4), "grants", 3)
    seq = trace.tables["grants"]["seq"][3]
    for table in ("pushes", "grants"):  # no gap, so the recount does not end there
        rows = middle.tables[table].copy()
        rows["seq"][rows["seq"] > seq] -= 3
        middle = with_rows(middle, table, rows)
    assert failing(middle) == {"grants"}


@pytest.mark.parametrize("paradigm", ["ashl", f'name = "asp"\n{BATCHES}'])
def test_a_departure_may_be_the_first_event_after_a_stop(paradigm):
    """The remaining workers then get none of the departed worker's share."""
    continued = record(paradigm, leave={2: 7})
    left_s = continued.tables["membership"]["now_s"][0]
    assert left_s in continued.tables["decisions"]["now_s"]
    stopped = record(paradigm, leave={2: 7}, stop_s=left_s - 1e-3)
    assert left_s in stopped.tables["membership"]["now_s"]
    assert left_s not in stopped.tables["decisions"]["now_s"]
    assert failing(stopped) == set()
    seqs = continued.tables["decisions"]["seq"][continued.tables["decisions"]["now_s"] == left_s]
    silent = with_rows(
        continued, "decisions", continued.tables["decisions"][~np.isin(continued.tables["decisions"]["seq"], seqs)]
    )
    assert failing(silent) == {"decisions"}, "the run continued"
