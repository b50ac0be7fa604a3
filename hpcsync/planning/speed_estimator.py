"""Predictors of a worker's speed in samples/s, and estimates of the time of its next iteration."""

from __future__ import annotations

import math
from typing import Protocol

from hpcsync.planning.batch_allocation import Estimate
from hpcsync.state import Stateful

BETA = 0.3  # weight of the newest value in exponential smoothing

LEVEL_BETA = 0.3  # smoothing of the levels in the fit of fixed costs
MEMORY = 0.995  # share of its sums that the fit keeps from one iteration to the next
N_LEAST = 10  # iterations before the fit is used
N_ERRORS = 2.0  # standard errors added to the fitted share of the samples' time
SHARE_MAX = 0.9  # largest fixed share of an iteration


class Predictor(Protocol):
    """Predictor of the next value of a series of speeds in samples/s, finite and greater than 0."""

    def observe(self, speed: float, iteration_s: float = math.inf) -> None:
        """Append a speed to the series.

        Parameters
        ----------
        speed
            Samples per second.
        iteration_s
            Seconds of the iteration. Some predictors limit their own computing time to a share of it.

        Raises
        ------
        ValueError
            If `speed` is not finite and greater than 0.
        """

    def predict(self) -> float:
        """Return the predicted next speed in samples/s, NaN before the first observation."""


def must_be_speed(speed: float) -> None:
    """Raise ValueError unless the speed is finite and greater than 0."""
    if not 0 < speed < math.inf:
        raise ValueError(f"speed must be finite and greater than 0 samples/s, got {speed}")


class LastValue(Stateful):
    """Predictor that repeats the last speed."""

    state_types = {"_speed": float}

    def __init__(self) -> None:
        self._speed = math.nan

    def observe(self, speed: float, iteration_s: float = math.inf) -> None:
        """Append a speed to the series."""
        must_be_speed(speed)
        self._speed = speed

    def predict(self) -> float:
        """Return the last speed."""
        return self._speed


class Smoothing(Stateful):
    """Exponential smoothing: s = `BETA` v + (1 - `BETA`) s, starting with the first speed."""

    state_types = {"_speed": float}

    def __init__(self) -> None:
        self._speed = math.nan

    def observe(self, speed: float, iteration_s: float = math.inf) -> None:
        """Append a speed to the series."""
        must_be_speed(speed)
        if math.isnan(self._speed):
            self._speed = speed
        self._speed += BETA * (speed - self._speed)  # a constant speed stays bitwise constant

    def predict(self) -> float:
        """Return the smoothed speed."""
        return self._speed


class FixedCost(Stateful):
    """Estimate of the part of the computing time that does not depend on the number of samples.

    Notes
    -----
    An iteration of n samples takes s (n + r) seconds: s is the slowness of the worker, which changes all the time, and
    r, the value to estimate, the number of samples that would take as long as the fixed part. Times alone do not
    determine r: batches become smaller where a worker becomes slower, so slow iterations are small ones, and a plain
    fit of times against sizes would attribute all of the time to the fixed part. So the fit uses differences from the
    level just before a change, in which s cancels. With the exponentially smoothed time t' and size n' of the
    iterations so far::

        t / t' - 1 = n' / (n' + r) * (n / n' - 1)

    whose factor, the samples' share of the time, is estimated by least squares with exponential forgetting. The result
    is a bound rather than the fit itself: the smallest fixed share within `N_ERRORS` standard errors. It is 0 while
    sizes are constant, or differ too little for the noise. Too small a share costs little: an allocation by it is still
    right where all finish together, and comes nearer to that every time. Too large a share would overshoot.
    """

    state_types = dict.fromkeys(("_level_n", "_level_s", "_count", "_xx", "_xy", "_yy", "_xx_level_n"), float)

    def __init__(self) -> None:
        self._level_n, self._level_s = math.nan, math.nan
        # Sums over the iterations: their number, squares and products of the differences x in size and y in time, and
        # the level n' of sizes weighted with x^2.
        self._count = self._xx = self._xy = self._yy = self._xx_level_n = 0.0

    def observe(self, n_samples: int, compute_s: float) -> None:
        """Add an iteration of `n_samples` samples that took `compute_s` seconds."""
        if math.isnan(self._level_n):
            self._level_n, self._level_s = float(n_samples), compute_s
            return
        x, y = n_samples / self._level_n - 1.0, compute_s / self._level_s - 1.0
        self._count = MEMORY * self._count + 1.0
        self._xx = MEMORY * self._xx + x * x
        self._xy = MEMORY * self._xy + x * y
        self._yy = MEMORY * self._yy + y * y
        self._xx_level_n = MEMORY * self._xx_level_n + x * x * self._level_n
        self._level_n += LEVEL_BETA * (n_samples - self._level_n)
        self._level_s += LEVEL_BETA * (compute_s - self._level_s)

    def samples(self) -> float:
        """Return r, the number of samples that would take as long as the fixed part."""
        if self._count < N_LEAST or self._xx == 0.0:
            return 0.0
        share = self._xy / self._xx
        variance = max(0.0, self._yy - share * self._xy) / (self._count - 1.0)
        share += N_ERRORS * math.sqrt(variance / self._xx)
        share = min(max(share, 1.0 - SHARE_MAX), 1.0)
        return self._xx_level_n / self._xx * (1.0 - share) / share


