"""Recorded compute times: a CSV file with the columns worker, iteration (both from 0) and seconds."""

from __future__ import annotations

import csv
from pathlib import Path

from hpcsync.config.base import MOST
from hpcsync.config.errors import JobError, shown


def read_times(path: str | Path, n_workers: int) -> list[list[float]]:
    """Read recorded compute times.

    Parameters
    ----------
    path
        The CSV file.
    n_workers
        Number of workers, each of which needs at least one row.

    Returns
    -------
    list of list of float
        Seconds of each worker's iterations. After its last row a worker starts over with its first.

    Raises
    ------
    JobError
        If the file cannot be read, or is no such table.
    """
    key = f"cluster.compute.table = {shown(str(path))}"
    times: list[list[float]] = [[] for _ in range(n_workers)]
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            if sorted(rows.fieldnames or []) != ["iteration", "seconds", "worker"]:
                raise JobError(f"{key}: must have exactly the columns worker,iteration,seconds")
            for row in rows:
                _add_time(times, row, f"{key}: line {rows.line_num}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise JobError(f"{key}: {getattr(error, 'strerror', None) or 'not a CSV file'}") from None
    for worker, seconds in enumerate(times):
        if not seconds:
            raise JobError(f"{key}: must have rows for every worker, 0 to {n_workers - 1}; worker {worker} has none")
    return times


def _add_time(times: list[list[float]], row: dict[str | None, str], where: str) -> None:
    try:
        if None in row:
            raise ValueError("more fields than columns")
        worker, iteration, seconds = int(row["worker"]), int(row["iteration"]), float(row["seconds"])
    except (TypeError, ValueError):
        raise JobError(f"{where}: must be two whole numbers and a number of seconds") from None
    if not 0 <= worker < len(times):
        raise JobError(f"{where}: worker = {worker}: must be 0 to {len(times) - 1} (cluster.workers = {len(times)})")
    if iteration != len(times[worker]):
        raise JobError(f"{where}: iteration = {iteration}: must be {len(times[worker])}, the next of worker {worker}")
    if not 0 <= seconds <= MOST:
        raise JobError(f"{where}: seconds = {seconds}: must be a number from 0 to {MOST:g}")
    times[worker].append(seconds)
