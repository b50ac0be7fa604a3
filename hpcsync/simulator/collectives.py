"""Collectives as the messages that they are made of, on links that they share with whatever else is under way.

A schedule says for each message which others must have arrived before it begins. Beside it stands what it costs between
hosts with equal links that nobody else uses: size_bytes, latency_s and bandwidth (bytes per second), in seconds.
Reducing itself takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcsync.simulator.network import SharedLinks

Then = Callable[..., object]


class Message(NamedTuple):
    """after: indices, all smaller than its own, of the messages that it waits for."""

    source: int
    target: int
    size_bytes: int
    after: Sequence[int]


def ring_allreduce(network: SharedLinks, hosts: Sequence[int], size_bytes: int, then: Then, *args: Any) -> None:
    """Call then(*args) when all these hosts have the sum of what each of them has."""
    _Exchange(network, ring(hosts, size_bytes), then, args)


def tree_broadcast(network: SharedLinks, hosts: Sequence[int], size_bytes: int, then: Then, *args: Any) -> None:
    """Call then(*args) when all these hosts have what the first of them has."""
    _Exchange(network, one_at_a_time(_outwards(hosts), size_bytes), then, args)


def tree_reduce(network: SharedLinks, hosts: Sequence[int], size_bytes: int, then: Then, *args: Any) -> None:
    """Call then(*args) when the first of these hosts has the sum of what each of them has."""
    _Exchange(network, one_at_a_time(_inwards(hosts), size_bytes), then, args)


def tree_allreduce(network: SharedLinks, hosts: Sequence[int], size_bytes: int, then: Then, *args: Any) -> None:
    """Call then(*args) when all these hosts have the sum of what each of them has: a reduction, then a broadcast."""
    _Exchange(network, one_at_a_time(_inwards(hosts) + _outwards(hosts), size_bytes), then, args)


def ring_allreduce_s(n_hosts: int, size_bytes: int, latency_s: float, bandwidth: float) -> float:
    """Between hosts that divide the size evenly."""
    return 2 * (n_hosts - 1) * (latency_s + size_bytes / n_hosts / bandwidth)


def ring_alone_s(capacity: Sequence[float], size_bytes: int, latency_s: float) -> float:
    """Between any hosts whose links nobody else uses, seconds. capacity: of each host's link up, and down, in bytes
    per second."""
    p = len(capacity)
    return _passed_on_s(capacity, np.diff(np.arange(p + 1) * size_bytes // p), 2 * (p - 1), latency_s)


def ring_allgather_alone_s(capacity: Sequence[float], sizes_bytes: Sequence[int], latency_s: float) -> float:
    """So, until every host has what each of them has, which is passed on whole. sizes_bytes: of that of each host."""
    return _passed_on_s(capacity, np.array(sizes_bytes), len(capacity) - 1, latency_s)


def _passed_on_s(capacity: Sequence[float], blocks: np.ndarray, n_steps: int, latency_s: float) -> float:
    """In a ring in which every host begins with the block of its number, bytes, and passes on what it was given."""
    p = len(capacity)
    to_next = np.minimum(capacity, np.roll(capacity, -1))
    hosts, arrived = np.arange(p), np.zeros(p)  # when each host's message of the step before has arrived
    for step in range(n_steps):
        arrived = np.maximum(arrived, np.roll(arrived, 1)) + latency_s + blocks[(hosts - step) % p] / to_next
    return float(arrived.max())


def tree_broadcast_s(n_hosts: int, size_bytes: int, latency_s: float, bandwidth: float) -> float:
    """A reduction takes as long."""
    return (n_hosts - 1).bit_length() * (latency_s + size_bytes / bandwidth)


def tree_allreduce_s(n_hosts: int, size_bytes: int, latency_s: float, bandwidth: float) -> float:
    return 2 * tree_broadcast_s(n_hosts, size_bytes, latency_s, bandwidth)


def ring(hosts: Sequence[int], size_bytes: int) -> list[Message]:
    """Every host passes blocks to the next: p - 1 steps to reduce them, p - 1 to gather what has been reduced.

    The sizes of the p blocks differ by a byte at most. A host's next step begins when the block that it passes on has
    arrived, and its last one is out of the way.
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


def one_at_a_time(pairs: Sequence[tuple[int, int]], size_bytes: int) -> list[Message]:
    """From source to target, each as soon as neither is busy with one that comes before it."""
    latest: dict[int, int] = {}  # of each host
    messages = []
    for number, (source, target) in enumerate(pairs):
        after = {latest[host] for host in (source, target) if host in latest}
        messages.append(Message(source, target, size_bytes, sorted(after)))
        latest[source] = latest[target] = number
    return messages


def _outwards(hosts: Sequence[int]) -> list[tuple[int, int]]:
    """The binomial tree from the first host: in every round, all who have it pass it on to one who has not."""
    masks = [1 << bit for bit in reversed(range((len(hosts) - 1).bit_length()))]
    return [(hosts[i], hosts[i + mask]) for mask in masks for i in range(0, len(hosts) - mask, 2 * mask)]


def _inwards(hosts: Sequence[int]) -> list[tuple[int, int]]:
    """The same tree, backwards in time."""
    return [(target, source) for source, target in reversed(_outwards(hosts))]


class _Exchange:
    """Messages under way. Calls then(*args) when the last has arrived, through the loop even if there are none."""

    def __init__(self, network: SharedLinks, messages: Sequence[Message], then: Then, args: tuple[Any, ...]) -> None:
        self._network = network
        self._messages = messages
        self._then = then
        self._args = args
        self._missing = [len(message.after) for message in messages]
        self._waiting: list[list[int]] = [[] for _ in messages]  # who waits for each message
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
