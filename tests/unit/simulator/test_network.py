"""Shared links: against an exact oracle, by properties, in closed form, and to the last bit."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpcsync.simulator import network as module
from hpcsync.simulator.event_loop import Loop
from hpcsync.simulator.network import SharedLinks, fair_levels

# ---- other ways to share, for comparison ----


def rates_by(levels_of, capacity, links):
    """Return the rate of each flow if links get these levels."""
    pairs = links.T.tolist()
    levels, bottlenecks = levels_of(capacity.tolist(), np.bincount(links.ravel(), minlength=len(capacity)), pairs)
    assert all(link in pair for link, pair in zip(bottlenecks, pairs, strict=True))
    return np.array([levels[link] for link in bottlenecks])


def fair_rates(capacity, links):
    return rates_by(fair_levels, capacity, links)


def filled(capacity, links):
    """Exact max-min fairness: all rates grow equally until a link is full, which fixes those on it."""
    free = [Fraction(c) if math.isfinite(c) else None for c in capacity]
    rates = [Fraction(0)] * len(links[0])
    growing = set(range(len(rates)))
    while growing:
        on = [sum(link in (links[0][flow], links[1][flow]) for flow in growing) for link in range(len(free))]
        step = min(f / n for f, n in zip(free, on, strict=True) if n and f is not None)
        free = [f if f is None else f - n * step for f, n in zip(free, on, strict=True)]
        for flow in growing:
            rates[flow] += step
        growing = {flow for flow in growing if free[links[0][flow]] != 0 and free[links[1][flow]] != 0}
    return rates


def slower(levels, pairs):
    """Let the slower of its links be the bottleneck of each flow."""
    return levels, [min(pair, key=lambda link: levels[link]) for pair in pairs]


def equal_parts(free, users, pairs):
    """Equal shares; what a flow cannot use is lost."""
    return slower([max(c, 1e-3) / max(n, 1) for c, n in zip(free, users, strict=True)], pairs)


def unshared(free, users, pairs):
    return slower([max(c, 1e-3) for c in free], pairs)


def first_links_first(free, users, pairs):
    """Let links take what they can in the order of their numbers: feasible and work-conserving, but not fair."""
    free, users = list(free), list(users)
    levels, bottlenecks = [math.inf] * len(free), [-1] * len(pairs)
    for link in range(len(free)):
        if users[link]:
            levels[link] = max(free[link] / users[link], 1e-3)
            for i, pair in enumerate(pairs):
                if link in pair and bottlenecks[i] < 0:
                    bottlenecks[i] = link
                    for each in pair:
                        free[each], users[each] = free[each] - levels[link], users[each] - 1
    return levels, bottlenecks


BROKEN = (equal_parts, unshared, first_links_first)

# ---- rates ----


def check_fair(capacity, links, rates):
    """No link exceeds its capacity, and every flow has a full link on which no flow is faster."""
    load = np.bincount(links.ravel(), weights=np.tile(rates, 2), minlength=len(capacity))
    assert (load <= capacity * (1 + 1e-9)).all()
    full = load >= capacity * (1 - 1e-9)
    fastest = np.zeros(len(capacity))
    for row in links:
        np.maximum.at(fastest, row, rates)
    assert all(any(full[link] and rate >= fastest[link] * (1 - 1e-9) for link in links[:, i]) for i, rate in
               enumerate(rates))  # fmt: skip


@st.composite
def shared_links(draw):
    """Draw capacities of 2 n links, and flows over one of the first n and one of the last n, one of the two finite."""
    n = draw(st.integers(1, 6))
    capacities = st.one_of(st.integers(1, 12).map(float), st.floats(1e-3, 1e12), st.just(math.inf))
    capacity = draw(st.lists(capacities, min_size=2 * n, max_size=2 * n))
    pairs = st.tuples(st.integers(0, n - 1), st.integers(n, 2 * n - 1))
    pairs = pairs.filter(lambda pair: math.isfinite(min(capacity[pair[0]], capacity[pair[1]])))
    if all(math.isinf(c) for c in capacity):
        capacity[0] = 1.0
    return np.array(capacity), np.array(draw(st.lists(pairs, min_size=1, max_size=20)), dtype=np.intp).T


CHAIN = np.array([1.0, 8.0, 6.0, 2.0]), np.array([[1, 0, 1], [2, 2, 3]])  # rates 5, 1, 2


@given(shared_links())
def test_rates_are_fair(case):
    check_fair(*case, fair_rates(*case))


@given(shared_links())
def test_rates_equal_the_exact_oracle(case):
    assert fair_rates(*case) == pytest.approx([float(rate) for rate in filled(*case)], rel=1e-9)


@pytest.mark.parametrize("broken", BROKEN)
def test_rates_that_are_not_fair_are_caught(broken):
    assert fair_rates(*CHAIN).tolist() == filled(*CHAIN) == [5.0, 1.0, 2.0]
    with pytest.raises(AssertionError):
        check_fair(*CHAIN, rates_by(broken, *CHAIN))


@given(shared_links(), st.randoms(use_true_random=False))
def test_rates_do_not_depend_on_the_order_of_the_flows(case, random):
    """Not in a single bit: equal flows begin and end together."""
    capacity, links = case
    order = list(range(links.shape[1]))
    random.shuffle(order)
    assert fair_rates(capacity, links[:, order]).tolist() == fair_rates(capacity, links)[order].tolist()


def rests_differ():
    """Two equal links on which flows of 0.3, 0.7 and 0.9 were begun in different orders."""
    capacity = np.array([0.3, 0.9, 0.7, 0.7, 0.9, 0.3, 5.0, 5.0, 9.0, 9.0])
    rates = fair_rates(capacity, np.array([[0, 1, 2, 8, 3, 4, 5, 9], [6, 6, 6, 6, 7, 7, 7, 7]]))
    return rates[3] != rates[7]


def test_equal_links_with_equal_flows_leave_equal_rests(monkeypatch):
    assert not rests_differ()
    monkeypatch.setattr(module, "heappop", lambda heap: heap.pop(heap.index(min(heap, key=lambda entry: entry[2]))))
    monkeypatch.setattr(module, "max", lambda offer, level: offer, raising=False)
    assert rests_differ()


# ---- transfers ----


class Watched(SharedLinks):
    """Records the rates of all flows over time: (time, {number: (up, down, rate)})."""

    def __init__(self, *args):
        super().__init__(*args)
        self.history = []

    def _settle(self):
        super()._settle()
        self._note()

    def _begin(self, *args):
        super()._begin(*args)
        self._note()

    def _end(self, link):
        super()._end(link)
        self._note()

    def _end_alone(self, flow):
        super()._end_alone(flow)
        self._note()

    def _note(self):
        """Record only the state at the end of an instant."""
        flowing = {f.number: (*(each.number for each in f.links), link.level) for link in self._links for f in
                   link.own.values()}  # fmt: skip
        if self.history and self.history[-1][0] == self.loop.now_s:
            self.history.pop()
        self.history.append((self.loop.now_s, flowing))


def arrivals(up, down, latency_s, transfers, network=SharedLinks):
    """Return when each of these transfers (time, source, target, bytes) arrives, and the network."""
    loop = Loop()
    net = network(loop, up, down, latency_s)
    at = [math.nan] * len(transfers)

    def arrived(index):
        assert math.isnan(at[index])
        at[index] = loop.now_s

    for index, (time_s, source, target, size_bytes) in enumerate(transfers):
        loop.at(time_s, net.send, source, target, size_bytes, arrived, index)
    loop.run()
    assert not any(map(math.isnan, at))
    return at, net


def fluid(up, down, latency_s, transfers):
    """Compute the same exactly: between two events all flows have the oracle's rates."""
    capacity, n = [*up, *down], len(up)
    begins = [Fraction(time_s) + Fraction(latency_s) for time_s, *_ in transfers]
    left = [Fraction(size) for *_, size in transfers]
    at = [None if size else begins[i] for i, (*_, size) in enumerate(transfers)]
    now = Fraction(0)
    while None in at:
        flowing = [i for i, arrival in enumerate(at) if arrival is None and begins[i] <= now]
        links = [transfers[i][1] for i in flowing], [n + transfers[i][2] for i in flowing]
        rates = filled(capacity, links)
        ends = [now + left[i] / rate for i, rate in zip(flowing, rates, strict=True)]
        then = min([*ends, *(begin for i, begin in enumerate(begins) if at[i] is None and begin > now)])
        for i, rate, end in zip(flowing, rates, ends, strict=True):
            left[i] -= rate * (then - now)
            at[i] = end if end == then else None
        now = then
    return [float(arrival) for arrival in at]


