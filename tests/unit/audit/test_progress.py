"""Learning rates, times, evaluations and the end of a run: what the audit recounts, and what it finds if changed."""

import dataclasses
import math

import numpy as np
import pytest

from hpcsync.audit.progress import evaluations_come_when_due
from hpcsync.config.workloads import Digits, Function, Linear, Script
from tests.unit.audit.failing import failing
from tests.unit.simulator.running import simulate, timing_job
from tests.unit.trace.recorder import attributes, edit, on_ranks, record, with_rows, with_status

RATES = "learning rates follow the schedule"
TIMES = "times of an iteration add up"
DUE = "evaluations come when they are due"
END = "the stopping rule ended the run"


def of_job(trace, **tables):
    """Return the trace as if it were of another job."""
    return dataclasses.replace(
        trace, attributes={**trace.attributes, **attributes(trace.job.model_copy(update=tables))}
    )


@pytest.fixture(scope="module")
def trace():
    return record("ssp", jitter=0.3)


SCHEDULES = [
    {"schedule": {"name": "multistep", "milestones": [60, 120], "gamma": 0.5}},
    {"schedule": {"name": "cosine", "total": 200, "warmup": 20}, "async_lr_scale": "1/workers"},
    {"schedule": {"name": "multistep", "milestones": [5, 9]}, "lr_clock": "updates"},
]


@pytest.mark.parametrize("optimizer", SCHEDULES, ids=str)
@pytest.mark.parametrize("paradigm", ["bsp", "asp", "k-async"])
def test_rates_of_a_schedule(tmp_path, paradigm, optimizer):
    table = {"name": paradigm, **({"k": 2} if paradigm == "k-async" else {})}
    job = timing_job(
        workers=3,
        seconds=[1.0, 1.3, 2.1],
        stop={"samples": 200},
        paradigm=table,
        optimizer={"name": "sgd", "lr": 0.1, **optimizer},
    )
    found = simulate(job, tmp_path / "trace.h5")
    assert failing(found) == set()
    assert len(np.unique(found.tables["updates"]["lr"])) > 1
    assert failing(edit(found, "updates", 3, lr=2 * found.tables["updates"]["lr"][3])) == {RATES}
    assert failing(edit(found, "updates", 3, lr=math.nan)) == {RATES}


def test_another_rate_in_the_job(trace):
    assert failing(of_job(trace, optimizer=trace.job.optimizer.model_copy(update={"lr": 0.2}))) == {RATES}


@pytest.mark.parametrize("column", ["begin_s", "end_s", "compute_s", "load_s", "wait_s"])
def test_times_of_an_iteration(trace, column):
    value = trace.tables["pushes"][column][12]
    assert failing(edit(trace, "pushes", 12, **{column: math.nan})) in ({TIMES}, {"values are valid"})
    for other in (value - 100.0, value + 1e-3) if column == "begin_s" else (value + 100.0, value + 1e-3):
        assert TIMES in failing(edit(trace, "pushes", 12, **{column: other}))


def test_a_worker_that_reads_before_its_grant(trace):
    """All times of a worker shifted alike contradict nothing but the grants; an error of the clock explains it."""
    rows = trace.tables["pushes"].copy()
    own = rows["worker"] == 1
    for column in ("begin_s", "end_s"):
        rows[column][own] -= 0.5
    early = with_rows(trace, "pushes", rows)
    assert failing(early) == {TIMES}
    assert failing(on_ranks(early, (0.0, 0.0, 0.51, 0.0))) == set()
    assert failing(on_ranks(early, (0.0, 0.51, 0.0, 0.0))) == {TIMES}, "the clock of another worker"


@pytest.mark.parametrize("held_back", [False, True])
def test_times_are_not_compared_across_a_resume(trace, held_back):
    """After it workers' clocks differ from before; a push that was held back is handled later than it was measured."""
    rows = trace.tables["pushes"].copy()
    row = 12
    resumed_s, seq = rows["end_s"][row] + 1e-3 if held_back else 0.0, rows["seq"][row] - 1
    later = rows["begin_s"] > resumed_s if held_back else rows["seq"] > seq
    for column in ("begin_s", "end_s"):
        rows[column][later] -= 1e-3
    moved = with_rows(trace, "pushes", rows)
    assert failing(on_ranks(moved, 1.0)) == {TIMES}
    assert failing(on_ranks(moved, 1.0, starts=((0.0, 0), (resumed_s, seq)))) == set()


