"""Is /stalls true? Did each of these iterations last so long, and was its deadline what its worker's own ones lead one
to expect? Counted again: from grant to push, or without servers from exchange to exchange, less the wait there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hpcsync.paradigms.protocol import UNTIL
from hpcsync.stalls import KNOWN, NORMAL, SHARE, SLACK_S, SPREAD, WINDOW
from hpcsync.traces.checks import Check, check_all, teller
from hpcsync.traces.reading import Trace
from hpcsync.traces.schema import PHASES

SAME_S = 1e-6


class _Iterations(NamedTuple):
    """One worker's, but for the first, in their order: number, begin, end (inf if there is none), its own time in it
    per unit of its size, and that."""

    number: np.ndarray
    begin_s: np.ndarray
    end_s: np.ndarray
    own_s: np.ndarray
    size: np.ndarray


def check_stalls(trace: Trace) -> list[Check]:
    """None of a trace without stalls."""
    stalls = trace.tables["stalls"]
    if not len(stalls):
        return []
    possible = (stalls["worker"] >= 0) & (stalls["worker"] < trace.n_workers)
    possible &= (stalls["n_waiting"] >= 0) & (stalls["n_waiting"] < trace.n_workers)
    possible &= np.isin(stalls["phase"], list(PHASES.values()))
    late = stalls["lasted_s"] > stalls["deadline_s"]
    lasted, deadline = (np.ones(len(stalls), bool) for _ in range(2))
    iterations = _served if trace.job.has_servers else _exchanging
    of_worker = {worker: iterations(trace, worker) for worker in set(stalls["worker"][possible].tolist())}
    for i in np.flatnonzero(possible):
        lasted[i], deadline[i] = _recount(of_worker[int(stalls["worker"][i])], stalls[i], exact=trace.job.has_servers)
    tell = teller("/stalls", stalls, *stalls.dtype.names or ())
    return [
        check_all(
            "stalls are of iterations that lasted so long",
            (~possible, tell),
            (~late, tell),
            (~lasted, tell),
        ),
        check_all("deadlines follow from a worker's own iterations", (~deadline & possible, tell)),
    ]


def _served(trace: Trace, worker: int) -> _Iterations:
    grants, pushes = (rows[rows["worker"] == worker] for rows in (trace.tables["grants"], trace.tables["pushes"]))
    grants = grants[grants["local_steps"] != 0]
    size = np.where(grants["batch_size"] > 0, grants["batch_size"], grants["local_steps"]).astype(float)
    size = np.where(grants["local_steps"] == UNTIL, grants["commit_s"], size)
    at = np.searchsorted(pushes["iteration"], grants["iteration"])
    end_s = np.append(pushes["now_s"], math.inf)[at]
    end_s[np.append(pushes["iteration"], -1)[at] != grants["iteration"]] = math.inf
    end_s[:-1][grants["iteration"][1:] == grants["iteration"][:-1]] = math.inf  # it left, and began it again
    return _Iterations(grants["iteration"], grants["now_s"], end_s, (end_s - grants["now_s"]) / size, size)


def _exchanging(trace: Trace, worker: int) -> _Iterations:
    rows = trace.tables["exchanges"]
    rows = rows[(rows["worker"] == worker) & (rows["batch_size"] > 0)]
    end_s = np.append(rows["now_s"][1:], math.inf)
    own_s = end_s - rows["now_s"] - np.append(rows["wait_s"][1:], 0.0)
    return _Iterations(rows["iteration"] + 1, rows["now_s"], end_s, own_s, np.ones(len(rows)))


def _recount(iterations: _Iterations, stall: np.void, *, exact: bool) -> tuple[bool, bool]:
    """Whether it lasted so long, and had this deadline. exact: not only at least, where it also waits."""
    it, now_s = iterations, stall["now_s"]
    (at,) = np.nonzero((it.number == stall["iteration"]) & (it.begin_s <= now_s))
    if not len(at):
        return False, False
    own_s = now_s - it.begin_s[at[-1]]
    differs_s = own_s - stall["lasted_s"]
    lasted = it.end_s[at[-1]] >= now_s - SAME_S and (abs(differs_s) if exact else -differs_s) < SAME_S
    before = np.maximum(0.0, it.own_s[it.end_s <= it.begin_s[at[-1]]])[-WINDOW:]
    if len(before) < KNOWN:
        return lasted, False
    usual, size = np.median(before), it.size[at[-1]]
    mad = np.median(np.abs(before - usual))
    expected_s = size * usual + max(size * SPREAD * NORMAL * mad, size * SHARE * usual, SLACK_S)
    return lasted, bool(abs(stall["deadline_s"] - expected_s) < SAME_S * (1 + expected_s))
