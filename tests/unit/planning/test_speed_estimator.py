"""Predictors of speed, the fit of fixed costs, and estimates of the next iteration."""

import math

import numpy as np
import pytest

from hpcsync.planning import speed_estimator
from hpcsync.planning.batch_allocation import Allocator, Estimate
from hpcsync.planning.speed_estimator import Estimator, FixedCost, LastValue, Smoothing
from tests.unit.planning import predicting

every_predictor = pytest.mark.parametrize("make", [LastValue, Smoothing])


class Line(LastValue):
    """Negative control: linear extrapolation of the last change."""

    def observe(self, speed_estimator, iteration_s=math.inf):
        self._before = self._speed
        super().observe(speed_estimator)

    def predict(self):
        return self._speed if math.isnan(self._speed) or math.isnan(self._before) else 2 * self._speed - self._before


class FromNothing(Smoothing):
    """Negative control: starts at speed 1, and is slow."""

    def __init__(self):
        self._speed = 1.0

    def observe(self, speed, iteration_s=math.inf):
        self._speed += 0.05 * (speed - self._speed)


# Predictors


@every_predictor
def test_a_constant_speed_is_predicted_without_error(make):
    predicting.assert_constant_speed_has_no_error(make)


@every_predictor
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_step_is_followed_within_ten_observations(make, factor):
    predicting.assert_step_is_followed(make, factor)


@every_predictor
def test_predictions_are_speeds(make):
    predicting.assert_predictions_are_speeds(make)


@every_predictor
def test_impossible_speeds_are_refused(make):
    predicting.assert_impossible_speeds_are_refused(make)


def test_wrong_predictors_are_found():
    with pytest.raises(AssertionError):
        predicting.assert_constant_speed_has_no_error(FromNothing)
    with pytest.raises(AssertionError):
        predicting.assert_step_is_followed(FromNothing, 0.5)
    with pytest.raises(AssertionError):
        predicting.assert_predictions_are_speeds(Line)


def test_smoothing_is_as_written():
    one, s = Smoothing(), 10.0
    one.observe(10.0)
    for v in (20.0, 5.0, 8.0):
        one.observe(v)
        s = 0.3 * v + 0.7 * s
    assert one.predict() == pytest.approx(s, rel=1e-15)


# Fixed costs


def observed(sizes, jitter=0.0, share=0.5, slowness=None, seed=0, reference=32, cost=None):
    """Fit iterations of 20 ms at the reference size, of which this share is fixed; also return the largest r."""
    cost, largest = cost or FixedCost(), 0.0
    noise = np.random.default_rng(seed).lognormal(0.0, jitter, len(sizes)) if jitter else np.ones(len(sizes))
    slowness = slowness if slowness is not None else np.ones(len(sizes))
    for n, factor in zip(sizes, noise * slowness, strict=True):
        cost.observe(int(n), 0.02 * (share + (1.0 - share) * n / reference) * factor)
        largest = max(largest, cost.samples())
    return cost, largest


class PlainFit:
    """Negative control: times fitted against sizes, with the same forgetting."""

    def __init__(self):
        self._sums = np.zeros(5)

    def observe(self, n_samples, compute_s):
        n, t = n_samples, compute_s
        self._sums = speed_estimator.MEMORY * self._sums + np.array([1.0, n, t, n * n, n * t])

    def samples(self):
        count, n, t, nn, nt = self._sums
        if count < speed_estimator.N_LEAST or count * nn - n * n < 1e-9 * nn:
            return 0.0
        slope = (count * nt - n * t) / (count * nn - n * n)
        fixed_s, sample_s = (t - slope * n) / count, max(slope, 1e-12)
        return min(max(fixed_s / sample_s, 0.0), 1e9)


