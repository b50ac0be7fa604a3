"""What lies between workers, and what it takes."""

import pytest

from hpcsync.job_cluster import Network
from hpcsync.simulator.collectives import ring_allreduce_s
from hpcsync.simulator.links import Links
from hpcsync.simulator.loop import Loop

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


@pytest.mark.parametrize(("n_workers", "sent"), [(1, 0), (2, SIZE), (4, SIZE * 3 // 2), (3, SIZE * 4 // 3)])
def test_what_a_worker_sends_in_a_ring(n_workers, sent):
    assert Links(Loop(), None, n_workers, SIZE).all_reduce_bytes == sent
