"""CPU load as an input of the network that predicts a worker's speed, on iterations recorded on a busy machine.

Yu et al. (HPCC 2019) predict by past speeds and by past and present CPU load. Here one process computes the same
iteration again and again while others come and go; the predictors are compared on what it recorded. Linux only.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from torch import nn

from hpcsync.bench.prediction import SCORED_FROM, error
from hpcsync.planning.speed_estimator import Smoothing
from hpcsync.system.atomic_files import whole
from hpcsync.training.speed_models import HIDDEN, LR, RATIO_MAX, RATIO_MIN, WINDOW
from reproductions.claims import Claim, conclude, of, ratio

ITERATION_S = 0.15  # alone; the least with which the network may learn in every iteration
N_ITERATIONS = 300
# Guesses: how many other processes compute, in multiples of the cores, and the mean time until that changes.
OTHERS, DWELL_S = (0.0, 0.5, 1.0, 1.5, 2.0), (1.0, 10.0)
START_S = 10.0  # until all of them run
FIRST_SEED = 7
WITHOUT, WITH, LAST, SMOOTHING = "gru", "gru with load", "last", "smoothing"


# ---- recording ----


def record(seed: int, dwell_s: float) -> pd.DataFrame:
    """Compute iterations beside other processes that come and go.

    Returns
    -------
    pandas.DataFrame
        A row per iteration: `speed`, iterations a second; `load`, share of all cores that other processes used during
        it; `running`, other processes that wait for a core or have one at its end, per core.
    """
    torch.set_num_threads(1)
    n_cores = multiprocessing.cpu_count()
    products = calibrated()
    rows = []
    with competitors(seed, dwell_s, n_cores):
        for _ in range(N_ITERATIONS):
            begin_s, own_s, busy_s = time.perf_counter(), time.process_time(), machine_busy_s()
            work(products)
            took_s = time.perf_counter() - begin_s
            others_s = machine_busy_s() - busy_s - (time.process_time() - own_s)
            rows.append((1.0 / took_s, others_s / (took_s * n_cores), (running() - 1) / n_cores))
    return pd.DataFrame(rows, columns=["speed", "load", "running"])


def work(products: int) -> None:
    """Multiply matrices so many times."""
    matrix = np.full((200, 200), 0.001)
    for _ in range(products):
        matrix = np.tanh(matrix @ matrix)


def calibrated() -> int:
    """Return the number of products that use `ITERATION_S` of a core."""
    tried, used_s = 100, []
    for _ in range(5):
        begin_s = time.process_time()
        work(tried)
        used_s.append(time.process_time() - begin_s)
    return max(1, round(tried * ITERATION_S / min(used_s)))


@contextmanager
def competitors(seed: int, dwell_s: float, n_cores: int) -> Iterator[None]:
    """Let other processes compute when `schedule` says so, once they have started.

    Raises
    ------
    RuntimeError
        If one of them has ended by itself.
    """
    context, begin_s = multiprocessing.get_context("spawn"), time.monotonic() + START_S
    others = [
        context.Process(target=compete, args=(seed, dwell_s, n_cores, number, begin_s), daemon=True)
        for number in range(math.ceil(max(OTHERS) * n_cores))
    ]
    for other in others:
        other.start()
    try:
        time.sleep(START_S if others else 0.0)
        yield
        if any(other.exitcode is not None for other in others):
            raise RuntimeError("a process that was to compute has ended")
    finally:
        for other in others:
            other.terminate()
            other.join()


def compete(seed: int, dwell_s: float, n_cores: int, number: int, begin_s: float) -> None:
    """Compute whenever more than `number` processes are to, until terminated."""
    for end_s, share in schedule(seed, dwell_s, begin_s):
        if number >= round(share * n_cores):
            time.sleep(max(0.0, end_s - time.monotonic()))
        while time.monotonic() < end_s:
            pass


def schedule(seed: int, dwell_s: float, begin_s: float) -> Iterator[tuple[float, float]]:
    """Yield until when how many processes per core are to compute, the same for all processes."""
    draw, end_s = np.random.default_rng([seed, round(1000 * dwell_s)]), begin_s
    while True:
        end_s += draw.exponential(dwell_s)
        yield end_s, float(draw.choice(OTHERS))


def machine_busy_s() -> float:
    """Return the seconds that all cores together have computed, in user or system mode, since the machine started."""
    user, nice, system, *_ = Path("/proc/stat").read_text().split(maxsplit=8)[1:]
    return (int(user) + int(nice) + int(system)) / 100.0


def running() -> int:
    """Return the number of threads that have a core or wait for one, this one included."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])