changing = np.repeat(np.random.default_rng(3).integers(16, 64, 30), 10)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8])
def test_a_fixed_share_is_found_exactly_without_noise(share):
    cost, _ = observed(changing, share=share)
    # The factor of a fit over several levels is that at their mean: hence not to all digits.
    assert cost.samples() == pytest.approx(32 * share / (1 - share), rel=0.1, abs=1e-9)


@pytest.mark.parametrize("share", [0.98, 1.0])
def test_a_fixed_share_near_one_counts_as_nine_tenths(share):
    """Else an iteration that hardly depends on its size would be given nearly all samples."""
    cost, _ = observed(changing, share=share)
    assert cost.samples() == pytest.approx(np.mean(changing) * 0.9 / 0.1, rel=0.15)


def test_a_few_iterations_say_nothing_of_fixed_costs():
    sizes = [16, 48] * 6
    assert (observed(sizes[:11])[1], observed(sizes)[1] > 1) == (0.0, True)  # the first one is the level


@pytest.mark.parametrize("seed", range(5))
def test_constant_batches_give_no_fixed_cost_whatever_the_noise(seed):
    assert observed([32] * 500, jitter=0.2, seed=seed)[1] == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_a_change_by_one_sample_says_nothing_under_noise(seed):
    sizes = 32 + np.random.default_rng(seed).integers(0, 2, 500)
    assert observed(sizes, jitter=0.2, seed=seed)[1] < 0.1 * 32
    assert observed(sizes, jitter=0.2, seed=seed, cost=PlainFit())[1] > 32


def test_noise_makes_the_bound_smaller_not_larger():
    found = [observed(changing, jitter=0.2, seed=seed)[0].samples() for seed in range(20)]
    assert np.mean(found) < 32 and np.mean(np.array(found) > 1.2 * 32) <= 0.05
    assert observed(changing, jitter=0.02)[0].samples() == pytest.approx(32, rel=0.25)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_slow_phases_with_small_batches_are_not_taken_for_fixed_time(share):
    """As with allocation: ten iterations after a worker became slower, its batch is smaller by the same factor."""
    slowness = np.tile(np.repeat([1.0, 3.0], 40), 5)
    sizes = np.roll(np.where(slowness > 1.0, 16, 48), 10)
    true = 32 * share / (1.0 - share)
    phases = {"jitter": 0.05, "share": share, "slowness": slowness}
    assert observed(sizes, **phases)[1] <= true
    assert observed(sizes, **phases, cost=PlainFit())[1] > true + 24


def test_fixed_time_is_forgotten_when_sizes_stay():
    cost, _ = observed(changing, jitter=0.05)
    assert cost.samples() > 20
    observed([40] * 2000, jitter=0.05, cost=cost)
    assert cost.samples() == 0.0


# The worker's side


class Seen(LastValue):
    """Keeps what it has observed last."""

    def observe(self, speed, iteration_s=math.inf):
        super().observe(speed, iteration_s)
        self.last = speed, iteration_s


def test_in_proportion_everything_is_the_samples():
    estimator = Estimator(Smoothing(), tell_fixed=False)
    assert estimator.observe(10, 2.0, 7.0) == Estimate(0.0, 0.2)
    fixed_s, sample_s = estimator.observe(10, 1.0, 7.0)
    assert (fixed_s, 1 / sample_s) == (0.0, pytest.approx(0.3 * 10 + 0.7 * 5))
    assert estimator.observe(65, 10.0, 7.0) == Estimate(0.0, pytest.approx(sample_s))


def test_transfers_are_smoothed_and_fixed():
    estimator = Estimator(Smoothing(), tell_fixed=True)
    assert estimator.observe(10, 2.0, 1.0) == Estimate(1.0, 0.2)
    assert estimator.observe(10, 2.0, 2.0) == Estimate(pytest.approx(1.3), pytest.approx(0.2))


