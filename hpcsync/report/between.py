"""Time of workers beside loading, computing, waiting and transfers: compression, steps of the optimizer, other work."""

from __future__ import annotations

import numpy as np

from hpcsync.trace.schema import Rows

WORDS = "compression, steps of the optimizer and other work between iterations"


class Between:
    """Sum over the rows of /pushes, or of /exchanges, added slice by slice.

    With servers it is the time of compressing pushes: all other time from one push to the next is in other columns.

    Attributes
    ----------
    seconds
        Time between the iterations of each worker, shape (n_workers,).
    """

    def __init__(self, n_workers: int) -> None:
        self.seconds = np.zeros(n_workers)
        self._ended_s = np.full(n_workers, np.nan)  # end of each worker's last iteration

    def add(self, rows: Rows) -> None:
        """Add the next rows."""
        if "encode_s" in (rows.dtype.names or ()):
            np.add.at(self.seconds, rows["worker"], np.nan_to_num(rows["encode_s"]))
            return
        rows = rows[rows["batch_size"] > 0]
        rows = rows[np.lexsort((rows["iteration"], rows["worker"]))]
        # With layer separation a worker also waits between begin_s and end_s, and its wait ends before end_s + wait_s.
        worker, parts = rows["worker"], ("begin_s", "load_s", "compute_s", "wait_s", "comm_s")
        ends_s = sum(rows[part] for part in parts)
        before_s = np.concatenate([[np.nan], ends_s[:-1]])
        first = np.concatenate([[True], worker[1:] != worker[:-1]])[: len(rows)]
        before_s = np.where(first, self._ended_s[worker], before_s[: len(rows)])
        self._ended_s[worker] = ends_s  # of several rows of a worker the last one counts
        np.add.at(self.seconds, worker, np.nan_to_num(np.maximum(rows["begin_s"] - before_s, 0.0)))
