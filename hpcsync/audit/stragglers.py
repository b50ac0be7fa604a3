"""Checks of /stalls: how long each iteration had lasted, and the deadline that follows from its worker's history.

Iterations are recounted from grant to push, or without servers from exchange to exchange. Without servers deadlines
are not recounted, because no table records the pauses for checkpoints.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hpcsync.audit.check import SAME_TIME_S, Check, check_all, describe_columns
from hpcsync.core.straggler_detector import KNOWN, NORMAL, SHARE, SLACK_S, SPREAD, WINDOW
from hpcsync.paradigms.records import UNTIL
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import Phase, Rows


class _Iterations(NamedTuple):
    """Iterations of one worker except the first, in order; `end_s` is inf if there is no end."""

    number: Rows
    begin_s: Rows
    end_s: Rows
    size: Rows


def check_stalls(trace: Trace) -> list[Check]:
    """Return the checks of this module, none for a trace without stalls."""
    stalls, served = trace.tables["stalls"], trace.job.has_servers
    if not len(stalls):
        return []
    possible = (stalls["worker"] >= 0) & (stalls["worker"] < trace.n_workers)
    possible &= (stalls["n_waiting"] >= 0) & (stalls["n_waiting"] < trace.n_workers)
    possible &= np.isin(stalls["phase"], list(Phase))
    overdue = stalls["lasted_s"] > stalls["deadline_s"]
    lasted, expected = (np.ones(len(stalls), bool) for _ in range(2))
    of_worker = {
        worker: (_served if served else _exchanging)(trace, worker)
        for worker in set(stalls["worker"][possible].tolist())
    }
    for i in np.flatnonzero(possible):
        iterations, stall = of_worker[int(stalls["worker"][i])], stalls[i]
        (at,) = np.nonzero((iterations.number == stall["iteration"]) & (iterations.begin_s <= stall["now_s"]))
        lasted[i] = len(at) and _lasted(iterations, at[-1], stall)
        expected[i] = len(at) and abs(stall["deadline_s"] - _deadline_s(iterations, at[-1])) < SAME_TIME_S
    describe = describe_columns("/stalls", stalls, *stalls.dtype.names or ())
    lasting = check_all(
        "stalled iterations lasted as long as recorded", *((~valid, describe) for valid in (possible, overdue, lasted))
    )
    return [lasting, check_all("deadlines follow from the worker's own iterations", (~expected, describe))][
        : 1 + served
    ]


def _served(trace: Trace, worker: int) -> _Iterations:
    grants, pushes = (rows[rows["worker"] == worker] for rows in (trace.tables["grants"], trace.tables["pushes"]))
    grants = grants[grants["local_steps"] != 0]
    size = np.where(grants["batch_size"] > 0, grants["batch_size"], grants["local_steps"]).astype(float)
    size = np.where(grants["local_steps"] == UNTIL, grants["commit_s"], size)
    at = np.searchsorted(pushes["iteration"], grants["iteration"])
    end_s = np.append(pushes["now_s"], math.inf)[at]
    end_s[np.append(pushes["iteration"], -1)[at] != grants["iteration"]] = math.inf
    end_s[:-1][grants["iteration"][1:] == grants["iteration"][:-1]] = math.inf  # it left and began the iteration again
    return _Iterations(grants["iteration"], grants["now_s"], end_s, size)


def _exchanging(trace: Trace, worker: int) -> _Iterations:
    rows = trace.tables["exchanges"]
    rows = rows[(rows["worker"] == worker) & (rows["batch_size"] > 0)]
    end_s = np.append(rows["now_s"][1:], math.inf)
    return _Iterations(rows["iteration"] + 1, rows["now_s"], end_s, np.ones(len(rows)))


def _lasted(iterations: _Iterations, at: int, stall: np.void) -> bool:
    """Return True if the iteration was in progress and had lasted that long, not counting blocked time."""
    since_s, until_s = iterations.begin_s[at], iterations.end_s[at]
    return bool(stall["now_s"] <= until_s + SAME_TIME_S and stall["lasted_s"] < stall["now_s"] - since_s + SAME_TIME_S)


def _deadline_s(iterations: _Iterations, at: int) -> float:
    it, size = iterations, iterations.size[at]
    before = it.end_s <= it.begin_s[at]
    durations = ((it.end_s - it.begin_s) / it.size)[before][-WINDOW:]
    if len(durations) < KNOWN:
        return math.inf
    usual = np.median(durations)
    mad = np.median(np.abs(durations - usual))
    return float(size * usual + max(size * SPREAD * NORMAL * mad, size * SHARE * usual, SLACK_S))
