"""The four steps between computations: closed forms over links, and given durations."""

import pytest

from hpcsync.config.cluster import Network as NetworkTable
from hpcsync.core.roles import Roles
from hpcsync.simulator.event_loop import Loop
from hpcsync.simulator.server_transfers import Networked, Steps, Timed

LATENCY_S = 1e-3
RATE = 1e9 / 8  # bytes a second of 1 Gbit/s
SIZE = 1_000_000
TRANSFER_S = SIZE / RATE


def network(loop, servers=1, workers=1, **table):
    table = NetworkTable(**{"bandwidth_gbit": 1.0, "latency_us": 1e6 * LATENCY_S, **table})
    return Networked(loop, table, Roles(servers, workers), [SIZE // servers] * servers)


def put(transfers, worker, then):
    transfers.push(worker, 1, [SIZE], then)


def read(transfers, worker, then):
    transfers.pull(worker, 1, then)


class Heard:
    """Records when a step and the previous one ended."""

    def __init__(self, loop):
        self.loop = loop
        self.at = []

    def __call__(self, worker, before_s):
        self.at.append((worker, before_s, self.loop.now_s))


def test_a_put_is_acknowledged_before_the_push_info():
    loop = Loop()
    heard = Heard(loop)
    network(loop).push(0, 1, [SIZE], heard)
    loop.run()
    put_s = 2 * LATENCY_S + TRANSFER_S
    assert heard.at == [(0, pytest.approx(put_s, rel=1e-12), pytest.approx(put_s + LATENCY_S, rel=1e-12))]


def test_a_put_takes_the_longer_the_more_is_sent():
    loop = Loop()
    heard = Heard(loop)
    network(loop).push(0, 1, [SIZE // 4], heard)
    loop.run()
    assert heard.at[0][1] == pytest.approx(2 * LATENCY_S + TRANSFER_S / 4, rel=1e-12)


def test_weights_are_read_once_they_are_granted():
    loop = Loop()
    heard = Heard(loop)
    network(loop).pull(0, 1, heard)
    loop.run()
    granted_s = LATENCY_S
    assert heard.at == [(0, granted_s, pytest.approx(granted_s + 2 * LATENCY_S + TRANSFER_S, rel=1e-12))]


def test_a_stop_is_a_message_as_any_other():
    loop = Loop()
    heard = Heard(loop)
    transfers = network(loop)
    transfers.stop(0, 1, heard)
    transfers.message(0, 1, heard)
    loop.run()
    assert heard.at == [(0, 0.0, LATENCY_S)] * 2


@pytest.mark.parametrize("workers", [2, 3, 7])
@pytest.mark.parametrize("step", [put, read])
def test_workers_contend_for_the_server(step, workers):
    """A parameter server's link carries everything: n simultaneous transfers take n times as long."""
    loop = Loop()
    heard = Heard(loop)
    transfers = network(loop, workers=workers)
    for worker in range(workers):
        step(transfers, worker, heard)
    loop.run()
    assert [now_s for _, _, now_s in heard.at] == pytest.approx([3 * LATENCY_S + workers * TRANSFER_S] * workers)
    alone = Loop()
    one = Heard(alone)
    step(network(alone, workers=workers), 0, one)
    alone.run()
    assert one.at[0][2] < 0.8 * heard.at[0][2]  # the first is the time without sharing


def test_pushes_and_pulls_do_not_meet():
    """Links are full duplex."""
    loop = Loop()
    heard = Heard(loop)
    transfers = network(loop, workers=2)
    transfers.push(0, 1, [SIZE], heard)
    transfers.pull(1, 1, heard)
    loop.run()
    assert [now_s for _, _, now_s in heard.at] == pytest.approx([3 * LATENCY_S + TRANSFER_S] * 2)


@pytest.mark.parametrize("servers", [2, 4])
def test_servers_share_what_one_would_carry(servers):
    loop = Loop()
    heard = Heard(loop)
    transfers = network(loop, servers=servers, workers=servers)
    for worker in range(servers):
        transfers.push(worker, 1, [SIZE // servers] * servers, heard)
    loop.run()
    assert [now_s for _, _, now_s in heard.at] == pytest.approx([3 * LATENCY_S + TRANSFER_S] * servers)


def test_the_other_servers_grants_follow_a_command():
    loop = Loop()
    heard = Heard(loop)
    transfers = network(loop, servers=2)
    transfers.pull(0, 1, heard)
    transfers.stop(0, 1, heard)
    loop.run()
    stopped, read = heard.at
    assert stopped[2] == 2 * LATENCY_S
    assert read[1:] == (2 * LATENCY_S, pytest.approx(4 * LATENCY_S + TRANSFER_S))


def test_a_slow_workers_link_slows_only_itself():
    loop = Loop()
    heard = Heard(loop)
    transfers = network(loop, workers=2, bandwidth_gbit=[1.0, 0.1], server_bandwidth_gbit=10.0)
    for worker in (0, 1):
        transfers.push(worker, 1, [SIZE], heard)
    loop.run()
    assert heard.at[0][0::2] == (0, pytest.approx(3 * LATENCY_S + TRANSFER_S))
    assert heard.at[1][0::2] == (1, pytest.approx(3 * LATENCY_S + 10 * TRANSFER_S))


def test_timed_steps_take_their_durations():
    loop = Loop()
    heard = Heard(loop)
    given = {(0, 1): Steps(1.0, 2.0, 4.0, 8.0), (1, 3): Steps(0.1, 0.2, 0.4, 0.8)}
    transfers = Timed(loop, lambda worker, iteration: given[worker, iteration])
    for worker, iteration in given:
        transfers.push(worker, iteration, [SIZE], heard)
        transfers.pull(worker, iteration, heard)
        transfers.stop(worker, iteration, heard)
        transfers.message(worker, iteration, heard)
    loop.run()
    assert sorted(heard.at) == [
        (0, 0.0, 2.0), (0, 0.0, 4.0), (0, 1.0, 3.0), (0, 4.0, 12.0),
        (1, 0.0, 0.2), (1, 0.0, 0.4), (1, 0.1, pytest.approx(0.3)), (1, 0.4, pytest.approx(1.2)),
    ]  # fmt: skip


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_servers_share_the_links_of_the_workers_on_their_nodes(nodes):
    """With a server and a worker on every node, each link carries what all other nodes' shards need, and no more.

    The control is the same number of servers on nodes of their own: every worker's link then carries the whole model.
    """
    for step in (put_all, read):
        ended = {}
        for colocated in (True, False):
            loop = Loop()
            heard = Heard(loop)
            table = NetworkTable(bandwidth_gbit=1.0, latency_us=1e6 * LATENCY_S)
            shards = [SIZE // nodes] * nodes
            transfers = Networked(loop, table, Roles(nodes, nodes), shards, colocated=colocated)
            for worker in range(nodes):
                step(transfers, worker, heard)
            loop.run()
            ended[colocated] = [now_s for _, _, now_s in heard.at]
        latencies = (3 if step is put_all else 4) * LATENCY_S
        share_s = sum(shards[1:]) / RATE
        assert ended[True] == pytest.approx([latencies + share_s] * nodes)
        assert ended[False] == pytest.approx([latencies + sum(shards) / RATE] * nodes)


def put_all(transfers, worker, then):
    transfers.push(worker, 1, transfers._shard_bytes, then)


def test_a_put_and_a_push_in_the_same_direction_share_a_link():
    """Worker 0's reads and what worker 1 puts to server 0 both come down node 0's link."""
    loop = Loop()
    heard = Heard(loop)
    table = NetworkTable(bandwidth_gbit=1.0, latency_us=0.0)
    transfers = Networked(loop, table, Roles(2, 2), [SIZE, SIZE], colocated=True)
    transfers.push(1, 1, [SIZE, SIZE], heard)
    transfers.pull(0, 1, heard)
    loop.run()
    assert [now_s for _, _, now_s in heard.at] == pytest.approx([2 * TRANSFER_S] * 2)
