"""Duration of a worker's iterations: `[cluster.compute]` and `[[cluster.events]]` of a job.

Real ranks are padded to these times, so that a laptop behaves like a heterogeneous cluster; the simulator uses them
directly. Every worker has its own random generator, so its n-th iteration takes the same time in every run with the
same seed, whatever happens to it or to the others.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from hpcsync.config.cluster import ClusterEvent, Compute, Exponential, LogNormal, RecordedCompute, absences
from hpcsync.config.compression import DenseOptions
from hpcsync.config.job import Job
from hpcsync.config.time_table import read_times
from hpcsync.state import Stateful

BLOCK = 64


class Device(Stateful):
    """Device of one worker: durations of its iterations, and its departures and joins.

    Parameters
    ----------
    times
        Endless iterator over the seconds of iterations 1, 2, ... at the job's batch size without any slow-down. None:
        not known; iterations take no time.
    events
        Events of this worker, in any order. Of several at the same moment the last one holds; those for an iteration
        follow all others.
    fixed_share
        Share of these seconds that does not depend on the number of samples.
    """

    state_types = {
        "_iteration": int,
        "_factor": float,
        "_by_time": deque[tuple[float, int, float]],
        "_by_iteration": deque[tuple[int, int, float]],
        "_joins_s": float | None,
    }

    def __init__(self, times: Iterator[float] | None, events: Sequence[ClusterEvent], fixed_share: float = 0.0) -> None:
        self._times = times
        self._fixed_share = fixed_share
        self._iteration = 1  # next iteration
        self._factor = 1.0
        changes = [event for event in events if event.change in ("slow", "recover")]
        self._by_time = deque(sorted((e.at_s, i, _factor(e)) for i, e in enumerate(changes) if e.at_s is not None))
        self._by_iteration = deque(
            sorted((e.at_iteration, i, _factor(e)) for i, e in enumerate(changes) if e.at_iteration is not None)
        )
        leaving = [event for event in events if event.change == "leave"]
        self._away = absences(events)
        self._joins_s: float | None = None  # time to join again after a departure; None if the worker has not left
        self._leave_iteration = min((e.at_iteration for e in leaving if e.at_iteration is not None), default=math.inf)
        self._may_leave = bool(leaving or self._away)

    def leaves(self, begin_s: float) -> bool:
        """Return True if the worker leaves instead of beginning its next iteration at this time.

        It is then away until `join`.
        """
        if self._joins_s is None and self._may_leave:
            away = (until_s for since_s, until_s in self._away if since_s <= begin_s < until_s)
            self._joins_s = next(away, math.inf if self._iteration >= self._leave_iteration else None)
        return self._joins_s is not None

    @property
    def joins_s(self) -> float:
        """Time at which the worker that has left joins again; inf if it does not."""
        return math.inf if self._joins_s is None else self._joins_s

    def join(self) -> None:
        """Let the worker take part again."""
        self._joins_s = None

    def seconds(self, begin_s: float, load: float = 1.0, pieces: int = 1) -> float:
        """Return the duration of the next iteration.

        Parameters
        ----------
        begin_s
            Time at which it begins, not before the end of the previous one.
        load
            Its samples over the job's batch size.
        pieces
            Pieces in which they are computed; each takes the time that does not depend on the number of samples.

        Notes
        -----
        A change of speed during the iteration applies to the rest of it: the remaining work takes `factor` times as
        long.
        """
        if self._by_time or self._by_iteration:
            self._change_speed(begin_s)
        self._iteration += 1
        left_s = 0.0 if self._times is None else next(self._times)  # remaining, in seconds of a device that is not slow
        left_s *= pieces * self._fixed_share + (1.0 - self._fixed_share) * load  # exactly 1 for a whole load of 1
        since_s, factor = begin_s, self._factor
        for change_s, _, changed in self._by_time:  # not removed: a cancelled iteration may end before them
            if change_s >= since_s + left_s * factor:
                break
            left_s = max(0.0, left_s - (change_s - since_s) / factor)
            since_s, factor = change_s, changed
        return (since_s - begin_s) + left_s * factor

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, in a new device."""
        super().restore(state)
        if self._times is not None:
            self._times = islice(self._times, self._iteration - 1, None)

    def _change_speed(self, begin_s: float) -> None:
        """Apply the changes due by now; changes for this iteration come last, since they happen as it begins."""
        while self._by_time and self._by_time[0][0] <= begin_s:
            self._factor = self._by_time.popleft()[-1]
        while self._by_iteration and self._by_iteration[0][0] <= self._iteration:
            self._factor = self._by_iteration.popleft()[-1]


def _factor(event: ClusterEvent) -> float:
    return 1.0 if event.factor is None else event.factor


def device(job: Job, worker: int) -> Device:
    """Create the device of this worker."""
    cluster, compute = job.cluster, job.cluster.compute
    changes = [change for change in cluster.events if change.worker == worker]
    if compute is None:
        return Device(None, changes)
    times = iteration_seconds(compute, job.seed, worker, cluster.workers)
    return Device(times, changes, compute.fixed_share)


def encode_s(job: Job, n_bytes: int) -> float:
    """Return the seconds of virtual time that a device takes to compress `n_bytes` bytes."""
    speed = None if isinstance(job.compression, DenseOptions) else job.compression.gbytes_per_s
    return n_bytes / (1e9 * speed) if speed else 0.0


def update_s(job: Job, n_bytes: int) -> float:
    """Return the seconds of virtual time that a rank takes to add `n_bytes` bytes to weights.

    Times of a recorded run contain its updates.
    """
    speed = job.cluster.update_gbytes_per_s
    return n_bytes / (1e9 * speed) if speed and job.cluster.times_from is None else 0.0


def takes_no_time(compute: Compute, worker: int, n_workers: int) -> bool:
    """Return True if every iteration of this worker takes 0 seconds."""
    if isinstance(compute, RecordedCompute):
        return not any(_table(compute.table, os.stat(compute.table).st_mtime_ns, n_workers)[worker])
    return (compute.seconds if isinstance(compute.seconds, float) else compute.seconds[worker]) == 0.0


@lru_cache(maxsize=1)
def _table(path: str, mtime_ns: int, n_workers: int) -> list[list[float]]:
    """Return a table of times, cached for all workers until the file changes."""
    return read_times(path, n_workers)


def iteration_seconds(compute: Compute, seed: int, worker: int, n_workers: int) -> Iterator[float]:
    """Yield the seconds of this worker's iterations 1, 2, ... at the job's batch size, without end.

    `constant` yields `seconds`; `lognormal` has the median `seconds` and a logarithm with standard deviation `jitter`;
    `exponential` has the mean `seconds`; `table` yields the worker's rows in order, then starts over.
    """
    if isinstance(compute, RecordedCompute):
        times = _table(compute.table, os.stat(compute.table).st_mtime_ns, n_workers)[worker]
        while True:
            yield from times
    seconds = compute.seconds if isinstance(compute.seconds, float) else compute.seconds[worker]
    generator = np.random.default_rng([seed, 2, worker])
    while True:  # drawing a block takes little longer than drawing one number, and gives the same numbers
        if isinstance(compute, LogNormal):
            yield from (seconds * generator.lognormal(0.0, compute.jitter, BLOCK)).tolist()
        elif isinstance(compute, Exponential):
            yield from generator.exponential(seconds, BLOCK).tolist()
        else:
            yield seconds
