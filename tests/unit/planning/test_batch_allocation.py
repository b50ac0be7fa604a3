"""Batch sizes with which all finish together: closed forms, limits, rounding, and allocations of a run."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsync.planning.batch_allocation import Allocated, Allocator, Estimate, equal_finish, whole

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)
NO_LIMIT = math.inf

speeds = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12)
estimates = st.lists(st.builds(Estimate, st.floats(0.0, 10.0), st.floats(1e-5, 10.0)), min_size=1, max_size=10)


def by_speed(speeds, total, divide=equal_finish, round_off=whole):
    minima, maxima = [1] * len(speeds), [NO_LIMIT] * len(speeds)
    ideal = divide([Estimate(0.0, 1.0 / v) for v in speeds], total, minima, maxima)
    return round_off(ideal, total, minima, maxima)


# Ideal sizes


def test_the_closed_form_with_fixed_costs():
    of = [Estimate(2.0, c) for c in (0.1, 0.1, 0.2, 0.4)]
    sizes = equal_finish(of, 128, [1] * 4, [NO_LIMIT] * 4)
    assert sizes == pytest.approx((46.55, 46.55, 23.27, 11.64), abs=0.005)
    assert [one.seconds(size) for one, size in zip(of, sizes, strict=True)] == pytest.approx([6.6545] * 4, abs=5e-5)


def test_a_worker_at_a_limit_stays_there_and_the_others_share_the_rest():
    of = [Estimate(0.0, 1.0)] * 3
    assert equal_finish(of, 30, [1, 1, 1], [4, NO_LIMIT, NO_LIMIT]) == [4, 13, 13]
    assert equal_finish(of, 30, [16, 1, 1], [NO_LIMIT] * 3) == [16, 7, 7]
    # A fixed cost beyond the time of the others gives the minimum, not a negative size.
    assert equal_finish([Estimate(9.0, 1.0), *of[1:]], 6, [1] * 3, [NO_LIMIT] * 3) == [1, 2.5, 2.5]


def test_where_the_maxima_cannot_hold_the_total_they_are_the_sizes():
    assert equal_finish([Estimate(0.0, 1.0)] * 2, 30, [1, 1], [4, 5]) == [4, 5]


def test_minima_beyond_the_total_are_refused():
    with pytest.raises(ValueError, match="minima must sum to at most total = 3, got "):
        equal_finish([Estimate(0.0, 1.0)] * 2, 3, [2, 2], [NO_LIMIT] * 2)


def clamped_once(of, total, minima, maxima):
    """Negative control: the closed form clipped to the limits, without solving again."""
    at_s = (total + sum(a / c for a, c in of)) / sum(1 / c for _, c in of)
    return [min(max((at_s - a) / c, low), high) for (a, c), low, high in zip(of, minima, maxima, strict=True)]


def assert_finish_is_equal(of, total, minima, maxima, divide=equal_finish):
    """Assert the total, one common time within the limits, later times at the minimum, earlier ones at the maximum."""
    sizes = divide(of, total, minima, maxima)
    assert sum(sizes) == pytest.approx(total)
    seconds = [one.seconds(size) for one, size in zip(of, sizes, strict=True)]
    every = list(zip(seconds, sizes, minima, maxima, strict=True))
    assert all(low <= size <= high for _, size, low, high in every)
    may_shrink = max((s for s, size, low, _ in every if size > low), default=0.0)
    may_grow = min((s for s, size, _, high in every if size < high), default=math.inf)
    assert may_shrink <= may_grow * (1 + 1e-9)


@PROPERTY
@given(of=estimates, data=st.data())
def test_moving_samples_to_another_worker_never_ends_earlier(of, data):
    limits = [sorted(data.draw(st.tuples(st.integers(1, 50), st.integers(1, 50)))) for _ in of]
    minima, maxima = [low for low, _ in limits], [high for _, high in limits]
    assert_finish_is_equal(of, data.draw(st.integers(sum(minima), sum(maxima))), minima, maxima)


def test_a_total_that_is_missed_is_found():
    limits = [Estimate(0.0, 1.0)] * 3, 30, [1, 1, 1], [4, NO_LIMIT, NO_LIMIT]
    assert_finish_is_equal(*limits)
    with pytest.raises(AssertionError):
        assert_finish_is_equal(*limits, divide=clamped_once)


# Integer sizes


def test_the_golden_rounding_of_dbs():
    """Ye et al., appendix A."""
    assert whole([13.7, 16.5, 19.6, 14.2], 64, [1] * 4, [NO_LIMIT] * 4) == [14, 16, 20, 14]
    assert by_speed([1, 2, 4], 14) == [2, 4, 8]


def test_limits_hold_and_ties_go_to_the_lower_worker():
    assert whole([2.5, 2.5, 2.5, 2.5], 10, [1] * 4, [NO_LIMIT] * 4) == [3, 3, 2, 2]
    assert whole([2.5, 2.5, 2.5, 2.5], 10, [1] * 4, [2, 3, 3, 9]) == [2, 3, 3, 2]
    assert whole([0.1, 0.1, 9.8], 10, [1] * 3, [NO_LIMIT] * 3) == [1, 1, 8]
    assert whole([5.0, 5.0], 10, [1, 1], [3, 4]) == [3, 4]


def one_by_one(ideal, total, minima, maxima):
    """As in DBS: starting from the minima, each unit goes to the worker that it costs least."""
    sizes = list(minima)
    for _ in range(total - sum(sizes)):
        able = [i for i in range(len(sizes)) if sizes[i] < maxima[i]]
        sizes[min(able, key=lambda i: (sizes[i] - ideal[i], i))] += 1
    return sizes


@PROPERTY
@given(data=st.data(), n=st.integers(1, 8))
def test_the_rounding_is_that_of_one_unit_after_the_other(data, n):
    quarters = [data.draw(st.integers(0, 80)) for _ in range(n)]  # quarters are exact in floats
    limits = [sorted(data.draw(st.tuples(st.integers(1, 25), st.integers(1, 25)))) for _ in range(n)]
    minima, maxima = [low for low, _ in limits], [high for _, high in limits]
    total = data.draw(st.integers(sum(minima), sum(maxima)))
    assert whole([q / 4 for q in quarters], total, minima, maxima) == one_by_one(
        [q / 4 for q in quarters], total, minima, maxima
    )


# Sizes by speed


def assert_sizes_are_by_speed(speeds, total, scale=1.0, round_off=whole):
    """Assert the total, at least 1, monotone in speed, within 1 for equal speeds, independent of the unit of speed."""
    sizes = by_speed(speeds, total, round_off=round_off)
    assert sum(sizes) == total and min(sizes) >= 1
    for size, v in zip(sizes, speeds, strict=True):
        for other, other_v in zip(sizes, speeds, strict=True):
            assert not (v > other_v * (1 + 1e-9) and size < other), "the faster has less"
            assert v != other_v or abs(size - other) <= 1, "equally fast, but not equally many"
    assert by_speed([scale * v for v in speeds], total, round_off=round_off) == sizes


@PROPERTY
@given(speeds=speeds, data=st.data(), scale=st.sampled_from([1e-3, 0.1, 1 / 3, 3.0, 7.7, 1e6]))
def test_sizes_are_by_speed(speeds, data, scale):
    repeated = [*speeds, *data.draw(st.lists(st.sampled_from(speeds), max_size=4))]
    assert_sizes_are_by_speed(repeated, data.draw(st.integers(len(repeated), 600)), scale)


def test_sizes_that_are_not_by_speed_are_found():
    def nearest(ideal, total, minima, maxima):
        return [round(size) for size in ideal]

    def last_takes_the_rest(ideal, total, minima, maxima):
        sizes = [math.floor(size) for size in ideal]
        return [*sizes[:-1], total - sum(sizes[:-1])]

    for wrong in (nearest, last_takes_the_rest):
        with pytest.raises(AssertionError):
            assert_sizes_are_by_speed([1.0, 1.0, 1.0, 1.0, 1.0], 13, round_off=wrong)
    # Equal remainders differ by rounding errors, which depend on the unit of speed.
    with pytest.raises(AssertionError):
        for total in range(10, 30):
            assert_sizes_are_by_speed([1.0, 2.0, 4.0, 6.0, 3.0], total, 0.1, round_off=one_by_one)
    for total in range(10, 30):
        assert_sizes_are_by_speed([1.0, 2.0, 4.0, 6.0, 3.0], total, 0.1)


# Allocations of a run


def batches(n_workers=4, total=128, **options):
    return Allocator(n_workers, total, **{"maxima": [NO_LIMIT] * n_workers, **options})


def push_all(allocation, estimates, rounds):
    """Let all workers push in turn; check every allocation and return the one after the last push."""
    for _ in range(rounds):
        for worker, estimate in estimates.items():
            told = allocation.pushed(worker, estimate)
            allocation.check()
    return told


half_as_fast = {0: Estimate(0.0, 1.0), 1: Estimate(0.0, 1.0), 2: Estimate(0.0, 1.0), 3: Estimate(0.0, 2.0)}


def test_at_first_as_equal_as_can_be():
    assert batches(1).sizes == [128]
    assert batches(2, minimum=64, maxima=[64, 64]).sizes == [64, 64]
    assert batches(total=130).sizes == [33, 33, 32, 32]
    assert batches(total=130, maxima=[10, NO_LIMIT, NO_LIMIT, NO_LIMIT]).sizes == [10, 40, 40, 40]


def test_an_allocation_after_the_interval_has_its_inputs():
    allocation = batches(total=14 * 4, interval=3)
    assert push_all(allocation, half_as_fast, rounds=2) == []
    gain = (2 * 14 - 16) / (2 * 14)
    assert push_all(allocation, half_as_fast, rounds=1) == [
        Allocated(0, 16, (14.0, 0.0, 1.0, gain)),
        Allocated(1, 16, (14.0, 0.0, 1.0, gain)),
        Allocated(2, 16, (14.0, 0.0, 1.0, gain)),
        Allocated(3, 8, (14.0, 0.0, 2.0, gain)),
    ]
    assert allocation.sizes == [16, 16, 16, 8]
    assert len(Allocator.decision_fields) == 4
    swapped = {**half_as_fast, 0: Estimate(0.0, 2.0), 3: Estimate(0.0, 1.0)}
    assert [one.size for one in push_all(allocation, swapped, rounds=3)] == [8, 16, 16, 16], "an interval later"


@pytest.mark.parametrize(("gain_min", "changes"), [(0.0, True), (0.1, True), (0.14, False)])
def test_a_small_gain_changes_nothing(gain_min, changes):
    """Estimates of 8 to 6 make sizes of 3 and 4 out of 4 and 3 (rounded from 3.5): (32 - 28) / 32."""
    allocation = batches(2, 7, interval=1, gain_min=gain_min)
    assert allocation.sizes == [4, 3]
    told = push_all(allocation, {0: Estimate(0.0, 8.0), 1: Estimate(0.0, 6.9)}, rounds=1)
    assert bool(told) == changes and allocation.sizes == ([3, 4] if changes else [4, 3])


def test_noise_moves_no_samples_that_gain_little():
    def changes(gain_min):
        allocation, told = batches(2, 640, interval=1, gain_min=gain_min), 0
        for i in range(100):
            told += bool(push_all(allocation, {0: Estimate(0.0, 1 + 0.03 * (i % 2)), 1: Estimate(0.0, 1.0)}, 1))
        return told

    assert changes(0.05) == 0
    assert changes(0.0) > 20


def test_nothing_is_allocated_before_everyone_is_known():
    allocation = batches(2, 12, interval=2)
    for _ in range(20):
        assert allocation.pushed(0, Estimate(0.0, 1.0)) == []
        assert allocation.pushed(1, Estimate(0.0, math.nan)) == []
    told = allocation.pushed(1, Estimate(0.0, 2.0))
    assert [(one.worker, one.size) for one in told] == [(0, 8), (1, 4)]


def test_gathered_estimates_are_answered_at_once():
    allocation = batches(2, 12)
    assert allocation.allocate({0: Estimate(0.0, 1.0)}) == []
    assert [one.size for one in allocation.allocate({0: Estimate(0.0, 1.0), 1: Estimate(0.0, 2.0)})] == [8, 4]
    assert allocation.allocate({0: Estimate(0.0, 1.0), 1: Estimate(0.0, 2.0)}) == []


def test_the_others_get_the_samples_of_a_worker_that_leaves():
    allocation = batches(total=14 * 4, interval=100)
    unknown = allocation.left(2)
    assert [(one.worker, one.size) for one in unknown] == [(0, 19), (1, 19), (3, 18)]
    assert all(math.isnan(value) for value in unknown[0].inputs[1:]) and unknown[0].inputs[0] == 14.0
    push_all(allocation, {worker: half_as_fast[worker] for worker in (0, 1, 3)}, rounds=1)
    known = allocation.left(0)
    assert [(one.worker, one.size) for one in known] == [(1, 37), (3, 19)]
    assert known[1].inputs[:3] == (18.0, 0.0, 2.0) and math.isnan(known[1].inputs[3])
    allocation.check()
    assert [one.size for one in allocation.left(1)] == [56]
    assert allocation.left(3) == [] and allocation.sizes == [0, 0, 0, 0]


def test_a_worker_that_joins_gets_its_part_by_its_last_estimate():
    allocation = batches(total=56, interval=100)
    allocation.left(3)
    assert [one.size for one in allocation.joined(3)] == [14] * 4, "nobody expects anything yet"
    push_all(allocation, half_as_fast, rounds=1)
    allocation.left(3)
    again = allocation.joined(3)
    assert [(one.worker, one.size) for one in again] == [(0, 16), (1, 16), (2, 16), (3, 8)]
    assert again[3].inputs[:3] == (0.0, 0.0, 2.0) and math.isnan(again[3].inputs[3])
    assert allocation.allocate_next(3)[1] == 8
    allocation.check()
    for worker in (2, 4, -1):
        with pytest.raises(ValueError, match=f"worker {worker} has not left"):
            allocation.joined(worker)


def test_the_others_get_their_maxima_if_these_cannot_hold_the_total():
    allocation = batches(3, 30, maxima=[12, 11.5, 10])
    assert [one.size for one in allocation.left(0)] == [11, 10]
    allocation.check()


def test_a_worker_that_has_left_is_refused():
    allocation = batches()
    allocation.left(1)
    for call in (allocation.left, allocation.allocate_next, lambda worker: allocation.pushed(worker, half_as_fast[0])):
        for worker in (1, -1, 4):
            with pytest.raises(ValueError, match=f"worker {worker} is not active"):
                call(worker)


@pytest.mark.parametrize("estimate", [Estimate(0.0, 0.0), Estimate(-1.0, 1.0), Estimate(0.0, math.inf)])
def test_an_impossible_estimate_is_refused(estimate):
    with pytest.raises(ValueError, match="sample_s > 0"):
        batches().pushed(0, estimate)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"total": 3}, "total must be from 4 to "),
        ({"maxima": [8] * 4}, "total must be from 4 to 32, got 128"),
        ({"maxima": [64] * 3}, "got 3 for 4"),
        ({"minimum": 0}, "1 <= minimum <= maximum, got 0"),
        ({"minimum": 9, "maxima": [8, 99, 99, 99]}, "1 <= minimum <= maximum, got 9 and 8"),
        ({"interval": 0}, "interval >= 1 and 0 <= gain_min < 1 are required, got 0"),
        ({"gain_min": 1.0}, "are required, got .* and 1.0"),
    ],
)
def test_values_that_are_not_allowed_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        batches(**wrong)


def test_check_sees_a_wrong_total():
    allocation = batches()
    allocation.sizes[0] -= 1
    with pytest.raises(AssertionError, match="do not sum to 128"):
        allocation.check()


# Samples


def by_number(allocation, counts, worker):
    """Negative control: samples as with equal batches, from the number of the worker's iteration."""
    counts[worker] += 1
    return counts[worker] * allocation.total + sum(allocation.sizes[:worker]), allocation.sizes[worker]


