"""Negative controls of the k family's guarantees: each trace violates one of them."""

from functools import cached_property

import numpy as np
import pytest

from hpcsync.audit.server_recount import Recount
from hpcsync.planning import k_controller
from hpcsync.trace.schema import Outcome
from tests.unit.audit.failing import failing, failing_bounds
from tests.unit.trace.recorder import edit, record, remove, with_job, with_rows, with_status

SECONDS = (1.0, 1.3, 2.1, 3.7)
FORMS = ["k-sync", "k-batch-sync", "k-async", "k-batch-async"]
WORKERS, BATCHES = "each update takes k workers", "each update takes k mini-batches"
LATE, BEYOND = "dropped pushes are of an older version", "dropped pushes exceed the staleness bound"
WAIT = "only contributors block, until their update"
K = "k follows its policy within its limits"
CANCELLED, WHOLE = "cancelled iterations are of an older version", "no iteration is cancelled"


def k(name, of, *more):
    return "\n".join([f'name = "{name}"', f"k = {of}", *more])


def first(trace, **values):
    """Return the first push with these values."""
    pushes = trace.tables["pushes"]
    return int(np.flatnonzero(np.logical_and.reduce([pushes[name] == value for name, value in values.items()]))[0])


@pytest.mark.parametrize("name", FORMS)
def test_k_is_the_job_s(name):
    trace = record(k(name, 3), SECONDS, jitter=0.2)
    assert failing(trace) == set()
    assert trace.tables["updates"]["n_contributions"].tolist() == [3] * 40
    takes = BATCHES if "batch" in name else WORKERS
    assert takes in failing_bounds(with_job(trace, k(name, 4)))
    assert takes in failing_bounds(with_job(trace, k(name, 1)))


@pytest.mark.parametrize(("sync", "other"), [("k-sync", "k-async"), ("k-batch-sync", "k-batch-async")])
def test_one_form_is_not_another(sync, other):
    assert failing_bounds(with_job(record(k(other, 2), SECONDS), k(sync, 2))) == {LATE}
    assert BEYOND in failing_bounds(with_job(record(k(sync, 2), SECONDS), k(other, 2)))


def test_a_worker_that_counts_twice():
    trace = record(k("k-batch-sync", 2), SECONDS)
    assert WORKERS in failing_bounds(with_job(trace, k("k-sync", 2)))
    trace = record(k("k-async", 2), SECONDS)
    row = int(np.flatnonzero(np.diff(trace.tables["pushes"]["worker"]))[8])
    assert WORKERS in failing_bounds(edit(trace, "pushes", row, worker=trace.tables["pushes"]["worker"][row + 1]))


@pytest.mark.parametrize(("name", "takes"), [("k-sync", WORKERS), ("k-batch-async", BATCHES)])
def test_an_update_at_another_time_than_what_completed_it(name, takes):
    trace = record(k(name, 2), SECONDS)
    now_s = trace.tables["updates"]["now_s"]
    assert failing_bounds(edit(trace, "updates", 7, now_s=np.nextafter(now_s[7], np.inf))) == {takes}


@pytest.mark.parametrize("name", ["k-sync", "k-async"])
def test_fewer_than_k_only_if_fewer_workers_are_left(name):
    trace = record(k(name, 3), SECONDS, leave={1: 4, 3: 3})
    n = trace.tables["updates"]["n_contributions"]
    assert n[0] == 3 and n[-1] == 2
    assert failing(trace) == set()
    for row in range(2):
        assert WORKERS in failing_bounds(remove(trace, "membership", row))


def test_an_update_that_waits_for_a_departure(monkeypatch):
    """Workers block until others leave.

    Late pushes are dropped meanwhile, and their workers read the version that is still current.
    """
    trace = record(k("k-sync", 3), (1.0, 1.4, 3.1, 2.2), updates=30, leave={0: 4, 1: 4, 2: 4})
    assert failing(trace) == set()
    last = cached_property(lambda recount: recount.push_event[recount.applied[recount._last]])
    last.__set_name__(Recount, "update_event")
    monkeypatch.setattr(Recount, "update_event", last)
    wrong = {"each grant names the current version", "staleness equals the recount", WORKERS, WAIT}
    assert failing(trace) == wrong, "an update is not always made with its last contribution"


