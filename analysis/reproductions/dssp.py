"""Dynamic stale synchronous parallel (DSSP): test of the claims of its paper.

Zhao, An, Liu, Chen: "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning", ICDCS 2019. The
settings of the paper are simulated with the learning rate on both clocks, and one more setting in which a dynamic bound
should win.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from rich.console import Console

from hpcsync.config.job import Job
from hpcsync.figures import plotting
from hpcsync.report.summary import summarize
from hpcsync.run_dir import layout
from hpcsync.trace.reader import load
from reproductions.claims import (
    Claim,
    Of,
    apart,
    arrives_after_s,
    conclude,
    largest,
    of,
    points,
    ratio,
    settled_s,
    time_to,
)
from reproductions.simulating import simulate_all
from reproductions.tuning import tuned

# ---- what is run ----

LOWER, UPPER = 3, 15  # the paper's staleness thresholds; it compares with SSP at each of them and all between
BOUNDS = {"staleness_min": LOWER, "staleness_max": UPPER}
PARADIGMS: dict[str, dict[str, Any]] = {
    "BSP": {"name": "bsp"},
    "ASP": {"name": "asp"},
    **{f"SSP {s}": {"name": "ssp", "staleness": s} for s in range(LOWER, UPPER + 1)},
    "DSSP": {"name": "dssp", **BOUNDS},
    "DSSP paper": {"name": "dssp", **BOUNDS, "mode": "paper"},
}
ALL = tuple(PARADIGMS)
SSP = tuple(name for name in ALL if name.startswith("SSP"))
TABLE_I = ("SSP 3", "SSP 6", "SSP 15")
SOME = ("BSP", "ASP", *TABLE_I, "DSSP", "DSSP paper")

BATCH, PASS = 32, 44 * 32  # samples: of a worker's batch, of a pass over the data in whole batches
DECAYS = (2 / 3, 5 / 6)  # of the run, by a tenth each: epochs 200 and 250 of the paper's 300
TARGET = 0.975  # accuracy, from when on it is never less
FIRST_SEED = 4  # 1 to 3 have been used to choose learning rates, label noise and target

# lr_clock, async_lr_scale, and whether pushes of workers that wait are one update with the next one.
ARMS = {
    "updates": ("updates", 1.0, False),  # as the paper's software did: the decays of BSP's epochs, counted in updates
    "samples": ("samples", "1/workers", False),  # the same decays and the same total step for all
    "merged": ("updates", 1.0, True),  # as we infer that the paper's server did
}


DIGITS = {"name": "reproductions.relabelled:digits", "options": {"share": 0.5}}


def vector(parameters: int) -> dict[str, Any]:
    """Nothing but a vector that travels."""
    return {"name": "timing", "parameters": parameters}


@dataclass(frozen=True)
class Setting:
    """seconds: of each worker's iteration, the median. arms: which paradigms run with which learning rate.

    lr, passes: such that accuracy rises at the decay and every paradigm still comes to its end.
    """

    name: str
    seconds: tuple[float, ...]
    arms: Mapping[str, tuple[str, ...]]
    lr: float
    passes: int = 90
    jitter: float = 0.05
    bursts: bool = False
    workload: Mapping[str, Any] = field(default_factory=lambda: DIGITS)
    network: Mapping[str, float] | None = None


EQUAL = (0.02,) * 4
INFINIBAND = {"bandwidth_gbit": 100.0}  # the paper's: EDR
SETTINGS = (
    Setting("homogeneous", EQUAL, {"updates": ALL, "samples": ALL}, 0.15, jitter=0.1),
    # A GTX 1060 beside a GTX 1080 Ti: about 2 by Table I's times, 2.6 by their peaks, 11.3 / 4.4 TFLOPS.
    Setting("mixed", (0.02, 0.04), {"updates": ALL, "samples": ALL, "merged": (*SSP, "DSSP", "DSSP paper")}, 0.4, 45),
    Setting("mixed-2.6", (0.02, 0.052), {"updates": SOME, "merged": TABLE_I}, 0.4, 45),
    Setting("transient", EQUAL, {"updates": SOME, "samples": SOME}, 0.15, bursts=True),
    # ResNet-110 for CIFAR has 1.74 million parameters; for the downsized AlexNet the paper gives none, 2.5 is a guess.
    Setting("compute-bound", (0.148,) * 4, {"samples": SOME}, 0.15, workload=vector(1_740_000), network=INFINIBAND),
    Setting("transfer-bound", EQUAL, {"samples": SOME}, 0.15, workload=vector(2_500_000), network=INFINIBAND),
)


def jobs(seeds: int, length: float = 1.0, settings: Sequence[Setting] | None = None) -> dict[str, Job]:
    """Every run, by the name of its folder. length: of all runs and of what is counted in them, for a quick look."""
    return {
        f"{setting.name}/{arm}/{paradigm.replace(' ', '-')}/{seed}": job(setting, arm, paradigm, seed, length)
        for setting in (SETTINGS if settings is None else settings)
        for arm, paradigms in setting.arms.items()
        for paradigm in paradigms
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
    }


def job(setting: Setting, arm: str, paradigm: str, seed: int, length: float = 1.0, factor: float = 1.0) -> Job:
    clock, scale, merge = ARMS[arm]
    workers, samples = len(setting.seconds), round(length * setting.passes * PASS)
    per_count = 1 if clock == "samples" else BATCH * workers
    milestones = [round(share * samples / per_count) for share in DECAYS]
    cluster: dict[str, Any] = {
        "workers": workers,
        "compute": {"model": "lognormal", "seconds": list(setting.seconds), "jitter": setting.jitter},
        "events": bursts(seed, workers) if setting.bursts else [],
    }
    return Job.from_table(
        {
            "name": "-".join((setting.name, arm, paradigm)).replace(" ", "-"),
            "seed": seed,
            "workload": {**setting.workload, "batch_size": BATCH},
            "optimizer": {
                "name": "sgd",
                "lr": factor * setting.lr,
                "lr_clock": clock,
                "async_lr_scale": scale,
                "schedule": {"name": "multistep", "milestones": milestones},
            },
            "stop": {"samples": samples},
            "evaluation": {"every_samples": round(length * PASS)},
            "paradigm": PARADIGMS[paradigm] | ({"merge": True} if merge else {}),
            "cluster": cluster | ({"network": dict(setting.network)} if setting.network else {}),
        }
    )


def bursts(seed: int, workers: int, until_s: float = 80.0) -> list[dict[str, Any]]:
    """Each worker now and then is slow by a factor of 5 for a moment: every 2 s for 0.2 s, both exponential.

    They are drawn from the seed: all paradigms meet the same ones.
    """
    events: list[dict[str, Any]] = []
    for worker in range(workers):
        draw = np.random.default_rng([seed, worker])
        at_s = draw.exponential(2.0)
        while at_s < until_s:
            events.append({"worker": worker, "at_s": at_s, "change": "slow", "factor": 5.0})
            at_s += draw.exponential(0.2)
            events.append({"worker": worker, "at_s": at_s, "change": "recover"})
            at_s += draw.exponential(2.0)
    return events


# ---- what came of it ----


def measure(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """The results of a run: a row, and its evaluations."""
    trace = load(folder / layout.TRACE)
    setting, arm, paradigm, seed = folder.parts[-4:]
    summary, evaluations, updates = summarize(trace), trace.frame("evaluations"), trace.tables["updates"]
    run = {"setting": setting, "arm": arm, "paradigm": re.sub("[-_]", " ", paradigm), "seed": int(seed)}
    decayed = updates["now_s"][updates["lr"] < 0.5 * updates["lr"][0]]
    target_s = settled_s(evaluations, TARGET)
    row = {
        **run,
        "target_s": target_s,
        "target_at_least_s": arrives_after_s(target_s, summary.duration_s),
        "accuracy": evaluations["accuracy"].tail(5).mean(),
        "duration_s": summary.duration_s,
        "samples_per_s": summary.samples_per_s,
        "wait_share": summary.wait_share,
        "push_gap": summary.push_gap_max_iters,
        "decay_s": decayed[0] if len(decayed) else np.nan,
    }
    return row, evaluations[["now_s", "samples", "accuracy"]].assign(**run)


# ---- what the paper says, and what is added ----


ASSUMED = "16 pushes, which Theorem 2 assumes"
PRINTED = {"SSP": "1.87", "ASP": "0.99", "BSP": "2.04"}  # their times / DSSP's, that of SSP the mean of Table I's
OWN_RATES = {"mixed": "lr counts samples", "mixed-merged": "lr counts updates, pushes merged"}  # by setting of results


def claims() -> list[Claim]:
    claims = []
    for arm in ("updates", "samples"):
        clock = f"lr counts {arm}"
        as_printed = sooner("DSSP paper", TABLE_I, "mixed", arm)
        claims += [
            Claim(
                f"mixed, {clock}: DSSP sooner than SSP",
                PRINTED["SSP"],
                sooner("DSSP", TABLE_I, "mixed", arm),
                low=1.5,
            ),
            Claim(f"mixed, {clock}: DSSP as printed sooner than SSP", PRINTED["SSP"], as_printed, low=1.5),
            Claim(f"mixed, {clock}: DSSP as soon as ASP", "0.99", sooner("DSSP", ("ASP",), "mixed", arm), 0.95, 1.05),
            Claim(f"mixed, {clock}: DSSP sooner than BSP", "2.04", sooner("DSSP", ("BSP",), "mixed", arm), low=1.5),
        ]
    for setting, counted in OWN_RATES.items():
        for method, words in (("DSSP", "DSSP"), ("DSSP paper", "DSSP as printed")):
            for name, printed in PRINTED.items():
                others = TABLE_I if name == "SSP" else (name,)
                low, high = (0.95, 1.05) if name == "ASP" else (1.5, np.inf)
                says = f"mixed, each with its own best rate, {counted}: {name}'s time / {words}'s"
                claims.append(Claim(says, printed, sooner(method, others, setting, "tuned"), low, high))
    decay = ratio(of("decay_s", "mixed", "updates", "DSSP"), of("decay_s", "mixed", "updates", "BSP"))
    claims.append(
        Claim(
            "mixed, lr counts updates: DSSP's decays after this part of BSP's time",
            "0.5, read from figure 4",
            decay,
            0.45,
            0.55,
        )
    )
    for setting in ("mixed", "mixed-2.6"):
        merged = sooner("DSSP", TABLE_I, setting, "updates", other_arm="merged")
        claims.append(
            Claim(f"{setting}, were SSP's pushes merged: DSSP sooner than SSP", PRINTED["SSP"], merged, low=1.5)
        )
    for method, words in (("DSSP", "DSSP"), ("DSSP paper", "DSSP as printed")):
        merged = sooner(method, TABLE_I, "mixed", "merged")
        claims.append(Claim(f"mixed, were all pushes merged: {words} sooner than SSP", PRINTED["SSP"], merged, low=1.5))
    plain = sooner("DSSP", TABLE_I, "mixed-2.6", "updates")
    claims.append(Claim("mixed-2.6, lr counts updates: DSSP sooner than SSP", PRINTED["SSP"], plain, low=1.5))
    mixed = faster("DSSP", SSP, "mixed")
    claims.append(
        Claim(
            "mixed: DSSP trains as many samples a second as SSP", "0.98 to 0.99, read from figure 4", mixed, 0.97, 1.03
        )
    )
    for arm in ("updates", "samples"):
        groups = ("BSP",), ("ASP",), SSP, ("DSSP",)
        accuracy = [of("accuracy", "homogeneous", arm, *group) for group in groups]
        *_, asp, ssp, dssp = accuracy
        where = f"homogeneous, lr counts {arm}"
        claims += [
            Claim(
                f"{where}: BSP, ASP, SSP, DSSP end alike",
                "0.6 to 1.1, read from figure 3",
                apart(*accuracy),
                high=1.5,
                unit=" points",
            ),
            Claim(
                f"{where}: DSSP ends no worse than SSP",
                "",
                points(dssp, ssp),
                low=-0.5,
                unit=" points",
                expected="no worse",
            ),
            Claim(
                f"{where}: DSSP ends no worse than ASP",
                "+0.3 to 0.6, read from figure 3",
                points(dssp, asp),
                low=0.0,
                unit=" points",
            ),
        ]
    compute, transfer = (f"{what}-bound" for what in ("compute", "transfer"))
    claims += [
        Claim(
            "pure CNN: BSP trains faster than ASP",
            "1.47 to 1.49, read from figure 3",
            faster("BSP", ("ASP",), compute),
            low=1.05,
        ),
        Claim(
            "much to transfer: ASP trains faster than BSP",
            "1.14, read from figure 3",
            faster("ASP", ("BSP",), transfer),
            low=1.05,
        ),
        Claim(
            "much to transfer: DSSP trains faster than BSP",
            "1.14, read from figure 3",
            faster("DSSP", ("BSP",), transfer),
            low=1.05,
        ),
        Claim("DSSP keeps its bound", "", largest("push_gap", "DSSP"), high=UPPER + 1, expected=ASSUMED),
        Claim(
            "DSSP as printed keeps its bound", "", largest("push_gap", "DSSP paper"), high=UPPER + 1, expected=ASSUMED
        ),
    ]
    for other in ("SSP 3", "SSP 6", "SSP 15", "ASP", "BSP"):
        says = f"transient: DSSP trains faster than {other}"
        claims.append(Claim(says, "", faster("DSSP", (other,), "transient"), low=1.005))
    for other in ("SSP 3", "SSP 6", "SSP 15", "ASP", "BSP"):
        says = f"transient, lr counts samples: DSSP sooner than {other}"
        claims.append(Claim(says, "", sooner("DSSP", (other,), "transient", "samples"), low=1.005))
    return claims


def sooner(a: str, others: Sequence[str], setting: str, arm: str, other_arm: str | None = None) -> Of:
    """Return the ratio of the others' times to the target to that of `a`."""
    return ratio(time_to("target", setting, other_arm or arm, *others), time_to("target", setting, arm, a))


