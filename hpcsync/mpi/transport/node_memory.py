"""Memory that all ranks of a node address: shared host memory, or GPU memory opened by CUDA IPC."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.mpi.transport import communicator, cuda, shm_budget
from hpcsync.mpi.transport.communicator import RawWindow


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the NumPy type with the same name as `dtype`."""
    return np.dtype(str(dtype).removeprefix("torch."))


class MemoryUnreachable(Exception):
    """Ranks of a job cannot address each other's memory; raised on all ranks alike."""


class NodeMemory(ABC):
    """Memory of every rank of a node, addressable by all of them.

    Attributes
    ----------
    of : list of torch.Tensor
        Memory of each rank as this rank sees it, of shape (that rank's count,).
    note : str
        Remark for the user, "" if there is none.
    """

    of: list[torch.Tensor]
    note = ""

    @abstractmethod
    def sync(self) -> None:
        """Order this rank's earlier loads and stores before its later ones."""

    @abstractmethod
    def free(self) -> None:
        """Free the memory; collective, and harmless when repeated. No rank may use the tensors afterwards."""


def node_memory(comm: MPI.Intracomm, count: int, dtype: torch.dtype, device: torch.device) -> NodeMemory:
    """Create memory on `device`, the same type of device on every rank; collective over the ranks of one node.

    Parameters
    ----------
    comm
        Communicator of ranks that share a node.
    count
        Elements of this rank's memory, initially undefined; ranks may differ.
    dtype
        Type of the elements.
    device
        Device of this rank's memory.

    Raises
    ------
    MemoryUnreachable
        If a rank cannot allocate its memory or open another's.
    """
    return HostMemory(comm, count, dtype) if device.type == "cpu" else DeviceMemory(comm, count, dtype, device)


class HostMemory(NodeMemory):
    """Shared-memory window of MPI.

    Parameters
    ----------
    comm, count, dtype
        As for `node_memory`.
    page_lock
        Whether to lock the pages, for a GPU that copies to and from them without the CPU.

    Raises
    ------
    JobError
        On all ranks, if the node has too little shared memory.
    """

    def __init__(self, comm: MPI.Intracomm, count: int, dtype: torch.dtype, *, page_lock: bool = False) -> None:
        counts = comm.allgather(count)
        n_bytes = cuda.paged(count * dtype.itemsize)
        self._taken = shm_budget.take(comm, n_bytes)
        self._win: RawWindow | None = communicator.allocate_shared(comm, n_bytes)
        memories = [self._win.Shared_query(rank)[0] for rank in range(comm.size)]
        arrays = [cuda.whole_pages(np.frombuffer(memory, np.uint8, len(memory))) for memory in memories]
        its_dtype = numpy_dtype(dtype)
        self.of = [
            torch.from_numpy(array[: n * dtype.itemsize].view(its_dtype))
            for array, n in zip(arrays, counts, strict=True)
        ]
        self._page_lock = cuda.PageLock(arrays) if page_lock else None
        self.note = self._page_lock.failure if self._page_lock else ""
        self._win.Lock_all()
        comm.Barrier()

    def sync(self) -> None:
        """Execute a memory fence."""
        if self._win is not None:
            self._win.Sync()

    def free(self) -> None:
        """Unlock and free the window."""
        if self._win is not None:
            win, self._win = self._win, None
            self.of = []
            if self._page_lock is not None:
                self._page_lock.free()
            win.Unlock_all()
            win.Free()
            shm_budget.give_back(self._taken)


class DeviceMemory(NodeMemory):
    """Plain allocation on every rank's GPU, opened by all other ranks by CUDA IPC.

    Parameters
    ----------
    comm, count, dtype, device
        As for `node_memory`.

    Raises
    ------
    MemoryUnreachable
        On all ranks, if one of them cannot allocate its memory or open another's.
    """

    def __init__(self, comm: MPI.Intracomm, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self._opened: list[torch.Tensor] = []
        mine, failure = torch.empty(0, dtype=dtype, device=device), ""
        handle = b""
        try:
            mine = cuda.allocate(count, dtype, device)
            handle = cuda.exported(mine) if count else b""
        except Exception as error:
            failure = f"rank {comm.rank}'s memory: {error}"
        gathered = comm.allgather((handle, count))
        self.of = [torch.empty(0, dtype=dtype, device=device) for _ in gathered]
        self.of[comm.rank] = mine
        try:
            for rank, (its_handle, its_count) in enumerate(gathered):
                if rank != comm.rank and its_handle and not failure:
                    self.of[rank] = cuda.opened(its_handle, its_count, dtype, device)
                    self._opened.append(self.of[rank])
        except Exception as error:
            failure = f"rank {comm.rank} cannot open rank {rank}'s memory: {error}"
        if failures := list(filter(None, comm.allgather(failure))):  # if one rank fails, all do
            self.free()
            raise MemoryUnreachable(failures[0])

    def sync(self) -> None:
        """Do nothing: work that a stream has completed is visible to all GPUs of the node."""

    def free(self) -> None:
        """Close the opened memory, then free this rank's own."""
        if not self.of:
            return
        mine, self.of = self.of[self._comm.rank], []
        cuda.ready(mine)
        for tensor in self._opened:
            cuda.close(tensor, self._device)
        self._opened = []
        self._comm.Barrier()  # memory may be freed only after all other ranks have closed it
