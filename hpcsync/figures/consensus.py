"""Figure `consensus`: consensus distance over time, if each worker has its own weights.

It is the root mean square distance of the workers' weights from their mean, at each evaluation. A distance of 0 is left
out of a run that has others, such as that of the common weights with which local SGD ends. Traces of one job with
different seeds are one line: their mean, in a band that is the 95 % interval of the mean, or with two seeds the range
of the values; the line is thin where some of the runs have ended. A band that reaches below half the smallest mean
leaves the panel there.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from hpcsync.figures import plotting
from hpcsync.figures.plotting import Drawing
from hpcsync.trace.reader import Trace

NAMES = {"x": "now_s", "mean": "consensus_distance", "low": "consensus_distance_low", "high": "consensus_distance_high"}


def draw(traces: list[Trace]) -> list[Drawing]:
    """Draw the figure of these traces."""
    traces, notes = plotting.with_part(traces, lambda trace: bool(len(distances(trace))), "consensus distance")
    groups = plotting.of_one_job(traces)
    first = [group[0] for group in groups]
    names = plotting.labels(first)
    runs = [[distances(trace) for trace in group] for group in groups]
    lines = [mean_of(of_group).assign(trace=name) for name, of_group in zip(names, runs, strict=True)]
    figure, ((axis,),) = plotting.panels(1, height=2.4)
    is_log = (pd.concat(lines)["mean"] > 0).any()
    bottom = plotting.log_bottom(pd.concat(lines)) if is_log else 0.0
    for name, look, line in zip(names, plotting.styles(first), lines, strict=True):
        shown = line
        if is_log:
            shown = line.assign(mean=line["mean"].where(line["mean"] > 0), low=line["low"].clip(lower=bottom))
        always = "" if line["mean"].any() else ": always 0"
        plotting.draw_mean(axis, shown, look, f"{name}{always}")
    if is_log:
        plotting.set_log_scale(axis, bottom)
    else:
        axis.set_ylim(-0.05, 1)
    axis.set(xlabel="time (s)", ylabel="consensus distance", xlim=(0, None))
    plotting.add_legend(figure, axis.get_legend_handles_labels()[0], plotting.about_band(groups))
    frame = pd.concat(lines).rename(columns=NAMES)
    return [Drawing(figure, frame[["trace", "runs", "now_s", "samples", *list(NAMES.values())[1:]]], notes=notes)]


def mean_of(runs: list[pd.DataFrame]) -> pd.DataFrame:
    """Return the mean distance of these runs with its band, and at each point the mean number of samples."""
    line = plotting.averaged([run[["now_s", "consensus_distance"]].to_numpy(float) for run in runs])
    samples = plotting.averaged([run[["now_s", "samples"]].to_numpy(float) for run in runs])
    return line.assign(samples=samples["mean"])


def distances(trace: Trace) -> pd.DataFrame:
    """Return the evaluations that have a distance, without those of 0 unless all are."""
    evaluations = trace.frame("evaluations").sort_values("now_s")
    known = evaluations[np.isfinite(evaluations["consensus_distance"])]
    apart = known[known["consensus_distance"] > 0]
    return apart if len(apart) else known
