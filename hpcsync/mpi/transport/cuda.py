"""CUDA primitives: plain allocations, CUDA IPC, page-locking and streams.

torch computes on memory that CuPy allocates for windows; DLPack exposes this memory to torch without a copy. Windows
and CUDA IPC need plain allocations (cudaMalloc), not pieces of a pool. With tensors in host memory no function of this
module calls CUDA.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

SPIN_S = 1e-3  # waiting time after which the thread blocks instead of spinning, which then costs it 0.1 ms more
GRANULE_BYTES = 2 << 20  # smaller allocations may share a block of this size, which IPC would open as a whole
PAGE_BYTES = mmap.PAGESIZE  # 64 kB on some machines with ARM cores


def ready(tensor: torch.Tensor) -> None:
    """Wait until all work that this thread has queued on the tensor's GPU is complete.

    MPI, other processes and NumPy know nothing of streams, so this must precede any access by them to the data and any
    message about it. Nothing else in the transport waits for a stream.
    """
    if not tensor.is_cuda:
        return
    stream = torch.cuda.current_stream(tensor.device)
    spinning_until_s = time.perf_counter() + SPIN_S
    while not stream.query():
        if time.perf_counter() > spinning_until_s:
            stream.record_event(torch.cuda.Event(blocking=True)).synchronize()  # frees the core meanwhile
            return
        os.sched_yield()


def copy(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to `into`, between GPU and host memory in any combination; complete on return."""
    into.copy_(source, non_blocking=True)
    ready(into)
    ready(source)


def enter(device: torch.device) -> None:
    """Make `device` the current GPU of this thread, before the thread uses a GPU or an MPI that may use one.

    The default is the first GPU.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run the GPU work of this thread on a stream of its own, independent of other threads' work."""
    with _on(new_stream(device)):
        yield


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new stream of `device`, or None on the CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def after_this(
    call: Callable[[], object], device: torch.device, stream: torch.cuda.Stream | None
) -> Callable[[], None]:
    """Wrap `call` for another thread, to run on `stream` after the work queued on this thread's stream now.

    Parameters
    ----------
    call
        Callable to wrap.
    device
        Device whose current stream in this thread precedes the call.
    stream
        Stream to run the call on; None on the CPU, where the call simply runs.
    """
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
    enter(stream.device)  # else the context manager would restore the first GPU as this thread's current one
    with torch.cuda.stream(stream):
        yield


# ---- memory ----


def allocate(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate zeros, shape (count,), that an MPI window or another process may expose.

    On a GPU the tensor has an allocation of its own, and the zeros are there on return.
    """
    if device.type != "cuda" or count == 0:
        return torch.zeros(count, dtype=dtype, device=device)
    import cupy

    n_bytes = -(-count * dtype.itemsize // GRANULE_BYTES) * GRANULE_BYTES
    with cupy.cuda.Device(device.index):
        tensor = _tensor(cupy.cuda.Memory(n_bytes), count, dtype).zero_()
    ready(tensor)  # others may put into it before this stream is waited for again
    return tensor


def exported(tensor: torch.Tensor) -> bytes:
    """Return a CUDA IPC handle of a tensor from `allocate`, for another process of this node to open."""
    import cupy

    handle: bytes = cupy.cuda.runtime.ipcGetMemHandle(tensor.data_ptr())
    return handle


def opened(handle: bytes, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Open another process's tensor, shape (count,), by its CUDA IPC handle.

    Parameters
    ----------
    handle
        Handle from `exported`.
    count, dtype
        Number and type of the elements.
    device
        Device of this process; it differs from the tensor's if the tensor is on another GPU.

    Returns
    -------
    torch.Tensor
        The tensor. It must be closed with `close` before the owner frees it.

    Raises
    ------
    Exception
        From CuPy, if the two GPUs cannot address each other's memory.
    """
    import cupy

    with cupy.cuda.Device(device.index):
        pointer = cupy.cuda.runtime.ipcOpenMemHandle(handle)
        memory = cupy.cuda.UnownedMemory(pointer, count * dtype.itemsize, None, device.index)
        return _tensor(memory, count, dtype)


def close(tensor: torch.Tensor, device: torch.device) -> None:
    """Close a tensor from `opened`; it must not be used afterwards."""
    import cupy

    with cupy.cuda.Device(device.index):
        cupy.cuda.runtime.ipcCloseMemHandle(tensor.data_ptr())


def _tensor(memory: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    import cupy

    name = str(dtype).removeprefix("torch.")  # the same name in torch and CuPy
    return torch.from_dlpack(cupy.ndarray((count,), name, cupy.cuda.MemoryPointer(memory, 0)))


# ---- page-locked host memory, which the GPU copies to and from without the CPU ----


class PageLock:
    """Lock on arrays of whole pages (`whole_pages`), until `free`.

    Attributes
    ----------
    failure : str
        Reason why the pages are not locked, "" if they are. Without the lock the driver copies through locked memory of
        its own, which is slower but equally correct.
    """

    def __init__(self, arrays: Iterable[np.ndarray]) -> None:
        import cupy

        self._runtime = cupy.cuda.runtime
        self._locked: list[int] = []
        self.failure = ""
        try:
            for array in arrays:
                if array.nbytes:
                    self._runtime.hostRegister(array.ctypes.data, array.nbytes, 0)
                    self._locked.append(array.ctypes.data)
        except Exception as error:
            self.free()
            self.failure = f"pages not locked: {error}"

    def free(self) -> None:
        """Unlock the pages; calling it again has no effect."""
        while self._locked:
            self._runtime.hostUnregister(self._locked.pop())


def paged(n_bytes: int) -> int:
    """Return how many bytes of memory, wherever it begins, hold `n_bytes` in whole pages, at least one."""
    return (-(-max(1, n_bytes) // PAGE_BYTES) + 1) * PAGE_BYTES


def whole_pages(memory: np.ndarray) -> np.ndarray:
    """Return the whole pages within `memory`, of octets.

    Memory of a process alone on its node comes from the heap. If a page that it shares with other data were locked,
    CUDA would refuse every copy of that data that begins within the page and ends beyond it (invalid argument).
    """
    begin = -memory.ctypes.data % PAGE_BYTES
    return memory[begin : begin + (len(memory) - begin) // PAGE_BYTES * PAGE_BYTES]
