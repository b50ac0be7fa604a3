"""Figure `accuracy`: accuracy and loss on held-out data, against time and against samples.

Traces of one job with different seeds are drawn as one line: their mean, in a band that is the 95 % interval of the
mean, or with two seeds the range of the values. It ends where the longest of these runs ends: a run that has ended
keeps its last value, and the line is thin from the end of the shortest run on. Values between evaluations are
interpolated linearly. A dot marks the last evaluation of each run, a thin line a target, a circle the evaluation at
which a run first reached the target, and a tick its time. Runs whose last loss is not finite are named above.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from hpcsync.figures import plotting
from hpcsync.figures.plotting import Drawing
from hpcsync.trace.reader import Trace, TraceError
from hpcsync.trace.schema import Rows

QUANTITIES = ("accuracy", "loss")
AGAINST = {"time_s": ("now_s", "time (s)"), "samples": ("samples", "samples")}


def draw(traces: list[Trace]) -> list[Drawing]:
    """Draw the figure of these traces."""
    groups = plotting.of_one_job(traces)
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
        raise TraceError(f"{traces[0].path}: nothing to draw: no evaluation has a finite loss or an accuracy")
    frame = frame[["trace", "runs", "quantity", "drawn", *AGAINST, "mean", "low", "high"]]
    frame = frame.astype({"runs": "Int64", "samples": "Int64"})
    shown = [quantity for quantity in QUANTITIES if (frame["quantity"] == quantity).any()]
    figure, axes = panels(len(shown))
    diverged = [words for name, group in zip(looks, groups, strict=True) if (words := _diverged(name, group))]
    for row, quantity in zip(axes, shown, strict=True):
        for axis, x in zip(row, AGAINST, strict=True):
            of_quantity = frame[frame["quantity"] == quantity]
            panel = of_quantity[of_quantity[x].notna()]
            targets = {value for trace in first if (value := target(trace, quantity)) is not None}
            is_log = quantity == "loss" and (of_quantity["mean"] > 0).all() and all(value > 0 for value in targets)
            if is_log:
                bottom = min([plotting.log_bottom(of_quantity), *(0.9 * value for value in targets)])
                panel = panel.assign(low=panel["low"].clip(lower=bottom))
            draw_panel(axis, panel, x, looks, sorted(targets))
            if is_log:
                plotting.set_log_scale(axis, bottom)
            if quantity == "accuracy":
                least, most = axis.get_ylim()
                axis.set_ylim(max(least, -0.02), min(most, 1.02))  # ends of intervals may lie beyond 0 and 1
            if x == "time_s" or plotting.is_narrow():
                axis.set_ylabel(quantity)
    for axis, (_, x_label) in zip(axes[-1], AGAINST.values(), strict=True):
        axis.set(xlabel=x_label, xlim=(0, None))
    axes[0, 1].xaxis.set_major_formatter(EngFormatter())
    words = plotting.about_band(groups)
    how = f"{words}, thin: some have ended; " if words else ""
    circles = "; circles: target reached" if (frame["drawn"] == "target").any() else ""
    handles = axes[0, 0].get_legend_handles_labels()[0]
    lost = "".join(f"; {words}" for words in diverged)
    plotting.add_legend(figure, handles, f"{how}dots: the end of each run{circles}{lost}")
    return [Drawing(figure, frame)]


def _diverged(name: str, group: list[Trace]) -> str:
    """Return in words which runs of a group end with a loss that is not finite, whose lines end before; "" if none."""
    losses = [trace.tables["evaluations"]["loss"] for trace in group]
    n_lost = sum(len(each) > 0 and not np.isfinite(each[-1]) for each in losses)
    of = f" in {n_lost} of {len(group)} runs" if n_lost < len(group) else ""
    return f"{name}: loss not finite at the end{of}" if n_lost else ""


def panels(n_quantities: int) -> tuple[Figure, Rows]:
    """Return a figure and its axes, shape (n_quantities, 2): against time and against samples.

    Panels of a quantity share their y axis, and those of a column their x axis. In a narrow figure the panels against
    samples stand below those against time.
    """
    if not plotting.is_narrow():
        figure, axes = plotting.panels(n_quantities, 2, height=0.2 + 1.9 * n_quantities, sharex="col", sharey="row")
        return figure, axes
    figure, axes = plotting.panels(2 * n_quantities, height=0.4 + 2 * 1.25 * n_quantities)
    axes = axes.reshape(2, n_quantities).T
    for n, (time, samples) in enumerate(axes):
        samples.sharey(time)
        for axis, lowest in ((time, axes[-1, 0]), (samples, axes[-1, 1])):
            if n < n_quantities - 1:
                axis.sharex(lowest)
                axis.tick_params(labelbottom=False)
    return figure, axes


def draw_panel(axis: Axes, panel: pd.DataFrame, x: str, looks: dict[str, Any], targets: list[float]) -> None:
    """Draw the lines, dots, circles and targets of one quantity against `x`."""
    for name in panel["trace"].unique():
        look = looks[name]
        line, dots, reached = (
            panel[(panel["trace"] == name) & (panel["drawn"] == drawn)] for drawn in ("line", "dot", "target")
        )
        plotting.draw_mean(axis, line.rename(columns={x: "x"}).astype({"x": float}), look, name)
        axis.plot(dots[x], dots["mean"], ".", ms=5, color=look["color"])
        circle: dict[str, Any] = {"ms": 6.5, "mfc": "none", "mew": 0.8, "clip_on": False, "in_layout": False}
        axis.plot(reached[x], reached["mean"], "o", color=look["color"], **circle)
        axis.vlines(reached[x], 0, 0.06, transform=axis.get_xaxis_transform(), lw=0.8, color=look["color"])
    for value in targets:
        axis.axhline(value, lw=0.6, color=plotting.GREY, zorder=0)
        place: dict[str, Any] = {"xy": (0.01, value), "xycoords": ("axes fraction", "data"), "va": "bottom"}
        axis.annotate(f"target {value:g}", **place, fontsize=7, color=plotting.GREY)


def target(trace: Trace, quantity: str) -> float | None:
    """Return the accuracy or the loss at which the job ends; None if it has no such target."""
    value: float | None = getattr(trace.job.stop, f"target_{quantity}")
    return value


def reached_at(run: Rows, quantity: str, value: float | None) -> Rows:
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


def panel_data(group: list[Trace], quantity: str, x: str) -> pd.DataFrame:
    """Return the lines, dots and circles of a group in a panel; no rows if no evaluation has the quantity."""
    frames = [trace.frame("evaluations").rename(columns={AGAINST[x][0]: x}) for trace in group]
    frames = [frame[np.isfinite(frame[quantity])].drop_duplicates(x, keep="last").sort_values(x) for frame in frames]
    runs = [frame[[x, quantity]].to_numpy(float) for frame in frames if len(frame)]
    if not runs:
        return pd.DataFrame()
    line = plotting.averaged(runs).rename(columns={"x": x}).assign(drawn="line")
    values = ("mean", "low", "high")
    last_at, last = np.array([run[-1] for run in runs]).T
    dots = pd.DataFrame({x: last_at, **dict.fromkeys(values, last)}).assign(drawn="dot", runs=len(runs))
    reached_x, reached = np.concatenate([reached_at(run, quantity, target(group[0], quantity)) for run in runs]).T
    circles = pd.DataFrame({x: reached_x, **dict.fromkeys(values, reached)}).assign(drawn="target", runs=len(runs))
    frames = [part for part in (line, dots, circles) if len(part)]
    return pd.concat(frames).assign(quantity=quantity)
