"""Round trips per second for a model of one kilobyte, beside the same MPI's ping-pong of eight bytes.

Such an iteration consists of host work. On a GPU it is shown beside the same engine with host windows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from hpcsync.bench.engine import with_engine
from hpcsync.bench.figures import Figure, in_turn
from hpcsync.mpi.server.worker import Worker
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.training.optimizers import OptimizerSpec

SIZE = 250
WORKERS = (1, 3)
TAG = 9


def measure(
    comm: MPI.Intracomm,
    transport: Transport = HOST,
    workers: Sequence[int] = WORKERS,
    size: int = SIZE,
    round_trips: int = 2000,
    repetitions: int = 5,
) -> list[Figure]:
    """Measure on the first ranks of `comm`: rank 0 serves, and the others push together; those left over wait.

    Returns
    -------
    list of Figure
        On rank 0; empty on the others.
    """
    backoff, figures = Backoff(comm), []
    for n_workers in workers:
        part = comm.Split(0 if comm.rank <= n_workers else MPI.UNDEFINED)
        if part != MPI.COMM_NULL:
            assert isinstance(part, MPI.Intracomm)
            figures += _measure(part, transport, size, round_trips, repetitions)
            part.Free()
        backoff.barrier()
    return figures


def _measure(comm: MPI.Intracomm, transport: Transport, size: int, round_trips: int, repetitions: int) -> list[Figure]:
    n_workers = comm.size - 1
    engines = [transport] if transport == HOST else [transport, HOST]
    *engines_s, ping_pong_s = in_turn(
        repetitions,
        *(lambda t=t: comm.allreduce(_engine_s(comm, t, size, round_trips), MPI.MAX) for t in engines),
        lambda: comm.allreduce(_ping_pong_s(comm, round_trips), MPI.MAX),
    )
    if comm.rank > 0:
        return []
    rates, limits = ([n_workers * round_trips / s for s in values] for values in (engines_s[0], ping_pong_s))
    what = f"{size} float32, {n_workers} worker{'s' if n_workers > 1 else ''} together"
    figures = [Figure(what, "/s", rates, "Send and Recv of 8 bytes", limits)]
    if len(engines) > 1:
        each_us, host_us = ([1e6 * s / round_trips for s in values] for values in engines_s)
        figures.append(Figure(f"an iteration, {what}", "us", each_us, "the same on host windows", host_us))
    return figures


def _engine_s(comm: MPI.Intracomm, transport: Transport, size: int, round_trips: int) -> float:
    def work(worker: Worker, *_vectors: object) -> float:
        begin_s = time.perf_counter()
        for _ in range(round_trips):
            worker.machine.computed(0.0, 0.0, 1)
            worker.push(0.0)
        return time.perf_counter() - begin_s

    return with_engine(comm, size, OptimizerSpec("sgd", 0.05), work, transport) or 0.0


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
