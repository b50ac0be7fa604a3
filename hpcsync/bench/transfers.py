"""One-sided puts and gets between two ranks, beside plain copies of as many bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.bench.figures import Figure, in_turn
from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.tensor_window import HOST, TensorWindow, Transport

SIZES_MB = {"cpu": (1, 16, 100), "cuda": (1, 16, 100, 1000)}
AIMS = {"host": ("numpy.copyto", 0.8), "ipc": ("copy on the GPU", 0.9)}  # by kind of window: beside what, and the ratio
AIM_FROM_MB = 16  # below this size the cost of a call matters too
LOOP_BYTES = {"cpu": 50e6, "cuda": 1e9}  # smaller transfers are repeated until one value covers so many bytes


def measure(
    comm: MPI.Intracomm, transport: Transport = HOST, sizes_mb: Sequence[float] = (), repetitions: int = 11
) -> list[Figure]:
    """Measure transfers by rank 1 to and from rank 0, which waits with backoff.

    Parameters
    ----------
    comm
        Communicator of two ranks.
    transport
        Transport of the tensors.
    sizes_mb
        Sizes of the transfers, in MB; by default those for the device.
    repetitions
        Number of repetitions.
    """
    backoff, figures = Backoff(comm, passive=transport.passive), []
    for size_mb in sizes_mb or SIZES_MB[transport.device.type]:
        figures += _measure_size(comm, transport, backoff, size_mb, repetitions)
    return figures


def _measure_size(
    comm: MPI.Intracomm, transport: Transport, backoff: Backoff, size_mb: float, repetitions: int
) -> list[Figure]:
    size_bytes = int(size_mb * 1e6)
    here = torch.ones(size_bytes if comm.rank == 1 else 0, dtype=torch.uint8, device=transport.device)
    with transport.window(comm, size_bytes if comm.rank == 0 else 0, torch.uint8) as window:
        window.local.fill_(1)  # first touched by its owner, as a server's weights are
        window.release(0, len(window.local))
        comm.Barrier()
        figures = _transfer(transport.kind, window, here, size_mb, repetitions) if comm.rank == 1 else []
        backoff.barrier()
    return figures


def _transfer(kind: str, window: TensorWindow, here: torch.Tensor, size_mb: float, repetitions: int) -> list[Figure]:
    def put() -> None:
        window.put(here, 0, 0)
        window.flush(0)

    def get() -> None:
        window.get(here, 0, 0)
        window.flush(0)

    limits = gpu_copies(here) if here.is_cuda else host_copy(here)
    loops = max(1, int(LOOP_BYTES[here.device.type] / len(here)))
    calls = (put, get, *limits.values())
    rates = in_turn(repetitions, *(lambda f=f: len(here) / 1e9 / _seconds(f, loops) for f in calls))
    beside, aim = AIMS.get(kind, ("", None)) if size_mb >= AIM_FROM_MB else ("", None)
    return [
        Figure(f"{name} of {size_mb:g} MB", "GB/s", values, limit, limit_values, aim if limit == beside else None)
        for name, values in zip(("put", "get"), rates, strict=False)
        for limit, limit_values in zip(limits, rates[2:], strict=True)
    ]


def host_copy(here: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Return a copy of as many bytes in host memory, by name."""
    return {"numpy.copyto": partial(np.copyto, np.ones(len(here), np.uint8), here.numpy())}


def gpu_copies(here: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Return, by name, a copy within the GPU's memory, and one through page-locked host memory.

    The latter is the path of tensors whose ranks exchange data in host memory.
    """
    there, locked = torch.ones_like(here), torch.ones(len(here), dtype=here.dtype, pin_memory=here.is_cuda)

    def on_device() -> None:
        there.copy_(here, non_blocking=True)
        cuda.ready(here)

    def through_host() -> None:
        locked.copy_(here, non_blocking=True)
        there.copy_(locked, non_blocking=True)
        cuda.ready(here)

    return {"copy on the GPU": on_device, "copy to page-locked host memory and back": through_host}


def _seconds(call: Callable[[], None], loops: int) -> float:
    begin_s = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - begin_s) / loops
