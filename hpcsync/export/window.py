"""Part of a run in memory, of a trace that may be larger."""

from __future__ import annotations

import math

import numpy as np

from hpcsync.trace.reader import Trace, TraceFile
from hpcsync.trace.schema import TABLES


def part(trace: TraceFile, from_s: float = 0.0, to_s: float = math.inf) -> Trace:
    """Return the rows of these seconds of a run: iterations that lie in them in part, and what happened in them.

    The trace is read in slices, so the memory is that of the part.
    """
    tables = {}
    for table in TABLES:
        rows = np.concatenate([rows[_within(rows, from_s, to_s)] for rows in trace.slices(table)])
        tables[table] = rows[np.argsort(rows["seq"], kind="stable")] if table == "pushes" else rows
    return Trace(trace.path, trace.attributes, tables)


def _within(rows: np.ndarray, from_s: float, to_s: float) -> np.ndarray:
    """Return which rows lie in these seconds, shape (n_rows,); all of a table without times."""
    names = rows.dtype.names or ()
    if "now_s" not in names:
        return np.ones(len(rows), bool)
    begin_s = rows["begin_s" if "begin_s" in names else "now_s"]
    return (rows["now_s"] >= from_s) & ~(begin_s > to_s)
