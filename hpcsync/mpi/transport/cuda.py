"""What hpcsync asks of CUDA itself: plain allocations, other processes' memory, page-locking, streams.

torch computes, on memory that CuPy allocates for windows: DLPack lets it see that memory without a copy. Windows and
CUDA IPC need plain allocations (cudaMalloc), not pieces of a pool. With tensors in host memory nothing here calls CUDA.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

SPIN_S = 50e-6  # of waiting, before the core is given away for longer
GRANULE_BYTES = 2 << 20  # smaller allocations may share such a block, which IPC would open as a whole
PAGE_BYTES = 4096


def ready(tensor: torch.Tensor) -> None:
    """Wait until all that this thread has begun on the tensor's GPU is complete.

    MPI, other processes and NumPy know nothing of streams: whatever they are to see, or to hear about, has to be
    waited for. Nothing else in the transport waits for a stream.
    """
    if not tensor.is_cuda:
        return
    stream = torch.cuda.current_stream(tensor.device)
    spinning_until_s = time.perf_counter() + SPIN_S
    while not stream.query():
        if time.perf_counter() > spinning_until_s:
            stream.record_event(torch.cuda.Event(blocking=True)).synchronize()  # others get this core meanwhile
            return
        os.sched_yield()


def copy(into: torch.Tensor, source: torch.Tensor) -> None:
    """Between a GPU and host memory, or as if; complete when this returns."""
    into.copy_(source, non_blocking=True)
    ready(into)
    ready(source)


def enter(device: torch.device) -> None:
    """In a thread that is about to use a GPU, or an MPI that may: let this be its current one, not the first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """What this thread begins here on the GPU neither waits for other threads' work there, nor do they for it."""
    with _on(new_stream(device)):
        yield


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """None on the CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def after_this(
    call: Callable[[], object], device: torch.device, stream: torch.cuda.Stream | None
) -> Callable[[], None]:
    """`call`, for another thread to make on `stream`: on the GPU, after what is on this thread's stream now."""
    begun = torch.cuda.current_stream(device).record_event() if stream is not None else None

    def made() -> None:
        with _on(stream):
            if stream is not None and begun is not None:
                stream.wait_event(begun)
            call()

    return made


@contextmanager
def _on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    enter(stream.device)  # else this thread would be given back the first GPU afterwards
    with torch.cuda.stream(stream):
        yield


# ---- memory ----


def allocate(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, shape (count,), in an allocation of their own that an MPI window or another process may be shown."""
    if device.type != "cuda" or count == 0:
        return torch.zeros(count, dtype=dtype, device=device)
    import cupy

    n_bytes = -(-count * dtype.itemsize // GRANULE_BYTES) * GRANULE_BYTES
    with cupy.cuda.Device(device.index):
        return _tensor(cupy.cuda.Memory(n_bytes), count, dtype).zero_()


def exported(tensor: torch.Tensor) -> bytes:
    """A handle of an `allocate`d tensor, with which another process of this node may open it."""
    import cupy

    handle: bytes = cupy.cuda.runtime.ipcGetMemHandle(tensor.data_ptr())
    return handle


def opened(handle: bytes, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Another process's tensor, shape (count,), to be `close`d before that process frees it.

    device: of this process, another one than the tensor's if that lies on another GPU. Raises what CuPy raises where
    the two GPUs cannot reach each other.
    """
    import cupy

    with cupy.cuda.Device(device.index):
        pointer = cupy.cuda.runtime.ipcOpenMemHandle(handle)
        memory = cupy.cuda.UnownedMemory(pointer, count * dtype.itemsize, None, device.index)
        return _tensor(memory, count, dtype)


def close(tensor: torch.Tensor, device: torch.device) -> None:
    """Give a tensor back that this device's process has opened; nobody may use it afterwards."""
    import cupy

    with cupy.cuda.Device(device.index):
        cupy.cuda.runtime.ipcCloseMemHandle(tensor.data_ptr())


def _tensor(memory: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    import cupy

    name = str(dtype).removeprefix("torch.")  # both call it so
    return torch.from_dlpack(cupy.ndarray((count,), name, cupy.cuda.MemoryPointer(memory, 0)))


# ---- page-locked host memory, which the GPU copies to and from by itself ----


class PageLock:
    """Locks the pages that these arrays lie in, until `free`.

    failure: why they are not locked, "" if they are. Then the driver copies through locked memory of its own: slower,
             and no less correct.
    """

    def __init__(self, arrays: Iterable[np.ndarray]) -> None:
        import cupy

        self._runtime = cupy.cuda.runtime
        self._locked: list[int] = []
        self.failure = ""
        try:
            for begin, size in pages((array.ctypes.data, array.nbytes) for array in arrays):
                self._runtime.hostRegister(begin, size, 0)
                self._locked.append(begin)
        except Exception as error:
            self.free()
            self.failure = f"its pages are not locked: {error}"

    def free(self) -> None:
        while self._locked:
            self._runtime.hostUnregister(self._locked.pop())


def pages(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The whole pages that these (address, bytes) lie in, as few disjoint spans: no page may be locked twice."""
    merged: list[list[int]] = []
    for address, size in sorted(spans):
        begin, end = address // PAGE_BYTES * PAGE_BYTES, -(-(address + size) // PAGE_BYTES) * PAGE_BYTES
        if size == 0:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [(begin, end - begin) for begin, end in merged]
