"""Transfer times between workers and servers.

An iteration's transfers have the same four steps as between real ranks:

- put: the gradient goes to every server, and each of them acknowledges it;
- push info: a message to server 0;
- grant: a message from every server; the others' follow server 0's command to them;
- read: a request to every server, and the weights in return.

Their durations follow from a network (`Networked`) or are known in advance (`Timed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from hpcsync.config.cluster import Network as NetworkTable
from hpcsync.core.roles import Roles
from hpcsync.simulator.event_loop import Loop
from hpcsync.simulator.network import SharedLinks

Then = Callable[[int, float], None]  # called with the worker and the end of the previous step


class Transfers(Protocol):
    """Transfers between computations; each calls ``then(worker, time_s)`` when it is over. Iterations count from 1."""

    def push(self, worker: int, iteration: int, sizes_bytes: Sequence[int], then: Then) -> None:
        """Put `sizes_bytes` bytes to the servers and send the push info; `time_s` is the end of the put."""

    def pull(self, worker: int, iteration: int, then: Then) -> None:
        """Grant and read; `time_s` is the arrival of the grant."""

    def stop(self, worker: int, iteration: int, then: Then) -> None:
        """Send a grant that ends the worker's training; nothing is read."""

    def message(self, worker: int, iteration: int, then: Then) -> None:
        """Send a message to server 0, such as a push info without a contribution, or from it; `time_s` is now."""


class Steps(NamedTuple):
    """Durations of the four steps of one iteration, in seconds."""

    put_s: float
    report_s: float
    grant_s: float
    read_s: float


AT_ONCE = Steps(0.0, 0.0, 0.0, 0.0)


class Timed:
    """Transfers of known duration.

    Parameters
    ----------
    loop
        Event loop.
    steps
        Returns the durations for a worker and an iteration.
    """

    def __init__(self, loop: Loop, steps: Callable[[int, int], Steps]) -> None:
        self._loop = loop
        self._steps = steps

    def push(self, worker: int, iteration: int, sizes_bytes: Sequence[int], then: Then) -> None:
        """Put for `put_s` seconds, then send the push info."""
        steps = self._steps(worker, iteration)
        put_s = self._loop.now_s + steps.put_s
        self._loop.at(put_s + steps.report_s, then, worker, put_s)

    def pull(self, worker: int, iteration: int, then: Then) -> None:
        """Grant for `grant_s` seconds, then read."""
        steps = self._steps(worker, iteration)
        granted_s = self._loop.now_s + steps.grant_s
        self._loop.at(granted_s + steps.read_s, then, worker, granted_s)

    def stop(self, worker: int, iteration: int, then: Then) -> None:
        """Send a final grant."""
        self._loop.after(self._steps(worker, iteration).grant_s, then, worker, self._loop.now_s)

    def message(self, worker: int, iteration: int, then: Then) -> None:
        """Send a message, which takes as long as the iteration's push info.

        That of the grant does not suit a cancel message: the first grant dates from the start of the run.
        """
        self._loop.after(self._steps(worker, iteration).report_s, then, worker, self._loop.now_s)


class Networked:
    """Transfers over one up link and one down link per rank, shared by all transfers.

    A put takes two latencies and the time of its bytes at their share of the links; so does a read. A message takes one
    latency. Where servers and workers share nodes, they share the links of these, and bytes between ranks of a node
    take no time.

    Parameters
    ----------
    loop
        Event loop.
    table
        Network of the job.
    roles
        Ranks of servers and workers.
    shard_bytes
        Size of the weights on each server in bytes, shape (n_servers,).
    colocated
        Whether server i is on the node of worker i.
    """

    def __init__(
        self, loop: Loop, table: NetworkTable, roles: Roles, shard_bytes: Sequence[int], *, colocated: bool = False
    ) -> None:
        self._first = 0 if colocated else roles.n_servers  # node of worker 0; node of server i is i
        rates = table.rates(self._first, roles.n_workers)
        self._loop = loop
        self._roles = roles
        self._latency_s = 1e-6 * table.latency_us
        # Server 0 notifies the other servers, which takes one message more.
        self._grant_s = (1 if roles.n_servers == 1 else 2) * self._latency_s
        self._network = SharedLinks(loop, rates, rates, self._latency_s)
        self._shard_bytes = shard_bytes
        self._missing = [0] * roles.n_workers  # worker -> shards in transit
        self._granted_s = [0.0] * roles.n_workers

    def push(self, worker: int, iteration: int, sizes_bytes: Sequence[int], then: Then) -> None:
        """Put a contribution to all servers, then send the push info."""
        self._missing[worker] = self._roles.n_servers
        for server, n_bytes in enumerate(sizes_bytes):
            self._send(self._first + worker, server, n_bytes, self._put, worker, then)

    def pull(self, worker: int, iteration: int, then: Then) -> None:
        """Read once the grants of all servers have arrived."""
        granted_s = self._loop.now_s + self._grant_s
        self._granted_s[worker] = granted_s
        self._missing[worker] = self._roles.n_servers
        self._loop.at(granted_s + self._latency_s, self._requested, worker, then)

    def stop(self, worker: int, iteration: int, then: Then) -> None:
        """Send a final grant."""
        self._loop.after(self._grant_s, then, worker, self._loop.now_s)

    def message(self, worker: int, iteration: int, then: Then) -> None:
        """Send a message, which takes one latency."""
        self._loop.after(self._latency_s, then, worker, self._loop.now_s)

    def _put(self, worker: int, then: Then) -> None:
        self._missing[worker] -= 1
        if self._missing[worker] == 0:
            acknowledged_s = self._loop.now_s + self._latency_s
            self._loop.at(acknowledged_s + self._latency_s, then, worker, acknowledged_s)

    def _requested(self, worker: int, then: Then) -> None:
        for server, n_bytes in enumerate(self._shard_bytes):
            self._send(server, self._first + worker, n_bytes, self._read, worker, then)

    def _send(self, source: int, target: int, n_bytes: int, then: Callable[..., object], *args: Any) -> None:
        """Send bytes from node to node."""
        if source == target:
            self._loop.after(self._latency_s, then, *args)
        else:
            self._network.send(source, target, n_bytes, then, *args)

    def _read(self, worker: int, then: Then) -> None:
        self._missing[worker] -= 1
        if self._missing[worker] == 0:
            then(worker, self._granted_s[worker])
