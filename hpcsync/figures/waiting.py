"""Figure `waiting`: shares of loading, compute, wait and transfer in the time of each worker and of all workers.

Workers wait for grants, or for each other in a run without servers.
"""

from __future__ import annotations

import math
import textwrap

import pandas as pd

from hpcsync.figures import plotting
from hpcsync.figures.plotting import Drawing
from hpcsync.trace.reader import Trace, TraceError

COLUMNS = {"load": "load_s", "compute": "compute_s", "wait": "wait_s", "transfer": "comm_s"}
INK = {"transfer": "white", "compute": "white"}  # colour of the text on a bar; black elsewhere


def draw(traces: list[Trace], workers: int = 16) -> list[Drawing]:
    """Draw the figure of these traces."""
    frames = []
    for name, trace in zip(plotting.labels(traces), traces, strict=True):
        frames.append(shares(trace, workers).assign(trace=name))
        if (n_shown := len(frames[-1]) - 1) < trace.n_workers:
            frames[-1]["trace"] += f" ({n_shown} of {trace.n_workers} workers)"
    n_columns = 2 if len(frames) in (2, 4) else min(3, len(frames))
    n_rows = math.ceil(len(frames) / n_columns)
    longest = [max(map(len, frames[row * n_columns : (row + 1) * n_columns])) for row in range(n_rows)]
    figure, axes = plotting.panels(
        n_rows,
        n_columns,
        height=0.6 + sum(0.55 + 0.17 * n_bars for n_bars in longest),
        width=(plotting.COLUMN_INCHES, 4.9, plotting.PAGE_INCHES)[n_columns - 1],
        height_ratios=[n_bars + 0.7 for n_bars in longest],
    )
    for axis in axes.flat[len(frames) :]:
        axis.remove()
    for n, (axis, frame) in enumerate(zip(axes.flat, frames, strict=False)):
        rows = [-0.5, *range(1, len(frame))]  # space between the bar of all workers and the others
        left = pd.Series(0.0, frame.index)
        for activity, colour in plotting.ACTIVITY_COLOURS.items():
            width = frame[f"{activity}_share"]
            axis.barh(rows, width, 0.8, left=left, color=colour, lw=0)
            if (share := width.iloc[0]) > 0.12:
                place = {"x": left.iloc[0] + share / 2, "y": rows[0], "ha": "center", "va": "center_baseline"}
                axis.text(s=f"{100 * share:.0f} %", **place, fontsize=7, color=INK.get(activity, "black"))
            left += width
        axis.set_title(textwrap.fill(frame["trace"].iloc[0], 30))
        axis.set(xlim=(0, 1), ylim=(longest[n // n_columns] - 0.4, -1.1))
        axis.set_yticks(rows, frame["worker"])
        axis.tick_params(axis="y", length=0)
        axis.xaxis.set_major_formatter(plotting.percent)
        axis.set_xticks([0, 0.25, 0.5, 0.75, 1])
    figure.supxlabel("share of the workers' time", fontsize=8)
    figure.supylabel("worker", fontsize=8)
    frame = pd.concat(frames)
    plotting.legend_of_activities(figure, [name for name, column in COLUMNS.items() if frame[column].any()])
    seconds = list(COLUMNS.values())
    columns = ["trace", "worker", *seconds, *(f"{activity}_share" for activity in COLUMNS)]
    return [Drawing(figure, frame[columns])]


def shares(trace: Trace, workers: int) -> pd.DataFrame:
    """Return seconds and shares of the activities: the first row is for all workers, then one per shown worker."""
    sums = plotting.iterations(trace).groupby("worker")[list(COLUMNS.values())].sum()
    frame = pd.concat([sums.sum().to_frame("all").T, sums.loc[plotting.pick(sums.index, workers)]])
    total_s = frame.sum(axis=1)
    if not total_s.all():
        raise TraceError(f"{trace.path}: nothing to draw: the iterations of a worker took no time")
    for activity, column in COLUMNS.items():
        frame[f"{activity}_share"] = frame[column] / total_s
    return frame.rename_axis("worker").reset_index()
