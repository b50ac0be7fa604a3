"""Data plane: windows of tensors that all ranks put into and get from, in host or GPU memory.

There are four kinds behind one interface. A rank relies only on data that a message or word has announced, so a rank
calls `release` before it announces data to others, and `acquire` after data has been announced to it.

    host      host memory, in a window that MPI allocates
    mpi       GPU memory in an MPI window, where the MPI library takes device pointers, by puts and gets only
    ipc       GPU memory that the ranks of a node open by CUDA IPC: copies from device to device
    staged    GPU memory with an image in host memory, which other ranks access. On a node the image is page-locked, and
              the GPU copies from and to the other ranks' images without the CPU; between hosts MPI transfers data that
              passes through page-locked buffers

Every kind also works with `device` the CPU, without any benefit: "GPU memory" is then ordinary memory.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.node_memory import HostMemory, NodeMemory, node_memory, numpy_dtype
from hpcsync.mpi.transport.node_topology import on_one_node
from hpcsync.mpi.transport.window import Freed, Window

CPU = torch.device("cpu")


class TensorWindow(Freed):
    """Window of tensors.

    Attributes
    ----------
    local : torch.Tensor
        Exposed memory of this rank, shape (count,), on its device.
    note : str
        Remark for the user, "" if there is none.
    """

    local: torch.Tensor
    note = ""

    @abstractmethod
    def put(self, source: torch.Tensor, rank: int, offset: int) -> None:
        """Begin to copy `source`, 1-D, to element `offset` of `rank`; it may be reused after `flush(rank)`."""

    @abstractmethod
    def get(self, into: torch.Tensor, rank: int, offset: int) -> None:
        """Begin to copy from element `offset` of `rank` into `into`, 1-D; the data is there after `flush(rank)`."""

    @abstractmethod
    def flush(self, rank: int) -> None:
        """Wait until this thread's transfers with `rank` are complete on both sides."""

    @abstractmethod
    def acquire(self, begin: int, end: int) -> None:
        """Make other ranks' puts into elements `begin` to `end` visible in `local`."""

    @abstractmethod
    def release(self, begin: int, end: int) -> None:
        """Make this rank's writes to elements `begin` to `end` of `local` visible to others.

        All of its earlier reads and writes of `local` are complete on return.
        """


class Transport(NamedTuple):
    """Method of moving tensors between ranks.

    Attributes
    ----------
    kind : str
        Kind of window: "host", "mpi", "ipc" or "staged" (see the module's docstring).
    device : torch.device
        Device of the tensors, of the same type on all ranks.
    """

    kind: str = "host"
    device: torch.device = CPU

    @property
    def passive(self) -> bool:
        """Whether transfers on one node complete without MPI calls by their target."""
        return self.kind != "mpi"

    def window(self, comm: MPI.Intracomm, count: int, dtype: torch.dtype) -> TensorWindow:
        """Create a window; collective.

        Parameters
        ----------
        comm
            Communicator of the window.
        count
            Elements that this rank exposes, zero allowed; initially undefined.
        dtype
            Type of the elements.

        Raises
        ------
        MemoryUnreachable
            On all ranks, if ranks cannot address each other's memory.
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
    """Window whose tensors MPI moves in place, in memory that MPI allocates or in `memory`."""

    def __init__(self, comm: MPI.Intracomm, count: int, dtype: torch.dtype, memory: torch.Tensor | None = None) -> None:
        self._window = Window(comm, count, numpy_dtype(dtype), None if memory is None else _buffer(memory))
        self.local = torch.from_numpy(self._window.local) if memory is None else memory

    def put(self, source: torch.Tensor, rank: int, offset: int) -> None:
        """Begin an MPI put, once the GPU has written `source`."""
        cuda.ready(source)
        self._window.put(_buffer(source), rank, offset)

    def get(self, into: torch.Tensor, rank: int, offset: int) -> None:
        """Begin an MPI get, once the GPU no longer uses `into`."""
        cuda.ready(into)
        self._window.get(_buffer(into), rank, offset)

    def flush(self, rank: int) -> None:
        """Flush the MPI window."""
        self._window.flush(rank)

    def acquire(self, begin: int, end: int) -> None:
        """Execute a memory fence."""
        self._window.sync()

    def release(self, begin: int, end: int) -> None:
        """Wait for the GPU, then execute a memory fence."""
        cuda.ready(self.local)
        self._window.sync()

    def free(self) -> None:
        """Free the MPI window."""
        self.local = self.local.new_empty(0)
        self._window.free()


class NodeWindow(TensorWindow):
    """Window whose ranks, all of one node, copy from and to each other's memory.

    Parameters
    ----------
    comm
        Communicator of the window.
    memory
        Memory that the ranks address.
    local
        Tensor whose image `memory` is; by default `memory` itself is exposed.
    """

    def __init__(self, comm: MPI.Intracomm, memory: NodeMemory, local: torch.Tensor | None = None) -> None:
        self._memory = memory
        self._image = memory.of[comm.rank]
        self.local = self._image if local is None else local
        self.note = memory.note

    def put(self, source: torch.Tensor, rank: int, offset: int) -> None:
        """Begin a copy into the memory of `rank`."""
        self._memory.of[rank][offset : offset + len(source)].copy_(source, non_blocking=True)

    def get(self, into: torch.Tensor, rank: int, offset: int) -> None:
        """Begin a copy from the memory of `rank`."""
        into.copy_(self._memory.of[rank][offset : offset + len(into)], non_blocking=True)

    def flush(self, rank: int) -> None:
        """Wait for the GPU's copies, then execute a memory fence."""
        cuda.ready(self.local)
        self._memory.sync()

    def acquire(self, begin: int, end: int) -> None:
        """Execute a memory fence and, with an image, copy it to `local`."""
        self._memory.sync()
        if self.local is not self._image:
            cuda.copy(self.local[begin:end], self._image[begin:end])

    def release(self, begin: int, end: int) -> None:
        """Copy `local` to its image, if any, wait for the GPU, then execute a memory fence."""
        if self.local is not self._image:
            cuda.copy(self._image[begin:end], self.local[begin:end])
        cuda.ready(self.local)
        self._memory.sync()

    def free(self) -> None:
        """Free the node memory."""
        self.local = self._image = self.local.new_empty(0)
        self._memory.free()


