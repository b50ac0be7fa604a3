"""How long a worker's iteration takes: the `[cluster.compute]` of a job, and its `[[cluster.events]]`.

Real ranks are padded up to these times, so that a laptop behaves like an uneven cluster; the simulator takes them as
they are. Every worker draws from a generator of its own, so that its n-th iteration takes the same time in every run
with the same seed, whatever the others do and whatever happens to it.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from hpcsync.config.cluster import Change, Compute, Exponential, LogNormal, RecordedCompute, absences
from hpcsync.config.compression import DenseOptions
from hpcsync.config.job import Job
from hpcsync.config.time_table import read_times

BLOCK = 64


class Device:
    """One worker's device: how long its iterations take, one after the other, when it leaves, and joins again.

    times:  seconds of iterations 1, 2, ... at the job's batch size were it never slow, without end; None: nobody knows,
            they take no time here.
    events: its own, in any order. Of those for the same moment the last holds, those for an iteration after all others.
    fixed_share: of these seconds, what does not depend on how many samples an iteration is of.
    """

    def __init__(self, times: Iterator[float] | None, events: Sequence[Change], fixed_share: float = 0.0) -> None:
        self._times = times
        self._fixed_share = fixed_share
        self._iteration = 1  # that begins next
        self._factor = 1.0
        changes = [event for event in events if event.change in ("slow", "recover")]
        self._by_time = deque(sorted((e.at_s, i, _factor(e)) for i, e in enumerate(changes) if e.at_s is not None))
        self._by_iteration = deque(
            sorted((e.at_iteration, i, _factor(e)) for i, e in enumerate(changes) if e.at_iteration is not None)
        )
        leaving = [event for event in events if event.change == "leave"]
        self._away = absences(events)
        self._joins_s: float | None = None  # when the worker joins again that leaves, None if it does not leave
        self._leave_iteration = min((e.at_iteration for e in leaving if e.at_iteration is not None), default=math.inf)

    def leaves(self, begin_s: float) -> bool:
        """Whether the worker leaves instead of beginning its next iteration at this time; if so, until it `joins`."""
        if self._joins_s is None:
            away = (until_s for since_s, until_s in self._away if since_s <= begin_s < until_s)
            self._joins_s = next(away, math.inf if self._iteration >= self._leave_iteration else None)
        return self._joins_s is not None

    @property
    def joins_s(self) -> float:
        """When the worker that leaves joins again; inf if it does not."""
        return math.inf if self._joins_s is None else self._joins_s

    def join(self) -> None:
        self._joins_s = None

    def seconds(self, begin_s: float, load: float = 1.0) -> float:
        """How long the next iteration takes if it begins at this time, not before the one before has ended.

        load: its samples / the job's batch size.
        A change while it lasts holds for the rest of it: what is left to do then takes `factor` times as long.
        """
        self._begin(begin_s)
        left_s = 0.0 if self._times is None else next(self._times)  # to do, in seconds of a device that is not slow
        left_s *= self._fixed_share + (1.0 - self._fixed_share) * load  # in floats too, this is 1 with a load of 1
        since_s, factor = begin_s, self._factor
        for change_s, _, changed in self._by_time:  # they stay: if it is cancelled it may end before them
            if change_s >= since_s + left_s * factor:
                break
            left_s = max(0.0, left_s - (change_s - since_s) / factor)
            since_s, factor = change_s, changed
        return (since_s - begin_s) + left_s * factor

    def state(self) -> tuple[Any, ...]:
        """How far it is."""
        return self._iteration, self._factor, self._by_time, self._by_iteration, self._joins_s

    def restore(self, state: tuple[Any, ...]) -> None:
        """Go on from there, in a device that is new."""
        self._iteration, self._factor, self._by_time, self._by_iteration, self._joins_s = state
        if self._times is not None:
            self._times = islice(self._times, self._iteration - 1, None)

    def _begin(self, begin_s: float) -> None:
        """Carry out what has changed by now: an iteration's own changes are the latest, they happen as it begins."""
        while self._by_time and self._by_time[0][0] <= begin_s:
            self._factor = self._by_time.popleft()[-1]
        while self._by_iteration and self._by_iteration[0][0] <= self._iteration:
            self._factor = self._by_iteration.popleft()[-1]
        self._iteration += 1


def _factor(event: Change) -> float:
    return 1.0 if event.factor is None else event.factor


def device(job: Job, worker: int) -> Device:
    """The device of this worker."""
    cluster, compute = job.cluster, job.cluster.compute
    changes = [change for change in cluster.events if change.worker == worker]
    if compute is None:
        return Device(None, changes)
    times = iteration_seconds(compute, job.seed, worker, cluster.workers)
    return Device(times, changes, compute.fixed_share)


def encode_s(job: Job, n_bytes: int) -> float:
    """What a device takes, in virtual time, to compress so many."""
    speed = None if isinstance(job.compression, DenseOptions) else job.compression.gbytes_per_s
    return n_bytes / (1e9 * speed) if speed else 0.0


def takes_no_time(compute: Compute, worker: int, n_workers: int) -> bool:
    """Whether every iteration of this worker takes 0 seconds."""
    if isinstance(compute, RecordedCompute):
        return not any(_table(compute.table, os.stat(compute.table).st_mtime_ns, n_workers)[worker])
    return (compute.seconds if isinstance(compute.seconds, float) else compute.seconds[worker]) == 0.0


@lru_cache(maxsize=1)
def _table(path: str, mtime_ns: int, n_workers: int) -> list[list[float]]:
    """A table of times, read once for all workers; again when the file has changed since."""
    return read_times(path, n_workers)


def iteration_seconds(compute: Compute, seed: int, worker: int, n_workers: int) -> Iterator[float]:
    """Seconds of worker `worker`'s iterations 1, 2, ... at the job's batch size, without end.

    `constant` gives `seconds`; `lognormal` has the median `seconds`, its logarithm the standard deviation `jitter`;
    `exponential` has the mean `seconds`; `table` gives the worker's rows in order and then starts over.
    """
    if isinstance(compute, RecordedCompute):
        times = _table(compute.table, os.stat(compute.table).st_mtime_ns, n_workers)[worker]
        while True:
            yield from times
    seconds = compute.seconds if isinstance(compute.seconds, float) else compute.seconds[worker]
    generator = np.random.default_rng([seed, 2, worker])
    while True:  # a block of numbers takes little longer than one, and is the same numbers
        if isinstance(compute, LogNormal):
            yield from (seconds * generator.lognormal(0.0, compute.jitter, BLOCK)).tolist()
        elif isinstance(compute, Exponential):
            yield from generator.exponential(seconds, BLOCK).tolist()
        else:
            yield seconds
