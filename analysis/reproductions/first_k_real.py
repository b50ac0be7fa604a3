"""First k, adaptive k and batch sizes by speed on real ranks: some methods of `first_k`, with padded iterations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from hpcsync.config.job import Job
from reproductions import first_k
from reproductions.claims import Claim, conclude
from reproductions.first_k import ASP, BATCH, BSP, Method, first
from reproductions.simulating import finished, make_empty

ANALYSIS = Path(__file__).parents[1]

SECONDS = (0.02, 0.02, 0.04, 0.08)  # 1:1:2:4; many times what the computation takes, four times on one core too
EQUAL_S = len(SECONDS) / sum(1 / seconds for seconds in SECONDS)
CLUSTERS = {"homogeneous": EQUAL_S, "heterogeneous": list(SECONDS)}
FIRST_SEED = 7

METHODS = {
    "BSP": Method(BSP),
    "ASP": Method(ASP),
    "k-sync 2": first("k-sync", 2),
    "k-async 2": first("k-async", 2),
    "k-sync state": first("k-sync", "state"),
    "k-async state": first("k-async", "state"),
    "BSP + batches": Method(BSP, first_k.BY_SMOOTHING),
    "k-sync state + batches": first("k-sync", "state", first_k.BY_SMOOTHING),
    "k-async state + batches": first("k-async", "state", first_k.BY_SMOOTHING),
}


def jobs(seeds: int) -> dict[str, Job]:
    """Every run, by the name of its folder. With equal workers, of the same total speed, only BSP."""
    found = {}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        found[first_k.name_of("homogeneous", "real", "BSP", seed)] = job("homogeneous", "BSP", seed)
        for method in METHODS:
            found[first_k.name_of("heterogeneous", "real", method, seed)] = job("heterogeneous", method, seed)
    return found


def job(setting: str, method: str, seed: int) -> Job:
    way = METHODS[method]
    rate = first_k.RATES["real"]
    compute = {"model": "lognormal", "seconds": CLUSTERS[setting], "jitter": first_k.JITTER}
    table: dict[str, Any] = {
        "name": f"{setting}-real-{method}".replace(" ", "-"),
        "seed": seed,
        "workload": {
            "name": "reproductions.relabelled:perceptron",
            "options": {"share": first_k.TASKS["noisy"]},
            "batch_size": BATCH,
        },
        "optimizer": {"name": "sgd", "lr": rate.lr, "async_lr_scale": rate.scale},
        "stop": {"samples": rate.samples},
        "evaluation": {"every_samples": rate.every},
        "paradigm": dict(way.paradigm),
        "cluster": {"workers": len(SECONDS), "compute": compute | {"fixed_share": first_k.FIXED_SHARE}},
    }
    return Job.from_table(table | ({} if way.allocation is None else {"batches": dict(way.allocation)}))


def run(job: Job, folder: Path) -> None:
    """On ranks, by `hpcsync run`. Raises CalledProcessError if it fails."""
    make_empty(folder)
    file = folder / "asked.toml"
    file.write_text(job.to_toml(), encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(ANALYSIS), os.environ.get("PYTHONPATH"))))  # where its workload is
    line = [sys.executable, "-m", "hpcsync", "run", file, "--out", folder]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": path})


def claims() -> list[Claim]:
    found = []
    for by in ("accuracy", "loss"):
        for method in first_k.CLAIMED:
            for other in ("BSP", "ASP"):
                says = f"real ranks, by the {by}: {method} sooner than {other}"
                number = first_k.sooner(method, other, "heterogeneous", "real", by)
                found.append(Claim(says, "sooner", number, low=1.05))
        for method in ("BSP", "ASP", *first_k.CLAIMED):
            says = f"real ranks, by the {by}: {method}'s time / BSP's with equal workers"
            expected = "about 1" if method in first_k.TOGETHER else ""
            number = first_k.effect(method, "heterogeneous", "real", by)
            found.append(Claim(says, "", number, high=first_k.REMOVED, expected=expected))
    return found


def reproduce(out: Path, seeds: int, console: Console) -> pd.DataFrame:
    """Run what is missing in the folder, write results and claims there, print the claims."""
    todo = jobs(seeds)
    for n, (name, asked) in enumerate(todo.items(), 1):
        if not finished(out / "runs" / name, asked):
            console.print(f"run {n} of {len(todo)}: {name}")
            run(asked, out / "runs" / name)
    results = pd.DataFrame([first_k.measure(out / "runs" / name)[0] for name in todo])
    return conclude(claims(), results, out, console, f"k-sync, real ranks, {seeds} seeds: mean (95 % interval)")
