"""Asynchronous DiLoCo: whom an update waits for, weights of contributions, and local steps by speed."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsync.config.errors import JobError
from hpcsync.paradigms import create
from hpcsync.paradigms.async_diloco import AsyncDiLoCo
from hpcsync.paradigms.events import Apply, Decision, Elapsed, Grant, Joined, Left, PushInfo
from hpcsync.paradigms.records import Problem
from tests.unit.jobs import make_job
from tests.unit.paradigms.schedule import PROPERTY, Schedule, fixed, run, schedules


def paradigm(n_workers, **options):
    return create("async-diloco", n_workers, **options)


def push(now_s, worker, *, steps=10, samples=None, step_s=1.0):
    samples = 8 * steps if samples is None else samples
    return PushInfo(now_s, worker, compute_s=steps * step_s, local_steps=steps, batch_size=samples)


def updates(actions):
    return [action for action in actions if isinstance(action, Apply)]


def granted(actions):
    return {action.worker: action.local_steps for action in actions if isinstance(action, Grant)}


# ---- quorum and grace window ----


@pytest.mark.parametrize("n_workers", [1, 2, 3, 5, 8])
def test_without_a_quorum_every_push_is_an_update_and_no_worker_waits(n_workers):
    referee = run(paradigm(n_workers), fixed(*(1.0 + 0.3 * i for i in range(n_workers)), until_s=20.0))
    assert [update.workers for update in referee.actions(Apply)] == [
        (event.worker,) for event, _ in referee.trace if isinstance(event, PushInfo)
    ]
    assert {grant.held_s for grant in referee.actions(Grant)} == {0.0}
    waiting = run(
        paradigm(n_workers, quorum=n_workers), fixed(*(1.0 + 0.3 * i for i in range(n_workers)), until_s=20.0)
    )
    assert any(grant.held_s for grant in waiting.actions(Grant)) == (n_workers > 1)


@pytest.mark.parametrize("n_workers", [1, 2, 3, 5, 8])
def test_a_quorum_of_all_is_bsp(n_workers):
    schedule = fixed(*(1.0 + 0.3 * i for i in range(n_workers)), until_s=20.0)
    all_of_them = run(paradigm(n_workers, quorum=n_workers, weigh="equal"), schedule)
    bsp = run(create("bsp", n_workers), schedule)
    assert all_of_them.actions(Apply) == bsp.actions(Apply)
    assert [(g.worker, g.iteration, g.held_s) for g in all_of_them.actions(Grant)] == [
        (g.worker, g.iteration, g.held_s) for g in bsp.actions(Grant)
    ]


def test_an_update_waits_for_the_quorum_and_then_for_the_grace_window():
    policy = paradigm(4, quorum=2, grace_s=3.0)
    assert updates(policy.handle(push(1.0, 2))) == []
    assert policy.due is None, "the window begins with the quorum"
    assert updates(policy.handle(push(5.0, 0))) == []
    assert policy.due == Elapsed(8.0, 0)
    assert updates(policy.handle(push(7.0, 1))) == []
    actions = policy.handle(Elapsed(8.0, 0))
    assert updates(actions) == [Apply((0, 1, 2))]
    assert [action.held_s for action in actions if isinstance(action, Grant)] == [3.0, 1.0, 7.0]
    assert policy.due is None


def test_the_window_closes_when_every_worker_waits():
    policy = paradigm(3, quorum=1, grace_s=3.0)
    policy.handle(push(1.0, 0))
    policy.handle(push(2.0, 1))
    assert updates(policy.handle(push(2.5, 2))) == [Apply((0, 1, 2))]
    policy.handle(push(5.0, 0))
    policy.handle(push(6.0, 1))
    assert updates(policy.handle(Left(6.5, 2))) == [Apply((0, 1))], "a departure closes it as well"
    assert policy.due is None


def test_a_push_after_the_window_has_ended_is_still_in_the_update():
    """As on real ranks, where the time may be noticed late."""
    policy = paradigm(3, grace_s=1.0)
    policy.handle(push(1.0, 0))
    assert updates(policy.handle(push(2.25, 1))) == [Apply((0, 1))]
    with pytest.raises(ValueError, match="nothing is due"):
        policy.handle(Elapsed(2.5, 0))


def test_a_worker_that_joins_after_the_window_has_ended_reads_the_update():
    policy = paradigm(3, grace_s=1.0)
    policy.handle(Left(0.5, 2))
    policy.handle(push(1.0, 0))
    actions = policy.handle(Joined(2.25, 2))
    assert isinstance(actions[0], Apply), "the update comes first"
    assert list(granted(actions)) == [0, 2]


def test_only_the_time_that_was_set_can_elapse():
    policy = paradigm(3, grace_s=1.0)
    policy.handle(push(1.0, 0))
    for event in (Elapsed(1.9, 0), Elapsed(2.0, 1)):
        with pytest.raises(ValueError, match="must be Elapsed"):
            policy.handle(event)
    assert updates(policy.handle(Elapsed(2.5, 0))) == [Apply((0,))]


def test_fewer_workers_than_the_quorum_continue_together():
    policy = paradigm(4, quorum=3)
    policy.handle(Left(1.0, 3))
    policy.handle(push(2.0, 0))
    policy.handle(Left(3.0, 0))  # its contribution stays
    assert updates(policy.handle(Left(4.0, 1))) == []
    actions = policy.handle(push(5.0, 2))
    assert updates(actions) == [Apply((0, 2))]
    assert granted(actions).keys() == {2}


def test_a_worker_that_joins_while_its_contribution_waits_is_granted_after_the_update():
    policy = paradigm(3, quorum=2)
    policy.handle(push(1.0, 0))
    policy.handle(Left(2.0, 0))
    assert policy.handle(Joined(3.0, 0)) == []
    actions = policy.handle(push(4.0, 1))
    assert updates(actions) == [Apply((0, 1))]
    assert granted(actions).keys() == {0, 1}


class IgnoresTheQuorum(AsyncDiLoCo):
    def _pushed(self, event):
        self._due_s = self._now_s
        return super()._pushed(event)


class NeverCloses(AsyncDiLoCo):
    def _update_if_due(self):
        return super()._update_if_due() if self._now_s >= self._due_s else []


@given(schedules(max_changes=4), st.integers(1, 5), st.sampled_from([0.0, 0.5, 2.0]))
@PROPERTY
def test_updates_take_the_quorum_or_all(schedule, quorum, grace_s):
    quorum = min(quorum, schedule.n_workers)
    referee = run(paradigm(schedule.n_workers, quorum=quorum, grace_s=grace_s), schedule)
    assert_quorum(referee, quorum)


def assert_quorum(referee, quorum):
    active = set(range(referee.n_workers))
    for event, actions in referee.trace:
        if isinstance(event, Left):
            active.discard(event.worker)
        elif isinstance(event, Joined):
            active.add(event.worker)
        for update in updates(actions):
            assert len(update.workers) >= quorum or active <= set(update.workers), f"{update} at {event}"


def test_broken_quorums_are_caught():
    schedule = fixed(1.0, 1.3, 2.1, until_s=9.0)
    with pytest.raises(AssertionError, match="contributions wait, the update is due|Apply"):
        assert_quorum(run(IgnoresTheQuorum(3, quorum=2), schedule), 2)
    with pytest.raises(AssertionError, match="Apply"):
        assert_quorum(run(IgnoresTheQuorum(3, quorum=2), schedule, check=False), 2)
    with pytest.raises(AssertionError, match="every active worker is blocked"):
        leaving = Schedule([[1.0] * 3, [1.0], []])
        run(NeverCloses(3, quorum=3), leaving)


# ---- weights ----


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=8))
@PROPERTY
def test_weights_are_in_proportion_to_samples_and_their_mean_is_1(samples):
    actions = []
    for weigh in ("samples", "equal"):
        policy = paradigm(len(samples), quorum=len(samples), weigh=weigh)
        for worker, n in enumerate(samples):
            actions = policy.handle(push(1.0, worker, samples=n))
        (update,) = updates(actions)
        weights = update.weights or (1.0,) * len(samples)
        assert math.fsum(weights) == pytest.approx(len(samples), rel=1e-12)
        shares = [n * len(samples) / sum(samples) for n in samples] if weigh == "samples" else [1.0] * len(samples)
        assert weights == pytest.approx(shares, rel=1e-12)


def test_a_lone_contribution_weighs_1_however_small():
    policy = paradigm(2)
    assert updates(policy.handle(push(1.0, 0, samples=3))) == [Apply((0,))]
    assert updates(policy.handle(push(2.0, 1, samples=300))) == [Apply((1,))]


def test_contributions_with_a_problem_weigh_nothing_and_are_not_in_the_mean():
    policy = paradigm(3, quorum=3)
    policy.handle(push(1.0, 0, samples=90)._replace(problem=Problem.SKIPPED))
    policy.handle(push(2.0, 1, samples=10))
    assert updates(policy.handle(push(3.0, 2, samples=30))) == [Apply((0, 1, 2), (0.0, 0.5, 1.5))]


# ---- local steps by speed ----


def test_all_workers_begin_with_one_step_and_continue_in_proportion_to_their_speed():
    policy = paradigm(3, steps=12)
    assert [policy.first(worker) for worker in range(3)] == [Grant(worker, 1, local_steps=1) for worker in range(3)]
    assert granted(policy.handle(push(1.0, 0, steps=1, step_s=0.1))) == {0: 12}
    actions = policy.handle(push(2.0, 1, steps=1, step_s=0.3))
    assert granted(actions) == {1: 4}
    assert [action for action in actions if isinstance(action, Decision)] == [
        Decision("local-steps", 1, 4.0, (0.3, 0.1))
    ]
    assert granted(policy.handle(push(3.0, 2, steps=1, step_s=5.0))) == {2: 1}, "at least one"
    assert granted(policy.handle(push(4.0, 1, steps=4, step_s=0.05))) == {1: 12}, "it has become the fastest"
    assert granted(policy.handle(push(5.0, 0, steps=12, step_s=0.1))) == {0: 6}
    again = policy.handle(push(6.0, 0, steps=6, step_s=0.1))
    assert granted(again) == {0: 6}
    assert not any(isinstance(action, Decision) for action in again), "only changes are recorded"


def test_workers_that_have_left_are_not_the_fastest():
    policy = paradigm(2, steps=12)
    policy.handle(push(1.0, 0, steps=1, step_s=0.1))
    policy.handle(push(1.0, 1, steps=1, step_s=0.3))
    policy.handle(Left(2.0, 0))
    assert granted(policy.handle(push(3.0, 1, steps=4, step_s=0.3))) == {1: 12}


def test_a_worker_that_joins_before_its_first_push_begins_with_one_step():
    policy = paradigm(2, steps=12)
    policy.handle(Left(0.0, 1))
    policy.handle(push(1.0, 0, steps=1, step_s=0.1))
    assert granted(policy.handle(Joined(2.0, 1))) == {1: 1}
    assert granted(policy.handle(push(3.0, 1, steps=1, step_s=0.3))) == {1: 4}
    policy.handle(Left(4.0, 1))
    assert granted(policy.handle(Joined(5.0, 1))) == {1: 4}, "later its speed is known"


def test_without_speeds_all_make_the_same_steps():
    policy = paradigm(2, steps=12, by_speed=False)
    assert {policy.first(worker).local_steps for worker in range(2)} == {12}
    policy.handle(push(1.0, 0, steps=12, step_s=0.1))
    assert granted(policy.handle(push(9.0, 1, steps=12, step_s=0.9))) == {1: 12}
    late = paradigm(2, steps=12, by_speed=False)
    late.handle(Left(0.0, 1))
    assert granted(late.handle(Joined(2.0, 1))) == {1: 12}


def test_a_speed_that_is_a_rounding_error_less_costs_no_step():
    policy = paradigm(2, steps=30)
    policy.handle(push(1.0, 0, steps=1, step_s=0.01))
    assert granted(policy.handle(push(1.0, 1, steps=1, step_s=0.03 * (1 + 1e-12)))) == {1: 10}
    assert granted(policy.handle(push(2.0, 1, steps=1, step_s=0.03 * (1 + 1e-6)))) == {1: 9}


@pytest.mark.parametrize("n_workers", [2, 3, 5, 8])
def test_workers_push_about_equally_often(n_workers):
    """In time the pushes of all workers are as many as the fastest one's, to within its rounding; else they are not."""
    seconds = [0.1 * (1 + worker) for worker in range(n_workers)]

    def pushes(by_speed):
        policy, ended = paradigm(n_workers, steps=100, by_speed=by_speed), [0] * n_workers
        due = [(seconds[worker] * policy.first(worker).local_steps, worker) for worker in range(n_workers)]
        steps = [policy.first(worker).local_steps for worker in range(n_workers)]
        while (now := min(due))[0] < 500.0:
            now_s, worker = now
            ended[worker] += 1
            (n,) = granted(policy.handle(push(now_s, worker, steps=steps[worker], step_s=seconds[worker]))).values()
            steps[worker] = n
            due[worker] = (now_s + n * seconds[worker], worker)
        return ended

    equal, unequal = pushes(True), pushes(False)
    assert max(equal) - min(equal) <= 0.1 * max(equal)
    assert max(unequal) >= 1.9 * min(unequal)


