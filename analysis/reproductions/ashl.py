"""ASHL against ADSP, and both against paradigms with waiting: time to a target with uneven workers and links.

Shen et al. (ASHL, IEEE Transactions on Computers 73(1), 2024) report at least 35 % less time than ADSP, and a better
model. Hu, Wang and Wu (ADSP, AAAI 2020) report up to 62.4 % less time than "existing schemes", and hardly any waiting.
The clusters are simulated; they have the same mean speed and more or less uneven workers and links. The parameters of
the methods and of the cluster are then varied one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MultipleLocator
from rich.console import Console

from hpcsync.config.job import Job
from hpcsync.figures import plotting
from hpcsync.run_dir import layout
from hpcsync.trace.reader import Trace, load
from reproductions.claims import Claim, Of, arrives_after_s, conclude, judged, mean_time, of, points, ratio, time_to
from reproductions.simulating import simulate_all
from reproductions.tuning import tuned

# ---- what is run ----

# Workers, and how uneven they are: the mean of their speeds / the least. The first one is where things are varied.
SETTINGS = ((10, 2.0), (10, 1.45), (10, 2.6), (10, 3.2), (4, 2.0), (4, 3.2), (18, 2.0), (18, 3.2))
BASE = "10-2"
MEAN_S, JITTER, BATCH = 0.02, 0.1, 16  # an iteration's seconds at the mean speed

# The perceptron is small, and so are the bandwidths: to push all of it the worker with the slowest link takes as long
# as so many iterations of mean speed, as ResNet-18 does at 2 to 10 Gbit/s beside iterations of 20 to 100 ms. The
# fastest link is SPREAD times as fast, and the server's as fast as all of theirs together.
PARAMETERS = 64 * 64 + 64 + 64 * 10 + 10
SLOWEST, SPREAD = 2.0, 8.0
LINKS = (0.125, 0.5, 2.0, 8.0, 32.0)
PERIODS_S = (0.25, 0.5, 1.0, 2.0, 4.0)  # ADSP's check period; it commits at most six times in one
PERIOD_S = 1.0

# Steps are chosen for each family, with other seeds: local models are averaged, gradients are scaled by 1 / workers.
LOCAL_LR, SERVER_LR = 0.2, 0.4
RATES = {"half": 0.5, "double": 2.0}


@dataclass(frozen=True)
class Method:
    """codec: of pushes, None for none. lr: a worker's, or the server's."""

    paradigm: Mapping[str, Any]
    codec: Mapping[str, Any] | None = None
    lr: float = LOCAL_LR


STEPS = 16  # local ones; of ASHL's slowest worker
TRAINED = 1.75  # the training loss that ADSP's search aims at; with so many labels drawn anew none is below 1.68
TOP_K: dict[str, Any] = {"name": "top-k"}
FEEDBACK = TOP_K | {"error_feedback": True}


def ashl(codec: Mapping[str, Any] | None = TOP_K, **options: Any) -> Method:
    return Method({"name": "ashl", "steps_coarse": STEPS, "warmup": 2, "profiled": 8, **options}, codec)


def adsp(codec: Mapping[str, Any] | None = None, period_s: float = PERIOD_S, **options: Any) -> Method:
    aim = {} if "commits" in options else {"loss_target": TRAINED}
    return Method({"name": "adsp", "check_period_s": period_s, **aim, **options}, codec)


FIXED = 3  # commits a period, of COMMITS, with other seeds, the soonest to the accuracy and the second to the loss
COMMITS = (1, 2, 3, 4, 6)
METHODS = {
    "BSP": Method({"name": "bsp"}, lr=SERVER_LR),
    "ASP": Method({"name": "asp"}, lr=SERVER_LR),
    "SSP": Method({"name": "ssp", "staleness": 3}, lr=SERVER_LR),
    "local SGD": Method({"name": "local-sgd", "steps": STEPS}),
    "ADSP": adsp(),
    "ADSP, fixed": adsp(commits=FIXED),
    "ADSP, top-k": adsp(TOP_K | {"ratio": 0.05}),
    "ASHL": ashl(),
    "ASHL, feedback": ashl(FEEDBACK),
}
RATED = tuple(METHODS)  # each with its own best learning rate
WAITING = ("BSP", "SSP", "local SGD")
SHORT = "ASHL, of 2 pushes"  # its profile: the shortest that there is
SWEPT = ("ADSP", "ADSP, fixed", "ADSP, top-k", "ASHL", SHORT)  # where links are varied
TUNED = ("BSP", "ASP", "ADSP", "ADSP, fixed", "ASHL")  # where steps are

# ASHL with one thing another, by what it is about.
PARTS = {
    "H": {
        **{f"coarse {n}": ashl(steps_coarse=n, steps_fine=min(n, 4)) for n in (4, 8, 32)},
        **{f"fine {n}, from loss 2.0": ashl(steps_fine=n, loss_preset=2.0) for n in (1, 16)},
    },
    "switch": {
        "never": ashl(loss_preset=0.0),
        "at once": ashl(loss_preset=100.0),
        "at loss 2.0": ashl(loss_preset=2.0),
        "at loss 1.85": ashl(loss_preset=1.85),
    },
    "R": {
        "dense": ashl(None),
        "feedback": ashl(FEEDBACK),
        **{f"{r:g}": ashl(ratio_coarse=r, ratio_fine=r) for r in (0.01, 0.1)},
        **{f"{r:g}, feedback": ashl(FEEDBACK, ratio_coarse=r, ratio_fine=r) for r in (0.01, 0.1)},
    },
    "share": {"equal": ashl(share="equal")},
    "profile": {"of 2 pushes": ashl(warmup=0, profiled=2), "of 30 pushes": ashl(warmup=10, profiled=20)},
}
VARIANTS = {f"ASHL, {name}": method for parts in PARTS.values() for name, method in parts.items()}
EXTRA = {f"ADSP, {n} commits": adsp(commits=n) for n in COMMITS if n != FIXED} | {
    "ADSP, released": adsp(rule="released")
}

ACCURACY, LOSSES = 0.96, (0.92, 0.88, 0.84)  # held out; "to the loss": the geometric mean of the times to these
RELABELLED = 0.5  # of the labels drawn anew at every read: it takes some hundred iterations of each worker
EVERY, SMOOTHED = 400, 5  # samples from one evaluation to the next; evaluations of which the mean is taken

# ADSP by how its commits are found: by losses of commits, by evaluations, or given. The search by evaluations aims at
# the middle one of the losses. ASHL as it is, and with a fine stage that begins before the targets.
EVALUATED, FINE = "ADSP, evaluated", "ASHL, at loss 2.0"
SEARCHES = {
    "ADSP": METHODS["ADSP"],
    EVALUATED: adsp(loss="evaluation", loss_target=LOSSES[1]),
    "ADSP, fixed": METHODS["ADSP, fixed"],
    "ASHL": METHODS["ASHL"],
    FINE: VARIANTS[FINE],
}
SEARCHED = (EVALUATED, "ASHL", FINE)  # where links are varied
SEARCHES_RATED = ("ADSP", *SEARCHED)

# Both readings of when the commit of a worker that waits is applied, with a fine stage that begins before the targets.
BOUNDS = (0, 2)
READINGS = {
    f"ASHL, {commit.replace('-', ' ')}, staleness {bound}": ashl(loss_preset=2.0, staleness=bound, commit=commit)
    for bound in BOUNDS
    for commit in ("on-arrival", "after-gate")
}

FIRST_SEED = 4  # 1 to 3 have been used to choose steps, commits, label noise, links and targets


def jobs(seeds: int, length: float = 1.0) -> dict[str, Job]:
    """Every run, by the name of its folder. length: of all runs, for a quick look."""
    runs: dict[tuple[str, str, str], tuple[Method, int, float, float]] = {}
    for workers, unevenness in SETTINGS:
        for name, method in METHODS.items():
            runs[setting_of(workers, unevenness), "main", name] = method, workers, unevenness, SLOWEST
    workers, unevenness = SETTINGS[0]
    every = METHODS | VARIANTS | EXTRA
    for name, method in (VARIANTS | EXTRA).items():
        runs[BASE, "main", name] = method, workers, unevenness, SLOWEST
    for slowest in LINKS:
        for name in SWEPT:
            runs[BASE, arm_of("links", slowest), name] = every[name], workers, unevenness, slowest
    for period_s in PERIODS_S:
        runs[BASE, arm_of("period", period_s), "ADSP"] = adsp(period_s=period_s), workers, unevenness, SLOWEST
    for rate, factor in RATES.items():
        for name in TUNED:
            method = replace(every[name], lr=factor * every[name].lr)
            runs[BASE, rate, name] = method, workers, unevenness, SLOWEST
    return {
        name_of(*run, seed): job(f"{run[0]}-{run[1]}-{run[2]}", *made, seed, length)
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
        for run, made in runs.items()
    }


def searching_jobs(seeds: int, length: float = 1.0) -> dict[str, Job]:
    """Return the runs of `SEARCHES` in every setting, and of `SEARCHED` on every link, by their folders."""
    runs = [(setting, "main", SLOWEST, name) for setting in SETTINGS for name in SEARCHES]
    runs += [
        (SETTINGS[0], arm_of("links", slowest), slowest, name)
        for slowest in LINKS
        if slowest != SLOWEST
        for name in SEARCHED
    ]
    return {
        name_of(setting_of(*setting), arm, name, seed): job(
            f"{setting_of(*setting)}-{arm}-{name}", SEARCHES[name], *setting, slowest, seed, length
        )
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
        for setting, arm, slowest, name in runs
    }


def reading_jobs(seeds: int, length: float = 1.0) -> dict[str, Job]:
    """Return the runs of `READINGS`, by the names of their folders."""
    return {
        name_of(BASE, "main", name, seed): job(f"{BASE}-main-{name}", method, *SETTINGS[0], SLOWEST, seed, length)
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
        for name, method in READINGS.items()
    }


def setting_of(workers: int, unevenness: float) -> str:
    return f"{workers}-{unevenness:g}"


def arm_of(varied: str, value: float) -> str:
    """Return the arm of a varied value; a value equal to that of "main" is not run again."""
    return "main" if value == {"links": SLOWEST, "period": PERIOD_S}[varied] else f"{varied}-{value:g}"


def name_of(setting: str, arm: str, method: str, seed: int) -> str:
    return f"{setting}/{arm}/{method.replace(' ', '_')}/{seed}"


def job(name: str, method: Method, workers: int, unevenness: float, slowest: float, seed: int, length: float) -> Job:
    paradigm = dict(method.paradigm)
    scaled = {} if paradigm["name"] in ("ashl", "adsp", "local-sgd") else {"async_lr_scale": "1/workers"}
    table: dict[str, Any] = {
        "name": name.replace(", ", "-").replace(" ", "-"),
        "seed": seed,
        "workload": {
            "name": "reproductions.relabelled:perceptron",
            "options": {"share": RELABELLED},
            "batch_size": BATCH,
        },
        "optimizer": {"name": "sgd", "lr": method.lr, **scaled},
        "stop": {"samples": round(length * samples_of(workers))},
        "evaluation": {"every_samples": EVERY},
        "paradigm": paradigm,
        "cluster": cluster(workers, unevenness, slowest),
    }
    if paradigm["name"] == "local-sgd":
        table["cluster"]["servers"] = 0
        del table["cluster"]["network"]["server_bandwidth_gbit"]
    return Job.from_table(table | ({} if method.codec is None else {"compression": dict(method.codec)}))


def samples_of(workers: int) -> int:
    return 25_000 + 5_000 * workers


def cluster(workers: int, unevenness: float, slowest: float) -> dict[str, Any]:
    """Speeds from slow to fast in equal steps, links from slow to fast by equal factors, in an order of their own."""
    seconds = MEAN_S * unevenness / np.linspace(1.0, 2 * unevenness - 1, workers)
    rank = (3 * np.arange(1, workers + 1) - 1) % (workers + 1)  # of a worker's link; of 4, 10 and 18 a permutation
    bytes_per_s = 4 * PARAMETERS / (slowest * MEAN_S) * np.geomspace(1.0, SPREAD, workers)[rank]
    gbit = bytes_per_s * 8e-9
    return {
        "workers": workers,
        "compute": {"model": "lognormal", "seconds": seconds.tolist(), "jitter": JITTER},
        "network": {"bandwidth_gbit": gbit.tolist(), "server_bandwidth_gbit": float(gbit.sum())},
    }


# ---- what came of it ----


def measure(folder: Path) -> dict[str, Any]:
    """The results of a run.

    accuracy_s, loss_s: to these targets; not known where they have not been reached, and ..._at_least_s is then what
    follows from how long the run was. waits: the share of the workers' time. waits_after: the same since the last
    search, if any, ended.
    """
    trace = load(folder / layout.TRACE)
    setting, arm, method, seed = folder.parts[-4:]
    updates, evaluations = trace.tables["updates"], trace.frame("evaluations")
    over_s = float(updates["now_s"][-1])  # what is still computed when the run is over counts for nothing
    smooth = evaluations[["accuracy", "loss"]].rolling(SMOOTHED, 1, center=True).mean()
    now_s = evaluations["now_s"]
    accurate_s = first_s(now_s, smooth["accuracy"] >= ACCURACY)
    times = {
        "accuracy": (accurate_s, arrives_after_s(accurate_s, over_s)),
        "loss": mean_time([first_s(now_s, smooth["loss"] <= loss) for loss in LOSSES], over_s),
    }
    row: dict[str, Any] = {"setting": setting, "arm": arm, "paradigm": method.replace("_", " "), "seed": int(seed)}
    for by, (time_s, at_least_s) in times.items():
        row |= {f"{by}_s": time_s, f"{by}_at_least_s": at_least_s}
    ends = evaluations["samples"] >= 0.9 * updates["samples"][-1]
    rows = trace.tables["pushes" if trace.job.has_servers else "exchanges"]
    rows = rows[rows["now_s"] <= over_s]
    searched_s = end_of_search_s(trace)
    return row | {
        "error": 1 - evaluations["accuracy"][ends].mean(),
        "duration_s": over_s,
        "search_s": searched_s,
        "samples": updates["samples"][-1],
        "pushes": len(rows),
        "megabytes": rows["wire_bytes"].sum() / 1e6,
        "transfers": share_of("comm_s", rows),
        "waits": share_of("wait_s", rows),
        "waits_after": share_of("wait_s", rows[rows["now_s"] > searched_s]) if trace.job.has_servers else np.nan,
        "coarse_s": stage_s(trace, 1.0),
        "fine_s": stage_s(trace, 2.0),
        **ratios(trace),
    }


def measure_search(folder: Path) -> dict[str, Any]:
    """The same with `found`: commits a period that the first search found, or the given ones."""
    trace = load(folder / layout.TRACE)
    rows, paradigm = trace.tables["decisions"], trace.job.paradigm
    if paradigm.name != "adsp":
        return measure(folder) | {"found": np.nan}
    chosen = rows["chosen"][rows["controller"] == b"commits"]
    found = paradigm.commits if paradigm.commits is not None else chosen[0] if len(chosen) else np.nan
    return measure(folder) | {"found": float(found)}


def first_s(now_s: pd.Series, reached: pd.Series) -> float:
    """When it was first so; NaN for never."""
    return float(now_s[reached].min())


def share_of(column: str, rows: np.ndarray) -> float:
    spent_s = sum(float(rows[name].sum()) for name in ("load_s", "compute_s", "wait_s", "comm_s"))
    return float(rows[column].sum()) / spent_s if spent_s else np.nan


def end_of_search_s(trace: Trace) -> float:
    """0 without a search; NaN for one that goes on to the end of the run."""
    paradigm, rows = trace.job.paradigm, trace.tables["decisions"]
    rows = rows[rows["controller"] != b"evaluated"]
    if paradigm.name != "adsp" or paradigm.commits is not None:
        return 0.0
    return float(rows["now_s"][-1]) if len(rows) and rows["controller"][-1] == b"commits" else np.nan


def stage_s(trace: Trace, stage: float) -> float:
    """When ASHL's stage began; NaN for never."""
    if trace.job.paradigm.name != "ashl":
        return np.nan
    rows = trace.tables["decisions"]
    begins = rows["now_s"][(rows["controller"] == b"stage") & (rows["chosen"] == stage)]
    return float(begins[0]) if len(begins) else np.nan


