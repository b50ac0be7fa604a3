"""A worker without I/O: what it does next, and what it says of its times."""

from __future__ import annotations

import math

import pytest

from hpcsync.core.worker_machine import WorkerMachine
from hpcsync.paradigms.records import UNTIL, Grant, PushInfo
from hpcsync.planning.batch_allocation import Estimate


class Fixed:
    """An estimator that remembers what it was told."""

    def __init__(self) -> None:
        self.observed: list[tuple[int, float, float]] = []

    def observe(self, batch_size, iteration_s, comm_s):
        self.observed.append((batch_size, iteration_s, comm_s))
        return Estimate(0.5, 0.25)


def granted(local_steps=1, version=4, read_s=2.0, estimator=None, machine=WorkerMachine, **grant) -> WorkerMachine:
    """Return a machine whose weights are read: the grant was waited for from 1.0 to 1.5 s, and read until `read_s`."""
    made = machine(3, 800, estimator)
    made.waits(1.0)
    assert made.granted(Grant(3, 7, version, local_steps=local_steps, **grant))
    made.read(1.5, read_s)
    return made


def test_a_push_says_how_long_everything_took():
    machine = granted()
    assert machine.computed(2.25, 3.0, 16)
    expected = PushInfo(
        math.nan, 3, 7, 4, begin_s=2.25, end_s=3.0, compute_s=0.75, wait_s=0.5, comm_s=0.5 + 0.125, batch_size=16,
        local_steps=1, loss=1.5, wire_bytes=1200, share=1.0, pull_s=0.5, encode_s=0.0625,
    )  # fmt: skip
    info = machine.delivered(1.5, 0.0625, 0.125, 400)
    assert info[1:14] == expected[1:14]
    assert info[16:] == expected[16:]
    assert math.isnan(info.now_s), "the deciding server sets it"
    assert math.isnan(info.predicted_fixed_s)


def test_a_new_machine_waits_for_its_first_grant_since_the_start_of_the_run():
    first = Grant(3, 1, local_steps=1)
    machine = WorkerMachine(3, 800)
    assert machine.grant == Grant(3, 0)
    assert WorkerMachine(3, 800, grant=first).grant == first
    assert machine.granted(first)
    machine.read(0.5, 0.75)
    assert not machine.is_cancelled, "version 0"
    assert machine.computed(1.0, 2.0, 8)
    assert machine.delivered(1.0, 0.0, 0.0, 0).wait_s == 0.5


def test_a_push_covers_the_local_steps_of_its_grant():
    machine = granted(3)
    assert [machine.computed(t, t + 0.5, 8) for t in (2.0, 3.0, 4.0)] == [False, False, True]
    info = machine.delivered(1.0, 0.0, 0.0, 0)
    assert (info.begin_s, info.end_s, info.compute_s) == (2.0, 4.5, 2.5)
    assert (info.local_steps, info.batch_size) == (3, 24)


def test_loading_is_no_part_of_the_computation():
    estimator = Fixed()
    machine = granted(2, estimator=estimator)
    machine.computed(2.0, 3.0, 8, load_s=0.25)
    machine.computed(3.5, 4.0, 8, share=0.5, load_s=0.125)
    info = machine.delivered(1.0, 0.0, 0.0, 0)
    assert (info.load_s, info.compute_s) == (0.375, 1.625)
    assert info.iteration_s == 0.375 + 1.625 / 0.5, "a cancelled iteration is loaded whole"
    assert estimator.observed == [(8, info.iteration_s / 2, 0.25)], "it takes time from the next batch too"
    machine.read(5.0, 5.0)
    machine.computed(5.0, 6.0, 8)
    assert machine.delivered(1.0, 0.0, 0.0, 0).load_s == 0.0


