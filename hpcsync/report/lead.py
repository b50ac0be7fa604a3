"""How far workers are ahead of the slowest, at most, from rows that are read in slices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpcsync.trace.iteration_counts import NEVER, follow
from hpcsync.trace.reader import Trace, TraceError, TraceFile
from hpcsync.trace.schema import Change


def push_leads(trace: Trace | TraceFile, most: int) -> np.ndarray:
    """Of each worker: how far it is ahead of the slowest active one, just after a push, at most. Shape (n_workers,).

    most: the pushes of the worker that has most. Of a run that did not finish, the end is left out: see `counting`.
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


def _with_returns(trace: Trace | TraceFile, horizon: int, changes: np.ndarray) -> np.ndarray:
    """The same where workers have joined: event by event."""
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


def _reached(trace: Trace | TraceFile, horizon: int, most: int) -> np.ndarray:
    """At which seq the fewest pushes of an active worker came to 1, 2, ..., `most`; NEVER if they did not. (most,)

    They come to k with the last of the workers' k-th pushes; one that leaves is not waited for any more. A push's
    `iteration` says which one of its worker's it is, so the order of the rows does not matter.
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
    np.maximum.at(reached, last + 1, left)  # from here on only its leaving counts
    return np.maximum.accumulate(reached)[1:-1]


def _horizon(trace: Trace | TraceFile) -> int:
    """The first seq without a row in a run that did not finish, else NEVER."""
    if trace.finished:
        return NEVER
    numbered = ("pushes", "grants", "decisions", "membership")
    seqs = np.concatenate([rows["seq"].copy() for table in numbered for rows in trace.slices(table)])
    return int(np.setdiff1d(np.arange(1, len(seqs) + 2), seqs)[0])


def _until(trace: Trace | TraceFile, table: str, horizon: int) -> Iterator[np.ndarray]:
    for rows in trace.slices(table):
        yield rows[rows["seq"] < horizon]
