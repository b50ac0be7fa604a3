"""Invariants of every paradigm: one grant per push, no deadlock, determinism, rejection of illegal input."""

import copy
import math
from itertools import pairwise

import pytest
from hypothesis import given

from hpcsync.paradigms import create
from hpcsync.paradigms.events import Elapsed, Evaluated, Grant, Joined, Left, PushInfo
from tests.unit.paradigms.broken import (
    BlocksEveryWorker,
    BringsBackStaleEntries,
    ForgetsDepartures,
    GrantsBeforeApplying,
    GrantsTwice,
    JoinsAnywhere,
    JoinsWhereItWas,
    NeverReleases,
    OverwritesAContribution,
)
from tests.unit.paradigms.schedule import PROPERTY, Schedule, run, schedules

ADSP = {"check_period_s": 4.0, "interval_min_s": 0.5}
ALL = {
    "bsp": ("bsp", {}),
    "asp": ("asp", {}),
    "ssp-0": ("ssp", {"staleness": 0}),
    "ssp-2": ("ssp", {"staleness": 2}),
    "ssp-inf": ("ssp", {"staleness": math.inf}),
    "dssp-bounded": ("dssp", {"staleness_min": 1, "staleness_max": 4}),
    "dssp-paper": ("dssp", {"staleness_min": 1, "staleness_max": 4, "mode": "paper"}),
    "easgd": ("easgd", {}),
    "easgd-synchronous": ("easgd", {"synchronous": True}),
    # For one worker and more.
    "k-sync": ("k-sync", {"k": "state"}),
    "k-sync-abort": ("k-sync", {"k": "loss", "cancel": "abort"}),
    "k-batch-sync": ("k-batch-sync", {"k": "loss"}),
    "k-async": ("k-async", {"k": "min", "staleness_max": None}),
    "k-batch-async": ("k-batch-async", {"k": "state", "staleness_max": 2, "staleness_weight": "inverse"}),
    # Through all stages within a schedule.
    "ashl": ("ashl", {"warmup": 1, "profiled": 2, "loss_preset": 0.2, "staleness": 1}),
    "ashl-plateau": (
        "ashl",
        {"warmup": 0, "profiled": 2, "plateau": 0.9, "staleness": 0, "ratio_coarse": None, "ratio_fine": None},
    ),
    "adsp": ("adsp", {**ADSP, "search_every_s": 8.0}),
    "adsp-fixed": ("adsp", {**ADSP, "search_every_s": 99.0, "commits": 3, "rule": "released"}),
}
every_paradigm = pytest.mark.parametrize("which", ALL)


def make(which, n_workers):
    name, options = ALL[which]
    return create(name, n_workers, **options)


def state(paradigm):
    """Return the state of a paradigm as text, in which NaN equals itself."""
    return repr({**vars(paradigm), "_progress": vars(paradigm._progress)})


BOUNDS = {"bsp": 0, "ssp-0": 0, "ssp-2": 2, "dssp-bounded": 4, "easgd-synchronous": 0}  # of start leads


@every_paradigm
@PROPERTY
@given(schedule=schedules(max_changes=6))
def test_one_grant_per_push_and_join_and_every_worker_finishes(which, schedule):
    # The referee asserts the rest at every event: numbering, gaps, waits, and that the slowest is never blocked.
    referee = run(make(which, schedule.n_workers), schedule, BOUNDS.get(which, math.inf))
    of = {kind: sum(isinstance(event, kind) for event, _ in referee.trace) for kind in (PushInfo, Joined, Left)}
    assert not referee.active
    assert 0 <= of[PushInfo] + of[Joined] - len(referee.actions(Grant)) <= of[Left]  # a worker may leave while blocked
    assert referee.settled == referee.pushes


@every_paradigm
def test_a_worker_that_joins_continues_with_the_iteration_that_it_had_not_pushed(which):
    # Worker 2 is absent at first, worker 1 for a while.
    schedule = Schedule([[2.0] * 20, [1.0] * 12, [1.5] * 12], changes=[(0.0, 2), (5.1, 1), (9.0, 2), (13.0, 1)])
    referee = run(make(which, 3), schedule)
    for worker in range(3):
        granted = [grant.iteration for grant in referee.actions(Grant) if grant.worker == worker]
        again = [b for a, b in pairwise(granted) if a == b]
        assert granted == sorted(granted)
        assert len(again) <= 1, "only if it left with a grant"
    assert [event.worker for event, _ in referee.trace if isinstance(event, Joined)] == [2, 1]


@every_paradigm
def test_without_deaths_every_push_is_granted_and_all_data_is_used(which):
    schedule = Schedule([[1.0] * 30, [0.3, 2.5] * 10, [4.0] * 7])
    referee = run(make(which, 3), schedule)
    assert referee.pushes == [30, 20, 7]
    assert len(referee.actions(Grant)) == 57


@every_paradigm
@PROPERTY
@given(schedule=schedules())
def test_the_same_events_give_the_same_actions(which, schedule):
    first = run(make(which, schedule.n_workers), schedule).trace
    # check() between the events must not change anything either.
    second = run(make(which, schedule.n_workers), schedule, check=False).trace
    assert repr(first) == repr(second)


@every_paradigm
def test_one_worker_is_never_blocked(which):
    referee = run(make(which, 1), Schedule([[1.0, 0.5, 2.0]]))
    assert [(g.iteration, g.gap_iters, g.held_s) for g in referee.actions(Grant)] == [
        (2, 0, 0.0),
        (3, 0, 0.0),
        (4, 0, 0.0),
    ]


