"""Negative controls of the checks of a switch: each trace violates one of them."""

from dataclasses import replace

import numpy as np
import pytest

from hpcsync.audit.bounds import check_bounds
from hpcsync.audit.phases import parts
from hpcsync.audit.server_recount import Recount
from hpcsync.audit.trace_audit import audit
from hpcsync.trace.reader import load
from tests.unit.audit.failing import failing_bounds
from tests.unit.recorder import Recorder
from tests.unit.simulator.running import simulate, timing_job
from tests.unit.trace.recorder import as_trace, edit, job_of, play, remove, with_rows

KEYS = {"name": "sync-switch", "share": 0.5}
DUE, TOGETHER, RATES = (
    "it switches at 40 samples",
    "all workers continue from the switch together",
    "learning rates follow the schedule",
)


def job(then=None, **keys):
    return timing_job(
        workers=3,
        seconds=[1.0, 1.3, 2.1],
        stop={"samples": 80},
        paradigm={**KEYS, **keys, "then": then or {"name": "asp"}},
        cluster={"events": [{"change": "leave", "worker": 2, "at_s": 5.0}]},
    )


@pytest.fixture(scope="module", params=["asp", "ssp", "dssp"])
def second(request):
    return {
        "asp": {"name": "asp"},
        "ssp": {"name": "ssp", "staleness": 1},
        "dssp": {"name": "dssp", "staleness_min": 0, "staleness_max": 2},
    }[request.param]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("traces") / "trace.h5"
    simulate(job(), found)
    return found


@pytest.fixture
def trace(path):
    return load(path)


def bounds(trace):
    return check_bounds(Recount(trace))


def of(trace, job):
    """Return the trace as if it were of another job."""
    return replace(trace, attributes={**trace.attributes, "job": job.to_toml()})


def switch_row(trace):
    return int(np.flatnonzero(trace.tables["decisions"]["controller"] == b"switch")[0])


def test_a_run_passes_and_each_part_has_the_checks_of_its_paradigm(tmp_path, second):
    found = simulate(job(second), tmp_path / "trace.h5")
    assert [check.name for check in audit(found) if not check.passed] == []
    names = {check.name for check in bounds(found)}
    assert {DUE, TOGETHER, "under bsp: staleness is 0", "under bsp: rounds are complete"} <= names
    own = {"asp": "no worker is blocked", "ssp": "start lead is at most 1", "dssp": "start lead is at most 2"}
    assert f"under {second['name']}: {own[second['name']]}" in names


def test_the_parts_are_all_of_the_trace(trace):
    whole, cut = Recount(trace), parts(Recount(trace))
    assert [part.job.paradigm.name for part in cut] == ["bsp", "asp"]
    for table in ("pushes", "grants", "updates"):
        rows = np.concatenate([getattr(part, table) for part in cut])
        assert rows.tobytes() == getattr(whole, table).tobytes()
    assert len(cut[1].membership) == len(whole.membership) > 0, "a worker that is away begins the second part as such"
    version = np.concatenate([cut[0].applied_version, len(cut[0].updates) + cut[1].applied_version])
    assert np.array_equal(version, whole.applied_version)


def test_a_tighter_bound_of_the_second_paradigm_shows(tmp_path):
    found = simulate(job({"name": "ssp", "staleness": 2}), tmp_path / "trace.h5")
    assert failing_bounds(found) == set()
    tighter = of(found, job({"name": "ssp", "staleness": 0}))
    assert {"under ssp: start lead is at most 0", "under ssp: push lead is at most 1"} <= failing_bounds(tighter)


def test_a_switch_that_is_early_or_late_shows(trace):
    assert failing_bounds(of(trace, job(share=0.2))) == {"it switches at 16 samples"}
    assert failing_bounds(of(trace, job(share=0.9))) == {"it switches at 72 samples"}
    assert DUE in failing_bounds(edit(trace, "decisions", switch_row(trace), seq=0))  # before the first round


def test_a_second_switch_shows(trace):
    rows = trace.tables["decisions"]
    again = np.concatenate([rows, rows[switch_row(trace) :][:1]])
    again["seq"][-1] = 1 + max(int(trace.tables[table]["seq"].max()) for table in ("pushes", "grants", "membership"))
    (check,) = [check for check in bounds(with_rows(trace, "decisions", again)) if not check.passed]
    assert (check.name, check.detail) == (DUE, "2 switches (1 of 1 fail)")


