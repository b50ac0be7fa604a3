"""A run part by part, of a trace that may be larger than the memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hpcsync.trace.reader import Trace, TraceFile
from hpcsync.trace.schema import TABLES, Rows

TIMED = [table for table, columns in TABLES.items() if "now_s" in (columns.names or ())]


class Part(NamedTuple):
    """Part of a run.

    Attributes
    ----------
    trace
        The rows whose `now_s` lies in the part, of all tables with times.
    with_earlier
        The same, and the last two iterations of each worker before it.
    begun, complete
        Last iteration of each worker of the parts before, and of this one, of which the following iteration is known,
        and thus what the worker did until then; shape (n_workers,).
    end_s
        Last end of a computation of the run.
    """

    trace: Trace
    with_earlier: Trace
    begun: Rows
    complete: Rows
    end_s: float


def parts(trace: Trace | TraceFile, from_s: float = 0.0, to_s: float = math.inf) -> Iterator[Part]:
    """Yield the parts of these seconds of a run, each with the rows of a slice of its iterations.

    An iteration or a stall that lies in these seconds in part is in them.

    Notes
    -----
    The rows of a table are nearly ordered by time. A first pass finds from when on the rows after each slice are.
    """
    table = "pushes" if trace.job.has_servers else "exchanges"
    rows = {name: _Rows(trace, name, from_s, to_s) for name in TIMED}
    earlier = trace.read(table, 0, 0) if isinstance(trace, TraceFile) else trace.tables[table][:0]
    begun = np.full(trace.n_workers, -1)
    for until_s in rows[table].later_s:
        found = {name: each.before(until_s) for name, each in rows.items()}
        found["pushes"] = found["pushes"][np.argsort(found["pushes"]["seq"], kind="stable")]
        both = np.concatenate([earlier, found[table]])
        earlier = _last_two(both)
        complete = begun.copy()
        np.maximum.at(complete, earlier["worker"], earlier["iteration"] - 1)
        if until_s == math.inf:
            complete[:] = np.iinfo(complete.dtype).max
        of_part, more = (Trace(trace.path, trace.attributes, tables) for tables in (found, {**found, table: both}))
        yield Part(of_part, more, begun, complete, rows[table].end_s)
        begun = complete


def last_s(trace: TraceFile) -> float:
    """Return the largest time of the last rows of all tables, in seconds; 0 without rows."""
    last = [trace.read(table, max(0, trace.stored[table].n_rows - 1))["now_s"] for table in TIMED]
    return float(np.concatenate(last).max(initial=0.0))


def _last_two(rows: Rows) -> Rows:
    """Return the last two iterations of each worker."""
    rows = rows[rows["batch_size"] > 0]
    rows = rows[np.lexsort((rows["iteration"], rows["worker"]))]
    worker = rows["worker"]
    return rows[np.append(worker[:-2] != worker[2:], np.ones(min(2, len(rows)), bool))]


class _Rows:
    """Rows of a table in the order of time.

    Attributes
    ----------
    later_s
        The time before which all rows are known, after each slice; it does not decrease, and ends with infinity.
    end_s
        Last end of a computation; minus infinity for other tables.
    """

    def __init__(self, trace: Trace | TraceFile, table: str, from_s: float, to_s: float) -> None:
        self._window = from_s, to_s
        least_s, self.end_s = [], -math.inf
        for rows in trace.slices(table):
            rows = rows[_within(rows, from_s, to_s)]
            least_s.append(rows["now_s"].min(initial=math.inf))
            if "end_s" in (rows.dtype.names or ()):
                self.end_s = max(self.end_s, rows["end_s"].max(initial=-math.inf))
        self.later_s = [*np.minimum.accumulate(least_s[::-1])[::-1][1:].tolist(), math.inf]
        self._slices = zip(trace.slices(table), self.later_s, strict=True)
        self._known_s = -math.inf
        self._left: list[Rows] = []

    def before(self, until_s: float) -> Rows:
        """Return the rows before this time that have not been returned yet."""
        while self._known_s < until_s:
            rows, self._known_s = next(self._slices)
            self._left.append(rows[_within(rows, *self._window)])
        rows = np.concatenate(self._left)
        is_before = rows["now_s"] < until_s
        self._left = [rows[~is_before]]
        return rows[is_before]


def _within(rows: Rows, from_s: float, to_s: float) -> Rows:
    """Return which rows lie in these seconds, shape (n_rows,)."""
    begin_s = rows["begin_s" if "begin_s" in (rows.dtype.names or ()) else "now_s"]
    return (rows["now_s"] >= from_s) & ~(begin_s > to_s)
