"""Gossip, elastic averaging and all-reduce with many workers: test of the claims of a paper.

Jin, Yuan, Iandola, Keutzer: "How to scale distributed deep learning?", 2016. The simulations have 4 to 128 workers,
three learning rates, with and without stragglers; others measure the samples per second of a model of the paper's size.
Of the paper only the abstract could be read; other settings are those of the first author's program
(github.com/peterhj/rembrandt), or ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import StrMethodFormatter
from rich.console import Console

from hpcsync.config.job import Job
from hpcsync.figures import plotting
from hpcsync.run_dir import layout
from hpcsync.trace.reader import load
from reproductions.claims import Claim, Of, apart, arrives_after_s, conclude, of, points, ratio, settled_s, time_to
from reproductions.simulating import simulate_all, write_changed
from reproductions.tuning import tuned

# ---- what is run ----

WORKERS = (4, 8, 16, 32, 64, 128)
FEW, LIMIT, MANY = 8, 32, 128  # the abstract: asynchronous methods win up to about 32, all-reduce goes on to about 100
PARADIGMS: dict[str, dict[str, Any]] = {
    "all-reduce": {"name": "allreduce"},
    "EASGD": {"name": "easgd", "beta": 0.8, "period": 10},
    "pull": {"name": "gossip", "mode": "pull"},
    "push": {"name": "gossip", "mode": "push"},
}
FIXED = {"EASGD-fixed": {"name": "easgd", "alpha": 0.1, "period": 10}}  # as beta = 0.8 has it with 8 workers
SERVER = {"server": {"name": "asp"}}  # each gradient through a parameter server: only for how many samples a second
NAMES = {"all-reduce": "all-reduce", "EASGD": "EASGD", "gossip": "gossip", "server": "ASP"}
ASYNCHRONOUS = ("EASGD", "gossip")

BATCH = 16  # of a worker, whatever their number: the program's with 16 workers
# With the large one all-reduce of 4 workers just about settles; the medium one is the largest with which EASGD does.
STEPS = {"large": 0.2, "medium": 0.05, "small": 0.01}
SECONDS = {"large": 24.0, "medium": 36.0, "small": 75.0}  # of a run
EVALUATIONS = 100  # of a run without waiting
TARGET = 0.94  # accuracy, from when on it is never less
FIRST_SEED = 4  # 1 has been used to choose steps, label noise and target
BASE = "medium"  # the step whose multiples are tried where each method has its own best one
RATED = ("all-reduce", "EASGD", "pull")
TUNING_SEEDS = (1, 2)

RESNET = 11_689_512  # ResNet-18's parameters: 46.8 MB, which take 37 ms at 10 Gbit/s
# 1.8 G multiply-adds forward, twice that backward: 10.9 GFLOP a sample, 175 of 16; a K80's GPU at half of 2.8 TFLOPS.
COMPUTE_S, JITTER = 0.125, 0.1
LINKS = {"10 Gbit/s": 10.0, "56 Gbit/s": 56.0}  # Ethernet; FDR InfiniBand
THROUGHPUT_S = 40.0

PERCEPTRON = {"name": "reproductions.relabelled:perceptron", "options": {"share": 0.2}}
PARAMETERS = 64 * 64 + 64 + 64 * 10 + 10  # the perceptron's: its links are as much narrower than a ResNet's would be
ONE_IN, SLEEP_S, ROWS = 4, 0.3, 200  # every fourth worker sleeps 0 to 0.3 s in each iteration; of a table of times
CLUSTERS = {"even": "without stragglers", "stragglers": "with stragglers"}
TUNED = tuple(f"{cluster}-{workers}" for cluster in CLUSTERS for workers in (FEW, LIMIT, MANY))


def jobs(seeds: int, times: Path, length: float = 1.0) -> dict[str, Job]:
    """Every run, by the name of its folder. times: of stragglers. length: of all runs, for a quick look."""
    found = {}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for paradigm in ("all-reduce", "EASGD", *FIXED):
            name = f"free-{LIMIT}/medium/{paradigm}/{seed}"
            found[name] = learning("free", LIMIT, "medium", paradigm, seed, times, length)
        for workers in WORKERS:
            for cluster in CLUSTERS:
                for step in STEPS:
                    for paradigm in PARADIGMS:
                        name = f"{cluster}-{workers}/{step}/{paradigm}/{seed}"
                        found[name] = learning(cluster, workers, step, paradigm, seed, times, length)
            for link in LINKS:
                for paradigm in PARADIGMS | SERVER:
                    name = f"{link.replace('/', ' per ')}-{workers}/timing/{paradigm}/{seed}"
                    found[name] = travelling(link, workers, paradigm, seed, length)
    return found


def learning(
    cluster: str, workers: int, step: str, paradigm: str, seed: int, times: Path, length: float, factor: float = 1.0
) -> Job:
    """A run that learns. Its links are such that the perceptron takes as long as ResNet-18 at 10 Gbit/s, or no time.

    factor: of the step.
    """
    compute: dict[str, Any] = {"model": "lognormal", "seconds": COMPUTE_S, "jitter": JITTER}
    if cluster == "stragglers":
        compute = {"model": "table", "table": str(table_of(times, workers, seed))}
    seconds = length * SECONDS[step]
    network = {} if cluster == "free" else {"network": {"bandwidth_gbit": LINKS["10 Gbit/s"] * PARAMETERS / RESNET}}
    return Job.from_table(
        {
            "name": f"{cluster}-{workers}-{step}-{paradigm}",
            "seed": seed,
            "workload": {**PERCEPTRON, "batch_size": BATCH},
            "optimizer": {"name": "sgd", "lr": factor * STEPS[step], "momentum": 0.9, "nesterov": True},
            "stop": {"seconds": seconds},
            "evaluation": {"every_samples": max(1, round(workers * BATCH * seconds / COMPUTE_S / EVALUATIONS))},
            "paradigm": (PARADIGMS | FIXED)[paradigm],
            "cluster": {"workers": workers, "compute": compute, **network},
        }
    )


def travelling(link: str, workers: int, paradigm: str, seed: int, length: float) -> Job:
    """A run in which a vector of ResNet-18's size travels, and nothing is learned."""
    return Job.from_table(
        {
            "name": f"throughput-{workers}-{paradigm}",
            "seed": seed,
            "workload": {"name": "timing", "parameters": RESNET, "batch_size": BATCH},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "stop": {"seconds": length * THROUGHPUT_S},
            "paradigm": (PARADIGMS | SERVER)[paradigm],
            "cluster": {
                "workers": workers,
                "compute": {"model": "lognormal", "seconds": COMPUTE_S, "jitter": JITTER},
                "network": {"bandwidth_gbit": LINKS[link]},
            },
        }
    )


