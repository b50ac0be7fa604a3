"""EASGD: blocks as ASP or BSP do, but grants before it updates."""

import pytest
from hypothesis import given

from hpcsync.config.errors import JobError
from hpcsync.paradigms import create
from hpcsync.paradigms.bsp import BSP
from hpcsync.paradigms.easgd import EasgdOptions
from hpcsync.paradigms.events import Apply, Grant, Left, PushInfo
from tests.unit.jobs import make_job
from tests.unit.paradigms.schedule import PROPERTY, Schedule, run, schedules

FORMS = {False: "asp", True: "bsp"}
both_forms = pytest.mark.parametrize("synchronous", FORMS, ids=["asynchronous", "synchronous"])


def test_asynchronous_workers_read_before_they_move_the_centre():
    easgd = create("easgd", 2)
    assert easgd.handle(PushInfo(1.0, 1)) == [Grant(1, 2, gap_iters=1, credits=0, held_s=0.0), Apply((1,))]
    assert easgd.handle(PushInfo(2.0, 0)) == [Grant(0, 2, gap_iters=0, credits=0, held_s=0.0), Apply((0,))]
    assert easgd.handle(Left(3.0, 0)) == []


def test_synchronous_workers_read_before_all_of_them_move_the_centre():
    easgd = create("easgd", 2, synchronous=True)
    assert easgd.handle(PushInfo(1.0, 1)) == []
    assert easgd.handle(PushInfo(3.0, 0)) == [
        Grant(0, 2, gap_iters=0, credits=0, held_s=0.0),
        Grant(1, 2, gap_iters=0, credits=0, held_s=2.0),
        Apply((0, 1)),
    ]


def test_a_departure_ends_a_round_and_earlier_pushes_count():
    easgd = create("easgd", 3, synchronous=True)
    assert easgd.handle(PushInfo(1.0, 2)) == []
    assert easgd.handle(Left(1.5, 2)) == []
    assert easgd.handle(PushInfo(2.0, 0)) == []
    assert easgd.handle(Left(3.0, 1)) == [Grant(0, 2, gap_iters=0, credits=0, held_s=1.0), Apply((0, 2))]


@both_forms
@PROPERTY
@given(schedule=schedules())
def test_the_actions_are_those_of_the_others_in_another_order(synchronous, schedule):
    """The referee asserts all invariants, here also that no worker reads its own contribution."""
    mine = run(create("easgd", schedule.n_workers, synchronous=synchronous), schedule)
    theirs = run(create(FORMS[synchronous], schedule.n_workers), schedule)
    assert [event for event, _ in mine.trace] == [event for event, _ in theirs.trace]
    for (_, actions), (_, others) in zip(mine.trace, theirs.trace, strict=True):
        grants = [isinstance(action, Grant) for action in actions]
        assert grants == sorted(grants, reverse=True)
        assert sorted(map(repr, actions)) == sorted(map(repr, others))


class UpdatesFirst(BSP):
    name = "easgd"


def test_the_referee_sees_workers_that_read_their_own_contributions():
    with pytest.raises(AssertionError, match="after its own contribution is applied"):
        run(UpdatesFirst(2), Schedule([[1.0] * 5, [1.5] * 5]))


@pytest.mark.parametrize("n_workers", [1, 2, 3, 5, 8])
def test_the_moving_rate_is_alpha_or_beta_over_the_number_of_workers(n_workers):
    for options, rate in (({}, 0.9 / n_workers), ({"beta": 0.4}, 0.4 / n_workers), ({"alpha": 0.3}, 0.3)):
        assert EasgdOptions(**options).moving_rate(n_workers) == rate


@pytest.mark.parametrize(("synchronous", "most"), [(False, 1.0), (True, 2 / 4)])
def test_the_largest_rate_is_allowed_and_no_larger_one(synchronous, most):
    options = {"name": "easgd", "synchronous": synchronous}
    make_job(paradigm={**options, "alpha": most}, cluster={"workers": 3})
    for rate in ({"alpha": 1.001 * most}, {"beta": 1.001 * 3 * most}):
        with pytest.raises(JobError, match="must be at most"):
            make_job(paradigm={**options, **rate}, cluster={"workers": 3})
