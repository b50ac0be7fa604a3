"""Predictors of a worker's speed that learn while it trains: a small recurrent network, its blend with smoothing."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from hpcsync.config.job import Job
from hpcsync.planning.speed_estimator import Estimator, LastValue, Predictor, Smoothing, must_be_speed

HIDDEN = 16
WINDOW = 10  # speeds that the network sees
LR = 1e-3
SHARE = 0.01  # of the time of the iterations, that learning and predicting may take
STEP_S = 1.5e-3  # what learning from a speed and predicting the next take on one core, nearly all in calls of torch

RATIO_MIN, RATIO_MAX = 0.5, 2.0  # a network's output beyond is not believed
TRUSTED_AFTER = 50  # observations
ERROR_BETA = 0.1  # weight of the newest error

PREDICTORS = ("last", "smoothing", "gru", "blend")
STREAM = 6  # random stream of a job's seed


def nominal_clock() -> Callable[[], float]:
    """A clock for runs whose time is not real: with every reading it is `STEP_S` later.

    By it a network learns about as often as it would on ranks, and what it predicts follows from the seed.
    """
    return itertools.count(0.0, STEP_S).__next__


def estimator(job: Job, worker: int, clock: Callable[[], float] = time.perf_counter) -> Estimator | None:
    """What a worker of this job says how long its next iterations take; None where batches are equal: nobody asks.

    clock: see `predictor`.
    """
    batches = job.batches
    if batches.policy == "equal":
        return None
    return Estimator(predictor(batches.predictor, job.seed, worker, clock), batches.policy == "equal-finish")


def predictor(name: str, seed: int, worker: int, clock: Callable[[], float] = time.perf_counter) -> Predictor:
    """Make one of PREDICTORS; the worker's draws its first weights from the job's seed.

    clock: seconds, by which those that learn measure what they take.
    """
    if name == "last":
        return LastValue()
    if name == "smoothing":
        return Smoothing()
    if name in ("gru", "blend"):
        gru = GRU(int(np.random.SeedSequence([seed, STREAM, worker]).generate_state(1)[0]), clock)
        return Blend(gru) if name == "blend" else gru
    raise ValueError(f"there is no predictor {name!r}, only {', '.join(PREDICTORS)}")


class GRU:
    """The smoothed speed times what a network makes of the last `WINDOW` speeds, each divided by the smoothed one.

    seed:         of the network's first weights.
    clock:        see `predictor`.
    smooth_first: the network sees the smoothed speeds instead of those observed, and predicts the same.

    With every observation the network is trained by one step on what it should have predicted, and predicts the next,
    unless a step as long as the longest would bring `spent_s` above `SHARE` of the time of all iterations: then this
    observation is left out, and the prediction after it is the smoothed speed.

    smoothed: the smoothed speed. ratio: what the network has made of the latest speeds, NaN where it was not asked.
    spent_s:  seconds of all steps and the predictions after them. n_trained: steps.
    """

    def __init__(
        self, seed: int, clock: Callable[[], float] = time.perf_counter, *, smooth_first: bool = False
    ) -> None:
        self._network = GruNetwork(seed)
        # With fused=True all that it keeps is where the parameters are, whatever a script's default device is.
        self._adam = torch.optim.Adam(self._network.parameters(), lr=LR, fused=True)
        self._clock = clock
        self._smooth_first = smooth_first
        self._smoothing = Smoothing()
        self._series: deque[float] = deque(maxlen=WINDOW)
        self._iterations_s = 0.0
        self.ratio = math.nan
        self.spent_s = 0.0
        self.n_trained = 0
        # A process's first optimizer costs it seconds (torch loads its compiler). They are none of an iteration's:
        # workers have their estimator made before the run begins. The second step tells what one takes. There is no
        # error in either, nothing changes.
        for _ in range(2):
            begin_s = clock()
            self._step([1.0] * WINDOW, 1.0, [1.0] * WINDOW)
            self._step_s = clock() - begin_s  # what the longest took

    @property
    def smoothed(self) -> float:
        return self._smoothing.predict()

    def observe(self, speed: float, iteration_s: float = math.inf) -> None:
        series, smoothed = list(self._series), self.smoothed
        self._smoothing.observe(speed)
        newest = self.smoothed if self._smooth_first else speed
        self._series.append(newest)
        self._iterations_s += iteration_s
        self.ratio = math.nan
        if len(series) < WINDOW or self.spent_s + self._step_s > SHARE * self._iterations_s:
            return
        begin_s = self._clock()
        self.ratio = self._step(
            [one / smoothed for one in series], newest / smoothed, [one / self.smoothed for one in self._series]
        )
        took_s = self._clock() - begin_s
        self.spent_s += took_s
        self._step_s = max(self._step_s, took_s)
        self.n_trained += 1

    def predict(self) -> float:
        if math.isnan(self.ratio):
            return self.smoothed
        return self.smoothed * min(max(self.ratio, RATIO_MIN), RATIO_MAX)

    def _step(self, series: Sequence[float], expected: float, next_series: Sequence[float]) -> float:
        """One step on the squared error of what the network makes of a series; then, what it makes of the next."""
        with _one_thread():
            with torch.enable_grad():
                self._adam.zero_grad()
                ((self._network(series) - expected) ** 2).backward()
                self._adam.step()
            with torch.no_grad():
                return float(self._network(next_series))


class Blend:
    """The GRU's prediction and the smoothed speed, each weighted with the other's recent error.

    The GRU's weighs nothing for the first `TRUSTED_AFTER` observations, where it was not asked, and where it is beyond
    `RATIO_MIN` to `RATIO_MAX` times the smoothed speed.
    """

    def __init__(self, gru: GRU) -> None:
        self.gru = gru
        self._n_observed = 0
        self._gru_error = self._smoothed_error = 0.0  # mean absolute errors, the latest weighing most

    @property
    def spent_s(self) -> float:
        return self.gru.spent_s

    @property
    def weight(self) -> float:
        """Of the GRU."""
        errors = self._gru_error + self._smoothed_error
        if self._n_observed < TRUSTED_AFTER or not RATIO_MIN <= self.gru.ratio <= RATIO_MAX or errors == 0.0:
            return 0.0
        return self._smoothed_error / errors

    def observe(self, speed: float, iteration_s: float = math.inf) -> None:
        must_be_speed(speed)
        if not math.isnan(self.gru.ratio):
            gru_error, smoothed_error = abs(self.gru.predict() - speed), abs(self.gru.smoothed - speed)
            self._gru_error += ERROR_BETA * (gru_error - self._gru_error)
            self._smoothed_error += ERROR_BETA * (smoothed_error - self._smoothed_error)
        self.gru.observe(speed, iteration_s)
        self._n_observed += 1

    def predict(self) -> float:
        smoothed = self.gru.smoothed
        if (weight := self.weight) == 0.0:
            return smoothed
        return weight * self.gru.predict() + (1.0 - weight) * smoothed


class GruNetwork(nn.Module):
    """A GRU of one layer over a series around 1, and one output from its last state.

    It begins with an output of exactly 1, and so with no error where nothing changes. In float64: the square of an
    error may be as large as it likes, and autocast leaves it alone. Always on the CPU.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would change the GPUs' too
            self.gru = nn.GRU(1, HIDDEN, device="cpu", dtype=torch.float64)
            self.output = nn.Linear(HIDDEN, 1, device="cpu", dtype=torch.float64)
        nn.init.zeros_(self.output.weight)
        nn.init.ones_(self.output.bias)

    def forward(self, series: Sequence[float]) -> torch.Tensor:
        """A scalar."""
        states, _ = self.gru(torch.tensor(series, device="cpu", dtype=torch.float64)[:, None] - 1.0)
        output: torch.Tensor = self.output(states[-1])[0]
        return output


@contextmanager
def _one_thread() -> Iterator[None]:
    """Adam would split even 16 elements between torch's threads, and wait for milliseconds where a core is busy."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)
