"""Predictors of a worker's speed that learn during training: a recurrent network, and its blend with smoothing."""

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
from hpcsync.state import Stateful, restore_arrays
from hpcsync.training.optimizers import OptimizerState

HIDDEN = 16
WINDOW = 10  # speeds in the network's input
LR = 1e-3
SHARE = 0.01  # of the iterations' time that learning and predicting may take
STEP_S = 1.5e-3  # one step of learning and one prediction on one core, nearly all overhead of torch calls

RATIO_MIN, RATIO_MAX = 0.5, 2.0  # outputs of the network beyond are not trusted
TRUSTED_AFTER = 50  # observations
ERROR_BETA = 0.1  # weight of the newest error

PREDICTORS = ("last", "smoothing", "gru", "blend")
STREAM = 6  # random stream of a job's seed


def nominal_clock() -> Callable[[], float]:
    """Return a clock for virtual time that advances by `STEP_S` with every reading.

    With it a network learns about as often as on real ranks, and its predictions follow from the seed.
    """
    return itertools.count(0.0, STEP_S).__next__


def estimator(job: Job, worker: int, clock: Callable[[], float] = time.perf_counter) -> Estimator | None:
    """Return the estimator of a worker's iteration times; None with equal batches, which need none.

    See `predictor` for `clock`.
    """
    batches = job.batches
    if batches.policy == "equal":
        return None
    return Estimator(predictor(batches.predictor, job.seed, worker, clock), batches.policy == "equal-finish")


def predictor(name: str, seed: int, worker: int, clock: Callable[[], float] = time.perf_counter) -> Predictor:
    """Return a new predictor.

    Parameters
    ----------
    name
        One of `PREDICTORS`.
    seed, worker
        The job's seed and the worker, from which initial weights are drawn.
    clock
        Clock in seconds, by which predictors that learn measure their own cost.

    Raises
    ------
    ValueError
        For another name.
    """
    if name == "last":
        return LastValue()
    if name == "smoothing":
        return Smoothing()
    if name in ("gru", "blend"):
        gru = GRU(int(np.random.SeedSequence([seed, STREAM, worker]).generate_state(1)[0]), clock)
        return Blend(gru) if name == "blend" else gru
    raise ValueError(f"predictor is {name!r}; must be one of {', '.join(PREDICTORS)}")


