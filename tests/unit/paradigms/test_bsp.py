"""BSP: rounds, their order, and departures that complete them."""

import pytest
from hypothesis import given

from hpcsync.paradigms import create
from hpcsync.paradigms.bsp import BSP
from hpcsync.paradigms.events import Apply, Grant, Joined, Left, PushInfo
from tests.unit.paradigms.schedule import PROPERTY, Schedule, run, schedules


def test_the_last_push_of_a_round_applies_all_and_grants_all_in_worker_order():
    bsp = create("bsp", 3)
    assert bsp.handle(PushInfo(1.0, 2)) == []
    assert bsp.handle(PushInfo(2.0, 0)) == []
    assert bsp.handle(PushInfo(4.0, 1)) == [
        Apply((0, 1, 2)),
        Grant(0, 2, gap_iters=0, credits=0, held_s=2.0),
        Grant(1, 2, gap_iters=0, credits=0, held_s=0.0),
        Grant(2, 2, gap_iters=0, credits=0, held_s=3.0),
    ]
    assert bsp.handle(PushInfo(5.0, 1)) == []  # the next round begins empty


def test_a_departure_completes_the_round():
    bsp = create("bsp", 3)
    bsp.handle(PushInfo(1.0, 2))
    bsp.handle(PushInfo(2.0, 0))
    assert bsp.handle(Left(5.0, 1)) == [
        Apply((0, 2)),
        Grant(0, 2, gap_iters=0, credits=0, held_s=3.0),
        Grant(2, 2, gap_iters=0, credits=0, held_s=4.0),
    ]


def test_a_departure_does_not_end_a_round_in_which_others_are_outstanding():
    bsp = create("bsp", 3)
    bsp.handle(PushInfo(1.0, 2))
    assert bsp.handle(Left(2.0, 1)) == []
    assert bsp.handle(PushInfo(3.0, 0))[0] == Apply((0, 2))


def test_a_push_before_a_departure_stays_in_its_round():
    bsp = create("bsp", 3)
    bsp.handle(PushInfo(1.0, 0))
    assert bsp.handle(Left(2.0, 0)) == []
    bsp.handle(PushInfo(3.0, 1))
    assert bsp.handle(PushInfo(4.0, 2)) == [
        Apply((0, 1, 2)),
        Grant(1, 2, gap_iters=0, credits=0, held_s=1.0),
        Grant(2, 2, gap_iters=0, credits=0, held_s=0.0),
    ]
    bsp.handle(PushInfo(5.0, 1))
    assert bsp.handle(PushInfo(6.0, 2))[0] == Apply((1, 2))


def test_a_contribution_survives_the_last_departure():
    bsp = create("bsp", 2)
    bsp.handle(PushInfo(1.0, 0))
    assert bsp.handle(Left(2.0, 0)) == []
    assert bsp.handle(Left(3.0, 1)) == [Apply((0,))]


def test_a_worker_that_joins_takes_part_in_the_round_under_way():
    bsp = create("bsp", 3)
    bsp.handle(Left(0.0, 2))
    for worker in (0, 1, 0):
        bsp.handle(PushInfo(1.0, worker))
    assert bsp.handle(Joined(2.0, 2)) == [Grant(2, 1, gap_iters=0, credits=0, held_s=0.0)]
    assert bsp.handle(PushInfo(3.0, 1)) == []
    assert bsp.handle(PushInfo(4.0, 2)) == [
        Apply((0, 1, 2)),
        Grant(0, 3, gap_iters=0, credits=0, held_s=3.0),
        Grant(1, 3, gap_iters=0, credits=0, held_s=1.0),
        Grant(2, 2, gap_iters=0, credits=0, held_s=0.0),
    ]


def test_a_worker_that_joins_after_contributing_waits_for_the_end_of_the_round():
    bsp = create("bsp", 2)
    bsp.handle(PushInfo(1.0, 0))
    bsp.handle(Left(2.0, 0))
    assert bsp.handle(Joined(3.0, 0)) == []
    assert bsp.handle(PushInfo(5.0, 1)) == [
        Apply((0, 1)),
        Grant(0, 2, gap_iters=0, credits=0, held_s=2.0),
        Grant(1, 2, gap_iters=0, credits=0, held_s=0.0),
    ]


def test_a_departure_between_rounds_makes_no_update():
    assert create("bsp", 2).handle(Left(1.0, 0)) == []


@PROPERTY
@given(schedule=schedules())
def test_no_worker_starts_ahead_and_updates_are_in_worker_order(schedule):
    referee = run(create("bsp", schedule.n_workers), schedule, bound_iters=0)
    assert referee.largest_start_gap == 0
    for update in referee.actions(Apply):
        assert list(update.workers) == sorted(set(update.workers))


def test_every_gradient_is_applied_to_the_weights_it_was_computed_from():
    # Maximum delay 0: between a worker's grant and the update that takes its push, no other update is made.
    referee = run(create("bsp", 3), Schedule([[1.0, 2.0] * 5, [2.0, 1.0] * 5, [1.5] * 10]))
    version, version_read = 0, [0, 0, 0]
    for _, actions in referee.trace:
        for action in actions:
            if isinstance(action, Apply):
                assert [version_read[worker] for worker in action.workers] == [version] * 3
                version += 1
            else:
                version_read[action.worker] = version
    assert version == 10


class ReleasesEarly(BSP):
    """Ends the round with one worker outstanding."""

    def _end_round_if_complete(self):
        if len(self._blocked_since_s) < len(self._progress.active) - 1:
            return []
        self._contributed.clear()
        return [self._grant(worker) for worker in sorted(self._blocked_since_s)]


class ForgetsTheGrant(BSP):
    """Leaves the last worker of each round blocked."""

    def _end_round_if_complete(self):
        actions = super()._end_round_if_complete()
        if actions:
            self._block(2)
        return actions[:-1]


@pytest.mark.parametrize("broken", [ReleasesEarly(3), ForgetsTheGrant(3)])
def test_check_sees(broken):
    with pytest.raises(AssertionError, match=r"different rounds|blocked"):
        run(broken, Schedule([[1.0] * 9, [1.5] * 9, [2.5] * 9]))


def test_the_referee_sees_an_early_release():
    schedule = Schedule([[1.0] * 9, [1.5] * 9, [2.5] * 9])
    with pytest.raises(AssertionError, match=r"beyond the bound of 0|before its own contribution"):
        run(ReleasesEarly(3), schedule, bound_iters=0, check=False)


def a_worker_is_rounds_ahead(bsp):
    bsp._progress.push(1)
    bsp._progress.push(1)


def a_blocked_worker_has_pushed_again(bsp):
    bsp._progress.push(0)


def a_contribution_is_lost(bsp):
    bsp._contributed.clear()


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (a_worker_is_rounds_ahead, "different rounds"),
        (a_blocked_worker_has_pushed_again, "not exactly one push ahead"),
        (a_contribution_is_lost, "with a contribution in the current round"),
    ],
)
def test_check_sees_an_inconsistent_state(tamper, message):
    bsp = create("bsp", 3)
    bsp.handle(PushInfo(1.0, 0))
    bsp.check()
    tamper(bsp)
    with pytest.raises(AssertionError, match=message):
        bsp.check()
