"""Errors of the speed predictors on synthetic series, beside the last value, and the cost of the network."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from hpcsync.bench.figures import Figure, in_turn
from hpcsync.training.speed_models import PREDICTORS, SHARE, WINDOW, nominal_clock, predictor

SPEED = 1000.0  # samples/s
NOISE = 0.05  # standard deviation of the logarithm of every series' noise
SCORED_FROM = 50  # observations; the network is not used before
ITERATION_S = 0.02
SEEDS = (1, 2, 3)


def constant(n: int, generator: np.random.Generator) -> np.ndarray:
    """Return a constant speed."""
    return np.ones(n)


def stepping(n: int, generator: np.random.Generator) -> np.ndarray:
    """Return a speed that alternates between 1 and 0.5, with 100 observations each."""
    return np.where(np.arange(n) // 100 % 2, 0.5, 1.0)


def drifting(n: int, generator: np.random.Generator) -> np.ndarray:
    """Return a random walk with steps of 2 % that reverts to 1."""
    logs, log = np.empty(n), 0.0
    for i, step in enumerate(generator.normal(0.0, 0.02, n)):
        log = logs[i] = 0.99 * log + step
    return np.exp(logs)


def periodic(n: int, generator: np.random.Generator) -> np.ndarray:
    """Return a sine of amplitude 30 % with a period of 12 observations."""
    return 1.0 + 0.3 * np.sin(2.0 * math.pi * np.arange(n) / 12.0)


def bursty(n: int, generator: np.random.Generator) -> np.ndarray:
    """Return a speed that falls to a third in bursts of 8 observations on average.

    A burst begins with probability 1/40.
    """
    busy, speeds = False, np.ones(n)
    for i, draw in enumerate(generator.random(n)):
        busy = draw >= 1 / 8 if busy else draw < 1 / 40
        speeds[i] = 1 / 3 if busy else 1.0
    return speeds


Series = Callable[[int, np.random.Generator], np.ndarray]
SERIES: dict[str, Series] = {one.__name__: one for one in (constant, stepping, drifting, periodic, bursty)}


def speeds(series: str, n: int, seed: int, noise: float = NOISE) -> list[float]:
    """Return `n` speeds of this series in samples/s, each with independent noise."""
    generator = np.random.default_rng([seed, list(SERIES).index(series)])
    return [float(v) for v in SPEED * SERIES[series](n, generator) * generator.lognormal(0.0, noise, n)]


def error(name: str, observed: Sequence[float], seed: int, iteration_s: float = math.inf) -> float:
    """Return the mean absolute relative error of a predictor, for iterations of `iteration_s` seconds."""
    one = predictor(name, seed, 0, nominal_clock())
    errors = []
    for speed in observed:
        errors.append(abs(one.predict() - speed) / speed)
        one.observe(speed, iteration_s)
    return statistics.fmean(errors[SCORED_FROM:])


def errors(series: str, name: str, n: int, iteration_s: float = math.inf, seeds: Sequence[int] = SEEDS) -> list[float]:
    """Return the error for each seed."""
    return [error(name, speeds(series, n, seed), seed, iteration_s) for seed in seeds]


def measure(n: int = 2000, repetitions: int = 5) -> list[Figure]:
    """Measure the errors of all predictors on all series, and their costs."""
    figures = []
    short = f"iterations of {1e3 * ITERATION_S:.0f} ms"
    for series in SERIES:
        last = [100.0 * value for value in errors(series, "last", n)]
        for name in PREDICTORS[1:]:
            for iterations, iteration_s in ((short, ITERATION_S), ("trained every time", math.inf)):
                if name == "smoothing" and iteration_s == math.inf:
                    continue  # the same as above
                values = [100.0 * value for value in errors(series, name, n, iteration_s)]
                spread = f"mean {statistics.fmean(values):.2f}, {min(values):.2f} to {max(values):.2f}"
                figures.append(
                    Figure(f"error, {series}: {name}, {iterations} ({spread})", "%", values, "the last value", last)
                )
    return [*figures, *costs(n // 10, repetitions)]


def costs(n: int, repetitions: int) -> list[Figure]:
    """Measure an observation with the following prediction, without and with the bound on training."""
    observed = speeds("bursty", n + WINDOW, 1)
    limit, limits = f"an iteration of {1e3 * ITERATION_S:.0f} ms", [1e6 * ITERATION_S] * repetitions
    smoothing, unbounded, bounded = in_turn(
        repetitions,
        lambda: each_us("smoothing", observed),
        lambda: each_us("gru", observed),
        lambda: each_us("gru", observed, ITERATION_S),
    )
    return [
        Figure("one observation, smoothing", "us", smoothing, limit, limits),
        Figure("one observation, GRU, with its step of training", "us", unbounded, limit, limits),
        Figure("one observation, GRU, as often as it may train", "us", bounded, limit, limits, SHARE),
    ]


def each_us(name: str, observed: Sequence[float], iteration_s: float = math.inf) -> float:
    """Return the time to observe and predict one speed once the network's window is full, in microseconds."""
    one = predictor(name, 1, 0)
    for speed in observed[:WINDOW]:
        one.observe(speed, iteration_s)
    begin_s = time.perf_counter()
    for speed in observed[WINDOW:]:
        one.observe(speed, iteration_s)
        one.predict()
    return 1e6 * (time.perf_counter() - begin_s) / (len(observed) - WINDOW)
