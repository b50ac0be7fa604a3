"""Rank orders, as if every two ranks had a host of their own."""

from __future__ import annotations

import socket

import pytest
from mpi4py import MPI

from hpcsync.config.cluster import Cluster
from hpcsync.mpi.transport.node_topology import arranged


@pytest.fixture
def host(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"h{comm.rank // 2}"
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    return name


def test_servers_are_on_hosts_of_their_own(comm: MPI.Intracomm, host: str) -> None:
    servers = min((comm.size + 1) // 2, comm.size - 1)  # as many as there are hosts, if there is a worker then
    if servers == 0:
        pytest.skip("needs 2 ranks")
    cluster = Cluster(servers=servers, workers=comm.size - servers, placement="spread")
    order = arranged(comm, cluster)
    hosts, ranks = order.allgather(host), order.allgather(comm.rank)
    assert ranks[0] == 0
    assert len(set(hosts[:servers])) == servers
    assert ranks[servers:] == sorted(ranks[servers:])
    if order is not comm:
        order.Free()


def test_packed_servers_are_the_first_ranks(comm: MPI.Intracomm, host: str) -> None:
    assert arranged(comm, Cluster(servers=1, workers=max(1, comm.size - 1))) is comm