def check_arrivals(case):
    assert arrivals(*case)[0] == pytest.approx(fluid(*case), rel=1e-9)


def check_flow(case):
    """Every byte arrives at the reported time, at rates that are fair at every time."""
    up, down, latency_s, transfers = case
    at, net = arrivals(*case, network=Watched)
    capacity = np.array([*up, *down])
    flowed = {}
    net.history.append((max(at), {}))
    for (begin_s, flows), (end_s, _) in itertools.pairwise(net.history):
        if flows:
            columns = np.array([flow[:2] for flow in flows.values()], dtype=np.intp).T
            check_fair(capacity, columns, np.array([flow[2] for flow in flows.values()]))
        for number, (*_, rate) in flows.items():
            flowed[number] = flowed.get(number, 0.0) + rate * (end_s - begin_s)
    sizes = sorted(size for *_, size in transfers if size)
    assert sorted(flowed.values()) == pytest.approx(sizes, rel=1e-6)
    assert all(begin_s + latency_s <= end_s for (begin_s, *_), end_s in zip(transfers, at, strict=True))


@st.composite
def traffic(draw):
    """Draw hosts, links, latency and transfers, many of equal time, size and links."""
    n = draw(st.integers(2, 5))
    capacities = st.lists(st.integers(1, 8).map(float), min_size=n, max_size=n)
    times = st.integers(0, 40).map(lambda quarter: quarter / 4)
    ways = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda way: way[0] != way[1])
    transfers = st.tuples(times, ways, st.integers(0, 30)).map(lambda t: (t[0], *t[1], t[2]))
    latency_s = draw(st.sampled_from([0.0, 0.25, 0.3]))
    return draw(capacities), draw(capacities), latency_s, draw(st.lists(transfers, min_size=1, max_size=12))


