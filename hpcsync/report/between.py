"""Time of workers beside loading, computing, waiting and transfers: compression, steps of the optimizer, other work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpcsync.trace.schema import Change, Rows

if TYPE_CHECKING:
    from hpcsync.trace.reader import Trace, TraceFile

PARTS = ("load", "compute", "wait", "comm")  # of a worker's time, as columns without their unit; the rest is between
WORDS = "compression, steps of the optimizer and other work between iterations"


class Between:
    """Sum over the rows of /pushes, or of /exchanges, added slice by slice.

    It is the time of compressing pushes, and that from an iteration with its transfers and waits to the next one, such
    as the work of a script after its step.

    Parameters
    ----------
    n_workers
        Number of workers.

    Attributes
    ----------
    seconds
        Time between the iterations of each worker, shape (n_workers,).
    """

    def __init__(self, n_workers: int) -> None:
        self.seconds = np.zeros(n_workers)
        self._returns: list[np.void] = []  # rows of /membership: the time of an absence does not count
        self._ended_s = np.full(n_workers, np.nan)  # end of each worker's last iteration

    @classmethod
    def of(cls, trace: Trace | TraceFile) -> Between:
        """Return an empty sum for a trace, whose returns of workers it knows."""
        found = cls(trace.n_workers)
        for change in np.concatenate(list(trace.slices("membership"))):
            found.add_change(change)
        return found

    def add_change(self, change: np.void) -> None:
        """Add a row of /membership, before the rows of the worker's later iterations."""
        if change["change"] == Change.JOINED:
            self._returns.append(change.copy())  # it is a row of a buffer that is filled again

    def add(self, rows: Rows) -> tuple[Rows, Rows]:
        """Add the next rows; return those of iterations, by worker, and the time before each from the previous one."""
        rows = rows[rows["batch_size"] > 0]
        rows = rows[np.lexsort((rows["iteration"], rows["worker"]))]
        worker, begins_s = rows["worker"], rows["begin_s"]
        # With layer separation a worker also waits between begin_s and end_s, and its wait ends before end_s + wait_s.
        ends_s = begins_s + rows["load_s"] + rows["compute_s"]
        if "pull_s" in (rows.dtype.names or ()):
            np.add.at(self.seconds, worker, np.nan_to_num(rows["encode_s"]))
            ends_s = ends_s + rows["encode_s"] + rows["comm_s"] - rows["pull_s"]
            begins_s = begins_s - rows["wait_s"] - rows["pull_s"]
        else:
            ends_s = ends_s + rows["wait_s"] + rows["comm_s"]
        before_s = np.concatenate([[np.nan], ends_s[:-1]])
        first = np.concatenate([[True], worker[1:] != worker[:-1]])[: len(rows)]
        before_s = np.where(first, self._ended_s[worker], before_s[: len(rows)])
        self._ended_s[worker] = ends_s  # of several rows of a worker the last one counts
        seconds = np.nan_to_num(np.maximum(begins_s - before_s, 0.0))
        for change in self._returns:
            seconds[(worker == change["worker"]) & (before_s < change["now_s"]) & (rows["end_s"] > change["now_s"])] = 0
        np.add.at(self.seconds, worker, seconds)
        return rows, seconds
