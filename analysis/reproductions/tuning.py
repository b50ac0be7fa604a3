"""Learning rates chosen alike for all methods: the same factors of a setting's own rate, on seeds of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from hpcsync.config.job import Job
from reproductions.simulating import simulate_all

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # the budget of every method, with each of the seeds
FURTHER = 2  # more factors for a method while its best one is the least or largest that was tried
SEEDS = (1, 2, 3)  # none of them is reported
NEVER = 2.0  # times its length: what a run that does not arrive counts as when a rate is chosen

Make = Callable[[str, float, int], Job]  # of a method, a factor and a seed
Measure = Callable[[Path], dict[str, Any]]  # of the folder SETTING/ARM/METHOD/SEED


def tuned(
    setting: str,
    methods: Sequence[str],
    make: Make,
    measure: Measure,
    columns: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    processes: int,
    console: Console,
    factors: Sequence[float] | None = None,
    tuning_seeds: Sequence[int] | None = None,
    further: int = FURTHER,
    keep_weights: bool = False,
) -> pd.DataFrame:
    """Choose each method's rate, and return results with the chosen ones: a row per run, of the arm "tuned".

    What is missing in the folder is simulated. OUT/tuned-rates.csv has the factors.

    Parameters
    ----------
    setting, methods
        What is tuned.
    make
        Makes a job.
    measure
        Measures a finished run.
    columns
        Columns of what is to be small, such as times to targets, NaN for never; a rate is chosen by the mean of their
        logarithms.
    seeds
        Seeds to report; none of those that are tuned with.
    out, processes, console
        As for `simulate_all`.
    factors, tuning_seeds
        A budget other than FACTORS and SEEDS, for runs that take long.
    further
        More factors for a method while its best one is the least or largest that was tried.
    keep_weights
        Of the runs with chosen rates, which can then be tested.
    """
    budget, tuning_seeds = tuple(factors or FACTORS), tuple(tuning_seeds or SEEDS)
    assert not set(seeds) & set(tuning_seeds), "a seed is tuned and reported"
    tried = {method: list(budget) for method in methods}
    while True:
        runs = {
            f"{setting}/tuning-{factor:g}/{stem(method)}/{seed}": make(method, factor, seed)
            for method, own in tried.items()
            for factor in own
            for seed in tuning_seeds
        }
        simulate_all(runs, out / "runs", processes, console)
        rates = best(pd.DataFrame([measure(out / "runs" / name) for name in runs]), columns)
        open_ended = rates[rates["at_an_end"] & rates["paradigm"].map(lambda m: len(tried[m]) < len(budget) + further)]
        if open_ended.empty:
            break
        for method, factor in zip(open_ended["paradigm"], open_ended["factor"], strict=True):
            tried[method].append(2 * factor if factor == max(tried[method]) else factor / 2)
    rates.to_csv(out / "tuned-rates.csv", index=False)
    chosen_factors = dict(zip(rates["paradigm"], rates["factor"], strict=True))
    chosen = {
        f"{setting}/tuned/{stem(method)}/{seed}": make(method, chosen_factors[method], seed)
        for method in methods
        for seed in seeds
    }
    simulate_all(chosen, out / "runs", processes, console, keep_weights)
    return pd.DataFrame([measure(out / "runs" / name) for name in chosen])


def best(results: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return each method's best factor, and whether it is the least or largest of its own: a better one may exist.

    Parameters
    ----------
    results
        A row per run, with `paradigm`, `arm`, `duration_s` and the columns.
    columns
        Columns of what is to be small, NaN for never.
    """
    times = results[list(columns)].apply(lambda column: column.fillna(NEVER * results["duration_s"]))
    scores = results.assign(
        score=np.log(times).mean(axis=1), factor=results["arm"].str.removeprefix("tuning-").astype(float)
    )
    means = scores.groupby(["paradigm", "factor"])["score"].mean().reset_index()
    rows = means.loc[means.groupby("paradigm")["score"].idxmin()]
    own = means.groupby("paradigm")["factor"].agg(["min", "max"]).loc[rows["paradigm"]].to_numpy()
    return pd.DataFrame(
        {
            "paradigm": rows["paradigm"],
            "factor": rows["factor"],
            "seconds": rows["score"].map(math.exp),
            "at_an_end": (rows["factor"].to_numpy()[:, None] == own).any(axis=1),
        }
    ).reset_index(drop=True)


def stem(method: str) -> str:
    """Return the name of a method's folder."""
    return method.replace(" ", "_")