def test_mini_batches_left_over_at_the_end_are_no_update():
    trace = record(k("k-batch-async", 2), (1.0, 1.0), leave={0: 3, 1: 2})
    assert trace.tables["pushes"]["outcome"].tolist() == [Outcome.APPLIED] * 2 + [Outcome.DROPPED]
    assert failing(trace) == set()


# ---- dropped pushes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["k-sync", "k-batch-sync"])
def test_synchronous_forms_drop_late_pushes_only(name):
    trace = record(k(name, 2), SECONDS)
    row = first(trace, outcome=Outcome.DROPPED)
    assert trace.tables["pushes"]["staleness"][row] > 0
    assert LATE in failing_bounds(edit(trace, "pushes", row, outcome=Outcome.APPLIED))
    assert LATE in failing_bounds(
        edit(trace, "pushes", row, version_read=trace.tables["pushes"]["version_read"][row] + 1)
    )
    on_time = int(np.flatnonzero(trace.tables["pushes"]["outcome"] == Outcome.APPLIED)[4])
    assert LATE in failing_bounds(edit(trace, "pushes", on_time, version_read=1))
    assert LATE in failing_bounds(edit(trace, "pushes", on_time, outcome=Outcome.DROPPED))


@pytest.mark.parametrize("name", ["k-async", "k-batch-async"])
def test_asynchronous_forms_drop_pushes_beyond_their_bound_only(name):
    trace = record(k(name, 2, "staleness_max = 1"), SECONDS)
    pushes = trace.tables["pushes"]
    assert (pushes["outcome"][:-4] == Outcome.DROPPED).any()
    assert failing(trace) == set()
    assert failing_bounds(with_job(trace, k(name, 2, "staleness_max = 5"))) == {BEYOND}
    assert failing_bounds(with_job(trace, k(name, 2))) == {BEYOND}
    assert failing_bounds(with_job(trace, k(name, 2, "staleness_max = 0"))) == {BEYOND}
    unbounded = record(k(name, 2), SECONDS)
    assert failing_bounds(with_job(unbounded, k(name, 2, "staleness_max = 1"))) == {BEYOND}


def test_a_contributor_that_does_not_block():
    trace = record(k("k-async", 2), SECONDS)
    assert failing_bounds(with_job(trace, k("k-batch-async", 2))) == {"no worker is blocked"}
    other = record(k("k-batch-async", 2), SECONDS)
    assert WAIT in failing_bounds(with_job(other, k("k-async", 2)))


def test_a_late_worker_that_blocks():
    trace = record(k("k-sync", 2), SECONDS)
    grants, pushes = trace.tables["grants"], trace.tables["pushes"]
    push = pushes[first(trace, outcome=Outcome.DROPPED)]
    (row,) = np.flatnonzero((grants["worker"] == push["worker"]) & (grants["iteration"] == push["iteration"] + 1))
    seq = grants["seq"][row]
    after = int(np.flatnonzero(pushes["seq"] > seq)[0])
    assert pushes["seq"][after] == seq + 1
    late = edit(edit(trace, "grants", row, seq=seq + 1), "pushes", after, seq=seq)
    assert failing_bounds(late) == {WAIT}


# ---- cancelled iterations --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def aborted():
    trace = record(k("k-sync", 2, 'cancel = "abort"'), SECONDS, jitter=0.2)
    assert (trace.tables["pushes"]["share"] == 0.5).sum() > 5
    assert failing(trace) == set()
    return trace


def test_cancelled_iterations_need_abort(aborted):
    assert failing_bounds(with_job(aborted, k("k-sync", 2))) == {WHOLE}
    assert failing_bounds(edit(record("asp"), "pushes", 5, share=0.5)) == {WHOLE}


def test_only_late_iterations_are_cancelled(aborted):
    pushes = aborted.tables["pushes"]
    applied = int(np.flatnonzero(pushes["outcome"] == Outcome.APPLIED)[6])
    assert failing(edit(aborted, "pushes", applied, share=0.5, wire_bytes=2000)) == {CANCELLED}
    at_the_end = record(k("k-sync", 3, 'cancel = "abort"'), SECONDS, stop_s=16.5)
    pushes = at_the_end.tables["pushes"]
    left_over = np.flatnonzero((pushes["outcome"] == Outcome.DROPPED) & (pushes["staleness"] == 0))
    assert len(left_over)
    assert failing(edit(at_the_end, "pushes", left_over[0], share=0.5, wire_bytes=2000)) == {CANCELLED}


