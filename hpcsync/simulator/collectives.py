"""Ring all-reduce as messages over shared links, and the duration of rings on links that nothing else uses.

A schedule lists for each message which earlier ones must have arrived before it starts. The reduction itself takes no
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcsync.simulator.network import SharedLinks
from hpcsync.trace.schema import Rows

Then = Callable[..., object]


class Message(NamedTuple):
    """Message of a schedule.

    Parameters
    ----------
    source, target
        Hosts.
    size_bytes
        Size in bytes.
    after
        Indices of the messages that must have arrived before this one starts; all smaller than its own index.
    """

    source: int
    target: int
    size_bytes: int
    after: Sequence[int]


def ring_allreduce(network: SharedLinks, hosts: Sequence[int], size_bytes: int, then: Then, *args: Any) -> None:
    """Call ``then(*args)`` when all hosts have the sum, by a ring all-reduce."""
    _Schedule(network, ring(hosts, size_bytes), then, args)


def ring_alone_s(capacity: Sequence[float], size_bytes: int, latency_s: float) -> float:
    """Return the duration of a ring all-reduce on links that nothing else uses, in seconds.

    Parameters
    ----------
    capacity
        Capacity of each host's up link and down link in bytes per second, shape (n_hosts,).
    size_bytes
        Size of the vector in bytes.
    latency_s
        Latency of a message in seconds.
    """
    p = len(capacity)
    return _ring_s(capacity, np.diff(np.arange(p + 1) * size_bytes // p), 2 * (p - 1), latency_s)


def ring_allgather_alone_s(capacity: Sequence[float], sizes_bytes: Sequence[int], latency_s: float) -> float:
    """Return the duration of a ring all-gather on links that nothing else uses, in seconds.

    Blocks are forwarded whole.

    Parameters
    ----------
    capacity
        Capacity of each host's up link and down link in bytes per second, shape (n_hosts,).
    sizes_bytes
        Size of each host's block in bytes, shape (n_hosts,).
    latency_s
        Latency of a message in seconds.
    """
    return _ring_s(capacity, np.array(sizes_bytes), len(capacity) - 1, latency_s)


def _ring_s(capacity: Sequence[float], blocks: Rows, n_steps: int, latency_s: float) -> float:
    """Return the duration of `n_steps` ring steps; host i starts with block i (bytes) and forwards what it receives."""
    p = len(capacity)
    to_next = np.minimum(capacity, np.roll(capacity, -1))
    hosts, arrived = np.arange(p), np.zeros(p)  # arrival time of each host's message of the previous step
    for step in range(n_steps):
        arrived = np.maximum(arrived, np.roll(arrived, 1)) + latency_s + blocks[(hosts - step) % p] / to_next
    return float(arrived.max())


def ring(hosts: Sequence[int], size_bytes: int) -> list[Message]:
    """Return the schedule of a ring all-reduce: p - 1 steps of reduce-scatter and p - 1 of all-gather.

    The sizes of the p blocks differ by at most one byte. A host's next step starts when the block that it forwards has
    arrived and its previous message has been delivered.
    """
    p = len(hosts)
    blocks = [size_bytes * (block + 1) // p - size_bytes * block // p for block in range(p)]
    messages = []
    for step in range(2 * (p - 1)):
        before = (step - 1) * p
        for i in range(p):
            after = (before + i, before + (i - 1) % p) if step else ()
            messages.append(Message(hosts[i], hosts[(i + 1) % p], blocks[(i - step) % p], after))
    return messages


class _Schedule:
    """Messages in flight.

    Calls ``then(*args)`` when the last message has arrived; through the event loop even if there are none.
    """

    def __init__(self, network: SharedLinks, messages: Sequence[Message], then: Then, args: tuple[Any, ...]) -> None:
        self._network = network
        self._messages = messages
        self._then = then
        self._args = args
        self._missing = [len(message.after) for message in messages]
        self._waiting: list[list[int]] = [[] for _ in messages]  # message -> the messages that wait for it
        self._under_way = len(messages)
        for number, message in enumerate(messages):
            for earlier in message.after:
                self._waiting[earlier].append(number)
        for number, missing in enumerate(self._missing):
            if missing == 0:
                self._send(number)
        if not messages:
            network.loop.after(0.0, then, *args)

    def _send(self, number: int) -> None:
        source, target, size_bytes, _ = self._messages[number]
        self._network.send(source, target, size_bytes, self._arrived, number)

    def _arrived(self, number: int) -> None:
        self._under_way -= 1
        if self._under_way == 0:
            self._then(*self._args)
        for later in self._waiting[number]:
            self._missing[later] -= 1
            if self._missing[later] == 0:
                self._send(later)
