"""Iteration counts recomputed from the rows of a trace, of each worker and of the slowest active one."""

from __future__ import annotations

from collections import Counter

import numpy as np

from hpcsync.trace.schema import Rows

NEVER = np.iinfo(np.int64).max


def follow(n_workers: int, events: Rows, counts: Rows) -> tuple[Rows, Rows]:
    """Return the iteration counts of each event's worker and of the slowest active worker after the event.

    Parameters
    ----------
    n_workers
        Number of workers; all are active at first.
    events
        Structured array, shape (n_events,), with the columns `worker`, `is_push` and `joins`.
    counts
        Iterations that each push counts as, shape (n_events,).

    Returns
    -------
    own, slowest : numpy.ndarray
        Counts of the event's worker and of the slowest active one, shape (n_events,) each. A worker that joins is
        counted as far as the slowest active one, if it is not farther.
    """
    iters, active, n_active = [0] * n_workers, [True] * n_workers, n_workers
    least, workers_at = 0, Counter({0: n_workers})  # active workers by their count
    own, slowest = np.zeros((2, len(events)), np.int64)
    columns = [column.tolist() for column in (events["worker"], events["is_push"], events["joins"], counts)]
    for i, (worker, is_push, joins, more) in enumerate(zip(*columns, strict=True)):
        before = active[worker]
        workers_at[iters[worker]] -= before
        iters[worker] = max(iters[worker], least) if joins else iters[worker] + (is_push and more)
        active[worker] = joins or (before and is_push)
        workers_at[iters[worker]] += active[worker]
        n_active += active[worker] - before
        while n_active and not workers_at[least]:
            least += 1
        own[i], slowest[i] = iters[worker], least
    return own, slowest


def running_count(labels: Rows) -> Rows:
    """Return for each element how many elements up to and including it are equal to it."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    first_of_run = np.searchsorted(ordered, ordered, side="left")
    counts = np.empty(len(labels), np.int64)
    counts[order] = np.arange(len(labels)) - first_of_run + 1
    return counts
