"""One-sided puts and gets between two ranks, beside a plain copy of as many bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from hpcsync.bench.figures import Figure, in_turn
from hpcsync.mpi.patience import Patience
from hpcsync.mpi.window import Window

SIZES_MB = (1, 16, 100)
AIM = 0.8
AIM_FROM_MB = 16  # below that, what a call costs counts too


def measure(comm: MPI.Intracomm, sizes_mb: Sequence[float] = SIZES_MB, repetitions: int = 11) -> list[Figure]:
    """Rank 1 transfers to and from rank 0, which waits quietly."""
    patience = Patience(comm)
    return [figure for size_mb in sizes_mb for figure in _measure_size(comm, patience, size_mb, repetitions)]


def _measure_size(comm: MPI.Intracomm, patience: Patience, size_mb: float, repetitions: int) -> list[Figure]:
    size_bytes = int(size_mb * 1e6)
    with Window(comm, size_bytes if comm.rank == 0 else 0, np.uint8) as window:
        window.local[:] = 1  # its owner touches a server's weights first, too
        comm.Barrier()
        figures = _transfer(window, size_bytes, size_mb, repetitions) if comm.rank == 1 else []
        patience.barrier()
    return figures


def _transfer(window: Window, size_bytes: int, size_mb: float, repetitions: int) -> list[Figure]:
    here, there = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)

    def put() -> None:
        window.put(here, 0, 0)
        window.flush(0)

    def get() -> None:
        window.get(here, 0, 0)
        window.flush(0)

    def copy() -> None:
        np.copyto(there, here)

    loops = max(1, int(50e6 / size_bytes))
    rates = in_turn(repetitions, *(lambda f=f: size_bytes / 1e9 / _seconds(f, loops) for f in (put, get, copy)))
    aim = AIM if size_mb >= AIM_FROM_MB else None
    return [
        Figure(f"{name} of {size_mb:g} MB", "GB/s", values, "numpy.copyto", rates[2], aim)
        for name, values in zip(("put", "get"), rates, strict=False)
    ]


def _seconds(call: Callable[[], None], loops: int) -> float:
    begin_s = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - begin_s) / loops