def ratios(trace: Trace) -> dict[str, float]:
    """R of ASHL's coarse stage, of the workers with the slowest link and the fastest; NaN where there is none."""
    rows, gbit = trace.tables["decisions"], trace.job.cluster.network.bandwidth_gbit
    chosen = rows["chosen"][rows["controller"] == b"ratio"][: len(gbit)]
    ends = (chosen[np.argmin(gbit)], chosen[np.argmax(gbit)]) if len(chosen) else (np.nan, np.nan)
    return dict(zip(("ratio_slowest", "ratio_fastest"), map(float, ends), strict=True))


# ---- what is claimed ----

LESS, NO_LATER = 0.65, 1.1  # ASHL's time / ADSP's; times as long counts as no other
FASTER = 1 - 0.624  # ADSP's time / that of who waits
PRINTED = "at most 0.65"  # "over 35 % less time than ADSP"
WAITS = 0.02  # counts as nearly no waiting
BY = ("loss", "accuracy")  # the targets


def in_words(workers: int, unevenness: float) -> str:
    return f"{workers} workers, H = {unevenness:g}"


def claims() -> list[Claim]:
    found = []
    for workers, unevenness in SETTINGS:
        setting, words = setting_of(workers, unevenness), in_words(workers, unevenness)
        for by in BY:
            for method in ("ASHL", "ASHL, feedback"):
                says = f"{words}, by the {by}: {method}'s time / ADSP's"
                found.append(Claim(says, PRINTED, time_ratio(method, "ADSP", setting, by=by), high=LESS))
            says = f"{words}, by the {by}: ASHL's time / that of ADSP with fixed commits"
            found.append(Claim(says, "", time_ratio("ASHL", "ADSP, fixed", setting, by=by), high=LESS))
            says = f"{words}, by the {by}: the same, ASHL's time after its profile"
            found.append(Claim(says, "", after_profile("ASHL", "ADSP, fixed", setting, by), high=LESS))
        better = points(of("error", setting, "main", "ADSP"), of("error", setting, "main", "ASHL"))
        says = f"{words}: ADSP's error above ASHL's after as many samples"
        found.append(Claim(says, "", better, low=0.0, unit=" points", expected="more than 0"))
        for other in (*WAITING, "ASP"):
            says = f"{words}, by the loss: ADSP's time / {other}'s"
            published = "down to 0.38" if other in WAITING else ""
            found.append(Claim(says, published, time_ratio("ADSP", other, setting), high=NO_LATER))
        waits = of("waits_after", setting, "main", "ADSP")
        found.append(
            Claim(
                f"{words}: share of time that ADSP's workers wait after its search", "", waits, high=WAITS, expected="0"
            )
        )
        waits = of("waits", setting, "main", "ADSP")
        found.append(Claim(f"{words}: the same with its search", "", waits, high=WAITS))
        says = f"{words}: bytes moved by ASHL / by ADSP"
        moved = ratio(of("megabytes", setting, "main", "ASHL"), of("megabytes", setting, "main", "ADSP"))
        found.append(Claim(says, "", moved, high=1.0))
        sent = ratio(of("ratio_slowest", setting, "main", "ASHL"), of("ratio_fastest", setting, "main", "ASHL"))
        says = f"{words}: R of ASHL's slowest link / of its fastest"
        found.append(Claim(says, "", sent, high=1.0, expected="less than 1"))
    for other in WAITING:
        says = f"least of ADSP's time / {other}'s, by the loss"
        found.append(Claim(says, "down to 0.38", least_of_settings("ADSP", other), high=FASTER))
    return found + with_own_rates() + variations()


