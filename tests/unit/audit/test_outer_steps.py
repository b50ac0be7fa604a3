"""Negative controls of the audit of outer steps: each trace violates one property."""

import json

import numpy as np
import pytest

from hpcsync.trace.schema import Outcome
from tests.unit.audit.failing import failing, failing_bounds
from tests.unit.recorder import Recorder
from tests.unit.trace.recorder import as_trace, edit, job_of, play, record, remove, with_job, with_status

SECONDS = (1.0, 1.3, 2.1, 3.7)
RATE, SHARES = "the outer learning rate is 0.7", "weights are shares of the update's samples"
WAIT = "updates wait for the quorum and the grace window"
GRANTED, MADE = "local steps follow the workers' speeds", "pushes have the granted local steps"


def of(**options):
    lines = (f"{key} = {json.dumps(value)}" for key, value in options.items())
    return "\n".join(['name = "async-diloco"', *lines])


WAITING = {"steps": 4, "quorum": 2, "grace_s": 0.6}


@pytest.fixture(scope="module")
def trace():
    """A trace with a quorum and a grace window, in which workers die and join."""
    found = record(of(**WAITING), SECONDS, jitter=0.3, changes=[(11.0, 1), (19.0, 1), (30.0, 3)])
    assert failing(found) == set()
    assert len(elapsed(found)) > 5
    assert set(found.tables["updates"]["n_contributions"].tolist()) >= {2, 3}
    return found


def elapsed(trace):
    return np.flatnonzero(trace.tables["decisions"]["controller"] == b"elapsed")


@pytest.mark.parametrize("leave", [{}, {0: 4}, {0: 5, 1: 5, 2: 5, 3: 5}], ids=str)
@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize(
    "options",
    [{}, {"quorum": 2}, {"quorum": 4}, {"grace_s": 0.7}, {"grace_s": 99.0}, {**WAITING, "by_speed": False}],
    ids=str,
)
def test_correct_traces_pass(options, jitter, leave):
    assert failing(record(of(**options), SECONDS, jitter=jitter, leave=leave)) == set()


@pytest.mark.parametrize("how", [{"stop_s": 7.3}, {"target": "target_loss = 0.1"}], ids=str)
def test_correct_traces_of_stopped_runs_pass(how):
    assert failing(record(of(**WAITING), SECONDS, jitter=0.3, **how)) == set()


def test_correct_traces_that_end_anywhere_pass():
    job, rows = job_of(of(**WAITING), 4, 12), Recorder()
    fields = play(job, rows, SECONDS, jitter=0.3, changes=[(3.0, 1), (6.0, 1)])
    for n in range(10, len(rows.rows)):
        cut = as_trace(job, rows.rows[:n], fields, status="running")
        assert failing(cut) == set(), f"after {n} rows"


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({"quorum": 1}, {WAIT}),
        ({"quorum": 3}, {WAIT}),
        ({"grace_s": 0.5}, {WAIT}),
        ({"grace_s": 0.7}, {WAIT}),
        ({"weigh": "equal"}, {"weights are shares of the update's contributions"}),
        ({"steps": 5}, {GRANTED}),
        ({"by_speed": False}, {GRANTED, MADE}),
        ({"outer_lr": 0.6}, {"the outer learning rate is 0.6"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_other_options(trace, other, names):
    assert failing_bounds(with_job(trace, of(**{**WAITING, **other}))) == names


def test_rates_and_weights(trace):
    assert failing_bounds(edit(trace, "updates", 7, lr=0.8)) == {RATE}
    applied = np.flatnonzero(trace.tables["pushes"]["outcome"] == Outcome.APPLIED)
    weight = trace.tables["pushes"]["weight"][applied[9]]
    assert failing_bounds(edit(trace, "pushes", applied[9], weight=weight * 1.001)) == {SHARES}


def test_local_steps(trace):
    grants, pushes = trace.tables["grants"], trace.tables["pushes"]
    steps = grants["local_steps"][12]
    assert GRANTED in failing_bounds(edit(trace, "grants", 12, local_steps=steps + 1))
    row = int(np.flatnonzero(pushes["iteration"] > 2)[5])
    assert MADE in failing_bounds(edit(trace, "pushes", row, local_steps=pushes["local_steps"][row] + 1))
    assert GRANTED in failing_bounds(edit(trace, "pushes", row, compute_s=pushes["compute_s"][row] * 3))


def test_a_worker_that_joins_before_its_first_push_begins_with_one_step():
    late = record(of(steps=4), SECONDS, jitter=0.3, changes=[(0.5, 3), (5.0, 3)])
    assert failing(late) == set()
    grants = late.tables["grants"]
    row = int(np.flatnonzero(grants["worker"] == 3)[0])
    assert (grants["iteration"][row], grants["local_steps"][row]) == (1, 1)
    assert GRANTED in failing_bounds(edit(late, "grants", row, local_steps=4))


def test_an_update_before_or_after_the_window_has_ended(trace):
    row = elapsed(trace)[2]
    now_s = trace.tables["decisions"]["now_s"][row]
    update = int(np.flatnonzero(trace.tables["updates"]["now_s"] == now_s)[0])
    early = edit(edit(trace, "decisions", row, now_s=now_s - 0.1), "updates", update, now_s=now_s - 0.1)
    assert WAIT in failing_bounds(early)


def test_a_time_that_did_not_elapse(trace):
    row = elapsed(trace)[2]
    for changed in (
        edit(trace, "decisions", row, chosen=trace.tables["decisions"]["chosen"][row] + 0.01),
        edit(trace, "decisions", row, controller=b"other"),
        edit(trace, "decisions", row, worker=(trace.tables["decisions"]["worker"][row] + 1) % 4),
        remove(trace, "decisions", row),
    ):
        assert {"replay gives the same decisions", "replay gives the same grants"} & failing(changed)


def test_a_worker_waits_for_a_quorum_that_is_not_asked_for():
    found = record(of(quorum=2), SECONDS)
    assert "no worker is blocked" in failing_bounds(with_job(found, of(quorum=1)))
    assert "no worker is blocked" not in failing_bounds(with_job(found, of(quorum=3)))


def test_an_unfinished_trace_need_not_have_its_last_update(trace):
    last = int(trace.tables["updates"]["version"][-1])
    fewer = with_status(remove(trace, "updates", last - 1), "running")
    assert WAIT not in failing_bounds(fewer)
