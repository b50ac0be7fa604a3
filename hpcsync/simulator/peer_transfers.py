"""Links between the workers of a job without servers: messages, replicas and all-reduces."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hpcsync.config.cluster import Network as NetworkTable
from hpcsync.config.job import Job
from hpcsync.core.device_speed import Device, device, takes_no_time
from hpcsync.core.peer_coordinator import ring_bytes
from hpcsync.core.peer_machine import create_method
from hpcsync.simulator.cluster import compute_of, refuse_standstill
from hpcsync.simulator.collectives import ring_allgather_alone_s, ring_allreduce, ring_alone_s
from hpcsync.simulator.event_loop import Loop
from hpcsync.simulator.network import SharedLinks
from hpcsync.training.flat_model import trainable
from hpcsync.workloads.registry import Workload

Then = Callable[..., object]


class Links:
    """Transfers between workers; each calls ``then(*args)`` when it is over, at once if there is no network.

    Parameters
    ----------
    loop
        Event loop.
    table
        Network of the job, or None.
    n_workers
        Number of workers.
    size_bytes
        Size of a replica, and of a gradient, in bytes.
    """

    def __init__(self, loop: Loop, table: NetworkTable | None, n_workers: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._loop = loop
        self._n_workers = n_workers
        self._network: SharedLinks | None = None
        self._rates: Sequence[float] = ()
        self._latency_s = 0.0
        if table is not None:
            rates = self._rates = table.rates(0, n_workers)
            self._latency_s = 1e-6 * table.latency_us
            self._network = SharedLinks(loop, rates, rates, self._latency_s)
        # Nothing else is in transit during an all-reduce of all workers, so equal ones take equally long.
        self._ring_s = cache(lambda n: ring_alone_s(self._rates, n, self._latency_s) if self._rates else 0.0)

    def message(self, then: Then, *args: Any) -> None:
        """Send a request or an acknowledgement."""
        self._loop.after(self._latency_s, then, *args)

    def send(self, source: int, target: int, then: Then, *args: Any) -> None:
        """Send a replica from one worker to another."""
        if self._network is None:
            self._loop.after(0.0, then, *args)
        else:
            self._network.send(source, target, self.size_bytes, then, *args)

    def in_order(self, source: int, target: int) -> InOrder:
        """Return a channel from one worker to another."""
        return InOrder(self._loop, self._network, self._latency_s, source, target)

    def all_reduce_among(self, workers: Sequence[int], size_bytes: int, then: Then, *args: Any) -> None:
        """Sum `size_bytes` among these workers in a ring, on links shared with other transfers."""
        if self._network is None:
            self._loop.after(0.0, then, *args)
        else:
            ring_allreduce(self._network, workers, size_bytes, then, *args)

    def all_reduce(self, then: Then, *args: Any) -> None:
        """Sum one vector among all workers in a ring; workers that have left forward the others' data."""
        self._loop.after(self._ring_s(self.size_bytes), then, *args)

    def overlapped_all_reduces_s(self, buckets: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
        """Return when each of several all-reduces begins and ends; each follows the one before.

        Parameters
        ----------
        buckets
            Of each all-reduce, its bytes and the time before which it cannot begin.
        """
        times: list[tuple[float, float]] = []
        end_s = -math.inf
        for size_bytes, ready_s in buckets:
            begin_s = max(end_s, ready_s)
            end_s = begin_s + self._ring_s(size_bytes)
            times.append((begin_s, end_s))
        return times

    def all_reduce_twice(self, size_bytes: int, then: Then, *args: Any) -> None:
        """Form two sums one after the other, of `size_bytes` in total."""
        half = size_bytes // 2
        self._loop.after(self._ring_s(half) + self._ring_s(size_bytes - half), then, *args)

    def all_gather(self, sizes_bytes: Sequence[int], then: Then, *args: Any) -> None:
        """Gather every worker's block at all workers in a ring.

        Parameters
        ----------
        sizes_bytes
            Size of each worker's block in bytes, shape (n_workers,).
        then, *args
            Callback and its arguments.
        """
        gather_s = ring_allgather_alone_s(self._rates, sizes_bytes, self._latency_s) if self._rates else 0.0
        self._loop.after(gather_s, then, *args)

    @property
    def all_reduce_bytes(self) -> int:
        """Bytes that each worker sends in an all-reduce."""
        return ring_bytes(self.size_bytes, self._n_workers)


class InOrder:
    """Channel from one worker to another that delivers messages in order.

    Every message waits for its own latency, but its bytes only start to flow after those of earlier messages.
    """

    def __init__(self, loop: Loop, network: SharedLinks | None, latency_s: float, source: int, target: int) -> None:
        self._loop, self._network, self._latency_s = loop, network, latency_s
        self._ends = source, target
        self._waiting: deque[tuple[int, Then, tuple[Any, ...]]] = deque()  # the first one is flowing

    def send(self, size_bytes: int, then: Then, *args: Any) -> None:
        """Send `size_bytes` and call ``then(*args)`` on arrival."""
        self._loop.after(self._latency_s, self._follow, size_bytes, then, args)

    def _follow(self, size_bytes: int, then: Then, args: tuple[Any, ...]) -> None:
        if self._network is None:
            then(*args)
            return
        self._waiting.append((size_bytes, then, args))
        if len(self._waiting) == 1:
            self._flow()

    def _flow(self) -> None:
        assert self._network is not None
        self._network.send(*self._ends, self._waiting[0][0], self._arrived, latency_s=0.0)

    def _arrived(self) -> None:
        _, then, args = self._waiting.popleft()
        if self._waiting:
            self._flow()
        then(*args)


@dataclass(frozen=True)
class Workers:
    """Event loop, devices (one per worker) and links of a simulated run without servers."""

    loop: Loop
    devices: Sequence[Device]
    links: Links


def build(job: Job, workload: Workload) -> Workers:
    """Build the workers of a job without servers at virtual time 0.

    Parameters
    ----------
    job
        Job without servers; computation times come from ``cluster.compute``.
    workload
        Workload of the job; only the size of its model is used.

    Raises
    ------
    JobError
        If the job does not define how long iterations take, or if virtual time could never advance.
    """
    loop, cluster, compute = Loop(), job.cluster, compute_of(job)
    alone, method = cluster.network is None or cluster.workers == 1, create_method(job)
    alone = alone or job.batches.policy != "equal"  # whose sizes follow from computations, not from transfers
    idle = [
        (takes_no_time(compute, worker, cluster.workers) or not job.paradigm.work_share(worker, cluster.workers))
        and (alone or method.shares(worker))  # it transfers nothing itself
        for worker in range(cluster.workers)
    ]
    refuse_standstill(job, "cluster.compute", idle)
    devices = [device(job, worker) for worker in range(cluster.workers)]
    return Workers(loop, devices, Links(loop, cluster.network, cluster.workers, replica_bytes(workload)))


def replica_bytes(workload: Workload) -> int:
    """Return the size of the trained parameters in bytes."""
    parameters = trainable(workload.model)
    return sum(p.numel() for p in parameters) * parameters[0].element_size()
