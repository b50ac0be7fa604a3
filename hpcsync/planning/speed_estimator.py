"""How fast a worker will be: predictors of its speed in samples/s, and what its next iteration is expected to take."""

from __future__ import annotations

import math
from typing import Protocol

from hpcsync.planning.batch_allocation import Estimate

BETA = 0.3  # weight of the newest value in exponential smoothing

LEVEL_BETA = 0.3  # the levels that a fit of fixed costs looks at the differences from
MEMORY = 0.995  # what such a fit keeps of its sums from one iteration to the next
N_LEAST = 10  # iterations before it says anything
N_ERRORS = 2.0  # standard errors that a share of samples' time is taken to be larger than its fit
SHARE_MAX = 0.9  # of an iteration, that is taken to be fixed


class Predictor(Protocol):
    """Predicts the next of a series of speeds in samples/s, finite and greater than 0."""

    def observe(self, speed: float, iteration_s: float = math.inf) -> None:
        """The next speed of the series, and the seconds of its iteration: some predictors may take a share of them.

        Raises ValueError for a speed that is not finite and greater than 0.
        """

    def predict(self) -> float:
        """The speed after those observed, NaN before the first."""


def must_be_speed(speed: float) -> None:
    if not 0 < speed < math.inf:
        raise ValueError(f"a speed of {speed} samples/s; a finite one greater than 0 is needed")


class LastValue:
    """It stays as it is."""

    def __init__(self) -> None:
        self._speed = math.nan

    def observe(self, speed: float, iteration_s: float = math.inf) -> None:
        must_be_speed(speed)
        self._speed = speed

    def predict(self) -> float:
        return self._speed


class Smoothing:
    """Exponential smoothing: s = beta v + (1 - beta) s, from the first speed on."""

    def __init__(self, beta: float = BETA) -> None:
        if not 0 < beta <= 1:
            raise ValueError(f"beta is {beta}; 0 < beta <= 1 is needed")
        self._beta = beta
        self._speed = math.nan

    def observe(self, speed: float, iteration_s: float = math.inf) -> None:
        must_be_speed(speed)
        if math.isnan(self._speed):
            self._speed = speed
        self._speed += self._beta * (speed - self._speed)  # in floats too, a constant speed stays what it is

    def predict(self) -> float:
        return self._speed


class FixedCost:
    """What part of a computation's time does not depend on its samples, from how the times followed the sizes.

    An iteration of n samples takes s (n + r): s is how slow the worker is, which changes all the time, and r, what
    is looked for, the samples that would take as long as what is fixed. Times alone do not tell r: batches become
    smaller where a worker becomes slower, so that slow iterations are small ones, and a plain fit of times against
    sizes would take all of the time to be fixed. So the fit looks at differences from the level just before a
    change, in which s cancels. With the exponentially smoothed time t' and size n' of the iterations so far,

        t / t' - 1 = n' / (n' + r) * (n / n' - 1)

    whose factor, the samples' share of the time, is found by least squares that exponentially forget. What is given
    is a bound rather than the fit itself: so small a fixed share as `N_ERRORS` standard errors allow. It is 0 while
    sizes stay the same, or differ too little for the noise. Too small a share costs little: an allocation by it is
    still right where all finish together, and comes nearer to that every time. Too large a one would overshoot.
    """

    def __init__(self) -> None:
        self._level_n, self._level_s = math.nan, math.nan
        # Sums over the iterations: their number, squares and products of differences x in size and y in time, and the
        # level n' of sizes weighted with the squares that it made.
        self._count = self._xx = self._xy = self._yy = self._xx_level_n = 0.0

    def observe(self, n_samples: int, compute_s: float) -> None:
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
        """r: how many samples would take as long as what is fixed."""
        if self._count < N_LEAST or self._xx == 0.0:
            return 0.0
        share = self._xy / self._xx
        variance = max(0.0, self._yy - share * self._xy) / (self._count - 1.0)
        share += N_ERRORS * math.sqrt(variance / self._xx)
        share = min(max(share, 1.0 - SHARE_MAX), 1.0)
        return self._xx_level_n / self._xx * (1.0 - share) / share


class Estimator:
    """A worker's own side of batch allocation: what its next iteration will take, from what the last ones took.

    predictor:  of its speed.
    tell_fixed: whether what does not depend on the number of samples is told apart: the fixed part of the
                computation, and the transfers. Without, all time is the computation's and in proportion to samples.

    Where an iteration has a fixed part, its samples/s depend on its size. So that speeds of iterations of different
    sizes form one series, the predictor is given the speed that an iteration of the first size would have had; the
    time expected is that speed's, brought back to the current size.

    expected: of the next iteration; NaN until one has taken time.
    """

    def __init__(self, predictor: Predictor, tell_fixed: bool) -> None:
        self._predictor = predictor
        self._cost = FixedCost() if tell_fixed else None
        self._comm_s = math.nan
        self._first_n = 0
        self.expected = Estimate(math.nan, math.nan)

    def observe(self, n_samples: int, compute_s: float, comm_s: float) -> Estimate:
        """An iteration of so many samples took this; what the next one will take. One that took no time says nothing.

        Raises ValueError for what cannot be: no samples, or times that are not finite.
        """
        if not (n_samples >= 1 and 0 <= compute_s < math.inf and 0 <= comm_s < math.inf):
            raise ValueError(f"{n_samples} samples, computed in {compute_s} s, moved in {comm_s} s: impossible")
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
