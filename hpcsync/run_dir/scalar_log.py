"""Callback that logs the scalars of a run as its trace is flushed, in a thread that may wait for disk or network."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from pathlib import Path

import numpy as np

from hpcsync.config.job import Job
from hpcsync.export.loggers import LOGS
from hpcsync.export.scalars import Point, Reports

WAITING = 10_000  # points that may wait; later ones are lost
LAST_S = {"finished": 60.0}  # time for the last points by status of the run; else `HURRIED_S`
HURRIED_S = 2.0  # a run that fails ends its ranks soon


class ScalarLog:
    """Log of the scalars of one run. Its observer costs the thread that flushes a millisecond.

    Parameters
    ----------
    name
        A key of `LOGS`.
    folder
        Folder of the run.
    job
        The job.
    """

    def __init__(self, name: str, folder: Path, job: Job) -> None:
        self._name = name
        self._reports = Reports(job.takers)
        self._points: queue.Queue[Point | None] = queue.Queue(WAITING)
        self._status = "failed"
        self._thread = threading.Thread(target=self._write_all, args=(folder, job), name="log", daemon=True)
        self._thread.start()

    def add(self, table: str, rows: np.ndarray) -> None:
        """Take the rows of a flush."""
        with contextlib.suppress(queue.Full):
            for point in self._reports.points(table, rows):
                self._points.put_nowait(point)

    def close(self, status: str) -> None:
        """Write what is left, for at most a minute. A second call does nothing."""
        if self._thread.is_alive():
            self._status = status
            end_s = time.monotonic() + LAST_S.get(status, HURRIED_S)
            with contextlib.suppress(queue.Full):
                self._points.put(None, timeout=end_s - time.monotonic())
            self._thread.join(max(0.0, end_s - time.monotonic()))

    def _write_all(self, folder: Path, job: Job) -> None:
        try:
            write, close = LOGS[self._name](folder, job)
            while (point := self._points.get()) is not None:
                write(point)
            close(self._status)
        except Exception as error:  # of a foreign package: of any type
            line = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"hpcsync: log {self._name}: the log ends here, the run continues: {line}", file=sys.stderr)
