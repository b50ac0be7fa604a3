"""Training on the mean gradient of all ranks, beside DistributedDataParallel with gloo in the same processes."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcsync.bench.figures import Figure, in_turn
from hpcsync.mpi.collectives.bucket_reducer import BucketReducer
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.node_topology import on_one_node
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.optimizers import OptimizerSpec

BATCH = 8  # small, so that communication dominates
OPTIONS: dict[str, float] = {"momentum": 0.9}
LR = 1e-3
WARM_UP = 3  # DistributedDataParallel rebuilds its buckets after the first step
PROBE_S = 1e-4  # between two MPI calls that only make progress
DDP_BUCKET_BYTES = 25 << 20  # its default
AIM = 1.0


class Net(NamedTuple):
    """Perceptron of equal layers; `steps` is the number of steps per repetition."""

    layers: int
    width: int
    steps: int

    def build(self) -> nn.Module:
        """Return the network with weights that are equal on all ranks."""
        torch.manual_seed(0)
        stages = [stage for _ in range(self.layers) for stage in (nn.Linear(self.width, self.width), nn.ReLU())]
        return nn.Sequential(*stages[:-1])


NETS = (Net(4, 158, 50), Net(8, 790, 4), Net(10, 2450, 1))


def measure(
    comm: MPI.Intracomm, ranks: Sequence[int] = (1, 2, 3, 4), nets: Sequence[Net] = NETS, repetitions: int = 5
) -> list[Figure]:
    """Measure training by the first ranks of `comm`, all on this node; the other ranks wait with backoff.

    Returns
    -------
    list of Figure
        On rank 0; empty on the others.
    """
    backoff, figures = Backoff(comm), []
    with gloo(comm):
        for n_ranks in ranks:
            group = dist.new_group(range(n_ranks))  # collective over all ranks
            part = comm.Split(0 if comm.rank < n_ranks else MPI.UNDEFINED)
            if part != MPI.COMM_NULL:
                assert isinstance(part, MPI.Intracomm)
                for net in nets:
                    figures += _measure(part, group, net, repetitions)
                part.Free()
            backoff.barrier()
    return figures if comm.rank == 0 else []


@contextlib.contextmanager
def gloo(comm: MPI.Intracomm) -> Iterator[None]:
    """Create torch's own process group of all ranks."""
    here = on_one_node(comm)
    if here and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host name may not resolve
    host = comm.bcast("127.0.0.1" if here else socket.gethostname())
    first = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
    port = comm.bcast(first.port if first else 0)
    store = first or dist.TCPStore(host, port)
    with ThreadPoolExecutor(1) as beside:
        joining = beside.submit(dist.init_process_group, "gloo", store=store, rank=comm.rank, world_size=comm.size)
        _progress_until(comm, joining.done)
    joining.result()
    yield
    leave_mpi(comm)  # no rank needs the store any more; a rank that fails ends the job instead
    dist.destroy_process_group()


def leave_mpi(comm: MPI.Comm, group: Any = None) -> None:
    """Wait until all ranks of the group have done so; collective, and due before they block outside of MPI.

    A collective of MPI may return on a rank whose messages are still to be sent, and are sent when it calls MPI again.
    """
    _progress_until(comm, dist.barrier(group=group, async_op=True).is_completed)


def _progress_until(comm: MPI.Comm, done: Callable[[], bool]) -> None:
    while not done():
        comm.Iprobe()
        time.sleep(PROBE_S)


def _measure(comm: MPI.Intracomm, group: Any, net: Net, repetitions: int) -> list[Figure]:
    model, peer = FlatModel(net.build()), net.build()
    batch = torch.randn(BATCH, net.width, generator=torch.Generator().manual_seed(comm.rank))
    with BucketReducer(comm, model) as reducer:
        other = np.ones(model.size, np.float32)
        leave_mpi(comm, group)
        kinds = (
            our_step(model, reducer, batch),
            ddp_step(DistributedDataParallel(peer, process_group=group, gradient_as_bucket_view=True), batch),
            reducer.finish,
            gloo_all_reduce(torch.zeros(model.size), group),
            lambda: np.copyto(other, model.weights.numpy()),
        )
        for call in kinds[:2]:
            seconds(comm, call, WARM_UP, group)
        times = in_turn(repetitions, *(lambda call=call: seconds(comm, call, net.steps, group) for call in kinds))
    return _figures(comm.size, model.size, *times)


def our_step(flat: FlatModel, reducer: BucketReducer, batch: torch.Tensor) -> Callable[[], None]:
    """Return a training step on the mean of hpcsync."""
    parameter = nn.Parameter(flat.weights)
    parameter.grad = flat.gradient
    optimizer = OptimizerSpec("sgd", LR, OPTIONS).build(parameter)

    def step() -> None:
        flat.drop_gradient()
        flat.model(batch).square().mean().backward()
        reducer.finish()
        optimizer.step()

    return step


def ddp_step(model: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    """Return a training step as users of DistributedDataParallel write it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, **OPTIONS)  # type: ignore[arg-type]

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def gloo_all_reduce(vector: torch.Tensor, group: Any) -> Callable[[], None]:
    """Return an all-reduce of the vector in the buckets that DistributedDataParallel would use."""
    buckets = vector.split(DDP_BUCKET_BYTES // vector.element_size())

    def all_reduce() -> None:
        for bucket in buckets:
            dist.all_reduce(bucket, group=group)

    return all_reduce


def seconds(comm: MPI.Intracomm, call: Callable[[], Any], times: int, group: Any = None) -> float:
    """Return the duration of one call, which may use MPI or gloo, on the slowest rank, in seconds; collective."""
    leave_mpi(comm, group)
    begin_s = time.perf_counter()
    for _ in range(times):
        call()
    return comm.allreduce(time.perf_counter() - begin_s, MPI.MAX) / times


def _figures(
    n_ranks: int,
    size: int,
    ours: Sequence[float],
    ddp: Sequence[float],
    reduce: Sequence[float],
    gloo: Sequence[float],
    copy: Sequence[float],
) -> list[Figure]:
    """Return the figures of one network; durations are in seconds."""
    together = f"{n_ranks} rank{'s' if n_ranks > 1 else ''}"
    what = f"{size / 1e6:.1f} million float32, {together}"
    samples, n_bytes = n_ranks * BATCH, 4e-9 * size
    moved = 2 * (n_ranks - 1) / n_ranks * n_bytes
    figures = [
        Figure(f"train {what}", "samples/s", _rates(samples, ours), "DDP, gloo", _rates(samples, ddp), AIM),
    ]
    if n_ranks > 1:
        bus = _rates(moved, reduce)
        figures += [
            Figure(f"all-reduce {what}", "GB/s", bus, "gloo", _rates(moved, gloo), AIM),
            Figure(f"all-reduce {what}", "GB/s", bus, "numpy.copyto on all", _rates(n_bytes, copy)),
        ]
    return figures


def _rates(amount: float, seconds: Sequence[float]) -> list[float]:
    return [amount / one for one in seconds]