@given(traffic())
def test_transfers_arrive_when_exact_arithmetic_says(case):
    check_arrivals(case)


@given(traffic())
def test_bytes_are_conserved_and_rates_are_always_fair(case):
    check_flow(case)


MIXED = [9.0, 1.0, 8.0], [6.0, 8.0, 2.0], 0.25, [(0.0, 1, 0, 5), (0.0, 2, 0, 9), (0.5, 2, 1, 7), (1.0, 0, 2, 4)]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("check", [check_arrivals, check_flow])
def test_unfair_sharing_is_caught(broken, check, monkeypatch):
    check(MIXED)
    monkeypatch.setattr(module, "fair_levels", broken)
    with pytest.raises(AssertionError):
        check(MIXED)


@given(traffic(), st.randoms(use_true_random=False))
def test_the_order_of_what_happens_at_once_changes_no_bit(case, random):
    *links, transfers = case
    order = list(range(len(transfers)))
    random.shuffle(order)
    at = arrivals(*links, transfers)[0]
    assert arrivals(*links, [transfers[i] for i in order])[0] == [at[i] for i in order]


# ---- against a computation of everything at each change ----


def refilled(capacity, links):
    """Compute max-min fair rates: the link that offers least fixes the rates of its flows, until all have one."""
    free, rates, growing = capacity.copy(), np.zeros(links.shape[1]), np.arange(links.shape[1])
    while len(growing):
        users = np.bincount(links[:, growing].ravel(), minlength=len(free))
        offers = np.where(users > 0, free / np.maximum(users, 1), math.inf)
        link = offers.argmin()
        fixed = (links[:, growing] == link).any(axis=0)
        rates[growing[fixed]] = offers[link]
        np.subtract.at(free, links[:, growing[fixed]].ravel(), offers[link])
        growing = growing[~fixed]
    return rates


def recomputed(up, down, latency_s, transfers):
    """Compute arrivals with all rates from scratch, and every transfer's bytes, whenever one begins or ends."""
    capacity = np.array([*up, *down])
    links = np.array([[source, len(up) + target] for _, source, target, _ in transfers]).T
    begins = np.array([time_s + latency_s for time_s, *_ in transfers])
    left, at, now = np.array([float(size) for *_, size in transfers]), np.full(len(transfers), np.nan), 0.0
    while np.isnan(at).any():
        flowing = np.flatnonzero(np.isnan(at) & (begins <= now))
        rates = refilled(capacity, links[:, flowing])
        ends = now + left[flowing] / rates
        then = min(ends.min(initial=math.inf), begins[begins > now].min(initial=math.inf))
        left[flowing] -= rates * (then - now)
        at[flowing[ends == then]] = then
        now = then
    return at.tolist()


