"""DSSP between two unlike workers: what its verdict depends on, as maps over their speed ratio and their regularity.

A controller that predicts pushes from the last interval does better the more regular the intervals are, and the paper
gives neither the ratio of its two GPUs' speeds nor the jitter of their iterations. Throughput is measured on a fine
grid, times to the accuracy of the reproduction on a coarse one, with the learning rate on the paper's clock, and with
a server that merges the pushes of workers that wait or makes an update of each. At the points that `dssp_map_real`
repeats on real ranks, throughput is also measured in the first part of the runs, which is as long as those.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colors
from rich.console import Console

from hpcsync.config.job import Job
from hpcsync.figures import plotting
from hpcsync.run_dir import layout
from hpcsync.trace.reader import load
from reproductions import dssp
from reproductions.claims import FAILS, HOLDS, UNTOLD, Claim, Of, conclude, of, ratio, time_to
from reproductions.simulating import simulate_all

FAST_S = 0.02
RATIOS = (1.0, 1.25, 1.5, 1.8, 2.0, 2.3, 2.6, 3.0)
JITTERS = (0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1)
COARSE_RATIOS = (1.5, 2.0, 2.3, 2.6)
COARSE_JITTERS = (0.005, 0.02, 0.05)
REAL_RATIOS, REAL_JITTERS, REAL_ITERATIONS = (1.5, 2.3), (0.005, 0.05), 300  # on real ranks; iterations of the fast one
METHODS = ("SSP 3", "ASP", "DSSP", "DSSP paper")
MODES = {"DSSP": "bounded", "DSSP paper": "as printed"}
ARMS = {"merged": ("SSP 3", *MODES), "updates": ("BSP", *METHODS)}  # under BSP and ASP there is nothing to merge
SERVERS = {"merged": "pushes merged", "updates": "an update for each push"}

# The paper's two unlike GPUs: seconds to an accuracy of 0.67 (Table I, printed), and of 300 passes (read from Fig. 4).
TABLE_I_S = {"BSP": 6159.2, "ASP": 2993.1, "SSP 3": 5678.2, "DSSP": 3016.4}
FIG_4_S = {"BSP": 8954.0, "ASP": 7027.0, "SSP 3": 8803.0, "DSSP": 8917.0}  # SSP: the middle of 8760 to 8846
NEAR = 0.1  # of the paper's ratio


def settings() -> list[dssp.Setting]:
    """Return the points of both maps."""
    fine = [
        dssp.Setting(
            f"speed-{each:g}-{jitter:g}",
            (FAST_S, each * FAST_S),
            {"updates": METHODS},
            0.4,
            90,
            jitter,
            workload=dssp.vector(16),
        )
        for each in RATIOS
        for jitter in JITTERS
    ]
    coarse = [
        dssp.Setting(f"time-{each:g}-{jitter:g}", (FAST_S, each * FAST_S), ARMS, 0.4, 45, jitter)
        for each in COARSE_RATIOS
        for jitter in COARSE_JITTERS
    ]
    return fine + coarse


def jobs(seeds: int, length: float = 1.0) -> dict[str, Job]:
    """Every run, by the name of its folder."""
    return dssp.jobs(seeds, length, settings())


def claims() -> list[Claim]:
    """Return what the paper has, at every point of the coarse map, for both modes and both servers; and throughputs."""
    of_the_paper = [
        claim
        for arm in SERVERS
        for each in COARSE_RATIOS
        for jitter in COARSE_JITTERS
        for method in MODES
        for claim in _published(arm, each, jitter, method)
    ]
    return of_the_paper + _by_length()


def _by_length() -> list[Claim]:
    """Return throughput in runs as long as those on real ranks, and in the map's, at the points of the former."""
    found = []
    for each in REAL_RATIOS:
        for jitter in REAL_JITTERS:
            for method in ("ASP", *MODES):
                for column, words in (
                    ("early_samples_per_s", f"in the first {REAL_ITERATIONS} iterations of the fast worker"),
                    ("samples_per_s", "in the whole run"),
                ):
                    name = f"speed-{each:g}-{jitter:g}"
                    number = ratio(*(of(column, name, "updates", one) for one in (method, "SSP 3")))
                    says = f"throughput {words}: ratio {each:g}, jitter {100 * jitter:g} %: {method}'s / SSP's"
                    found.append(Claim(says, "", number))
    return found


def _published(arm: str, each: float, jitter: float, method: str) -> list[Claim]:
    name = f"time-{each:g}-{jitter:g}"
    where = f"{SERVERS[arm]}, ratio {each:g}, jitter {100 * jitter:g} %, {MODES[method]}"

    def over(times: Callable[..., Of], column: str, other: str) -> Of:
        other_arm = arm if other in ARMS[arm] else "updates"
        return ratio(times(column, name, other_arm, other), times(column, name, arm, method))

    sources = (
        ("{}'s time / DSSP's", "", TABLE_I_S, time_to, "target"),
        ("length of {}'s run / of DSSP's", ", read from figure 4", FIG_4_S, of, "duration_s"),
    )
    return [
        _near(f"{where}: {says.format(other)}", seconds[other] / seconds["DSSP"], source, over(times, column, other))
        for other in ("BSP", "ASP", "SSP 3")
        for says, source, seconds, times, column in sources
    ]


def _near(says: str, published: float, source: str, number: Of) -> Claim:
    limits = [round(share * published, 2) for share in (1 - NEAR, 1 + NEAR)]
    return Claim(says, f"{published:.2f}{source}", number, *limits)


