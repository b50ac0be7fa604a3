"""Predictors of a worker's speed that learn while it trains: a small recurrent network, and its blend with smoothing.

The network is that of torch.nn.GRU and its training that of torch.optim.Adam, written out in NumPy, to which the tests
hold them. With vectors of 16 elements torch's time goes into calling its operations: a training step takes it five
times as long, and a step must cost less than 1 % of a worker's iteration.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hpcsync.job import Job
from hpcsync.planning.speed import Estimator, LastValue, Predictor, Smoothing, must_be_speed

HIDDEN = 16
WINDOW = 10  # speeds that the network sees
LR = 1e-3
SHARE = 0.01  # of the time of the iterations, that learning and predicting may take

RATIO_MIN, RATIO_MAX = 0.5, 2.0  # a network's output beyond is not believed
TRUSTED_AFTER = 50  # observations
ERROR_BETA = 0.1  # weight of the newest error

PREDICTORS = ("last", "smoothing", "gru", "blend")
STREAM = 6  # random stream of a job's seed


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

    clock: seconds, by which those that learn measure what they take. Where it stands still they take nothing and learn
    from every observation, so that what they predict follows from the seed.
    """
    if name == "last":
        return LastValue()
    if name == "smoothing":
        return Smoothing()
    if name in ("gru", "blend"):
        gru = GRU(np.random.default_rng([seed, STREAM, worker]), clock)
        return Blend(gru) if name == "blend" else gru
    raise ValueError(f"there is no predictor {name!r}, only {', '.join(PREDICTORS)}")


class GRU:
    """The smoothed speed times what a network makes of the last `WINDOW` speeds, each divided by the smoothed one.

    generator:    of the network's first weights.
    clock:        see `predictor`.
    smooth_first: the network sees the smoothed speeds instead of those observed, and predicts the same.

    After every observation the network is trained by one step on what it should have predicted, unless a step as long
    as the longest would bring `spent_s` above `SHARE` of the time of all iterations: then this observation is left out,
    and the prediction after it is the smoothed speed.

    smoothed: the smoothed speed. ratio: what the network has made of the latest speeds, NaN where it was not asked.
    spent_s:  seconds of all observations, with training and predicting. n_trained: steps of training.
    """

    def __init__(
        self,
        generator: np.random.Generator,
        clock: Callable[[], float] = time.perf_counter,
        *,
        smooth_first: bool = False,
    ) -> None:
        self._network = Network(generator)
        self._adam = Adam(self._network.parameters)
        self._clock = clock
        self._smooth_first = smooth_first
        self._smoothing = Smoothing()
        self._series: deque[float] = deque(maxlen=WINDOW)
        self._iterations_s = 0.0
        self._step_s = 0.0  # what the longest step took
        self._tape: list[Step] = []  # of the prediction for the next observation, if one was made
        self.ratio = math.nan
        self.spent_s = 0.0
        self.n_trained = 0

    @property
    def smoothed(self) -> float:
        return self._smoothing.predict()

    def observe(self, speed: float, iteration_s: float = math.inf) -> None:
        begin_s = self._clock()
        before = self.smoothed
        self._smoothing.observe(speed)
        self._iterations_s += iteration_s
        affordable = self.spent_s + self._step_s <= SHARE * self._iterations_s
        if affordable and len(self._series) == WINDOW:
            self._train(self.smoothed if self._smooth_first else speed, before)
        self._series.append(self.smoothed if self._smooth_first else speed)
        self.ratio, self._tape = math.nan, []
        if affordable and len(self._series) == WINDOW:
            self.ratio, self._tape = self._network.forward(np.array(self._series) / self.smoothed)
        took_s = self._clock() - begin_s
        self.spent_s += took_s
        if affordable:
            self._step_s = max(self._step_s, took_s)

    def predict(self) -> float:
        if math.isnan(self.ratio):
            return self.smoothed
        return self.smoothed * min(max(self.ratio, RATIO_MIN), RATIO_MAX)

    def _train(self, speed: float, smoothed: float) -> None:
        """One step on the squared error of the prediction of this speed, made when the smoothed one was `smoothed`."""
        if not self._tape:
            self.ratio, self._tape = self._network.forward(np.array(self._series) / smoothed)
        self._adam.step(self._network.gradient(self._tape, 2.0 * (self.ratio - speed / smoothed)))
        self.n_trained += 1


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


class Step(NamedTuple):
    """What the gradient needs of one element of the series: the state before it, both gates (reset, update), what the
    reset gate multiplies, and the candidate."""

    x: float
    state: np.ndarray
    gates: np.ndarray
    inner: np.ndarray
    candidate: np.ndarray


