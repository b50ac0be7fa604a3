"""Links between workers whose transfers take recorded times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Job
from hpcsync.core.device_speed import Device
from hpcsync.core.peer_machine import create_method
from hpcsync.paradigms.peer_method import PeerMethod
from hpcsync.simulator import replayed_layers
from hpcsync.simulator.cluster import changes_of, refuse_standstill
from hpcsync.simulator.event_loop import Loop
from hpcsync.simulator.peer_transfers import Links, Then, Workers, replica_bytes
from hpcsync.simulator.replayed_times import LOCKSTEP, RecordedTimes, read_columns
from hpcsync.trace.schema import Rows
from hpcsync.workloads.registry import Workload

Owner = Callable[[int, int], int]  # takes source and target


class _Links(Links):
    """Links on which an all-reduce, and a transfer between two workers, take given times.

    Parameters
    ----------
    loop
        Event loop.
    size_bytes
        Size of a replica.
    all_reduces_s
        Times of successive all-reduces in seconds.
    transfers_s
        Times of successive transfers of each worker in seconds.
    owner
        Returns the worker whose transfer it is.
    """

    def __init__(
        self,
        loop: Loop,
        size_bytes: int,
        all_reduces_s: Iterator[float],
        transfers_s: Sequence[Iterator[float]],
        owner: Owner,
    ) -> None:
        super().__init__(loop, None, len(transfers_s), size_bytes)
        self._all_reduces_s, self._transfers_s, self._owner = all_reduces_s, transfers_s, owner

    def all_reduce(self, then: Then, *args: Any) -> None:
        self._loop.after(next(self._all_reduces_s), then, *args)

    def send(self, source: int, target: int, then: Then, *args: Any) -> None:
        self._loop.after(next(self._transfers_s[self._owner(source, target)]), then, *args)


class _Swaps(Links):
    """Links on which the transfers of synchronous gossip take recorded times.

    A worker's recorded time ends when it has sent and received everything, so a transfer takes at most the shorter time
    of both its workers. This is the longest that agrees with all recorded times.

    Parameters
    ----------
    loop, size_bytes
        See `_Links`.
    times_s
        Seconds of all workers in each exchange, shape (n_exchanges, n_workers). They repeat after the last one.
    """

    def __init__(self, loop: Loop, size_bytes: int, times_s: Rows) -> None:
        super().__init__(loop, None, times_s.shape[1], size_bytes)
        self._times_s = cycle(times_s.tolist())
        self._began_s = -math.inf

    def send(self, source: int, target: int, then: Then, *args: Any) -> None:
        if self._began_s != self._loop.now_s:  # all transfers of an exchange begin at the same time
            self._began_s, self._own_s = self._loop.now_s, next(self._times_s)
        self._loop.after(min(self._own_s[source], self._own_s[target]), then, *args)


def build(job: Job, workload: Workload) -> Workers:
    """Build the workers of a job without servers, whose times are those of the run ``cluster.times_from``.

    Raises
    ------
    JobError
        If the trace cannot be read, or does not fit the job.
    """
    loop, method, size_bytes = Loop(), create_method(job), replica_bytes(workload)
    links: Links
    if job.paradigm.separates_layers:
        each, changes = replayed_layers.read(job, workload)
        links = replayed_layers.RecordedLinks(loop, job, each, size_bytes)
    elif method.transport in LOCKSTEP:
        each, changes, _ = read_columns(job, 2 * size_bytes)
        links = timed(loop, method, [columns.comm_s for columns in each], size_bytes)
    else:
        raise JobError(
            f"cluster.times_from = {shown(job.cluster.times_from)}: must be left out with paradigm.name = "
            f'"{job.paradigm.name}": recorded times serve jobs with servers, all-reduce, local SGD and Stanza'
        )
    times = [RecordedTimes(columns) for columns in each]
    refuse_standstill(job, "cluster.times_from", [own.total_s == 0.0 for own in times])
    devices = [Device(own.seconds(), changes_of(job, worker, changes)) for worker, own in enumerate(times)]
    return Workers(loop, devices, links)


def timed(loop: Loop, method: PeerMethod, comm_s: Sequence[Rows], size_bytes: int = 0) -> Links:
    """Return links with the times of a run.

    Parameters
    ----------
    loop
        Event loop.
    method
        Exchange of the run; its transport is one of `KINDS`, or "swap".
    comm_s
        Transfer times of each worker's iterations, 0 without a transfer; those of a worker that has left are fewer.
        They repeat after the last one.
    size_bytes
        Size of a replica, for the records.
    """
    n = max(map(len, comm_s))
    of_all = np.array([np.pad(own, (0, n - len(own)), constant_values=np.nan) for own in comm_s]).T
    of_all = np.where(np.isnan(of_all), np.nanmax(of_all, axis=1, keepdims=True), of_all)
    if method.transport == "swap":
        exchanges_s = of_all[of_all.any(axis=1)]
        return _Swaps(loop, size_bytes, exchanges_s if len(exchanges_s) else np.zeros((1, len(comm_s))))
    owner, n_transfers = KINDS[method.transport]
    each = [cycle((own[own > 0] / n_transfers).tolist() or [0.0]) for own in comm_s]
    together = of_all.min(axis=1)  # waiting is in none of them
    all_reduces_s = cycle(together[together > 0].tolist() or [0.0])
    return _Links(loop, size_bytes, all_reduces_s, each, lambda source, target: owner(method, source, target))


def _source(_: PeerMethod, source: int, target: int) -> int:
    return source


def _reader(_: PeerMethod, source: int, target: int) -> int:
    return target


def _initiator(method: PeerMethod, source: int, target: int) -> int:
    """Return the worker of a pair that does not share its weights: it reads the other's and writes the mean."""
    return target if method.shares(source) else source


# By transport whose times a trace has: the worker in whose row they are, and of how many transfers.
KINDS: dict[str, tuple[Callable[[PeerMethod, int, int], int], int]] = {
    "all-reduce": (_source, 1),
    "average": (_source, 1),
    "published": (_reader, 1),
    "inbox": (_source, 1),
    "pairs": (_initiator, 2),
}
