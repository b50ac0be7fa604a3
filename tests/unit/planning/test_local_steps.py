"""ASHL's two algorithms: numbers worked out by hand, and equal times up to half a step."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsync.planning.local_steps import INDEXED, WorkerProfile, local_steps, ratios, shares

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)

# Each three times as fast as the next in something: T_update = 4*2 + 12, 2*2 + 8, 1*2 + 4 = 20, 12, 6.
GOLDEN = [WorkerProfile(4.0, 6.0, 6.0, 1.0), WorkerProfile(2.0, 4.0, 4.0, 1.0), WorkerProfile(1.0, 2.0, 2.0, 1.0)]

seconds = st.floats(1e-3, 10.0)
profiles = st.lists(st.builds(WorkerProfile, seconds, seconds, seconds, st.floats(0.0, 1.0)), min_size=1, max_size=10)
presets = st.integers(1, 32)


def test_the_golden_steps_and_shares():
    steps = local_steps(GOLDEN, 2)
    assert steps == [2, 6, 16]
    assert shares(steps) == [2 / 24, 6 / 24, 16 / 24]
    assert [n * one.iteration_s + one.push_s + one.pull_s for n, one in zip(steps, GOLDEN, strict=True)] == [20.0] * 3


def test_the_golden_ratios():
    """T_update = 4*2 + 1 + 0.6 + 6, 2*6 + 1 + 0.4 + 4, 1*16 + 1 + 0.2 + 2; what is left of 19.2 s over the push."""
    assert ratios(GOLDEN, [2, 6, 16], 0.1) == pytest.approx([0.70, 0.55, 0.10])


def test_elements_with_their_indices_take_twice_their_time():
    """Workers with 10, 9, 7 and 6 s of steps and pushes of 4 s: the last sends an eighth of it in 1 s."""
    many = [WorkerProfile(iteration_s, 4.0, 0.0, 0.0) for iteration_s in (10.0, 9.0, 7.0, 6.0)]
    assert ratios(many, [1] * 4, 0.125, INDEXED) == [0.125, 0.25, 1.0, 1.0]
    assert ratios(many[:2], [1] * 2, 0.125) == [0.125, 0.375], "the control: as in the paper"
    assert ratios(many, [1] * 4, 0.75, INDEXED) == [1.0] * 4, "so many elements are sent as they are"
    assert ratios([WorkerProfile(0.4, 0.3, 0.0, 0.0)], [1], 0.75, INDEXED) == [1.0], "0.4 + 0.3 - 0.4 is less than 0.3"


def test_a_slow_link_gets_a_small_ratio():
    equal = WorkerProfile(1.0, 1.0, 1.0, 0.0)
    assert ratios([equal, equal._replace(push_s=8.0)], [4, 4], 0.25) == [1.0, 0.25]
    # With steps for the same time, a slow link still sends less.
    many = [equal._replace(push_s=push_s) for push_s in (1.0, 2.0, 4.0)]
    chosen = ratios(many, [4, 4, 4], 0.5)
    assert chosen == [1.0, 1.0, 0.5]


def steps_rounded_up(profiles, preset):
    """Negative control."""
    last_s = max(one.iteration_s * preset + one.push_s + one.pull_s for one in profiles)
    return [math.ceil((last_s - one.push_s - one.pull_s) / one.iteration_s + 0.25) for one in profiles]


def assert_equal_times(profiles, preset, choose=local_steps):
    steps = choose(profiles, preset)
    times_s = [n * one.iteration_s + one.push_s + one.pull_s for n, one in zip(steps, profiles, strict=True)]
    unrounded_s = [preset * one.iteration_s + one.push_s + one.pull_s for one in profiles]
    last_s = max(unrounded_s)
    for one, time_s in zip(profiles, times_s, strict=True):
        assert abs(time_s - last_s) <= one.iteration_s / 2 * (1 + 1e-6) + 1e-9
    assert min(steps) == steps[unrounded_s.index(last_s)] == preset
    assert sum(shares(steps)) == pytest.approx(1.0, abs=1e-12)


@PROPERTY
@given(profiles, presets)
def test_all_need_the_same_time_up_to_half_a_step(profiles, preset):
    assert_equal_times(profiles, preset)


def test_times_that_are_not_equal_are_seen():
    with pytest.raises(AssertionError):
        assert_equal_times(GOLDEN, 2, steps_rounded_up)


@PROPERTY
@given(profiles, presets, st.floats(0.01, 1.0))
def test_with_their_ratios_all_need_the_time_of_the_last_or_send_everything(profiles, preset, least):
    steps = local_steps(profiles, preset)
    chosen = ratios(profiles, steps, least)
    assert all(least <= ratio <= 1 for ratio in chosen)
    rest_s = [n * one.iteration_s + one.encode_s + one.pull_s for n, one in zip(steps, profiles, strict=True)]
    last_s = max(rest + least * one.push_s for rest, one in zip(rest_s, profiles, strict=True))
    times_s = [rest + ratio * one.push_s for rest, ratio, one in zip(rest_s, chosen, profiles, strict=True)]
    assert max(times_s) == pytest.approx(last_s)
    assert all(ratio == 1 or t == pytest.approx(last_s) for ratio, t in zip(chosen, times_s, strict=True))


def test_halves_are_rounded_up_and_not_to_even():
    # (12 - 2) / 4 = 2.5 and (12 - 6) / 4 = 1.5 steps beside 10 of 1 s.
    others = [WorkerProfile(1.0, 1.0, 1.0, 0.0), WorkerProfile(4.0, 1.0, 1.0, 0.0)]
    assert local_steps(others, 2) == [8, 2]
    last = WorkerProfile(10.0, 1.0, 1.0, 0.0)
    assert local_steps([last, WorkerProfile(4.0, 1.0, 1.0, 0.0)], 1) == [1, 3]
    assert local_steps([last, WorkerProfile(4.0, 3.0, 3.0, 0.0)], 1) == [1, 2]


def test_one_worker_makes_the_preset():
    for one in GOLDEN:
        assert local_steps([one], 7) == [7]
        assert shares([7]) == [1.0]
        assert ratios([one], [7], 0.1) == pytest.approx([0.1])


def test_zero_times():
    nothing = WorkerProfile(0.0, 0.0, 0.0, 0.0)
    assert local_steps([nothing, GOLDEN[0]], 3) == [3, 3]
    assert local_steps([nothing], 3) == [3]
    assert ratios([nothing, GOLDEN[0]], [3, 3], 0.1) == pytest.approx([1.0, 0.1])
    assert local_steps([WorkerProfile(5e-324, 0.0, 0.0, 0.0), GOLDEN[0]], 3) == [3, 3]