class Network:
    """A GRU of one layer over a series around 1, and one output from its last state.

    parameters: all in one vector. The first weights are drawn as torch does, uniformly within 1 / sqrt(HIDDEN), except
    those of the output: it begins as exactly 1 and so with no error where nothing changes.
    """

    def __init__(self, generator: np.random.Generator) -> None:
        shapes = (3 * HIDDEN, HIDDEN), (3 * HIDDEN,), (3 * HIDDEN,), (HIDDEN,), (HIDDEN,), (1,)
        size = sum(map(math.prod, shapes))
        self.parameters = generator.uniform(-(HIDDEN**-0.5), HIDDEN**-0.5, size)
        self._gradient = np.zeros(size)
        # Rows of the weights: reset gate, update gate, candidate, as in torch.
        self.state_weight, self.input_weight, self.bias, self.inner_bias, self.output_weight, self.output_bias = _views(
            self.parameters, shapes
        )
        self._gradients = _views(self._gradient, shapes)
        self.output_weight[:] = 0.0
        self.output_bias[:] = 1.0

    def forward(self, series: np.ndarray) -> tuple[float, list[Step]]:
        """The output, and what `gradient` needs."""
        xs = series - 1.0
        inputs = np.multiply.outer(xs, self.input_weight) + self.bias
        state, tape = np.zeros(HIDDEN), []
        for x, of_x in zip(xs, inputs, strict=True):
            of_state = self.state_weight @ state
            gates = 1.0 / (1.0 + np.exp(-(of_x[: 2 * HIDDEN] + of_state[: 2 * HIDDEN])))
            inner = of_state[2 * HIDDEN :] + self.inner_bias
            candidate = np.tanh(of_x[2 * HIDDEN :] + gates[:HIDDEN] * inner)
            tape.append(Step(x, state, gates, inner, candidate))
            state = candidate + gates[HIDDEN:] * (state - candidate)
        tape.append(Step(math.nan, state, gates, inner, candidate))
        return float(self.output_weight @ state + self.output_bias[0]), tape

    def gradient(self, tape: list[Step], of_output: float) -> np.ndarray:
        """Of a loss, with respect to the parameters, where its gradient with respect to the output is `of_output`.

        A vector that the next call overwrites.
        """
        *steps, last = tape
        state_weight, input_weight, bias, inner_bias, output_weight, output_bias = self._gradients
        output_bias[0] = of_output
        np.multiply(last.state, of_output, out=output_weight)
        of_inputs = np.empty((len(steps), 3 * HIDDEN))  # of the loss, with respect to what the inputs contribute
        of_states = np.empty_like(of_inputs)  # the same for the states
        of_state = of_output * self.output_weight
        for step, of_input, of_recurrent in zip(reversed(steps), of_inputs[::-1], of_states[::-1], strict=True):
            reset, update = step.gates[:HIDDEN], step.gates[HIDDEN:]
            of_candidate = of_state * (1.0 - update) * (1.0 - step.candidate**2)
            of_input[:HIDDEN] = of_candidate * step.inner
            of_input[HIDDEN : 2 * HIDDEN] = of_state * (step.state - step.candidate)
            of_input[: 2 * HIDDEN] *= step.gates * (1.0 - step.gates)
            of_input[2 * HIDDEN :] = of_candidate
            of_recurrent[: 2 * HIDDEN] = of_input[: 2 * HIDDEN]
            np.multiply(of_candidate, reset, out=of_recurrent[2 * HIDDEN :])
            of_state = of_state * update + of_recurrent @ self.state_weight
        np.matmul(of_states.T, np.array([step.state for step in steps]), out=state_weight)
        np.matmul([step.x for step in steps], of_inputs, out=input_weight)
        np.sum(of_inputs, axis=0, out=bias)
        np.sum(of_states[:, 2 * HIDDEN :], axis=0, out=inner_bias)
        return self._gradient


class Adam:
    """Changes these parameters in place (Kingma and Ba, ICLR 2015)."""

    def __init__(self, parameters: np.ndarray, lr: float = LR, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self._parameters = parameters
        self._lr = lr
        self._betas = betas
        self._mean, self._square = np.zeros_like(parameters), np.zeros_like(parameters)
        self._n_steps = 0

    def step(self, gradient: np.ndarray) -> None:
        self._n_steps += 1
        of_mean, of_square = self._betas
        self._mean += (1.0 - of_mean) * (gradient - self._mean)
        self._square += (1.0 - of_square) * (gradient**2 - self._square)
        root = np.sqrt(self._square / (1.0 - of_square**self._n_steps))
        self._parameters -= self._lr / (1.0 - of_mean**self._n_steps) * self._mean / (root + 1e-8)


def _views(flat: np.ndarray, shapes: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]
