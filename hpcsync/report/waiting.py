"""Who waited for whom, from the rows of a trace that are read in slices.

With servers a grant names the event that released its worker (`released_by`), so the time for which the worker was
blocked (`held_s`) is attributed to the worker of that event. Without servers a worker waits for the peer of its
exchange, or, where all workers exchange in the same round, for the one whose computation ended last in that iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.sparse import coo_array, csr_array

from hpcsync.paradigms.records import ALL_PEERS
from hpcsync.trace.reader import Trace, TraceFile
from hpcsync.trace.schema import EVENTS, Change, Release, Rows

NO_WORKER = -1
SAME_TIME_S = 1e-9  # rounding error of a difference of times
_TIMED = -2


class Waits(NamedTuple):
    """Waiting times of a run in seconds.

    Attributes
    ----------
    between_s
        Time for which each worker (row) waited for each other (column), shape (n_workers, n_workers).
    timed_s
        Time for which each worker was blocked until a time that its paradigm had set, shape (n_workers,).
    ended_s
        Time for which each worker was blocked when the run ended, shape (n_workers,). It is in no iteration.
    unknown_s
        Time of which the trace does not tell for whom the worker waited, shape (n_workers,).
    messages_s
        Waiting of the iterations that is not blocking: push info and grant in transit, the server at work for others,
        shape (n_workers,). Zero without servers.
    """

    between_s: csr_array
    timed_s: Rows
    ended_s: Rows
    unknown_s: Rows
    messages_s: Rows

    @property
    def caused_s(self) -> Rows:
        """Time for which all other workers together waited for each worker, shape (n_workers,)."""
        return np.asarray(self.between_s.sum(axis=0)).ravel()


def waits(trace: Trace | TraceFile) -> Waits:
    """Return the waiting times of a run.

    Notes
    -----
    The rows of a run without servers are read four times. The memory grows with the largest `seq`, or with the number
    of iterations: 4 B for each `seq`, 12 B for each iteration of a worker.
    """
    return _of_grants(trace) if trace.job.has_servers else _of_exchanges(trace)


class Wait(NamedTuple):
    """Waiting times that ended one by one, as arrays of shape (n_waits,): when, whose, for whom, how long."""

    until_s: Rows
    worker: Rows
    cause: Rows
    seconds: Rows


def each_wait(trace: Trace | TraceFile) -> Iterator[Wait]:
    """Yield the waits of workers for other workers, slice by slice; those of length 0 are left out."""
    served = trace.job.has_servers
    for rows, cause in _grants_and_causes(trace) if served else _exchanges_and_causes(trace):
        seconds = rows["held_s" if served else "wait_s"]
        until_s = rows["now_s"] if served else rows["end_s"] + seconds
        if trace.job.paradigm.separates_layers:
            until_s = _end_of_wait_s(trace, rows)
        some = (cause >= 0) & (cause != rows["worker"]) & (seconds > 0)
        yield Wait(until_s[some], rows["worker"][some], cause[some], seconds[some])


def _end_of_wait_s(trace: Trace | TraceFile, rows: Rows) -> Rows:
    """Return when the last wait of each row ended, with separated layers: within the computation, or after it."""
    from hpcsync.report.intervals import first_shares  # imports pandas

    after_s = rows["wait_s"] - (rows["end_s"] - rows["begin_s"] - rows["load_s"] - rows["compute_s"])
    continues_s = rows["end_s"] - (1 - first_shares(trace)[rows["worker"]]) * rows["compute_s"]
    return np.where(after_s > SAME_TIME_S, rows["end_s"] + after_s, continues_s)


def _of_grants(trace: Trace | TraceFile) -> Waits:
    n_workers = trace.n_workers
    last = np.zeros(n_workers, np.int64)  # last iteration that was pushed
    messages_s = np.zeros(n_workers)
    for rows in trace.slices("pushes"):
        np.maximum.at(last, rows["worker"], rows["iteration"])
        messages_s += np.bincount(rows["worker"], rows["wait_s"], n_workers)
    unused = _unused(trace)
    between, timed_s, ended_s, unknown_s = csr_array((n_workers, n_workers)), *np.zeros((3, n_workers))
    for rows, cause in _grants_and_causes(trace):
        worker, held_s = rows["worker"], rows["held_s"]
        pushed = (rows["iteration"] <= last[worker]) & ~np.isin(rows["seq"], unused)
        messages_s -= np.bincount(worker[pushed], held_s[pushed], n_workers)
        others = (cause >= 0) & (cause != worker)
        between += _matrix(worker[others], cause[others], held_s[others], n_workers)
        timed, ended = cause == _TIMED, rows["released_by"] == Release.END
        timed_s += np.bincount(worker[timed], held_s[timed], n_workers)
        ended_s += np.bincount(worker[ended], held_s[ended], n_workers)
        rest = ~others & ~timed & ~ended
        unknown_s += np.bincount(worker[rest], held_s[rest], n_workers)
    return Waits(between, timed_s, ended_s, unknown_s, messages_s)


def _unused(trace: Trace | TraceFile) -> Rows:
    """Return the `seq` of the grants in place of which workers left; their wait is in no push."""
    changes = np.concatenate(list(trace.slices("membership")))
    returned = np.unique(changes["worker"][changes["change"] == Change.JOINED])
    if not len(returned):
        return np.zeros(0, np.int64)
    own = np.concatenate([rows[np.isin(rows["worker"], returned)] for rows in trace.slices("grants")])
    own = own[np.lexsort((own["seq"], own["iteration"], own["worker"]))]
    repeated = (own["worker"][:-1] == own["worker"][1:]) & (own["iteration"][:-1] == own["iteration"][1:])
    return own["seq"][:-1][repeated]


def _grants_and_causes(trace: Trace | TraceFile) -> Iterator[tuple[Rows, Rows]]:
    """Yield slices of /grants with the worker of the event that released each, or `_TIMED` or -1."""
    worker_of = _worker_of_event(trace)
    for rows in trace.slices("grants"):
        released_by = rows["released_by"]
        known = (released_by > 0) & (released_by < len(worker_of))
        yield rows, np.where(known, worker_of[np.where(known, released_by, 0)], NO_WORKER)


def _worker_of_event(trace: Trace | TraceFile) -> Rows:
    """Return the worker of each `seq` of an event, `_TIMED` for a row of /decisions that is an event, -1 for others."""
    tables = ("pushes", "grants", "decisions", "membership")
    n_seqs = 1 + max(int(rows["seq"].max(initial=0)) for table in tables for rows in trace.slices(table))
    worker_of = np.full(n_seqs, NO_WORKER, np.int32)
    for table in ("pushes", "membership"):
        for rows in trace.slices(table):
            worker_of[rows["seq"]] = rows["worker"]
    for rows in trace.slices("decisions"):
        worker_of[rows["seq"][np.isin(rows["controller"], [name.encode() for name in EVENTS])]] = _TIMED
    return worker_of


def _of_exchanges(trace: Trace | TraceFile) -> Waits:
    n_workers = trace.n_workers
    between, unknown_s = csr_array((n_workers, n_workers)), np.zeros(n_workers)
    for rows, cause in _exchanges_and_causes(trace):
        worker, wait_s = rows["worker"], rows["wait_s"]
        others = (cause >= 0) & (cause != worker)
        between += _matrix(worker[others], cause[others], wait_s[others], n_workers)
        unknown_s += np.bincount(worker[~others], wait_s[~others], n_workers)
    timed_s, ended_s, messages_s = np.zeros((3, n_workers))
    return Waits(between, timed_s, ended_s, unknown_s, messages_s)


def _exchanges_and_causes(trace: Trace | TraceFile) -> Iterator[tuple[Rows, Rows]]:
    """Yield slices of /exchanges with the worker for which each row's worker waited, or -1."""
    last, paradigm = _last_of_iterations(trace), trace.job.paradigm
    in_step = paradigm.lead_bound == 0 and not paradigm.separates_layers  # whichever peer a worker has in a round
    for rows in trace.slices("exchanges"):
        of_all = in_step | (rows["peer"] == ALL_PEERS)
        yield rows, np.where(of_all, last[rows["iteration"]], np.maximum(rows["peer"], NO_WORKER))


def _last_of_iterations(trace: Trace | TraceFile) -> Rows:
    """Return the worker whose computation of each iteration ended last, or -1; shape (n_iterations + 1,)."""
    n = 1 + max(int(rows["iteration"].max(initial=0)) for rows in trace.slices("exchanges"))
    latest_s, last = np.full(n, -np.inf), np.full(n, NO_WORKER, np.int32)
    for rows in trace.slices("exchanges"):
        made = rows[rows["batch_size"] > 0]
        np.maximum.at(latest_s, made["iteration"], made["end_s"])
    for rows in trace.slices("exchanges"):
        made = rows[rows["batch_size"] > 0]
        is_last = made["end_s"] == latest_s[made["iteration"]]
        last[made["iteration"][is_last]] = made["worker"][is_last]
    return last


def _matrix(waiter: Rows, cause: Rows, seconds: Rows, n_workers: int) -> csr_array:
    return coo_array((seconds, (waiter, cause)), shape=(n_workers, n_workers)).tocsr()
