"""SSP: bounds at every event, updates visible to a read, and the two limits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsync.paradigms import create
from hpcsync.paradigms.events import Accumulate, Apply, Grant, Joined, Left, PushInfo
from hpcsync.paradigms.ssp import SSP, SspOptions
from hpcsync.paradigms.worker_counts import Gate
from tests.unit.paradigms.schedule import PROPERTY, Schedule, fixed, run, schedules


def test_the_fastest_may_start_at_the_bound_and_is_blocked_beyond_it():
    ssp = create("ssp", 2, staleness=1)
    assert ssp.handle(PushInfo(1.0, 0)) == [Apply((0,)), Grant(0, 2, gap_iters=1, credits=0, held_s=0.0)]
    assert ssp.handle(PushInfo(2.0, 0)) == [Apply((0,))]
    assert ssp.handle(PushInfo(5.0, 1)) == [
        Apply((1,)),
        Grant(1, 2, gap_iters=0, credits=0, held_s=0.0),
        Grant(0, 3, gap_iters=1, credits=0, held_s=3.0),
    ]


def test_released_workers_are_granted_after_the_pushing_one_in_worker_order():
    ssp = create("ssp", 4, staleness=0)
    for now_s, worker in [(1.0, 3), (2.0, 0), (3.0, 2)]:
        ssp.handle(PushInfo(now_s, worker))
    grants = ssp.handle(PushInfo(4.0, 1))[1:]
    assert [grant.worker for grant in grants] == [1, 0, 2, 3]


def test_a_departure_releases():
    ssp = create("ssp", 3, staleness=1)
    for now_s, worker in [(1.0, 0), (2.0, 0), (3.0, 1)]:
        ssp.handle(PushInfo(now_s, worker))
    assert ssp.handle(Left(7.0, 2)) == [Grant(0, 3, gap_iters=1, credits=0, held_s=5.0)]


def test_a_worker_that_joins_blocks_no_worker_and_is_bounded_as_before():
    ssp = create("ssp", 3, staleness=1)
    ssp.handle(Left(0.0, 2))
    for now_s, worker in [(1.0, 0), (2.0, 0), (3.0, 1), (4.0, 0), (4.5, 1)]:
        ssp.handle(PushInfo(now_s, worker))
    assert ssp.handle(Joined(5.0, 2)) == [Grant(2, 1, gap_iters=0, credits=0, held_s=0.0)]
    assert ssp.handle(PushInfo(6.0, 0))[1:] == [], "two ahead of both others: blocked"
    ssp.handle(Left(7.0, 0))
    assert ssp.handle(Joined(8.0, 0)) == []
    assert ssp.handle(PushInfo(9.0, 2))[1:] == [Grant(2, 2, gap_iters=1, credits=0, held_s=0.0)]
    assert ssp.handle(PushInfo(9.5, 1))[2:] == [Grant(0, 5, gap_iters=1, credits=0, held_s=1.5)]
    ssp.check()


def test_a_blocked_worker_that_leaves_is_not_granted():
    ssp = create("ssp", 3, staleness=0)
    ssp.handle(PushInfo(1.0, 0))
    ssp.handle(PushInfo(1.0, 1))
    assert ssp.handle(Left(2.0, 0)) == []
    assert [action.worker for action in ssp.handle(PushInfo(3.0, 2))[1:]] == [2, 1]


@PROPERTY
@given(schedule=schedules(), staleness=st.sampled_from([0, 1, 2, 3, 7]))
def test_start_gap_and_push_gap_are_bounded_at_every_event(schedule, staleness):
    run(create("ssp", schedule.n_workers, staleness=staleness), schedule, bound_iters=staleness)


@pytest.mark.parametrize("staleness", [0, 3, 15])
def test_both_bounds_are_reached(staleness):
    # The bound itself, and not less: blocking too early is as wrong as blocking too late.
    referee = run(create("ssp", 2, staleness=staleness), fixed(1.0, 2.0, until_s=100.0))
    assert (referee.largest_start_gap, referee.largest_push_gap) == (staleness, staleness + 1)


def updates_missing_from_reads(referee, staleness):
    """Return the number of guaranteed updates that reads missed, summed over all reads (one per grant).

    An iteration c, from 0, must see every active worker's first c - staleness contributions.
    """
    missing, seen, active = 0, [0] * referee.n_workers, set(range(referee.n_workers))
    for event, actions in referee.trace:
        if isinstance(event, Left):
            active.remove(event.worker)
        for action in actions:
            if isinstance(action, Apply):
                for worker in action.workers:
                    seen[worker] += 1
            else:
                clock = action.iteration - 1
                missing += sum(max(0, clock - staleness - seen[worker]) for worker in active)
                missing += clock - seen[action.worker]  # and all of its own
    return missing


@PROPERTY
@given(schedule=schedules(), staleness=st.integers(0, 4))
def test_a_read_sees_every_update_older_than_the_bound_and_all_its_own(schedule, staleness):
    referee = run(create("ssp", schedule.n_workers, staleness=staleness), schedule)
    assert updates_missing_from_reads(referee, staleness) == 0


def test_reads_under_asp_miss_updates():
    referee = run(create("asp", 2), fixed(1.0, 2.0, until_s=20.0))
    assert updates_missing_from_reads(referee, 3) > 0


@PROPERTY
@given(schedule=schedules())
def test_an_infinite_bound_schedules_as_asp(schedule):
    n_workers = schedule.n_workers
    assert (
        run(create("ssp", n_workers, staleness=math.inf), schedule).trace
        == run(create("asp", n_workers), schedule).trace
    )


def test_a_finite_bound_does_not_schedule_as_asp():
    schedule = fixed(1.0, 2.0, until_s=20.0)
    assert run(create("ssp", 2, staleness=3), schedule).trace != run(create("asp", 2), schedule).trace


@PROPERTY
@given(schedule=schedules())
def test_a_bound_of_zero_is_lock_step(schedule):
    # The same grants at the same times as BSP; only their order is another, and the updates are single.
    def rounds(paradigm):
        for event, actions in run(paradigm, schedule, bound_iters=0).trace:
            grants = [action for action in actions if isinstance(action, Grant)]
            if grants:
                yield event.now_s, sorted(grants, key=lambda grant: grant.worker)

    n_workers = schedule.n_workers
    assert list(rounds(create("ssp", n_workers, staleness=0))) == list(rounds(create("bsp", n_workers)))


@pytest.mark.parametrize("staleness", [0, 3, 15])
def test_any_finite_bound_ends_at_the_rate_of_the_slowest(staleness):
    referee = run(create("ssp", 3, staleness=staleness), fixed(1.0, 1.3, 2.0, until_s=400.5))
    assert referee.pushes[2] == 200
    assert max(referee.pushes) <= 200 + staleness + 1


# ---- merged pushes ----


def test_a_blocked_push_is_part_of_the_next_update():
    ssp = create("ssp", 3, staleness=0, merge=True)
    assert ssp.handle(PushInfo(1.0, 0)) == [Accumulate(0)]
    assert ssp.handle(PushInfo(2.0, 1)) == [Accumulate(1)]
    apply, *grants = ssp.handle(PushInfo(5.0, 2))
    assert apply == Apply((2,)) and [grant.worker for grant in grants] == [2, 0, 1]


def test_the_next_update_is_that_of_any_worker_that_is_not_blocked():
    ssp = create("ssp", 3, staleness=1, merge=True)
    ssp.handle(PushInfo(1.0, 0))
    assert ssp.handle(PushInfo(2.0, 0)) == [Accumulate(0)], "two ahead of both others"
    apply, grant = ssp.handle(PushInfo(3.0, 1))
    assert apply == Apply((1,)) and grant.worker == 1, "worker 0 is still two ahead of worker 2"


def test_a_departure_releases_and_leaves_what_is_merged_to_the_next_push():
    ssp = create("ssp", 2, staleness=0, merge=True)
    assert ssp.handle(PushInfo(1.0, 0)) == [Accumulate(0)]
    assert [action.worker for action in ssp.handle(Left(2.0, 1))] == [0]
    assert ssp.handle(PushInfo(3.0, 0))[0] == Apply((0,))


@PROPERTY
@given(schedule=schedules(), staleness=st.sampled_from([0, 1, 3]), merge=st.booleans())
def test_merged_or_not_the_grants_are_the_same(schedule, staleness, merge):
    def grants(paradigm):
        return run(paradigm, schedule, bound_iters=staleness).actions(Grant)

    n_workers = schedule.n_workers
    single = create("ssp", n_workers, staleness=staleness)
    assert grants(create("ssp", n_workers, staleness=staleness, merge=merge)) == grants(single)


@pytest.mark.parametrize(("merge", "updates"), [(True, 100), (False, 202)])
def test_between_two_unlike_workers_an_update_is_made_for_each_iteration_of_the_slow_one(merge, updates):
    # Zhao et al., figure 4: the decays of SSP's learning rate come when the server has counted half as many updates.
    referee = run(create("ssp", 2, staleness=3, merge=merge), fixed(1.0, 2.0, until_s=200.5))
    assert abs(len(referee.actions(Apply)) - updates) <= 10


class BlocksLate(Gate):
    def is_open(self, worker):
        return self._progress.lead(worker) <= self.staleness + 1


class BlocksEarly(Gate):
    def is_open(self, worker):
        return self._progress.lead(worker) < self.staleness

    def release(self, grant):
        return super().release(grant) if self._progress.lead(0) < self.staleness else []


class ReleasesEarly(Gate):
    def release(self, grant):
        grants = [grant(worker) for _, worker in sorted(self._blocked)]
        self._blocked.clear()
        return grants


class ForgetsDepartures(Gate):
    def release(self, grant):
        return super().release(grant) if len(self._progress.active) == 3 else []


def behind(gate, n_workers):
    ssp = SSP(n_workers, staleness=3)
    ssp._gate = gate(ssp._progress, 3)
    return ssp


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        (BlocksLate, "has started at lead 4"),
        (BlocksEarly, "without need"),
        (ReleasesEarly, "has started at lead 4"),
        (ForgetsDepartures, "every active worker is blocked|slowest|without need"),
    ],
)
def test_check_sees(gate, message):
    schedule = Schedule([[1.0] * 20, [1.0] * 20, [3.0] * 20], {2: 10.5})
    run(behind(Gate, 3), schedule)
    with pytest.raises(AssertionError, match=message):
        run(behind(gate, 3), schedule)


@pytest.mark.parametrize("gate", [BlocksLate, ReleasesEarly])
def test_the_referee_sees(gate):
    with pytest.raises(AssertionError, match="beyond the bound of 3"):
        run(behind(gate, 2), fixed(1.0, 3.0, until_s=40.0), bound_iters=3, check=False)


def test_check_sees_a_push_gap_beyond_the_bound():
    ssp = SSP(2, staleness=0)
    ssp.handle(PushInfo(1.0, 0))
    ssp.check()
    ssp._progress.push(0)
    with pytest.raises(AssertionError, match="has pushed at lead 2"):
        ssp.check()


def test_check_sees_a_queue_that_lost_a_blocked_worker():
    ssp = SSP(2, staleness=0)
    ssp.handle(PushInfo(1.0, 0))
    ssp.check()
    ssp._gate._blocked.clear()
    with pytest.raises(AssertionError, match="queue"):
        ssp.check()


@pytest.mark.parametrize("staleness", [-1, 2.5, math.nan, -math.inf, "3", True])
def test_a_bound_that_is_none_is_refused(staleness):
    with pytest.raises(ValueError, match="staleness must be an integer >= 0 or inf"):
        create("ssp", 2, staleness=staleness)


@pytest.mark.parametrize(
    ("staleness", "words"),
    [
        (math.inf, "no worker waits for another"),
        (3, "a worker more than 3 iterations ahead of the slowest waits for it"),
        (0, "all workers wait for each other in every iteration"),
    ],
)
def test_the_bound_in_words(staleness, words):
    assert SspOptions(staleness=staleness).bound == words