# ---- a k that changes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adaptive():
    """A trace with two stragglers among four workers, one of the others leaving: k goes from 4 to 2."""
    trace = record(k("k-sync", '"state"'), (1.0, 1.1, 3.0, 3.2), updates=100, jitter=0.1, leave={1: 60})
    assert len(trace.tables["decisions"]) >= 2
    assert failing(trace) == set()
    return trace


@pytest.mark.parametrize("values", [{"k_before": 2.0}, {"version": 21.0}, {"chosen": 2.0}, {"chosen": 4.0}])
def test_a_change_that_does_not_follow(adaptive, values):
    assert K in failing_bounds(edit(adaptive, "decisions", 0, **values))


@pytest.mark.parametrize("values", [{"k_state": 4.0}, {"active": 3.0}])
def test_a_change_for_another_reason(adaptive, values):
    assert failing_bounds(edit(adaptive, "decisions", 0, **values)) == {K}


def test_a_change_below_the_least(adaptive):
    assert K in failing_bounds(with_job(adaptive, k("k-sync", '"state"', "k_min = 4")))


def test_a_change_by_throughput():
    trace = record(k("k-sync", '"throughput"'), (1.0, 1.1, 1.3, 3.2), updates=100, jitter=0.05)
    assert failing(trace) == set()
    assert trace.tables["decisions"]["chosen"].tolist() == [3.0]
    assert failing_bounds(edit(trace, "decisions", 0, k_throughput=4.0)) == {K}
    assert "replay gives the same decisions" in failing(edit(trace, "decisions", 0, throughput=2.0))


def test_a_change_at_another_update(adaptive):
    decisions = adaptive.tables["decisions"]
    grants = adaptive.tables["grants"]
    seq = decisions["seq"][0]
    (row,) = np.flatnonzero(grants["seq"] == seq + 4)
    pushes = adaptive.tables["pushes"]
    (push,) = np.flatnonzero(pushes["seq"] == seq + 5)
    later = edit(adaptive, "decisions", 0, seq=pushes["seq"][push])
    later = edit(edit(later, "pushes", push, seq=seq + 4), "grants", row, seq=seq)
    assert K in failing_bounds(later)


def test_a_choice_that_changes_nothing(adaptive):
    before = adaptive.tables["decisions"]["k_before"][-1]
    assert K in failing_bounds(edit(adaptive, "decisions", -1, chosen=before, k_state=before))


def test_changes_after_other_numbers_of_updates(monkeypatch):
    monkeypatch.setattr(k_controller, "INTERVAL", 10)
    trace = record(k("k-sync", '"state"'), (1.0, 1.1, 3.0, 3.2), updates=35, jitter=0.1)
    assert len(trace.tables["decisions"])
    assert failing_bounds(trace) == {K}


def test_updates_of_the_k_before_a_change(adaptive):
    assert failing_bounds(remove(adaptive, "decisions", 0)) >= {WORKERS}


def test_a_fixed_k_that_changes(adaptive):
    assert {"k is 4", WORKERS} <= failing_bounds(with_job(adaptive, k("k-sync", 4)))


def test_decisions_without_their_columns(adaptive):
    other = record(k("k-sync", 2), SECONDS)
    assert K in failing_bounds(with_job(other, k("k-sync", '"state"')))
    assert K in failing(with_job(other, k("k-sync", '"state"')))


# ---- unfinished traces -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_after_a_pending_contribution_workers_continue_without_an_update(name):
    trace = with_status(record(k(name, 3), SECONDS, jitter=0.2), "running")
    pushes = trace.tables["pushes"]
    last = Recount(trace).complete_seq[20]
    pending = int(np.flatnonzero(pushes["seq"] > last)[0])  # its row is missing, all others up to the next update exist
    following = Recount(trace).complete_seq[21]
    cut = trace
    for table in ("pushes", "grants", "decisions"):
        rows = cut.tables[table]
        cut = with_rows(cut, table, rows[rows["seq"] < following])
    rows = cut.tables["pushes"]
    open_ = (rows["seq"] > last) & (rows["outcome"] == Outcome.APPLIED)
    cut = with_rows(cut, "pushes", rows[~open_])
    cut = with_rows(cut, "updates", cut.tables["updates"][:21])
    cut = with_rows(cut, "evaluations", cut.tables["evaluations"][:3])
    assert failing(cut) == set()
    missing = with_rows(trace, "pushes", np.delete(pushes, pending))
    assert "seq numbers each row once" in failing(missing)
