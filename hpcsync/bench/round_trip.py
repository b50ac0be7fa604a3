"""A whole iteration's communication for a large model: push, apply, grant, pull, beside the memory passes it needs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from mpi4py import MPI

from hpcsync.bench.engine import with_engine
from hpcsync.bench.figures import Figure, in_turn
from hpcsync.learning.optimizers import OptimizerSpec
from hpcsync.mpi.worker import Worker

SIZE = 25_000_000
AIM = 1.5
OPTIMIZERS = {
    "sgd": OptimizerSpec("sgd", 0.05),
    "sgd, momentum 0.9": OptimizerSpec("sgd", 0.05, {"momentum": 0.9}),
}


def measure(comm: MPI.Intracomm, size: int = SIZE, repetitions: int = 15) -> list[Figure]:
    """Rank 1 is the only worker; the passes are made there too, while the server has nothing to do."""
    part = comm.Split(comm.rank < 2)
    assert isinstance(part, MPI.Intracomm)
    figures = _measure(part, size, repetitions) if comm.rank < 2 else []
    part.Free()
    return figures


def _measure(comm: MPI.Intracomm, size: int, repetitions: int) -> list[Figure]:
    figures = []
    for name, optimizer in OPTIMIZERS.items():
        values = with_engine(
            comm,
            size,
            optimizer,
            lambda worker, weights, gradient, optimizer=optimizer: in_turn(  # type: ignore[misc]
                repetitions,
                lambda: _round_trip_ms(worker),
                _Passes(optimizer, weights, gradient).took_ms,
            ),
        )
        figures += _figures(f"{size:,} float32, {name}", values)
    return figures


def _figures(what: str, values: Sequence[Sequence[float]] | None) -> list[Figure]:
    if values is None:
        return []
    limit = "copy the gradient, optimizer's step, copy the weights"
    return [Figure(what, "ms", values[0], limit, values[1], AIM)]


def _round_trip_ms(worker: Worker) -> float:
    begin_s = time.perf_counter()
    worker.step(0.0, 0.0, 1, 0.0)
    return 1e3 * (time.perf_counter() - begin_s)


class _Passes:
    """What no parameter server can do without, on this process's own memory."""

    def __init__(self, optimizer: OptimizerSpec, weights: torch.Tensor, gradient: torch.Tensor) -> None:
        self._weights, self._gradient = torch.zeros_like(weights), gradient
        self._parameter = torch.nn.Parameter(torch.zeros_like(weights))
        self._parameter.grad = torch.zeros_like(gradient)
        self._optimizer = optimizer.build(self._parameter)

    def took_ms(self) -> float:
        assert self._parameter.grad is not None
        begin_s = time.perf_counter()
        self._parameter.grad.copy_(self._gradient)
        self._optimizer.step()
        self._weights.copy_(self._parameter.data)
        return 1e3 * (time.perf_counter() - begin_s)
