"""Long iterations: predictors of speed that have time to learn, and where k matters beside batch sizes.

Part of the test of Yu et al. (HPCC 2019) in `reproductions.first_k`, whose iterations of 29 ms leave the recurrent
network no time to learn, and between whose workers batch sizes leave k nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from hpcsync.config.job import Job
from reproductions import first_k
from reproductions.claims import Claim, Of, conclude, of, points
from reproductions.first_k import ASP, BSP, FIXED_SHARE, JITTER, SLOWNESS, WORDS, WORKERS, Method, first
from reproductions.simulating import simulate_all, write_changed

LONGER = 10  # times the iterations of `first_k`, and its contention: 290 ms
EQUAL_S = LONGER * first_k.EQUAL_S
FASTEST_S = LONGER * first_k.FASTEST_S
PERIOD, AMPLITUDE = 12, 0.3  # iterations, and share: of `hpcsync bench prediction`
STALL, ONE_IN = 5.0, 20  # an iteration in 20 takes 5 times as long: a guess
ROWS = 3000  # iterations of a worker in a file, more than any run has
FIRST_SEED = 7

CLUSTERS = {
    "contended": "contended nodes, 20 s at a time",
    "periodic": "equal workers, ±30 % over 12 iterations",
    "stalls": "unlike workers, one iteration in 20 takes 5 times as long",
}
PREDICTORS = ("last", "smoothing", "gru", "blend")
KS = (7, 6, 5, "state", "throughput")


def _batches(predictor: str = "blend") -> Mapping[str, Any]:
    return {"policy": "equal-finish", "predictor": predictor}


METHODS: dict[str, Method] = (
    {"BSP": Method(BSP), "ASP": Method(ASP), "ASP + batches": Method(ASP, _batches())}
    | {f"BSP + batches by {predictor}": Method(BSP, _batches(predictor)) for predictor in PREDICTORS}
    | {f"k-sync {k}": first("k-sync", k) for k in KS}
    | {f"k-sync {k} + batches": first("k-sync", k, _batches()) for k in KS}
)
BATCHES = "BSP + batches by blend"


def jobs(seeds: int, times: Path, length: float = 1.0) -> dict[str, Job]:
    """Return every run, by the name of its folder; `length` shortens all runs."""
    return {
        f"{cluster}/{rate}/{method.replace(' ', '_')}/{seed}": _job(cluster, rate, method, seed, times, length)
        for cluster in CLUSTERS
        for rate in WORDS
        for method in METHODS
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
    }


def _job(cluster: str, rate: str, method: str, seed: int, times: Path, length: float) -> Job:
    chosen, seconds = first_k.RATES[rate], length * LONGER * first_k.RATES[rate].seconds
    compute: dict[str, Any] = {"model": "table", "table": str(_path(times, cluster, seed)), "fixed_share": FIXED_SHARE}
    events = []
    if cluster == "contended":
        median_s = EQUAL_S * first_k.LEFT
        compute = {"model": "lognormal", "seconds": median_s, "jitter": JITTER, "fixed_share": FIXED_SHARE}
        events = first_k.contention(seed, LONGER * chosen.seconds, LONGER)
    return first_k.job_of(
        f"{cluster}-{rate}-{method}".replace("+", "and"),
        chosen,
        METHODS[method],
        {"workers": WORKERS, "compute": compute, "events": events},
        seed,
        {"samples": round(length * chosen.samples), "seconds": seconds},
    )


def _path(times: Path, cluster: str, seed: int) -> Path:
    return times.resolve() / f"{cluster}-{seed}.csv"


def write_times(times: Path, cluster: str, seed: int) -> None:
    """Write the seconds of each worker's iterations at the job's batch size."""
    draw = np.random.default_rng([seed, list(CLUSTERS).index(cluster)])
    seconds = draw.lognormal(0.0, JITTER, (WORKERS, ROWS))
    if cluster == "periodic":
        phase = draw.uniform(0.0, 1.0, (WORKERS, 1)) + np.arange(ROWS) / PERIOD
        seconds *= EQUAL_S * (1 + AMPLITUDE * np.sin(2 * np.pi * phase))
    else:
        seconds *= FASTEST_S * np.array(SLOWNESS)[:, None]
        seconds[draw.uniform(size=seconds.shape) < 1 / ONE_IN] *= STALL
    worker, iteration = np.indices(seconds.shape)
    frame = pd.DataFrame({"worker": worker.ravel(), "iteration": iteration.ravel(), "seconds": seconds.ravel()})
    write_changed(frame.to_csv(index=False), _path(times, cluster, seed))


# ---- what is claimed: by the paper only that batches are faster than BSP and ASP ----


def claims() -> list[Claim]:
    """Return the claims, all of them on the time to the loss."""
    found = []
    for cluster, words in CLUSTERS.items():
        for rate, optimizer in WORDS.items():
            where = f"{words}, {optimizer}"
            for predictor in ("last", "gru", "blend"):
                method = f"BSP + batches by {predictor}"
                says = f"{where}: {method}: its time / that by smoothing"
                found.append(Claim(says, "", _times("BSP + batches by smoothing", method, cluster, rate)))
                smoothed = of("wait_share", cluster, rate, "BSP + batches by smoothing")
                number = points(of("wait_share", cluster, rate, method), smoothed)
                found.append(Claim(f"{where}: {method}: waiting above that by smoothing", "", number, unit=" points"))
            for k in KS:
                method = f"k-sync {k} + batches"
                says = f"{where}: {method} sooner than BSP with batches"
                found.append(Claim(says, "", _times(method, BATCHES, cluster, rate), low=1.05))
            says = f"{where}: k by throughput sooner than k by state"
            found.append(Claim(says, "", _times("k-sync throughput", "k-sync state", cluster, rate), low=1.05))
            for method in ("BSP", "ASP", "ASP + batches"):
                says = f"{where}: BSP with batches sooner than {method}"
                published = "sooner" if method != "ASP + batches" else ""
                found.append(Claim(says, published, _times(BATCHES, method, cluster, rate), low=1.05))
    return found


def _times(a: str, b: str, cluster: str, rate: str) -> Of:
    """Return the ratio of the times of b and a to the loss."""
    return first_k.sooner(a, b, cluster, rate, "loss")


def reproduce(out: Path, seeds: int, processes: int, console: Console, length: float = 1.0) -> pd.DataFrame:
    """Simulate what is missing in the folder, write results and claims there, print the claims."""
    for cluster in ("periodic", "stalls"):
        for seed in range(FIRST_SEED, FIRST_SEED + seeds):
            write_times(out / "times", cluster, seed)
    todo = jobs(seeds, out / "times", length)
    simulate_all(todo, out / "runs", processes, console)
    results = pd.DataFrame([first_k.measure(out / "runs" / name)[0] for name in todo])
    title = f"Long iterations, virtual time, {seeds} seeds: mean (95 % interval)"
    return conclude(claims(), results, out, console, title)
