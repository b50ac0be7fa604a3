"""Stanza, a parameter server and all-reduce in virtual time with real gradients: a small VGG's accuracy against time.

All layouts are synchronous and take the same time in every iteration, so a faster link makes a run shorter, but does
not change what is learnt in it. Rates are therefore chosen on one of the links.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from hpcsync.config.job import Job
from hpcsync.core.stanza_resolution import resolved
from hpcsync.figures import plotting
from hpcsync.run_dir import layout
from hpcsync.trace.reader import load
from hpcsync.workloads.registry import build
from reproductions.claims import Claim, conclude, of, points, ratio, settled_s
from reproductions.simulating import simulate_all
from reproductions.stanza import SHARDS, STANZA
from reproductions.stanza_real import IN_PIECES, METHODS, RING, SECONDS, SERVER
from reproductions.tuning import stem, tuned

# Nine tenths of it are fully connected, as of VGG-16: 0.865 million parameters, of which 0.79 million. Sizes and
# lengths are guesses.
WORKLOAD = {"name": "images", "batch_size": 8, "size": 16, "width": 16, "hidden": 768}
OPTIMIZER = {"name": "sgd", "lr": 0.005, "momentum": 0.9}
SAMPLES, EVERY_SAMPLES = 6_000, 120
MEGABITS = 8 * 4 * 0.863  # of its gradient, about
# Links on which the gradient takes so many times what an iteration computes: VGG-16's beside a V100.
LINKS = {"narrow": 2.7, "wide": 0.5}
WORDS = {"narrow": "10 Gbit/s", "wide": "50 Gbit/s"}
LATENCY_US = 120.0  # measured between the hosts of stanza_real
ACCURACIES = (0.8, 0.9, 0.95)
TUNING_SEEDS, FIRST_SEED = (1, 2), 7
ARM = "tuned"


def job(link: str, method: str, factor: float, seed: int) -> Job:
    """Return the job of a layout on links of one speed, with its rate times `factor`."""
    paradigm, cluster = METHODS[method]
    network = {"bandwidth_gbit": MEGABITS / 1000 / (LINKS[link] * SECONDS), "latency_us": LATENCY_US}
    asked = Job.from_table(
        {
            "name": f"{method}-learning".replace(", ", "-").replace(" ", "-"),
            "seed": seed,
            "workload": WORKLOAD,
            "optimizer": OPTIMIZER | {"lr": factor * OPTIMIZER["lr"]},
            "stop": {"samples": SAMPLES},
            "evaluation": {"every_samples": EVERY_SAMPLES},
            "paradigm": paradigm,
            "cluster": cluster | {"compute": {"model": "constant", "seconds": SECONDS}, "network": network},
        }
    )
    return resolved(asked, build(asked))


def measure(folder: Path) -> dict[str, Any]:
    """Return the results of a run; a time to an accuracy is that from which on it stays there."""
    trace = load(folder / layout.TRACE)
    setting, arm, method, seed = folder.parts[-4:]
    evaluations, updates = trace.frame("evaluations"), trace.tables["updates"]
    reached_s = {f"accuracy_{accuracy}_s": settled_s(evaluations, accuracy) for accuracy in ACCURACIES}
    return {
        "setting": setting,
        "arm": arm,
        "paradigm": method.replace("_", " "),
        "seed": int(seed),
        "duration_s": float(updates["now_s"][-1]),
        "samples_per_s": float(updates["samples"][-1] / updates["now_s"][-1]),
        **reached_s,
        "accurate_s": float(np.exp(np.mean(np.log([*reached_s.values()])))),
        "accuracy": float(evaluations["accuracy"].iloc[-5:].mean()),
    }


def claims() -> list[Claim]:
    found = []
    for link, words in WORDS.items():
        for ours in (STANZA, IN_PIECES):
            for other in (SERVER, SHARDS, RING):
                pair = (other, ours)
                number = ratio(*(of("accurate_s", link, ARM, method) for method in pair))
                says = f"as on {words}: {ours} is accurate sooner than {other}: {other}'s time / its own"
                found.append(Claim(says, "", number, low=1.0, expected="more than 1" if other != RING else ""))
                number = ratio(*(of("samples_per_s", link, ARM, method) for method in reversed(pair)))
                found.append(Claim(f"as on {words}: {ours} / {other}, samples a second", "", number))
        for other in (SERVER, RING):
            number = points(*(of("accuracy", link, ARM, method) for method in (other, STANZA)))
            says = f"as on {words}: accuracy at the end of {other} minus Stanza's"
            found.append(Claim(says, "", number, -0.5, 0.5, unit=" points", expected="0"))
    return found


COLOURS = {method: plotting.PARADIGM_COLOURS[paradigm["name"]] for method, (paradigm, _) in METHODS.items()}


def curves(results: pd.DataFrame, runs: Path) -> pd.DataFrame:
    """Return the accuracy against time, means over the seeds, for each link."""
    found = []
    for link in LINKS:
        for method in METHODS:
            seeds = results["seed"][(results["setting"] == link) & (results["paradigm"] == method)]
            folders = [runs / link / ARM / stem(method) / str(seed) for seed in seeds]
            each = [load(one / layout.TRACE).frame("evaluations") for one in folders]
            mean = pd.concat(each)[["now_s", "accuracy"]].groupby(level=0).mean()
            found.append(mean.assign(link=link, method=method))
    return pd.concat(found)


def draw(means: pd.DataFrame, folder: Path) -> None:
    """Draw what `curves` returns."""
    figure, axes = plotting.panels(1, len(LINKS), height=3.0, sharey=True)
    for axis, (link, words) in zip(axes[0], WORDS.items(), strict=True):
        for number, (method, colour) in enumerate(COLOURS.items()):
            mean = means[(means["link"] == link) & (means["method"] == method)]
            axis.plot(mean["now_s"], mean["accuracy"], color=colour, ls=plotting.DASHES[number % 2], label=method)
        axis.set(xlabel="virtual time (s)", xscale="log", title=f"as on {words}")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter(plotting.percent)
        axis.grid(lw=0.3)
    axes[0, 0].set_ylabel("accuracy on held-out images")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(METHODS))
    plotting.save(figure, means.round(4), folder, "stanza-learning")


def reproduce(out: Path, seeds: int, processes: int, console: Console) -> pd.DataFrame:
    """Simulate what is missing in the folder, write results, claims and the figure there, print the claims."""
    tuned_on, *other_links = LINKS
    reported, columns = range(FIRST_SEED, FIRST_SEED + seeds), [f"accuracy_{accuracy}_s" for accuracy in ACCURACIES]
    make = functools.partial(job, tuned_on)
    results = [
        tuned(
            tuned_on,
            tuple(METHODS),
            make,
            measure,
            columns,
            reported,
            out,
            processes,
            console,
            tuning_seeds=TUNING_SEEDS,
        )
    ]
    rates = pd.read_csv(out / "tuned-rates.csv").set_index("paradigm")["factor"]
    for link in other_links:
        chosen = {
            f"{link}/{ARM}/{stem(method)}/{seed}": job(link, method, rates[method], seed)
            for method in METHODS
            for seed in reported
        }
        simulate_all(chosen, out / "runs", processes, console)
        results.append(pd.DataFrame([measure(out / "runs" / name) for name in chosen]))
    together = pd.concat(results, ignore_index=True)
    draw(curves(together, out / "runs"), out)
    title = f"Stanza, learning, virtual time, {seeds} seeds: mean (95 % interval)"
    return conclude(claims(), together, out, console, title)
