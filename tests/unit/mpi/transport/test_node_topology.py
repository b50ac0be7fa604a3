"""Rank order that spreads servers over hosts, compared with every other choice of servers; cores of ranks."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from mpi4py import MPI

from hpcsync.api.ranks import _share_cores
from hpcsync.config.errors import JobError
from hpcsync.mpi.transport import node_topology
from hpcsync.mpi.transport.backoff import CROWDED_SPIN_S, SPIN_S, Backoff
from hpcsync.mpi.transport.in_memory import World
from hpcsync.mpi.transport.node_topology import colocated, cores_of_rank, spread
from hpcsync.mpi.transport.thread_ranks import run

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


# ---- servers on the nodes of workers ----


def choices(hosts: Sequence[str], n_servers: int) -> list[tuple[int, ...]]:
    """Every choice of servers, rank 0 among them, that leaves each a rank of its host for a worker."""
    each = ((0, *others) for others in itertools.combinations(range(1, len(hosts)), n_servers - 1))
    ranks = Counter(hosts)
    return [found for found in each if all(2 * n <= ranks[host] for host, n in count(hosts, found).items())]


def count(hosts: Sequence[str], ranks: Sequence[int]) -> Counter[str]:
    return Counter(hosts[rank] for rank in ranks)


def check_pairs(order: Order) -> None:
    for n in range(2, 7):
        for hosts in itertools.product("abc", repeat=n):
            for n_servers in range(1, n // 2 + 1):
                if not (possible := choices(hosts, n_servers)):
                    with pytest.raises(JobError, match="nodes must have two ranks"):
                        order(hosts, n_servers)
                    continue
                found = order(hosts, n_servers)
                servers, workers = found[:n_servers], found[n_servers:]
                assert sorted(found) == list(range(n))
                assert found[0] == 0
                assert all(hosts[a] == hosts[b] for a, b in zip(servers, workers, strict=False))
                assert loads(hosts, servers) == min(loads(hosts, choice) for choice in possible)


def test_every_server_has_a_worker_on_its_host() -> None:
    check_pairs(colocated)


def alone(hosts: Sequence[str], n_servers: int) -> list[int]:
    """The workers in their order, not in that of the servers."""
    order = colocated(hosts, n_servers)
    return [*order[:n_servers], *sorted(order[n_servers:])]


def on_as_few_as_possible(hosts: Sequence[str], n_servers: int) -> list[int]:
    """Pairs from one host as long as it has any."""
    colocated(hosts, n_servers)
    ranks = [rank for host in dict.fromkeys(hosts) for rank in range(len(hosts)) if hosts[rank] == host]
    pairs = [pair for pair in zip(ranks[::2], ranks[1::2], strict=False) if hosts[pair[0]] == hosts[pair[1]]]
    first = [pair[i] for i in (0, 1) for pair in pairs[:n_servers]]
    return [*first, *(rank for rank in range(len(hosts)) if rank not in first)]


@pytest.mark.parametrize("order", [spread, alone, on_as_few_as_possible])
def test_servers_without_their_worker_are_caught(order: Order) -> None:
    """The negative control."""
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_pairs(order)


def test_a_server_and_a_worker_on_each_of_two_nodes() -> None:
    assert colocated(["n1", "n1", "n2", "n2"], 2) == [0, 2, 1, 3]
    assert colocated(["n1", "n2", "n1", "n2"], 2) == [0, 1, 2, 3]


# ---- cores ----

ALONE = [{0, 1, 2, 3}, {4, 5, 6, 7}]  # each rank bound to cores of its own, as by srun --cpus-per-task
TOGETHER = [{0, 1, 2, 3}] * 2
NESTED = [{0, 1, 2}, {0}]  # the first core is divided


@pytest.mark.parametrize(
    ("bound", "nodes", "cores"),
    [
        (ALONE, [0, 0], [4, 4]),
        (TOGETHER, [0, 0], [2, 2]),
        (TOGETHER, [0, 1], [4, 4]),
        (NESTED, [0, 0], [Fraction(5, 2), Fraction(1, 2)]),
        ([{0}] * 3, [0, 0, 1], [Fraction(1, 2), Fraction(1, 2), 1]),
    ],
)
def test_cores_are_divided_among_the_ranks_that_may_use_them(
    bound: list[set[int]], nodes: list[int], cores: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks: dict[int, int] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: bound[ranks[threading.get_ident()]])

    def on_rank(comm: Any) -> tuple[Fraction, float]:
        ranks[threading.get_ident()] = comm.rank
        return cores_of_rank(comm), Backoff(comm)._spin_s

    found = run(len(bound), on_rank, world=World(len(bound), nodes=nodes))
    assert found == [(n, SPIN_S if n >= 1 else CROWDED_SPIN_S) for n in cores]


@pytest.mark.parametrize(("cores", "n_threads"), [(Fraction(4), 4), (Fraction(5, 2), 2), (Fraction(1, 3), 1)])
def test_a_worker_has_a_thread_for_each_of_its_cores(
    cores: Fraction, n_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(node_topology, "cores_of_rank", lambda comm: cores)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _share_cores(MPI.COMM_SELF, is_server=False)
    _share_cores(MPI.COMM_SELF, is_server=True)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    _share_cores(MPI.COMM_SELF, is_server=False)
    assert chosen == [n_threads, 1]