# ---- options ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be an integer >= 1"),
        ({"quorum": 0}, "quorum must be an integer from 1 to n_workers = 3"),
        ({"quorum": 4}, "quorum must be an integer from 1 to n_workers = 3"),
        ({"grace_s": -1.0}, "grace_s must be a finite number >= 0"),
        ({"grace_s": math.inf}, "grace_s must be a finite number >= 0"),
        ({"weigh": "loss"}, "weigh must be one of samples, equal"),
    ],
)
def test_options_that_are_not_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        paradigm(3, **options)


# ---- declaration ----


def job(workers=4, **options):
    return make_job(paradigm={"name": "async-diloco", **options}, cluster={"workers": workers})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "paradigm.steps = 0: must be at least 1"),
        ({"outer_lr": 0}, "paradigm.outer_lr = 0: must be greater than 0"),
        ({"outer_momentum": 1}, "paradigm.outer_momentum = 1: must be less than 1"),
        ({"momentum_every": 0}, "paradigm.momentum_every = 0: must be at least 1"),
        (
            {"momentum_every": 3, "momentum_between": 0.5},
            "paradigm.momentum_between = 0.5: must be at most 0.333333, one over paradigm.momentum_every = 3",
        ),
        ({"quorum": 5}, "paradigm.quorum = 5: must be at most cluster.workers = 4"),
        ({"grace_s": -1}, "paradigm.grace_s = -1: must be at least 0"),
        ({"weigh": "loss"}, "paradigm.weigh = \"loss\": must be 'samples' or 'equal'"),
    ],
)
def test_mistakes_in_a_job(options, message):
    with pytest.raises(JobError, match=f"^{re.escape(message)}$"):
        job(**options)


