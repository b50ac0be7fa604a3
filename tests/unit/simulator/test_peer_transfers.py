"""Links between workers and the durations of transfers."""

import pytest

from hpcsync.config.cluster import Network
from hpcsync.simulator.event_loop import Loop
from hpcsync.simulator.peer_transfers import Links
from tests.unit.simulator.closed_forms import ring_allreduce_s

GBIT, LATENCY_S, SIZE = 125e6, 5e-5, 10**6


def network(**table) -> Network:
    return Network(**{"bandwidth_gbit": 1.0, "latency_us": 50.0, **table})


def times(table, n_workers=4, size=SIZE):
    """Return when a message, a replica and an all-reduce that begin at 1 s are over."""
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


def test_without_a_network_everything_arrives_at_once():
    assert times(None) == {"message": 0.0, "all-reduce": 0.0, "replica": 0.0}


@pytest.mark.parametrize("n_workers", [2, 4, 8])
def test_with_a_network_transfers_take_latency_and_bandwidth(n_workers):
    assert times(network(), n_workers) == pytest.approx(
        {
            "message": LATENCY_S,
            "replica": LATENCY_S + SIZE / GBIT,
            "all-reduce": ring_allreduce_s(n_workers, SIZE, LATENCY_S, GBIT),
        },
        rel=1e-9,
    )


def test_one_worker_does_not_wait():
    assert times(network(), 1) == {"message": pytest.approx(LATENCY_S), "all-reduce": 0.0}


@pytest.mark.parametrize(("n_workers", "sent"), [(1, 0), (2, SIZE), (4, SIZE * 3 // 2), (3, SIZE * 4 // 3)])
def test_what_a_worker_sends_in_a_ring(n_workers, sent):
    assert Links(Loop(), None, n_workers, SIZE).all_reduce_bytes == sent


def ends(begin, table=None, n_workers=4):
    """Return when everything that `begin` starts is over; it is called with the links and a callback."""
    loop, found = Loop(), []
    begin(Links(loop, table, n_workers, SIZE), lambda: found.append(loop.now_s))
    loop.run()
    return found


def test_messages_in_order_share_no_link_with_each_other():
    def in_order(links, over):
        way = links.in_order(0, 1)
        for _ in range(3):
            way.send(SIZE, over)

    def at_once(links, over):
        for _ in range(3):
            links.send(0, 1, over)

    each_s = SIZE / GBIT
    assert ends(in_order, network()) == pytest.approx([LATENCY_S + n * each_s for n in (1, 2, 3)])
    assert ends(at_once, network()) == pytest.approx([LATENCY_S + 3 * each_s] * 3)
    assert ends(in_order) == [0.0] * 3


def test_a_message_in_order_waits_for_its_own_latency():
    def begin(links, over):
        way = links.in_order(0, 1)
        way.send(SIZE, way.send, SIZE, over)

    assert ends(begin, network()) == pytest.approx([2 * (LATENCY_S + SIZE / GBIT)])


def test_some_of_the_workers_have_a_ring_of_their_own():
    def begin(links, over):
        links.all_reduce_among([0, 2, 3, 1], SIZE, over)

    def beside(links, over):
        links.all_reduce_among([0, 1], SIZE, over)
        links.all_reduce_among([2, 3], SIZE, over)

    for n, start in ((4, begin), (2, beside)):
        alone_s = ring_allreduce_s(n, SIZE, LATENCY_S, GBIT)
        assert ends(start, network()) == pytest.approx([alone_s] * (1 if n == 4 else 2), rel=1e-9)
    assert ends(begin) == [0.0]
    assert ends(lambda links, over: links.all_reduce_among([2], SIZE, over), network()) == [0.0]
