"""Figure `timeline`: loading, compute, wait and transfer of each worker over time.

Computation and waits are drawn as recorded. With servers the trace holds one transfer time per iteration, the sum of
reading the weights before it and pushing the gradient after it. Both move the model once, so half of the time is drawn
on either side of the computation, or less if it does not fit. Loading is drawn at the begin of an iteration, although
local steps and accumulated batches are loaded one by one. Without servers the exchange follows the computation:
first the wait for others, then the transfer. With separated layers workers also wait within the computation: for a
convolution worker this wait is drawn after its forward pass, whose share the job sets, for a fully-connected worker
before its computation, whatever the number of micro-batches. Time that the trace does not describe stays white: a
script's own work between iterations, and the time after a worker's last transfer.
"""

from __future__ import annotations

import math
from functools import partial
from typing import cast

import numpy as np
import pandas as pd

from hpcsync.figures import plotting
from hpcsync.figures.plotting import Drawing
from hpcsync.paradigms.stanza import StanzaOptions
from hpcsync.trace.reader import Trace, TraceError

BARS = 20_000  # of a figure, at most
ITERATIONS = 8  # of the slowest worker, in the default window


def draw(traces: list[Trace], workers: int = 16, from_s: float = 0.0, to_s: float | None = None) -> list[Drawing]:
    """Draw the figure of these traces, from `from_s` to `to_s` seconds."""
    frames, rows, ends_s = [], [], []
    for name, trace in zip(plotting.labels(traces), traces, strict=True):
        reports = plotting.iterations(trace)
        ends_s.append(float(reports["end_s"].max()))
        shown = plotting.pick(range(trace.n_workers), workers)
        drawn = bars if trace.job.has_servers else bars_of_exchanges
        if trace.job.paradigm.separates_layers:
            drawn = partial(bars_of_halves, first=first_shares(trace))
        frames.append(drawn(reports[reports["worker"].isin(shown)]).assign(trace=name))
        rows.append({worker: row for row, worker in enumerate(shown)})
        if len(shown) < trace.n_workers:
            frames[-1]["trace"] += f" ({len(shown)} of {trace.n_workers} workers)"
    if to_s is None:
        to_s = float(np.nanmax([from_s, *(after_iterations(frame, from_s) for frame in frames)]))
    frames = [cut(frame, from_s, to_s) for frame in frames]
    for frame, trace in zip(frames, traces, strict=True):
        if not 0 < len(frame) <= BARS:
            what = f"{len(frame):,} bars, more than {BARS:,}" if len(frame) else "nothing"
            raise TraceError(f"{trace.path}: {what} to draw in this window: choose --from and --to")
    n_rows = list(map(len, rows))
    figure, axes = plotting.panels(
        len(frames),
        height=0.7 + sum(0.35 + 0.17 * n for n in n_rows),
        sharex=True,
        height_ratios=[n + 1 for n in n_rows],
    )
    notes = []
    for axis, frame, place, end_s in zip(axes[:, 0], frames, rows, ends_s, strict=True):
        for activity, colour in plotting.ACTIVITY_COLOURS.items():
            some = frame[frame["activity"] == activity]
            left, width = some["begin_s"], some["end_s"] - some["begin_s"]
            seam = 0.3 * (activity == "compute")  # points of white between iterations that follow at once
            axis.barh(some["worker"].map(place), width, 0.8, left=left, color=colour, ec="white", lw=seam, snap=False)
        title, part = frame["trace"].iloc[0], window(from_s, to_s, end_s)
        if part is not None:
            notes.append(f"{title}: shows {part}; --from and --to choose the part")
            title += f": {part}"
        axis.set(title=title, ylabel="worker", xlim=(from_s, to_s), ylim=(len(place) - 0.4, -0.6))
        axis.set_yticks(list(place.values()), list(place))
        axis.tick_params(axis="y", length=0)
    axes[-1, 0].set_xlabel("time (s)")
    plotting.legend_of_activities(figure, pd.concat(frames)["activity"].unique())
    columns = ["trace", "worker", "iteration", "activity", "begin_s", "end_s"]
    return [Drawing(figure, pd.concat(frames)[columns], notes=tuple(notes))]


