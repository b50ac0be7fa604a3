"""Hosts around an ideal switch: how long transfers take that share links.

Every host has an up link and a down link. A transfer uses its source's up link and its target's down link and nothing
else. Transfers share links max-min fairly: nobody can get more but at the expense of somebody who has no more. Their
rates change only when a transfer begins or ends, and what happens at the same instant changes them once.

Most transfers meet nobody. Such a flow has its links for itself, its end is known when it begins, and it costs one
event; only when another flow comes to one of its links does it join those whose rates are computed together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcsync.simulator.event_loop import Loop

SETTLE = 1  # priority in the loop: after everything that happens at the same time
LEFT, SINCE, RATE, END = range(4)  # rows of what is known of the flows


class _Flow:
    """A transfer whose bytes flow. state: while it is alone, what `SharedLinks._state` holds of the others."""

    __slots__ = ("args", "links", "number", "state", "then")

    def __init__(self, number: int, links: tuple[int, int], then: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.number = number
        self.links = links
        self.then = then
        self.args = args
        self.state = (0.0, 0.0, 0.0, math.inf)


class SharedLinks:
    """up, down: bytes per second of each host's links, finite or not; latency_s: of every transfer."""

    def __init__(self, loop: Loop, up: Sequence[float], down: Sequence[float], latency_s: float) -> None:
        if len(up) != len(down) or not all(capacity > 0.0 for capacity in (*up, *down)):
            raise ValueError("every host needs an up link and a down link with capacities above 0")
        if not 0.0 <= latency_s < math.inf:
            raise ValueError(f"there is no latency of {latency_s} s")
        self.loop = loop
        self.n_hosts = len(up)
        self._latency_s = latency_s
        # Link h is host h's up link, link n_hosts + h its down link.
        self._capacity = np.array([*up, *down], np.float64)
        self._capacities: list[float] = self._capacity.tolist()
        self._users = [0] * len(self._capacities)  # flows on each link
        self._alone: dict[int, _Flow] = {}  # link -> the flow that has both of its links for itself
        # Of the other flows, without gaps: bytes left at a time, that time, the rate since then, and when it will end.
        self._flows: list[_Flow] = []
        self._state = np.empty((4, 16))
        self._links = np.empty((2, 16), np.intp)
        self._begun = 0
        self._unfair = False  # flows have begun or ended on links that others use: rates are to be computed
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
        """Call then(*args) when the last byte has arrived: the first begins to flow after the latency.

        What has no size, or only links of infinite capacity, takes the latency and nobody's share. latency_s: of this
        transfer, where it is another one.
        """
        if source == target or not (0 <= source < self.n_hosts and 0 <= target < self.n_hosts):
            raise ValueError(f"there is no way from host {source} to host {target} of {self.n_hosts}")
        if not 0.0 <= size_bytes < math.inf:
            raise ValueError(f"{size_bytes} bytes cannot be sent")
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
        met = {self._alone[link] for link in flow.links if link in self._alone}
        for other in sorted(met, key=lambda flow: flow.number):
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
        if self._alone.get(flow.links[0]) is flow:  # else it has joined others
            for link in flow.links:
                del self._alone[link]
                self._users[link] -= 1
            flow.then(*flow.args)

    def _join(self, flow: _Flow, *state: float) -> None:
        """Among the flows whose rates are computed together."""
        n = len(self._flows)
        if n == self._state.shape[1]:
            self._state = np.concatenate((self._state, self._state), axis=1)
            self._links = np.concatenate((self._links, self._links), axis=1)
        for link in flow.links:
            self._alone.pop(link, None)
        self._flows.append(flow)
        self._state[:, n] = state
        self._links[:, n] = flow.links
        self._unfair = True
        self._settle_soon()

    def _end(self) -> None:
        """The flows whose time has come have arrived."""
        now_s = self.loop.now_s
        if now_s != self._next_end_s:
            return  # rates have changed since this was planned
        self._next_end_s = math.inf
        ended = np.flatnonzero(self._state[END, : len(self._flows)] <= now_s).tolist()
        for flow in sorted((self._remove(at) for at in reversed(ended)), key=lambda flow: flow.number):
            self.loop.at(now_s, flow.then, *flow.args)
        self._settle_soon()

    def _remove(self, at: int) -> _Flow:
        """The last one takes its place."""
        removed, last = self._flows[at], self._flows.pop()
        if removed is not last:
            self._flows[at] = last
            self._state[:, at] = self._state[:, len(self._flows)]
            self._links[:, at] = self._links[:, len(self._flows)]
        for link in removed.links:
            self._users[link] -= 1
            self._unfair = self._unfair or self._users[link] > 0
        return removed

    def _settle_soon(self) -> None:
        if not self._settling:
            self._settling = True
            self.loop.at(self.loop.now_s, self._settle, priority=SETTLE)

    def _settle(self) -> None:
        """Everything that begins or ends now has done so: what follows from it?"""
        self._settling = False
        n = len(self._flows)
        if self._unfair:
            self._unfair = False
            self._change_rates(fair_rates(self._capacity, self._links[:, :n]))
        next_end_s = float(self._state[END, :n].min()) if n else math.inf
        if next_end_s != self._next_end_s:
            self._next_end_s = next_end_s
            if n:
                self.loop.at(next_end_s, self._end)

    def _change_rates(self, rates: np.ndarray) -> None:
        """Flows whose rate stays keep their end, bit by bit. An end decides that a flow is over, not the bytes left."""
        now_s = self.loop.now_s
        left, since_s, rate, end_s = self._state[:, : len(rates)]
        changed = rates != rate
        np.subtract(left, rate * (now_s - since_s), out=left, where=changed)
        np.maximum(left, 0.0, out=left)  # it may be below by a rounding just before the end
        np.copyto(since_s, now_s, where=changed)
        np.copyto(end_s, now_s + left / rates, where=changed)
        rate[:] = rates


def fair_rates(capacity: np.ndarray, links: np.ndarray) -> np.ndarray:
    """The max-min fair rate of each flow, in bytes per second, shape (n,).

    capacity: of each link, shape (n_links,). links: the two links of each flow, shape (2, n), one of them finite.

    A link offers its flows equal parts of what it has. Where that is for none of them more than what their other link
    offers, it is what they get: other links can only offer more once flows that get less are out of their way. There is
    always such a link, mostly there are many, and all of them are settled at once.
    """
    rates = np.empty(links.shape[1])
    open_flows = np.arange(links.shape[1])
    free = capacity.copy()
    users = np.bincount(links.ravel(), minlength=len(free))
    while True:
        offers = (free / np.maximum(users, 1))[links]
        rate = np.minimum(offers[0], offers[1])
        narrow = np.bincount(links.ravel(), weights=(offers == rate).ravel(), minlength=len(free)) == users
        settled = narrow[links[0]] | narrow[links[1]]
        rates[open_flows] = rate
        if settled.all():
            return rates
        # Added in order of size, the same rates have the same sum on every link, whatever the order of the flows.
        chosen = np.flatnonzero(settled)
        chosen = chosen[np.argsort(rate[chosen])]
        taken = links[:, chosen].ravel()
        free -= np.bincount(taken, weights=np.tile(rate[chosen], 2), minlength=len(free))
        users -= np.bincount(taken, minlength=len(free))
        open_flows, links = open_flows[~settled], links[:, ~settled]
