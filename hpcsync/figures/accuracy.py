"""Figure `accuracy`: accuracy and loss on held-out data, against time and against samples.

Traces of one job with different seeds are drawn as one line: their mean, in a band from the smallest to the largest
value. It ends where the longest of these runs ends: a run that has ended keeps its last value, and the line is dashed
from the end of the shortest run on. Values between evaluations are interpolated linearly. A dot marks the last
evaluation of each run, a thin line a target, a circle the evaluation at which a run first reached the target, and a
tick its time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from hpcsync.figures import plotting
from hpcsync.figures.plotting import Drawing
from hpcsync.trace.reader import Trace, TraceError

QUANTITIES = ("accuracy", "loss")
POINTS = 500  # points of a line, at most
AGAINST = {"time_s": ("now_s", "time (s)"), "samples": ("samples", "samples")}


def draw(traces: list[Trace]) -> list[Drawing]:
    """Draw the figure of these traces."""
    groups = of_one_job(traces)
    first = [group[0] for group in groups]
    looks = dict(zip(plotting.labels(first), plotting.styles(first), strict=True))
    frame = pd.concat(
        [
            panel_data(group, quantity, x).assign(trace=name)
            for name, group in zip(looks, groups, strict=True)
            for quantity in QUANTITIES
            for x in AGAINST
        ]
    )
    if not len(frame):
        raise TraceError(f"{traces[0].path}: nothing to draw: no evaluation has a loss or an accuracy")
    frame = frame[["trace", "runs", "quantity", "drawn", *AGAINST, "mean", "smallest", "largest"]]
    frame = frame.astype({"runs": "Int64", "samples": "Int64"})
    shown = [quantity for quantity in QUANTITIES if (frame["quantity"] == quantity).any()]
    n_columns = max(1, min(4, 120 // (12 + max(map(len, looks)))))  # columns of the legend
    height = 0.4 + 0.17 * -(-len(looks) // n_columns) + 1.9 * len(shown)
    figure, axes = plotting.panels(len(shown), 2, height=height, sharex="col", sharey="row")
    for row, quantity in zip(axes, shown, strict=True):
        for axis, x in zip(row, AGAINST, strict=True):
            panel = frame[(frame["quantity"] == quantity) & frame[x].notna()]
            targets = {value for trace in first if (value := target(trace, quantity)) is not None}
            draw_panel(axis, panel, x, looks, sorted(targets))
            if quantity == "loss" and (frame.loc[frame["quantity"] == "loss", "smallest"] > 0).all():
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter("{x:g}")
        row[0].set_ylabel(quantity)
    for axis, (_, x_label) in zip(axes[-1], AGAINST.values(), strict=True):
        axis.set(xlabel=x_label, xlim=(0, None))
    axes[0, 1].xaxis.set_major_formatter(EngFormatter())
    seeds = {len(group) for group in groups}
    n_seeds = " or ".join(map(str, sorted(seeds)))
    how = f"mean and range of {n_seeds} seeds, dashed: some have ended; " if max(seeds) > 1 else ""
    circles = "; circles: target reached" if (frame["drawn"] == "target").any() else ""
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=min(n_columns, len(looks)),
        title=f"{how}dots: the end of each run{circles}",
        title_fontsize=7,
    )
    return [Drawing(figure, frame)]


def draw_panel(axis: Axes, panel: pd.DataFrame, x: str, looks: dict[str, Any], targets: list[float]) -> None:
    """Draw the lines, dots, circles and targets of one quantity against `x`."""
    for name in panel["trace"].unique():
        look = looks[name]
        line, dots, reached = (
            panel[(panel["trace"] == name) & (panel["drawn"] == drawn)] for drawn in ("line", "dot", "target")
        )
        at = line[x].to_numpy(float)
        complete = (line["runs"] == line["runs"].max()).to_numpy()
        n_complete = int(complete.sum())
        axis.plot(at[:n_complete], line["mean"][:n_complete], label=name, **look)
        axis.plot(at[max(0, n_complete - 1) :], line["mean"][max(0, n_complete - 1) :], **(look | {"linestyle": "--"}))
        axis.fill_between(at, line["smallest"], line["largest"], color=look["color"], alpha=0.18, lw=0)
        axis.plot(dots[x], dots["mean"], ".", ms=5, color=look["color"])
        axis.plot(reached[x], reached["mean"], "o", ms=6.5, mfc="none", mew=0.8, color=look["color"])
        axis.vlines(reached[x], 0, 0.06, transform=axis.get_xaxis_transform(), lw=0.8, color=look["color"])
    for value in targets:
        axis.axhline(value, lw=0.6, color=plotting.GREY, zorder=0)
        place: dict[str, Any] = {"xy": (0.01, value), "xycoords": ("axes fraction", "data"), "va": "bottom"}
        axis.annotate(f"target {value:g}", **place, fontsize=7, color=plotting.GREY)


def target(trace: Trace, quantity: str) -> float | None:
    """Return the accuracy or the loss at which the job ends; None if it has no such target."""
    value: float | None = getattr(trace.job.stop, f"target_{quantity}")
    return value


def reached_at(run: np.ndarray, quantity: str, value: float | None) -> np.ndarray:
    """Return the first evaluation of a run that reaches the target.

    Parameters
    ----------
    run
        Time or samples, and the quantity, of each evaluation, shape (n_evaluations, 2).
    quantity
        ``accuracy``, which must be at least the target, or ``loss``, which must be at most the target.
    value
        The target; None if there is none.

    Returns
    -------
    numpy.ndarray
        Row of that evaluation, shape (1, 2); shape (0, 2) if no evaluation reaches the target.
    """
    if value is None:
        return run[:0]
    reaches = run[:, 1] >= value if quantity == "accuracy" else run[:, 1] <= value
    return run[reaches][:1]


def of_one_job(traces: list[Trace]) -> list[list[Trace]]:
    """Group traces whose jobs differ only in the seed and that the same engine ran."""
    groups: dict[tuple[str, str], list[Trace]] = {}
    for trace in traces:
        job = trace.job.model_copy(update={"seed": 0})
        groups.setdefault((job.to_toml(), str(trace.attributes.get("engine"))), []).append(trace)
    return list(groups.values())


def panel_data(group: list[Trace], quantity: str, x: str) -> pd.DataFrame:
    """Return the lines, dots and circles of a group in a panel; no rows if no evaluation has the quantity."""
    frames = [trace.frame("evaluations").rename(columns={AGAINST[x][0]: x}) for trace in group]
    frames = [frame[np.isfinite(frame[quantity])].drop_duplicates(x, keep="last").sort_values(x) for frame in frames]
    runs = [frame[[x, quantity]].to_numpy(float) for frame in frames if len(frame)]
    if not runs:
        return pd.DataFrame()
    at = np.unique(np.concatenate([run[:, 0] for run in runs]))
    at = at[at >= max(run[0, 0] for run in runs)]
    at = at[plotting.pick(range(len(at)), POINTS)]
    values = np.array([np.interp(at, *run.T) for run in runs])  # beyond the end of a run its last value
    n_running = np.sum([at <= run[-1, 0] for run in runs], axis=0)
    spread = {"mean": values.mean(axis=0), "smallest": values.min(axis=0), "largest": values.max(axis=0)}
    last_at, last = np.array([run[-1] for run in runs]).T
    line = pd.DataFrame({x: at, **spread, "runs": n_running}).assign(drawn="line")
    dots = pd.DataFrame({x: last_at, **dict.fromkeys(spread, last)}).assign(drawn="dot", runs=len(runs))
    reached_x, reached = np.concatenate([reached_at(run, quantity, target(group[0], quantity)) for run in runs]).T
    circles = pd.DataFrame({x: reached_x, **dict.fromkeys(spread, reached)}).assign(drawn="target", runs=len(runs))
    frames = [part for part in (line, dots, circles) if len(part)]
    return pd.concat(frames).assign(quantity=quantity)