@pytest.mark.parametrize(
    ("options", "period"),
    [({}, 4), ({"quorum": 2}, 2), ({"quorum": 3}, 2), ({"quorum": 4}, 1), ({"momentum_every": 9}, 9)],
)
def test_the_momentum_is_used_once_for_all_workers(options, period):
    assert job(**options).paradigm.outer(4) == (0.9, period, 0.0)
    assert job(**options, momentum_between=1 / period).paradigm.outer(4) == (0.9, period, 1 / period)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "each push is an update, and no worker waits"),
        ({"quorum": 2}, "an update waits for 2 contributions"),
        ({"grace_s": 0.5}, "an update waits for 1 contribution and at most 0.5 s for more"),
        ({"quorum": 3, "grace_s": 0.5}, "an update waits for 3 contributions and at most 0.5 s for more"),
    ],
)
def test_descriptions(options, words):
    paradigm = job(**options).paradigm
    assert paradigm.describe(4) == f"workers push the weight change of their local steps; {words}"
    assert ("nobody-waits" in paradigm.guarantees) == (options == {})


@pytest.mark.parametrize(
    ("options", "idle", "endless"),
    [({}, 1, True), ({"quorum": 2}, 1, False), ({"quorum": 2}, 2, True), ({"grace_s": 1.0}, 3, False)],
)
def test_a_simulation_in_which_time_stands_still_is_refused(options, idle, endless):
    assert (idle >= job(**options).paradigm.zero_time_workers(4)) == endless


@given(schedules(max_changes=2), st.integers(1, 3), st.sampled_from([0.0, 2.0]), st.integers(0, 30))
@PROPERTY
def test_a_restored_policy_continues_as_before(schedule, quorum, grace_s, n_events):
    options = {"quorum": min(quorum, schedule.n_workers), "grace_s": grace_s}
    trace = run(paradigm(schedule.n_workers, **options), schedule).trace
    first, second = (paradigm(schedule.n_workers, **options) for _ in range(2))
    for event, _ in trace[:n_events]:
        first.handle(event)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.due == first.due
    for event, actions in trace[n_events:]:
        assert repr(second.handle(event)) == repr(actions)


def test_what_waits_is_part_of_the_state():
    first, second = paradigm(3, grace_s=2.0), paradigm(3, grace_s=2.0)
    first.handle(push(1.0, 0))
    assert second.due is None
    second.restore(json.loads(json.dumps(first.state())))
    assert second.due == first.due == Elapsed(3.0, 0)
    assert updates(second.handle(Elapsed(3.0, 0))) == [Apply((0,))]
