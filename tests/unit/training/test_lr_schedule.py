"""The learning rate, a pure function of samples, updates and contributions."""

import math

import pytest

from hpcsync.training.lr_schedule import EvaluationSchedule, factor, learning_rate
from tests.unit.jobs import make_job


def rate(workers=4, **optimizer):
    return learning_rate(make_job(optimizer={"name": "sgd", "lr": 0.5, **optimizer}, cluster={"workers": workers}))


STEPS = {"name": "multistep", "milestones": [100, 200], "gamma": 0.1}


@pytest.mark.parametrize(
    ("clock", "expected"), [(0, 0.5), (99, 0.5), (100, 0.05), (199, 0.05), (200, 0.005), (10**9, 0.005)]
)
def test_multistep(clock, expected):
    assert rate(schedule=STEPS)(clock, 0, 1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("clock", [0, 25, 50, 75, 99])
def test_cosine(clock):
    expected = 0.25 * (1 + math.cos(math.pi * clock / 100))
    assert rate(schedule={"name": "cosine", "total": 100})(clock, 0, 1) == pytest.approx(expected, rel=1e-12)


def test_cosine_ends_at_zero_and_stays_there():
    lr = rate(schedule={"name": "cosine", "total": 100})
    assert [lr(clock, 0, 1) for clock in (100, 101, 10**6)] == [0.0] * 3


@pytest.mark.parametrize("schedule", [{**STEPS, "warmup": 9}, {"name": "cosine", "total": 109, "warmup": 9}])
def test_warm_up_rises_evenly_to_the_schedule(schedule):
    lr = rate(schedule=schedule)
    rates = [lr(clock, 0, 1) for clock in range(10)]
    assert rates == pytest.approx([0.05 * (i + 1) for i in range(10)], rel=1e-12)
    assert lr(59, 0, 1) == pytest.approx(0.5 if schedule["name"] == "multistep" else 0.25, rel=1e-12)


def test_the_unit_of_the_schedule_is_lr_clock():
    by_samples, by_updates = rate(schedule=STEPS), rate(schedule=STEPS, lr_clock="updates")
    assert (by_samples(100, 0, 1), by_samples(0, 100, 1)) == (pytest.approx(0.05), 0.5)
    assert (by_updates(100, 0, 1), by_updates(0, 100, 1)) == (0.5, pytest.approx(0.05))


def test_an_update_of_some_workers_is_scaled_only_where_the_job_says_so():
    plain, scaled = rate(), rate(async_lr_scale="1/workers")
    assert [plain(0, 0, n) for n in (1, 2, 4)] == [0.5, 0.5, 0.5]
    assert [scaled(0, 0, n) for n in (1, 2, 4)] == [0.125, 0.25, 0.5]
    assert rate(async_lr_scale="1/workers", schedule=STEPS)(150, 0, 2) == pytest.approx(0.025)


def test_without_a_schedule_the_rate_is_constant():
    assert {factor(None, clock) for clock in (0, 1, 10**9)} == {1.0}


def test_evaluations_are_due_at_whole_multiples():
    schedule, made = EvaluationSchedule(10), []
    for samples in range(0, 60, 4):
        if schedule.due(samples):
            schedule.begun(samples)
            made.append(samples)
    assert made == [12, 20, 32, 40, 52]


def test_one_long_batch_is_one_evaluation():
    schedule = EvaluationSchedule(10)
    schedule.begun(57)
    assert (schedule.due(59), schedule.due(60)) == (False, True)


def test_a_due_evaluation_begins_once():
    schedule = EvaluationSchedule(10)
    assert [samples for samples in range(0, 60, 4) if schedule.begin_if_due(samples)] == [12, 20, 32, 40, 52]


def test_never_is_never_due():
    assert not EvaluationSchedule(0).due(10**9)


@pytest.mark.parametrize(
    ("next_samples", "every", "due"),
    [(40, 10, 40), (30, 10, 30), (40, 25, 40), (1000, 10, 40), (0, 10, 0)],
    ids=["the same", "one is overdue", "less often", "more often", "for the first time"],
)
def test_a_resumed_run_evaluates_as_often_as_it_says_now(next_samples, every, due):
    schedule = EvaluationSchedule(every)
    schedule.resume(next_samples, 37)
    assert schedule.next_samples == due