def measure(folder: Path) -> dict[str, Any]:
    """Return the results of a run; early_samples_per_s is throughput in the time of `REAL_ITERATIONS`."""
    updates, until_s = load(folder / layout.TRACE).tables["updates"], REAL_ITERATIONS * FAST_S
    early = updates["samples"][updates["now_s"] <= until_s]
    return dssp.measure(folder)[0] | {"early_samples_per_s": early[-1] / until_s if len(early) else np.nan}


# ---- figures ----

TITLES = {"DSSP": "DSSP, bounded", "DSSP paper": "DSSP, as printed", "ASP": "ASP"}
QUANTITIES = {  # by what the runs were for, and how the server counts pushes
    "speed": "samples a second / SSP's",
    **{arm: f"SSP's time / own,\n{words}" for arm, words in SERVERS.items()},
}


def compared(results: pd.DataFrame) -> pd.DataFrame:
    """Return each method's throughput / SSP's, and SSP's time to the target / each method's, by point and seed.

    What is never reached is missing.
    """
    frames = []
    for quantity, words in QUANTITIES.items():
        if quantity == "speed":
            runs, column, power = results[results["setting"].str.startswith("speed-")], "samples_per_s", 1
        else:
            arms = {method: quantity if method in ARMS[quantity] else "updates" for method in METHODS}
            runs = results[
                results["setting"].str.startswith("time-") & (results["arm"] == results["paradigm"].map(arms))
            ]
            column, power = "target_s", -1
        wide = runs.pivot(index=["setting", "seed"], columns="paradigm", values=column)
        wide = (wide.div(wide["SSP 3"], axis=0) ** power)[list(TITLES)].reset_index()
        points = wide["setting"].str.split("-", expand=True)
        at = {"quantity": words, "ratio": points[1].astype(float), "jitter": points[2].astype(float)}
        frames.append(wide.drop(columns="setting").assign(**at))
    return pd.concat(frames, ignore_index=True)


def draw(results: pd.DataFrame, folder: Path) -> None:
    """Maps of throughput and of time to the target, of both modes and of ASP beside SSP: geometric means."""
    frame = compared(results)
    figure, axes = plotting.panels(len(QUANTITIES), len(TITLES), height=6.2, height_ratios=(8, 5, 5))
    means = np.exp(
        np.log(frame.set_index(["quantity", "ratio", "jitter"])[list(TITLES)]).groupby(level=[0, 1, 2]).mean()
    )
    norm = colors.LogNorm(means.min(axis=None), means.max(axis=None))
    for line, words in zip(axes, QUANTITIES.values(), strict=True):
        for axis, method in zip(line, TITLES, strict=True):
            values = means.loc[words, method].unstack()
            image = axis.imshow(values, origin="lower", aspect="auto", cmap="cividis", norm=norm)
            for (row, column), value in np.ndenumerate(values.to_numpy()):
                colour = "w" if norm(value) < 0.5 else "k"
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", size=5.5, color=colour)
            axis.set_xticks(range(len(values.columns)), [f"{100 * jitter:g}" for jitter in values.columns])
            axis.set_yticks(range(len(values.index)), [f"{each:g}" for each in values.index])
            axis.tick_params(length=0)
        line[0].set_ylabel(words)
    for axis, title in zip(axes[0], TITLES.values(), strict=True):
        axis.set_title(title)
    figure.supxlabel("jitter of the times (%)", fontsize=8)
    figure.supylabel("time of an iteration, slow worker / fast worker", fontsize=8)
    bar = figure.colorbar(image, ax=axes.ravel().tolist(), label="more than 1: better than SSP with s = 3", pad=0.02)
    bar.set_ticks(ticks := (1.0, 1.5, 2.0, 3.0), labels=[f"{tick:g}" for tick in ticks])
    bar.minorticks_off()
    plotting.save(figure, frame.round(4), folder, "dssp-map")


def points(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return for each server, mode and point of the coarse map how many ratios of each source have which verdict."""
    where = (
        r"(?P<server>[^,]+), ratio (?P<ratio>[\d.]+), jitter (?P<jitter>[\d.]+) %, (?P<mode>[^:]+): (?P<length>length)?"
    )
    words = verdicts["claim"].str.extract(where).dropna(subset="server")
    source = words["length"].isna().map({True: "Table I", False: "Fig. 4"}).rename("source")
    at = [words[name] for name in ("server", "mode", "ratio", "jitter")]
    counts = pd.crosstab([*at, source], verdicts["verdict"])
    return counts.reindex(columns=[HOLDS, FAILS, UNTOLD], fill_value=0).reset_index()


def possible(counts: pd.DataFrame) -> pd.DataFrame:
    """Return the servers, modes and points at which each of the paper's ratios holds or cannot be told."""
    at = ["server", "mode", "ratio", "jitter"]
    together = counts.groupby(at)[[HOLDS, FAILS]].sum().reset_index()
    return together.loc[together[FAILS] == 0, [*at, HOLDS]]


def reproduce(out: Path, seeds: int, processes: int, console: Console, length: float = 1.0) -> pd.DataFrame:
    """Simulate what is missing in the folder, write results, claims and the map there, print the claims."""
    todo = jobs(seeds, length)
    simulate_all(todo, out / "runs", processes, console)
    results = pd.DataFrame([measure(out / "runs" / name) for name in todo])
    draw(results, out)
    title = f"DSSP by speed ratio and jitter, virtual time, {seeds} seeds: the paper's ratios, within 10 %"
    verdicts = conclude(claims(), results, out, console, title)
    counts = points(verdicts)
    counts.to_csv(out / "points.csv", index=False)
    console.print("where none of the paper's 6 ratios is excluded:", possible(counts).to_string(index=False), sep="\n")
    return verdicts
