"""The headline methods of DSSP, k-sync, gossip and ASHL between unlike workers, on a problem other than the digits.

Each method trains with its own best rate, and is compared with BSP: the time to losses, and the accuracy at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from hpcsync.config.job import Job
from hpcsync.run_dir import layout
from hpcsync.trace.reader import load
from reproductions.claims import Claim, conclude, mean_time, of, points, ratio, time_to
from reproductions.first_k import FIXED_SHARE, JITTER, SLOWNESS
from reproductions.tuning import FURTHER, tuned

FASTEST_S = 0.1  # of an iteration; a guess
GAMMA = 0.1  # factor of a decay
ARM = "tuned"

BOUNDS = {"staleness_min": 3, "staleness_max": 15}
CHECK_S = 5.0  # of ADSP: 35 iterations of mean speed, and 2 of the slowest worker between commits; a guess
ALLOCATION = {"policy": "equal-finish", "predictor": "smoothing"}
OWN_STEPS = ("gossip", "ashl", "adsp", "easgd")  # paradigms whose workers step themselves, at the whole rate

Method = tuple[Mapping[str, Any], Mapping[str, Any] | None]  # tables of the paradigm and of batch sizes
PAIRS = (
    ("DSSP", "SSP"),
    ("DSSP", "ASP"),
    ("DSSP bounded", "SSP"),
    ("BSP + batches", "ASP"),
    ("gossip", "ASP"),
    ("gossip", "EASGD"),
    ("k-sync", "k-sync 6"),
    ("ASHL", "ADSP"),
)


def methods(loss: float) -> dict[str, Method]:
    """Return all methods, of which some change something at a loss. Without a network, all-reduce is BSP."""
    return {
        "BSP": ({"name": "bsp"}, None),
        "ASP": ({"name": "asp"}, None),
        "SSP": ({"name": "ssp", "staleness": 3}, None),
        "DSSP": ({"name": "dssp", **BOUNDS, "mode": "paper"}, None),
        "k-sync": ({"name": "k-sync", "k": "state"}, None),
        "k-sync 6": ({"name": "k-sync", "k": 6}, None),
        "BSP + batches": ({"name": "bsp"}, ALLOCATION),
        "gossip": ({"name": "gossip", "mode": "pull"}, None),
        "DSSP bounded": ({"name": "dssp", **BOUNDS}, None),
        "EASGD": ({"name": "easgd", "beta": 0.8, "period": 10}, None),
        "ADSP": ({"name": "adsp", "check_period_s": CHECK_S, "loss": "evaluation", "loss_target": loss}, None),
        "ASHL": ({"name": "ashl", "steps_coarse": 8, "warmup": 2, "profiled": 8, "loss_preset": loss}, None),
    }


@dataclass(frozen=True)
class Problem:
    """What is trained, and how it is measured.

    Attributes
    ----------
    name
        First part of the names of jobs, and the setting of results.
    methods
        Tables of each method; one is "BSP".
    workload
        Table of the workload.
    optimizer
        Table of the optimizer, without a schedule; its rate is that of factor 1.
    samples, decays
        Length of a run, and samples after which the rate is multiplied by `GAMMA`.
    losses
        A time to the loss is the geometric mean of those to these.
    evaluations
        Number of evaluations of a run.
    factors, further, tuning_seeds, first_seed
        Rates that are tried, how many more for a method whose best one is at an end, and with which seeds; first of the
        seeds that are reported.
    tuned_by
        Columns by which a rate is chosen; None: the times to the losses.
    pairs
        Two methods that are compared with each other, besides all with BSP.
    evaluation
        Further keys of evaluations.
    test
        Returns the accuracy at the end of a finished run whose arm is `ARM`, on data of its own. None: the mean of the
        last tenth of the evaluations is the accuracy at the end.
    """

    name: str
    methods: Mapping[str, Method]
    workload: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    samples: int
    decays: tuple[int, ...]
    losses: tuple[float, ...]
    evaluations: int
    factors: tuple[float, ...]
    further: int = FURTHER
    tuning_seeds: tuple[int, ...] = (1,)
    first_seed: int = 7
    tuned_by: tuple[str, ...] | None = None
    pairs: tuple[tuple[str, str], ...] = ()
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    test: Callable[[Path], float] | None = None


def job(problem: Problem, method: str, factor: float, seed: int, length: float = 1.0) -> Job:
    """Return the job of a method, with its rate times `factor`; `length` shortens the run."""
    paradigm, batches = problem.methods[method]
    samples, seconds = round(length * problem.samples), [FASTEST_S * slowness for slowness in SLOWNESS]
    milestones = [round(length * at) for at in problem.decays]
    optimizer: dict[str, Any] = {
        **problem.optimizer,
        "lr": factor * problem.optimizer["lr"],
        "schedule": {"name": "multistep", "milestones": milestones, "gamma": GAMMA},
    }
    if paradigm["name"] not in OWN_STEPS:
        optimizer["async_lr_scale"] = "1/workers"
    table: dict[str, Any] = {
        "name": f"{problem.name}-{method}".replace(" + ", "-and-").replace(", ", "-").replace(" ", "-"),
        "seed": seed,
        "workload": dict(problem.workload),
        "optimizer": optimizer,
        "stop": {"samples": samples},
        "evaluation": {**problem.evaluation, "every_samples": samples // problem.evaluations},
        "paradigm": dict(paradigm),
        "cluster": {
            "workers": len(SLOWNESS),
            "compute": {"model": "lognormal", "seconds": seconds, "jitter": JITTER, "fixed_share": FIXED_SHARE},
        },
    }
    return Job.from_table(table | ({} if batches is None else {"batches": dict(batches)}))


def measure(problem: Problem, folder: Path) -> dict[str, Any]:
    """Return the results of a run; those at the end are means over the last tenth of its samples."""
    trace = load(folder / layout.TRACE)
    setting, arm, method, seed = folder.parts[-4:]
    evaluations, duration_s = trace.frame("evaluations"), float(trace.tables["updates"]["now_s"][-1])
    late = evaluations["samples"] >= 0.9 * trace.job.stop.samples
    reached_s = {
        f"loss_{loss}_s": float(evaluations["now_s"][evaluations["loss"] <= loss].min()) for loss in problem.losses
    }
    loss_s, at_least_s = mean_time([*reached_s.values()], duration_s)
    test = problem.test if arm == ARM else None
    return {
        "setting": setting,
        "arm": arm,
        "paradigm": method.replace("_", " "),
        "seed": int(seed),
        "duration_s": duration_s,
        **reached_s,
        "loss_s": loss_s,
        "loss_at_least_s": at_least_s,
        "loss": evaluations["loss"][late].mean(skipna=False),  # NaN of a run that diverges at its end
        "accuracy": evaluations["accuracy"][late].mean() if test is None else test(folder),
    }


def claims(problem: Problem) -> list[Claim]:
    """Return the claims; none is a paper's, since no paper has trained this."""
    found = []
    others = [method for method in problem.methods if method != "BSP"]
    for method in others:
        number = ratio(time_to("loss", problem.name, ARM, "BSP"), time_to("loss", problem.name, ARM, method))
        found.append(Claim(f"{method} sooner than BSP: BSP's time / its own", "", number, low=1.05))
    for method in others:
        number = points(of("accuracy", problem.name, ARM, "BSP"), of("accuracy", problem.name, ARM, method))
        found.append(Claim(f"BSP's accuracy at the end above that of {method}", "", number, low=0.1, unit=" points"))
    for one, other in problem.pairs:
        number = ratio(time_to("loss", problem.name, ARM, other), time_to("loss", problem.name, ARM, one))
        found.append(Claim(f"{one} sooner than {other}: {other}'s time / its own", "", number, low=1.05))
    return found


def reproduce(
    problem: Problem, out: Path, seeds: int, processes: int, console: Console, length: float = 1.0
) -> pd.DataFrame:
    """Simulate what is missing in the folder, write results and claims there, print the claims."""
    results = tuned(
        problem.name,
        tuple(problem.methods),
        lambda method, factor, seed: job(problem, method, factor, seed, length),
        functools.partial(measure, problem),
        problem.tuned_by or [f"loss_{loss}_s" for loss in problem.losses],
        range(problem.first_seed, problem.first_seed + seeds),
        out,
        processes,
        console,
        factors=problem.factors,
        tuning_seeds=problem.tuning_seeds,
        further=problem.further,
        keep_weights=problem.test is not None,
    )
    title = f"{problem.name.capitalize()}, virtual time, {seeds} seeds: mean (95 % interval)"
    return conclude(claims(problem), results, out, console, title)
