"""Negative controls of the paradigms' guarantees: each trace violates one of them."""

import numpy as np
import pytest

from hpcsync.audit.bounds import check_bounds
from hpcsync.audit.server_recount import Recount
from hpcsync.audit.trace_audit import audit
from tests.unit.audit.failing import failing, failing_bounds
from tests.unit.trace.recorder import edit, record, remove, with_job, with_rows


def bounds(trace):
    return check_bounds(Recount(trace))


def ssp(staleness):
    return f'name = "ssp"\nstaleness = {staleness}'


def dssp(staleness_max, mode="bounded", staleness_min=1):
    return f'name = "dssp"\nstaleness_min = {staleness_min}\nstaleness_max = {staleness_max}\nmode = "{mode}"'


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_ssp_reaches_its_bounds_and_does_not_exceed_them(staleness):
    trace = record(ssp(staleness), (1.0, 1.7, 3.1))
    assert failing_bounds(trace) == set()
    assert failing_bounds(with_job(trace, ssp(staleness + 1))) == set()
    if staleness:
        tighter = with_job(trace, ssp(staleness - 1))
        found = {f"start lead is at most {staleness - 1}", f"push lead is at most {staleness}"}
        assert failing_bounds(tighter) == found
        assert failing(tighter) == found | {"replay gives the same grants"}


def test_updates_of_merged_pushes_are_told_from_single_ones():
    merged, single = record("merged", (1.0, 1.7, 3.1)), record(ssp(1), (1.0, 1.7, 3.1))
    assert failing_bounds(merged) == failing_bounds(single) == set()
    assert (merged.tables["updates"]["n_contributions"] > 1).any()
    assert failing_bounds(with_job(merged, ssp(1))) == {"an update is of one push"}
    as_merged = with_job(single, ssp(1) + "\nmerge = true")
    assert failing_bounds(as_merged) == {"an update is of one push and of those that wait"}
    assert all(check.passed for check in audit(merged))
    averaged = edit(merged, "pushes", 0, weight=0.5)
    assert {check.name for check in audit(averaged) if not check.passed} == {"weights follow from batch sizes"}


def test_without_a_bound_every_lead_is_allowed():
    trace = record(ssp("inf"), (1.0, 20.0))
    assert failing_bounds(trace) == set()
    assert failing_bounds(with_job(trace, ssp(5))) == {"start lead is at most 5", "push lead is at most 6"}


def test_dssp_is_bounded_by_the_larger_staleness():
    trace = record(dssp(5), (1.0, 4.5))
    assert failing_bounds(trace) == set()
    largest = int(Recount(trace).grant_lead.max())
    assert 1 < largest <= 5
    assert failing_bounds(with_job(trace, dssp(largest))) == set()
    tighter = with_job(trace, dssp(largest - 1))
    assert failing_bounds(tighter) == {f"start lead is at most {largest - 1}", f"push lead is at most {largest}"}


def test_paper_mode_is_reported_and_not_required():
    trace = record(dssp(15, "paper", 3), (1.0, 2.0), updates=200)
    start, push, *_ = bounds(trace)
    largest = Recount(trace).push_lead.max()
    assert largest > 16, "as printed, the algorithm does not bound the lead"
    assert start.passed and push.passed
    assert push.detail == f"not bounded; largest {largest}"
    assert all(check.passed for check in audit(trace))
    as_bounded = with_job(trace, dssp(15))
    assert failing_bounds(as_bounded) == {"start lead is at most 15", "push lead is at most 16"}


def test_bsp_without_a_barrier():
    names = failing_bounds(with_job(record("asp"), 'name = "bsp"'))
    assert names == {"staleness is 0", "rounds are complete"}


def test_bsp_with_a_stale_push():
    trace = edit(record("bsp"), "pushes", 7, staleness=1)
    assert failing_bounds(trace) == {"staleness is 0"}


def test_bsp_with_a_contribution_of_another_round():
    trace = record("bsp")
    updates = trace.tables["updates"].copy()
    updates["n_contributions"][:2] = 2, 4
    assert "rounds are complete" in failing_bounds(with_rows(trace, "updates", updates))


def test_bsp_without_a_worker_that_had_not_left():
    trace = record("bsp", leave={2: 4})
    assert failing_bounds(trace) == set()
    assert failing_bounds(remove(trace, "membership", 0)) >= {"rounds are complete"}
    (check,) = [check for check in bounds(remove(trace, "membership", 0)) if check.name == "rounds are complete"]
    assert "update 4 lacks worker 2, which had not left" in check.detail


