"""Gossip as its first author's program trains, with decaying rates and an aggregate batch of 256; and its variants.

The variants are synchronous, or have another beta or another period. The program's weight decay of 1e-4 is left out.

Test of claims of Jin, Yuan, Iandola and Keutzer, "How to scale distributed deep learning?", 2016, beside those of
`reproductions.gossip`, which have a constant learning rate and the same batch of a worker for all numbers of workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from hpcsync.config.job import Job
from hpcsync.run_dir import layout
from hpcsync.trace.reader import load
from reproductions.claims import Claim, Of, arrives_after_s, conclude, of, points, ratio, settled_s, time_to
from reproductions.gossip import (
    BATCH,
    CLUSTERS,
    COMPUTE_S,
    JITTER,
    LINKS,
    PARADIGMS,
    PARAMETERS,
    PERCEPTRON,
    RESNET,
    STEPS,
    TARGET,
    table_of,
    write_times,
)
from reproductions.simulating import simulate_all
from reproductions.tuning import tuned

WORKERS = (8, 32)
AGGREGATE = 256  # samples of an iteration of up to 16 workers together; the program's
SAMPLES = 147_456  # of a run: 576 iterations of 256 samples, a guess; 103 passes over the digits
DECAYS = [SAMPLES // 3, 2 * SAMPLES // 3]  # the rate times 0.1 at each; the program: at 150,000 and 300,000 iterations
EVALUATIONS = 150
FIRST_SEED = 11

VARIANTS: dict[str, dict[str, Any]] = {
    "synchronous pull": {"name": "gossip", "mode": "pull", "synchronous": True},
    "synchronous push": {"name": "gossip", "mode": "push", "synchronous": True},
    "permutation": {"name": "gossip", "mode": "permutation"},
    "pull with beta 0.25": {"name": "gossip", "mode": "pull", "beta": 0.25},
    "pull with beta 0.75": {"name": "gossip", "mode": "pull", "beta": 0.75},
    "pull with period 4": {"name": "gossip", "mode": "pull", "period": 4},
    "pull with period 16": {"name": "gossip", "mode": "pull", "period": 16},
}
METHODS = PARADIGMS | VARIANTS
ARM = "decays"
TUNED = tuple(f"{cluster}-{WORKERS[-1]}" for cluster in CLUSTERS)  # where each method has its own best rate, too
RATED = ("all-reduce", "EASGD", "pull")
TUNING_SEEDS = (1, 2)


def jobs(seeds: int, times: Path, length: float = 1.0) -> dict[str, Job]:
    """Return every run, by the name of its folder; `length` shortens all runs."""
    return {
        f"{cluster}-{workers}/{ARM}/{_stem(method)}/{seed}": _job(cluster, workers, method, seed, times, length)
        for cluster in CLUSTERS
        for workers in WORKERS
        for method in METHODS
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
    }


def _stem(method: str) -> str:
    return method.replace(" ", "_")


def batch_of(workers: int) -> int:
    """Return the samples of a worker's iteration."""
    return max(BATCH, AGGREGATE // workers)


def _job(cluster: str, workers: int, method: str, seed: int, times: Path, length: float, factor: float = 1.0) -> Job:
    batch, samples = batch_of(workers), round(length * SAMPLES)
    compute: dict[str, Any] = {"model": "lognormal", "seconds": COMPUTE_S * batch / BATCH, "jitter": JITTER}
    if cluster == "stragglers":
        compute = {"model": "table", "table": str(table_of(times, workers, seed))}
    schedule = {"name": "multistep", "milestones": [round(length * at) for at in DECAYS], "gamma": 0.1}
    return Job.from_table(
        {
            "name": f"{cluster}-{workers}-{_stem(method)}",
            "seed": seed,
            "workload": {**PERCEPTRON, "batch_size": batch},
            "optimizer": {
                "name": "sgd",
                "lr": factor * STEPS["large"],
                "momentum": 0.9,
                "nesterov": True,
                "schedule": schedule,
            },
            "stop": {"samples": samples},
            "evaluation": {"every_samples": samples // EVALUATIONS},
            "paradigm": METHODS[method],
            "cluster": {
                "workers": workers,
                "compute": compute,
                "network": {"bandwidth_gbit": LINKS["10 Gbit/s"] * PARAMETERS / RESNET},
            },
        }
    )


def measure(folder: Path) -> dict[str, Any]:
    """Return the results of a run; the accuracy at the end is the mean over its last tenth."""
    trace = load(folder / layout.TRACE)
    setting, arm, method, seed = folder.parts[-4:]
    duration_s = float(trace.tables["updates"]["now_s"][-1])
    evaluations = trace.frame("evaluations")
    evaluations["accuracy"] = evaluations["accuracy"].rolling(3, 1, center=True).mean()
    late = evaluations["samples"] >= 0.9 * trace.job.stop.samples
    target_s = settled_s(evaluations, TARGET)
    return {
        "setting": setting,
        "arm": arm,
        "paradigm": method.replace("_", " "),
        "seed": int(seed),
        "workers": trace.n_workers,
        "duration_s": duration_s,
        "target_s": target_s,
        "target_at_least_s": arrives_after_s(target_s, duration_s),
        "accuracy": evaluations["accuracy"][late].mean(),
    }


# ---- what the paper says ----


def claims() -> list[Claim]:
    """Return the claims; those on the variants are ours."""
    found = []
    for cluster, words in CLUSTERS.items():
        for workers in WORKERS:
            setting, where = f"{cluster}-{workers}", f"{workers} workers, {words}"
            for method in ("EASGD", "pull", "push"):
                says = f"{where}: {method} sooner than all-reduce"
                number = _sooner(method, "all-reduce", setting)
                found.append(Claim(says, "sooner, up to about 32 nodes", number, low=1.05))
            for method in ("EASGD", "pull", "push"):
                says = f"{where}: all-reduce's accuracy at the end above that of {method}"
                found.append(Claim(says, "", _higher("all-reduce", method, setting), low=0.1, unit=" points"))
            for method in VARIANTS:
                base = "push" if "push" in method else "pull"
                says = f"{where}: time of {method} / {base}'s"
                found.append(Claim(says, "", _sooner(base, method, setting)))
                says = f"{where}: accuracy at the end, {method} above {base}"
                found.append(Claim(says, "", _higher(method, base, setting), unit=" points"))
    for setting in TUNED:
        cluster, workers = setting.split("-")
        where = f"{workers} workers, {CLUSTERS[cluster]}, each with its own best rate"
        for method in RATED[1:]:
            says = f"{where}: {method} sooner than all-reduce"
            number = _sooner(method, "all-reduce", setting, "tuned")
            found.append(Claim(says, "sooner, up to about 32 nodes", number, low=1.05))
            says = f"{where}: all-reduce's accuracy at the end above that of {method}"
            found.append(Claim(says, "", _higher("all-reduce", method, setting, "tuned"), low=0.1, unit=" points"))
    return found


def _sooner(a: str, b: str, setting: str, arm: str = ARM) -> Of:
    """Return the ratio of the times of b and a to the target."""
    return ratio(time_to("target", setting, arm, b), time_to("target", setting, arm, a))


def _higher(a: str, b: str, setting: str, arm: str = ARM) -> Of:
    return points(of("accuracy", setting, arm, a), of("accuracy", setting, arm, b))


def tuned_runs(setting: str, out: Path, seeds: int, processes: int, console: Console, length: float) -> pd.DataFrame:
    """Return results of a setting in which each method has its own best learning rate."""
    cluster, workers = setting.split("-")

    def make(method: str, factor: float, seed: int) -> Job:
        return _job(cluster, int(workers), method, seed, out / "times", length, factor)

    return tuned(
        setting,
        RATED,
        make,
        measure,
        ("target_s",),
        range(FIRST_SEED, FIRST_SEED + seeds),
        out / setting,
        processes,
        console,
        tuning_seeds=TUNING_SEEDS,
    )


def reproduce(out: Path, seeds: int, processes: int, console: Console, length: float = 1.0) -> pd.DataFrame:
    """Simulate what is missing in the folder, write results and claims there, print the claims."""
    for workers in WORKERS:
        for seed in (*TUNING_SEEDS, *range(FIRST_SEED, FIRST_SEED + seeds)):
            compute_s = COMPUTE_S * batch_of(workers) / BATCH
            write_times(table_of(out / "times", workers, seed), workers, seed, compute_s)
    todo = jobs(seeds, out / "times", length)
    simulate_all(todo, out / "runs", processes, console)
    results = pd.DataFrame([measure(out / "runs" / name) for name in todo])
    own = [tuned_runs(setting, out, seeds, processes, console, length) for setting in TUNED]
    results = pd.concat([results, *own], ignore_index=True)
    title = f"Gossip with decaying rates, virtual time, {seeds} seeds: mean (95 % interval)"
    return conclude(claims(), results, out, console, title)