def assert_pieces_fit(events, by_number=None):
    """Allocated ranges are disjoint and leave no gap, whatever happens."""
    allocation, counts = batches(3, 10, interval=1, gain_min=0.0), [0, 0, 0]
    pieces, active = [allocation.allocate_next(worker) for worker in range(3)], {0, 1, 2}
    for worker, sample_s, leaves in events:
        if worker not in active:
            if leaves:
                active.add(worker)
                allocation.joined(worker)
                pieces.append(allocation.allocate_next(worker))
            continue
        if leaves and len(active) > 1:
            active.remove(worker)
            allocation.left(worker)
            continue
        allocation.pushed(worker, Estimate(0.5, sample_s))
        allocation.check()
        piece = by_number(allocation, counts, worker) if by_number else allocation.allocate_next(worker)
        assert piece[1] == allocation.sizes[worker]
        pieces.append(piece)
    end = 0
    for first_sample, n_samples in sorted(pieces):
        assert first_sample == end, f"{'twice' if first_sample < end else 'left out'}: samples from {first_sample}"
        end = first_sample + n_samples


@PROPERTY
@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.01, 10.0), st.sampled_from([False] * 9 + [True])), max_size=40)
)
def test_no_sample_is_handed_out_twice_or_left_out(events):
    assert_pieces_fit(events)


def test_samples_by_number_of_the_iteration_would_not_fit():
    equally = [(worker, 1.0, False) for _ in range(5) for worker in range(3)]
    assert_pieces_fit(equally, by_number)
    with pytest.raises(AssertionError, match="samples from"):
        assert_pieces_fit([(worker, 1.0 + worker, False) for worker, _, _ in equally], by_number)


def test_several_local_steps_are_handed_out_at_once():
    allocation = batches(2, 10, local_steps=3)
    assert [allocation.allocate_next(0), allocation.allocate_next(1)] == [(0, 15), (15, 15)]
    assert [allocation.allocate_next(1), allocation.allocate_next(0)] == [(30, 15), (45, 15)]
    assert [allocation.sizes, allocation.total] == [[5, 5], 10]
