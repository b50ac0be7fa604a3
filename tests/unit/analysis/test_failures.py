"""What failures cost: restarts against hand-made cases and the expectation, and absences that can happen."""

import itertools
import math

import numpy as np
import pytest

import failures

EVERY_S, COST_S, BACK_S = 600.0, failures.CHECKPOINT_S, failures.BACK_S


@pytest.mark.parametrize(
    ("gaps_s", "expected_s"),
    [
        ([math.inf], 1800 + 2 * COST_S),  # the last of three parts needs no checkpoint
        ([1800 + 2 * COST_S, math.inf], 1800 + 2 * COST_S),  # a failure at the end
        ([EVERY_S + COST_S - 1, math.inf], EVERY_S + COST_S - 1 + BACK_S + 1800 + 2 * COST_S),  # nothing saved
        ([EVERY_S + COST_S, math.inf], EVERY_S + COST_S + BACK_S + 1200 + COST_S),  # the first third saved
        ([EVERY_S + COST_S, 100, math.inf], EVERY_S + COST_S + BACK_S + 100 + BACK_S + 1200 + COST_S),
    ],
)
def test_restarts_by_hand(gaps_s: list[float], expected_s: float) -> None:
    assert failures.with_restarts(1800.0, iter(gaps_s), EVERY_S) == pytest.approx(expected_s)


def test_the_mean_duration_is_the_expected_one() -> None:
    """A part of training with its checkpoint takes (M + R) (exp(t / M) - 1) in the mean; failures come every M s."""
    work_s, between_s = 200 * EVERY_S, 3600.0
    found = [failures.with_restarts(work_s, failures.moments(3600 / between_s, seed), EVERY_S) for seed in range(400)]
    expected_s = 200 * (between_s + BACK_S) * (math.exp((EVERY_S + COST_S) / between_s) - 1)
    assert np.mean(found) == pytest.approx(expected_s, rel=0.02)
    without_restart_s = 200 * between_s * (math.exp((EVERY_S + COST_S) / between_s) - 1)
    assert np.mean(found) != pytest.approx(without_restart_s, rel=0.02), "the control"


def test_a_worker_fails_only_while_it_is_there() -> None:
    events = failures.absences(60.0, 3, 20 * 3600.0)
    pairs = list(zip(events[::2], events[1::2], strict=True))
    assert len(pairs) > 600
    for leave, join in pairs:
        assert (leave["change"], join["change"], leave["worker"]) == ("leave", "join", join["worker"])
        assert join["at_s"] - leave["at_s"] == pytest.approx(BACK_S)
    away = [[(a["at_s"], b["at_s"]) for a, b in pairs if a["worker"] == worker] for worker in range(failures.WORKERS)]
    for intervals in away:
        assert all(before[1] < after[0] for before, after in itertools.pairwise(intervals))
    for leave, _ in pairs:
        n_away = sum(since <= leave["at_s"] < until for intervals in away for since, until in intervals)
        assert n_away < failures.WORKERS


def test_without_failures_there_are_no_absences() -> None:
    assert failures.absences(0.0, 1, 1e9) == []
    assert failures.stalls(0.0, 1) == []


def test_a_stall_is_one_iteration_that_takes_longer() -> None:
    """All-reduce waits for every stall as a whole; stalls of the same iteration cost as much as one."""
    events = failures.stalls(30.0, 3)
    slow, recover = events[::2], events[1::2]
    assert {event["change"] for event in slow} == {"slow"} and {event["change"] for event in recover} == {"recover"}
    for before, after in zip(slow, recover, strict=True):
        assert (after["worker"], after["at_iteration"]) == (before["worker"], before["at_iteration"] + 1)
    undisturbed_s = failures.simulated_s({"name": "allreduce"}, 1, [])
    took_s = failures.simulated_s({"name": "allreduce"}, 1, events)
    stalled = {event["at_iteration"] for event in slow if event["at_iteration"] <= 10 * 3600 / failures.ITERATION_S}
    assert len(stalled) > 200
    assert took_s - undisturbed_s == pytest.approx(len(stalled) * BACK_S, rel=0.05)
    assert failures.simulated_s({"name": "asp"}, 1, events) < undisturbed_s + (took_s - undisturbed_s) / 4
