"""Communication of a whole iteration for a large model (push, apply, grant, pull) beside the memory passes it needs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from mpi4py import MPI

from hpcsync.bench.engine import with_engine
from hpcsync.bench.figures import Figure, in_turn
from hpcsync.config.errors import JobError
from hpcsync.mpi.server.worker import Worker
from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.training.optimizers import OptimizerSpec

SIZES = {"cpu": (25_000_000,), "cuda": (25_000_000, 100_000_000, 500_000_000)}
VECTORS = (
    12  # on both ranks: two buffers, slot, gradient, weights, momentum; gradient, weights, and four for the passes
)
AIMS = {"host": 1.5, "ipc": 1.15}  # by kind of window
OPTIMIZERS = {
    "sgd": OptimizerSpec("sgd", 0.05),
    "sgd, momentum 0.9": OptimizerSpec("sgd", 0.05, {"momentum": 0.9}),
}


def measure(
    comm: MPI.Intracomm, transport: Transport = HOST, sizes: Sequence[int] = (), repetitions: int = 15
) -> list[Figure]:
    """Measure with one server and one worker, rank 1, which also makes the memory passes while the server is idle.

    Parameters
    ----------
    comm
        Communicator; ranks above 1 do nothing.
    transport
        Transport of the tensors.
    sizes
        Numbers of parameters, by default those for the device. A size that does not fit on the GPU is reported without
        values.
    repetitions
        Number of repetitions.
    """
    part = comm.Split(comm.rank < 2)
    assert isinstance(part, MPI.Intracomm)
    figures = []
    for size in sizes or SIZES[transport.device.type]:
        figures += _measure(part, transport, size, repetitions) if comm.rank < 2 else []
    part.Free()
    return figures


def _too_large(comm: MPI.Intracomm, transport: Transport, size: int) -> str:
    """Return why there is no room on the GPU, which both ranks may share; "" if there is."""
    device = transport.device
    if device.type == "cpu":
        return ""
    torch.cuda.empty_cache()  # memory cached by this process does not count as free
    comm.Barrier()
    free, needed = comm.allreduce(torch.cuda.mem_get_info(device)[0], MPI.MIN), 4 * VECTORS * size
    return "" if needed <= free else f"needs {needed / 1e9:.1f} GB on the GPU, {free / 1e9:.1f} GB are free"


def _measure(comm: MPI.Intracomm, transport: Transport, size: int, repetitions: int) -> list[Figure]:
    try:
        if why := _too_large(comm, transport, size):
            raise JobError(why)
        return _figures(comm, transport, size, repetitions)
    except JobError as error:  # raised on both ranks
        return [Figure(f"{size:,} float32: {error}", "ms", [])] if comm.rank == 1 else []


def _figures(comm: MPI.Intracomm, transport: Transport, size: int, repetitions: int) -> list[Figure]:
    figures = []
    for name, optimizer in OPTIMIZERS.items():
        values = with_engine(
            comm,
            size,
            optimizer,
            lambda worker, weights, gradient, optimizer=optimizer: in_turn(  # type: ignore[misc]
                repetitions,
                lambda: _round_trip_ms(worker, weights),
                _Passes(optimizer, weights, gradient).took_ms,
            ),
            transport,
        )
        if values is not None:
            limit = "copy the gradient, optimizer's step, copy the weights"
            figures.append(
                Figure(f"{size:,} float32, {name}", "ms", values[0], limit, values[1], AIMS.get(transport.kind))
            )
    return figures


def _round_trip_ms(worker: Worker, weights: torch.Tensor) -> float:
    begin_s = time.perf_counter()
    worker.machine.computed(0.0, 0.0, 1)
    worker.push(0.0)
    cuda.ready(weights)
    return 1e3 * (time.perf_counter() - begin_s)


class _Passes:
    """Memory passes that every parameter server needs, on memory of this process and of the same kind."""

    def __init__(self, optimizer: OptimizerSpec, weights: torch.Tensor, gradient: torch.Tensor) -> None:
        self._weights, self._gradient = torch.zeros_like(weights), gradient
        self._parameter = torch.nn.Parameter(torch.zeros_like(weights))
        self._parameter.grad = torch.zeros_like(gradient)
        self._optimizer = optimizer.build(self._parameter)

    def took_ms(self) -> float:
        """Make the passes; return their duration in milliseconds."""
        assert self._parameter.grad is not None
        begin_s = time.perf_counter()
        self._parameter.grad.copy_(self._gradient)
        self._optimizer.step()
        self._weights.copy_(self._parameter.data)
        cuda.ready(self._weights)
        return 1e3 * (time.perf_counter() - begin_s)
