"""Figure `timeline`: loading, compute, wait and transfer of each worker over time, updates and events.

With servers a row shows their updates as ticks. Markers show deaths, returns, leaves, reports of stalls and decisions
of controllers, on the row of the worker that the trace names; a dashed line through all rows is a switch of paradigm.
Where a wait of at least a hundredth of the window ends, an arrow leads from the worker that waited to the one that it
waited for. There is one panel per trace, also of traces that differ only in the seed, since each run has a
course of its own.

Computation and waits are drawn as recorded. With servers the weights are read before the computation, and the
contribution is put after it; a transfer that does not fit between its neighbours is shortened. Loading is drawn at the
begin of an iteration, although local steps and accumulated batches are loaded one by one. Without servers the exchange
follows the computation: first the wait for others, then the transfer. With separated layers workers also wait within
the computation: for a convolution worker this wait is drawn after its forward pass, whose share the job sets, for a
fully-connected worker before its computation, whatever the number of micro-batches. The compression of a push stays
white, and so does time that the trace does not describe: a script's own work between iterations, and the time after a
worker's last transfer.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from hpcsync.figures import FigureError, plotting
from hpcsync.figures.plotting import Drawing
from hpcsync.report.intervals import SERVERS, bars_of, events
from hpcsync.report.waiting import each_wait
from hpcsync.trace.reader import Trace, TraceError

BARS = 20_000  # of a figure, at most
MARKS = 2_000  # updates, and events, of a trace, at most
ITERATIONS = 8  # of the slowest worker, in the default window
WAIT = 0.01  # share of the window from which on a wait has an arrow
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
    if not math.isfinite(from_s) or not math.isfinite(to_s or 0.0):
        raise FigureError("figure timeline: --from and --to must be numbers of seconds")
    if to_s is None:
        ends_s = [after_iterations(frame, from_s) for frame in whole]
        no_computation = np.isnan(ends_s).all()  # after the begin, but perhaps a transfer
        to_s = max(frame["end_s"].max() for frame in whole) if no_computation else float(np.nanmax(ends_s))
    frames = [cut(frame, from_s, to_s) for frame in whole]
    for frame, of_trace, trace in zip(frames, whole, traces, strict=True):
        if not len(frame):
            end = f"the rows of the trace end at {of_trace['end_s'].max():.6g} s"
            raise TraceError(f"{trace.path}: nothing to draw in this window; {end}: choose --from and --to")
        if len(frame) > BARS:
            too_many = f"{len(frame):,} bars to draw, more than {BARS:,}"
            raise TraceError(f"{trace.path}: {too_many}: choose a shorter time by --from and --to")
    figure, axes = plotting.panels(
        len(frames),
        height=0.6 + sum(0.5 + 0.17 * len(place) for place in places),
        sharex=True,
        height_ratios=[len(place) + 1 for place in places],
    )
    notes, parts, drawn = [], [], set()
    for axis, trace, name, reports, place, bars, frame in zip(
        axes[:, 0], traces, names, all_reports, places, whole, frames, strict=True
    ):
        marks = events(trace)
        marks = marks[marks["worker"].isin(list(place)) & marks["begin_s"].between(from_s, to_s)]
        waits = waits_of(trace, place, from_s, to_s)
        shown, marks = left_out(trace, reports, place, frame, marks, seconds(to_s, to_s - from_s))
        draw_bars(axis, frame, place)
        draw_waits(axis, waits, place)
        draw_events(axis, marks, place)
        drawn |= set(marks["activity"]) | ({"wait for"} if len(waits) else set())
        if shown:
            end_s = min(to_s, float(bars["end_s"].max()))
            window = f"{seconds(from_s, to_s - from_s)} to {seconds(end_s, to_s - from_s)} s"
            notes.append(f"{name}: {window}: {shown} drawn; --from, --to and --workers choose the part")
        title(axis, name, f"{shown} drawn" if shown else "")
        axis.set(ylabel="worker", xlim=(from_s, to_s), ylim=(len(place) - 0.4, -0.6))
        axis.set_yticks(list(place.values()), ["servers" if worker == SERVERS else worker for worker in place])
        axis.tick_params(axis="y", length=0)
        parts.append(pd.concat([frame, marks]).assign(trace=name))
    axes[-1, 0].set_xlabel("time (s)")
    figure.align_ylabels()
    data = pd.concat(parts)
    handles = [
        Line2D([], [], marker=marker, ls="", ms=4, color="black", mfc="white", mew=0.7, label=event)
        for event, marker in MARKERS.items()
        if event in drawn
    ]
    handles += [Line2D([], [], color="black", ls="--", lw=0.8, label="switch")] if "switch" in drawn else []
    if "wait for" in drawn:
        handles.append(Line2D([], [], marker=7, color="black", lw=0.5, ms=4, label="waited for"))
    plotting.legend_of_activities(figure, data["activity"].unique(), handles)
    columns = ["trace", "worker", "iteration", "activity", "begin_s", "end_s"]
    return [Drawing(figure, data[columns].astype({"iteration": "Int64"}), notes=tuple(notes))]


def title(axis: Axes, name: str, part: str) -> None:
    """Set the title of a panel; the part of the run that is drawn is at its right, or follows if there is no room."""
    room = plotting.width_inches() - 0.7 - plotting.text_inches(name, weight="bold")
    if plotting.text_inches(part, 7) < room - 0.2:
        axis.set_title(name)
        axis.set_title(part, loc="right", fontsize=7, fontweight="normal")
    else:
        plotting.add_title(axis, f"{name}: {part}" if part else name)


def place_of(trace: Trace, workers: int) -> dict[int, int]:
    """Return the row of each worker shown, and of the servers below them if the run has any."""
    shown = plotting.pick(range(trace.n_workers), workers)
    rows = [*shown, SERVERS] if trace.job.has_servers else shown
    return {worker: row for row, worker in enumerate(rows)}


def left_out(
    trace: Trace, reports: pd.DataFrame, place: dict[int, int], frame: pd.DataFrame, marks: pd.DataFrame, to: str
) -> tuple[str, pd.DataFrame]:
    """Return which part of the run is drawn in words, "" for all of it, and the updates and events that are drawn."""
    has_rows = reports[reports["batch_size"] > 0]
    n_drawn = len(frame.loc[frame["activity"] == "compute", ["worker", "iteration"]].drop_duplicates())
    parts = [(n_drawn, len(has_rows), "iterations"), (len(place) - (SERVERS in place), trace.n_workers, "workers")]
    thinned = []
    for what, some in (("updates", marks["activity"] == "update"), ("events", marks["activity"] != "update")):
        thinned.append(plotting.thinned(marks[some], MARKS))
        if len(thinned[-1]) < some.sum():
            parts.append((len(thinned[-1]), int(some.sum()), f"{what} before {to} s"))
    words = [f"{some:,} of {of:,} {what}" for some, of, what in parts if some < of]
    return ", ".join(words), pd.concat(thinned)


def seconds(at_s: float, window_s: float) -> str:
    """Return a time to a thousandth of the window that is drawn, in digits."""
    return f"{round(at_s, 3 - math.floor(math.log10(window_s))):,.15g}"


def draw_bars(axis: Axes, frame: pd.DataFrame, place: dict[int, int]) -> None:
    """Draw the bars of a trace."""
    for activity, colour in plotting.ACTIVITY_COLOURS.items():
        some = frame[frame["activity"] == activity]
        left, width = some["begin_s"], some["end_s"] - some["begin_s"]
        seam = 0.3 * (activity == "compute")  # points of white between iterations that follow at once
        axis.barh(some["worker"].map(place), width, 0.8, left=left, color=colour, ec="white", lw=seam, snap=False)


def waits_of(trace: Trace, place: dict[int, int], from_s: float, to_s: float) -> pd.DataFrame:
    """Return columns until_s, worker, cause and seconds of the longer waits between the workers shown that end here."""
    frame = pd.concat([pd.DataFrame(wait._asdict()) for wait in each_wait(trace)])
    shown = frame[["worker", "cause"]].isin(list(place)).all(axis=1) & frame["until_s"].between(from_s, to_s)
    return plotting.thinned(frame[shown & (frame["seconds"] >= WAIT * (to_s - from_s))], MARKS)


def draw_waits(axis: Axes, waits: pd.DataFrame, place: dict[int, int]) -> None:
    """Draw an arrow from each worker that waited to the one that it waited for."""
    begin, end = (waits[column].map(place).astype(float) for column in ("worker", "cause"))
    for direction, marker, edge in ((1.0, 7, -0.4), (-1.0, 6, 0.4)):  # carets whose tips lie at the bar's edge
        some = (end - begin) * direction > 0
        tip = end[some] + edge
        axis.vlines(waits["until_s"][some], begin[some], tip, color="black", lw=0.5, zorder=3)
        if some.any():
            axis.plot(waits["until_s"][some], tip, ls="", marker=marker, ms=4, color="black", zorder=3)


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


def after_iterations(frame: pd.DataFrame, from_s: float) -> float:
    """Return the time at which the slowest worker has made `ITERATIONS` from `from_s` on; NaN if there are none."""
    ends = frame[(frame["activity"] == "compute") & (frame["end_s"] > from_s)].groupby("worker")["end_s"]
    return float(ends.head(ITERATIONS).groupby(frame["worker"]).last().max())


def cut(frame: pd.DataFrame, from_s: float, to_s: float) -> pd.DataFrame:
    """Return the bars within the window, cut at its ends."""
    frame = frame[(frame["end_s"] > from_s) & (frame["begin_s"] < to_s)]
    return frame.assign(begin_s=frame["begin_s"].clip(lower=from_s), end_s=frame["end_s"].clip(upper=to_s))