def test_a_missing_switch_shows(tmp_path):
    found = simulate(job(share=1.0), tmp_path / "trace.h5")
    assert "it switches at 40 samples" in failing_bounds(of(found, job()))


def test_a_trace_without_the_decision_fails_and_one_that_ends_anywhere_passes():
    """The next row of a trace that was cut may have been the decision."""
    text = 'name = "sync-switch"\nplateau = {}\nwindow = 1\nthen = {{name = "ssp", staleness = 1}}'
    this, rows, name = job_of(text.format(0.3), updates=8), Recorder(), "it switches when it is due"
    fields = play(this, rows, (1.0, 1.3, 2.1))
    for n_rows in range(len(rows.rows) + 1):
        assert failing_bounds(as_trace(this, rows.rows[:n_rows], fields, "running")) == set(), n_rows
    whole, before = as_trace(this, rows.rows, fields), rows.rows[: [table for table, _ in rows.rows].index("decisions")]
    assert failing_bounds(whole) == set()
    assert name in failing_bounds(remove(whole, "decisions", switch_row(whole)))
    assert failing_bounds(as_trace(this, before, fields)) == {name}  # as if the run had ended there
    due_earlier = job_of(text.format(0.6), updates=8)
    assert failing_bounds(as_trace(due_earlier, before, fields, "running")) == {name}


def test_other_samples_or_another_momentum_in_the_row_show(trace):
    row = switch_row(trace)
    for column in ("chosen", "momentum", "loss_before"):
        changed = edit(trace, "decisions", row, **{column: 7.0})
        assert DUE in failing_bounds(changed)


def test_a_contribution_that_is_late_for_the_switch_shows(trace):
    at = trace.tables["decisions"]["seq"][switch_row(trace)]
    last = int(np.flatnonzero(trace.tables["pushes"]["seq"] < at)[-1])
    assert TOGETHER in failing_bounds(edit(trace, "pushes", last, outcome=1, seq=int(at) + 1))


def test_a_worker_that_continues_from_another_version_shows(trace):
    at = trace.tables["decisions"]["seq"][switch_row(trace)]
    row = int(np.flatnonzero(trace.tables["grants"]["seq"] > at)[0])
    version = int(trace.tables["grants"]["version"][row])
    assert TOGETHER in failing_bounds(edit(trace, "grants", row, version=version - 1))
    assert TOGETHER in failing_bounds(remove(trace, "grants", row))


def test_another_rate_shows(trace):
    for row, lr in ((0, 0.123), (len(trace.tables["updates"]) - 1, 0.1)):
        changed = edit(trace, "updates", row, lr=lr)
        assert [check.name for check in audit(changed) if not check.passed] == [RATES]


def test_staleness_before_the_switch_shows(trace):
    assert "under bsp: staleness is 0" in failing_bounds(edit(trace, "pushes", 1, staleness=1))


# ---- a flat loss ----


def flat_job(**keys):
    options = {"name": "sync-switch", "plateau": 0.2, "window": 3, **keys}
    linear = {"name": "linear", "batch_size": 30, "samples": 60, "features": 5}  # a round takes all: the loss falls
    return timing_job(workers=2, workload=linear, stop={"samples": 3000}, paradigm=options)


def test_a_flat_loss_is_recounted_from_the_pushes(tmp_path):
    found = simulate(flat_job(), tmp_path / "trace.h5")
    assert failing_bounds(found) == set()
    assert len(parts(Recount(found))) == 2
    name = "it switches when it is due"
    assert failing_bounds(of(found, flat_job(plateau=0.9))) == {name}
    assert failing_bounds(of(found, flat_job(window=2))) == {name}
    at = found.tables["decisions"]["seq"][switch_row(found)]
    last = int(np.flatnonzero(found.tables["pushes"]["seq"] < at)[-1])
    changed = edit(found, "pushes", last, loss=float(found.tables["pushes"]["loss"][last]) * 3)
    assert name in failing_bounds(changed)
