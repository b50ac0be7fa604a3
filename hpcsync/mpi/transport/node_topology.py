"""Ranks and nodes: whether ranks share a node, and the rank order that spreads servers over nodes.

The first ranks of a communicator are its servers, so placing servers means reordering the communicator.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from mpi4py import MPI

from hpcsync.config.cluster import Cluster


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
    free: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        free.setdefault(host, []).append(rank)
    servers: list[int] = []
    while len(servers) < n_servers:  # one pass over the hosts
        servers += [ranks.pop(0) for ranks in free.values() if ranks]
    servers = servers[:n_servers]
    return [*servers, *(rank for rank in range(len(hosts)) if rank not in servers)]


def arranged(comm: MPI.Intracomm, cluster: Cluster) -> MPI.Intracomm:
    """Return a communicator with the ranks in the order of `cluster.placement`; collective.

    Rank 0 stays the same. `comm` itself is returned where nothing changes.
    """
    if cluster.placement == "packed" or cluster.servers < 2 or cluster.ranks != comm.size:
        return comm
    order = spread(comm.allgather(socket.gethostname()), cluster.servers)
    return comm.Split(0, order.index(comm.rank))  # type: ignore[return-value]


def on_one_node(comm: MPI.Comm) -> bool:
    """Return whether all ranks can share memory; collective."""
    return bool(comm.allreduce(ranks_here(comm) == comm.size, MPI.LAND))


def ranks_here(comm: MPI.Comm) -> int:
    """Return the number of ranks on this rank's node; collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    size: int = node.size
    node.Free()
    return size
