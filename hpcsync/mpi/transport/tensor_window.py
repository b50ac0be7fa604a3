"""The data plane: tensors of every rank that others put into and get from, wherever they lie.

Four kinds, and one interface. What a rank does not hear about through messages or words it cannot rely on, so whoever
tells others that they may look has called `release` before, and whoever is told calls `acquire`.

    host      host memory, in a window that MPI allocates
    mpi       GPU memory in an MPI window, where the MPI library takes device pointers: puts and gets alone see them
    ipc       GPU memory that the ranks of a node open by CUDA IPC: copied from device to device
    staged    GPU memory with an image in host memory: others reach the image. On a node it is page-locked and the GPU
              copies from and to the other ranks' images by itself; between hosts MPI moves what passes through
              page-locked buffers

With `device` the CPU every kind works as well, if to no purpose: "GPU memory" is then ordinary memory.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.node_memory import HostMemory, NodeMemory, node_memory, numpy_dtype
from hpcsync.mpi.transport.node_topology import on_one_node
from hpcsync.mpi.transport.window import Window

CPU = torch.device("cpu")


class TensorWindow(ABC):
    """local: this rank's exposed memory, shape (count,), on its device.

    note: what its user may want to know, if anything.
    """

    local: torch.Tensor
    note = ""

    @abstractmethod
    def put(self, source: torch.Tensor, rank: int, offset: int) -> None:
        """Begin to copy `source`, 1-D, to element `offset` of `rank`; it may be reused after `flush(rank)`."""

    @abstractmethod
    def get(self, into: torch.Tensor, rank: int, offset: int) -> None:
        """Begin to copy from element `offset` of `rank` into `into`, 1-D; it is there after `flush(rank)`."""

    @abstractmethod
    def flush(self, rank: int) -> None:
        """Wait until what this thread has begun with `rank` is complete, here and there."""

    @abstractmethod
    def acquire(self, begin: int, end: int) -> None:
        """Make what others have put into these elements visible in `local`."""

    @abstractmethod
    def release(self, begin: int, end: int) -> None:
        """Make what this rank has written into these elements of `local` visible to others; its reads and writes of
        `local` so far are over when this returns."""

    @abstractmethod
    def free(self) -> None:
        """Collective, and harmless when repeated; `local` must not be used afterwards."""

    def __enter__(self) -> TensorWindow:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()


class Transport(NamedTuple):
    """How tensors move between ranks. kind: see above; device: where they lie, the same kind of device on all ranks."""

    kind: str = "host"
    device: torch.device = CPU

    @property
    def passive(self) -> bool:
        """Whether transfers on one node are complete without a call of MPI by their target."""
        return self.kind != "mpi"

    def window(self, comm: MPI.Intracomm, count: int, dtype: torch.dtype) -> TensorWindow:
        """Collective. count: elements that this rank exposes, zero allowed; what they hold at first is undefined.

        Raises MemoryUnreachable, on all ranks.
        """
        match self.kind:
            case "host":
                return MpiWindow(comm, count, dtype)
            case "mpi":
                return MpiWindow(comm, count, dtype, cuda.allocate(count, dtype, self.device))
            case "ipc":
                return NodeWindow(comm, node_memory(comm, count, dtype, self.device))
            case "staged":
                local = torch.zeros(count, dtype=dtype, device=self.device)
                if on_one_node(comm):
                    memory = HostMemory(comm, count, dtype, page_lock=local.is_cuda)
                    return NodeWindow(comm, memory, local)
                return StagedMpiWindow(comm, local)
        raise ValueError(f"transport of kind {self.kind!r}")


HOST = Transport()


class MpiWindow(TensorWindow):
    """MPI moves tensors straight from and to where they lie: in memory of its own, or in `memory`."""

    def __init__(self, comm: MPI.Intracomm, count: int, dtype: torch.dtype, memory: torch.Tensor | None = None) -> None:
        self._window = Window(comm, count, numpy_dtype(dtype), None if memory is None else _buffer(memory))
        self.local = torch.from_numpy(self._window.local) if memory is None else memory

    def put(self, source: torch.Tensor, rank: int, offset: int) -> None:
        cuda.ready(source)
        self._window.put(_buffer(source), rank, offset)

    def get(self, into: torch.Tensor, rank: int, offset: int) -> None:
        cuda.ready(into)
        self._window.get(_buffer(into), rank, offset)

    def flush(self, rank: int) -> None:
        self._window.flush(rank)

    def acquire(self, begin: int, end: int) -> None:
        self._window.sync()

    def release(self, begin: int, end: int) -> None:
        cuda.ready(self.local)
        self._window.sync()

    def free(self) -> None:
        self.local = self.local.new_empty(0)
        self._window.free()


class NodeWindow(TensorWindow):
    """Ranks of one node copy from and to each other's memory. local: where that is an image of this tensor."""

    def __init__(self, comm: MPI.Intracomm, memory: NodeMemory, local: torch.Tensor | None = None) -> None:
        self._memory = memory
        self._image = memory.of[comm.rank]
        self.local = self._image if local is None else local
        self.note = memory.note

    def put(self, source: torch.Tensor, rank: int, offset: int) -> None:
        self._memory.of[rank][offset : offset + len(source)].copy_(source, non_blocking=True)

    def get(self, into: torch.Tensor, rank: int, offset: int) -> None:
        into.copy_(self._memory.of[rank][offset : offset + len(into)], non_blocking=True)

    def flush(self, rank: int) -> None:
        cuda.ready(self.local)
        self._memory.sync()

    def acquire(self, begin: int, end: int) -> None:
        self._memory.sync()
        if self.local is not self._image:
            cuda.copy(self.local[begin:end], self._image[begin:end])

    def release(self, begin: int, end: int) -> None:
        if self.local is not self._image:
            cuda.copy(self._image[begin:end], self.local[begin:end])
        cuda.ready(self.local)
        self._memory.sync()

    def free(self) -> None:
        self.local = self._image = self.local.new_empty(0)
        self._memory.free()


