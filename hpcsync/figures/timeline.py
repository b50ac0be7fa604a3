"""Figure `timeline`: loading, compute, wait and transfer of each worker over time, updates and events.

With servers a row shows their updates as ticks. Markers show deaths, returns, leaves, reports of stalls and decisions
of controllers, on the row of the worker that the trace names; a dashed line through all rows is a switch of paradigm.

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
from typing import cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from hpcsync.figures import plotting
from hpcsync.figures.plotting import Drawing
from hpcsync.paradigms.stanza import StanzaOptions
from hpcsync.trace.reader import Trace, TraceError
from hpcsync.trace.schema import ELAPSED

BARS = 20_000  # of a figure, at most
MARKS = 2_000  # updates, and events, of a trace, at most
SERVERS = -1  # worker of the rows of `events` that belong to no worker
ITERATIONS = 8  # of the slowest worker, in the default window
MARKERS = {"died": "X", "joined": "^", "left": "v", "stall": "D", "decision": "o"}


def draw(traces: list[Trace], workers: int = 16, from_s: float = 0.0, to_s: float | None = None) -> list[Drawing]:
    """Draw the figure of these traces, from `from_s` to `to_s` seconds."""
    names = plotting.labels(traces)
    all_reports = [plotting.iterations(trace) for trace in traces]
    places = [place_of(trace, workers) for trace in traces]
    whole = [
        bars_of(trace, reports[reports["worker"].isin(list(place))])
        for trace, reports, place in zip(traces, all_reports, places, strict=True)
    ]
    if to_s is None:
        to_s = float(np.nanmax([from_s, *(after_iterations(frame, from_s) for frame in whole)]))
    frames = [cut(frame, from_s, to_s) for frame in whole]
    for frame, trace in zip(frames, traces, strict=True):
        if not 0 < len(frame) <= BARS:
            what = f"{len(frame):,} bars, more than {BARS:,}" if len(frame) else "nothing"
            raise TraceError(f"{trace.path}: {what} to draw in this window: choose --from and --to")
    figure, axes = plotting.panels(
        len(frames),
        height=0.9 + sum(0.5 + 0.17 * len(place) for place in places),
        sharex=True,
        height_ratios=[len(place) + 1 for place in places],
    )
    notes, parts, drawn = [], [], set()
    for axis, trace, name, reports, place, frame in zip(
        axes[:, 0], traces, names, all_reports, places, frames, strict=True
    ):
        marks = events(trace)
        marks = marks[marks["worker"].isin(list(place)) & marks["begin_s"].between(from_s, to_s)]
        shown, marks = left_out(trace, reports, place, frame, marks, to_s)
        draw_bars(axis, frame, place)
        draw_events(axis, marks, place)
        drawn |= set(marks["activity"])
        if shown:
            window_s = f"{from_s:.4g} to {min(to_s, float(reports['end_s'].max())):.4g} s"
            notes.append(f"{name}: {window_s}: {shown} drawn; --from, --to and --workers choose the part")
        axis.set_title(name)
        axis.set_title(f"{shown} drawn" if shown else "", loc="right", fontsize=7, fontweight="normal")
        axis.set(ylabel="worker", xlim=(from_s, to_s), ylim=(len(place) - 0.4, -0.6))
        axis.set_yticks(list(place.values()), ["servers" if worker == SERVERS else worker for worker in place])
        axis.tick_params(axis="y", length=0)
        parts.append(pd.concat([frame, marks]).assign(trace=name))
    axes[-1, 0].set_xlabel("time (s)")
    data = pd.concat(parts)
    handles = [
        Line2D([], [], marker=marker, ls="", ms=4, color="black", mfc="white", mew=0.7, label=event)
        for event, marker in MARKERS.items()
        if event in drawn
    ]
    handles += [Line2D([], [], color="black", ls="--", lw=0.8, label="switch")] if "switch" in drawn else []
    plotting.legend_of_activities(figure, data["activity"].unique(), handles)
    columns = ["trace", "worker", "iteration", "activity", "begin_s", "end_s"]
    return [Drawing(figure, data[columns].astype({"iteration": "Int64"}), notes=tuple(notes))]


def place_of(trace: Trace, workers: int) -> dict[int, int]:
    """Return the row of each worker shown, and of the servers below them if the run has any."""
    shown = plotting.pick(range(trace.n_workers), workers)
    rows = [*shown, SERVERS] if trace.job.has_servers else shown
    return {worker: row for row, worker in enumerate(rows)}


def bars_of(trace: Trace, reports: pd.DataFrame) -> pd.DataFrame:
    """Return the bars of these iterations of a run."""
    if trace.job.paradigm.separates_layers:
        return bars_of_halves(reports, first_shares(trace))
    return bars(reports) if trace.job.has_servers else bars_of_exchanges(reports)


def left_out(
    trace: Trace, reports: pd.DataFrame, place: dict[int, int], frame: pd.DataFrame, marks: pd.DataFrame, to_s: float
) -> tuple[str, pd.DataFrame]:
    """Return which part of the run is drawn in words, "" for all of it, and the updates and events that are drawn."""
    has_rows = reports[reports["batch_size"] > 0]
    n_drawn = len(frame.loc[frame["activity"] == "compute", ["worker", "iteration"]].drop_duplicates())
    parts = [(n_drawn, len(has_rows), "iterations"), (len(place) - (SERVERS in place), trace.n_workers, "workers")]
    thinned = []
    for what, some in (("updates", marks["activity"] == "update"), ("events", marks["activity"] != "update")):
        thinned.append(plotting.thinned(marks[some], MARKS))
        if len(thinned[-1]) < some.sum():
            parts.append((len(thinned[-1]), int(some.sum()), f"{what} before {to_s:.4g} s"))
    words = [f"{some:,} of {of:,} {what}" for some, of, what in parts if some < of]
    return ", ".join(words), pd.concat(thinned)


def events(trace: Trace) -> pd.DataFrame:
    """Return columns worker, iteration, activity, begin_s and end_s of updates, switches and events.

    The worker of updates and switches is `SERVERS`; the iteration of an update is its version, other events than stalls
    have none.
    """
    updates, changes = trace.frame("updates"), trace.frame("membership")
    stalls, decisions = trace.frame("stalls"), trace.frame("decisions")
    decisions = decisions[decisions["controller"] != ELAPSED]
    is_switch = decisions["controller"] == "switch"
    parts = [
        (changes["worker"], None, changes["change"], changes["now_s"]),
        (stalls["worker"], stalls["iteration"], "stall", stalls["now_s"]),
        (
            decisions["worker"].where(~is_switch, SERVERS),
            None,
            is_switch.map({True: "switch", False: "decision"}),
            decisions["now_s"],
        ),
    ]
    if trace.job.has_servers:
        parts.insert(0, (SERVERS, updates["version"], "update", updates["now_s"]))
    names = ("worker", "iteration", "activity", "begin_s")
    frame = pd.concat([pd.DataFrame(dict(zip(names, part, strict=True))) for part in parts], ignore_index=True)
    frame = frame.astype({"iteration": "Int64", "worker": int})
    ended = (frame["activity"] == "left") & (frame["begin_s"] >= plotting.iterations(trace)["end_s"].max())
    return frame[~ended].assign(end_s=frame["begin_s"])


def draw_bars(axis: Axes, frame: pd.DataFrame, place: dict[int, int]) -> None:
    """Draw the bars of a trace."""
    for activity, colour in plotting.ACTIVITY_COLOURS.items():
        some = frame[frame["activity"] == activity]
        left, width = some["begin_s"], some["end_s"] - some["begin_s"]
        seam = 0.3 * (activity == "compute")  # points of white between iterations that follow at once
        axis.barh(some["worker"].map(place), width, 0.8, left=left, color=colour, ec="white", lw=seam, snap=False)


def draw_events(axis: Axes, marks: pd.DataFrame, place: dict[int, int]) -> None:
    """Draw updates, switches and events."""
    updates = marks[marks["activity"] == "update"]
    if SERVERS in place:
        row = place[SERVERS]
        axis.vlines(updates["begin_s"], row - 0.35, row + 0.35, color="black", lw=0.6)
    for at_s in marks.loc[marks["activity"] == "switch", "begin_s"]:
        axis.axvline(at_s, color="black", ls="--", lw=0.8)
    for event, marker in MARKERS.items():
        some = marks[marks["activity"] == event]
        if len(some):  # the layout would make room for a line without points
            rows = some["worker"].map(place)
            axis.plot(some["begin_s"], rows, marker, ms=4, color="black", mfc="white", mew=0.7, clip_on=False, zorder=3)


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


def cut(frame: pd.DataFrame, from_s: float, to_s: float) -> pd.DataFrame:
    """Return the bars within the window, cut at its ends."""
    frame = frame[(frame["end_s"] > from_s) & (frame["begin_s"] < to_s)]
    return frame.assign(begin_s=frame["begin_s"].clip(lower=from_s), end_s=frame["end_s"].clip(upper=to_s))