@pytest.mark.parametrize(("commit_s", "steps"), [(0.4, 1), (0.5, 1), (0.6, 2), (1.5, 3)])
def test_or_as_many_as_fit_into_the_granted_time_after_the_read(commit_s, steps):
    machine, n = granted(UNTIL, commit_s=commit_s), 0
    while not machine.computed(2.0 + 0.5 * n, 2.5 + 0.5 * n, 8):
        n += 1
    assert n + 1 == steps


def test_steps_are_counted_anew_after_each_read():
    machine = granted(2)
    assert [machine.computed(2.0, 3.0, 8), machine.computed(3.0, 4.0, 8)] == [False, True]
    machine.delivered(1.0, 0.0, 0.0, 0)
    machine.waits(4.5)
    machine.granted(Grant(3, 8, 5, local_steps=2))
    machine.read(5.0, 5.25)
    assert not machine.computed(5.25, 6.0, 8)
    assert (machine.n_steps, machine.n_samples) == (1, 8)


def test_steps_before_an_absence_do_not_count():
    machine = granted(3)
    machine.computed(2.0, 3.0, 8)
    machine.waits(9.0)
    machine.granted(Grant(3, 7, 6, local_steps=3))
    machine.read(9.5, 10.0)
    assert [machine.computed(t, t + 1.0, 8) for t in (10.0, 11.0, 12.0)] == [False, False, True]
    assert machine.delivered(1.0, 0.0, 0.0, 0).begin_s == 10.0


def test_a_grant_of_no_steps_stops_the_worker():
    machine = granted()
    assert not machine.granted(Grant(3, 8, 9).stop())
    assert machine.stopped
    assert machine.grant.iteration == 7, "the last one that it computed"


@pytest.mark.parametrize(
    ("received", "cancelled"), [((), False), ((4,), True), ((2, 3), False), ((2, 4), True), ((4, 2), True)], ids=str
)
def test_a_cancellation_is_of_a_version(received, cancelled):
    machine = granted(2, version=4)
    for version in received:
        machine.cancel(version)
    assert machine.is_cancelled == cancelled
    assert machine.computed(2.0, 3.0, 8) == cancelled, "a cancelled worker pushes after its current step"
    machine.granted(Grant(3, 8, 5, local_steps=2))
    assert not machine.is_cancelled


class Forgetful(WorkerMachine):
    """A broken variant: the last cancellation counts, whatever was cancelled before."""

    def cancel(self, version):
        self._cancelled = version


def test_a_variant_that_forgets_a_cancellation_differs():
    machine = granted(2, version=4, machine=Forgetful)
    machine.cancel(4)
    machine.cancel(2)
    assert not machine.is_cancelled


def test_of_a_cancelled_step_a_share_is_computed():
    machine = granted()
    machine.cancel(4)
    assert machine.computed(2.0, 2.5, 16, share=0.25)
    info = machine.delivered(1.0, 0.0, 0.0, 0)
    assert (info.share, info.compute_s, info.iteration_s) == (0.25, 0.5, 2.0)


def test_a_prediction_is_of_one_local_step():
    estimator = Fixed()
    machine = granted(2, estimator=estimator)
    machine.computed(2.0, 3.0, 8)
    machine.computed(3.0, 5.0, 8)
    info = machine.delivered(1.0, 0.0, 0.5, 0)
    assert estimator.observed == [(8, 1.5, 0.5)]
    assert (info.predicted_fixed_s, info.predicted_sample_s) == (0.5, 0.25)


def test_granted_samples_follow_the_steps():
    machine = granted(3, first_sample=100, batch_size=24)
    assert machine.samples == (100, 8)
    machine.computed(2.0, 3.0, 8)
    assert machine.samples == (108, 8)


def test_a_restored_machine_waits_for_the_next_grant():
    machine = granted(2)
    machine.computed(2.0, 3.0, 8)
    machine.computed(3.0, 4.0, 8)
    machine.delivered(1.0, 0.0, 0.0, 0)
    other = WorkerMachine(3, 800)
    other.restore(machine.state())
    assert other.grant == machine.grant
    assert (other.n_steps, other.stopped) == (0, False)
