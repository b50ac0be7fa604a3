"""Events in virtual time: each at its time, in a deterministic order."""

from __future__ import annotations

import contextlib
import gc
import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsync.simulator.event_loop import Loop


class Unnumbered(Loop):
    """A loop without the insertion order of events at the same time."""

    def at(self, time_s, action, *args, priority=0):
        heapq.heappush(self._due, (time_s, priority, -self._serial, action, args))
        self._serial += 1


ASKED = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 1.5]), st.integers(-1, 1)), max_size=30)


def sequence(loop, asked):
    """Return when each of these ran: (time, index)."""
    done = []
    for index, (time_s, priority) in enumerate(asked):
        loop.at(time_s, lambda index: done.append((loop.now_s, index)), index, priority=priority)
    loop.run()
    return done


def due(asked):
    return [(asked[index][0], index) for index in sorted(range(len(asked)), key=lambda index: (*asked[index], index))]


@given(ASKED)
def test_the_order_is_time_then_priority_then_insertion(asked):
    assert sequence(Loop(), asked) == due(asked)


def test_a_loop_without_insertion_order_is_caught():
    asked = [(1.0, 0), (1.0, 0)]
    assert sequence(Unnumbered(), asked) != due(asked)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), max_size=20))
def test_events_scheduled_by_events_run_in_the_same_run(delays):
    loop, times = Loop(), []

    def act(delay_s):
        times.append(loop.now_s)
        loop.after(delay_s, lambda: times.append(loop.now_s))

    for first_s, second_s in delays:
        loop.after(first_s, act, second_s)
    loop.run()
    assert times == sorted(times)
    assert sorted(times) == sorted(time_s for first_s, second_s in delays for time_s in (first_s, first_s + second_s))
    assert loop.n_events == 2 * len(delays)


def test_later_scheduled_events_at_the_same_time_run_later():
    loop, done = Loop(), []
    loop.at(1.0, lambda: (done.append("first"), loop.after(0.0, done.append, "third")))
    loop.at(1.0, done.append, "second")
    loop.at(1.0, done.append, "last", priority=1)
    loop.run()
    assert done == ["first", "second", "third", "last"]


@pytest.mark.parametrize("time_s", [0.999, -1.0, -math.inf, math.inf, math.nan])
def test_past_and_non_finite_times_are_refused(time_s):
    loop = Loop()
    loop.at(1.0, lambda: None)
    loop.run()
    with pytest.raises(ValueError, match="cannot schedule an event at .* not before now, 1.0 s"):
        loop.at(time_s, lambda: None)
    loop.at(1.0, lambda: None)  # the present is allowed


@pytest.mark.parametrize("delay_s", [-1e-30, -math.inf, math.inf, math.nan, 1.5e308])
def test_negative_and_non_finite_delays_are_refused(delay_s):
    loop = Loop()
    loop.at(1.5e308, lambda: None)
    loop.run()
    with pytest.raises(ValueError, match="cannot schedule an event after"):
        loop.after(delay_s, lambda: None)
    assert loop.n_events == 1


def test_an_exception_propagates_and_the_rest_can_still_run():
    loop, done = Loop(), []

    def fail():
        raise KeyError("action")

    loop.at(1.0, fail)
    loop.at(2.0, done.append, "rest")
    with pytest.raises(KeyError, match="action"):
        loop.run()
    assert (loop.now_s, loop.n_events, done) == (1.0, 1, [])
    loop.run()
    assert (loop.now_s, loop.n_events, done) == (2.0, 2, ["rest"])


def test_a_loop_can_be_run_again():
    loop, done = Loop(), []
    loop.run()
    assert (loop.now_s, loop.n_events) == (0.0, 0)
    for time_s in (1.0, 2.0):
        loop.at(time_s, done.append, time_s)
        loop.run()
    assert done == [1.0, 2.0]


class Delayed(Loop):
    """A loop that only accepts delays."""

    def at(self, time_s, action, *args, priority=0):
        self.after(time_s - self.now_s, action, *args)


def missed(loop, times):
    """Return how many of these times, each scheduled at the previous one, were not met to the bit."""
    met = []

    def act(left):
        met.append(loop.now_s)
        if left:
            loop.at(left[0], act, left[1:])

    loop.at(times[0], act, times[1:])
    loop.run()
    return sum(a != b for a, b in zip(met, times, strict=True))


def test_times_are_met_to_the_bit_and_delays_miss_them():
    times = [0.1 * 3.3**i for i in range(100)]
    assert missed(Loop(), times) == 0
    assert missed(Delayed(), times) > 0


@pytest.mark.parametrize("fails", [False, True])
def test_the_collection_of_cycles_is_as_before_after_a_run(fails):
    loop, before, during = Loop(), gc.get_threshold(), []
    loop.at(0.0, lambda: during.append(gc.get_threshold()[0]))
    loop.at(1.0, lambda: 1 / (not fails))
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        loop.run()
    assert during[0] > before[0]
    assert gc.get_threshold() == before