def bars(pushes: pd.DataFrame) -> pd.DataFrame:
    """Return columns worker, iteration, activity, begin_s and end_s of each bar, for a run with servers."""
    pushes = pushes.sort_values(["worker", "iteration"], ignore_index=True)
    before = pushes.groupby("worker")[["end_s", "comm_s"]].shift()  # NaN for a worker's first push
    begin_s, wait_s = pushes["begin_s"], pushes["wait_s"]
    room_s = (begin_s - before["end_s"] - wait_s).clip(lower=0).fillna(math.inf)
    put_s, read_s = before["comm_s"].fillna(0) / 2, pushes["comm_s"] / 2
    fits = np.minimum(1, room_s / (put_s + read_s).where(lambda both_s: both_s > 0, 1))
    put_s, read_s = put_s * fits, read_s * fits
    put_begin_s = before["end_s"].fillna(begin_s - read_s - wait_s)
    wait_begin_s = put_begin_s + put_s
    last = ~pushes["worker"].duplicated(keep="last")
    parts = [
        ("transfer", pushes["iteration"] - 1, put_begin_s, wait_begin_s),
        ("wait", pushes["iteration"], wait_begin_s, np.minimum(wait_begin_s + wait_s, begin_s - read_s)),
        ("transfer", pushes["iteration"], begin_s - read_s, begin_s),
        ("load", pushes["iteration"], begin_s, begin_s + pushes["load_s"]),
        ("compute", pushes["iteration"], begin_s + pushes["load_s"], pushes["end_s"]),
        ("transfer", pushes["iteration"], pushes["end_s"], (pushes["end_s"] + pushes["comm_s"] / 2)[last]),
    ]
    return in_order(pushes["worker"], parts)


def bars_of_exchanges(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the bars of a run without servers."""
    rows = rows[rows["batch_size"] > 0].sort_values(["worker", "iteration"], ignore_index=True)
    next_s = rows.groupby("worker")["begin_s"].shift(-1).fillna(math.inf)
    waited_s = np.minimum(rows["end_s"] + rows["wait_s"], next_s)
    moved_s = np.minimum(waited_s + rows["comm_s"], next_s)
    parts = [
        ("load", rows["iteration"], rows["begin_s"], rows["begin_s"] + rows["load_s"]),
        ("compute", rows["iteration"], rows["begin_s"] + rows["load_s"], rows["end_s"]),
        ("wait", rows["iteration"], rows["end_s"], waited_s),
        ("transfer", rows["iteration"], waited_s, moved_s),
    ]
    return in_order(rows["worker"], parts)


def first_shares(trace: Trace) -> np.ndarray:
    """Return the share of each worker's computation before its wait, with separated layers; shape (n_workers,)."""
    is_fc = np.arange(trace.n_workers) < trace.job.groups.n_fc
    return np.where(is_fc, 0.0, cast(StanzaOptions, trace.job.paradigm).forward_share)


def bars_of_halves(rows: pd.DataFrame, first: np.ndarray) -> pd.DataFrame:
    """Return the bars of workers that wait within their computation, after a share `first`, shape (n_workers,)."""
    loaded_s = rows["begin_s"] + rows["load_s"]
    within_s = rows["end_s"] - loaded_s - rows["compute_s"]
    others = bars_of_exchanges(rows.assign(wait_s=(rows["wait_s"] - within_s).clip(lower=0)))
    share = first[rows["worker"]]
    waits_s = loaded_s + share * rows["compute_s"]
    continues_s = rows["end_s"] - (1 - share) * rows["compute_s"]
    parts = [
        ("compute", rows["iteration"], loaded_s, waits_s),
        ("wait", rows["iteration"], waits_s, continues_s),
        ("compute", rows["iteration"], continues_s, rows["end_s"]),
    ]
    frame = pd.concat([others[others["activity"] != "compute"], in_order(rows["worker"], parts)])
    return frame.sort_values(["worker", "begin_s"], ignore_index=True)


def in_order(worker: pd.Series, parts: list[tuple[str, pd.Series, pd.Series, pd.Series]]) -> pd.DataFrame:
    """Return the bars of all parts with a positive duration, ordered by worker and time."""
    columns = ("activity", "iteration", "begin_s", "end_s")
    frame = pd.concat([pd.DataFrame({"worker": worker, **dict(zip(columns, part, strict=True))}) for part in parts])
    return frame[frame["end_s"] > frame["begin_s"]].sort_values(["worker", "begin_s"], ignore_index=True)


def after_iterations(frame: pd.DataFrame, from_s: float) -> float:
    """Return the time at which the slowest worker has made `ITERATIONS` from `from_s` on; NaN if there are none."""
    ends = frame[(frame["activity"] == "compute") & (frame["end_s"] > from_s)].groupby("worker")["end_s"]
    return float(ends.head(ITERATIONS).groupby(frame["worker"]).last().max())


def window(from_s: float, to_s: float, end_s: float) -> str | None:
    """Describe the window as a part of a run whose last computation ends at `end_s`; None if it is the whole run."""
    if from_s <= 0 and to_s >= end_s:
        return None
    return f"{from_s:.4g} to {min(to_s, end_s):.4g} s of {end_s:.4g} s"


def cut(frame: pd.DataFrame, from_s: float, to_s: float) -> pd.DataFrame:
    """Return the bars within the window, cut at its ends."""
    frame = frame[(frame["end_s"] > from_s) & (frame["begin_s"] < to_s)]
    return frame.assign(begin_s=frame["begin_s"].clip(lower=from_s), end_s=frame["end_s"].clip(upper=to_s))