def faster(a: str, others: Sequence[str], setting: str) -> Of:
    """Return the ratio of the samples per second of `a` to those of the others."""
    return ratio(of("samples_per_s", setting, "samples", a), of("samples_per_s", setting, "samples", *others))


# ---- figures ----

SHOWN = {"homogeneous": "four equal workers", "mixed": "two, one half as fast", "transient": "four, slow now and then"}
LINES = {"BSP": ("BSP",), "ASP": ("ASP",), "SSP, s = 3 to 15": SSP, "DSSP, 3 to 15": ("DSSP",)}
COLOURS = dict(zip(LINES, (plotting.PARADIGM_COLOURS[name] for name in ("bsp", "asp", "ssp", "dssp")), strict=True))
CLOCKS = {"updates": "as published: decays count updates", "samples": "decays count samples"}


def draw_error(results: pd.DataFrame, evaluations: pd.DataFrame, folder: Path) -> None:
    """Error against virtual time: the mean over seeds (of SSP also over its bounds), in their range, and the decays."""
    figure, axes = plotting.panels(len(SHOWN), 2, height=5.6, sharey=True, sharex="row")
    frames = []
    for row, setting in zip(axes, SHOWN, strict=True):
        for axis, arm in zip(row, CLOCKS, strict=True):
            for line, names in LINES.items():
                frame = curve(select(evaluations, setting, arm, names))
                axis.fill_between("now_s", "least", "largest", data=frame, color=COLOURS[line], alpha=0.12, lw=0)
                axis.semilogy("now_s", "mean", data=frame, color=COLOURS[line], label=line)
                decay_s = select(results, setting, arm, names)["decay_s"].mean()
                error = np.interp(decay_s, frame["now_s"], frame["mean"])
                axis.plot(decay_s, error, "v", ms=5, color=COLOURS[line], mec="w", mew=0.5, zorder=3)
                frames.append(frame.assign(setting=setting, arm=arm, line=line, decay_s=decay_s))
            axis.axhline(1 - TARGET, lw=0.6, color=plotting.GREY, zorder=0)
            axis.set(ylim=(0.004, 0.4), xlim=(0, None))
            axis.set_yticks([0.01, 0.1])
            axis.yaxis.set_major_formatter(plotting.percent)
        row[0].set_ylabel(f"{SHOWN[setting]}\nerror")
    for axis, clock in zip(axes[0], CLOCKS.values(), strict=True):
        axis.set_title(clock)
    figure.supxlabel("virtual time (s)", fontsize=8)
    handles, names = axes[0, 0].get_legend_handles_labels()
    decay = Line2D([], [], marker="v", color=plotting.GREY, ls="", ms=5, label="first decay of the learning rate")
    figure.legend(handles=[*handles, decay], loc="outside upper center", ncols=len(names) + 1)
    plotting.save(figure, pd.concat(frames).round(4), folder, "dssp-error")