@pytest.mark.parametrize("make", [LastValue, Smoothing])
def test_the_estimate_is_right_at_all_sizes_once_the_fixed_part_is_known(make):
    """A change of size is not a change of speed, but is mistaken for one without fixed costs."""
    separated, plain = Estimator(make(), tell_fixed=True), Estimator(make(), tell_fixed=False)
    for n in (*changing, 20):
        compute_s = 0.01 + 0.01 * n / 32
        by_both, by_samples = separated.observe(int(n), compute_s, 0.001), plain.observe(int(n), compute_s, 0.001)
    assert by_both.fixed_s == pytest.approx(0.011, rel=0.05)
    assert by_both.seconds(20) == pytest.approx(0.001 + 0.01 + 0.01 * 20 / 32, rel=0.02)
    assert by_both.seconds(60) == pytest.approx(0.001 + 0.01 + 0.01 * 60 / 32, rel=0.05)
    assert by_samples.seconds(60) > 1.1 * by_both.seconds(60)


def test_the_predictor_observes_speeds_of_the_first_size_and_the_time_of_the_whole_iteration():
    estimator = Estimator(seen := Seen(), tell_fixed=True)
    for n in (first := int(changing[0]), *map(int, changing), 20):
        estimator.observe(n, 0.01 + 0.01 * n / 32, 0.001)
    assert seen.last == pytest.approx((first / (0.01 + 0.01 * first / 32), 0.011 + 0.01 * 20 / 32), rel=0.02)


@pytest.mark.parametrize(
    "values",
    [(0, 1.0, 0.0), (1, math.nan, 0.0), (1, -0.1, 0.0), (1, math.inf, 0.0), (1, 1.0, -0.1), (1, 1.0, math.inf)],
)
def test_impossible_iterations_are_refused(values):
    with pytest.raises(ValueError, match="n_samples >= 1 and finite times >= 0 are required"):
        Estimator(Smoothing(), tell_fixed=True).observe(*values)


def slowest_s(tell_fixed, bursts, share=0.5, jitter=0.02, iterations=400):
    """Return the mean time of the slowest of four workers, one of them half as fast, at their allocated sizes."""
    generator = np.random.default_rng(7)
    batches = Allocator(4, 128, maxima=[math.inf] * 4)
    estimators = [Estimator(Smoothing(), tell_fixed) for _ in range(4)]
    busy, seconds = [False] * 4, []
    for _ in range(iterations):
        of = []
        for worker, base_s in enumerate((0.02, 0.02, 0.02, 0.04)):
            if bursts:
                busy[worker] = generator.random() < (0.95 if busy[worker] else 0.02)
            n = batches.sizes[worker]
            factor = generator.lognormal(0.0, jitter) * (3.0 if busy[worker] else 1.0)
            of.append(base_s * (share + (1.0 - share) * n / 32) * factor)
            batches.pushed(worker, estimators[worker].observe(n, of[-1], 0.001))
            batches.check()
        seconds.append(max(of))
    return np.mean(seconds[50:])


def test_all_finish_together_with_fixed_costs_and_without_knowing_them():
    # At T = (128 + 3 * 32 + 32) / (3 * 3200 + 1600) with 10 ms fixed, 20 ms for the slow; equal batches take 40 ms.
    ideal_s = (128 + 4 * 32) / (3 * 3200 + 1600)
    reported_s, plain_s = slowest_s(True, False), slowest_s(False, False)
    assert ideal_s < reported_s < 1.07 * ideal_s
    assert ideal_s < plain_s < 1.1 * ideal_s


def test_bursts_make_no_wild_batches():
    reported_s, plain_s = slowest_s(True, True), slowest_s(False, True)
    assert reported_s < 1.05 * plain_s


def test_an_iteration_that_took_no_time_says_nothing():
    estimator = Estimator(LastValue(), False)
    assert all(map(math.isnan, estimator.observe(4, 0.0, 0.0)))
    assert estimator.observe(4, 2.0, 0.0) == Estimate(0.0, 0.5)
    assert estimator.observe(4, 0.0, 0.0) == estimator.expected == Estimate(0.0, 0.5)
