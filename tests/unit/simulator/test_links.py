"""What lies between workers: what it takes, and how often it is computed."""

import pytest

from hpcsync.job_cluster import Network
from hpcsync.simulator import links
from hpcsync.simulator.collectives import ring_allreduce, ring_allreduce_s
from hpcsync.simulator.links import Links
from hpcsync.simulator.loop import Loop
from hpcsync.simulator.network import Network as SimulatedNetwork

GBIT, LATENCY_S, SIZE = 125e6, 5e-5, 10**6


def network(**table) -> Network:
    return Network(**{"bandwidth_gbit": 1.0, "latency_us": 50.0, **table})


def times(table, n_workers=4, size=SIZE):
    """When a message, a replica and an all-reduce that begin at 1 s are over."""
    loop = Loop()
    between, found = Links(loop, table, n_workers, size), {}

    def over(what):
        found[what] = loop.now_s - 1.0

    def begin():
        between.message(over, "message")
        between.all_reduce(over, "all-reduce")
        if n_workers > 1:
            between.send(0, 1, over, "replica")

    loop.at(1.0, begin)
    loop.run()
    return found


def test_without_a_network_everything_is_there_at_once():
    assert times(None) == {"message": 0.0, "all-reduce": 0.0, "replica": 0.0}


@pytest.mark.parametrize("n_workers", [2, 4, 8])
def test_with_one_it_takes_latency_and_bandwidth(n_workers):
    assert times(network(), n_workers) == pytest.approx(
        {
            "message": LATENCY_S,
            "replica": LATENCY_S + SIZE / GBIT,
            "all-reduce": ring_allreduce_s(n_workers, SIZE, LATENCY_S, GBIT),
        },
        rel=1e-9,
    )


def test_alone_there_is_nobody_to_wait_for():
    assert times(network(), 1) == {"message": pytest.approx(LATENCY_S), "all-reduce": 0.0}


def test_an_all_reduce_is_the_ring_of_messages_also_where_links_differ():
    gbit = (1.0, 0.25, 2.0)
    loop, ended = Loop(), []
    rates = [rate * GBIT for rate in gbit]
    ring_allreduce(SimulatedNetwork(loop, rates, rates, LATENCY_S), [0, 1, 2], SIZE, lambda: ended.append(loop.now_s))
    loop.run()
    assert times(network(bandwidth_gbit=gbit), 3)["all-reduce"] == pytest.approx(ended[0], rel=1e-9)


def test_a_ring_is_gone_through_once(monkeypatch):
    calls = []
    monkeypatch.setattr(links, "ring_allreduce", lambda *args: calls.append(args))
    between = Links(Loop(), network(), 4, SIZE)
    for _ in range(3):
        between.all_reduce(lambda: None)
    assert len(calls) == 1


@pytest.mark.parametrize(("n_workers", "sent"), [(1, 0), (2, SIZE), (4, SIZE * 3 // 2), (3, SIZE * 4 // 3)])
def test_what_a_worker_sends_in_a_ring(n_workers, sent):
    assert Links(Loop(), None, n_workers, SIZE).all_reduce_bytes == sent