def cluster_traffic(seed, n_transfers=60):
    """Draw transfers of a few servers and some workers, mostly between the two, with slow and fast links."""
    random = np.random.default_rng(seed)
    n_servers, n_workers = random.integers(1, 5), random.integers(2, 13)
    n = n_servers + n_workers
    fast = 10.0 ** random.uniform(-0.5, 1.5)
    up, down = (np.r_[np.full(n_servers, fast), random.choice([0.3, 1.0, 1.0, random.uniform(0.1, 3.0)], n_workers)]
                for _ in range(2))  # fmt: skip
    transfers = []
    while len(transfers) < n_transfers:
        time_s, worker, way = random.uniform(0.0, 40.0), random.integers(n_servers, n), random.random()
        if way < 0.2:  # to another worker
            other = random.integers(n_servers, n)
            transfers += [(time_s, worker, other, random.uniform(0.5, 4.0))] if other != worker else []
        else:  # to all servers, or from all
            for server in range(n_servers):
                ends = (worker, server) if way < 0.6 else (server, worker)
                transfers.append((time_s, *ends, random.uniform(0.5, 4.0)))
    return up.tolist(), down.tolist(), 0.01, transfers


def check_recomputed(seed):
    case = cluster_traffic(seed)
    assert arrivals(*case)[0] == pytest.approx(recomputed(*case), rel=1e-9)


@given(st.integers(0, 2**32 - 1))
@example(278)  # a link loses its last flow and gets another one at once
def test_transfers_arrive_when_a_computation_of_all_rates_at_each_change_says(seed):
    check_recomputed(seed)


def test_the_computation_of_all_rates_agrees_with_exact_arithmetic():
    assert recomputed(*MIXED) == pytest.approx(fluid(*MIXED), rel=1e-12)


def watches_nothing(link):
    """Keep the bounds alone: a link that is a bottleneck already is not looked at."""
    for flow in link.others.values():
        flow.bottleneck.narrowest = min(flow.bottleneck.narrowest, link.fair)


def bounds_nothing(link, watch=module._watch):
    """Watch alone: a link that becomes too narrow because of a flow's higher rate is not looked at."""
    watch(link)
    for flow in link.others.values():
        flow.bottleneck.narrowest = math.inf


def keeps_the_clock(link, level, now_s):
    """Change the level, but do not begin the clock anew for the first flow of a link that had none."""
    if link.own:
        link.clock = link.clock_at(now_s)
    link.since_s, link.level = now_s, level


BROKEN_MECHANISMS = {
    "only changed links": ("_contradicting", lambda link, level: []),
    "no watching": ("_watch", watches_nothing),
    "no bounds": ("_watch", bounds_nothing),
    "a clock that is not begun anew": ("_Link.set_level", keeps_the_clock),
    "a clock that stops when rates change": ("_Link.clock_at", lambda link, now_s: link.clock),
}


@pytest.mark.parametrize("broken", BROKEN_MECHANISMS)
def test_rates_of_too_few_flows_are_caught(broken, monkeypatch):
    name, function = BROKEN_MECHANISMS[broken]
    monkeypatch.setattr(f"{module.__name__}.{name}", function)
    with pytest.raises((AssertionError, ValueError, ZeroDivisionError)):
        for seed in range(50):
            check_recomputed(seed)


# ---- closed forms ----


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100])
def test_equal_flows_into_one_host_arrive_together_after_n_times_as_long(n):
    at, _ = arrivals([1e9] * (n + 1), [3e6] + [1e9] * n, 1e-3, [(0.0, 1 + i, 0, 1e6) for i in range(n)])
    assert len(set(at)) == 1
    assert at[0] == pytest.approx(1e-3 + n * 1e6 / 3e6, rel=1e-12)


def check_processor_sharing(n=40):
    """The k-th smallest of n ends when it, all smaller ones, and as much of all larger ones have been sent."""
    sizes = [float(1 + 7 * i % n) for i in range(n)]
    at, _ = arrivals([math.inf] * (n + 1), [5.0] * (n + 1), 0.0, [(0.0, 1 + i, 0, s) for i, s in enumerate(sizes)])
    assert at == pytest.approx([sum(min(size, other) for other in sizes) / 5.0 for size in sizes], rel=1e-12)


