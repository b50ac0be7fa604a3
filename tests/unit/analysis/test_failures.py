"""What failures cost: a restart by hand, and absences and stalls that can happen."""

import itertools

import numpy as np
import pytest

import failures
from hpcsync.figures.plotting import PARADIGM_COLOURS

ALLREDUCE, BACK_S = {"name": "allreduce"}, failures.BACK_S


@pytest.fixture(scope="module")
def undisturbed_s() -> float:
    return failures.simulated_s(ALLREDUCE, 1, [])


def test_checkpoints_and_a_restart_by_hand(undisturbed_s: float) -> None:
    """A checkpoint begins within one iteration after it is due, every 1800 s of training, and takes 30 s."""
    saving_s = failures.simulated_s(ALLREDUCE, 1, [], 1800.0)
    n_checkpoints = (saving_s - undisturbed_s) / failures.CHECKPOINT_S
    assert n_checkpoints == pytest.approx(undisturbed_s // 1800)
    death = {**failures.deaths(1.0, 1)[0], "at_s": 10_000.0}  # the last of 5 checkpoints was due at 9150 s
    restarted_s = failures.simulated_s(ALLREDUCE, 1, [death], 1800.0)
    lost_s = 10_000 - (9_150 + failures.CHECKPOINT_S)
    assert restarted_s - saving_s == pytest.approx(lost_s + BACK_S, abs=1.5 * failures.ITERATION_S)
    earlier_s = failures.simulated_s(ALLREDUCE, 1, [{**death, "at_s": 9_300.0}], 1800.0)
    assert earlier_s < restarted_s - 600, "the control: less is lost"


def test_while_a_run_restarts_it_does_not_fail() -> None:
    events = failures.deaths(4.0, 2)
    at_s = np.array([event["at_s"] for event in events])
    assert len(events) == pytest.approx(2000 * 3600 / (3600 / 4 + BACK_S), rel=0.05)
    assert np.diff(at_s).min() >= BACK_S and at_s[-1] < failures.LONGEST_S
    assert {event["restart_s"] for event in events} == {BACK_S}


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
    assert failures.stalls(0.0, 1) == [] and failures.deaths(0.0, 1) == []


def test_a_stall_is_one_iteration_that_takes_longer(undisturbed_s: float) -> None:
    """All-reduce waits for every stall as a whole; stalls of the same iteration cost as much as one."""
    events = failures.stalls(30.0, 3)
    slow, recover = events[::2], events[1::2]
    assert {event["change"] for event in slow} == {"slow"} and {event["change"] for event in recover} == {"recover"}
    for before, after in zip(slow, recover, strict=True):
        assert (after["worker"], after["at_iteration"]) == (before["worker"], before["at_iteration"] + 1)
    took_s = failures.simulated_s(ALLREDUCE, 1, events)
    stalled = {event["at_iteration"] for event in slow if event["at_iteration"] <= 10 * 3600 / failures.ITERATION_S}
    assert len(stalled) > 200
    assert took_s - undisturbed_s == pytest.approx(len(stalled) * BACK_S, rel=0.05)
    assert failures.simulated_s({"name": "asp"}, 1, events) < undisturbed_s + (took_s - undisturbed_s) / 4


def test_lines_have_the_colours_of_their_paradigms() -> None:
    found = {method: failures.colour(method) for method in ("BSP, others continue", "SSP, s = 3", "all-reduce, all")}
    assert [*found.values()] == [PARADIGM_COLOURS[name] for name in ("bsp", "ssp", "allreduce")]
