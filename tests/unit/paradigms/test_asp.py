"""ASP: one update per push, and no worker blocks."""

import random
import re
from statistics import mean

import pytest
from hypothesis import given

from hpcsync.config.errors import JobError
from hpcsync.paradigms import create
from hpcsync.paradigms.asp import ASP, AspOptions
from hpcsync.paradigms.events import Apply, Grant, Left, PushInfo
from tests.unit.jobs import make_job
from tests.unit.paradigms.schedule import PROPERTY, Schedule, fixed, run, schedules


def test_every_push_is_applied_and_granted_at_once():
    asp = create("asp", 2)
    assert asp.handle(PushInfo(1.0, 1)) == [Apply((1,)), Grant(1, 2, gap_iters=1, credits=0, held_s=0.0)]
    assert asp.handle(PushInfo(2.0, 1)) == [Apply((1,)), Grant(1, 3, gap_iters=2, credits=0, held_s=0.0)]
    assert asp.handle(PushInfo(2.0, 0)) == [Apply((0,)), Grant(0, 2, gap_iters=0, credits=0, held_s=0.0)]
    assert asp.handle(Left(3.0, 0)) == []
    assert asp.handle(PushInfo(3.0, 1))[1].gap_iters == 0  # no slower worker is left


@PROPERTY
@given(schedule=schedules())
def test_every_worker_runs_at_its_own_speed(schedule):
    referee = run(create("asp", schedule.n_workers), schedule)
    for worker, intervals_s in enumerate(schedule.intervals_s):
        now_s, expected_s = 0.0, []
        for interval_s in intervals_s:
            now_s += interval_s
            expected_s.append(now_s)
        pushed_s = [e.now_s for e, _ in referee.trace if isinstance(e, PushInfo) and e.worker == worker]
        assert pushed_s == [t for t in expected_s if t < schedule.deaths_s.get(worker, t + 1)]


def test_the_gap_has_no_bound():
    referee = run(create("asp", 2), fixed(1.0, 2.0, until_s=200.5))
    assert referee.largest_push_gap == 100


def test_staleness_is_one_less_than_the_workers_on_average_when_they_are_equal():
    generator = random.Random(1)
    n_workers = 5
    intervals_s = [[generator.uniform(0.8, 1.2) for _ in range(200)] for _ in range(n_workers)]
    referee = run(create("asp", n_workers), Schedule(intervals_s))
    version, version_read, staleness = 0, [0] * n_workers, []
    for _, actions in referee.trace:
        for action in actions:
            if isinstance(action, Apply):
                staleness.append(version - version_read[action.workers[0]])
                version += 1
            else:
                version_read[action.worker] = version
    assert min(staleness) >= 0
    assert mean(staleness) == pytest.approx(n_workers - 1, abs=0.1)


class Holds(ASP):
    def _pushed(self, event):
        if self._progress.lead(event.worker) > 2:
            self._block(event.worker)
            return [Apply((event.worker,))]
        return super()._pushed(event)


def test_check_sees_a_blocked_worker():
    with pytest.raises(AssertionError, match=r"workers \[0\] are blocked"):
        run(Holds(2), fixed(1.0, 2.0, until_s=20.0))


# ---- delay compensation ----


def test_the_compensation_has_the_published_defaults():
    given = [AspOptions(compensation=form) for form in ("none", "constant", "adaptive")]
    assert [(options.strength, options.mean_decay) for options in given] == [(None, None), (0.04, None), (2.0, 0.95)]
    assert [options.delay_correction for options in given] == [None, (0.04, None), (2.0, 0.95)]
    assert AspOptions(compensation="adaptive", strength=0.0).delay_correction is None
    assert all(options.options == {} for options in given), "the policy is that of plain ASP"
    assert [len(options.papers) for options in given] == [1, 2, 2]
    for options in given:
        found = make_job(paradigm={"name": "asp", "compensation": options.compensation})
        assert found.paradigm == options
        assert type(found).from_toml(found.to_toml()) == found


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"strength": 1.0}, 'strength = 1.0: must be left out with paradigm.compensation = "none"'),
        ({"compensation": "constant", "mean_decay": 0.5}, 'must be left out with paradigm.compensation = "constant"'),
        ({"compensation": "adaptive", "mean_decay": 1.0}, "mean_decay = 1.0: must be less than 1"),
        ({"compensation": "adaptive", "strength": -1.0}, "strength = -1.0: must be at least 0"),
        ({"compensation": "some"}, 'compensation = "some": must be'),
    ],
)
def test_options_that_contradict_each_other_are_refused(keys, message):
    with pytest.raises(JobError, match=re.escape(message)):
        make_job(paradigm={"name": "asp", **keys})