class GRU(Stateful):
    """Predicts the smoothed speed times the output of a network for the last `WINDOW` speeds over the smoothed speed.

    Parameters
    ----------
    seed
        Seed of the network's initial weights.
    clock
        See `predictor`.

    Attributes
    ----------
    smoothed
        The smoothed speed.
    ratio
        Output of the network for the latest speeds; NaN if it was skipped.
    spent_s
        Seconds of all training steps and the predictions after them.
    n_trained
        Number of training steps.

    Notes
    -----
    With every observation the network is trained by one step on what it should have predicted, and predicts the next
    speed. If a step as long as the longest so far would bring `spent_s` above `SHARE` of the time of all iterations,
    the observation is skipped, and the prediction after it is the smoothed speed.
    """

    state_types = {
        "_parameters": dict[str, torch.Tensor],
        "_adam_state": OptimizerState,
        "_smoothing": Smoothing,
        "_series": deque[float],
        "_iterations_s": float,
        "ratio": float,
        "spent_s": float,
        "n_trained": int,
        "_step_s": float,
    }

    def __init__(self, seed: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._network = GruNetwork(seed)
        # With fused=True its state is on the parameters' device, whatever a script's default device is.
        self._adam = torch.optim.Adam(self._network.parameters(), lr=LR, fused=True)
        self._adam_state = OptimizerState(self._adam)
        self._clock = clock
        self._smoothing = Smoothing()
        self._series: deque[float] = deque(maxlen=WINDOW)
        self._iterations_s = 0.0
        self.ratio = math.nan
        self.spent_s = 0.0
        self.n_trained = 0
        # A process's first optimizer costs seconds (torch loads its compiler). They are not part of an iteration:
        # workers create their estimator before the run begins. The second step measures the cost of one. Both have
        # zero error and so change nothing.
        for _ in range(2):
            begin_s = clock()
            self._step([1.0] * WINDOW, 1.0, [1.0] * WINDOW)
            self._step_s = clock() - begin_s  # the longest step so far

    @property
    def _parameters(self) -> dict[str, torch.Tensor]:
        """Weights of the network by name, not copied."""
        return {name: parameter.data for name, parameter in self._network.named_parameters()}

    @_parameters.setter
    def _parameters(self, values: dict[str, torch.Tensor]) -> None:
        restore_arrays(self._parameters, values)

    @property
    def smoothed(self) -> float:
        """The smoothed speed."""
        return self._smoothing.predict()

    def observe(self, speed: float, iteration_s: float = math.inf) -> None:
        """Learn from an observed speed; `iteration_s` is the duration of its iteration."""
        series, smoothed = list(self._series), self.smoothed
        self._smoothing.observe(speed)
        self._series.append(speed)
        self._iterations_s += iteration_s
        self.ratio = math.nan
        if len(series) < WINDOW or self.spent_s + self._step_s > SHARE * self._iterations_s:
            return
        begin_s = self._clock()
        self.ratio = self._step(
            [one / smoothed for one in series], speed / smoothed, [one / self.smoothed for one in self._series]
        )
        took_s = self._clock() - begin_s
        self.spent_s += took_s
        self._step_s = max(self._step_s, took_s)
        self.n_trained += 1

    def predict(self) -> float:
        """Return the predicted speed."""
        if math.isnan(self.ratio):
            return self.smoothed
        return self.smoothed * min(max(self.ratio, RATIO_MIN), RATIO_MAX)

    def _step(self, series: Sequence[float], expected: float, next_series: Sequence[float]) -> float:
        """Make one step on the squared error of the output for a series; return the output for the next series."""
        with _one_thread():
            with torch.enable_grad():
                self._adam.zero_grad()
                ((self._network(series) - expected) ** 2).backward()
                self._adam.step()
            with torch.no_grad():
                return float(self._network(next_series))


class Blend(Stateful):
    """Mean of the GRU's prediction and the smoothed speed, each weighted by the other's recent error.

    The GRU's weight is zero for the first `TRUSTED_AFTER` observations, if it was skipped, and if its output is outside
    `RATIO_MIN` to `RATIO_MAX`.
    """

    state_types = {"gru": GRU, "_n_observed": int, "_gru_error": float, "_smoothed_error": float}

    def __init__(self, gru: GRU) -> None:
        self.gru = gru
        self._n_observed = 0
        self._gru_error = self._smoothed_error = 0.0  # exponentially weighted mean absolute errors

    @property
    def weight(self) -> float:
        """Weight of the GRU's prediction, 0 to 1."""
        errors = self._gru_error + self._smoothed_error
        if self._n_observed < TRUSTED_AFTER or not RATIO_MIN <= self.gru.ratio <= RATIO_MAX or errors == 0.0:
            return 0.0
        return self._smoothed_error / errors

    def observe(self, speed: float, iteration_s: float = math.inf) -> None:
        """Learn from an observed speed; `iteration_s` is the duration of its iteration."""
        must_be_speed(speed)
        if not math.isnan(self.gru.ratio):
            gru_error, smoothed_error = abs(self.gru.predict() - speed), abs(self.gru.smoothed - speed)
            self._gru_error += ERROR_BETA * (gru_error - self._gru_error)
            self._smoothed_error += ERROR_BETA * (smoothed_error - self._smoothed_error)
        self.gru.observe(speed, iteration_s)
        self._n_observed += 1

    def predict(self) -> float:
        """Return the predicted speed."""
        smoothed = self.gru.smoothed
        if (weight := self.weight) == 0.0:
            return smoothed
        return weight * self.gru.predict() + (1.0 - weight) * smoothed


class GruNetwork(nn.Module):
    """A GRU of one layer over a series around 1, and one linear output of its last state, always on the CPU.

    The initial output is exactly 1, so the error is zero while the speed is constant. The type is float64: squared
    errors cannot overflow in practice, and autocast does not convert them.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPUs
            self.gru = nn.GRU(1, HIDDEN, device="cpu", dtype=torch.float64)
            self.output = nn.Linear(HIDDEN, 1, device="cpu", dtype=torch.float64)
        nn.init.zeros_(self.output.weight)
        nn.init.ones_(self.output.bias)

    def forward(self, series: Sequence[float]) -> torch.Tensor:
        """Return the output for a series, shape ()."""
        states, _ = self.gru(torch.tensor(series, device="cpu", dtype=torch.float64)[:, None] - 1.0)
        output: torch.Tensor = self.output(states[-1])[0]
        return output


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: Adam would split even 16 elements, and wait milliseconds for a busy core."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)
