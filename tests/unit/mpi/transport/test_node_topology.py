"""Rank order that spreads servers over hosts, compared with every other choice of servers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from hpcsync.mpi.transport.node_topology import spread

Order = Callable[[Sequence[str], int], list[int]]


def loads(hosts: Sequence[str], servers: Sequence[int]) -> list[int]:
    """How many servers the hosts have, the most first: of two such lists the smaller one is better."""
    return sorted(Counter(hosts[rank] for rank in servers).values(), reverse=True)


def check(order: Order) -> None:
    """Every run of up to five ranks on up to three hosts, in every distribution of ranks by the launcher."""
    for n in range(1, 6):
        for hosts in itertools.product("abc", repeat=n):
            for n_servers in range(1, n):
                found = order(hosts, n_servers)
                servers, workers = found[:n_servers], found[n_servers:]
                assert sorted(found) == list(range(n))
                assert found[0] == 0
                assert workers == sorted(workers)
                choices = ((0, *others) for others in itertools.combinations(range(1, n), n_servers - 1))
                assert loads(hosts, servers) == min(loads(hosts, choice) for choice in choices)


def test_servers_share_hosts_as_little_as_possible() -> None:
    check(spread)


def packed(hosts: Sequence[str], n_servers: int) -> list[int]:
    return list(range(len(hosts)))


def from_the_other_end(hosts: Sequence[str], n_servers: int) -> list[int]:
    return [0, *spread(hosts[1:][::-1], n_servers)]


def crowding_the_first(hosts: Sequence[str], n_servers: int) -> list[int]:
    """One on each host, and all that are left on the first."""
    servers = [hosts.index(host) for host in dict.fromkeys(hosts)]
    servers = (servers + [rank for rank in range(len(hosts)) if rank not in servers])[:n_servers]
    return [*servers, *(rank for rank in range(len(hosts)) if rank not in servers)]


@pytest.mark.parametrize("order", [packed, from_the_other_end, crowding_the_first])
def test_other_orders_are_caught(order: Order) -> None:
    """The negative control."""
    with pytest.raises(AssertionError):
        check(order)


def test_two_nodes_of_two() -> None:
    assert spread(["n1", "n1", "n2", "n2"], 2) == [0, 2, 1, 3]
    assert spread(["n1", "n2", "n1", "n2"], 3) == [0, 1, 2, 3]