def test_bsp_with_a_round_that_did_not_wait_for_a_departure():
    # Worker 2 leaves in round 4, but the trace records a later departure.
    trace = record("bsp", leave={2: 4})
    grants = trace.tables["grants"]
    late = edit(trace, "membership", 0, seq=grants["seq"][grants["version"] == 6][0] + 100)
    assert "rounds are complete" in failing_bounds(late)


def delay_grant(trace, worker, iteration):
    """Swap the grant's seq with that of the next push, so that its worker is blocked during that push."""
    grants, pushes = trace.tables["grants"], trace.tables["pushes"]
    (row,) = np.flatnonzero((grants["worker"] == worker) & (grants["iteration"] == iteration))
    seq = grants["seq"][row]
    (push,) = np.flatnonzero(pushes["seq"] == pushes["seq"][pushes["seq"] > seq].min())
    return edit(edit(trace, "grants", row, seq=pushes["seq"][push]), "pushes", push, seq=seq)


@pytest.mark.parametrize("paradigm", ["ssp", "dssp", "asp"])
def test_a_blocked_slowest_worker(paradigm):
    trace = record(paradigm, (1.0, 1.2, 2.1), updates=12)
    blocked = delay_grant(trace, worker=2, iteration=2)
    extra = {"no worker is blocked"} if paradigm == "asp" else set()
    assert failing_bounds(blocked) == {"the slowest worker is never blocked"} | extra


def test_a_blocked_worker_under_asp():
    trace = record("asp", (1.0, 1.2, 2.1), updates=12)
    assert failing_bounds(delay_grant(trace, worker=0, iteration=2)) == {"no worker is blocked"}
    assert failing_bounds(edit(trace, "grants", 3, held_s=0.5)) == {"no worker is blocked"}


# ---- elastic averaging ----


def easgd(*more):
    return "\n".join(['name = "easgd"', "period = 1", *more])


MOVES = "1 iterations per push, moving rate 0.3"


def test_easgd_with_another_period_or_rate():
    trace = record(easgd())
    assert failing_bounds(trace) == set()
    assert failing_bounds(with_job(trace, easgd("beta = 0.9"))) == set(), "it is the default"
    assert failing_bounds(with_job(trace, easgd("alpha = 0.2"))) == {"1 iterations per push, moving rate 0.2"}
    assert failing_bounds(with_job(trace, 'name = "easgd"\nperiod = 2')) == {"2 iterations per push, moving rate 0.3"}
    assert failing_bounds(edit(trace, "pushes", 7, local_steps=2)) == {MOVES}
    assert failing_bounds(edit(trace, "grants", 7, local_steps=2)) == {MOVES}
    assert failing_bounds(edit(trace, "updates", 7, lr=0.31)) == {MOVES}


@pytest.mark.parametrize("synchronous", ["false", "true"])
def test_easgd_with_a_grant_after_its_own_update(synchronous):
    """The worker would move towards a centre that it has moved itself, and the sum of all weights would change."""
    trace = record(easgd(f"synchronous = {synchronous}"))
    assert failing(trace) == set()
    version = trace.tables["grants"]["version"][7]
    after = edit(trace, "grants", 7, version=version + 1)
    assert {"each grant names the current version", "replay gives the same grants"} <= failing(after)


def test_asp_is_not_easgd_because_its_updates_precede_grants():
    names = failing(with_job(record("asp"), easgd()))
    assert {"each grant names the current version", "replay gives the same grants"} <= names


def test_synchronous_easgd_is_one_update_behind_in_every_round_but_the_first():
    trace = record(easgd("synchronous = true"))
    assert set(trace.tables["pushes"]["staleness"][3:30].tolist()) == {1}
    assert failing_bounds(edit(trace, "pushes", 7, staleness=0)) == {"staleness is 1, 0 in a first iteration"}
    assert failing_bounds(edit(trace, "pushes", 1, staleness=1)) == {"staleness is 1, 0 in a first iteration"}


def test_synchronous_easgd_without_a_barrier():
    names = failing_bounds(with_job(record(easgd()), easgd("synchronous = true")))
    assert names == {"staleness is 1, 0 in a first iteration", "rounds are complete"}


def test_synchronous_easgd_without_a_worker_that_had_not_left():
    trace = record(easgd("synchronous = true"), leave={2: 4})
    assert failing_bounds(trace) == set()
    assert failing_bounds(remove(trace, "membership", 0)) >= {"rounds are complete"}


def test_a_blocked_worker_under_asynchronous_easgd():
    blocked = delay_grant(record(easgd(), (1.0, 1.2, 2.1), updates=12), worker=0, iteration=2)
    assert failing_bounds(blocked) == {"no worker is blocked"}
