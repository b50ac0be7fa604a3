"""Figure `adaptive`: choices during the run, namely k and the workers' batch sizes.

The first panel shows k (contributions per update) of all traces that have one, as steps. For every job with allocated
batches, a panel shows the batch size of each worker. Traces of one job with different seeds are one line: their mean,
in a band that is the 95 % interval of the mean, or with two seeds the range of the values. A run that has ended keeps
its last value, and the line is thin from the end of the shortest run on.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from hpcsync.core.batch_sizes import sizes_at_first
from hpcsync.figures import plotting
from hpcsync.figures.plotting import Drawing
from hpcsync.report.aggregate import begins_allocation
from hpcsync.trace.reader import Trace, TraceError


def draw(traces: list[Trace], workers: int = 8) -> list[Drawing]:
    """Draw the figure of these traces."""
    groups = plotting.of_one_job(traces)
    first = [group[0] for group in groups]
    names, looks = plotting.labels(first), plotting.styles(first)
    has_k, allocating = ([trace for trace in first if has(trace)] for has in (has_own_k, allocates_batches))
    if not has_k and not allocating:
        raise TraceError(f"{traces[0].path}: nothing to draw: this run chooses neither k nor batch sizes, {names[0]}")
    n_panels = bool(has_k) + len(allocating)
    figure, axes = plotting.panels(n_panels, height=0.4 + 1.7 * n_panels, sharex=True)
    frames, rows = [], iter(axes[:, 0])
    words = plotting.about_band([group for group in groups if has_own_k(group[0]) or allocates_batches(group[0])])
    title = f"{words}, thin: some have ended" if words else ""
    if has_k:
        axis = next(rows)
        for group, name, look in zip(groups, names, looks, strict=True):
            if has_own_k(group[0]):
                line = mean_steps([steps_of_k(trace) for trace in group], "k")
                plotting.draw_mean(axis, line, look, name, steps="post")
                frames.append(named(line, "k").assign(trace=name))
        axis.set(ylabel="k", ylim=(0.5, max(trace.n_workers for trace in has_k) + 0.5))
        plotting.add_legend(figure, axis.get_legend_handles_labels()[0], title)
    each = {
        name: plotting.pick(range(trace.n_workers), workers)
        for name, trace in zip(names, first, strict=True)
        if allocates_batches(trace)
    }
    all_shown = sorted({worker for shown in each.values() for worker in shown})
    styles = {worker: plotting.look(n, worker_colour(n)) for n, worker in enumerate(all_shown)}
    for group, name in zip(groups, names, strict=True):
        if name not in each:
            continue
        axis = next(rows)
        sizes = [steps_of_batches(trace) for trace in group]
        for worker in each[name]:
            line = mean_steps([own[own["worker"] == worker] for own in sizes], "batch_size")
            plotting.draw_mean(axis, line, styles[worker] | {"linewidth": 1}, steps="post")
            frames.append(named(line, "batch_size").assign(trace=name, worker=worker))
        axis.set(ylabel="samples", ylim=(0, None))
        plotting.add_title(axis, f"batch sizes, {name}")
    if allocating:
        handles = [Line2D([], [], label=f"worker {worker}", lw=1, **style) for worker, style in styles.items()]
        plotting.add_legend(figure, handles, "" if has_k else title, loc="outside lower center")
    for axis in axes[:, 0]:
        axis.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes[-1, 0].set(xlabel="time (s)", xlim=(0, None))
    frame = pd.concat(frames)
    columns = [column for column in COLUMNS if column in frame]
    return [Drawing(figure, frame[columns].astype({"worker": "Int64"} if "worker" in frame else {}))]


COLUMNS = (
    *("trace", "runs", "now_s", "k", "k_low", "k_high"),
    *("worker", "batch_size", "batch_size_low", "batch_size_high"),
)


def worker_colour(n: int) -> str:
    """Return the colour of the n-th worker shown."""
    return plotting.LINE_COLOURS[n % len(plotting.LINE_COLOURS)]


def mean_steps(runs: list[pd.DataFrame], column: str) -> pd.DataFrame:
    """Return the mean and the band of a column, whose values hold until the next row."""
    return plotting.averaged([run[["now_s", column]].to_numpy(float) for run in runs], steps=True)


def named(line: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return a line with the names that its columns have in the file."""
    return line.rename(columns={"x": "now_s", "mean": column, "low": f"{column}_low", "high": f"{column}_high"})


def has_own_k(trace: Trace) -> bool:
    """Return True if updates of the run wait for k contributions."""
    return trace.job.paradigm.k_at_first(trace.n_workers) is not None


def allocates_batches(trace: Trace) -> bool:
    """Return True if the run allocates batches."""
    return trace.job.batches.policy != "equal"


def steps_of_k(trace: Trace) -> pd.DataFrame:
    """Return columns now_s and k, which holds from then on; the last row is the run's last update."""
    decisions = plotting.of_controller(trace, "k")
    k = [trace.job.paradigm.k_at_first(trace.n_workers), *decisions["chosen"].astype(int)]
    return pd.DataFrame({"now_s": [0.0, *decisions["now_s"], _end_s(trace)], "k": [*k, k[-1]]})


def steps_of_batches(trace: Trace) -> pd.DataFrame:
    """Return columns now_s, worker and batch_size, which holds from then on; the last row of each worker is the end.

    Workers that an allocation leaves out take none.
    """
    rows, n_workers = plotting.of_controller(trace, "batches"), trace.n_workers
    number = begins_allocation(rows["seq"].to_numpy(), rows["worker"].to_numpy()).cumsum()
    now_s, sizes = np.zeros(number.max(initial=0) + 2), np.zeros((number.max(initial=0) + 2, n_workers), int)
    now_s[number], sizes[0] = rows["now_s"], sizes_at_first(trace.job)
    sizes[number, rows["worker"]] = rows["chosen"]
    now_s[-1], sizes[-1] = _end_s(trace), sizes[-2]
    each = range(n_workers)
    return pd.DataFrame(
        {"now_s": now_s.repeat(n_workers), "worker": np.tile(each, len(sizes)), "batch_size": sizes.ravel()}
    )


def _end_s(trace: Trace) -> float:
    updates = trace.tables["updates"]
    return float(updates["now_s"][-1]) if len(updates) else 0.0
