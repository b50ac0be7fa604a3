"""Benchmarks that need ranks, at sizes that take no time. Speeds are not asserted.

Those beside DistributedDataParallel run on three ranks of one MPI only: it loads torch's compiler, for two seconds on
every rank.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from hpcsync.bench import allreduce, gpu_training, latency, round_trip, transfers
from hpcsync.mpi.collectives.bucket_reducer import BucketReducer
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.training.flat_model import FlatModel


def positive(figures):
    return all(value > 0 for figure in figures for value in (*figure.values, *figure.limits))


def test_transfers(comm, needs, transport, monkeypatch):
    needs(2)
    monkeypatch.setattr(transfers, "LOOP_BYTES", {"cpu": 1})
    figures = transfers.measure(comm, transport, sizes_mb=(0.001, 0.01), repetitions=2)
    assert len(figures) == (4 if comm.rank == 1 else 0)
    assert positive(figures)


def test_transfers_of_a_gpu_are_compared_with_both_kinds_of_copy():
    here = torch.full((3,), 7, dtype=torch.uint8)
    copies = transfers.gpu_copies(here)
    assert list(copies) == ["copy on the GPU", "copy to page-locked host memory and back"]
    for copy in copies.values():
        copy()
    assert here.tolist() == [7, 7, 7]


def test_round_trip(comm, needs, transport):
    needs(2)
    figures = round_trip.measure(comm, transport, sizes=(100, 3), repetitions=2)
    assert len(figures) == (4 if comm.rank == 1 else 0)
    assert positive(figures)


def test_a_model_too_large_for_the_gpu_is_reported_without_values(comm, needs, monkeypatch):
    """Either rank may have too little room."""
    needs(2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((1 + comm.rank) * 10**9, 80 * 10**9))
    figures = round_trip.measure(comm, Transport("ipc", torch.device("cuda", 0)), sizes=(25_000_000,))
    what = "25,000,000 float32: needs 1.2 GB on the GPU, 1.0 GB are free"
    assert [(figure.what, figure.values) for figure in figures] == ([(what, [])] if comm.rank == 1 else [])


@pytest.mark.parametrize("transport", [HOST, Transport("staged")])
def test_latency(comm, needs, transport):
    """Other windows are compared with the host's."""
    needs(2)
    workers = (1, comm.size - 1)
    figures = latency.measure(comm, transport, workers, size=3, round_trips=5, repetitions=2)
    together = [f"3 float32, {n} worker{'s' if n > 1 else ''} together" for n in workers]
    measured = [
        what for rate in together for what in ([rate] if transport == HOST else [rate, f"an iteration, {rate}"])
    ]
    assert [figure.what for figure in figures] == (measured if comm.rank == 0 else [])
    assert positive(figures)


@pytest.mark.once
def test_training(comm, only, monkeypatch):
    """Two workers train, with a server where the paradigm has one."""
    only(3)
    monkeypatch.setattr(gpu_training, "STEPS", 1)
    monkeypatch.setattr(gpu_training, "WARM_UP", 1)
    figures = gpu_training.measure(comm, repetitions=2)
    assert len(figures) == (len(gpu_training.PARADIGMS) + 2 if comm.rank == 0 else 0)
    assert all(len(figure.values) == 2 for figure in figures)
    assert positive([figure for figure in figures if figure.unit == "ms"])


@pytest.mark.once
def test_allreduce(comm, only):
    """Some ranks train and the others wait for them."""
    only(3)
    ranks = tuple(range(1, comm.size + 1))
    figures = allreduce.measure(comm, ranks, nets=(allreduce.Net(2, 3, 2),), repetitions=2)
    assert len(figures) == (3 * comm.size - 2 if comm.rank == 0 else 0)
    assert positive(figures)


@pytest.mark.once
def test_allreduce_trains_as_its_peer_does(comm, only):
    """Otherwise their times would not be comparable."""
    only(3)
    net = allreduce.Net(2, 3, 1)
    flat, peer = FlatModel(net.build()), net.build()
    batch = torch.ones(2, 3) * (comm.rank + 1)
    with allreduce.gloo(comm), BucketReducer(comm, flat) as reducer:
        ours = allreduce.our_step(flat, reducer, batch)
        theirs = allreduce.ddp_step(DistributedDataParallel(peer, gradient_as_bucket_view=True), batch)
        before = flat.weights.clone()
        for _ in range(5):
            ours()
            theirs()
        same = torch.cat([p.detach().flatten() for p in peer.parameters()])
        torch.testing.assert_close(flat.weights, same)
        assert not torch.equal(before, flat.weights)