def table_of(times: Path, workers: int, seed: int) -> Path:
    return times.resolve() / f"{workers}-{seed}.csv"


def write_times(path: Path, workers: int, seed: int, compute_s: float = COMPUTE_S) -> None:
    """Seconds of each worker's iterations; every fourth worker, from the first on, sleeps in each of its own."""
    draw = np.random.default_rng([seed, workers])
    seconds = compute_s * draw.lognormal(0.0, JITTER, (workers, ROWS))
    seconds[::ONE_IN] += draw.uniform(0.0, SLEEP_S, seconds[::ONE_IN].shape)
    frame = (
        pd.DataFrame(seconds).rename_axis("worker").melt(var_name="iteration", value_name="seconds", ignore_index=False)
    )
    write_changed(frame.reset_index().to_csv(index=False), path)


# ---- what came of it ----


def measure(folder: Path) -> dict[str, Any]:
    """The results of a run. If it does not arrive, target_s is not known, and target_at_least_s is its length."""
    trace = load(folder / layout.TRACE)
    setting, arm, paradigm, seed = folder.parts[-4:]
    last = trace.tables["updates"][-1]  # what is still computed when the run is over counts for nothing
    duration_s = float(last["now_s"])
    row = {"setting": setting.replace(" per ", "/"), "arm": arm, "paradigm": paradigm, "seed": int(seed)}
    row |= {"workers": trace.n_workers, "samples_per_s": last["samples"] / duration_s, "duration_s": duration_s}
    if arm != "timing":
        evaluations = trace.frame("evaluations")
        evaluations["accuracy"] = evaluations["accuracy"].rolling(3, 1, center=True).mean()
        target_s = settled_s(evaluations, TARGET)
        row["target_s"] = target_s
        row["target_at_least_s"] = arrives_after_s(target_s, duration_s)
        row["accuracy"] = evaluations["accuracy"][evaluations["now_s"] >= 0.9 * duration_s].mean()
    return row