def with_own_rates() -> list[Claim]:
    """The same comparisons, each method with the best of its own learning rates."""
    found = []
    for by in BY:
        words = f"each with its own best rate, by the {by}"
        for method in ("ASHL", "ASHL, feedback"):
            number = time_ratio(method, "ADSP", BASE, "tuned", "tuned", by)
            found.append(Claim(f"{words}: {method}'s time / ADSP's", PRINTED, number, high=LESS))
        for other in (*WAITING, "ASP"):
            number = time_ratio("ADSP", other, BASE, "tuned", "tuned", by)
            published = "down to 0.38" if other in WAITING else ""
            found.append(Claim(f"{words}: ADSP's time / {other}'s", published, number, high=NO_LATER))
    return found


def variations() -> list[Claim]:
    """Vary one parameter at a time; the variants are not in the papers."""
    found = []
    for slowest in LINKS:
        arm, words = arm_of("links", slowest), f"slowest link {slowest:g} iterations a push, by the loss"
        for other in ("ADSP", "ADSP, fixed", "ADSP, top-k"):
            number = time_ratio("ASHL", other, BASE, arm, arm)
            found.append(Claim(f"{words}: ASHL's time / that of {other}", "", number, high=LESS, expected=PRINTED))
        number = time_ratio(SHORT, "ADSP", BASE, arm, arm)
        says = f"{words}: the time of ASHL with a profile of 2 pushes / ADSP's"
        found.append(Claim(says, "", number, high=LESS, expected=PRINTED))
    number = time_ratio("ASHL", "ADSP, 1 commits", BASE)
    found.append(Claim("by the loss: ASHL's time / ADSP's with one commit a period", "", number, high=LESS))
    number = time_ratio(SHORT, "ADSP", BASE, by="accuracy")
    says = "by the accuracy: the time of ASHL with a profile of 2 pushes / ADSP's"
    found.append(Claim(says, "", number, high=LESS, expected=PRINTED))
    for period_s in PERIODS_S:
        number = time_ratio("ASHL", "ADSP", BASE, "main", arm_of("period", period_s))
        says = f"ADSP with a check period of {period_s / MEAN_S:g} iterations, by the loss: ASHL's time / its"
        found.append(Claim(says, "", number, high=LESS, expected=PRINTED))
    for words, varied, at, unit in (
        ("how many iterations the slowest link must take for a push", "links", LINKS, 1.0),
        ("how many iterations ADSP's check period must have", "period", PERIODS_S, MEAN_S),
    ):
        says = f"{words} for ASHL to need at most 0.65 of its time"
        usual = {"links": SLOWEST, "period": PERIOD_S}[varied] / unit
        found.append(Claim(says, "", holds_from(varied, at, unit), high=usual))
    for rate in RATES:
        number = time_ratio("ASHL", "ADSP", BASE, rate, rate)
        found.append(Claim(f"{rate} the step of both, by the loss: ASHL's time / ADSP's", "", number, high=LESS))
        for method in TUNED:
            number = time_ratio(method, method, BASE, rate)
            found.append(Claim(f"{rate} the step: {method}'s time / with its own", "", number, low=1 / NO_LATER))
    for method in VARIANTS:
        number = time_ratio(method, "ASHL", BASE)
        found.append(Claim(f"{method}: time / ASHL's, by the loss", "", number, 1 / NO_LATER, NO_LATER))
    for method in EXTRA:
        number = time_ratio(method, "ADSP", BASE)
        found.append(Claim(f"{method}: time / ADSP's, by the loss", "", number, 1 / NO_LATER, NO_LATER))
    return found


