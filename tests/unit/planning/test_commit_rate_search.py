"""Search for a commit rate: rewards of known curves, and the number of trials."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsync.planning.commit_rate_search import Search, halved, most_commits, reward

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)


def test_a_period_has_room_for_n_of_its_n_th_parts():
    rounded_down = 0
    for period_s in (0.1, 0.3, 0.7, 3.3, 60.0, 1e9):
        for n in range(1, 200):
            assert most_commits(period_s, period_s / n) == n
            rounded_down += math.floor(period_s / (period_s / n)) < n
    assert rounded_down
    assert most_commits(60.0, 25.0) == 2
    assert most_commits(60.0, 60.0) == 1


def curve(a_squared, b, d):
    return lambda t: 1 / (a_squared * t + b) + d


def test_a_reward_worked_out_by_hand():
    # l(t) = 1 / (t / 2 + 1 / 2) + 1: 3, 2, 5/3. It is 1.5 where t / 2 + 1 / 2 = 2.
    assert reward((0.0, 1.0, 2.0), (3.0, 2.0, 5 / 3), 1.5) == pytest.approx(1 / 3)
    # 2.7 where t / 2 + 1 / 2 = 10 / 17.
    assert reward((0.0, 1.0, 2.0), (3.0, 2.0, 5 / 3), 2.7) == pytest.approx(17 / 3)
    # The target is met at the last point.
    assert reward((0.0, 1.0, 2.0), (3.0, 2.0, 5 / 3), 5 / 3) == pytest.approx(1 / 2)
    # On a straight line 2.7 is reached at 0.3, in whatever unit.
    assert reward((0.0, 1.0, 2.0), (3e100, 2e100, 1e100), 2.7e100) == pytest.approx(1 / 0.3)


@PROPERTY
@given(
    a_squared=st.floats(1e-3, 10.0),
    b=st.floats(0.1, 10.0),
    d=st.floats(-1.0, 5.0),
    begin_s=st.floats(0.0, 5.0),
    end_s=st.floats(0.5, 500.0),
)
def test_without_noise_it_is_one_over_the_time_to_the_target(a_squared, b, d, begin_s, end_s):
    loss = curve(a_squared, b, d)
    times_s = (begin_s, begin_s + 30.0, begin_s + 60.0)
    end_s += begin_s
    assert reward(times_s, tuple(map(loss, times_s)), loss(end_s)) == pytest.approx(1 / end_s, rel=1e-6)


@PROPERTY
@given(st.floats(0.1, 10.0), st.floats(1e-15, 1e-9))
def test_nearly_straight_lines_are_no_trouble(slope, bend):
    losses = (2 * slope, slope, bend)
    assert reward((0.0, 1.0, 2.0), losses, -slope) == pytest.approx(1 / 3, rel=1e-6)
    assert reward((0.0, 1.0, 2.0), (2 * slope, slope, 0.0), -slope) == pytest.approx(1 / 3, rel=1e-12)


@pytest.mark.parametrize(
    ("times_s", "losses", "loss_target"),
    [
        ((), (), 0.5),
        ((0.0, 1.0), (3.0, 2.0), 0.5),
        ((0.0, 1.0, 2.0), (math.nan, 2.0, 1.0), 0.5),
        ((0.0, 1.0, 2.0), (3.0, math.inf, 1.0), 0.5),
        ((0.0, 1.0, 1.0), (3.0, 2.0, 2.0), 0.5),  # two points at the same time
        ((0.0, 1.0, 1.0), (3.0, 2.0, 1.0), 0.5),
        ((1.0, 1.0, 2.0), (3.0, 2.0, 1.0), 1.5),
        ((0.0, 1.0, 2.0), (3.0, 3.0, 3.0), 0.5),
        ((0.0, 1.0, 2.0), (3.0, 2.0, 2.0), 0.5),
        ((0.0, 1.0, 2.0), (3.0, 3.0, 2.0), 0.5),
        ((0.0, 1.0, 2.0), (1.0, 2.0, 3.0), 0.5),
        ((0.0, 1.0, 2.0), (3.0, 1.0, 2.0), 0.5),
        ((0.0, 1.0, 2.0), (3.0, 3.5, 1.0), 2.0),  # a pole between the points
        ((1.0, 2.0, 3.0), (3.0, 2.0, 5 / 3), 3.0),  # reached from the start
        ((0.0, 1.0, 3.0), (3.0, 2.0, 1.5), 1.0),  # the curve's d
        ((0.0, 1.0, 2.0), (3.0, 2.0, 5 / 3), 0.5),
        ((0.0, 1.0, 2.0), (-1.0, -2.0, -2.5), 0.5),  # reached from the start
        ((1.0, 2.0, 3.0), (3e200, 2e200, 1e200), 2.7e200),
        ((0.0, 1e-10, 1.0), (1.0, 1e-320, 0.0), 0.5),  # a product underflows
        ((0.0, 1.0, 2.0), (math.inf, 2.0, 1.0), 0.5),
        ((1.0, 2.0, math.inf), (3.0, 2.0, 1.0), 1.5),
        ((0.0, 1.0, 2.0), (3.0, 2.0, -math.inf), 0.5),
    ],
)
def test_invalid_points_have_the_lowest_reward(times_s, losses, loss_target):
    assert reward(times_s, losses, loss_target) == -math.inf


def test_the_target_of_a_search_stays_until_it_is_passed():
    targets = [math.nan]
    for loss in (8.0, 5.0, 4.5, 4.0, 0.9):
        targets.append(halved(targets[-1], loss))
    assert targets[1:] == [4.0, 4.0, 4.0, 2.0, 0.5]
    assert halved(math.nan, 0.0) == 0.0
    assert halved(math.nan, -1.0) == -0.5 > -1.0, "which no loss comes down to: such losses need a target"


# ---- the search ----


def tried(worth, start, largest=1000, limit=100):
    """Return the number chosen, and all numbers tried."""
    search, counts = Search(start, largest), []
    while len(counts) < limit:
        counts.append(search.next_to_evaluate)
        if search.evaluated(worth(counts[-1])):
            break
    return search.c, counts


@pytest.mark.parametrize("start", [1, 3, 7])
def test_of_rewards_with_one_peak_it_finds_that_and_tries_no_more_than_it_must(start):
    for peak in range(start, start + 6):
        c, counts = tried(lambda c, peak=peak: -((c - peak) ** 2), start)
        assert c == peak
        assert counts == list(range(start, peak + 2))
        assert len(counts) == peak - start + 2


def test_from_beyond_the_peak_it_stays():
    assert tried(lambda c: -c, 5) == (5, [5, 6])


def test_it_does_not_go_beyond_the_largest():
    assert tried(lambda c: c, 1, largest=4) == (4, [1, 2, 3, 4])
    assert tried(lambda c: c, 4, largest=4) == (4, [4])
    assert tried(lambda c: -abs(c - 3), 1, largest=4) == (3, [1, 2, 3, 4])


def test_a_reward_of_minus_infinity_ends_the_search_and_a_better_one_continues_it():
    assert tried(lambda c: -math.inf, 2) == (2, [2, 3])
    assert tried(lambda c: -math.inf if c == 1 else -c, 1) == (2, [1, 2, 3])


class GoesOnWhenEqual(Search):
    def evaluated(self, reward):
        return super().evaluated(reward + 1e-9 * self.next_to_evaluate)


def test_a_search_that_does_not_end_is_seen():
    search = GoesOnWhenEqual(1, 1000)
    assert not any(search.evaluated(0.0) for _ in range(50))
