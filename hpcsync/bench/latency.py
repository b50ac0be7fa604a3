"""Round trips a second for a model of a kilobyte, beside the same MPI's ping-pong of eight bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from hpcsync.bench.engine import with_engine
from hpcsync.bench.figures import Figure
from hpcsync.learning.optimizers import OptimizerSpec
from hpcsync.mpi.worker import Worker

SIZE = 250
WORKERS = (1, 3)
TAG = 9


def measure(
    comm: MPI.Intracomm,
    workers: Sequence[int] = WORKERS,
    size: int = SIZE,
    round_trips: int = 2000,
    repetitions: int = 5,
) -> list[Figure]:
    """The first ranks of comm: rank 0 answers, the others ask, all at once. The figures come back on rank 0."""
    figures = []
    for n_workers in workers:
        part = comm.Split(0 if comm.rank <= n_workers else MPI.UNDEFINED)
        if part == MPI.COMM_NULL:
            continue
        assert isinstance(part, MPI.Intracomm)
        figures += _measure(part, size, round_trips, repetitions)
        part.Free()
    return figures


def _measure(comm: MPI.Intracomm, size: int, round_trips: int, repetitions: int) -> list[Figure]:
    rates, limits = [], []
    for _ in range(repetitions + 1):  # the first warms up
        rates.append(_rate(comm, _engine_s(comm, size, round_trips), round_trips))
        limits.append(_rate(comm, _ping_pong_s(comm, round_trips), round_trips))
    if comm.rank > 0:
        return []
    n_workers = comm.size - 1
    what = f"{size} float32, {n_workers} worker{'s' if n_workers > 1 else ''} together"
    return [Figure(what, "/s", rates[1:], "Send and Recv of 8 bytes", limits[1:])]


def _rate(comm: MPI.Intracomm, took_s: float, round_trips: int) -> float:
    """Round trips of all workers together in a second."""
    return (comm.size - 1) * round_trips / comm.allreduce(took_s, MPI.MAX)


def _engine_s(comm: MPI.Intracomm, size: int, round_trips: int) -> float:
    def work(worker: Worker, *_vectors: object) -> float:
        begin_s = time.perf_counter()
        for _ in range(round_trips):
            worker.step(0.0, 0.0, 1, 0.0)
        return time.perf_counter() - begin_s

    return with_engine(comm, size, OptimizerSpec("sgd", 0.05), work) or 0.0


def _ping_pong_s(comm: MPI.Intracomm, round_trips: int) -> float:
    message = np.zeros(1)
    comm.Barrier()
    begin_s = time.perf_counter()
    if comm.rank == 0:
        status = MPI.Status()
        for _ in range(round_trips * (comm.size - 1)):
            comm.Recv(message, MPI.ANY_SOURCE, TAG, status)
            comm.Send(message, status.source, TAG)
    else:
        for _ in range(round_trips):
            comm.Send(message, 0, TAG)
            comm.Recv(message, 0, TAG)
    return time.perf_counter() - begin_s