def table_claims() -> list[Claim]:
    """Report times, errors and bytes of all methods, and compare ASHL's parts, by the tables of the figures."""
    found = []
    for method in METHODS:
        for setting in SETTINGS:
            for by in BY:
                number = of(f"{by}_s", setting_of(*setting), "main", method)
                found.append(Claim(f"{in_words(*setting)}, by the {by}: {method}'s time", "", number, unit=" s"))
        error, sent = (of(column, BASE, "main", method) for column in ("error", "megabytes"))
        words = in_words(*SETTINGS[0])
        found.append(Claim(f"{words}: {method}'s error", "", percent(error), unit=" %"))
        found.append(Claim(f"{words}: bytes moved by {method}", "", sent, unit=" MB"))
    for method in VARIANTS:
        for by in BY:
            own, of_ashl, of_adsp = (of(f"{by}_s", BASE, "main", each) for each in (method, "ASHL", "ADSP"))
            says = f"{method}, by the {by}: time / ASHL's"
            found.append(Claim(says, "", ratio(own, of_ashl), 1 / NO_LATER, NO_LATER))
            says = f"{method}, by the {by}: time / ADSP's"
            found.append(Claim(says, "", ratio(own, of_adsp), high=LESS, expected=PRINTED))
        number = points(of("error", BASE, "main", method), of("error", BASE, "main", "ASHL"))
        found.append(Claim(f"{method}: error above ASHL's after as many samples", "", number, unit=" points"))
    return found


