"""DSSP on real ranks at four points of its map over speed ratio and jitter, with padded iterations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console

from hpcsync.config.job import Job
from hpcsync.report.summary import summarize
from hpcsync.run_dir import layout
from hpcsync.trace.reader import load
from reproductions import dssp, dssp_map
from reproductions.claims import Claim, conclude, of, ratio
from reproductions.first_k_real import run
from reproductions.simulating import finished, simulate_all

FAST_S = 0.1  # many times what a push takes: of it, the jitters below are more than what the machine adds
RATIOS, JITTERS = dssp_map.REAL_RATIOS, dssp_map.REAL_JITTERS
SECONDS = FAST_S * dssp_map.REAL_ITERATIONS
NEAR = 0.05  # relative difference from the simulation
FIRST_SEED = 4


def jobs(seeds: int) -> dict[str, Job]:
    """Every run, by the name of its folder."""
    return {
        f"{each:g}-{jitter:g}/{method.replace(' ', '-')}/{seed}": Job.from_table(
            {
                "name": f"{each:g}-{jitter:g}-{method}".replace(" ", "-"),
                "seed": seed,
                "workload": {**dssp.vector(16), "batch_size": dssp.BATCH},
                "optimizer": {"name": "sgd", "lr": 0.1},
                "stop": {"seconds": SECONDS},
                "evaluation": {"every_samples": 0},
                "paradigm": dssp.PARADIGMS[method],
                "cluster": {
                    "workers": 2,
                    "compute": {"model": "lognormal", "seconds": [FAST_S, each * FAST_S], "jitter": jitter},
                },
            }
        )
        for each in RATIOS
        for jitter in JITTERS
        for method in dssp_map.METHODS
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
    }


def measure(folder: Path, arm: str) -> dict[str, object]:
    """The results of a run: samples a second, and the jitter that the workers' times really had."""
    trace = load(folder / layout.TRACE)
    setting, method, seed = folder.parts[-3:]
    pushes = trace.tables["pushes"]
    spreads = [np.log(pushes["compute_s"][pushes["worker"] == worker]).std() for worker in (0, 1)]
    return {
        "setting": setting,
        "arm": arm,
        "paradigm": method.replace("-", " "),
        "seed": int(seed),
        "samples_per_s": summarize(trace).samples_per_s,
        "jitter": float(max(spreads)),
    }


def claims() -> list[Claim]:
    """Return that throughput is as simulated, at each point."""
    found = []
    for each in RATIOS:
        for jitter in JITTERS:
            name, where = f"{each:g}-{jitter:g}", f"ratio {each:g}, jitter {100 * jitter:g} %"
            for method in dssp_map.METHODS:
                real, simulated = (of("samples_per_s", name, arm, method) for arm in ("real", "simulated"))
                says = f"{where}, {method}: samples a second on real ranks / simulated"
                found.append(Claim(says, "", ratio(real, simulated), 1 - NEAR, 1 + NEAR))
                if method != "SSP 3":
                    for arm in ("real", "simulated"):
                        of_ssp = ratio(of("samples_per_s", name, arm, method), of("samples_per_s", name, arm, "SSP 3"))
                        found.append(Claim(f"{where}, {arm}: {method}'s samples a second / SSP's", "", of_ssp))
            jitters = of("jitter", name, "real", "SSP 3")
            found.append(Claim(f"{where}: jitter that the workers really had", "", jitters))
    return found


def reproduce(out: Path, seeds: int, console: Console) -> pd.DataFrame:
    """Run and simulate what is missing in the folder, write results and claims there, print the claims."""
    todo = jobs(seeds)
    for n, (name, asked) in enumerate(todo.items(), 1):
        real = out / "real" / name
        if not finished(real, asked):
            console.print(f"run {n} of {len(todo)}: {name}")
            run(asked, real)
    simulate_all(todo, out / "simulated", 1, console)
    rows = [measure(out / arm / name, arm) for name in todo for arm in ("real", "simulated")]
    return conclude(claims(), pd.DataFrame(rows), out, console, f"DSSP, real ranks, {seeds} seeds")
