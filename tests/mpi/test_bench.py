"""The measurements that need ranks, at sizes at which they take no time. How fast anything is, is not asserted."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from hpcsync.bench import allreduce, latency, round_trip, transfers
from hpcsync.learning.flat import FlatModel
from hpcsync.mpi.reducer import Reducer


def positive(figures):
    return all(value > 0 for figure in figures for value in (*figure.values, *figure.limits))


def test_transfers(comm, needs):
    needs(2)
    figures = transfers.measure(comm, sizes_mb=(0.001, 0.01), repetitions=2)
    assert len(figures) == (4 if comm.rank == 1 else 0)
    assert positive(figures)


def test_round_trip(comm, needs):
    needs(2)
    figures = round_trip.measure(comm, size=100, repetitions=2)
    assert len(figures) == (2 if comm.rank == 1 else 0)
    assert positive(figures)


def test_latency(comm, needs):
    needs(2)
    workers = (1, comm.size - 1)
    figures = latency.measure(comm, workers, size=3, round_trips=5, repetitions=2)
    assert [figure.what for figure in figures] == (
        [f"3 float32, {n} worker{'s' if n > 1 else ''} together" for n in workers] if comm.rank == 0 else []
    )
    assert positive(figures)


def test_allreduce(comm):
    """Of ranks that train and of ranks that wait for them."""
    ranks = tuple(range(1, comm.size + 1))
    figures = allreduce.measure(comm, ranks, nets=(allreduce.Net(2, 3, 2),), repetitions=2)
    assert len(figures) == (3 * comm.size - 2 if comm.rank == 0 else 0)
    assert positive(figures)


def test_allreduce_trains_as_its_peer_does(comm):
    """Else their times could not be compared."""
    net = allreduce.Net(2, 3, 1)
    flat, peer = FlatModel(net.build()), net.build()
    batch = torch.ones(2, 3) * (comm.rank + 1)
    with allreduce._gloo(comm), Reducer(comm, flat) as reducer:
        ours = allreduce._ours(flat, reducer, batch)
        theirs = allreduce._ddp(DistributedDataParallel(peer, gradient_as_bucket_view=True), batch)
        before = flat.weights.clone()
        for _ in range(5):
            ours()
            theirs()
        same = torch.cat([p.detach().flatten() for p in peer.parameters()])
        torch.testing.assert_close(flat.weights, same)
        assert not torch.equal(before, flat.weights)
