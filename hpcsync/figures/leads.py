"""Figure `leads`: lead of each worker over the slowest one after its push, and the bound of the paradigm.

There is one panel per job. Points are pushes, at most a few thousand, sampled at random; the line is the largest of
consecutive pushes, over all pushes. Traces of one job with different seeds share a panel: points are those of all
seeds, and the line is the mean of their largest leads, in a band that is the 95 % interval of the mean, or with two
seeds the range. Leads are counted from the pushes, not read from the grants.
"""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.ticker import MaxNLocator

from hpcsync.audit.server_recount import Recount
from hpcsync.figures import plotting
from hpcsync.figures.plotting import Drawing
from hpcsync.paradigms.options import ParadigmOptions
from hpcsync.trace.reader import Trace, TraceError
from hpcsync.trace.schema import Rows


def draw(traces: list[Trace]) -> list[Drawing]:
    """Draw the figure of these traces."""
    traces, notes = plotting.with_servers(traces)
    groups = plotting.of_one_job(traces)
    first = [group[0] for group in groups]
    height = 0.5 + max(1.25, 2.2 - 0.3 * len(groups)) * len(groups)
    figure, axes = plotting.panels(len(groups), height=height, sharex=True)
    frames = []
    for axis, group, name, look in zip(axes[:, 0], groups, plotting.labels(first), plotting.styles(first), strict=True):
        runs = [pushes_of(trace) for trace in group]
        pushes = pd.concat(runs)
        points = plotting.thinned(pushes).assign(drawn="point")
        line = plotting.averaged([largest_of(run) for run in runs])
        axis.plot(points["now_s"], points["push_gap_iters"], ".", ms=2.5, color=look["color"], alpha=0.5, mew=0)
        solid = {"color": look["color"], "linestyle": "-", "linewidth": 1}
        plotting.draw_mean(axis, line, solid, steps="mid")
        title, bound_iters = name, push_lead_bound(group[0].job.paradigm)
        if bound_iters is None:
            title = f"{name}: no bound"
        else:
            axis.axhline(bound_iters, lw=0.8, color="black", ls=(0, (6, 3)), zorder=0)
            place = {"xy": (1, bound_iters), "xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
            axis.annotate(f"bound {bound_iters}", **place, fontsize=7)
        plotting.add_title(axis, title)
        axis.set(ylim=(0, 1.15 * max(pushes["push_gap_iters"].max(), bound_iters or 1)))
        axis.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        largest = line.rename(columns=NAMES).assign(drawn="largest")
        frames.append(pd.concat([points, largest]).assign(trace=name, bound_iters=bound_iters))
    axes[-1, 0].set(xlabel="time (s)", xlim=(0, None))
    figure.supylabel("iterations ahead of the slowest", fontsize=8)
    words = plotting.about_band(groups)
    plotting.add_note(figure, words and f"points: pushes of all seeds; lines: largest of consecutive pushes, {words}")
    frame = pd.concat(frames).astype(dict.fromkeys(("worker", "bound_iters", "runs"), "Int64"))
    return [Drawing(figure, frame[["trace", "drawn", "worker", "runs", *NAMES.values(), "bound_iters"]], notes=notes)]


NAMES = {"x": "now_s", "mean": "push_gap_iters", "low": "push_gap_iters_low", "high": "push_gap_iters_high"}


def pushes_of(trace: Trace) -> pd.DataFrame:
    """Return the pushes of a run with the lead of their workers."""
    recount = Recount(trace)
    pushes = pd.DataFrame(recount.pushes[["now_s", "worker"]]).assign(push_gap_iters=recount.push_lead)
    if not len(pushes):
        raise TraceError(f"{trace.path}: nothing to draw: no push to count")
    return pushes


def largest_of(pushes: pd.DataFrame) -> Rows:
    """Return time and lead of the largest of consecutive pushes, shape (n_bins, 2)."""
    return plotting.binned(pushes, "push_gap_iters")[["now_s", "largest"]].to_numpy(float)


def push_lead_bound(paradigm: ParadigmOptions) -> int | None:
    """Return the largest push lead that the paradigm allows, one more than at the start of an iteration; None: any."""
    return int(paradigm.lead_bound) + 1 if math.isfinite(paradigm.lead_bound) else None