class StagedMpiWindow(TensorWindow):
    """Window between hosts: MPI moves data through page-locked buffers, which torch caches for reuse."""

    def __init__(self, comm: MPI.Intracomm, local: torch.Tensor) -> None:
        self.local = local
        self._window = Window(comm, cuda.paged(local.nbytes) // local.itemsize, numpy_dtype(local.dtype))
        memory = self._window.local.view(np.uint8)
        pages = cuda.whole_pages(memory)
        self._begins = comm.allgather((pages.ctypes.data - memory.ctypes.data) // local.itemsize)
        self._image = torch.from_numpy(pages.view(numpy_dtype(local.dtype)))
        self._page_lock = cuda.PageLock([pages]) if local.is_cuda else None
        self.note = self._page_lock.failure if self._page_lock else ""
        self._begun: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor | None]]] = {}

    def put(self, source: torch.Tensor, rank: int, offset: int) -> None:
        """Copy `source` to a buffer, then begin an MPI put."""
        buffer = self._staging_buffer(source)
        cuda.copy(buffer, source)
        self._window.put(buffer.numpy(), rank, self._begins[rank] + offset)
        self._mine(rank).append((buffer, None))

    def get(self, into: torch.Tensor, rank: int, offset: int) -> None:
        """Begin an MPI get into a buffer."""
        buffer = self._staging_buffer(into)
        self._window.get(buffer.numpy(), rank, self._begins[rank] + offset)
        self._mine(rank).append((buffer, into))

    def flush(self, rank: int) -> None:
        """Flush the MPI window, then copy the buffers of gets to their destinations."""
        self._window.flush(rank)
        for buffer, into in self._begun.pop((threading.get_ident(), rank), ()):
            if into is not None:
                into.copy_(buffer, non_blocking=True)
        cuda.ready(self.local)

    def acquire(self, begin: int, end: int) -> None:
        """Execute a memory fence, then copy the image to `local`."""
        self._window.sync()
        cuda.copy(self.local[begin:end], self._image[begin:end])

    def release(self, begin: int, end: int) -> None:
        """Copy `local` to its image, then execute a memory fence."""
        cuda.copy(self._image[begin:end], self.local[begin:end])
        self._window.sync()

    def _staging_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(tensor), dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    def _mine(self, rank: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the transfers that this thread began with `rank`: MPI needs their buffers until the flush."""
        return self._begun.setdefault((threading.get_ident(), rank), [])

    def free(self) -> None:
        """Unlock the pages and free the MPI window."""
        self.local = self._image = self.local.new_empty(0)
        if self._page_lock is not None:
            self._page_lock.free()
        self._window.free()


def _buffer(tensor: torch.Tensor) -> Any:
    """Return the tensor in the form that MPI takes; mpi4py reads a device pointer from the tensor itself."""
    return tensor if tensor.is_cuda else tensor.numpy()