# ---- what the paper says ----


def claims() -> list[Claim]:
    claims = []
    for step in ("large", "medium"):
        for cluster, words in CLUSTERS.items():
            where = f"{step} step, {words}"
            for workers in (FEW, LIMIT):
                for method in ASYNCHRONOUS:
                    says = f"{where}, {workers} workers: {method} sooner than all-reduce"
                    number = sooner(method, "all-reduce", f"{cluster}-{workers}", step)
                    claims.append(Claim(says, "sooner, up to about 32 nodes", number, low=1.05))
            for method in ASYNCHRONOUS:
                says = f"{where}, {MANY} workers: all-reduce sooner than {method}"
                number = sooner("all-reduce", method, f"{cluster}-{MANY}", step)
                claims.append(Claim(says, "scales to about 100 nodes", number, low=1.05))
            for method in ASYNCHRONOUS:
                says = f"{where}, {MANY} workers: all-reduce ends higher than {method}"
                number = higher("all-reduce", method, f"{cluster}-{MANY}", step)
                claims.append(Claim(says, "", number, low=0.2, unit=" points", expected="higher"))
    for method in ASYNCHRONOUS:
        says = (
            f"small step: final accuracies at {WORKERS[0]} to {MANY} workers further apart than all-reduce's: {method}"
        )
        claims.append(
            Claim(says, "", less_even(method), low=0.0, unit=" points", expected="all-reduce most consistent")
        )
    for workers in (FEW, LIMIT, MANY):
        number = sooner("gossip", "EASGD", f"even-{workers}", "small")
        claims.append(
            Claim(f"small step, {workers} workers: gossip sooner than EASGD", "", number, low=1.05, expected="can be")
        )
    claims += [claim for setting in TUNED for claim in with_own_rates(setting)]
    free, ours = f"free-{LIMIT}", f"medium step, {LIMIT} workers, transfers in no time"
    claims += [
        Claim(f"{ours}: EASGD sooner than all-reduce", "", sooner("EASGD", "all-reduce", free, "medium"), low=1.05),
        Claim(
            f"{ours}: all-reduce ends higher than EASGD",
            "",
            higher("all-reduce", "EASGD", free, "medium"),
            low=0.2,
            unit=" points",
        ),
        Claim(
            f"{ours}: EASGD with alpha = 0.1 ends higher than with beta = 0.8",
            "",
            higher("EASGD-fixed", "EASGD", free, "medium"),
            low=0.2,
            unit=" points",
        ),
    ]
    growth = MANY / LIMIT
    for link in LINKS:
        for method, name in NAMES.items():
            says = f"{link}: {MANY} workers train faster than {LIMIT}: {name}"
            if method in ("EASGD", "server"):
                number = scaling(method, link)
                claims.append(Claim(says, "", number, high=0.5 * growth, expected="the server's link limits"))
            else:
                claims.append(Claim(says, "", scaling(method, link), low=0.9 * growth, expected="no server to share"))
    for workers in (FEW, LIMIT, MANY):
        says = f"{workers} workers: slowed by stragglers"
        claims.append(Claim(f"{says}: all-reduce", "", slower("all-reduce", workers), low=1.5, expected="yes"))
        claims += [Claim(f"{says}: {m}", "", slower(m, workers), high=1.25, expected="no") for m in ASYNCHRONOUS]
    return claims


def with_own_rates(setting: str) -> list[Claim]:
    """Return the claims on a setting in which each method has its own best step; gossip's mode is pull."""
    cluster, workers = setting.split("-")
    where, found = f"{workers} workers, {CLUSTERS[cluster]}, each with its own best step", []
    for method in RATED[1:]:
        first, second, printed = (method, "all-reduce", "sooner, up to about 32 nodes")
        if int(workers) == MANY:
            first, second, printed = ("all-reduce", method, "scales to about 100 nodes")
        number = sooner(first, second, setting, "tuned")
        found.append(Claim(f"{where}: {first} sooner than {second}", printed, number, low=1.05))
        says = f"{where}: all-reduce's accuracy at the end above that of {method}"
        found.append(Claim(says, "", higher("all-reduce", method, setting, "tuned"), low=0.2, unit=" points"))
    return found


def sooner(a: str, b: str, setting: str, step: str) -> Of:
    """Return the ratio of the times of b and a to the target."""
    return ratio(*(time_to("target", setting, step, *parts(method)) for method in (b, a)))