@every_paradigm
def test_illegal_input_is_refused_and_leaves_the_state_untouched(which):
    paradigm = make(which, 4)
    for now_s, worker in [(1.0, 0), (1.5, 1), (2.0, 2)]:
        paradigm.handle(PushInfo(now_s, worker))
    paradigm.handle(Left(2.5, 1))
    before = state(paradigm)
    illegal = [
        (PushInfo(3.0, 4), "worker must be from 0 to"),
        (PushInfo(3.0, -1), "worker must be from 0 to"),
        (Left(3.0, 4), "worker must be from 0 to"),
        (PushInfo(3.0, 1), "worker 1 has left"),
        (Left(3.0, 1), "worker 1 has left"),
        (Joined(3.0, 2), "worker 2 has not left"),
        (Joined(3.0, 4), "worker must be from 0 to"),
        (Joined(2.4, 1), "time of the previous event"),
        (PushInfo(2.4, 3), "time of the previous event"),
        (Left(2.4, 3), "time of the previous event"),
        (PushInfo(math.nan, 3), "time of the previous event"),
        (PushInfo(math.inf, 3), "time of the previous event"),
        (Elapsed(3.0, 0), "nothing is due"),
        (Evaluated(3.0, 0, 1.0, 0, 3.0), "uses no evaluations"),
        ("pushed", "event must be PushInfo, Left, Joined, Elapsed or Evaluated"),
    ]
    for event, message in illegal:
        with pytest.raises(ValueError, match=message):
            paradigm.handle(event)
        assert state(paradigm) == before, f"{event} has changed the state"
    paradigm.handle(PushInfo(2.5, 3))  # legal again, at the time of the last event
    assert state(paradigm) != before


@pytest.mark.parametrize("which", ["bsp", "ssp-0", "dssp-bounded", "dssp-paper", "easgd-synchronous", "k-sync"])
def test_a_push_of_a_blocked_worker_is_refused_and_leaves_the_state_untouched(which):
    paradigm = make(which, 2)
    now_s = 0.0
    while any(isinstance(action, Grant) for action in paradigm.handle(PushInfo(now_s, 0))):
        now_s += 1.0
    before = state(paradigm)
    with pytest.raises(ValueError, match="worker 0 is blocked"):
        paradigm.handle(PushInfo(now_s, 0))
    assert state(paradigm) == before


@every_paradigm
def test_a_copy_continues_as_the_original(which):
    paradigm = make(which, 2)
    paradigm.handle(PushInfo(1.0, 0))
    other = copy.deepcopy(paradigm)
    assert repr(paradigm.handle(PushInfo(2.0, 1))) == repr(other.handle(PushInfo(2.0, 1)))


# Negative controls of the referee and of check().


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (GrantsTwice(2), "answers no push"),
        (GrantsBeforeApplying(2), "before its own contribution is applied"),
        (ForgetsDepartures(2, staleness=1), "the lead is 0|every worker is blocked"),
        (NeverReleases(2, staleness=1), "every worker is blocked|the slowest"),
        (BlocksEveryWorker(2), "every worker is blocked"),
    ],
)
def test_the_referee_sees(broken, message):
    with pytest.raises(AssertionError, match=message):
        run(broken, Schedule([[1.0] * 5, [1.5] * 9]), check=False)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (BringsBackStaleEntries(3, staleness=1), "answers no push"),
        (JoinsAnywhere(3, staleness=1), "beyond the bound of 1"),
        (JoinsWhereItWas(3), "the lead is 0"),
        (OverwritesAContribution(3), "beyond the bound of 1|before its own contribution"),
    ],
)
def test_the_referee_sees_a_wrong_join(broken, message):
    # Worker 0, far ahead, is blocked when it leaves; worker 1 leaves before its first push.
    changes = [(0.5, 1), (4.5, 0), (5.0, 0), (6.0, 1)]
    schedule = Schedule([[1.0] * 9, [2.0] * 9, [5.5] * 9], changes=changes)
    with pytest.raises(AssertionError, match=message):
        run(broken, schedule, bound_iters=1 if broken.name != "asp" else math.inf, check=False)


@pytest.mark.parametrize(
    ("broken", "message"),
    [(NeverReleases(2, staleness=1), "without need"), (BlocksEveryWorker(2), "every active worker is blocked")],
)
def test_check_sees(broken, message):
    with pytest.raises(AssertionError, match=message):
        run(broken, Schedule([[1.0] * 5, [1.5] * 9]))


def a_blocked_worker_has_left(paradigm):
    paradigm._progress.leave(0)


def the_slowest_is_blocked(paradigm):
    paradigm._block(1)


def a_worker_is_blocked_since_the_future(paradigm):
    paradigm._blocked_since_s[0] = 99.0


def the_minimum_is_wrong(paradigm):
    paradigm._progress.min_iters = 7


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (a_blocked_worker_has_left, "have left"),
        (the_slowest_is_blocked, "worker 1 is blocked at lead 0"),
        (a_worker_is_blocked_since_the_future, "since a time in the future"),
        (the_minimum_is_wrong, "min_iters is 7"),
    ],
)
def test_check_sees_an_inconsistent_state(tamper, message):
    paradigm = create("ssp", 3, staleness=0)
    paradigm.handle(PushInfo(1.0, 0))
    paradigm.check()
    tamper(paradigm)
    with pytest.raises(AssertionError, match=message):
        paradigm.check()


def test_time_may_start_anywhere():
    paradigm = create("asp", 1)
    assert paradigm.handle(PushInfo(-5.0, 0))[-1] == Grant(0, 2)
