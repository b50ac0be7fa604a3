"""Transfer times between hosts around an ideal switch, with max-min fair sharing of links.

Every host has one up link and one down link. A transfer uses the up link of its source and the down link of its target,
and nothing else. Rates are max-min fair: no transfer can get a higher rate except at the expense of one whose rate is
not higher. Rates change only when a transfer begins or ends, and all changes at one instant are applied together.

Every flow has a bottleneck: a full link on which no flow is faster. All flows with the same bottleneck have the same
rate, the level of that link, so the link keeps one clock for them: the bytes that each of them would have received
since the link became a bottleneck. A flow ends when this clock shows its size more than at its begin. If a flow begins
or ends on a link of n flows, the level changes but no end on the clock, which costs O(log n).

Most transfers share neither link. The end of such a flow is known when it begins, and it costs one event. Only when
another flow uses one of its links are rates computed, and only those that the change can reach.

Notes
-----
A link of capacity C with n flows slows none whose rate is at most C / n. While all its flows are slower, nobody needs
to look at it; otherwise, or if it is a bottleneck, it is looked at whenever the rate of one of its flows changes. A
server's link that thousands of workers share is therefore computed alone.

The rounding error of a clock is relative to all that it has shown: it is below 1e-9 of a transfer until a link has been
busy without a pause for a hundred thousand transfers of each worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from hpcsync.simulator.event_loop import Loop

SETTLE = 1  # event priority: after everything else at the same time


class _Flow:
    """Transfer whose bytes are flowing."""

    __slots__ = ("args", "bottleneck", "finish", "links", "number", "then")

    def __init__(
        self, number: int, links: tuple[_Link, _Link], size_bytes: float, then: Callable[..., object], args: Any
    ) -> None:
        self.number = number
        self.links = links
        self.then = then
        self.args = args
        self.bottleneck: _Link | None = None  # None: it has just begun
        self.finish = size_bytes  # what the clock of the bottleneck shows at the end

    def other(self, link: _Link) -> _Link:
        """Return the other one of the flow's two links."""
        up, down = self.links
        return down if link is up else up