class Estimator(Stateful):
    """Estimator of the time of a worker's next iteration, from its last ones; the worker's side of batch allocation.

    Parameters
    ----------
    predictor
        Predictor of the worker's speed.
    tell_fixed
        Whether to separate the time that does not depend on the number of samples: the fixed part of the computation,
        and the transfers. If False, all time counts as computation proportional to the samples.

    Attributes
    ----------
    expected
        Estimate of the next iteration; NaN until an iteration has taken time.

    Notes
    -----
    With a fixed part, the samples/s of an iteration depend on its size. So that iterations of different sizes form one
    series, the predictor observes the speed that an iteration of the first size would have had; its prediction is
    converted back to the current size.
    """

    state_types = {
        "_predictor": Stateful,
        "_cost": FixedCost | None,
        "_comm_s": float,
        "_first_n": int,
        "expected": Estimate,
    }

    def __init__(self, predictor: Predictor, tell_fixed: bool) -> None:
        self._predictor = predictor
        self._cost = FixedCost() if tell_fixed else None
        self._comm_s = math.nan
        self._first_n = 0
        self.expected = Estimate(math.nan, math.nan)

    def observe(self, n_samples: int, compute_s: float, comm_s: float) -> Estimate:
        """Record an iteration and return the estimate of the next one.

        Parameters
        ----------
        n_samples
            Samples of the iteration.
        compute_s, comm_s
            Seconds of computation and of transfers. An iteration with `compute_s` = 0 is ignored.

        Returns
        -------
        Estimate
            Expected time of the next iteration.

        Raises
        ------
        ValueError
            If there are no samples, or times are negative or not finite.
        """
        if not (n_samples >= 1 and 0 <= compute_s < math.inf and 0 <= comm_s < math.inf):
            raise ValueError(
                f"n_samples >= 1 and finite times >= 0 are required, got {n_samples} samples, {compute_s} s, {comm_s} s"
            )
        if compute_s > 0:
            self.expected = self._learn(n_samples, compute_s, comm_s)
        return self.expected

    def _learn(self, n_samples: int, compute_s: float, comm_s: float) -> Estimate:
        fixed_n = 0.0
        if self._cost is not None:
            self._cost.observe(n_samples, compute_s)
            fixed_n = self._cost.samples()
        self._first_n = self._first_n or n_samples
        to_first = (self._first_n + fixed_n) / (n_samples + fixed_n)
        self._predictor.observe(self._first_n / (to_first * compute_s), compute_s + comm_s)
        next_s = self._first_n / self._predictor.predict() / to_first
        if self._cost is None:
            return Estimate(0.0, next_s / n_samples)
        self._comm_s = comm_s if math.isnan(self._comm_s) else self._comm_s + BETA * (comm_s - self._comm_s)
        share = fixed_n / (n_samples + fixed_n)
        return Estimate(share * next_s + self._comm_s, (1.0 - share) * next_s / n_samples)
