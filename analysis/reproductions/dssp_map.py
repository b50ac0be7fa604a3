"""DSSP between two unlike workers: what its verdict depends on, as maps over their speed ratio and their regularity.

A controller that predicts pushes from the last interval does better the more regular the intervals are, and the paper
gives neither the ratio of its two GPUs' speeds nor the jitter of their iterations. Throughput is measured on a fine
grid, times to the accuracy of the reproduction on a coarse one, with the learning rate on the paper's clock, and with
a server that merges the pushes of workers that wait or makes an update of each.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import colors
from rich.console import Console

from hpcsync.config.job import Job
from hpcsync.figures import plotting
from reproductions import dssp
from reproductions.claims import FAILS, HOLDS, UNTOLD, Claim, Of, conclude, of, ratio
from reproductions.simulating import simulate_all

FAST_S = 0.02
RATIOS = (1.0, 1.25, 1.5, 1.8, 2.0, 2.3, 2.6, 3.0)
JITTERS = (0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1)
COARSE_RATIOS = (1.5, 2.0, 2.3, 2.6)
COARSE_JITTERS = (0.005, 0.02, 0.05)
METHODS = ("SSP 3", "ASP", "DSSP", "DSSP paper")
MODES = {"DSSP": "bounded", "DSSP paper": "as printed"}
ARMS = {"merged": ("SSP 3", *MODES), "updates": ("BSP", *METHODS)}  # under BSP and ASP there is nothing to merge
SERVERS = {"merged": "pushes merged", "updates": "an update for each push"}

# What the paper prints for two unlike GPUs. Table I: seconds to an accuracy of 0.67. Fig. 4: seconds of 300 passes.
TABLE_I_S = {"BSP": 6159.2, "ASP": 2993.1, "SSP 3": 5678.2, "DSSP": 3016.4}
FIG_4_S = {"BSP": 8954.0, "ASP": 7027.0, "SSP 3": 8803.0, "DSSP": 8917.0}  # SSP: the middle of 8760 to 8846
NEAR = 0.1  # of the printed ratio


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
    """Return what the paper prints, at every point of the coarse map, for both modes and both servers."""
    return [
        claim
        for arm in SERVERS
        for each in COARSE_RATIOS
        for jitter in COARSE_JITTERS
        for method in MODES
        for claim in _printed(arm, each, jitter, method)
    ]


def _printed(arm: str, each: float, jitter: float, method: str) -> list[Claim]:
    name = f"time-{each:g}-{jitter:g}"
    where = f"{SERVERS[arm]}, ratio {each:g}, jitter {100 * jitter:g} %, {MODES[method]}"

    def over(column: str, other: str) -> Of:
        other_arm = arm if other in ARMS[arm] else "updates"
        return ratio(of(column, name, other_arm, other), of(column, name, arm, method))

    sources = (
        ("{}'s time / DSSP's", TABLE_I_S, "target_s"),
        ("length of {}'s run / of DSSP's", FIG_4_S, "duration_s"),
    )
    return [
        _near(f"{where}: {says.format(other)}", printed[other] / printed["DSSP"], over(column, other))
        for other in ("BSP", "ASP", "SSP 3")
        for says, printed, column in sources
    ]


def _near(says: str, printed: float, number: Of) -> Claim:
    return Claim(says, f"{printed:.2f}", number, round((1 - NEAR) * printed, 2), round((1 + NEAR) * printed, 2))


def throughputs(results: pd.DataFrame) -> pd.DataFrame:
    """Return the ratio of each method's samples a second to SSP's, by point and seed."""
    fine = results[results["setting"].str.startswith("speed-")]
    wide = fine.pivot(index=["setting", "seed"], columns="paradigm", values="samples_per_s")
    wide = wide.div(wide["SSP 3"], axis=0)[[name for name in METHODS if name != "SSP 3"]].reset_index()
    points = wide["setting"].str.split("-", expand=True)
    return wide.drop(columns="setting").assign(ratio=points[1].astype(float), jitter=points[2].astype(float))


def draw(results: pd.DataFrame, folder: Path) -> None:
    """Maps of the throughput of both modes and of ASP, over SSP's."""
    frame = throughputs(results)
    titles = {"DSSP": "DSSP, bounded", "DSSP paper": "DSSP, as printed", "ASP": "ASP"}
    figure, axes = plotting.panels(1, len(titles), height=2.7, sharey=True)
    most = frame["ratio"].max() / 2 + 0.5
    for axis, (method, title) in zip(axes[0], titles.items(), strict=True):
        values = frame.pivot_table(index="ratio", columns="jitter", values=method)
        image = axis.imshow(values, origin="lower", aspect="auto", cmap="cividis", norm=colors.Normalize(1.0, most))
        for (row, column), value in np.ndenumerate(values.to_numpy()):
            dark = value < (1 + most) / 2
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", size=5.5, color="w" if dark else "k")
        axis.set_xticks(range(len(values.columns)), [f"{100 * jitter:g}" for jitter in values.columns])
        axis.set_yticks(range(len(values.index)), [f"{each:g}" for each in values.index])
        axis.tick_params(length=0)
        axis.set_title(title)
    axes[0, 0].set_ylabel("time of an iteration,\nslow worker / fast worker")
    figure.supxlabel("jitter of the times (%)", fontsize=8)
    figure.colorbar(image, ax=axes[0].tolist(), label="samples a second / SSP's with s = 3", pad=0.02)
    plotting.save(figure, frame, folder, "dssp-map")


def points(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return for each server, mode and point of the coarse map how many ratios of each source have which verdict."""
    words = verdicts["claim"].str.extract(
        r"(?P<server>[^,]+), ratio (?P<ratio>[\d.]+), jitter (?P<jitter>[\d.]+) %, (?P<mode>[^:]+): (?P<length>length)?"
    )
    source = words["length"].isna().map({True: "Table I", False: "Fig. 4"}).rename("source")
    at = [words[name] for name in ("server", "mode", "ratio", "jitter")]
    counts = pd.crosstab([*at, source], verdicts["verdict"])
    return counts.reindex(columns=[HOLDS, FAILS, UNTOLD], fill_value=0).reset_index()


def possible(counts: pd.DataFrame) -> pd.DataFrame:
    """Return the servers, modes and points at which no printed ratio is excluded, with how many hold."""
    at = ["server", "mode", "ratio", "jitter"]
    together = counts.groupby(at)[[HOLDS, FAILS]].sum().reset_index()
    return together.loc[together[FAILS] == 0, [*at, HOLDS]]


def reproduce(out: Path, seeds: int, processes: int, console: Console, length: float = 1.0) -> pd.DataFrame:
    """Simulate what is missing in the folder, write results, claims and the map there, print the claims."""
    todo = jobs(seeds, length)
    simulate_all(todo, out / "runs", processes, console)
    results = pd.DataFrame([dssp.measure(out / "runs" / name)[0] for name in todo])
    draw(results, out)
    title = f"DSSP by speed ratio and jitter, virtual time, {seeds} seeds: what the paper prints, within 10 %"
    verdicts = conclude(claims(), results, out, console, title)
    counts = points(verdicts)
    counts.to_csv(out / "points.csv", index=False)
    console.print("where none of the 6 printed ratios is excluded:", possible(counts).to_string(index=False), sep="\n")
    return verdicts
