"""First k, adaptive k and batch sizes by speed: do they remove the effect of stragglers?

Yu et al. ("Accelerating Distributed Training in Heterogeneous Clusters via a Straggler-Aware Parameter Server", HPCC
2019, and the thesis it belongs to) choose k by the workers' state and batch sizes by their predicted speeds, and report
that both are faster than BSP and ASP. Dutta, Wang and Joshi (AdaSync, 2020) choose k by the loss. The clusters are
simulated and have the same total speed: equal workers, unequal workers, and equal workers on shared nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from rich.console import Console

from hpcsync.config.job import Job
from hpcsync.figures import plotting
from hpcsync.run_dir import layout
from hpcsync.trace.reader import load
from reproductions.claims import Claim, Of, conclude, mean_time, of, points, ratio, time_to
from reproductions.simulating import simulate_all
from reproductions.tuning import tuned

# ---- what is run ----

WORKERS, BATCH = 8, 16
SLOWNESS = (1, 1, 1, 1, 2, 2, 3, 4)  # of the unlike workers
FASTEST_S, JITTER, FIXED_SHARE = 0.02, 0.1, 0.1
# Of equal workers that compute as much in all as the unlike ones: 29 ms.
EQUAL_S = FASTEST_S * WORKERS / sum(1 / slowness for slowness in SLOWNESS)

# Two workers a node. Now and then other jobs come, so that it has 2, 3 or 4 in all and its workers take as many times
# as long; with both durations exponential, this is the speed that they leave in the mean.
PER_NODE, JOBS, ALONE_S, SHARED_S = 2, (2, 3, 4), 4.0, 2.0
LEFT = (ALONE_S + SHARED_S * sum(1 / n for n in JOBS) / len(JOBS)) / (ALONE_S + SHARED_S)

ALLOCATION = {"policy": "equal-finish", "predictor": "blend"}
BY_SMOOTHING = {"policy": "equal-finish", "predictor": "smoothing"}


@dataclass(frozen=True)
class Method:
    """allocation: None gives everyone the same batch size."""

    paradigm: Mapping[str, Any]
    allocation: Mapping[str, Any] | None = None


def first(form: str, k: int | str, allocation: Mapping[str, Any] | None = None, **options: Any) -> Method:
    return Method({"name": form, "k": k, **options}, allocation)


BSP, ASP = {"name": "bsp"}, {"name": "asp"}
METHODS = {
    "BSP": Method(BSP),
    "ASP": Method(ASP),
    "k-sync 4": first("k-sync", 4),
    "k-sync 6": first("k-sync", 6),
    "k-batch-sync 8": first("k-batch-sync", 8),
    "k-async 4": first("k-async", 4),
    "k-batch-async 8": first("k-batch-async", 8),
    "k-sync state": first("k-sync", "state"),
    "k-sync loss": first("k-sync", "loss"),
    "k-async state": first("k-async", "state"),
    "k-async loss": first("k-async", "loss"),
    "k-async min": first("k-async", "min"),
    "BSP + batches": Method(BSP, ALLOCATION),
    "ASP + batches": Method(ASP, ALLOCATION),
    "k-sync state + batches": first("k-sync", "state", ALLOCATION),
    "k-async state + batches": first("k-async", "state", ALLOCATION),
}
ADAPTIVE = ("k-sync state", "k-async state")  # the thesis's; "loss" is AdaSync's, "min" the smaller of both
TOGETHER = ("k-sync state + batches", "k-async state + batches")
ALWAYS = "k-batch-async 8"  # as many contributions an update as BSP, and nobody waits: not the thesis's
KEY = ("BSP", "ASP", ALWAYS, *ADAPTIVE, "BSP + batches", "ASP + batches", *TOGETHER)
RATED = KEY  # each with its own best learning rate
# What the adaptive algorithm and the allocation are made of: each without one of its parts, or with another.
PARTS = {
    "k-sync state, abort": first("k-sync", "state", cancel="abort"),
    "k-async state, weight 1": first("k-async", "state", staleness_weight="none"),
    "BSP + batches, smoothing": Method(BSP, BY_SMOOTHING),
}

# AdaSync's trade: the same step of every update, whatever its k, so that a small k is fast and noisy.
KS = (1, 2, 4, 6)  # and all of them, which is BSP
FRONTIER = {f"k-sync {k}": first("k-sync", k) for k in (*KS, "loss")} | {"BSP": Method(BSP)}
FIXED = (*(f"k-sync {k}" for k in KS), "BSP")

CLUSTERS = {
    "homogeneous": "equal workers",
    "heterogeneous": "unlike workers",
    "contended": "contended nodes",
    "contended-long": "... for 20 s at a time",
}
UNEVEN = ("heterogeneous", "contended")
LONGER = 10  # times as long, jobs stay and stay away in the last of these clusters
# How many of the labels are drawn anew at every read: the loss tends to almost 0, or to almost 1.
TASKS = {"clean": 0.0, "noisy": 0.2}


@dataclass(frozen=True)
class Rate:
    """scale: of an update of n of P contributions; with "1/workers" a pass over the data makes the same total step.

    samples, seconds: whichever is over first ends a run. accuracy: the target, held out. losses: the time "to the loss"
    is the geometric mean of the times to these, held out as well. every: samples from one evaluation to the next.
    """

    lr: float
    scale: float | str
    samples: int
    seconds: float
    methods: Mapping[str, Method]
    momentum: float = 0.0
    accuracy: float = 0.97
    losses: tuple[float, ...] = (0.4, 0.37, 0.35)
    every: int = 704


RATES = {
    "plain": Rate(0.1, "1/workers", 36_000, 60.0, METHODS | PARTS, 0.0, 0.96, (0.5, 0.475, 0.45)),
    "momentum": Rate(0.1, "1/workers", 40_000, 60.0, {name: METHODS[name] for name in KEY}, 0.9),
    "published": Rate(0.4, 1.0, 10**9, 12.0, FRONTIER, every=BATCH * WORKERS),
    "real": Rate(0.1, "1/workers", 20_000, 600.0, {}, 0.0, 0.95, (0.5, 0.475, 0.45)),  # see first_k_real
}
# Which of them run on which cluster; all of them on the others.
ONLY = {
    ("homogeneous", "plain"): ("k-sync 4", *KEY),
    ("homogeneous", "momentum"): ("BSP", "ASP"),
    ("contended-long", "plain"): KEY,
    ("contended-long", "momentum"): (),
}
WORDS = {"plain": "plain SGD", "momentum": "momentum 0.9"}
SMOOTHED = 5  # evaluations of which the mean is taken
EARLY = (0.3, 0.2, 0.1, 0.07, 0.05)  # errors along which AdaSync is compared with every fixed k
FIRST_SEED = 7  # 1 to 6 have been used to choose steps, label noise and targets


def jobs(seeds: int, length: float = 1.0) -> dict[str, Job]:
    """Every run, by the name of its folder. length: of all runs, for a quick look."""
    found = {}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for rate in ("plain", "momentum"):
            for cluster in CLUSTERS:
                for method in ONLY.get((cluster, rate), RATES[rate].methods):
                    found[name_of(cluster, rate, method, seed)] = job(cluster, rate, method, seed, length)
        for task in TASKS:
            for method in FRONTIER:
                found[name_of(task, "published", method, seed)] = job(task, "published", method, seed, length)
    return found


def name_of(setting: str, rate: str, method: str, seed: int) -> str:
    return f"{setting}/{rate}/{method.replace(' ', '_')}/{seed}"


def job(setting: str, rate: str, method: str, seed: int, length: float = 1.0, factor: float = 1.0) -> Job:
    """setting: one of CLUSTERS; or one of TASKS, on equal workers whose times are exponential."""
    chosen = RATES[rate]
    share = TASKS.get(setting, TASKS["noisy"])
    where = cluster(setting, seed, chosen.seconds)
    limits = {"samples": round(length * chosen.samples), "seconds": length * chosen.seconds}
    return job_of(f"{setting}-{rate}-{method}", chosen, chosen.methods[method], where, seed, limits, share, factor)


def job_of(
    name: str,
    chosen: Rate,
    way: Method,
    where: Mapping[str, Any],
    seed: int,
    limits: Mapping[str, Any],
    share: float = TASKS["noisy"],
    factor: float = 1.0,
) -> Job:
    """where: [cluster]. limits: [stop]. share: of the labels that are drawn anew. factor: of the learning rate."""
    table: dict[str, Any] = {
        "name": name.replace(" ", "-").replace(",", ""),
        "seed": seed,
        "workload": {
            "name": "reproductions.relabelled:perceptron",
            "options": {"share": share},
            "batch_size": BATCH,
        },
        "optimizer": {
            "name": "sgd",
            "lr": factor * chosen.lr,
            "momentum": chosen.momentum,
            "async_lr_scale": chosen.scale,
        },
        "stop": dict(limits),
        "evaluation": {"every_samples": chosen.every},
        "paradigm": dict(way.paradigm),
        "cluster": dict(where),
    }
    return Job.from_table(table | ({} if way.allocation is None else {"batches": dict(way.allocation)}))


def cluster(setting: str, seed: int, seconds: float) -> dict[str, Any]:
    compute: dict[str, Any] = {"model": "lognormal", "seconds": EQUAL_S, "jitter": JITTER, "fixed_share": FIXED_SHARE}
    events = []
    if setting == "heterogeneous":
        compute["seconds"] = [FASTEST_S * slowness for slowness in SLOWNESS]
    if setting.startswith("contended"):
        compute["seconds"] = EQUAL_S * LEFT
        events = contention(seed, seconds, LONGER if setting == "contended-long" else 1)
    if setting in TASKS:
        compute = {"model": "exponential", "seconds": EQUAL_S}
    return {"workers": WORKERS, "compute": compute, "events": events}


def contention(seed: int, until_s: float, longer: float = 1.0) -> list[dict[str, Any]]:
    """Jobs that come to nodes and go, some of them before the start. They are drawn from the seed: all methods meet the
    same ones."""
    events: list[dict[str, Any]] = []
    for node in range(WORKERS // PER_NODE):
        draw = np.random.default_rng([seed, node])
        at_s = longer * (draw.exponential(ALONE_S) - 10 * ALONE_S)
        while at_s < until_s:
            end_s, factor = at_s + longer * draw.exponential(SHARED_S), float(draw.choice(JOBS))
            for worker in range(node * PER_NODE, (node + 1) * PER_NODE):
                if end_s > 0:
                    events.append({"worker": worker, "at_s": max(0.0, at_s), "change": "slow", "factor": factor})
                    events.append({"worker": worker, "at_s": end_s, "change": "recover"})
            at_s = end_s + longer * draw.exponential(ALONE_S)
    return events


def speed_left(job: Job, until_s: float) -> float:
    """The workers' mean speed up to a time, events included, in that of the same workers without any."""
    seconds = getattr(job.cluster.compute, "seconds", 1.0)  # a file of times: all workers count alike
    alone_s = seconds if isinstance(seconds, tuple) else (seconds,) * job.cluster.workers
    done_s = []
    for worker in range(job.cluster.workers):
        own = [event for event in job.cluster.events if event.worker == worker and event.at_s < until_s]
        since_s, factor, done = 0.0, 1.0, 0.0
        for at_s, next_factor in (*((event.at_s, event.factor or 1.0) for event in own), (until_s, 1.0)):
            done += (at_s - since_s) / factor
            since_s, factor = at_s, next_factor
        done_s.append(done)
    return float(np.average(done_s, weights=1 / np.array(alone_s)) / until_s)


