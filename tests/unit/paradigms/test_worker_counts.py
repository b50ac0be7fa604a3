"""Extremes of the counts under pushes, departures and joins, against a recount; and the gate with counts made by hand.

Whole schedules are tested with SSP and ASHL.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsync.paradigms.records import Grant
from hpcsync.paradigms.worker_counts import Gate, WorkerCounts
from tests.unit.paradigms.schedule import PROPERTY


@PROPERTY
@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from(["push"] * 9 + ["come or go"]), st.integers(0, 5))))
def test_extremes_are_those_of_a_recount(n_workers, steps):
    progress = WorkerCounts(n_workers)
    iters = dict.fromkeys(range(n_workers), 0)
    pushes, left = [0] * n_workers, {}
    fewest = 0
    for step, worker in steps:
        if worker >= n_workers or (step == "push" and worker in left):
            continue
        if step == "push":
            progress.push(worker)
            iters[worker] += 1
            pushes[worker] += 1
        elif worker in left:
            progress.join(worker)
            iters[worker] = max(left.pop(worker), fewest)
        else:
            progress.leave(worker)
            left[worker] = iters.pop(worker)
        progress.check()
        assert progress.active == iters.keys()
        assert progress.pushes == pushes
        if iters:
            assert min(iters.values()) >= fewest, "the slowest were further before"
            fewest = min(iters.values())
            assert (progress.min_iters, progress.max_iters) == (fewest, max(iters.values()))
            assert progress.slowest() == {other for other in iters if iters[other] == fewest}
            assert all(progress.lead(other) == iters[other] - fewest for other in iters)


def test_departure_of_the_slowest_raises_the_minimum_over_empty_counts():
    progress = WorkerCounts(2)
    for _ in range(5):
        progress.push(1)
    assert (progress.min_iters, progress.lead(1)) == (0, 5)
    progress.leave(0)
    assert (progress.min_iters, progress.lead(1)) == (5, 0)


def test_departure_of_the_fastest_lowers_the_maximum_and_later_pushes_raise_it():
    progress = WorkerCounts(3)
    for _ in range(5):
        progress.push(2)
    progress.push(1)
    progress.leave(2)
    assert progress.max_iters == 1
    progress.push(0)
    progress.push(0)
    assert progress.max_iters == 2
    progress.check()


def test_no_worker_is_slowest_once_all_have_left():
    progress = WorkerCounts(1)
    progress.push(0)
    progress.leave(0)
    assert progress.slowest() == set()
    progress.check()


def test_a_worker_that_joins_is_as_far_as_the_slowest_or_as_far_as_it_was():
    progress = WorkerCounts(3)
    for _ in range(3):
        progress.push(2)
    progress.leave(0)
    progress.leave(2)
    for _ in range(2):
        progress.push(1)
    progress.join(0)
    progress.join(2)
    assert progress.iters == [2, 2, 3]
    assert progress.pushes == [0, 2, 3]
    assert (progress.min_iters, progress.max_iters) == (2, 3)
    progress.check()


@pytest.mark.parametrize("extreme", ["min_iters", "max_iters"])
def test_check_sees_a_wrong_extreme(extreme):
    progress = WorkerCounts(2)
    progress.push(0)
    setattr(progress, extreme, 7)
    with pytest.raises(AssertionError, match=extreme):
        progress.check()


def test_check_sees_a_worker_in_the_wrong_bucket():
    progress = WorkerCounts(3)
    progress.push(0)
    progress._active_at[0].remove(1)
    progress._active_at[1].add(1)
    with pytest.raises(AssertionError, match="a recount gives"):
        progress.check()


def test_check_sees_a_worker_in_no_bucket():
    progress = WorkerCounts(2)
    progress.push(0)
    del progress._active_at[1]
    with pytest.raises(AssertionError, match="in no bucket"):
        progress.check()


def test_check_sees_an_empty_bucket():
    progress = WorkerCounts(2)
    progress._active_at[9] = set()
    with pytest.raises(AssertionError, match="empty bucket"):
        progress.check()


# ---- the gate ----


def grant(worker):
    return Grant(worker, 1)


def closed(pushes, staleness=0):
    """Return a gate with all workers that are too far ahead blocked in reverse order."""
    progress = WorkerCounts(len(pushes))
    gate = Gate(progress, staleness)
    for worker in reversed(range(len(pushes))):
        for _ in range(pushes[worker]):
            progress.push(worker)
    for worker in reversed(range(len(pushes))):
        if not gate.is_open(worker):
            gate.block(worker)
    return progress, gate


def test_the_gate_is_open_up_to_the_bound():
    _, gate = closed([0, 2, 3, 9], staleness=2)
    assert [gate.is_open(worker) for worker in range(4)] == [True, True, False, False]
    gate.check({2, 3}, math.inf)
    assert gate.release(grant) == []


def test_the_furthest_behind_come_first_and_equals_in_worker_order():
    progress, gate = closed([0, 2, 1, 2, 1])
    progress.leave(0)
    assert [one.worker for one in gate.release(grant)] == [2, 4]
    for worker in (2, 4):
        progress.push(worker)
    assert [one.worker for one in gate.release(grant)] == [1, 3]
    assert gate.release(grant) == []


def test_a_worker_that_has_left_is_not_granted():
    progress, gate = closed([0, 1, 1])
    progress.leave(1)
    gate.leave(1)
    gate.check({2}, 0)
    progress.push(0)
    assert gate.release(grant) == [grant(2)]


@pytest.mark.parametrize(
    ("blocked", "start_gap_max", "message"),
    [
        ({1, 2, 3}, 2, "worker 1 is blocked at lead 1 without need"),
        ({2, 3}, 1, "worker 3 has pushed at lead 3"),
        ({2}, 2, "worker 3 has started at lead 3"),
        ({2}, 3, "the queue does not hold the blocked workers"),
    ],
)
def test_check_sees(blocked, start_gap_max, message):
    _, gate = closed([0, 1, 2, 3], staleness=1)
    gate.check({2, 3}, 2)
    with pytest.raises(AssertionError, match=message):
        gate.check(blocked, start_gap_max)
