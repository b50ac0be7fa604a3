"""The counts: extremes under pushes and departures, against a recount."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsync.paradigms.progress import Progress
from tests.unit.paradigms.schedule import PROPERTY


@PROPERTY
@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from(["push"] * 9 + ["leave"]), st.integers(0, 5))))
def test_extremes_are_those_of_a_recount(n_workers, steps):
    progress = Progress(n_workers)
    pushes = dict.fromkeys(range(n_workers), 0)
    for step, worker in steps:
        if worker not in pushes:
            continue
        if step == "push":
            progress.push(worker)
            pushes[worker] += 1
        else:
            progress.leave(worker)
            del pushes[worker]
        progress.check()
        assert progress.active == pushes.keys()
        if pushes:
            fewest = min(pushes.values())
            assert (progress.min_iters, progress.max_iters) == (fewest, max(pushes.values()))
            assert progress.slowest() == {other for other in pushes if pushes[other] == fewest}
            assert all(progress.gap(other) == pushes[other] - fewest for other in pushes)


def test_departure_of_the_slowest_raises_the_minimum_over_empty_counts():
    progress = Progress(2)
    for _ in range(5):
        progress.push(1)
    assert (progress.min_iters, progress.gap(1)) == (0, 5)
    progress.leave(0)
    assert (progress.min_iters, progress.gap(1)) == (5, 0)


def test_departure_of_the_fastest_lowers_the_maximum_and_later_pushes_raise_it():
    progress = Progress(3)
    for _ in range(5):
        progress.push(2)
    progress.push(1)
    progress.leave(2)
    assert progress.max_iters == 1
    progress.push(0)
    progress.push(0)
    assert progress.max_iters == 2
    progress.check()


def test_nobody_is_slowest_once_all_have_left():
    progress = Progress(1)
    progress.push(0)
    progress.leave(0)
    assert progress.slowest() == set()
    progress.check()


@pytest.mark.parametrize("extreme", ["min_iters", "max_iters"])
def test_check_sees_a_wrong_extreme(extreme):
    progress = Progress(2)
    progress.push(0)
    setattr(progress, extreme, 7)
    with pytest.raises(AssertionError, match=extreme):
        progress.check()


def test_check_sees_a_worker_in_the_wrong_bucket():
    progress = Progress(3)
    progress.push(0)
    progress._active_at[0].remove(1)
    progress._active_at[1].add(1)
    with pytest.raises(AssertionError, match="a recount gives"):
        progress.check()


def test_check_sees_a_worker_in_no_bucket():
    progress = Progress(2)
    progress.push(0)
    del progress._active_at[1]
    with pytest.raises(AssertionError, match="in no bucket"):
        progress.check()


def test_check_sees_an_empty_bucket():
    progress = Progress(2)
    progress._active_at[9] = set()
    with pytest.raises(AssertionError, match="empty bucket"):
        progress.check()