class _Link:
    """Up or down link of a host, and its flows by number."""

    __slots__ = (
        "alone",
        "capacity",
        "clock",
        "end_s",
        "finishes",
        "level",
        "n_flows",
        "narrowest",
        "number",
        "others",
        "own",
        "since_s",
        "watching",
    )

    def __init__(self, number: int, capacity: float) -> None:
        self.number = number
        self.capacity = capacity  # bytes per second
        self.n_flows = 0
        self.alone: _Flow | None = None  # the only flow, if its other link has no other one either
        self.own: dict[int, _Flow] = {}  # flows whose bottleneck is this link
        self.others: dict[int, _Flow] = {}
        # Of the own flows: rate, clock at a time, that time, ends on the clock as a heap, and the time at which the
        # first of them is looked at.
        self.level = math.inf
        self.clock = 0.0
        self.since_s = 0.0
        self.finishes: list[tuple[float, int]] = []
        self.end_s = math.inf
        # Own flows whose other link is looked at whenever the level changes; for the rest of them, a level up to which
        # their other links slow none.
        self.watching: dict[int, _Flow] = {}
        self.narrowest = math.inf

    @property
    def fair(self) -> float:
        """Rate up to which this link slows no flow."""
        return self.capacity / self.n_flows

    def clock_at(self, now_s: float) -> float:
        """Return what the clock shows; 0 if no flow has this bottleneck."""
        return self.clock + self.level * (now_s - self.since_s) if self.own else 0.0

    def set_level(self, level: float, now_s: float) -> None:
        """Change the rate of the own flows; without a change, no bit of their ends changes."""
        if level != self.level or not self.own:
            self.clock = self.clock_at(now_s)
            self.since_s = now_s
            self.level = level

    def own_flow(self, flow: _Flow, finish: float) -> None:
        """Make this link the bottleneck of one of its flows."""
        self.others.pop(flow.number, None)
        self.own[flow.number] = flow
        flow.bottleneck, flow.finish = self, finish
        heappush(self.finishes, (finish, flow.number))

    def slows_all(self, n_flows: int, n_own: int) -> bool:
        """Return True if the link with so many flows is known to be the bottleneck of all, and slower than any other.

        Then its level is its fair share at once, and no other rate changes with it. `n_own` counts its own flows.
        """
        return n_own == n_flows and not self.watching and self.capacity / n_flows <= self.narrowest

    def begin_anew(self, flow: _Flow, now_s: float) -> None:
        """Make this link, without other flows, the bottleneck of a flow that has just begun."""
        self.clock, self.since_s, self.level = 0.0, now_s, self.capacity
        self.own[flow.number] = flow
        self.finishes = [(flow.finish, flow.number)]
        flow.bottleneck = self

    def disown_flow(self, flow: _Flow) -> None:
        """Make this link no longer the bottleneck of one of its flows."""
        del self.own[flow.number]
        self.watching.pop(flow.number, None)
        self.others[flow.number] = flow

    def end_of(self, flow: _Flow) -> float:
        """Return the time at which one of the own flows ends."""
        return self.since_s + (flow.finish - self.clock) / self.level

    def first(self) -> tuple[float, _Flow | None]:
        """Return the time at which the first of the own flows ends, and the flow."""
        finishes = self.finishes
        while finishes:
            finish, number = finishes[0]
            flow = self.own.get(number)
            if flow is not None and flow.finish == finish:
                return self.end_of(flow), flow
            heappop(finishes)  # it has ended, or has had another bottleneck since
        return math.inf, None


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
        self._links = [_Link(number, float(capacity)) for number, capacity in enumerate((*up, *down))]
        self._changed: dict[int, _Link] = {}  # links whose flows have changed since rates were computed
        self._begun = 0
        self._settling = False  # True if rates will be computed at the end of this instant

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
        up, down = self._links[source], self._links[self.n_hosts + target]
        if size_bytes == 0 or up.capacity == down.capacity == math.inf:
            self.loop.after(latency_s, then, *args)
        else:
            self.loop.after(latency_s, self._begin, up, down, size_bytes, then, args)

    def _begin(
        self, up: _Link, down: _Link, size_bytes: float, then: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        if up.capacity == math.inf or down.capacity == math.inf:
            up, down = _unshared(up), _unshared(down)
        links = up, down
        flow = _Flow(self._begun, links, size_bytes, then, args)
        self._begun += 1
        if up.n_flows == down.n_flows == 0:
            self._begin_alone(flow)
            return
        busy, quiet = (up, down) if up.n_flows > down.n_flows else (down, up)
        n_flows = busy.n_flows + 1
        if (
            quiet.n_flows == 0
            and busy.alone is None
            and not self._settling
            and busy.slows_all(n_flows, len(busy.own) + 1)
            and busy.capacity / n_flows <= quiet.capacity
        ):
            self._begin_on_busy(flow, busy, quiet)
            return
        for link in links:
            link.n_flows += 1
            link.others[flow.number] = flow
            if link.alone is not None:
                self._share(link.alone)
        self._flows_change(flow)

    def _begin_on_busy(self, flow: _Flow, busy: _Link, quiet: _Link) -> None:
        """Begin a flow on a link that slows all its flows, this one too, and on one without flows."""
        busy.n_flows += 1
        quiet.n_flows = 1
        quiet.others[flow.number] = flow
        busy.narrowest = min(busy.narrowest, quiet.capacity)
        # As `set_level` and `own_flow`, which take twice as long: with 10,000 workers most flows begin here.
        now_s, number = self.loop.now_s, flow.number
        clock = busy.clock = busy.clock + busy.level * (now_s - busy.since_s)
        busy.since_s = now_s
        busy.level = busy.capacity / busy.n_flows
        busy.own[number] = flow
        flow.bottleneck = busy
        flow.finish += clock
        heappush(busy.finishes, (flow.finish, number))
        if busy.finishes[0][1] == number:  # otherwise the first end, which is scheduled, becomes later
            self._schedule_end(busy, flow)

    def _begin_alone(self, flow: _Flow) -> None:
        """Begin a flow on two links without flows."""
        up, down = flow.links
        narrow, wide = (up, down) if up.capacity <= down.capacity else (down, up)
        up.n_flows = down.n_flows = 1
        up.alone = down.alone = flow
        wide.others[flow.number] = flow
        narrow.begin_anew(flow, self.loop.now_s)
        self.loop.at(narrow.since_s + flow.finish / narrow.level, self._end_alone, flow)

    def _end_alone(self, flow: _Flow) -> None:
        up, down = flow.links
        if up.alone is flow:  # otherwise it shares links now
            narrow, wide = (up, down) if flow.bottleneck is up else (down, up)
            up.n_flows = down.n_flows = 0
            up.alone = down.alone = None
            del narrow.own[flow.number], wide.others[flow.number]
            flow.then(*flow.args)

    def _share(self, flow: _Flow) -> None:
        """Let a flow that was alone share its links."""
        for link in flow.links:
            link.alone = None
        self._flows_change(flow)

    def _end(self, link: _Link) -> None:
        """Complete those of the link's own flows that end now."""
        now_s = self.loop.now_s
        if now_s != link.end_s:
            return  # an earlier time has been scheduled since
        link.end_s = math.inf
        first_s, flow = link.first()
        if first_s > now_s:  # the level has fallen since
            self._schedule_end(link, flow)
            return
        ended, alone = [], True
        while flow is not None and first_s <= now_s:
            other = flow.other(link)
            link.n_flows -= 1
            other.n_flows -= 1
            del link.own[flow.number], other.others[flow.number]
            link.watching.pop(flow.number, None)
            heappop(link.finishes)
            alone = alone and other.n_flows == 0
            ended.append(flow)
            first_s, flow = link.first()
        if alone and link.own and not self._settling and link.slows_all(link.n_flows, len(link.own)):
            link.set_level(link.fair, now_s)
            self._schedule_end(link, flow)
        else:
            for flow in ended:
                self._flows_change(flow)
        ended.sort(key=lambda flow: flow.number)
        for flow in ended:
            flow.then(*flow.args)

    def _schedule_end(self, link: _Link, first: _Flow | None = None) -> None:
        """Schedule the first end of the link's own flows. If the level falls before, it is scheduled again then.

        `first` is the flow that ends first, where that is known.
        """
        end_s = max(link.first()[0] if first is None else link.end_of(first), self.loop.now_s)
        if end_s < link.end_s:
            link.end_s = end_s
            self.loop.at(end_s, self._end, link)

    def _flows_change(self, flow: _Flow) -> None:
        """Have rates computed because this flow shares its links from now on, or has ended."""
        for link in flow.links:
            self._changed[link.number] = link
        if not self._settling:
            self._settling = True
            self.loop.at(self.loop.now_s, self._settle, priority=SETTLE)

    def _settle(self) -> None:
        """Compute rates and ends, after everything else that begins or ends at this instant."""
        self._settling = False
        changed = [link for link in self._changed.values() if link.n_flows]
        self._changed.clear()
        if changed:
            for link in share(changed, self.loop.now_s):
                self._schedule_end(link)


def _unshared(link: _Link) -> _Link:
    """Return the link, or one of its own for each flow if the capacity is infinite."""
    return link if link.capacity < math.inf else _Link(link.number, link.capacity)


def share(changed: Collection[_Link], now_s: float) -> list[_Link]:
    """Apply max-min fair rates after the flows of some links have changed.

    Parameters
    ----------
    changed
        Links with at least one flow, on which flows have begun or ended.
    now_s
        Time in seconds.

    Returns
    -------
    list of _Link
        Links whose level may have changed, or the bottleneck of a flow.

    Notes
    -----
    Some links are opened: flows with a bottleneck among them get new rates, all others keep theirs. A flow may get
    another bottleneck if both of its links are open. At first those links are open that have changed. Then all links
    are opened that the result contradicts, and rates are computed again, until there are none.
    """
    opened = set(changed)
    while True:
        links = sorted(opened, key=lambda link: link.number)
        at = {link: i for i, link in enumerate(links)}
        free, users, inner = [], [], []
        for link in links:
            kept = []
            for flow in link.others.values():
                if flow.bottleneck is None:
                    if link is flow.links[0]:
                        inner.append(flow)
                elif flow.bottleneck in at:
                    inner.append(flow)
                else:
                    kept.append(flow.bottleneck.level)
            kept.sort()  # equal rates have equal sums on every link, independent of the order of the flows
            free.append(link.capacity - sum(kept))
            users.append(link.n_flows - len(kept))
        pairs = [(at[flow.links[0]], at[flow.links[1]]) for flow in inner]
        levels, bottlenecks = fair_levels(free, users, pairs)
        n_opened = len(opened)
        for link, level in zip(links, levels, strict=True):
            opened.update(_contradicting(link, level))
        if len(opened) == n_opened:
            break
    # What is left of a flow must be read from its clock before levels change.
    moves = []
    for flow, bottleneck in zip(inner, bottlenecks, strict=True):
        before, after = flow.bottleneck, links[bottleneck]
        if before is not after:
            left = flow.finish if before is None else max(0.0, flow.finish - before.clock_at(now_s))
            moves.append((flow, before, after, left))
    for flow, before, *_ in moves:
        if before is not None:
            before.disown_flow(flow)
    for link, level in zip(links, levels, strict=True):
        link.set_level(level, now_s)  # begins the clock anew where no flow is left
    for flow, _, after, left in moves:
        after.own_flow(flow, after.clock_at(now_s) + left)
    for link in links:
        _watch(link)
    return links


def _contradicting(link: _Link, level: float) -> list[_Link]:
    """Return the links that must be open, for flows on an open link, if that gets this level."""
    if level == math.inf:
        return []  # it is no bottleneck
    found = [
        flow.bottleneck
        for flow in link.others.values()
        if flow.bottleneck is not None and flow.bottleneck.level > level
    ]
    if level != link.level:
        found += [flow.other(link) for flow in link.watching.values()]
    if level > link.narrowest:
        link.narrowest = math.inf
        for number, flow in link.own.items():
            other = flow.other(link)
            if other.fair < level:
                found.append(other)
            if number not in link.watching:
                link.narrowest = min(link.narrowest, other.fair)
    return found


def _watch(link: _Link) -> None:
    """Tell the bottlenecks of the flows on a link whether they must look at it when their level changes."""
    fair = link.fair
    flows = [(flow, flow.bottleneck) for flow in link.others.values() if flow.bottleneck is not None]
    watched = bool(link.own) or any(bottleneck.level > fair for _, bottleneck in flows)
    for flow, bottleneck in flows:
        if watched:
            bottleneck.watching[flow.number] = flow
        else:
            bottleneck.watching.pop(flow.number, None)
            bottleneck.narrowest = min(bottleneck.narrowest, fair)


def fair_levels(
    free: Sequence[float], users: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> tuple[list[float], list[int]]:
    """Compute max-min fair rates.

    Parameters
    ----------
    free
        Capacity of each link for the flows that get rates, in bytes per second, shape (n_links,).
    users
        Number of these flows on each link, shape (n_links,). Those that are in no pair use this link alone.
    pairs
        The two links of each flow that uses two of them, shape (n_pairs, 2).

    Returns
    -------
    levels : list of float
        Rate of the flows whose bottleneck is this link, in bytes per second; infinite if there are none.
    bottlenecks : list of int
        Bottleneck of each pair, one of its two links.

    Notes
    -----
    Progressive filling. A link offers equal parts of its free capacity to its flows. The link with the smallest offer
    is a bottleneck and its flows get this rate: the offers of other links can only grow once slower flows are removed.
    """
    free, users = list(free), list(users)
    levels, bottlenecks = [math.inf] * len(free), [-1] * len(pairs)
    flows: list[list[int]] = [[] for _ in free]
    for pair, (up, down) in enumerate(pairs):
        flows[up].append(pair)
        flows[down].append(pair)
    offers = [(free[link] / n, -n, link) for link, n in enumerate(users) if n]
    heapify(offers)
    level = -math.inf
    while offers:
        offer, minus_users, link = heappop(offers)
        if -minus_users != users[link]:
            continue  # a flow has been removed since
        level = levels[link] = max(offer, level)  # rounding may make it smaller
        users[link] = 0
        for pair in flows[link]:
            if bottlenecks[pair] < 0:
                bottlenecks[pair] = link
                other = sum(pairs[pair]) - link
                free[other] -= level
                users[other] -= 1
                if users[other]:
                    heappush(offers, (free[other] / users[other], -users[other], other))
    return levels, bottlenecks
