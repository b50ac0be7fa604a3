"""How long it takes until a worker's contribution is with the server, and until granted weights are with the worker.

A worker's iteration moves as it does between real ranks, in four steps:

    put     the gradient goes to every server, and each of them acknowledges that it is there
    report  a message to server 0
    grant   a message from every server; those of the others follow server 0's order to them
    read    a request to every server, and the weights come back

Either a network says how long they take (`Networked`), or somebody who knows (`Timed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from hpcsync.config.cluster import Network as NetworkTable
from hpcsync.core.roles import Roles
from hpcsync.simulator.event_loop import Loop
from hpcsync.simulator.network import SharedLinks

Then = Callable[[int, float], None]  # called with the worker, and when the step before had been done


class Transfers(Protocol):
    """The steps between computations; each calls `then` when it is over. Iterations count from 1."""

    def push(self, worker: int, iteration: int, sizes_bytes: Sequence[int], then: Then) -> None:
        """Put so many bytes to each server, and report; the time that `then` is given is that of the put's end."""

    def pull(self, worker: int, iteration: int, then: Then) -> None:
        """Grant and read; the time that `then` is given is that of the grant's arrival."""

    def stop(self, worker: int, iteration: int, then: Then) -> None:
        """A grant that lets nothing be read."""

    def push_info(self, worker: int, iteration: int, then: Then) -> None:
        """A report without a contribution."""

    def cancel(self, worker: int, iteration: int, then: Then) -> None:
        """A message from server 0; the time that `then` is given is that of its sending."""


class Steps(NamedTuple):
    """Seconds of the four steps of one iteration."""

    put_s: float
    report_s: float
    grant_s: float
    read_s: float


AT_ONCE = Steps(0.0, 0.0, 0.0, 0.0)


class Timed:
    """Steps of known duration. steps: of a worker's iteration."""

    def __init__(self, loop: Loop, steps: Callable[[int, int], Steps]) -> None:
        self._loop = loop
        self._steps = steps

    def push(self, worker: int, iteration: int, sizes_bytes: Sequence[int], then: Then) -> None:
        steps = self._steps(worker, iteration)
        put_s = self._loop.now_s + steps.put_s
        self._loop.at(put_s + steps.report_s, then, worker, put_s)

    def pull(self, worker: int, iteration: int, then: Then) -> None:
        steps = self._steps(worker, iteration)
        granted_s = self._loop.now_s + steps.grant_s
        self._loop.at(granted_s + steps.read_s, then, worker, granted_s)

    def stop(self, worker: int, iteration: int, then: Then) -> None:
        self._loop.after(self._steps(worker, iteration).grant_s, then, worker, self._loop.now_s)

    def push_info(self, worker: int, iteration: int, then: Then) -> None:
        self._loop.after(self._steps(worker, iteration).report_s, then, worker, self._loop.now_s)

    def cancel(self, worker: int, iteration: int, then: Then) -> None:
        """It takes as long as that iteration's report; its grant, if it is the first, is of when all began."""
        self._loop.after(self._steps(worker, iteration).report_s, then, worker, self._loop.now_s)


class Networked:
    """Transfers over links that all ranks share: one up and one down for each.

    shard_bytes: of the weights on each server. A put takes two latencies and what its bytes take
    in their share of the links; so does a read. A message takes one latency.
    """

    def __init__(self, loop: Loop, table: NetworkTable, roles: Roles, shard_bytes: Sequence[int]) -> None:
        rates = table.rates(roles.n_servers, roles.n_workers)
        self._loop = loop
        self._roles = roles
        self._latency_s = 1e-6 * table.latency_us
        self._grant_s = (1 if roles.n_servers == 1 else 2) * self._latency_s  # others hear of it from server 0
        self._network = SharedLinks(loop, rates, rates, self._latency_s)
        self._shard_bytes = shard_bytes
        self._missing = [0] * roles.n_workers  # worker -> shards under way
        self._granted_s = [0.0] * roles.n_workers

    def push(self, worker: int, iteration: int, sizes_bytes: Sequence[int], then: Then) -> None:
        rank = self._roles.rank_of(worker)
        self._missing[worker] = self._roles.n_servers
        for server, n_bytes in enumerate(sizes_bytes):
            self._network.send(rank, server, n_bytes, self._put, worker, then)

    def pull(self, worker: int, iteration: int, then: Then) -> None:
        """A worker reads when all servers' grants are there."""
        granted_s = self._loop.now_s + self._grant_s
        self._granted_s[worker] = granted_s
        self._missing[worker] = self._roles.n_servers
        self._loop.at(granted_s + self._latency_s, self._requested, worker, then)

    def stop(self, worker: int, iteration: int, then: Then) -> None:
        self._loop.after(self._grant_s, then, worker, self._loop.now_s)

    def push_info(self, worker: int, iteration: int, then: Then) -> None:
        self._loop.after(self._latency_s, then, worker, self._loop.now_s)

    def cancel(self, worker: int, iteration: int, then: Then) -> None:
        self._loop.after(self._latency_s, then, worker, self._loop.now_s)

    def _put(self, worker: int, then: Then) -> None:
        self._missing[worker] -= 1
        if self._missing[worker] == 0:
            acknowledged_s = self._loop.now_s + self._latency_s
            self._loop.at(acknowledged_s + self._latency_s, then, worker, acknowledged_s)

    def _requested(self, worker: int, then: Then) -> None:
        rank = self._roles.rank_of(worker)
        for server, n_bytes in enumerate(self._shard_bytes):
            self._network.send(server, rank, n_bytes, self._read, worker, then)

    def _read(self, worker: int, then: Then) -> None:
        self._missing[worker] -= 1
        if self._missing[worker] == 0:
            then(worker, self._granted_s[worker])
