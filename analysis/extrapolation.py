"""How well `hpcsync advise --extrapolate` predicts clusters with more workers than were measured, in virtual time.

    python analysis/extrapolation.py [--measured 4] [--clusters 25] [-o FOLDER]

A cluster has 16 workers, whose speeds are drawn at random. BSP is run on the first few, as a profile. The times of runs
on 2 to 16 of the workers are predicted from it, each with the interval that the advice states for 80 % of runs, and
beside them are those of the cluster itself. A run has a fixed number of samples, so nothing but times is predicted.

FOLDER/extrapolation-MEASURED.csv has a row for each prediction.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from rich.console import Console
from rich.table import Table

import arguments
from hpcsync.config.job import Job
from hpcsync.report.advice import prediction
from hpcsync.run_dir import layout
from hpcsync.simulator.measured_cluster import computation_s, resampled, write_table
from hpcsync.simulator.simulate import simulate
from hpcsync.trace.reader import Trace, load

# All numbers are guesses; how unlike the workers are is swept.
WORKERS = (2, 4, 8, 16)
ITERATION_S, JITTER = 0.1, 0.1
PROFILE_UPDATES, ITERATIONS = 150, 100
PARADIGMS = ("bsp", "asp")
SEEDS = 3  # as many as the advice predicts with
SEEDS_OF_CLUSTER = 100  # the first of the profile, then those of the runs beside predictions, the last of predictions
KINDS = {
    "alike": lambda draw, n: np.ones(n),
    "by 10 %": lambda draw, n: np.exp(0.1 * draw.standard_normal(n)),
    "by 30 %": lambda draw, n: np.exp(0.3 * draw.standard_normal(n)),
    "of two kinds, 1:2": lambda draw, n: draw.choice([1.0, 2.0], n),
}


def main(
    measured: Annotated[int, typer.Option(min=1, max=max(WORKERS), help="Workers of the profile.")] = 4,
    clusters: Annotated[int, typer.Option(min=2, help="Clusters of each kind.")] = 25,
    out: Annotated[Path, typer.Option("-o", help="Folder for the table.")] = Path("extrapolation"),
) -> None:
    """Compare predictions for clusters with more workers than were measured with runs on them, in virtual time."""
    file = arguments.new(out / f"extrapolation-{measured}.csv")
    rows = [row for kind in KINDS for number in range(clusters) for row in predictions(kind, number, measured)]
    frame = pd.DataFrame(rows)
    out.mkdir(parents=True, exist_ok=True)
    frame.to_csv(file, index=False, float_format="%.5g")
    Console().print(table(frame, measured))


def predictions(kind: str, number: int, measured: int) -> Iterator[dict[str, Any]]:
    """Yield what is predicted for one cluster, and what comes."""
    place = list(KINDS).index(kind)
    draw = np.random.default_rng([number, place, 0, 1])  # no stream of a job's seed
    first = SEEDS_OF_CLUSTER * (number * len(KINDS) + place)
    seconds = (ITERATION_S * KINDS[kind](draw, max(WORKERS))).tolist()
    with tempfile.TemporaryDirectory() as folder:
        profile = run(job("bsp", seconds[:measured], first, {"updates": PROFILE_UPDATES}), Path(folder) / "profile")
        for i, (n, paradigm) in enumerate(itertools.product(WORKERS, PARADIGMS), 1):
            stop = {"samples": n * ITERATIONS}
            times = [
                duration_s(run(predicting(profile, paradigm, n, seed, stop, Path(folder)), folder_of(folder, seed)))
                for seed in range(first + SEEDS_OF_CLUSTER - SEEDS, first + SEEDS_OF_CLUSTER)
            ]
            found = prediction([SimpleNamespace(time_to_target_s=time, samples_per_s=None) for time in times])
            came = duration_s(run(job(paradigm, seconds[:n], first + i, stop), folder_of(folder, SEEDS)))
            yield {"kind": kind, "cluster": number, "workers": n, "paradigm": paradigm, "came_s": came, **found}


def folder_of(folder: str, seed: int) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{seed}-", dir=folder))


def job(paradigm: str, seconds: list[float], seed: int, stop: dict[str, int]) -> Job:
    """Return a job on workers with these times of an iteration."""
    compute = {"model": "lognormal", "seconds": seconds, "jitter": JITTER}
    return _job(paradigm, len(seconds), seed, stop, compute)


def predicting(profile: Trace, paradigm: str, n: int, seed: int, stop: dict[str, int], folder: Path) -> Job:
    """Return the job as the advice simulates it: with times of the profile, drawn anew."""
    file = folder / f"times-{n}-{seed}.csv"
    asked = _job(paradigm, n, seed, stop, {"model": "constant", "seconds": ITERATION_S})
    write_table(resampled(computation_s(profile, asked, extrapolate=True), seed, n), file)
    return _job(paradigm, n, seed, stop, {"model": "table", "table": str(file)})


def _job(paradigm: str, n: int, seed: int, stop: dict[str, int], compute: dict[str, Any]) -> Job:
    return Job.from_table(
        {
            "name": "extrapolation",
            "seed": seed,
            "workload": {"name": "timing", "batch_size": 1},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "stop": stop,
            "paradigm": {"name": paradigm},
            "cluster": {"workers": n, "compute": compute},
        }
    )


def run(asked: Job, folder: Path) -> Trace:
    if simulate(asked, folder, Console(quiet=True)) != 0:
        raise RuntimeError(f"{folder}: the simulation has failed")
    return load(folder / layout.TRACE)


def duration_s(trace: Trace) -> float:
    return float(trace.tables["updates"]["now_s"][-1])


def table(frame: pd.DataFrame, measured: int) -> Table:
    """Return how many runs are within the intervals, how wide these are, and how far the predictions are off."""
    result = Table(title=f"Predicted from {measured} workers", title_justify="left", box=None, pad_edge=False)
    for column in ("speeds differ", "workers", "", "came / predicted", "10 % to 90 %", "half interval, %", "within, %"):
        result.add_column(column, justify="left" if column in ("speeds differ", "") else "right")
    for (kind, n, paradigm), group in frame.groupby(["kind", "workers", "paradigm"], sort=False):
        ratio = group["came_s"] / group["seconds"]
        half = (group["high_s"] - group["seconds"]) / group["seconds"]
        within = group["came_s"].between(group["low_s"], group["high_s"]).mean()
        result.add_row(
            str(kind),
            str(n),
            str(paradigm),
            f"{ratio.median():.2f}",
            f"{ratio.quantile(0.1):.2f} to {ratio.quantile(0.9):.2f}",
            f"{100 * half.median():.1f}",
            f"{100 * within:.0f}",
        )
    return result


if __name__ == "__main__":
    arguments.run(main)