def table_results(folder: Path) -> pd.DataFrame:
    """Return the runs that the tables of `draw_times` and `draw_parts` in the folder hold."""
    parts = pd.read_csv(folder / "ashl-parts.csv").assign(setting=BASE, arm="main")
    return pd.concat([pd.read_csv(folder / "ashl-times.csv"), parts]).drop_duplicates(KEYS)


KEYS = ["setting", "arm", "paradigm", "seed"]  # of a run


def reading_claims() -> list[Claim]:
    """Compare both readings of when a commit is applied; the share of time that workers wait is what can differ."""
    found = []
    for bound in BOUNDS:
        at_once, later = (f"ASHL, {commit}, staleness {bound}" for commit in ("on arrival", "after gate"))
        words = f"fine stage from loss 2.0, staleness {bound}"
        for by in BY:
            number = time_ratio(later, at_once, BASE, by=by)
            says = f"{words}, by the {by}: time with commits after the gate / with commits on arrival"
            found.append(Claim(says, "", number, 1 / NO_LATER, NO_LATER))
        number = of("waits", BASE, "main", later)
        found.append(Claim(f"{words}: share of time that workers wait with commits after the gate", "", number))
        number = points(of("error", BASE, "main", later), of("error", BASE, "main", at_once))
        says = f"{words}: error with commits after the gate above that with commits on arrival"
        found.append(Claim(says, "", number, unit=" points"))
    return found


