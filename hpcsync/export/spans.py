"""A run as spans and instants in whole nanoseconds, none of which overlaps another of its worker."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import pandas as pd

from hpcsync.export.window import Part
from hpcsync.report import intervals
from hpcsync.report.intervals import SERVERS as SERVERS  # the worker of instants that belong to no worker
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import Rows

Seconds = TypeVar("Seconds", pd.Series, Rows)

NS = 1e9  # of a second
SHORTEST_NS = 2  # spans are at least this long, so that the last nanosecond of a span is not its first


def spans(trace: Trace) -> pd.DataFrame:
    """Return what the workers did: loading, compute, wait and transfer.

    Returns
    -------
    pandas.DataFrame
        Columns worker, iteration, activity, begin_ns and end_ns, ordered by worker and time. A span ends before or when
        the next one of its worker begins.
    """
    bars = intervals.bars_of(trace, intervals.iterations(trace))
    return disjoint(bars.assign(begin_ns=nanoseconds(bars["begin_s"]), end_ns=nanoseconds(bars["end_s"])))


def spans_of_part(part: Part) -> pd.DataFrame:
    """Return the spans of the iterations that are complete in this part, and not in an earlier one."""
    found = spans(part.with_earlier)
    worker, iteration = found["worker"], found["iteration"]
    chosen = (iteration > part.begun[worker]) & (iteration <= part.complete[worker])
    return found[chosen].reset_index(drop=True)


def disjoint(bars: pd.DataFrame) -> pd.DataFrame:
    """Return bars, ordered by worker and time, without what lies before time 0 or the end of an earlier bar."""
    latest_ns = bars.groupby("worker")["end_ns"].cummax()
    earlier_ns = latest_ns.groupby(bars["worker"]).shift(fill_value=0)
    found = bars.assign(begin_ns=np.maximum(bars["begin_ns"], earlier_ns.clip(lower=0)))
    long_enough = found["end_ns"] - found["begin_ns"] >= SHORTEST_NS
    columns = ["worker", "iteration", "activity", "begin_ns", "end_ns"]
    return found.loc[long_enough, columns].reset_index(drop=True)


def instants(trace: Trace, end_s: float | None = None) -> pd.DataFrame:
    """Return updates of the servers, changes of membership, stalls, decisions and switches.

    Parameters
    ----------
    end_s
        Last end of a computation of the run, if `trace` is a part of it.

    Returns
    -------
    pandas.DataFrame
        Columns worker, iteration, activity and now_ns. The worker of updates and switches is `SERVERS`; the iteration
        of an update is its version.
    """
    events = intervals.events(trace, end_s)
    return events.assign(now_ns=nanoseconds(events["begin_s"]))[["worker", "iteration", "activity", "now_ns"]]


def nanoseconds(seconds: Seconds) -> Seconds:
    """Return seconds, a Series or an array, as whole nanoseconds."""
    return (seconds * NS).round().astype("int64")