class StagedMpiWindow(TensorWindow):
    """MPI moves what passes through page-locked buffers, which torch keeps for the next time."""

    def __init__(self, comm: MPI.Intracomm, local: torch.Tensor) -> None:
        self.local = local
        self._window = Window(comm, len(local), numpy_dtype(local.dtype))
        self._image = torch.from_numpy(self._window.local)
        self._page_lock = cuda.PageLock([self._window.local]) if local.is_cuda else None
        self.note = self._page_lock.failure if self._page_lock else ""
        self._begun: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor | None]]] = {}

    def put(self, source: torch.Tensor, rank: int, offset: int) -> None:
        buffer = self._passing(source)
        cuda.copy(buffer, source)
        self._window.put(buffer.numpy(), rank, offset)
        self._mine(rank).append((buffer, None))

    def get(self, into: torch.Tensor, rank: int, offset: int) -> None:
        buffer = self._passing(into)
        self._window.get(buffer.numpy(), rank, offset)
        self._mine(rank).append((buffer, into))

    def flush(self, rank: int) -> None:
        self._window.flush(rank)
        for buffer, into in self._begun.pop((threading.get_ident(), rank), ()):
            if into is not None:
                into.copy_(buffer, non_blocking=True)
        cuda.ready(self.local)

    def acquire(self, begin: int, end: int) -> None:
        self._window.sync()
        cuda.copy(self.local[begin:end], self._image[begin:end])

    def release(self, begin: int, end: int) -> None:
        cuda.copy(self._image[begin:end], self.local[begin:end])
        self._window.sync()

    def _passing(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(tensor), dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    def _mine(self, rank: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Begun by this thread: MPI needs the buffers until the flush."""
        return self._begun.setdefault((threading.get_ident(), rank), [])

    def free(self) -> None:
        self.local = self._image = self.local.new_empty(0)
        if self._page_lock is not None:
            self._page_lock.free()
        self._window.free()


def _buffer(tensor: torch.Tensor) -> Any:
    """As MPI takes it: mpi4py reads a device pointer from the tensor itself."""
    return tensor if tensor.is_cuda else tensor.numpy()
