"""Errors of the workers' clocks, as a trace states them."""

from __future__ import annotations

import numpy as np

from hpcsync.trace.schema import Rows

DRIFT = 1e-4  # largest relative difference between the speeds of two hosts' clocks


def clock_errors_s(clocks: Rows, n_servers: int, workers: Rows, now_s: Rows) -> Rows:
    """Return the largest errors of times that workers measured, on rank 0's clock.

    Parameters
    ----------
    clocks
        The trace's /clocks, in which a worker has a row for each start of the run.
    n_servers
        Number of ranks before those of the workers.
    workers, now_s
        Worker that measured, and about when, in seconds since the start of the run.

    Returns
    -------
    Rows
        Errors in seconds, of the shape of `workers`; 0 in virtual time.
    """
    worst_s = np.zeros(int(workers.max(initial=-1)) + 1)
    ranks = clocks["rank"].astype(np.int64) - n_servers
    known = (ranks >= 0) & (ranks < len(worst_s)) & np.isfinite(clocks["uncertainty_s"])
    np.maximum.at(worst_s, ranks[known], clocks["uncertainty_s"][known])
    drift = DRIFT if len(np.unique(clocks["host"])) > 1 else 0.0
    return worst_s[workers] + drift * np.abs(now_s)
