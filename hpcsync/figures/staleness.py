"""Figure `staleness`: staleness of the applied pushes, over time and as a histogram.

Points are pushes, at most a few thousand, sampled at random; the line is the mean of consecutive pushes.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from hpcsync.figures import plotting
from hpcsync.figures.plotting import Drawing
from hpcsync.trace.reader import Trace, TraceError

BINS = 60


def draw(traces: list[Trace]) -> list[Drawing]:
    """Draw the figure of these traces."""
    names = plotting.labels(traces)
    looks = plotting.styles(traces)
    height = 0.5 + max(1.25, 2.2 - 0.3 * len(traces)) * len(traces)
    figure, axes = plotting.panels(len(traces), 2, height=height, width_ratios=[3, 1], sharex="col", sharey=True)
    frames = []
    for (series, shares), trace, name, look in zip(axes, traces, names, looks, strict=True):
        pushes = plotting.table(trace, "pushes")
        pushes = pushes[pushes["outcome"] == "applied"].rename(columns={"staleness": "staleness_updates"})
        if not len(pushes):
            raise TraceError(f"{trace.path}: nothing to draw: no push was applied")
        points = plotting.thinned(pushes)[["now_s", "worker", "staleness_updates"]].assign(drawn="point")
        means = plotting.binned(pushes, "staleness_updates")
        means = means[["now_s", "mean"]].rename(columns={"mean": "staleness_updates"}).assign(drawn="mean")
        bars = histogram(pushes["staleness_updates"]).assign(drawn="histogram")
        series.plot(points["now_s"], points["staleness_updates"], ".", ms=2.5, color=look["color"], alpha=0.5, mew=0)
        series.plot(means["now_s"], means["staleness_updates"], color=look["color"])
        height = bars["bin_updates"] * (0.9 if len(bars) <= 30 else 1)
        shares.barh(bars["staleness_updates"], bars["share"], height, color=look["color"], lw=0)
        series.set_title(name)
        frames.append(pd.concat([points, means, bars]).assign(trace=name))
    axes[0, 0].yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes[-1, 1].xaxis.set_major_formatter(plotting.percent)
    axes[-1, 0].set(xlabel="time (s)", xlim=(0, None))
    figure.supylabel("staleness (updates)", fontsize=8)
    axes[-1, 1].set_xlabel("share of pushes")
    columns = ["trace", "drawn", "now_s", "worker", "staleness_updates", "bin_updates", "share"]
    frame = pd.concat(frames)[columns].astype({"worker": "Int64", "bin_updates": "Int64"})
    return [Drawing(figure, frame)]


def histogram(staleness: pd.Series) -> pd.DataFrame:
    """Return the share of each staleness, or of bins of equal width if there are many values."""
    bin_updates = int(staleness.max()) // BINS + 1
    share = np.bincount(staleness // bin_updates) / len(staleness)
    middle = np.arange(len(share)) * bin_updates + (bin_updates - 1) / 2
    return pd.DataFrame({"staleness_updates": middle, "bin_updates": bin_updates, "share": share})
