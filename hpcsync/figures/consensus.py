"""Figure `consensus`: consensus distance over time, if each worker has its own weights.

It is the root mean square distance of the workers' weights from their mean, at each evaluation. On a logarithmic scale
a distance of 0 is a gap in the line.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from hpcsync.figures import plotting
from hpcsync.figures.plotting import Drawing
from hpcsync.trace.reader import Trace, TraceError


def draw(traces: list[Trace]) -> list[Drawing]:
    """Draw the figure of these traces."""
    names, looks = plotting.labels(traces), plotting.styles(traces)
    frames = [distances(trace).assign(trace=name) for name, trace in zip(names, traces, strict=True)]
    frame = pd.concat(frames)[["trace", "now_s", "samples", "consensus_distance"]]
    n_columns = max(1, min(3, 90 // (12 + max(map(len, names)))))  # columns of the legend
    height = 2.4 + 0.17 * -(-len(names) // n_columns)
    figure, ((axis,),) = plotting.panels(1, height=height, width=plotting.PAGE_INCHES)
    logarithmic = (frame["consensus_distance"] > 0).any()
    for name, look, one in zip(names, looks, frames, strict=True):
        distance = one["consensus_distance"]
        always = ": always 0" if not distance.any() else ""
        shown = distance.where(distance > 0) if logarithmic else distance
        axis.plot(one["now_s"], shown, marker=".", ms=3, label=f"{name}{always}", **look)
    if logarithmic:
        axis.set_yscale("log")
    axis.set(xlabel="time (s)", ylabel="consensus distance", xlim=(0, None))
    figure.legend(loc="outside upper center", ncols=min(n_columns, len(names)))
    return [Drawing(figure, frame)]


def distances(trace: Trace) -> pd.DataFrame:
    """Return the evaluations that have a distance."""
    evaluations = trace.frame("evaluations")
    known = evaluations[np.isfinite(evaluations["consensus_distance"])]
    if not len(known):
        raise TraceError(f"{trace.path}: nothing to draw: no consensus distance in this run, {plotting.label(trace)}")
    return known.sort_values("now_s")
