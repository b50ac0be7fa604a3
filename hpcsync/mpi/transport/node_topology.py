"""Ranks and nodes: whether ranks share a node, their cores, and the rank orders that spread servers over nodes.

The first ranks of a communicator are its servers, so placing servers means reordering the communicator.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar

from mpi4py import MPI

from hpcsync.config.cluster import Cluster
from hpcsync.config.errors import JobError

T = TypeVar("T")


def spread(hosts: Sequence[str], n_servers: int) -> list[int]:
    """Return a rank order with the servers in front that shares hosts among servers as little as possible.

    Parameters
    ----------
    hosts
        Host name of each rank.
    n_servers
        Number of servers.

    Returns
    -------
    list of int
        Ranks in their new order. Rank 0 stays first. The servers are taken host after host, the first free rank of each
        host that has fewest servers so far; the workers keep their order.
    """
    free = _ranks_of(hosts)
    servers: list[int] = []
    while len(servers) < n_servers:  # one pass over the hosts
        servers += [ranks.pop(0) for ranks in free.values() if ranks]
    servers = servers[:n_servers]
    return [*servers, *(rank for rank in range(len(hosts)) if rank not in servers)]


def colocated(hosts: Sequence[str], n_servers: int) -> list[int]:
    """Return a rank order with the servers in front and server i on the host of worker i.

    Parameters
    ----------
    hosts
        Host name of each rank.
    n_servers
        Number of servers, at most half of the ranks.

    Returns
    -------
    list of int
        Ranks in their new order. Rank 0 stays first. The servers share hosts among each other as little as possible;
        the workers without a server keep their order.

    Raises
    ------
    JobError
        If too few hosts have two ranks for a server and its worker.
    """
    free = _ranks_of(hosts)
    pairs: list[tuple[int, int]] = []
    while len(pairs) < n_servers:  # one pass over the hosts
        found = [(ranks.pop(0), ranks.pop(0)) for ranks in free.values() if len(ranks) > 1]
        pairs += found
        if not found or pairs[0][0] != 0:
            raise JobError(
                f"cluster.colocated = true: nodes must have two ranks for each of {n_servers} servers and its worker, "
                f"one of them rank 0; there are {', '.join(_counted(hosts))}"
            )
    servers, workers = ([pair[i] for pair in pairs[:n_servers]] for i in (0, 1))
    return [*servers, *workers, *(rank for rank in range(len(hosts)) if rank not in (*servers, *workers))]


def _ranks_of(hosts: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks of each host, that of rank 0 first."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return ranks


def _counted(hosts: Sequence[str]) -> list[str]:
    """Return the number of ranks on each host, as text."""
    return [f"{len(ranks)} on {host}" for host, ranks in _ranks_of(hosts).items()]


def arranged(comm: MPI.Intracomm, cluster: Cluster) -> MPI.Intracomm:
    """Return a communicator with the ranks in the order of `cluster.placement` or `cluster.colocated`; collective.

    Rank 0 stays the same. `comm` itself is returned where nothing changes.

    Raises
    ------
    JobError
        On all ranks, if servers cannot be on the nodes of workers.
    """
    orders = {"packed": None, "spread": spread if cluster.servers > 1 else None}
    order_of = colocated if cluster.colocated else orders[cluster.placement]
    if order_of is None or cluster.ranks != comm.size:
        return comm
    order = order_of(comm.allgather(socket.gethostname()), cluster.servers)
    return comm.Split(0, order.index(comm.rank))  # type: ignore[return-value]


def on_one_node(comm: MPI.Comm) -> bool:
    """Return whether all ranks can share memory; collective."""
    return ranks_here(comm) == comm.size


def ranks_here(comm: MPI.Comm) -> int:
    """Return the number of ranks on this rank's node; collective."""
    return len(on_this_node(comm))


def on_this_node(comm: MPI.Comm) -> list[int]:
    """Return the ranks on this rank's node; collective."""
    return _gathered_here(comm, comm.rank)


def cores_of_rank(comm: MPI.Comm) -> Fraction:
    """Return how many cores this rank has; collective.

    The launcher may have bound each rank to cores of its own. A core is divided among the ranks that may use it.
    """
    mine = os.sched_getaffinity(0)
    users = Counter(core for cores in _gathered_here(comm, mine) for core in cores)
    return sum((Fraction(1, users[core]) for core in mine), Fraction(0))


def _gathered_here(comm: MPI.Comm, of_rank: T) -> list[T]:
    """Return what each rank of this rank's node gives; collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    gathered: list[T] = node.allgather(of_rank)
    node.Free()
    return gathered
