"""Figure `waiting`: shares of loading, compute, wait and transfer in the time of each worker and of all workers.

The time of compressing pushes, and that between iterations, stays white.

Workers wait for grants, or for each other in a run without servers. Traces of one job with different seeds share a
panel: bars are the mean shares, and the whisker at the end of each part is the 95 % interval of its mean share, or with
two seeds the range; it is cut at 100 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from hpcsync.figures import plotting
from hpcsync.figures.plotting import Drawing
from hpcsync.report.between import WORDS as BETWEEN
from hpcsync.report.between import Between
from hpcsync.report.variants import mean_and_band
from hpcsync.trace.reader import Trace, TraceError

COLUMNS = {"load": "load_s", "compute": "compute_s", "wait": "wait_s", "transfer": "comm_s"}
MENTIONED = 0.01  # share of a worker's time from which on the rest of its time is mentioned
INK = {"transfer": "white", "compute": "white"}  # colour of the text on a bar; black elsewhere


def draw(traces: list[Trace], workers: int = 16) -> list[Drawing]:
    """Draw the figure of these traces."""
    groups = plotting.of_one_job(traces)
    frames = []
    for name, group in zip(plotting.labels([group[0] for group in groups]), groups, strict=True):
        frames.append(mean_shares(group, workers).assign(trace=name))
        if (n_shown := len(frames[-1]) - 1) < group[0].n_workers:
            frames[-1]["trace"] += f" ({n_shown} of {group[0].n_workers} workers)"
    n_columns = 1 if plotting.is_narrow() else 2 if len(frames) in (2, 4) else min(3, len(frames))
    n_rows = math.ceil(len(frames) / n_columns)
    longest = [max(map(len, frames[row * n_columns : (row + 1) * n_columns])) for row in range(n_rows)]
    figure, axes = plotting.panels(
        n_rows,
        n_columns,
        height=0.4 + sum(0.55 + 0.17 * n_bars for n_bars in longest),
        sharex=plotting.is_narrow(),
        height_ratios=[n_bars + 0.7 for n_bars in longest],
    )
    for axis in axes.flat[len(frames) :]:
        axis.remove()
    for n, (axis, frame) in enumerate(zip(axes.flat, frames, strict=False)):
        rows = [-0.5, *range(1, len(frame))]  # space between the bar of all workers and the others
        draw_bars(axis, frame, rows)
        plotting.add_title(axis, frame["trace"].iloc[0], plotting.width_inches() / n_columns)
        axis.set(xlim=(0, 1), ylim=(longest[n // n_columns] - 0.4, -1.1))
        axis.set_yticks(rows, frame["worker"])
        axis.tick_params(axis="y", length=0)
        axis.xaxis.set_major_formatter(plotting.percent)
        axis.set_xticks([0, 0.25, 0.5, 0.75, 1])
    figure.supxlabel("share of the workers' time", fontsize=8)
    figure.supylabel("worker", fontsize=8)
    frame = pd.concat(frames)
    words = plotting.about_band(groups)
    drawn = [name for name, column in COLUMNS.items() if frame[column].any()]
    white = (frame["between_s"] >= MENTIONED * frame[[*COLUMNS.values(), "between_s"]].sum(axis=1)).any()
    notes = [f"bars and whiskers: {words}"] * bool(words) + [f"white: {BETWEEN}"] * bool(white)
    plotting.legend_of_activities(figure, drawn, title="; ".join(notes))
    ends = [f"{activity}_share{end}" for activity in COLUMNS for end in ("", "_low", "_high")]
    return [Drawing(figure, frame[["trace", "worker", "runs", *COLUMNS.values(), "between_s", *ends]])]


def draw_bars(axis: Axes, frame: pd.DataFrame, rows: list[float]) -> None:
    """Draw the bars of a panel, their whiskers, and the larger shares of all workers as text."""
    left = pd.Series(0.0, frame.index)
    for n, (activity, colour) in enumerate(plotting.ACTIVITY_COLOURS.items()):
        mean, low, high = (frame[f"{activity}_share{end}"] for end in ("", "_low", "_high"))
        axis.barh(rows, mean, 0.8, left=left, color=colour, lw=0)
        beside = 0.22 * (n - 1.5)  # whiskers of neighbouring parts must not cover each other
        plotting.draw_whiskers(axis, left + mean, left + low, left + high, [row + beside for row in rows])
        if (share := mean.iloc[0]) > 0.12:
            place = {"x": left.iloc[0] + share / 2, "y": rows[0], "ha": "center", "va": "center_baseline"}
            axis.text(s=f"{100 * share:.0f} %", **place, fontsize=7, color=INK.get(activity, "black"))
        left += mean


def mean_shares(group: Sequence[Trace], workers: int) -> pd.DataFrame:
    """Return mean seconds, and mean shares with both ends of their bands, of the activities over seeds.

    The first row is for all workers, then one per shown worker that has iterations with every seed.
    """
    runs = [shares(trace) for trace in group]
    common = [worker for worker in runs[0].index[1:] if all(worker in run.index for run in runs)]
    rows = ["all", *plotting.pick(common, workers)]
    frame = sum(run.loc[rows, [*COLUMNS.values(), "between_s"]] for run in runs) / len(runs)
    for activity in COLUMNS:
        band = mean_and_band(np.array([run.loc[rows, f"{activity}_share"] for run in runs]))
        for end, values in zip(("", "_low", "_high"), band, strict=True):
            frame[f"{activity}_share{end}"] = values
    return frame.assign(runs=len(runs)).rename_axis("worker").reset_index()


def shares(trace: Trace) -> pd.DataFrame:
    """Return seconds and shares of the activities: the first row is for all workers, then one per worker.

    Shares are of the sum of the activities, the time of compressing, and that between iterations.
    """
    sums = plotting.iterations(trace).groupby("worker")[list(COLUMNS.values())].sum()
    between = Between.of(trace)
    between.add(trace.tables["pushes" if trace.job.has_servers else "exchanges"])
    sums["between_s"] = between.seconds[sums.index]
    frame = pd.concat([sums.sum().to_frame("all").T, sums])
    total_s = frame.sum(axis=1)
    if not total_s.all():
        raise TraceError(f"{trace.path}: nothing to draw: the iterations of a worker took no time")
    for activity, column in COLUMNS.items():
        frame[f"{activity}_share"] = frame[column] / total_s
    return frame
