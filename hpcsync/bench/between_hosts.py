"""Training between hosts, one rank on each: means beside gloo, MPI and the line, and a server's iterations.

The line is a bare TCP connection between two of the hosts.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcsync.bench.allreduce import BATCH, WARM_UP, Net, ddp_step, gloo, gloo_all_reduce, leave_mpi, our_step, seconds
from hpcsync.bench.figures import Figure, in_turn
from hpcsync.mpi.collectives.bucket_reducer import BucketReducer
from hpcsync.training.flat_model import FlatModel

NETS = (Net(4, 158, 4), Net(4, 500, 2), Net(4, 1000, 1))  # 0.4, 4 and 16 MB
MEAN_AIMS = (1.3, 1.15, 1.15)  # of the line
BACKWARD_SHARE = 0.6  # padding of a backward pass, as a share of the line's seconds
SERVER_SIZE = 1_000_000  # parameters
SERVER_AIM = 1.05
FIRST, COUNTED = 3, 12  # iterations that warm up, and that count


class Line:
    """TCP connection between rank 0 and the first rank on another host; collective, within `gloo`.

    Parameters
    ----------
    comm
        Ranks on at least two hosts.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        hosts = comm.allgather(socket.gethostname())
        self._comm = comm
        elsewhere = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
        if not elsewhere:
            told = f"all {comm.size} ranks are on {hosts[0]}; MPIEXEC must place them on several, as --map-by node does"
            raise SystemExit(told if comm.rank == 0 else 1)
        self._other = elsewhere[0]
        self._connection: socket.socket | None = None
        server = None
        if comm.rank == 0:
            server = socket.create_server((hosts[0], 0))
            comm.send(server.getsockname()[:2], self._other)
        elif comm.rank == self._other:
            self._connection = socket.create_connection(comm.recv(source=0))
        leave_mpi(comm)
        if server is not None:
            self._connection, _ = server.accept()
            server.close()

    def seconds(self, n_bytes: int) -> float:
        """Return the duration of a transfer of `n_bytes` and of its one-byte answer, in seconds."""
        leave_mpi(self._comm)
        begin_s = time.perf_counter()
        if self._connection is not None:
            if self._comm.rank == 0:
                self._connection.sendall(bytes(n_bytes))
                self._connection.recv(1)
            else:
                left = n_bytes
                while left:
                    left -= len(self._connection.recv(min(left, 1 << 20)))
                self._connection.sendall(b"x")
        return float(self._comm.bcast(time.perf_counter() - begin_s))

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()


def measure(comm: MPI.Intracomm, nets: Sequence[Net] = NETS, repetitions: int = 5) -> list[Figure]:
    """Measure between the hosts of `comm`.

    Returns
    -------
    list of Figure
        On rank 0; empty on the others.
    """
    figures = []
    with gloo(comm), contextlib.closing(Line(comm)) as line:
        for net, aim in zip(nets, MEAN_AIMS, strict=False):
            figures += _means(comm, line, net, aim, repetitions)
        figures += _iterations(comm, line, repetitions)
    return figures if comm.rank == 0 else []


def _means(comm: MPI.Intracomm, line: Line, net: Net, aim: float, repetitions: int) -> list[Figure]:
    model, peer = FlatModel(net.build()), net.build()
    batch = torch.randn(BATCH, net.width, generator=torch.Generator().manual_seed(comm.rank))
    moved = round(2 * (comm.size - 1) / comm.size * 4 * model.size)  # bytes through the link of each host
    vector, by_mpi = torch.zeros(model.size), np.zeros(model.size, np.float32)
    with BucketReducer(comm, model) as reducer:
        leave_mpi(comm)
        steps = (
            our_step(model, reducer, batch),
            ddp_step(DistributedDataParallel(peer, gradient_as_bucket_view=True), batch),
        )
        means = (
            reducer.finish,
            gloo_all_reduce(vector, None),
            lambda: comm.Allreduce(MPI.IN_PLACE, by_mpi),
        )
        for step in steps:
            seconds(comm, step, WARM_UP)
        pad_s = BACKWARD_SHARE * line.seconds(moved)
        times = in_turn(
            repetitions,
            lambda: line.seconds(moved),
            *(lambda call=call: seconds(comm, call, net.steps) for call in (*means, *steps)),
            *(
                lambda step=step, trained=trained: seconds(comm, _padded(step, trained, pad_s), net.steps)
                for step, trained in zip(steps, (model.model, peer), strict=True)
            ),
        )
    in_ms = [[1e3 * value for value in values] for values in times]
    line_ms, ours, by_gloo, mpi = in_ms[:4]
    size = f"{4e-6 * model.size:.1f} MB"
    what, padded = f"mean of {size}", f"training, {size}, backward pass {BACKWARD_SHARE:g} of the line"
    rates = [[comm.size * BATCH / value for value in values] for values in times[4:]]
    return [
        Figure(what, "ms", ours, "the line", line_ms, aim),
        Figure(what, "ms", ours, "gloo", by_gloo, 1.0),
        Figure(what, "ms", ours, "MPI_Allreduce", mpi),
        Figure(f"training, {size}", "samples/s", rates[0], "DDP, gloo", rates[1], 1.0),
        Figure(padded, "samples/s", rates[2], "DDP, gloo", rates[3], 1.0),
    ]


def _padded(step: Callable[[], None], net: nn.Module, pad_s: float) -> Callable[[], None]:
    """Return a training step of a net whose backward pass takes that much longer, equally in all of its layers."""
    layers = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]

    def padded() -> None:
        hooks = [layer.register_full_backward_pre_hook(lambda *_: time.sleep(pad_s / len(layers))) for layer in layers]
        step()
        for hook in hooks:
            hook.remove()

    return padded


def _iterations(comm: MPI.Intracomm, line: Line, repetitions: int) -> list[Figure]:
    """Measure iterations of BSP with one server: it receives all gradients, then all workers read the weights."""
    moved = 2 * (comm.size - 1) * 4 * SERVER_SIZE
    before = [line.seconds(moved) for _ in range(repetitions // 2 + 1)]
    times_s = _bsp_iterations(comm)
    after = [line.seconds(moved) for _ in range(repetitions // 2)]
    limits = [1e3 * value for value in before + after]
    what = f"iteration of 1 server, {comm.size - 1} workers, {4e-6 * SERVER_SIZE:.1f} MB"
    return [Figure(what, "ms", [1e3 * value for value in times_s], "the line", limits, SERVER_AIM)]


def _bsp_iterations(comm: MPI.Intracomm) -> list[float]:
    """Return the durations of iterations without computation, in seconds; on rank 0."""
    import hpcsync
    from hpcsync.trace.reader import load

    model = torch.nn.Linear(SERVER_SIZE, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    samples = torch.utils.data.TensorDataset(torch.zeros((comm.size - 1) * (FIRST + COUNTED)))
    with _shared_folder(comm) as folder:
        with hpcsync.connect(model, optimizer, "bsp", servers=1, out=folder / "run", comm=comm) as sync:
            for _ in sync.shard(samples, batch_size=1):
                optimizer.zero_grad()
                model.weight.sum().backward()
                sync.step()
        if comm.rank != 0:
            return []
        now_s = load(folder / "run" / "trace.h5").tables["updates"]["now_s"]
    return [float(value) for value in np.diff(now_s)[FIRST - 1 :]]


@contextlib.contextmanager
def _shared_folder(comm: MPI.Intracomm) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(comm.bcast(folder))
        comm.Barrier()