def test_different_sizes_into_one_host_share_the_processor():
    check_processor_sharing()


def check_rest():
    """One of three has a slow link of its own; the two others use the rest."""
    at, _ = arrivals(
        [99.0, 1.0, 99.0, 99.0], [9.0, 1.0, 1.0, 1.0], 0.0, [(0.0, 1, 0, 10), (0.0, 2, 0, 8), (0.0, 3, 0, 8)]
    )
    assert at == pytest.approx([10.0, 2.0, 2.0], rel=1e-12)


def test_the_others_use_what_a_slow_link_leaves():
    check_rest()


def check_busy(n=200, size=0.8):
    """However the server's link is shared, it is busy until all arrived work is done."""
    random = np.random.default_rng(1)
    transfers, time_s, busy_until_s, periods = [], 0.0, 0.0, []
    for i in range(n):
        time_s += float(random.exponential(1.0))
        if time_s > busy_until_s:
            periods.append(busy_until_s)
        busy_until_s = max(time_s, busy_until_s) + size
        transfers.append((time_s, 1 + i, 0, size))
    at, _ = arrivals([1.0] * (n + 1), [1.0] * (n + 1), 0.0, transfers)
    ends = np.array(at)
    assert all(np.abs(ends - end).min() < 1e-9 for end in [*periods[1:], busy_until_s])
    return len(periods)


def test_a_link_is_busy_until_its_work_is_done():
    assert check_busy() > 5


CAUGHT = [
    (unshared, check_processor_sharing),
    (first_links_first, check_rest),
    (unshared, check_rest),
    (equal_parts, check_rest),
    (unshared, check_busy),
]


@pytest.mark.parametrize(("broken", "check"), CAUGHT)
def test_broken_sharing_fails_the_closed_forms(broken, check, monkeypatch):
    monkeypatch.setattr(module, "fair_levels", broken)
    with pytest.raises(AssertionError):
        check()


# ---- the mechanics ----


@pytest.fixture
def sharings(monkeypatch):
    """Largest number of flows on a link, and the number of links, at each computation of rates."""
    seen = []

    def counted(free, users, pairs):
        seen.append((max(users), len(users)))
        return fair_levels(free, users, pairs)

    monkeypatch.setattr(module, "fair_levels", counted)
    return seen


def test_rates_are_computed_once_an_instant_and_not_again_while_one_link_slows_all(sharings):
    transfers = [(0.0, 1, 0, 4), (0.0, 2, 0, 4), (0.0, 3, 0, 8), (12.0, 1, 0, 1), (12.0, 2, 0, 9)]
    at, _ = arrivals([9.0] * 4, [1.0] * 4, 0.0, transfers)
    assert at == [12.0, 12.0, 21.0, 15.0, 26.0]
    assert sharings == [(3, 4)]  # at 0, but not at 12 (two end, two begin), 15 and 21


def test_flows_that_share_nothing_are_not_computed(sharings):
    n = 50
    transfers = [(t, i, (i + 1) % n, 2) for t in (0.0, 2.0) for i in range(n)]
    assert set(arrivals([1.0] * n, [3.0] * n, 0.0, transfers)[0]) == {2.0, 4.0}
    assert sharings == []


def links_looked_at(sharings, n=200):
    """Return the most links of a computation of rates while n workers send to two servers, each to both at once."""
    transfers = [(0.01 * i, 2 + i, server, 1 + i % 3) for i in range(n) for server in (0, 1)]
    arrivals([1.0] * (n + 2), [1.0] * (n + 2), 0.0, transfers)
    assert max(sharings)[0] > n - 10
    return max(n_links for _, n_links in sharings)


def test_a_transfer_costs_as_much_with_few_others_as_with_many(sharings, monkeypatch):
    assert links_looked_at(sharings) <= 6
    sharings.clear()
    monkeypatch.setattr(module, "_watch", lambda link: [flow.bottleneck.watching.update({flow.number: flow}) for flow in
                                                        link.others.values()])  # fmt: skip
    assert links_looked_at(sharings) > 100


def check_one_server(seed, n=12):
    """A server's link that is known to slow all of its flows gets the same level, to the bit, as by a computation."""
    random = np.random.default_rng(seed)
    transfers = [(time_s, 1 + int(random.integers(n)), 0, 1.0) for time_s in random.uniform(0.0, 9.0, 60)]
    case = [1.0] * (n + 1), [random.uniform(0.5, 8.0)] + [1.0] * n, 0.0, transfers
    quick = arrivals(*case)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Link, "slows_all", lambda *args: False)
        assert arrivals(*case)[0] == quick