def test_a_push_that_was_held_back_is_known_whatever_the_clock_after_the_resume_tells(trace):
    """It tells the begin of the next iteration as before the resume."""
    rows = trace.tables["pushes"].copy()
    row = 12
    resumed_s, seq = rows["end_s"][row] + 1e-3, rows["seq"][row] - 1
    later = np.flatnonzero((rows["worker"] == rows["worker"][row]) & (rows["seq"] > rows["seq"][row]))
    early_s = rows["begin_s"][later[0]] - rows["end_s"][row]
    for column in ("begin_s", "end_s"):
        rows[column][later] -= early_s
    moved = with_rows(trace, "pushes", rows)
    assert failing(on_ranks(moved, early_s)) == {TIMES}
    assert failing(on_ranks(moved, early_s, starts=((0.0, 0), (resumed_s, seq)))) == set()


def test_a_worker_waits_no_longer_than_the_run_has_lasted(trace):
    pushes = trace.tables["pushes"]
    row = int(np.flatnonzero(pushes["iteration"] == 1)[0])
    waits_s = pushes["begin_s"][row] - pushes["pull_s"][row]
    assert failing(edit(trace, "pushes", row, wait_s=waits_s)) == set()
    for wait_s in (waits_s + 1e-3, math.inf):
        assert failing(edit(trace, "pushes", row, wait_s=wait_s)) == {TIMES}
    early = on_ranks(edit(trace, "pushes", row, wait_s=waits_s + 1e-3), 2e-3)
    assert failing(early) == set(), "by its own clock"


def test_a_push_is_handled_after_it_was_sent(trace):
    """Also the last one of a worker, which no other iteration follows."""
    pushes = trace.tables["pushes"]
    last = np.unique(pushes["worker"][::-1], return_index=True)[1]
    for row in len(pushes) - 1 - last:
        late = edit(trace, "pushes", row, comm_s=pushes["comm_s"][row] + 1e-2)
        assert failing(late) == {TIMES}
        assert failing(on_ranks(late, 2e-2)) == set(), "by its own clock"
        assert failing(edit(trace, "pushes", row, comm_s=math.inf)) == {TIMES}


def test_the_last_version_is_evaluated():
    trace = record("dssp", jitter=0.3)
    none = with_rows(trace, "evaluations", trace.tables["evaluations"][:0])
    assert failing(none) == set(), "of a workload without losses"
    losing = of_job(none, workload=Linear(name="linear"))
    assert DUE in failing(losing)
    assert DUE not in failing(with_status(losing, "failed"))
    for workload in (Function(name="mine:train"), Script(name="script")):
        assert DUE not in failing(of_job(none, workload=workload)), "an evaluation that it need not have"


def test_evaluations_that_are_not_due(trace):
    rows = trace.tables["evaluations"]
    assert failing(with_rows(trace, "evaluations", np.delete(rows, 2))) == {DUE}, "missing"
    assert failing(with_rows(trace, "evaluations", rows[:-1])) == {DUE}, "none at the end"
    assert failing(with_rows(trace, "evaluations", rows[[0, 1, 1, *range(2, len(rows))]])) == {DUE}, "twice"
    for accuracy in (-0.5, 1.5):
        assert failing(edit(trace, "evaluations", 2, accuracy=accuracy)) == {DUE}
    halved = trace.job.evaluation.model_copy(update={"every_samples": 20})
    assert failing(of_job(trace, evaluation=halved)) == {DUE}, "too few"
    doubled = trace.job.evaluation.model_copy(update={"every_samples": 80})
    assert failing(of_job(trace, evaluation=doubled)) == {DUE}, "too many"