def parts(method: str) -> tuple[str, ...]:
    """Gossip is the mean of its two modes."""
    return ("pull", "push") if method == "gossip" else (method,)


def higher(a: str, b: str, setting: str, step: str) -> Of:
    return points(*(of("accuracy", setting, step, *parts(method)) for method in (a, b)))


def less_even(method: str) -> Of:
    """Return the spread of the final accuracies over the numbers of workers, less that of all-reduce, in points."""
    of_method, of_all_reduce = (
        apart(*(of("accuracy", f"even-{workers}", "small", *parts(name)) for workers in WORKERS))
        for name in (method, "all-reduce")
    )
    return lambda results: of_method(results) - of_all_reduce(results)


def scaling(method: str, link: str) -> Of:
    """Return the ratio of samples per second of the largest number of workers to that at the limit."""
    many, limit = (of("samples_per_s", f"{link}-{workers}", "timing", *parts(method)) for workers in (MANY, LIMIT))
    return ratio(many, limit)


def slower(method: str, workers: int) -> Of:
    """Return the ratio of samples per second without and with stragglers."""
    even, uneven = (of("samples_per_s", f"{cluster}-{workers}", "medium", *parts(method)) for cluster in CLUSTERS)
    return ratio(even, uneven)


# ---- figures ----

ORANGE = plotting.PARADIGM_COLOURS["gossip"]
LOOKS: dict[str, dict[str, Any]] = {
    "all-reduce": {"label": "all-reduce", "color": plotting.PARADIGM_COLOURS["allreduce"], "marker": "o"},
    "EASGD": {"label": "EASGD", "color": plotting.PARADIGM_COLOURS["easgd"], "marker": "s"},
    "pull": {"label": "gossip, pull", "color": ORANGE, "marker": "^", "ls": plotting.DASHES[1], "mfc": "w"},
    "push": {"label": "gossip, push", "color": ORANGE, "marker": "v"},
    "server": {"label": "ASP", "color": plotting.PARADIGM_COLOURS["asp"], "marker": "D"},
}


def draw_times(results: pd.DataFrame, folder: Path) -> None:
    """Time to the target against the number of workers; a cross for those of whom some seed does not get there."""
    figure, axes = _by_step_and_cluster(results, "target_s")
    for row, cluster in zip(axes, CLUSTERS, strict=True):
        for axis, step in zip(row, STEPS, strict=True):
            runs = select(results, step, cluster)
            for n, method in enumerate(PARADIGMS):
                missed = runs["workers"][(runs["paradigm"] == method) & runs["target_s"].isna()].unique()
                height = [1.35 ** (n + 0.8) * max(SECONDS.values())] * len(missed)
                axis.plot(missed, height, "x", ms=4, mew=1.2, color=LOOKS[method]["color"])
        row[0].set(ylabel=f"{CLUSTERS[cluster]}\ntime to {plotting.percent(TARGET)} (virtual s)")
        row[0].set(ylim=(2, 4.5 * max(SECONDS.values())))
        row[0].set_yticks([2, 5, 10, 20, 50], labels=["2", "5", "10", "20", "50"])
    handles, _ = axes[0, 0].get_legend_handles_labels()
    never = Line2D([], [], marker="x", color=plotting.GREY, ls="", ms=4, mew=1.2, label="not with every seed")
    figure.legend(handles=[*handles, never], loc="outside upper center", ncols=len(handles) + 1)
    plotting.save(figure, learned(results)[[*RUN, "target_s"]].round(4), folder, "gossip-times")


def draw_errors(results: pd.DataFrame, folder: Path) -> None:
    """The error in the last tenth of each run against the number of workers."""
    figure, axes = _by_step_and_cluster(results.assign(error=1 - results["accuracy"]), "error")
    for row, cluster in zip(axes, CLUSTERS, strict=True):
        row[0].set(ylabel=f"{CLUSTERS[cluster]}\nerror at the end", ylim=(0.008, 1))
        row[0].set_yticks([0.01, 0.03, 0.1, 0.3, 1.0])
        row[0].yaxis.set_major_formatter(plotting.percent)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(PARADIGMS))
    plotting.save(figure, learned(results)[[*RUN, "accuracy"]].round(4), folder, "gossip-errors")


RUN = ["setting", "arm", "paradigm", "seed", "workers"]