@given(st.integers(0, 2**32 - 1))
def test_a_link_known_to_slow_all_needs_no_computation(seed):
    check_one_server(seed)


def test_a_link_wrongly_believed_to_slow_all_is_caught(monkeypatch):
    monkeypatch.setattr(module._Link, "slows_all", lambda link, n_flows, n_own: n_own == n_flows)
    with pytest.raises(AssertionError):
        check_one_server(1)


def test_a_flow_whose_rate_stays_keeps_its_end_to_the_bit():
    alone = arrivals([0.3] * 5, [0.7] * 5, 0.0, [(0.1, 1, 2, 1.1)])[0]
    others = [(0.1 + 0.01 * i, 3 + i % 2, 0, 0.013) for i in range(100)]
    assert arrivals([0.3] * 5, [0.7] * 5, 0.0, [(0.1, 1, 2, 1.1), *others])[0][0] == alone[0]


def test_empty_messages_and_infinite_links_take_only_the_latency(sharings):
    transfers = [(0.0, 1, 0, 4), (0.0, 1, 0, 0), (0.0, 2, 3, 1e9), (0.0, 2, 3, 1e9)]
    at, _ = arrivals([1.0, 1.0, math.inf, 1.0], [1.0, 1.0, 1.0, math.inf], 0.5, transfers)
    assert at == [4.5, 0.5, 0.5, 0.5]
    assert sharings == []


def test_transfers_below_the_clock_resolution_arrive_at_once():
    transfers = [(1e6, 1, 0, 1), (1e6, 2, 0, 1), (1e6, 2, 0, 1)]
    assert arrivals([1e12] * 3, [1e12] * 3, 0.0, transfers)[0] == [1e6] * 3


def test_transfers_sent_first_complete_first():
    loop, told = Loop(), []
    net = SharedLinks(loop, [1.0] * 9, [1.0] * 9, 0.0)
    net.send(8, 7, 0.5, told.append, "early")
    for source in (3, 1, 2, 5):
        net.send(source, 0, 1, told.append, source)
    loop.run()
    assert told == ["early", 3, 1, 2, 5]
    assert type(loop.now_s) is float


def test_a_callback_may_send_again_at_once():
    loop, at = Loop(), []
    net = SharedLinks(loop, [1.0] * 3, [1.0] * 3, 0.0)

    def again(source, left):
        at.append(loop.now_s)
        if left:
            net.send(source, 0, 1, again, source, left - 1)

    for source in (1, 2):
        net.send(source, 0, 1, again, source, 3)
    loop.run()
    assert at == [2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 8.0, 8.0]


def test_more_flows_than_the_initial_capacity():
    n = 500
    at, _ = arrivals([1.0] * (n + 1), [1.0] * (n + 1), 0.0, [(0.0, 1 + i, 0, 1 + i % 2) for i in range(n)])
    assert at == pytest.approx([500.0, 750.0] * 250)


@pytest.mark.parametrize("way", [(1, 1), (-1, 0), (0, -1), (2, 0), (0, 2)])
def test_invalid_hosts_are_refused(way):
    with pytest.raises(ValueError, match="must be two different hosts below"):
        SharedLinks(Loop(), [1.0] * 2, [1.0] * 2, 0.0).send(*way, 1, print)


@pytest.mark.parametrize("size_bytes", [-1, math.inf, math.nan])
def test_invalid_sizes_are_refused(size_bytes):
    with pytest.raises(ValueError, match="^size_bytes = "):
        SharedLinks(Loop(), [1.0] * 2, [1.0] * 2, 0.0).send(0, 1, size_bytes, print)


@pytest.mark.parametrize(
    ("up", "down", "latency_s"),
    [([1], [1, 1], 0.0), ([0.0], [1.0], 0.0), ([1.0], [math.nan], 0.0), ([1.0], [1.0], -1.0), ([1.0], [1.0], math.inf)],
)
def test_invalid_networks_are_refused(up, down, latency_s):
    with pytest.raises(ValueError, match="must have one capacity|^latency_s = "):
        SharedLinks(Loop(), up, down, latency_s)