def test_real_runs_skip_an_evaluation_while_another_is_running(trace):
    rows = trace.tables["evaluations"]
    skipped = with_rows(trace, "evaluations", np.delete(rows, 2))
    real = on_ranks(skipped)
    assert failing(real) == set()
    assert failing(with_rows(real, "evaluations", rows[[0, 1, 1, *range(3, len(rows))]])) == {DUE}


def test_an_unfinished_run_may_lack_the_last_evaluation(trace):
    running = with_status(trace, "running")
    assert failing(with_rows(running, "evaluations", trace.tables["evaluations"][:-2])) == set()
    assert failing(with_rows(running, "evaluations", np.delete(trace.tables["evaluations"], 2))) == {DUE}


def test_only_an_evaluation_of_the_user_may_return_nan_and_then_a_number(trace):
    """Of ours, a loss that is NaN is that of weights that are not finite."""
    lost = edit(trace, "evaluations", 2, loss=math.nan)
    assert failing(lost) == {DUE}
    assert DUE not in failing(of_job(lost, workload=Function(name="mine:train")))


def test_workloads_that_classify_have_an_accuracy_and_least_squares_has_none(trace):
    rows = trace.tables["evaluations"]

    def is_due(workload, accuracy):
        given = rows.copy()
        given["accuracy"] = accuracy
        return evaluations_come_when_due(of_job(with_rows(trace, "evaluations", given), workload=workload))

    digits, linear, mine = Digits(name="digits"), Linear(name="linear"), Function(name="mine:train")
    assert is_due(digits, 0.5).passed
    lost = is_due(digits, math.nan)
    assert not lost.passed
    assert lost.detail.startswith("/evaluations row 0: version 5, accuracy nan")
    assert is_due(linear, math.nan).passed
    assert not is_due(linear, 0.5).passed
    assert is_due(mine, math.nan).passed and is_due(mine, 0.5).passed


def test_another_stopping_rule(trace):
    stop = trace.job.stop
    assert failing(of_job(trace, stop=stop.model_copy(update={"updates": 41}))) == {END}, "not reached"
    assert failing(of_job(trace, stop=stop.model_copy(update={"updates": 39}))) == {END}, "reached before"
    assert failing(of_job(trace, stop=stop.model_copy(update={"samples": 100}))) == {END}
    assert failing(of_job(trace, stop=stop.model_copy(update={"seconds": 3.0}))) == {END}
    assert failing(of_job(trace, stop=stop.model_copy(update={"updates": None, "target_loss": 0.001}))) == {END}
    assert failing(of_job(trace, stop=stop.model_copy(update={"updates": None, "target_loss": 1 / 40}))) == set()


def resumed(trace, version):
    """Return the trace as if the run had resumed with this version, and its job were that of the resumed run."""
    start = np.zeros(2, trace.tables["starts"].dtype)
    start["start"], start["now_s"] = (0, 1), (0.0, trace.tables["updates"]["now_s"][version - 1])
    return with_rows(trace, "starts", start)


def test_a_resumed_run_may_have_another_stopping_rule(trace):
    smaller = of_job(trace, stop=trace.job.stop.model_copy(update={"updates": 20}))
    assert failing(smaller) == {END}
    assert failing(resumed(smaller, 39)) == set(), "the one update after the resume finds the limit reached"
    assert failing(resumed(smaller, 38)) == {END}, "a second one after it"
    larger = of_job(trace, stop=trace.job.stop.model_copy(update={"updates": 41}))
    assert failing(resumed(larger, 38)) == {END}, "not reached"


def test_a_resumed_run_may_evaluate_at_other_intervals(trace):
    rows = trace.tables["evaluations"]
    often = of_job(trace, evaluation=trace.job.evaluation.model_copy(update={"every_samples": 80}))
    assert failing(often) == {DUE}
    last = rows["version"][:-1]
    assert failing(resumed(often, last[-2])) == set(), "the first after a resume is of the checkpoint's schedule"
    assert failing(resumed(often, last[-2] - 1)) == {DUE}, "the second one after a resume is not due"


def test_a_run_whose_workers_have_all_left_ends():
    left = record("asp", leave={0: 3, 1: 3, 2: 3})
    assert failing(left) == set()
    assert len(left.tables["updates"]) < left.job.stop.updates