# ---- what came of it ----


def measure(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """The results of a run: a row, and its evaluations.

    accuracy_s, loss_s: to these targets; not known where they have not been reached, and ..._at_least_s is then what
    the run has shown. ..._even_s: the same, had the nodes been as contended as they are in the mean, so that clusters
    and seeds are of one total speed.
    """
    trace = load(folder / layout.TRACE)
    setting, rate, method, seed = folder.parts[-4:]
    targets = RATES[rate] if rate in RATES else RATES["plain"]  # whose learning rates are tuned
    run = {"setting": setting, "arm": rate, "paradigm": method.replace("_", " "), "seed": int(seed)}
    pushes, updates, evaluations = trace.tables["pushes"], trace.tables["updates"], trace.frame("evaluations")
    over_s = float(updates["now_s"][-1])  # what is still computed when the run is over counts for nothing
    pushes = pushes[pushes["now_s"] <= over_s]
    dropped = pushes["outcome"] == 1
    computed = pushes["batch_size"] * pushes["share"]
    evaluations["accuracy"], evaluations["loss"] = (
        evaluations[column].rolling(SMOOTHED, 1, center=True).mean() for column in ("accuracy", "loss")
    )
    losses = [first_s(evaluations["now_s"], evaluations["loss"] <= loss) for loss in targets.losses]
    accurate_s = first_s(evaluations["now_s"], evaluations["accuracy"] >= targets.accuracy)
    row: dict[str, Any] = {**run}
    for by, times_s in (("accuracy", [accurate_s]), ("loss", losses)):
        time_s, at_least_s = mean_time(times_s, over_s)
        speed = speed_left(trace.job, at_least_s) / (LEFT if setting.startswith("contended") else 1)
        row |= {f"{by}_s": time_s, f"{by}_at_least_s": at_least_s}
        row |= {f"{by}_even_s": time_s * speed, f"{by}_even_at_least_s": at_least_s * speed}
    row |= {
        "error": 1 - evaluations["accuracy"][evaluations["now_s"] >= 0.9 * over_s].mean(),
        "duration_s": over_s,
        "samples_per_s": updates["samples"][-1] / over_s,
        "wait_share": pushes["wait_s"].sum() / (pushes["wait_s"] + pushes["compute_s"]).sum(),
        "dropped_share": computed[dropped].sum() / computed.sum(),
        "staleness": pushes["staleness"][~dropped].mean(),
        "k": np.average(updates["n_contributions"], weights=np.diff(updates["now_s"], prepend=0.0)),
    }
    error = 1 - evaluations["accuracy"]
    row |= {f"error_{share:g}_s": first_s(evaluations["now_s"], error <= share) for share in EARLY}
    return row, evaluations[["now_s", "samples", "accuracy", "loss"]].assign(**run)


def first_s(now_s: pd.Series, reached: pd.Series) -> float:
    """When it was first so; NaN for never."""
    return float(now_s[reached].min())


# ---- what is claimed ----

NO_LATER, REMOVED = 1.1, 1.15  # times as long counts as "no later", and as "without stragglers' effect"


PLACES = [(where, "plain") for where in (*UNEVEN, "contended-long")] + [(where, "momentum") for where in UNEVEN]
CLAIMED = (*ADAPTIVE, "BSP + batches", *TOGETHER)


def claims() -> list[Claim]:
    found = []
    for where, rate in PLACES:
        for by in ("accuracy", "loss"):
            words = f"{where}, {WORDS[rate]}, by the {by}"
            for method in (*CLAIMED, ALWAYS):
                for other in ("BSP", "ASP"):
                    says = f"{words}: {method} sooner than {other}"
                    published = "sooner" if method in CLAIMED else ""
                    found.append(Claim(says, published, sooner(method, other, where, rate, by), low=1.05))
            for method in ("BSP", "ASP", *CLAIMED, ALWAYS):
                says = f"{words}: {method}'s time / BSP's with equal workers"
                expected = "about 1" if method in TOGETHER else ""
                found.append(Claim(says, "", effect(method, where, rate, by), high=REMOVED, expected=expected))
    for by in ("accuracy", "loss"):
        for method in CLAIMED:
            for other in ("BSP", "ASP"):
                says = f"heterogeneous, each with its own best rate, by the {by}: {method} sooner than {other}"
                found.append(Claim(says, "sooner", sooner(method, other, "heterogeneous", "tuned", by), low=1.05))
    for method in CLAIMED:
        says = f"homogeneous, plain SGD: {method} trains on as many samples a second as BSP"
        number = ratio(
            of("samples_per_s", "homogeneous", "plain", method), of("samples_per_s", "homogeneous", "plain", "BSP")
        )
        found.append(Claim(says, "", number, low=0.97))
        says = f"homogeneous, plain SGD, by the loss: {method}'s time / BSP's"
        found.append(Claim(says, "", effect(method, "homogeneous", "plain", "loss"), high=NO_LATER))
    for task in TASKS:
        where = f"exponential times, {task} labels"
        ends = points(of("error", task, "published", "k-sync loss"), of("error", task, "published", "BSP"))
        says = f"{where}: AdaSync ends no worse than k = {WORKERS}"
        found.append(Claim(says, "", ends, high=0.5, unit=" points", expected="no worse"))
        says = f"{where}: AdaSync's times to {len(EARLY)} errors / those of the soonest k"
        found.append(Claim(says, "", envelope("k-sync loss", task), high=REMOVED, expected="about 1"))
    for where in UNEVEN:
        for part in PARTS:
            whole, _ = part.split(", ")
            says = f"{where}, plain SGD, by the loss: {part}: its time / {whole}'s"
            found.append(Claim(says, "", sooner(whole, part, where, "plain", "loss"), 1 / NO_LATER, NO_LATER))
    return found + seconds()


def seconds() -> list[Claim]:
    """Return the times to the loss themselves."""
    timed = [(where, rate, ("BSP", "ASP", *CLAIMED)) for where, rate in (("homogeneous", "plain"), *PLACES)]
    return [
        Claim(
            f"{where}, {WORDS[rate]}: {method}: seconds to the loss",
            "",
            time_to("loss", where, rate, method),
            unit=" s",
        )
        for where, rate, methods in [*timed, ("homogeneous", "momentum", ("BSP", "ASP"))]
        for method in methods
    ]


def sooner(a: str, b: str, where: str, rate: str, by: str) -> Of:
    """Return the ratio of the times of b and a to the target."""
    return ratio(time_to(by, where, rate, b), time_to(by, where, rate, a))


def effect(method: str, where: str, rate: str, by: str) -> Of:
    """Return the ratio of the time to that of BSP on as many equal workers of the same total speed."""
    return ratio(time_to(f"{by}_even", where, rate, method), time_to(f"{by}_even", "homogeneous", rate, "BSP"))


def envelope(method: str, task: str) -> Of:
    """Return the ratio of the time to an error to that of the fastest fixed k; geometric mean over the errors.

    The fastest k is chosen by the mean over seeds, of those that arrive with all of them: in a single seed a k may be
    the fastest by chance.
    """

    def number(results: pd.DataFrame) -> pd.Series:
        runs = results[(results["setting"] == task) & (results["arm"] == "published")]
        columns = [f"error_{share:g}_s" for share in EARLY]
        fixed = runs[runs["paradigm"].isin(FIXED)].groupby("paradigm")[columns]
        soonest = fixed.agg(lambda times: times.mean(skipna=False)).min()
        own = runs[runs["paradigm"] == method].set_index("seed")[columns]
        return np.exp(np.log(own / soonest).mean(axis=1, skipna=False))

    return number


# ---- figures ----

COLOURS = {
    method: plotting.PARADIGM_COLOURS[method.lower()]
    for method in ("BSP", "ASP", "k-sync", "k-batch-sync", "k-async", "k-batch-async")
}
LOOKS = {"plain": {"marker": "o"}, "momentum": {"marker": "o", "markerfacecolor": "none"}}


def draw_times(results: pd.DataFrame, folder: Path) -> None:
    """The time to the loss of every method and seed; a cross at the right where a seed does not reach it."""
    rows = list(METHODS)[::-1]
    frame = results[results["setting"].isin(CLUSTERS) & results["paradigm"].isin(rows)]
    figure, axes = plotting.panels(1, len(CLUSTERS), height=4.4, sharey=True, sharex=True)
    right_s = 1.4 * frame["loss_s"].max()
    for axis, (where, words) in zip(axes[0], CLUSTERS.items(), strict=True):
        for height, (rate, look) in zip((0.15, -0.15), LOOKS.items(), strict=True):
            runs = frame[(frame["setting"] == where) & (frame["arm"] == rate)]
            for method in rows:
                target_s = runs["loss_s"][runs["paradigm"] == method]
                at = rows.index(method) + height
                style = {"color": COLOURS[method.split()[0]], "ls": "", "ms": 3.5, "mew": 0.7}
                axis.plot(target_s, [at] * len(target_s), **style, **look)
                if target_s.isna().any():
                    axis.plot(right_s, at, **style | {"marker": "x", "ms": 4})
            ideal = results[(results["setting"] == "homogeneous") & (results["arm"] == rate)]
            ideal_s = ideal["loss_s"][ideal["paradigm"] == "BSP"].mean()
            axis.axvline(ideal_s, lw=0.8, ls="-" if rate == "plain" else ":", color=plotting.GREY, zorder=0)
        axis.set(title=words, xscale="log")
        axis.set_yticks(range(len(rows)), rows)
        axis.tick_params(axis="y", length=0)
        axis.set_axisbelow(True)
        axis.grid(lw=0.3, axis="y")
    ticks = [t for t in (1, 2, 5, 10, 20, 50, 100) if t < right_s]
    axes[0, 0].set_xticks(ticks, labels=map(str, ticks))
    axes[0, 0].minorticks_off()
    figure.supxlabel("virtual time to the loss (s)", fontsize=8)
    grey = {"color": plotting.GREY, "ms": 3.5, "mew": 0.7}
    handles = [Line2D([], [], ls="", **grey, **look, label=WORDS[rate]) for rate, look in LOOKS.items()]
    handles += [
        Line2D([], [], ls="", **grey, marker="x", label="not with every seed"),
        Line2D([], [], color=plotting.GREY, lw=0.8, label="BSP with equal workers (dotted: momentum)"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    plotting.save(figure, frame.round(4), folder, "k-sync-times")


AT_S = (1.0, 3.0, 6.0, 12.0)


def draw_frontier(evaluations: pd.DataFrame, folder: Path) -> None:
    """Plot the error of k-sync: left against time for every k, right against k at some times, with AdaSync as one k."""
    greens = ("#c7e9c0", "#8fd08a", "#41ab5d", "#1b7837", "#00331a")
    colours = dict(zip((*FIXED, "k-sync loss"), (*greens, "#D55E00"), strict=True))
    labels = dict(zip(colours, (*(f"k = {k}" for k in (*KS, WORKERS)), "AdaSync"), strict=True))
    figure, axes = plotting.panels(len(TASKS), 2, height=4.8, sharey="row")
    frames = []
    for row, (task, share) in zip(axes, TASKS.items(), strict=True):
        runs = evaluations[(evaluations["setting"] == task) & (evaluations["arm"] == "published")]
        at = np.geomspace(0.5, runs.groupby(["paradigm", "seed"])["now_s"].max().min(), 120)
        curves = {method: curve(runs[runs["paradigm"] == method], at) for method in colours}
        for method, frame in curves.items():
            row[0].fill_between("now_s", "least", "largest", data=frame, alpha=0.15, lw=0, color=colours[method])
            row[0].plot("now_s", "mean", data=frame, label=labels[method], color=colours[method])
            frames.append(frame.assign(task=task, k=labels[method]))
        for time_s, marker in zip(AT_S, "osD^", strict=True):
            *errors, own = (np.interp(time_s, at, frame["mean"]) for frame in curves.values())
            row[1].plot(range(len(errors)), errors, marker=marker, ms=4, color=plotting.GREY, label=f"{time_s:g} s")
            row[1].plot(len(errors), own, marker=marker, ms=5, color=colours["k-sync loss"])
        words = f"{plotting.percent(share)} of labels random" if share else "all labels true"
        row[0].set(ylabel=f"{words}\nerror", xscale="log", yscale="log", ylim=(0.008, 0.3))
        row[0].set_yticks([0.01, 0.02, 0.05, 0.1, 0.2])
        row[0].set_xticks([0.5, 1, 2, 5, 10], labels=["0.5", "1", "2", "5", "10"])
        row[0].yaxis.set_major_formatter(plotting.percent)
        row[0].minorticks_off()
        row[1].set_xticks(range(len(labels)), [label.removeprefix("k = ") for label in labels.values()])
    axes[-1, 0].set_xlabel("virtual time (s)")
    axes[-1, 1].set_xlabel("k")
    axes[0, 0].set_title("error against time")
    axes[0, 1].set_title("error against k, after some times")
    axes[0, 1].legend(loc="upper left", bbox_to_anchor=(0, 1.02), ncols=len(AT_S), columnspacing=1.2)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(labels))
    plotting.save(figure, pd.concat(frames).round(4), folder, "k-sync-frontier")


def curve(runs: pd.DataFrame, at: np.ndarray) -> pd.DataFrame:
    """Mean, least and largest error of some runs at these times."""
    errors = [np.interp(at, run["now_s"], 1 - run["accuracy"]) for _, run in runs.groupby("seed")]
    return pd.DataFrame(
        {"now_s": at, "mean": np.mean(errors, 0), "least": np.min(errors, 0), "largest": np.max(errors, 0)}
    )


# ---- all of it ----


def tuned_runs(out: Path, seeds: int, processes: int, console: Console, length: float) -> pd.DataFrame:
    """Results with unlike workers, each method with its own best learning rate."""

    def make(method: str, factor: float, seed: int) -> Job:
        return job("heterogeneous", "plain", method, seed, length, factor)

    by, reported = ("loss_s", "accuracy_s"), range(FIRST_SEED, FIRST_SEED + seeds)
    return tuned("heterogeneous", RATED, make, lambda f: measure(f)[0], by, reported, out, processes, console)


def reproduce(out: Path, seeds: int, processes: int, console: Console, length: float = 1.0) -> pd.DataFrame:
    """Simulate what is missing in the folder, write results, claims and figures there, print the claims."""
    todo = jobs(seeds, length)
    simulate_all(todo, out / "runs", processes, console)
    rows, evaluations = zip(*(measure(out / "runs" / name) for name in todo), strict=True)
    results = pd.DataFrame(rows)
    draw_times(results, out)
    results = pd.concat([results, tuned_runs(out, seeds, processes, console, length)], ignore_index=True)
    draw_frontier(pd.concat(evaluations), out)
    title = f"k-sync, virtual time, {seeds} seeds: mean (95 % interval)"
    return conclude(claims(), results, out, console, title)
