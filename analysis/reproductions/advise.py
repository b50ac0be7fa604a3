"""How much longer does an advised run take than the best candidate would? Every candidate is run on real ranks.

A setting is a workload, a cluster and a momentum. In each, BSP is run for a while (the profile), `hpcsync advise`
advises from it in virtual time, and every candidate is then run on padded ranks with other seeds, each with the
learning rate that the advice tuned for it. `regret` compares the choices. Runs share ranks that are started once.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pandas as pd
from rich.console import Console

from hpcsync.config.job import Job
from hpcsync.report.advice import simplest
from hpcsync.report.summary import Summary, summarize
from hpcsync.run_dir import layout
from hpcsync.trace.reader import load
from hpcsync.trace.schema import Outcome
from reproductions import law
from reproductions.claims import conclude
from reproductions.real_ranks import ANALYSIS, LOAD, run_all
from reproductions.regret import by_setting, choices, claims

WORKERS = 4
CANDIDATES = (
    "allreduce",
    "bsp",
    "bsp + batches by speed",
    "local-sgd steps=4",
    "asp",
    "ssp staleness=3",
    "k-sync k=2",
    "ad-psgd",
)
COMPRESSED = ("allreduce + fp16", "bsp + top-k")  # further candidates where links are narrow
UNTRIED = 1.0  # phi of the control
ADVICE_SEED, PROFILE_SEED, FIRST_SEED = 1, 51, 101
PROFILE_UPDATES = 150
EVENTS_S = 90.0  # longer than any run
SLOW, SLOW_S, BETWEEN_S = 4.0, (0.3, 0.9), 4.0


class Workload(NamedTuple):
    """Workload with its target.

    Attributes
    ----------
    table
        `[workload]`.
    stop, every_samples
        `[stop]` and how often the model is evaluated.
    rates
        Learning rate by momentum, a guess from two or three runs of BSP.
    scale
        Factor of the clusters' times.
    """

    table: dict[str, Any]
    stop: dict[str, float]
    every_samples: int
    rates: dict[float, float]
    scale: float


WORKLOADS = {
    "digits": Workload(
        {"name": "digits", "batch_size": 32},
        {"target_accuracy": 0.95, "samples": 60_000},
        500,
        {0.0: 0.4, 0.9: 0.04},
        1.0,
    ),
    "noisy": Workload(
        {"name": "reproductions.relabelled:perceptron", "options": {"share": 0.5}, "batch_size": 32},
        {"target_accuracy": 0.955, "samples": 60_000},
        500,
        {0.0: 0.4, 0.9: 0.04},
        1.0,
    ),
    "text": Workload(
        {"name": "text", "batch_size": 16, "layers": 1, "width": 32, "context": 32, "heads": 2},
        {"target_loss": 2.35, "samples": 60_000},
        1_000,
        {0.0: 1.0, 0.9: 0.2},
        0.5,
    ),
}
EVEN_S = 0.03  # median of an iteration
CLUSTERS: dict[str, list[float]] = {
    "equal": [EVEN_S] * WORKERS,
    "1:1:2:4": [0.02, 0.02, 0.04, 0.08],
    "transient": [EVEN_S] * WORKERS,
    "narrow": [EVEN_S] * WORKERS,
    "1:1:1:3": [0.025, 0.025, 0.025, 0.075],
}
LINKS = {"narrow": "100mbit"}  # of hosts with a rank each; needs root
MOMENTA = (0.0, 0.9)


class Setting(NamedTuple):
    """What is trained on what; `momentum` is that of SGD."""

    workload: str
    cluster: str
    momentum: float

    def __str__(self) -> str:
        return f"{self.workload}-{self.cluster.replace(':', '')}-{self.momentum:g}"


BUILT_WITH = (Setting("digits", "1:1:2:4", 0.0),)  # looked at while the command was written; not in the claims


def other(setting: Setting) -> Setting:
    """Return the same task on the next cluster."""
    names = list(CLUSTERS)
    return setting._replace(cluster=names[(names.index(setting.cluster) + 1) % len(names)])


def settings() -> list[Setting]:
    return [Setting(*each) for each in itertools.product(WORKLOADS, CLUSTERS, MOMENTA)]


def candidates(setting: Setting) -> tuple[str, ...]:
    """Return labels of candidates."""
    return CANDIDATES + COMPRESSED * (setting.cluster in LINKS)


# ---- jobs ----


def real_cluster(setting: Setting, seed: int) -> dict[str, Any]:
    """Return the times to which ranks are padded; stragglers that come and go are drawn anew for every seed."""
    scale = WORKLOADS[setting.workload].scale
    seconds = [scale * each for each in CLUSTERS[setting.cluster]]
    table: dict[str, Any] = {"compute": {"model": "lognormal", "seconds": seconds, "jitter": 0.2}}
    if setting.cluster == "transient":
        table["events"] = list(_stragglers(seed))
    return table


def _stragglers(seed: int) -> Iterator[dict[str, Any]]:
    for worker in range(WORKERS):
        draw, now_s = np.random.default_rng([seed, worker]), 0.0
        while (now_s := now_s + draw.exponential(BETWEEN_S)) < EVENTS_S:
            yield {"worker": worker, "at_s": round(now_s, 3), "change": "slow", "factor": SLOW}
            now_s += draw.uniform(*SLOW_S)
            yield {"worker": worker, "at_s": round(now_s, 3), "change": "recover"}


def asked(setting: Setting) -> dict[str, Any]:
    """Return the user's job, which declares no times."""
    workload = WORKLOADS[setting.workload]
    optimizer = {"name": "sgd", "lr": workload.rates[setting.momentum], "momentum": setting.momentum}
    return {
        "name": str(setting),
        "seed": ADVICE_SEED,
        "workload": workload.table,
        "optimizer": optimizer,
        "stop": workload.stop,
        "evaluation": {"every_samples": workload.every_samples},
        "paradigm": {"name": "bsp"},
        "cluster": {"workers": WORKERS},
    }


