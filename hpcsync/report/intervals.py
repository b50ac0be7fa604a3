"""Runs as intervals and events over time: what each worker did, and what happened, for figures and exports.

Computation and waits are as recorded. With servers the weights are read before the computation (`pull_s`), and the
contribution is compressed and put after it; these transfers are shortened if they do not fit. Without servers the
exchange follows the computation: first the wait for others, then the transfer. With separated layers workers also wait
within the computation.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import pandas as pd

from hpcsync.paradigms.stanza import StanzaOptions
from hpcsync.trace.reader import Trace, TraceFile
from hpcsync.trace.schema import EVENTS, Rows

SERVERS = -1  # worker of the rows of `events` that belong to no worker


def iterations(trace: Trace) -> pd.DataFrame:
    """Return the pushes of the workers, or their exchanges in a run without servers."""
    return trace.frame("pushes" if trace.job.has_servers else "exchanges")


def bars_of(trace: Trace, reports: pd.DataFrame) -> pd.DataFrame:
    """Return the bars of these iterations of a run."""
    if trace.job.paradigm.separates_layers:
        return bars_of_halves(reports, first_shares(trace))
    return bars(reports) if trace.job.has_servers else bars_of_exchanges(reports)


def events(trace: Trace, end_s: float | None = None) -> pd.DataFrame:
    """Return columns worker, iteration, activity, begin_s and end_s of updates, switches and events.

    The worker of updates and switches is `SERVERS`; the iteration of an update is its version, other events than stalls
    have none.

    Parameters
    ----------
    trace
        The run.
    end_s
        Last end of a computation, if the trace holds a part of the run: workers that leave from then on are no event,
        nor are those whose part ends although the job does not make them leave.
    """
    updates, changes = trace.frame("updates"), trace.frame("membership")
    leaving = [event.worker for event in trace.job.cluster.events if event.change == "leave"]
    changes = changes[(changes["change"] != "left") | changes["worker"].isin(leaving)]
    stalls, decisions = trace.frame("stalls"), trace.frame("decisions")
    decisions = decisions[~decisions["controller"].isin(EVENTS)]
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
    end_s = iterations(trace)["end_s"].max() if end_s is None else end_s
    ended = (frame["activity"] == "left") & (frame["begin_s"] >= end_s)
    kept = frame[~ended]
    return kept.assign(end_s=kept["begin_s"])


def bars(pushes: pd.DataFrame) -> pd.DataFrame:
    """Return columns worker, iteration, activity, begin_s and end_s of each bar, for a run with servers."""
    pushes = pushes.sort_values(["worker", "iteration"], ignore_index=True)
    encoded_s, pushed_s = pushes["end_s"] + pushes["encode_s"], pushes["comm_s"] - pushes["pull_s"]
    before_s = encoded_s.groupby(pushes["worker"]).shift()  # NaN for a worker's first push
    begin_s, wait_s = pushes["begin_s"], pushes["wait_s"]
    room_s = (begin_s - before_s - wait_s).clip(lower=0).fillna(math.inf)
    put_s, read_s = pushed_s.groupby(pushes["worker"]).shift().fillna(0), pushes["pull_s"]
    fits = np.minimum(1, room_s / (put_s + read_s).where(lambda both_s: both_s > 0, 1))
    put_s, read_s = put_s * fits, read_s * fits
    put_begin_s = before_s.fillna(begin_s - read_s - wait_s)
    wait_begin_s = put_begin_s + put_s
    last = ~pushes["worker"].duplicated(keep="last")
    parts = [
        ("transfer", pushes["iteration"] - 1, put_begin_s, wait_begin_s),
        ("wait", pushes["iteration"], wait_begin_s, np.minimum(wait_begin_s + wait_s, begin_s - read_s)),
        ("transfer", pushes["iteration"], begin_s - read_s, begin_s),
        ("load", pushes["iteration"], begin_s, begin_s + pushes["load_s"]),
        ("compute", pushes["iteration"], begin_s + pushes["load_s"], pushes["end_s"]),
        ("transfer", pushes["iteration"], encoded_s, (encoded_s + pushed_s)[last]),
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


def first_shares(trace: Trace | TraceFile) -> Rows:
    """Return the share of each worker's computation before its wait, with separated layers; shape (n_workers,)."""
    is_fc = np.arange(trace.n_workers) < trace.job.groups.n_fc
    return np.where(is_fc, 0.0, cast(StanzaOptions, trace.job.paradigm).forward_share)


def bars_of_halves(rows: pd.DataFrame, first: Rows) -> pd.DataFrame:
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
