"""Figure `controller`: decisions of DSSP's controller and the intervals they are based on.

There is one figure per trace, also of traces that differ only in the seed, since decisions of two runs have no common
times. It has one row per worker that asked the controller. Each decision shows the best number of
extra iterations (r*) and the credits granted; a stem joins them where s_U reduced the credits.
"""

from __future__ import annotations

import re

import pandas as pd
from matplotlib.ticker import MaxNLocator

from hpcsync.figures import plotting
from hpcsync.figures.plotting import Drawing
from hpcsync.trace.reader import Trace

POINTS = 500  # per worker, at most

COLUMNS = {
    "now_s": "now_s",
    "worker": "worker",
    "gap_iters": "gap_iters",
    "r_star": "r_star_iters",
    "chosen": "credits_iters",
    "interval_s": "interval_s",
    "slowest": "slowest_worker",
    "slowest_interval_s": "slowest_interval_s",
}
WHOLE = ("gap_iters", "r_star_iters", "credits_iters", "slowest_worker")


def draw(traces: list[Trace], workers: int = 8) -> list[Drawing]:
    """Draw a figure for each of these traces."""
    traces, notes = plotting.with_part(traces, has_decisions, "decision of DSSP's controller")
    tails = [re.sub(r"\W+", "-", f"-{name.lower()}").rstrip("-") for name in plotting.labels(traces)]
    if len(set(tails)) < len(tails):
        tails = [f"{tail}-{n}" for n, tail in enumerate(tails, 1)]
    drawings = [
        draw_one(trace, name, tail if len(traces) > 1 else "", workers)
        for trace, name, tail in zip(traces, plotting.labels(traces), tails, strict=True)
    ]
    return [drawings[0]._replace(notes=notes), *drawings[1:]]


def has_decisions(trace: Trace) -> bool:
    """Return whether DSSP's controller decided anything in this run."""
    return trace.job.paradigm.credits_max is not None and len(plotting.of_controller(trace, "dssp")) > 0


def draw_one(trace: Trace, name: str, tail: str, workers: int) -> Drawing:
    """Draw the figure of one trace, with this title and this tail of its file name."""
    decisions = plotting.of_controller(trace, "dssp")[list(COLUMNS)].rename(columns=COLUMNS)
    asked = sorted(decisions["worker"].unique())
    shown = plotting.pick(asked, workers)
    if len(shown) < len(asked):
        name += f": {len(shown)} of the {len(asked)} workers that asked"
    name = plotting.wrapped(name, plotting.width_inches() - plotting.MARGIN_INCHES, weight="bold")
    figure, axes = plotting.panels(
        len(shown), 2, height=0.9 + max(0.75, 1.7 - 0.3 * len(shown)) * len(shown), sharex=True, sharey="col"
    )
    frames = []
    own = {"color": trace.job.paradigm.colour}
    for (extra, intervals), worker in zip(axes, shown, strict=True):
        rows = plotting.thinned(decisions[decisions["worker"] == worker], POINTS)
        frames.append(rows)
        now_s = rows["now_s"]
        clipped = rows[rows["r_star_iters"] > rows["credits_iters"]]
        extra.vlines(clipped["now_s"], clipped["credits_iters"], clipped["r_star_iters"], color=plotting.GREY, lw=0.6)
        extra.plot(now_s, rows["r_star_iters"], "o", ms=4.5, mfc="none", mec=plotting.GREY, mew=0.7, label="r* found")
        extra.plot(now_s, rows["credits_iters"], ".", ms=5, **own, label="credits granted")
        cross = {"marker": "x", "ls": "", "ms": 3.5, "mew": 0.8, "color": "black"}
        intervals.plot(now_s, rows["slowest_interval_s"], **cross, label="slowest worker's interval")
        intervals.plot(now_s, rows["interval_s"], ".", ms=5, **own, label="this worker's interval")
        extra.set_ylabel(f"worker {worker}")
    top = trace.job.paradigm.credits_max
    assert top is not None
    axes[0, 0].set_ylim(-0.06 * top - 0.2, 1.06 * top + 0.2)
    axes[0, 0].yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes[0, 1].set_ylim(bottom=0)
    axes[0, 0].set_title("extra iterations", fontweight="normal")
    axes[0, 1].set_title("interval (s)", fontweight="normal")
    for axis, column in zip(axes[0], axes.T, strict=True):
        axis.set_xlim(left=0)
        axis.xaxis.set_major_locator(MaxNLocator(4 if plotting.is_narrow() else 6))
        column[-1].set_xlabel("time (s)")
    handles = [handle for axis in axes[0] for handle in axis.get_legend_handles_labels()[0]]
    plotting.add_legend(figure, handles, loc="outside lower center", handlelength=1.2)
    figure.suptitle(name, fontsize=8, fontweight="bold", x=0.01, ha="left")
    return Drawing(figure, pd.concat(frames).astype(dict.fromkeys(WHOLE, "Int64")), tail)
