"""Paradigms on a harder problem: a transformer that learns real text, with momentum and decaying rates.

The other reproductions learn digits, on which staleness costs little. Here the headline methods of DSSP, gossip, k-sync
and ASHL are compared once more between unlike workers, each with its own best rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from hpcsync.config.job import Job
from hpcsync.run_dir import layout
from hpcsync.trace.reader import load
from reproductions.claims import Claim, conclude, of, points, ratio
from reproductions.first_k import FIXED_SHARE, JITTER, SLOWNESS
from reproductions.tuning import tuned

FASTEST_S = 0.1  # of an iteration; all settings here are guesses
BATCH, SAMPLES = 8, 24_000  # sequences of 32 characters; a seventh of the text
WORKLOAD = {"name": "text", "batch_size": BATCH, "context": 32, "layers": 2, "width": 64, "heads": 4}
LR, MOMENTUM = 0.2, 0.9
DECAYS = [SAMPLES // 2, 3 * SAMPLES // 4]
LOSSES = (2.5, 2.4, 2.3)  # a time to the loss is the geometric mean of those to these
EVALUATIONS = 40
FACTORS, TUNING_SEEDS = (0.125, 0.25, 0.5, 1.0), (1,)  # of the rate
FIRST_SEED = 7
SETTING, ARM = "text", "tuned"

ALLOCATION = {"policy": "equal-finish", "predictor": "smoothing"}
METHODS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any] | None]] = {
    "BSP": ({"name": "bsp"}, None),
    "ASP": ({"name": "asp"}, None),
    "SSP": ({"name": "ssp", "staleness": 3}, None),
    "DSSP": ({"name": "dssp", "staleness_min": 3, "staleness_max": 15, "mode": "paper"}, None),
    "k-sync": ({"name": "k-sync", "k": "state"}, None),
    "BSP + batches": ({"name": "bsp"}, ALLOCATION),
    "gossip": ({"name": "gossip", "mode": "pull"}, None),
    "ASHL": ({"name": "ashl", "steps_coarse": 8, "warmup": 2, "profiled": 8, "loss_preset": 2.4}, None),
}


def job(method: str, factor: float, seed: int, length: float = 1.0) -> Job:
    """Return the job of a method, with its rate times `factor`; `length` shortens the run."""
    paradigm, batches = METHODS[method]
    samples, seconds = round(length * SAMPLES), [FASTEST_S * slowness for slowness in SLOWNESS]
    schedule = {"name": "multistep", "milestones": [round(length * at) for at in DECAYS], "gamma": 0.1}
    optimizer: dict[str, Any] = {"name": "sgd", "lr": factor * LR, "momentum": MOMENTUM, "schedule": schedule}
    if method not in ("gossip", "ASHL"):
        optimizer["async_lr_scale"] = "1/workers"
    table: dict[str, Any] = {
        "name": f"text-{method}".replace(" + ", "-and-"),
        "seed": seed,
        "workload": WORKLOAD,
        "optimizer": optimizer,
        "stop": {"samples": samples},
        "evaluation": {"every_samples": samples // EVALUATIONS},
        "paradigm": dict(paradigm),
        "cluster": {
            "workers": len(SLOWNESS),
            "compute": {"model": "lognormal", "seconds": seconds, "jitter": JITTER, "fixed_share": FIXED_SHARE},
        },
    }
    return Job.from_table(table | ({} if batches is None else {"batches": dict(batches)}))


def measure(folder: Path) -> dict[str, Any]:
    """Return the results of a run; those at the end are means over the last tenth of its samples."""
    trace = load(folder / layout.TRACE)
    setting, arm, method, seed = folder.parts[-4:]
    evaluations, duration_s = trace.frame("evaluations"), float(trace.tables["updates"]["now_s"][-1])
    late = evaluations["samples"] >= 0.9 * trace.job.stop.samples
    reached_s = {f"loss_{loss}_s": float(evaluations["now_s"][evaluations["loss"] <= loss].min()) for loss in LOSSES}
    return {
        "setting": setting,
        "arm": arm,
        "paradigm": method.replace("_", " "),
        "seed": int(seed),
        "duration_s": duration_s,
        **reached_s,
        "loss_s": float(np.exp(np.mean(np.log([*reached_s.values()])))),
        "loss": evaluations["loss"][late].mean(),
        "accuracy": evaluations["accuracy"][late].mean(),
    }


def claims() -> list[Claim]:
    """Return the claims; none is a paper's, since no paper has trained this."""
    found = []
    for method in METHODS:
        if method != "BSP":
            number = ratio(of("loss_s", SETTING, ARM, "BSP"), of("loss_s", SETTING, ARM, method))
            found.append(Claim(f"{method} sooner than BSP: BSP's time / its own", "", number, low=1.05))
    for method in METHODS:
        if method != "BSP":
            number = points(of("accuracy", SETTING, ARM, "BSP"), of("accuracy", SETTING, ARM, method))
            found.append(
                Claim(f"BSP's accuracy at the end above that of {method}", "", number, low=0.1, unit=" points")
            )
    for one, other in (("DSSP", "SSP"), ("DSSP", "ASP"), ("BSP + batches", "ASP"), ("gossip", "ASP")):
        number = ratio(of("loss_s", SETTING, ARM, other), of("loss_s", SETTING, ARM, one))
        found.append(Claim(f"{one} sooner than {other}: {other}'s time / its own", "", number, low=1.05))
    return found


def reproduce(out: Path, seeds: int, processes: int, console: Console, length: float = 1.0) -> pd.DataFrame:
    """Simulate what is missing in the folder, write results and claims there, print the claims."""
    results = tuned(
        SETTING,
        tuple(METHODS),
        lambda method, factor, seed: job(method, factor, seed, length),
        measure,
        [f"loss_{loss}_s" for loss in LOSSES],
        range(FIRST_SEED, FIRST_SEED + seeds),
        out,
        processes,
        console,
        factors=FACTORS,
        tuning_seeds=TUNING_SEEDS,
    )
    title = f"Text, virtual time, {seeds} seeds: mean (95 % interval)"
    return conclude(claims(), results, out, console, title)