def profile(setting: Setting) -> Job:
    """Return the run of BSP from which the advice takes its times."""
    table = asked(setting)
    table["cluster"] |= real_cluster(setting, PROFILE_SEED)
    return Job.from_table(table | {"seed": PROFILE_SEED, "stop": {"updates": PROFILE_UPDATES}})


def real(setting: Setting, simulated: str, seed: int) -> Job:
    """Return the job on real ranks of a candidate: as the advice has simulated it, but for times, seed and limit."""
    table = tomllib.loads(simulated)
    servers = table["cluster"]["servers"]
    cluster = {"servers": servers, "workers": WORKERS, **real_cluster(setting, seed)}
    return Job.from_table(table | {"seed": seed, "stop": WORKLOADS[setting.workload].stop, "cluster": cluster})


# ---- the advice ----


def advise(setting: Setting, measured: Path, out: Path, processes: int) -> dict[str, Any]:
    """Return the advice in out/SETTING, with its cost; it is asked for only once for a job and its candidates."""
    folder, cost = out / str(setting), out / f"{setting}-cost.json"
    if not (cost.exists() and _advised_on(setting, out)):
        out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)  # its cost is that of all of it
        file = out / f"{setting}.toml"
        file.write_text(Job.from_table(asked(setting)).to_toml(), encoding="utf-8")
        begin_s, cpu_s = time.monotonic(), _children_s()
        command_line(file, candidates(setting), measured, folder, processes)
        took = {"advice_s": time.monotonic() - begin_s, "advice_cpu_s": _children_s() - cpu_s}
        cost.write_text(json.dumps(took | {"load": os.getloadavg()[0]}), encoding="utf-8")
    found: dict[str, Any] = json.loads((folder / "advice.json").read_text(encoding="utf-8"))
    if found["indistinguishable"]:
        times = {row["label"]: row["time_s"]["mean"] for row in found["ranking"] if row["time_s"]}
        advised = simplest(found["indistinguishable"], times)  # as today, also of an advice of before
        if advised != found["advised"]:  # whose prediction is not of this candidate
            last = found["trials"][-1]["candidates"]
            (found["predicted"],) = (row["predicted"] for row in last if row["label"] == advised)
        found["advised"] = advised
    summaries = folder.glob(f"trial-*/*/*/{layout.SUMMARY}")
    found["samples"] = sum(json.loads(each.read_text(encoding="utf-8"))["samples"] for each in summaries)
    return found | json.loads(cost.read_text(encoding="utf-8"))


def _advised_on(setting: Setting, out: Path) -> bool:
    """Return True if the advice in the folder is on this job and these candidates."""
    job = Job.from_toml((out / f"{setting}.toml").read_text(encoding="utf-8"))
    found = json.loads((out / str(setting) / "advice.json").read_text(encoding="utf-8"))
    tried = {row["label"] for row in found["trials"][0]["candidates"]}
    return job == Job.from_table(asked(setting)) and tried == set(candidates(setting))


