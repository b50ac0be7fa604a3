"""Largest lead of each worker over the slowest one, from rows that are read in slices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpcsync.trace.iteration_counts import NEVER, follow
from hpcsync.trace.reader import Trace, TraceError, TraceFile
from hpcsync.trace.schema import Change, Rows


def push_leads(trace: Trace | TraceFile, most: int) -> Rows:
    """Return the largest lead of each worker over the slowest active one, just after a push.

    Parameters
    ----------
    trace : Trace or TraceFile
        Trace of a run with servers. The end of a run that did not finish is left out (see `trace.iteration_counts`).
    most : int
        Number of pushes of the worker with the most pushes.

    Returns
    -------
    numpy.ndarray
        Lead in pushes, shape (n_workers,).

    Raises
    ------
    TraceError
        If the iterations in the pushes do not count them.
    """
    horizon = _horizon(trace)
    changes = np.concatenate(list(_until(trace, "membership", horizon)))
    if (changes["change"] == Change.JOINED).any():
        return _with_returns(trace, horizon, changes)
    reached = _reached(trace, horizon, most)
    largest = np.zeros(trace.n_workers, np.int64)
    for rows in _until(trace, "pushes", horizon):
        fewest = np.searchsorted(reached, rows["seq"], side="right")
        np.maximum.at(largest, rows["worker"], rows["iteration"] - fewest)
    return largest


def _with_returns(trace: Trace | TraceFile, horizon: int, changes: Rows) -> Rows:
    """Return the same for a run in which workers joined, event by event."""
    pushes = np.concatenate([rows[["seq", "worker"]] for rows in _until(trace, "pushes", horizon)])
    seq = np.concatenate([pushes["seq"], changes["seq"]])
    events = np.zeros(len(seq), [("worker", "<i8"), ("is_push", "?"), ("joins", "?")])
    events["worker"] = np.concatenate([pushes["worker"], changes["worker"]])
    events["is_push"][: len(pushes)] = True
    events["joins"][len(pushes) :] = changes["change"] == Change.JOINED
    events = events[np.argsort(seq)]
    own, slowest = follow(trace.n_workers, events, events["is_push"])
    largest = np.zeros(trace.n_workers, np.int64)
    np.maximum.at(largest, events["worker"][events["is_push"]], (own - slowest)[events["is_push"]])
    return largest


def _reached(trace: Trace | TraceFile, horizon: int, most: int) -> Rows:
    """Return the seq at which every active worker had made 1, 2, ..., `most` pushes; NEVER if it did not happen.

    The shape is (most,). All have made k pushes with the last of the workers' k-th pushes; a worker that has left does
    not count. The `iteration` of a push is its number among its worker's pushes, so the order of the rows does not
    matter.
    """
    left = np.full(trace.n_workers, NEVER)
    for rows in _until(trace, "membership", horizon):
        np.minimum.at(left, rows["worker"], rows["seq"])
    reached, last = np.zeros(most + 2, np.int64), np.zeros(trace.n_workers, np.int64)
    for rows in _until(trace, "pushes", horizon):
        worker, iteration = rows["worker"], rows["iteration"]
        if ((iteration < 1) | (iteration > most)).any():
            raise TraceError(f"{trace.path}: a damaged trace: the iterations in pushes do not count them")
        np.maximum.at(reached, iteration, np.minimum(rows["seq"], left[worker]))
        np.maximum.at(last, worker, iteration)
    np.maximum.at(reached, last + 1, left)  # after its last push a worker counts until it leaves
    return np.maximum.accumulate(reached)[1:-1]


def _horizon(trace: Trace | TraceFile) -> int:
    """Return the first seq without a row in a run that did not finish; otherwise NEVER."""
    if trace.finished:
        return NEVER
    numbered = ("pushes", "grants", "decisions", "membership")
    seqs = np.concatenate([rows["seq"].copy() for table in numbered for rows in trace.slices(table)])
    return int(np.setdiff1d(np.arange(1, len(seqs) + 2), seqs)[0])


def _until(trace: Trace | TraceFile, table: str, horizon: int) -> Iterator[Rows]:
    for rows in trace.slices(table):
        yield rows[rows["seq"] < horizon]