SAID = {"ASHL": "ASHL's time", FINE: "time of ASHL with a fine stage from loss 2.0"}
FAIR = "that of ADSP with a search by evaluations"


def searching_claims() -> list[Claim]:
    """ASHL, as it is and with a fine stage before the targets, against ADSP by how its commits are found."""
    found = []
    for workers, unevenness in SETTINGS:
        setting, words = setting_of(workers, unevenness), in_words(workers, unevenness)
        for by in BY:
            found += against_searches(setting, f"{words}, by the {by}", by)
        better = points(of("error", setting, "main", "ADSP"), of("error", setting, "main", FINE))
        says = f"{words}: ADSP's error above that of ASHL with a fine stage from loss 2.0"
        found.append(Claim(says, "", better, low=0.0, unit=" points", expected="more than 0"))
        says = f"{words}: commits a period that the search by evaluations finds"
        found.append(Claim(says, "", of("found", setting, "main", EVALUATED), unit=" commits"))
    for by in BY:
        for slowest in LINKS:
            arm, words = arm_of("links", slowest), f"slowest link {slowest:g} iterations a push, by the {by}"
            for method, said in SAID.items():
                number = time_ratio(method, EVALUATED, BASE, arm, arm, by)
                found.append(Claim(f"{words}: {said} / {FAIR}", "", number, high=LESS, expected=PRINTED))
        words = f"each with its own best rate, by the {by}"
        for method, said in SAID.items():
            number = time_ratio(method, EVALUATED, BASE, "tuned", "tuned", by)
            found.append(Claim(f"{words}: {said} / {FAIR}", PRINTED, number, high=LESS))
        number = time_ratio(FINE, "ADSP", BASE, "tuned", "tuned", by)
        found.append(Claim(f"{words}: {SAID[FINE]} / ADSP's", PRINTED, number, high=LESS))
        number = time_ratio(EVALUATED, "ADSP", BASE, "tuned", "tuned", by)
        found.append(Claim(f"{words}: time of ADSP with a search by evaluations / by commits", "", number))
    return found


def against_searches(setting: str, words: str, by: str) -> list[Claim]:
    """Compare times to one target in one setting."""
    found = []
    for method, said in SAID.items():
        found.append(
            Claim(f"{words}: {said} / {FAIR}", PRINTED, time_ratio(method, EVALUATED, setting, by=by), high=LESS)
        )
        says = f"{words}: {said} after its profile / {FAIR}"
        found.append(Claim(says, "", after_profile(method, EVALUATED, setting, by), high=LESS))
    for other, its, published in (
        ("ADSP", "ADSP's", PRINTED),
        ("ADSP, fixed", f"that of ADSP with {FIXED} commits a period", ""),
    ):
        number = time_ratio(FINE, other, setting, by=by)
        found.append(Claim(f"{words}: {SAID[FINE]} / {its}", published, number, high=LESS))
    number = time_ratio(FINE, "ASHL", setting, by=by)
    found.append(Claim(f"{words}: {SAID[FINE]} / ASHL's", "", number, 1 / NO_LATER, NO_LATER))
    begins = ratio(of("fine_s", setting, "main", FINE), of(f"{by}_at_least_s", setting, "main", FINE))
    found.append(Claim(f"{words}: when that fine stage begins / the time to the target", "", begins, high=1.0))
    for other, its in (("ADSP", "by commits"), ("ADSP, fixed", f"with {FIXED} commits a period")):
        number = time_ratio(EVALUATED, other, setting, by=by)
        found.append(Claim(f"{words}: time of ADSP with a search by evaluations / {its}", "", number))
    return found


def time_ratio(a: str, b: str, setting: str, arm: str = "main", other_arm: str = "main", by: str = "loss") -> Of:
    """a's time to the target / b's, within bounds where one of them does not reach it."""
    return ratio(time_to(by, setting, arm, a), time_to(by, setting, other_arm, b))


def percent(a: Of) -> Of:
    return lambda results: 100 * a(results)


def after_profile(a: str, b: str, setting: str, by: str) -> Of:
    """Return the ratio of the times to the target, that of `a` counted from the end of its profile."""
    target_s, profile_s = time_to(by, setting, "main", a), of("coarse_s", setting, "main", a)
    return ratio(lambda results: target_s(results).sub(profile_s(results), axis=0), time_to(by, setting, "main", b))


def least_of_settings(a: str, b: str) -> Of:
    """Return the ratio of times in the setting in which its mean is the least.

    The setting is chosen by the mean over seeds: in a single seed a setting may have the least by chance.
    """
    each = [time_ratio(a, b, setting_of(*setting)) for setting in SETTINGS]

    def mean(ratios: pd.DataFrame) -> float:
        found = float(np.log(ratios["high"]).mean(skipna=False))
        return math.inf if math.isnan(found) else found

    def number(results: pd.DataFrame) -> pd.DataFrame:
        return min((one(results) for one in each), key=mean)

    return number


def holds_from(varied: str, at: tuple[float, ...], unit: float) -> Of:
    """The least of what was tried from which on the claim holds, in these units; not known if not at the last."""

    def number(results: pd.DataFrame) -> pd.Series:
        arms = [arm_of(varied, value) for value in at]
        each = [time_ratio("ASHL", "ADSP", BASE, arm if varied == "links" else "main", arm)(results) for arm in arms]
        ratios = pd.concat([of_arm["high"] for of_arm in each], axis=1)
        holds = ratios.to_numpy() <= LESS
        from_here = np.logical_and.accumulate(holds[:, ::-1], axis=1)[:, ::-1]
        first = np.where(from_here.any(axis=1), np.array(at)[from_here.argmax(axis=1)] / unit, np.nan)
        return pd.Series(first, index=ratios.index)

    return number