def learned(results: pd.DataFrame) -> pd.DataFrame:
    return results[results["arm"].isin(STEPS)]


def select(results: pd.DataFrame, arm: str, where: str) -> pd.DataFrame:
    return results[(results["arm"] == arm) & results["setting"].str.startswith(f"{where}-")]


def _by_step_and_cluster(results: pd.DataFrame, column: str) -> Any:
    figure, axes = plotting.panels(len(CLUSTERS), len(STEPS), height=4.6, sharex=True, sharey=True)
    for row, cluster in zip(axes, CLUSTERS, strict=True):
        for axis, step in zip(row, STEPS, strict=True):
            axis.set_yscale("log")
            draw_ranges(axis, select(results, step, cluster), column, PARADIGMS)
    for axis, (step, lr) in zip(axes[0], STEPS.items(), strict=True):
        axis.set_title(f"{step} step, {lr:g}")
    figure.supxlabel("workers", fontsize=8)
    return figure, axes


def draw_throughput(results: pd.DataFrame, folder: Path) -> None:
    figure, axes = plotting.panels(1, len(LINKS), height=2.8, sharex=True, sharey=True)
    for axis, link in zip(axes[0], LINKS, strict=True):
        axis.plot(
            WORKERS, np.multiply(WORKERS, BATCH / COMPUTE_S), color=plotting.GREY, lw=0.8, label="computing alone"
        )
        axis.set(title=f"ResNet-18, {link}", yscale="log")
        draw_ranges(axis, select(results, "timing", link), "samples_per_s", LOOKS)
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes[0, 0].set_ylabel("samples per virtual second")
    figure.supxlabel("workers", fontsize=8)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(LOOKS) + 1)
    timed = results[results["arm"] == "timing"]
    plotting.save(figure, timed[[*RUN, "samples_per_s"]].round(2), folder, "gossip-throughput")


def draw_ranges(axis: Axes, runs: pd.DataFrame, column: str, methods: Iterable[str]) -> None:
    """Against the number of workers the mean over seeds, in their range; a gap where one of them has none."""
    for method in methods:
        seeds = runs[runs["paradigm"] == method].pivot(index="workers", columns="seed", values=column)
        mean = seeds.mean(axis=1, skipna=False)
        least, largest = (ends.where(mean.notna()) for ends in (seeds.min(axis=1), seeds.max(axis=1)))
        axis.fill_between(seeds.index, least, largest, color=LOOKS[method]["color"], alpha=0.15, lw=0)
        axis.plot(seeds.index, mean, ms=3.5, **LOOKS[method])
    axis.set_xscale("log", base=2)
    axis.set_xticks(WORKERS, labels=[str(n) for n in WORKERS])
    axis.minorticks_off()


# ---- all of it ----


def tuned_runs(setting: str, out: Path, seeds: int, processes: int, console: Console, length: float) -> pd.DataFrame:
    """Return results of a setting in which each method has its own best step."""
    cluster, workers = setting.split("-")

    def make(method: str, factor: float, seed: int) -> Job:
        return learning(cluster, int(workers), BASE, method, seed, out / "times", length, factor)

    reported = range(FIRST_SEED, FIRST_SEED + seeds)
    columns, folder = ("target_s",), out / setting
    return tuned(
        setting, RATED, make, measure, columns, reported, folder, processes, console, tuning_seeds=TUNING_SEEDS
    )


def reproduce(out: Path, seeds: int, processes: int, console: Console, length: float = 1.0) -> pd.DataFrame:
    """Simulate what is missing in the folder, write results, claims and figures there, print the claims."""
    times = out / "times"
    for workers in WORKERS:
        for seed in (*TUNING_SEEDS, *range(FIRST_SEED, FIRST_SEED + seeds)):
            write_times(table_of(times, workers, seed), workers, seed)
    todo = jobs(seeds, times, length)
    simulate_all(todo, out / "runs", processes, console)
    results = pd.DataFrame([measure(out / "runs" / name) for name in todo])
    draw_times(results, out)
    draw_errors(results, out)
    draw_throughput(results, out)
    own = [tuned_runs(setting, out, seeds, processes, console, length) for setting in TUNED]
    results = pd.concat([results, *own], ignore_index=True)
    title = f"Gossip, virtual time, {seeds} seeds: mean (95 % interval)"
    return conclude(claims(), results, out, console, title)
