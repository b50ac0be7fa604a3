"""Transfer times between hosts around an ideal switch, with max-min fair sharing of links.

Every host has one up link and one down link. A transfer uses the up link of its source and the down link of its target,
and nothing else. Rates are max-min fair: no transfer can get a higher rate except at the expense of one whose rate is
not higher. Rates change only when a transfer begins or ends, and all changes at one instant are applied together.

Most transfers share neither link. The end of such a flow is known when it begins, and it costs one event. Only when
another flow uses one of its links does it join the set of flows whose rates are computed together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcsync.simulator.event_loop import Loop

SETTLE = 1  # event priority: after everything else at the same time
LEFT, SINCE, RATE, END = range(4)  # rows of SharedLinks._state


class _Flow:
    """Transfer whose bytes are flowing.

    While the flow shares no link, `state` holds what `SharedLinks._state` holds for the other flows.
    """

    __slots__ = ("args", "links", "number", "state", "then")

    def __init__(self, number: int, links: tuple[int, int], then: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.number = number
        self.links = links
        self.then = then
        self.args = args
        self.state = (0.0, 0.0, 0.0, math.inf)


class SharedLinks:
    """Up and down links of hosts around an ideal switch.

    Parameters
    ----------
    loop
        Event loop.
    up, down
        Capacity of each host's links in bytes per second, shape (n_hosts,); may be infinite.
    latency_s
        Latency of every transfer, in seconds.

    Raises
    ------
    ValueError
        If a capacity is not positive, or the latency is negative or not finite.
    """

    def __init__(self, loop: Loop, up: Sequence[float], down: Sequence[float], latency_s: float) -> None:
        if len(up) != len(down) or not all(capacity > 0.0 for capacity in (*up, *down)):
            raise ValueError("up, down: must have one capacity above 0 for each host")
        if not 0.0 <= latency_s < math.inf:
            raise ValueError(f"latency_s = {latency_s}: must be finite and not negative")
        self.loop = loop
        self.n_hosts = len(up)
        self._latency_s = latency_s
        # Link h is host h's up link, link n_hosts + h its down link.
        self._capacity = np.array([*up, *down], np.float64)
        self._capacities: list[float] = self._capacity.tolist()
        self._users = [0] * len(self._capacities)  # flows on each link
        self._alone: dict[int, _Flow] = {}  # link -> the flow that shares neither of its links
        # The other flows, contiguous: bytes left at a time, that time, the rate since then, and the end time.
        self._flows: list[_Flow] = []
        self._state = np.empty((4, 16))
        self._links = np.empty((2, 16), np.intp)
        self._begun = 0
        self._rates_stale = False  # flows began or ended on shared links: rates must be recomputed
        self._settling = False
        self._next_end_s = math.inf

    def send(
        self,
        source: int,
        target: int,
        size_bytes: float,
        then: Callable[..., object],
        *args: Any,
        latency_s: float | None = None,
    ) -> None:
        """Send bytes between two hosts and call ``then(*args)`` when the last byte arrives.

        The first byte flows after the latency. A transfer of 0 bytes, or over two links of infinite capacity, takes the
        latency alone and no share of a link.

        Parameters
        ----------
        source, target
            Indices of two different hosts.
        size_bytes
            Number of bytes.
        then, *args
            Callback and its arguments.
        latency_s
            Latency of this transfer in seconds; that of the network by default.

        Raises
        ------
        ValueError
            If the hosts or the size are invalid.
        """
        if source == target or not (0 <= source < self.n_hosts and 0 <= target < self.n_hosts):
            raise ValueError(f"source = {source}, target = {target}: must be two different hosts below {self.n_hosts}")
        if not 0.0 <= size_bytes < math.inf:
            raise ValueError(f"size_bytes = {size_bytes}: must be finite and not negative")
        if latency_s is None:
            latency_s = self._latency_s
        up, down = source, self.n_hosts + target
        if size_bytes == 0 or self._capacities[up] == self._capacities[down] == math.inf:
            self.loop.after(latency_s, then, *args)
        else:
            self.loop.after(latency_s, self._begin, up, down, size_bytes, then, args)

    def _begin(self, up: int, down: int, size_bytes: float, then: Callable[..., object], args: tuple[Any, ...]) -> None:
        flow = _Flow(self._begun, (up, down), then, args)
        self._begun += 1
        sharing = {self._alone[link] for link in flow.links if link in self._alone}
        for other in sorted(sharing, key=lambda flow: flow.number):
            self._join(other, *other.state)
        now_s, users = self.loop.now_s, self._users
        users[up] += 1
        users[down] += 1
        if users[up] == users[down] == 1:
            rate = min(self._capacities[up], self._capacities[down])
            end_s = now_s + size_bytes / rate
            flow.state = (size_bytes, now_s, rate, end_s)
            self._alone[up] = self._alone[down] = flow
            self.loop.at(end_s, self._end_alone, flow)
        else:
            self._join(flow, size_bytes, now_s, 0.0, math.inf)

    def _end_alone(self, flow: _Flow) -> None:
        if self._alone.get(flow.links[0]) is flow:  # otherwise it shares links now
            for link in flow.links:
                del self._alone[link]
                self._users[link] -= 1
            flow.then(*flow.args)

    def _join(self, flow: _Flow, *state: float) -> None:
        """Add a flow to those whose rates are computed together."""
        n = len(self._flows)
        if n == self._state.shape[1]:
            self._state = np.concatenate((self._state, self._state), axis=1)
            self._links = np.concatenate((self._links, self._links), axis=1)
        for link in flow.links:
            self._alone.pop(link, None)
        self._flows.append(flow)
        self._state[:, n] = state
        self._links[:, n] = flow.links
        self._rates_stale = True
        self._settle_soon()

    def _end(self) -> None:
        """Complete the flows that end now."""
        now_s = self.loop.now_s
        if now_s != self._next_end_s:
            return  # rates have changed since this event was scheduled
        self._next_end_s = math.inf
        ended = np.flatnonzero(self._state[END, : len(self._flows)] <= now_s).tolist()
        for flow in sorted((self._remove(at) for at in reversed(ended)), key=lambda flow: flow.number):
            self.loop.at(now_s, flow.then, *flow.args)
        self._settle_soon()

    def _remove(self, at: int) -> _Flow:
        """Remove a flow; the last one takes its index."""
        removed, last = self._flows[at], self._flows.pop()
        if removed is not last:
            self._flows[at] = last
            self._state[:, at] = self._state[:, len(self._flows)]
            self._links[:, at] = self._links[:, len(self._flows)]
        for link in removed.links:
            self._users[link] -= 1
            self._rates_stale = self._rates_stale or self._users[link] > 0
        return removed

    def _settle_soon(self) -> None:
        if not self._settling:
            self._settling = True
            self.loop.at(self.loop.now_s, self._settle, priority=SETTLE)

    def _settle(self) -> None:
        """Recompute rates and the next end, after everything else that begins or ends at this instant."""
        self._settling = False
        n = len(self._flows)
        if self._rates_stale:
            self._rates_stale = False
            self._change_rates(fair_rates(self._capacity, self._links[:, :n]))
        next_end_s = float(self._state[END, :n].min()) if n else math.inf
        if next_end_s != self._next_end_s:
            self._next_end_s = next_end_s
            if n:
                self.loop.at(next_end_s, self._end)

    def _change_rates(self, rates: np.ndarray) -> None:
        """Apply new rates.

        Flows whose rate is unchanged keep their end bit for bit. A flow is over at its end time, not when its bytes
        left reach 0.
        """
        now_s = self.loop.now_s
        left, since_s, rate, end_s = self._state[:, : len(rates)]
        changed = rates != rate
        np.subtract(left, rate * (now_s - since_s), out=left, where=changed)
        np.maximum(left, 0.0, out=left)  # rounding may make it negative just before the end
        np.copyto(since_s, now_s, where=changed)
        np.copyto(end_s, now_s + left / rates, where=changed)
        rate[:] = rates


def fair_rates(capacity: np.ndarray, links: np.ndarray) -> np.ndarray:
    """Compute max-min fair rates.

    Parameters
    ----------
    capacity
        Capacity of each link in bytes per second, shape (n_links,).
    links
        The two links of each flow, shape (2, n_flows); at least one of them is finite.

    Returns
    -------
    np.ndarray
        Rate of each flow in bytes per second, shape (n_flows,).

    Notes
    -----
    Progressive filling. A link offers equal parts of its free capacity to its flows. If for none of its flows this is
    more than the offer of the flow's other link, the link is a bottleneck and its flows get this rate: the offers of
    other links can only grow once slower flows are removed. Such a link always exists, usually many do, and all of
    them are settled in one pass.
    """
    rates = np.empty(links.shape[1])
    open_flows = np.arange(links.shape[1])
    free = capacity.copy()
    users = np.bincount(links.ravel(), minlength=len(free))
    while True:
        offers = (free / np.maximum(users, 1))[links]
        rate = np.minimum(offers[0], offers[1])
        bottleneck = np.bincount(links.ravel(), weights=(offers == rate).ravel(), minlength=len(free)) == users
        settled = bottleneck[links[0]] | bottleneck[links[1]]
        rates[open_flows] = rate
        if settled.all():
            return rates
        # Summed in order of size, equal rates have equal sums on every link, independent of the order of the flows.
        chosen = np.flatnonzero(settled)
        chosen = chosen[np.argsort(rate[chosen])]
        taken = links[:, chosen].ravel()
        free -= np.bincount(taken, weights=np.tile(rate[chosen], 2), minlength=len(free))
        users -= np.bincount(taken, minlength=len(free))
        open_flows, links = open_flows[~settled], links[:, ~settled]
