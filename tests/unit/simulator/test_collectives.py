"""Collectives on simulated links: durations, slow hosts, and the completeness of the results."""

from __future__ import annotations

import math

import pytest

from hpcsync.simulator import collectives
from hpcsync.simulator.collectives import ring, ring_allreduce, ring_alone_s
from hpcsync.simulator.event_loop import Loop
from hpcsync.simulator.network import SharedLinks
from tests.unit.simulator.closed_forms import ring_allreduce_s

SIZE, LATENCY_S, BANDWIDTH = 240_000, 1e-4, 1e6
HOSTS = (2, 3, 4, 5, 8, 16)


def network(links, latency_s=LATENCY_S):
    return SharedLinks(Loop(), links, links, latency_s)


def took_s(network, size_bytes=SIZE, copies=1):
    """Return when this many sums, begun at once among all hosts of the network, have ended."""
    ends = []
    for _ in range(copies):
        ring_allreduce(network, range(network.n_hosts), size_bytes, lambda: ends.append(network.loop.now_s))
    network.loop.run()
    assert len(ends) == copies
    return max(ends)


def check_cost(p):
    expected = ring_allreduce_s(p, SIZE, LATENCY_S, BANDWIDTH)
    assert took_s(network([BANDWIDTH] * p)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("p", HOSTS)
def test_among_equals_the_cost_is_the_closed_form(p):
    check_cost(p)


@pytest.mark.parametrize("size_bytes", [1, 1001, SIZE])
@pytest.mark.parametrize("p", [1, *HOSTS])
def test_a_ring_alone_takes_what_its_messages_take(p, size_bytes):
    """With any links, and also with blocks that differ by a byte or are empty."""
    links = [BANDWIDTH * (1 + 7 * host % 5) for host in range(p)]
    expected = took_s(network(links), size_bytes)
    assert ring_alone_s(links, size_bytes, LATENCY_S) == pytest.approx(expected, rel=1e-9)
    assert p == 1 or ring_alone_s(links, size_bytes, 2 * LATENCY_S) > expected


@pytest.mark.parametrize("p", HOSTS[1:])
def test_messages_without_dependencies_are_caught(p, monkeypatch):
    """All messages share the links at once."""
    original = collectives.Message
    monkeypatch.setattr(collectives, "Message", lambda *fields: original(*fields[:3], ()))
    with pytest.raises(AssertionError):
        check_cost(p)


def test_a_sum_of_one_host_ends_through_the_loop():
    alone, ended = network([BANDWIDTH]), []
    ring_allreduce(alone, [0], SIZE, ended.append, "argument")
    assert ended == []
    alone.loop.run()
    assert (ended, alone.loop.now_s) == (["argument"], 0.0)


@pytest.mark.parametrize("p", HOSTS)
def test_a_slower_host_slows_the_ring_to_its_own_pace(p):
    """All but one block pass through each of its links twice, one at a time."""
    slow = took_s(network([BANDWIDTH] * (p - 1) + [BANDWIDTH / 10]))
    assert slow >= 2 * (p - 1) * SIZE / p / (BANDWIDTH / 10) * (1 - 1e-12)
    assert slow <= ring_allreduce_s(p, SIZE, LATENCY_S, BANDWIDTH / 10) * (1 + 1e-12)


def test_a_slower_host_hurts_wherever_it_is():
    equal = took_s(network([BANDWIDTH] * 6))
    for slow in range(6):
        links = [BANDWIDTH / 2 if host == slow else BANDWIDTH for host in range(6)]
        assert equal < took_s(network(links)) <= 2 * equal


def check_contention(p, bandwidths):
    """Two at once take as long as one at half the bandwidth; latencies are not shared."""
    both = took_s(network(bandwidths), copies=2)
    assert both == pytest.approx(ring_allreduce_s(p, SIZE, LATENCY_S, BANDWIDTH / 2), rel=1e-9)


@pytest.mark.parametrize("p", HOSTS)
def test_two_at_once_take_twice_the_bandwidth_and_no_more_latency(p):
    check_contention(p, [BANDWIDTH] * p)


def test_unshared_links_are_caught():
    with pytest.raises(AssertionError):
        check_contention(4, [math.inf] * 4)


def check_ring(p, messages, blocks):
    """Carry out the messages on sets of contributors per block: at the end every host has all contributions."""
    has = [[{host} for _ in range(p)] for host in range(p)]  # host, block -> contributors
    for number, (source, target, size_bytes, after) in enumerate(messages):
        step, block = number // p, (source - number // p) % p
        assert size_bytes == blocks[block]
        if step:  # the block to forward has arrived, and its link is free
            ways = {(messages[earlier].source, messages[earlier].target) for earlier in after}
            assert ways == {((source - 1) % p, source), (source, target)}
            assert all(earlier // p == step - 1 for earlier in after)
        has[target][block] = has[target][block] | has[source][block] if step < p - 1 else has[source][block]
    assert all(contributions == set(range(p)) for blocks in has for contributions in blocks)


@pytest.mark.parametrize("p", HOSTS)
def test_a_ring_reduces_and_gathers_every_block(p):
    messages = ring(range(p), p * p // 2)
    blocks = [message.size_bytes for message in messages[:p]]
    check_ring(p, messages, blocks)
    with pytest.raises(AssertionError):
        check_ring(p, messages[:-p], blocks)  # one step less
    with pytest.raises(AssertionError):
        check_ring(p, [message._replace(size_bytes=1 + message.size_bytes) for message in messages], blocks)


@pytest.mark.parametrize("size_bytes", [0, 1, 6, 7, 8, 1000])
def test_blocks_are_as_even_as_whole_bytes_allow(size_bytes):
    first = [message.size_bytes for message in ring(range(7), size_bytes)[:7]]
    assert sum(first) == size_bytes
    assert max(first) - min(first) <= 1


def test_only_the_given_hosts_take_part():
    links = [1.0, BANDWIDTH, 1.0, BANDWIDTH, 1.0]
    net, ends = network(links), []
    ring_allreduce(net, [3, 1], SIZE, lambda: ends.append(net.loop.now_s))
    net.loop.run()
    assert ends == [pytest.approx(ring_allreduce_s(2, SIZE, LATENCY_S, BANDWIDTH))]
