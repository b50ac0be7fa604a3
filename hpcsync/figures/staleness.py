"""Figure `staleness`: staleness of the applied pushes, over time and as a histogram.

Points are pushes, at most a few thousand, sampled at random; the line is the mean of consecutive pushes. Traces of one
job with different seeds share a panel: points are those of all seeds, the line and the bars are means over the seeds.
The band of the line and the whisker of a bar are the 95 % interval of the mean, or with two seeds the range.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from hpcsync.figures import plotting
from hpcsync.figures.plotting import Drawing
from hpcsync.report.variants import mean_and_band
from hpcsync.trace.reader import Trace, TraceError
from hpcsync.trace.schema import Rows

BINS = 60


def draw(traces: list[Trace]) -> list[Drawing]:
    """Draw the figure of these traces."""
    traces, notes = plotting.with_servers(traces)
    groups = plotting.of_one_job(traces)
    first = [group[0] for group in groups]
    height = 0.5 + max(1.25, 2.2 - 0.3 * len(groups)) * len(groups)
    ratios = [2, 1] if plotting.is_narrow() else [3, 1]
    figure, axes = plotting.panels(len(groups), 2, height=height, width_ratios=ratios, sharex="col", sharey=True)
    figure.get_layout_engine().set(w_pad=0.08)
    frames = []
    for (series, shares), group, name, look in zip(
        axes, groups, plotting.labels(first), plotting.styles(first), strict=True
    ):
        runs = [applied(trace) for trace in group]
        pushes = pd.concat(runs)
        points = plotting.thinned(pushes)[["now_s", "worker", "staleness_updates"]].assign(drawn="point")
        line = plotting.averaged([means_of(run) for run in runs])
        bars = histogram([run["staleness_updates"] for run in runs])
        series.plot(points["now_s"], points["staleness_updates"], ".", ms=2.5, color=look["color"], alpha=0.5, mew=0)
        plotting.draw_mean(series, line, {"color": look["color"], "linestyle": "-"})
        height = bars["bin_updates"] * (0.9 if len(bars) <= 30 else 1)
        shares.barh(bars["staleness_updates"], bars["share"], height, color=look["color"], lw=0)
        plotting.draw_whiskers(shares, bars["share"], bars["share_low"], bars["share_high"], bars["staleness_updates"])
        plotting.add_title(series, name)
        means = line.rename(columns=NAMES).assign(drawn="mean")
        frames.append(pd.concat([points, means, bars.assign(drawn="histogram")]).assign(trace=name))
    least, most = axes[0, 0].get_ylim()  # ends of intervals may lie below 0
    axes[0, 0].set_ylim(max(least, -0.8), max(most, 1.5))
    axes[0, 0].yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes[-1, 1].xaxis.set_major_formatter(plotting.percent)
    axes[-1, 1].xaxis.set_major_locator(MaxNLocator(2 if plotting.is_narrow() else 4))
    axes[-1, 0].set(xlabel="time (s)", xlim=(0, None))
    figure.supylabel("staleness (updates)", fontsize=8)
    axes[-1, 1].set(xlabel="share of\npushes" if plotting.is_narrow() else "share of pushes", xlim=(0, None))
    words = plotting.about_band(groups)
    plotting.add_note(figure, words and f"points: pushes of all seeds; lines and bars: {words}")
    frame = pd.concat(frames).astype(dict.fromkeys(("worker", "bin_updates", "runs"), "Int64"))
    columns = ["trace", "drawn", "worker", "runs", *NAMES.values(), "bin_updates", "share", "share_low", "share_high"]
    return [Drawing(figure, frame[columns], notes=notes)]


NAMES = {"x": "now_s", "mean": "staleness_updates", "low": "staleness_updates_low", "high": "staleness_updates_high"}


def applied(trace: Trace) -> pd.DataFrame:
    """Return the applied pushes of a run."""
    pushes = plotting.table(trace, "pushes")
    pushes = pushes[pushes["outcome"] == "applied"].rename(columns={"staleness": "staleness_updates"})
    if not len(pushes):
        raise TraceError(f"{trace.path}: nothing to draw: no push was applied")
    return pushes


def means_of(pushes: pd.DataFrame) -> Rows:
    """Return time and mean staleness of consecutive pushes, shape (n_bins, 2)."""
    return plotting.binned(pushes, "staleness_updates")[["now_s", "mean"]].to_numpy(float)


def histogram(runs: Sequence[pd.Series]) -> pd.DataFrame:
    """Return the share of each staleness, or of bins of equal width if there are many values, as mean over runs."""
    largest = max(int(staleness.max()) for staleness in runs)
    bin_updates = largest // BINS + 1
    n_bins = largest // bin_updates + 1
    counts = [np.bincount(staleness // bin_updates, minlength=n_bins) / len(staleness) for staleness in runs]
    share, low, high = mean_and_band(np.array(counts))
    middle = np.arange(n_bins) * bin_updates + (bin_updates - 1) / 2
    bars = {"staleness_updates": middle, "bin_updates": bin_updates, "share": share}
    return pd.DataFrame({**bars, "share_low": low, "share_high": high})