def select(frame: pd.DataFrame, setting: str, arm: str, paradigms: Sequence[str]) -> pd.DataFrame:
    return frame[(frame["setting"] == setting) & (frame["arm"] == arm) & frame["paradigm"].isin(paradigms)]


def curve(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Mean, least and largest error of some runs, each smoothed over three evaluations, as far as all of them reach."""
    runs = evaluations.groupby(["paradigm", "seed"])
    at = np.linspace(0.0, runs["now_s"].max().min(), 150)[1:]
    errors = [np.interp(at, run["now_s"], 1 - run["accuracy"].rolling(3, 1, center=True).mean()) for _, run in runs]
    return pd.DataFrame(
        {"now_s": at, "mean": np.mean(errors, 0), "least": np.min(errors, 0), "largest": np.max(errors, 0)}
    )


# ---- all of it ----


def tuned_runs(
    setting: str, arms: Sequence[str], out: Path, seeds: int, processes: int, console: Console, length: float
) -> pd.DataFrame:
    """Results between two unlike workers, each method with its own best rate, in the first of the arms that it has."""
    (mixed,) = (each for each in SETTINGS if each.name == "mixed")
    arm_of = {name: arm for arm in reversed(arms) for name in SOME if name in mixed.arms.get(arm, ())}

    def make(paradigm: str, factor: float, seed: int) -> Job:
        return job(mixed, arm_of[paradigm], paradigm, seed, length, factor)

    reported = range(FIRST_SEED, FIRST_SEED + seeds)
    return tuned(
        setting, tuple(arm_of), make, lambda f: measure(f)[0], ("target_s",), reported, out, processes, console
    )


def reproduce(out: Path, seeds: int, processes: int, console: Console, length: float = 1.0) -> pd.DataFrame:
    """Simulate what is missing in the folder, write results, claims and figures there, print the claims."""
    todo = jobs(seeds, length)
    simulate_all(todo, out / "runs", processes, console)
    rows, evaluations = zip(*(measure(out / "runs" / name) for name in todo), strict=True)
    results = pd.DataFrame(rows)
    draw_error(results, pd.concat(evaluations), out)
    every = [
        results,
        tuned_runs("mixed", ("samples",), out, seeds, processes, console, length),
        # Under BSP and ASP there is nothing to merge.
        tuned_runs("mixed-merged", ("merged", "updates"), out / "merged", seeds, processes, console, length),
    ]
    results = pd.concat(every, ignore_index=True)
    title = f"DSSP, virtual time, {seeds} seeds: mean (95 % interval)"
    return conclude(claims(), results, out, console, title)