# ---- figures ----

COLOURS = {
    method: plotting.PARADIGM_COLOURS[method.lower().replace(" ", "-")]
    for method in ("BSP", "ASP", "SSP", "local SGD", "ADSP", "ASHL")
}
CROSS = {"marker": "x", "ms": 4}


def colour(method: str) -> str:
    return COLOURS[method.split(",")[0]]


def draw_times(results: pd.DataFrame, folder: Path) -> None:
    """The time to the loss and the accuracy of every method and seed; a cross where a seed does not reach it."""
    rows = list(METHODS)[::-1]
    frame = results[(results["arm"] == "main") & results["paradigm"].isin(rows)]
    figure, axes = plotting.panels(2, 4, height=4.4, sharey=True, sharex=True)
    looks = {"loss": {"marker": "o"}, "accuracy": {"marker": "o", "markerfacecolor": "none"}}
    right_s = 1.2 * frame[["loss_s", "accuracy_s"]].max().max()
    for axis, (workers, unevenness) in zip(axes.flat, sorted(SETTINGS), strict=True):
        runs = frame[frame["setting"] == setting_of(workers, unevenness)]
        for height, (by, look) in zip((0.15, -0.15), looks.items(), strict=True):
            for method in rows:
                target_s = runs[f"{by}_s"][runs["paradigm"] == method]
                at = rows.index(method) + height
                style = {"color": colour(method), "ls": "", "ms": 3.5, "mew": 0.7}
                axis.plot(target_s, [at] * len(target_s), **style, **look)
                if target_s.isna().any():
                    axis.plot(right_s, at, **style | CROSS)
        axis.set(title=in_words(workers, unevenness), xscale="log")
        axis.set_yticks(range(len(rows)), rows)
        axis.tick_params(axis="y", length=0)
        axis.set_axisbelow(True)
        axis.grid(lw=0.3, axis="y")
    seconds_at(axes[0, 0], right_s)
    figure.supxlabel("virtual time to the target (s)", fontsize=8)
    grey = {"color": plotting.GREY, "ls": "", "ms": 3.5, "mew": 0.7}
    handles = [Line2D([], [], **grey, **look, label=f"to the {by}") for by, look in looks.items()]
    if frame["loss_s"].isna().any() or frame["accuracy_s"].isna().any():
        handles.append(Line2D([], [], **grey | CROSS, label="not with every seed"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    plotting.save(figure, frame.round(4), folder, "ashl-times")


def seconds_at(axis: Axes, right_s: float) -> None:
    ticks = [t for t in (1, 2, 5, 10, 20, 50, 100) if t < right_s]
    axis.set_xticks(ticks, labels=map(str, ticks))
    axis.minorticks_off()


LINES = {  # of whose time is divided by whose
    ("ASHL", "ADSP"): ("ASHL / ADSP", {"color": "#000000"}),
    ("ASHL", "ADSP, fixed"): (f"ASHL / ADSP, {FIXED} commits a period", {"color": "#000000", "ls": plotting.DASHES[1]}),
    ("ASHL", "ADSP, top-k"): ("ASHL / ADSP with top-k", {"color": "#000000", "ls": plotting.DASHES[2]}),
    (SHORT, "ADSP"): ("ASHL, profile of 2 pushes / ADSP", {"color": plotting.LINE_COLOURS[3]}),
}


def draw_where(results: pd.DataFrame, folder: Path) -> None:
    """ASHL's time / ADSP's, against how slow links are, how long ADSP's period is, how uneven workers are."""
    workers = SETTINGS[0][0]
    uneven = sorted(unevenness for n, unevenness in SETTINGS if n == workers)
    periods = [each / MEAN_S for each in PERIODS_S]
    main = [BASE, "main"]
    panels: tuple[tuple[str, list[float], list[list[str]], list[list[str]]], ...] = (
        ("slowest link, iterations a push", list(LINKS), *2 * [[[BASE, arm_of("links", at)] for at in LINKS]]),
        ("check period of ADSP, iterations", periods, [main] * 5, [[BASE, arm_of("period", at)] for at in PERIODS_S]),
        ("H, mean / least speed", uneven, *2 * [[[setting_of(workers, at), "main"] for at in uneven]]),
    )
    figure, axes = plotting.panels(1, 3, height=2.9, sharey=True)
    frames = []
    for axis, (words, at, of_ashl, of_adsp) in zip(axes[0], panels, strict=True):
        for (method, other), (label, look) in LINES.items():
            pairs = zip(of_ashl, of_adsp, strict=True)
            columns = [ratio(of("loss_s", *a, method), of("loss_at_least_s", *b, other))(results) for a, b in pairs]
            numbers = pd.concat(columns, axis=1)
            if len(numbers) and numbers.notna().any().all():
                least, largest, mean = numbers.min(), numbers.max(), numbers.mean(skipna=False)
                axis.fill_between(at, least, largest, color=look["color"], alpha=0.1, lw=0)
                axis.plot(at, mean, marker="o", ms=3, label=label, **look)
                seen = {"varied": words, "at": at, "ratio": label, "mean": mean, "least": least, "largest": largest}
                frames.append(pd.DataFrame(seen))
        axis.axhline(1.0, lw=0.6, color=plotting.GREY, zorder=0)
        axis.axhline(LESS, lw=0.8, ls=":", color=plotting.GREY, zorder=0)
        axis.set(xlabel=words, xscale="log")
        axis.set_xticks(at, labels=[f"{each:g}" for each in at])
        axis.minorticks_off()
    axes[0, 0].set(ylabel="ratio of times to the loss", ylim=(0, None))
    axes[0, 2].text(uneven[0], LESS, "published", color=plotting.GREY, va="bottom", fontsize=7)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    plotting.save(figure, pd.concat(frames).round(4) if frames else pd.DataFrame(), folder, "ashl-where")


def draw_parts(results: pd.DataFrame, folder: Path) -> None:
    """Plot time to the loss and final error of ASHL with one parameter varied; lines mark ASHL unchanged."""
    labels = {f"ASHL, {name}": f"{part}: {name}" for part, parts in PARTS.items() for name in parts}
    rows = ["ASHL", *labels][::-1]
    runs = results[(results["setting"] == BASE) & (results["arm"] == "main") & results["paradigm"].isin(rows)]
    figure, axes = plotting.panels(1, 2, height=4.0, sharey=True)
    for axis, column in zip(axes[0], ("loss_s", "error"), strict=True):
        axis.axvline(runs[column][runs["paradigm"] == "ASHL"].mean(), lw=0.8, color=plotting.GREY, zorder=0)
        for method in rows:
            numbers = runs[column][runs["paradigm"] == method]
            at = rows.index(method)
            axis.plot(numbers, [at] * len(numbers), "o", ms=3, mew=0.7, mfc="none", color=colour(method))
            axis.plot(numbers.mean(skipna=False), at, "|", ms=9, color=colour(method))
        axis.set_yticks(range(len(rows)), [labels.get(method, "ASHL") for method in rows])
        axis.tick_params(axis="y", length=0)
        axis.set_axisbelow(True)
        axis.grid(lw=0.3, axis="y")
    axes[0, 0].set(xlabel="virtual time to the loss (s)", xlim=(0, None))
    axes[0, 1].set(xlabel="error after as many samples", xlim=(0, None))
    axes[0, 1].xaxis.set_major_locator(MultipleLocator(0.01))
    axes[0, 1].xaxis.set_major_formatter(plotting.percent)
    columns = ["paradigm", "seed", "loss_s", "accuracy_s", "error", "megabytes", "waits", "fine_s"]
    plotting.save(figure, runs[columns].round(4), folder, "ashl-parts")


# ---- all of it ----


def tuned_runs(
    methods: Mapping[str, Method], out: Path, seeds: int, processes: int, console: Console, length: float
) -> pd.DataFrame:
    """Results of these methods at the first setting, each with its own best learning rate."""

    def make(name: str, factor: float, seed: int) -> Job:
        method = replace(methods[name], lr=factor * methods[name].lr)
        return job(f"{BASE}-tuned-{name}", method, *SETTINGS[0], SLOWEST, seed, length)

    reported = range(FIRST_SEED, FIRST_SEED + seeds)
    return tuned(BASE, tuple(methods), make, measure, ("loss_s", "accuracy_s"), reported, out, processes, console)


def reproduce(out: Path, seeds: int, processes: int, console: Console, length: float = 1.0) -> pd.DataFrame:
    """Simulate what is missing in the folder, write results, claims and figures there, print the claims."""
    todo = jobs(seeds, length)
    simulate_all(todo, out / "runs", processes, console)
    results = pd.DataFrame([measure(out / "runs" / name) for name in todo])
    draw_times(results, out)
    rated = {name: METHODS[name] for name in RATED}
    results = pd.concat([results, tuned_runs(rated, out, seeds, processes, console, length)], ignore_index=True)
    draw_where(results, out)
    draw_parts(results, out)
    judged(table_claims(), table_results(out)).to_csv(out / "tables-claims.csv", index=False)
    return conclude(claims(), results, out, console, f"ASHL, virtual time, {seeds} seeds: mean (95 % interval)")


def reproduce_searches(out: Path, seeds: int, processes: int, console: Console, length: float = 1.0) -> pd.DataFrame:
    """Simulate what is missing of `searching_jobs`, write results and claims, print the claims."""
    todo = searching_jobs(seeds, length)
    simulate_all(todo, out / "runs", processes, console)
    results = pd.DataFrame([measure_search(out / "runs" / name) for name in todo])
    rated = {name: SEARCHES[name] for name in SEARCHES_RATED}
    results = pd.concat([results, tuned_runs(rated, out, seeds, processes, console, length)], ignore_index=True)
    return conclude(searching_claims(), results, out, console, f"ADSP's searches, virtual time, {seeds} seeds")


def reproduce_readings(out: Path, seeds: int, processes: int, console: Console, length: float = 1.0) -> pd.DataFrame:
    """Simulate what is missing of `READINGS`, write results and claims, print the claims."""
    todo = reading_jobs(seeds, length)
    simulate_all(todo, out / "runs", processes, console)
    results = pd.DataFrame([measure(out / "runs" / name) for name in todo])
    return conclude(reading_claims(), results, out, console, f"ASHL's readings, virtual time, {seeds} seeds")
