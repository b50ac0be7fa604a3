"""Deadlines from a worker's own iterations: reports of stragglers, their number, and false alarms."""

import math
from itertools import pairwise
from statistics import fmean, stdev

import numpy as np
import pytest

from hpcsync.core.straggler_detector import AWAY_S, KNOWN, LOOK_S, SLACK_S, WINDOW, NoDetector, StragglerDetector


class Fixed(StragglerDetector):
    """Negative control: the same deadline for every worker."""

    def deadline_s(self, worker, size=1.0):
        return 3.0 if super().deadline_s(worker) < math.inf else math.inf


class MeanAndDeviation(StragglerDetector):
    """Negative control: mean and standard deviation, which one stall moves."""

    def deadline_s(self, worker, size=1.0):
        durations = self._durations[worker] if worker in self._durations else []
        return math.inf if len(durations) < KNOWN else fmean(durations) + max(10 * stdev(durations), SLACK_S)


class Bare(StragglerDetector):
    """Negative control: the deviation alone."""

    def deadline_s(self, worker, size=1.0):
        durations = self._durations[worker] if worker in self._durations else []
        if len(durations) < KNOWN:
            return math.inf
        usual = float(np.median(durations))
        return usual + 10 * 1.4826 * float(np.median(np.abs(np.array(durations) - usual)))


def lived(stalls, durations, worker=0, now_s=0.0, size=1.0):
    """Return the reports during iterations of these durations, polled as often as by an engine, and their end."""
    reports = []
    for iteration, duration in enumerate(durations, 1):
        stalls.began(worker, iteration, now_s, size)
        end_s = now_s + duration
        while now_s + LOOK_S < end_s:
            now_s += LOOK_S * 1.01
            reports += stalls.look(now_s)
        now_s = end_s
        stalls.ended(worker, now_s)
    return reports + stalls.look(now_s + LOOK_S * 1.01), now_s + LOOK_S * 1.01


def of(kind, n=300, seed=0):
    generator = np.random.default_rng(seed)
    return {
        "slow, regular": 4.0 + 0.2 * generator.random(n),
        "constant": np.full(n, 0.7),
        "uneven": 2.0 * generator.lognormal(0, 0.3, n),
        "wide": 0.2 * generator.exponential(1, n),
        "short": 0.002 * generator.exponential(1, n),
        "two kinds": generator.choice([0.5, 1.3], n),
    }[kind]


@pytest.mark.parametrize("kind", ["slow, regular", "constant", "uneven", "wide", "short", "two kinds"])
def test_usual_iterations_are_not_reported(kind):
    assert lived(StragglerDetector(), of(kind))[0] == []


def test_a_fixed_deadline_reports_slow_workers():
    assert lived(Fixed(), of("slow, regular"))[0]


def test_a_deviation_of_zero_is_not_reported():
    durations = [5.0] * 20 + [5.6]
    assert lived(StragglerDetector(), durations)[0] == []
    assert lived(Bare(), durations)[0]


@pytest.mark.parametrize(
    ("kind", "stall_s"), [("slow, regular", 15.0), ("constant", 3.0), ("wide", 8.0), ("short", 1.3)]
)
def test_a_stall_is_reported_while_it_lasts_and_when_it_ends(kind, stall_s):
    usual = of(kind, 20)
    reports, _ = lived(StragglerDetector(), [*usual, stall_s])
    (first, *_, last) = reports
    assert first.iteration == last.iteration == 21
    assert first.deadline_s < first.lasted_s < first.deadline_s + 2 * LOOK_S
    assert first.usual_s == pytest.approx(np.median(usual))
    assert last.ended and last.lasted_s == pytest.approx(stall_s)
    assert not any(stall.ended for stall in reports[:-1])
    for before, after in pairwise(reports[:-1]):
        assert 2 * before.lasted_s < after.lasted_s < 2 * before.lasted_s + 2 * LOOK_S


def test_a_stall_is_noticed_after_another():
    durations = [0.1] * 30 + [60.0] + [0.1] * 10 + [5.0]
    assert {stall.iteration for stall in lived(StragglerDetector(), durations)[0]} == {31, 42}
    assert {stall.iteration for stall in lived(MeanAndDeviation(), durations)[0]} == {31}


def test_nothing_is_concluded_from_few_iterations():
    assert lived(StragglerDetector(), [0.1] * (KNOWN - 1) + [20.0])[0] == []
    assert lived(StragglerDetector(), [0.1] * KNOWN + [20.0])[0]


def test_only_the_latest_iterations_count_and_only_a_workers_own():
    stalls = StragglerDetector()
    _, now_s = lived(stalls, [0.1] * WINDOW)
    assert stalls.deadline_s(0) == pytest.approx(0.1 + SLACK_S)
    lived(stalls, [5.0] * WINDOW, worker=1)
    assert stalls.deadline_s(0) == pytest.approx(0.1 + SLACK_S)
    lived(stalls, [5.0] * WINDOW, now_s=now_s)
    assert stalls.deadline_s(0) == pytest.approx(15.0)
    assert stalls.deadline_s(2) == math.inf


def test_an_iterations_size_counts():
    stalls = StragglerDetector()
    _, now_s = lived(stalls, [1.0] * 10, size=10)
    assert stalls.deadline_s(0, 80) == pytest.approx(24.0)
    assert lived(stalls, [8.0], size=80, now_s=now_s)[0] == []


def test_waiting_for_others_is_not_part_of_an_iteration():
    """Two synchronous workers: one stalls, the other waits for it, then computes as usual."""
    stalls, now_s = StragglerDetector(), 0.0
    for iteration in range(1, 11):
        for worker in range(2):
            stalls.began(worker, iteration, now_s)
        now_s += 0.3
        stalls.look(now_s)
        for worker in range(2):
            stalls.ended(worker, now_s, waited_s=0.1)
    assert stalls.deadline_s(0) == pytest.approx(0.2 + SLACK_S)
    for worker in range(2):
        stalls.began(worker, 11, now_s)
    reports = []
    for _ in range(40):
        now_s += LOOK_S * 1.01
        reports += stalls.look(now_s, waiting={1})
    assert {stall.worker for stall in reports} == {0}
    reports = stalls.look(now_s + 0.5)
    assert all(stall.worker == 0 for stall in reports), "what it has waited counts no more when it goes on"


def test_polling_gaps_are_excluded():
    stalls = StragglerDetector()
    _, now_s = lived(stalls, [0.1] * 10)
    stalls.began(0, 11, now_s)
    now_s += AWAY_S + 5
    assert stalls.look(now_s) == stalls.look(now_s + LOOK_S) == []
    reports = [stall for i in range(2, 20) for stall in stalls.look(now_s + LOOK_S * i)]
    assert [stall.lasted_s for stall in reports] == pytest.approx([1.1], abs=LOOK_S)
    stalls.ended(0, now_s + 2)
    assert stalls.look(now_s + 2)[0].lasted_s == pytest.approx(AWAY_S + 7)


def test_a_worker_that_has_left_is_not_reported():
    stalls = StragglerDetector()
    _, now_s = lived(stalls, [0.1] * 10)
    stalls.began(0, 11, now_s)
    stalls.left(0)
    assert [stalls.look(now_s + 0.5 * i) for i in range(1, 20)] == [[]] * 19
    stalls.ended(0, now_s)


@pytest.mark.parametrize(("detector", "reports"), [(NoDetector, False), (StragglerDetector, True)])
def test_nothing_is_overdue_in_a_simulation(detector, reports):
    found, _ = lived(detector(), [1.0] * KNOWN + [30.0])
    assert bool(found) == reports