# ---- predicting ----


class Informed:
    """Predicts as `hpcsync.training.speed_models.GRU` does, from further columns too, and learns in every iteration."""

    def __init__(self, seed: int, n_columns: int) -> None:
        torch.manual_seed(seed)
        self._gru = nn.GRU(1 + n_columns, HIDDEN, dtype=torch.float64)
        self._output = nn.Linear(HIDDEN, 1, dtype=torch.float64)
        nn.init.zeros_(self._output.weight)
        nn.init.ones_(self._output.bias)
        self._adam = torch.optim.Adam([*self._gru.parameters(), *self._output.parameters()], lr=LR)
        self._smoothing = Smoothing()
        self._rows: list[tuple[float, ...]] = []
        self._ratio = math.nan

    def observe(self, speed: float, columns: Sequence[float]) -> None:
        """Learn from a speed; `columns` are known when the next one is predicted."""
        before = self._rows[-WINDOW:]
        smoothed = self._smoothing.predict() if before else math.nan
        self._smoothing.observe(speed)
        self._rows.append((speed, *columns))
        if len(before) < WINDOW:
            return
        self._adam.zero_grad()
        ((self._network(before, smoothed) - speed / smoothed) ** 2).backward()
        self._adam.step()
        with torch.no_grad():
            self._ratio = float(self._network(self._rows[-WINDOW:], self._smoothing.predict()))

    def predict(self) -> float:
        """Return the predicted speed."""
        smoothed = self._smoothing.predict()
        return smoothed if math.isnan(self._ratio) else smoothed * min(max(self._ratio, RATIO_MIN), RATIO_MAX)

    def _network(self, rows: Sequence[tuple[float, ...]], smoothed: float) -> torch.Tensor:
        series = torch.tensor(rows, dtype=torch.float64)
        series[:, 0] = series[:, 0] / smoothed - 1.0
        output: torch.Tensor = self._output(self._gru(series)[0][-1])[0]
        return output


def errors(recorded: pd.DataFrame, seed: int) -> dict[str, float]:
    """Return the error of each predictor, as `error_with_load` does."""
    speeds = recorded["speed"].tolist()
    return {name: error(name, speeds, seed) for name in (LAST, SMOOTHING, WITHOUT)} | {
        WITH: error_with_load(recorded, seed)
    }


def error_with_load(recorded: pd.DataFrame, seed: int) -> float:
    """Return the mean absolute relative error of a network that knows the load, once it has learnt for a while."""
    informed, found = Informed(seed, 2), []
    for speed, *columns in recorded[["speed", "load", "running"]].itertuples(index=False):
        found.append(abs(informed.predict() - speed) / speed)
        informed.observe(speed, columns)
    return float(np.mean(found[SCORED_FROM:]))


# ---- all of it ----


def claims() -> list[Claim]:
    found = []
    for dwell_s in DWELL_S:
        setting = f"{dwell_s:g} s"
        for name in (LAST, SMOOTHING, WITHOUT, WITH):
            says = f"load changes every {setting}: error of {name}"
            found.append(Claim(says, "", of("error_percent", setting, "recorded", name), unit=" %"))
        for other in (LAST, SMOOTHING, WITHOUT):
            number = ratio(*(of("error_percent", setting, "recorded", name) for name in (WITH, other)))
            says = f"load changes every {setting}: error of {WITH} / of {other}"
            found.append(Claim(says, "", number, high=0.95))
    return found


def reproduce(out: Path, seeds: int, console: Console) -> pd.DataFrame:
    """Record what is missing in the folder, write results and claims there, print the claims."""
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for dwell_s, seed in itertools.product(DWELL_S, range(FIRST_SEED, FIRST_SEED + seeds)):
        path = out / f"recorded-{dwell_s:g}s-{seed}.csv"
        if not path.exists():
            console.print(f"recording {path.name}")
            recorded = record(seed, dwell_s)
            with whole(path) as unfinished:
                recorded.to_csv(unfinished, index=False)
        of_recording = {"setting": f"{dwell_s:g} s", "arm": "recorded", "seed": seed}
        each = errors(pd.read_csv(path), seed)
        rows += [of_recording | {"paradigm": name, "error_percent": 100.0 * one} for name, one in each.items()]
    title = f"CPU load as an input, {seeds} recordings: mean (95 % interval)"
    return conclude(claims(), pd.DataFrame(rows), out, console, title)