def command_line(file: Path, labels: Sequence[str], measured: Path, folder: Path, processes: int) -> None:
    """Call `hpcsync advise`; 1 is its status if no candidate reaches the target."""
    options = [word for label in labels for word in ("--paradigm", option(label))]
    line = ["advise", file, "--from", measured, "--out", folder, "--jobs", str(processes), *options]
    path = os.pathsep.join(filter(None, (str(ANALYSIS), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with log_of(folder).open("w", encoding="utf-8") as log:
        done = subprocess.run(
            [sys.executable, "-m", "hpcsync", *line], stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
        )
    if done.returncode not in (0, 1) or not (folder / "advice.json").exists():
        raise RuntimeError(f"{folder}: no advice, see {log_of(folder)}")


def log_of(folder: Path) -> Path:
    """Return what the command prints."""
    return folder.with_name(f"{folder.name}.log")


def option(label: str) -> str:
    """Return a candidate as `--paradigm` takes it."""
    words, *batches = label.split(" + ")
    name, *options = words.split()
    if not options:
        return label
    table = "{" + ", ".join([f'name = "{name}"', *options]) + "}"
    return " + ".join([table, *batches])


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shuffled(trace: Path, folder: Path) -> Path:
    """Return a copy of a run in which every computation has the time of another, of any worker: the control."""
    if not (folder / layout.TRACE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(trace / layout.TRACE, folder / "unfinished.h5")
        with h5py.File(folder / "unfinished.h5", "r+") as file:
            rows = file["pushes"][:]
            order = np.random.default_rng(0).permutation(len(rows))
            for column in ("load_s", "compute_s"):
                rows[column] = rows[column][order]
            file["pushes"][:] = rows
        (folder / "unfinished.h5").rename(folder / layout.TRACE)
    return folder


class Predicted(NamedTuple):
    """What the advice found of a candidate, in the last trial in which it took part, and what the law makes of it."""

    place: int
    job: str
    seconds: float = np.nan
    low_s: float = np.nan
    high_s: float = np.nan
    samples_per_s: float = np.nan
    law: float = np.nan
    law_without_noise: float = np.nan


def predicted(setting: Setting, advice: dict[str, Any], folder: Path, phi: float) -> dict[str, Predicted]:
    """Return predictions by label. Candidates that went on precede those that did not."""
    found: dict[str, Predicted] = {}
    for trial in reversed(advice["trials"]):
        new = [row for row in trial["candidates"] if row["label"] not in found]
        for row in sorted(new, key=_merit):
            place = folder / row["folder"]
            runs = sorted(place.glob(f"seed-*/{layout.TRACE}"))
            summaries = [summarize(load(run)) for run in runs]
            speed = float(np.mean([each.samples_per_s for each in summaries]))
            d = delay(row["label"], summaries, runs, setting.momentum)
            batch = WORKLOADS[setting.workload].table["batch_size"]
            times = advice["predicted"] if row["label"] == advice["advised"] else row["predicted"]
            found[row["label"]] = Predicted(
                len(found),
                (runs[0].parent / layout.JOB).read_text(encoding="utf-8"),
                **(times | {"samples_per_s": speed}),
                law=(d + phi / batch) / speed,
                law_without_noise=(d + UNTRIED / batch) / speed,
            )
    return found


def _merit(row: dict[str, Any]) -> tuple[float, float, float]:
    time_s, loss = row["time_s"], row["loss"]
    return -row["arrived"], 0.0 if time_s is None else time_s, np.inf if loss is None else loss


def delay(label: str, summaries: Sequence[Summary], runs: Sequence[Path], momentum: float) -> float:
    """Return d of the law; NaN of a candidate that it does not cover."""
    if label in COMPRESSED:
        return np.nan
    name = label.split()[0]
    if name in ("allreduce", "bsp"):
        return float(WORKERS)
    if name == "k-sync":
        return float(label.split("=")[1])
    if name not in ("asp", "ssp"):
        return np.nan
    pushes = [load(run).tables["pushes"] for run in runs]
    stale = np.concatenate([each[each["outcome"] == Outcome.APPLIED]["staleness"] for each in pushes])
    return 1 + law.KAPPA[momentum] * float(np.sqrt(stale.max() * stale.mean()))


# ---- results ----


def measure(folder: Path) -> dict[str, Any]:
    """Return a real run's time to the target (NaN: never), its time and samples to its end, and the load."""
    summary = summarize(load(folder))
    time_s = np.nan if summary.time_to_target_s is None else summary.time_to_target_s
    load_of = folder / LOAD
    return {
        "time_s": time_s,
        "duration_s": summary.duration_s,
        "samples": summary.samples,
        "load": float(load_of.read_text()) if load_of.exists() else np.nan,
    }


def reproduce(
    out: Path, seeds: int, processes: int, console: Console, of: Sequence[Setting] = (), control: bool = False
) -> pd.DataFrame:
    """Profile, advise and run what is missing, and write results, settings and claims.

    Parameters
    ----------
    out, seeds, processes, console
        Folder, real runs of each candidate, simulations at a time, and where the claims are printed.
    of
        Settings; all by default.
    control
        Whether to advise from shuffled times too.
    """
    chosen = list(of) or settings()
    on_ranks({f"{setting}/profile": (setting, profile(setting)) for setting in chosen}, out / "runs")
    found: dict[Setting, dict[str, Predicted]] = {}
    advices: dict[Setting, dict[str, Any]] = {}
    for setting in chosen:
        measured = out / "runs" / str(setting) / "profile"
        console.print(f"advice for {setting}")
        advices[setting] = advise(setting, measured, out / "advice", processes)
        covariance, square = law.noise(load(measured))
        found[setting] = predicted(setting, advices[setting], out / "advice" / str(setting), covariance / square)
        known = (out / "shuffled" / f"{setting}-cost.json").exists()
        if (control or known) and setting.cluster != "equal":
            altered = shuffled(measured, out / "shuffled" / f"{setting}-profile")
            advices[setting]["shuffled"] = advise(setting, altered, out / "shuffled", processes)["advised"]
    points = [
        (setting, label, seed)
        for setting in chosen
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
        for label in found[setting]
    ]
    names = {f"{setting}/{label.replace(' ', '_')}/{seed}": (setting, label, seed) for setting, label, seed in points}
    jobs = {
        name: (setting, real(setting, found[setting][label].job, seed))
        for name, (setting, label, seed) in names.items()
    }
    on_ranks(jobs, out / "runs")
    rows = [
        _row(out / "runs" / name, found[setting][label], advices[setting], setting, label, seed)
        for name, (setting, label, seed) in names.items()
    ]
    results = choices(pd.DataFrame(rows))
    table = by_setting(results)
    table.to_csv(out / "settings.csv")
    console.print(table.to_string(float_format=lambda x: f"{x:.3g}"))
    conclude(claims(results), results, out, console, f"Advice on real ranks, {len(chosen)} settings, {seeds} seeds")
    return results


def on_ranks(jobs: Mapping[str, tuple[Setting, Job]], out: Path) -> None:
    """Run the jobs of settings, those of clusters with the same link together."""
    for link in (None, *sorted(set(LINKS.values()))):
        of_link = {name: job for name, (setting, job) in jobs.items() if LINKS.get(setting.cluster) == link}
        run_all(of_link, out, link)


def _row(
    folder: Path, prediction: Predicted, advice: dict[str, Any], setting: Setting, label: str, seed: int
) -> dict[str, Any]:
    return {
        "setting": str(setting),
        **setting._asdict(),
        "built_with": setting in BUILT_WITH,
        "other": str(other(setting)),
        "candidate": label,
        "seed": seed,
        **measure(folder),
        "place": prediction.place,
        "advised": advice["advised"] == label,
        "simplest": label in advice["indistinguishable"][:1],
        "first trial": min(advice["trials"][0]["candidates"], key=_merit)["label"] == label,
        "second trial": min(advice["trials"][1]["candidates"], key=_merit)["label"] == label,
        "shuffled": advice.get("shuffled") == label,
        "predicted_s": prediction.seconds,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        "predicted_samples_per_s": prediction.samples_per_s,
        "law_seconds": prediction.law,
        "law_seconds_1": prediction.law_without_noise,
        "profile_s": summarize(load(folder.parents[1] / "profile")).duration_s,
        "advice_s": advice["advice_s"],
        "advice_cpu_s": advice["advice_cpu_s"],
        "advice_samples": advice["samples"],
        "advice_load": advice["load"],
    }
