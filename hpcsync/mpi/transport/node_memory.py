"""Memory of every rank of a node that all of them address: shared host memory, or GPU memory by CUDA IPC."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.mpi.transport import cuda, shm_budget


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return np.dtype(str(dtype).removeprefix("torch."))


class MemoryUnreachable(Exception):
    """Ranks of this job cannot address each other's memory; raised by all of them alike."""


class NodeMemory(ABC):
    """of: every rank's memory as this rank sees it, a tensor of shape (its count,) for each rank.

    note: what its user may want to know, if anything.
    """

    of: list[torch.Tensor]
    note = ""

    @abstractmethod
    def sync(self) -> None:
        """Order this rank's loads and stores before this with those after it."""

    @abstractmethod
    def free(self) -> None:
        """Collective, and harmless when repeated; nobody may use the tensors afterwards."""


def node_memory(comm: MPI.Intracomm, count: int, dtype: torch.dtype, device: torch.device) -> NodeMemory:
    """Of `device`, the kind of memory that it is on every rank. Collective; all ranks are on one node.

    count: elements of this rank's, which may differ. What they hold at first is undefined.
    Raises MemoryUnreachable.
    """
    return HostMemory(comm, count, dtype) if device.type == "cpu" else DeviceMemory(comm, count, dtype, device)


class HostMemory(NodeMemory):
    """A window that MPI lets all ranks share. page_lock: for a GPU that is to copy there and from there by itself.

    Raises JobError, on all ranks, where the node has no room for it.
    """

    def __init__(self, comm: MPI.Intracomm, count: int, dtype: torch.dtype, *, page_lock: bool = False) -> None:
        counts = comm.allgather(count)
        n_bytes = -(-count * dtype.itemsize // cuda.PAGE_BYTES) * cuda.PAGE_BYTES
        self._taken = shm_budget.take(comm, n_bytes)
        self._win: MPI.Win | None = MPI.Win.Allocate_shared(n_bytes, 1, comm=comm)
        memories = [self._win.Shared_query(rank)[0] for rank in range(comm.size)]
        arrays = [np.frombuffer(memory, np.uint8, len(memory)) for memory in memories]  # type: ignore[call-overload]
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
        if self._win is not None:
            self._win.Sync()

    def free(self) -> None:
        if self._win is not None:
            win, self._win = self._win, None
            self.of = []
            if self._page_lock is not None:
                self._page_lock.free()
            win.Unlock_all()
            win.Free()
            shm_budget.give_back(self._taken)


class DeviceMemory(NodeMemory):
    """A plain allocation on every rank's GPU, opened by all others."""

    def __init__(self, comm: MPI.Intracomm, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self._opened: list[torch.Tensor] = []
        mine, failure = torch.empty(0, dtype=dtype, device=device), ""
        handle = b""
        try:
            mine = cuda.allocate(count, dtype, device)
            cuda.ready(mine)
            handle = cuda.exported(mine) if count else b""
        except Exception as error:
            failure = f"rank {comm.rank}'s memory: {error}"
        everybody = comm.allgather((handle, count))
        self.of = [torch.empty(0, dtype=dtype, device=device) for _ in everybody]
        self.of[comm.rank] = mine
        try:
            for rank, (its_handle, its_count) in enumerate(everybody):
                if rank != comm.rank and its_handle and not failure:
                    self.of[rank] = cuda.opened(its_handle, its_count, dtype, device)
                    self._opened.append(self.of[rank])
        except Exception as error:
            failure = f"rank {comm.rank} cannot open rank {rank}'s memory: {error}"
        if failures := list(filter(None, comm.allgather(failure))):  # what one rank cannot do, none does
            self.free()
            raise MemoryUnreachable(failures[0])

    def sync(self) -> None:
        """What a stream has completed is there for all GPUs of the node."""

    def free(self) -> None:
        if not self.of:
            return
        mine, self.of = self.of[self._comm.rank], []
        cuda.ready(mine)
        for tensor in self._opened:
            cuda.close(tensor, self._device)
        self._opened = []
        self._comm.Barrier()  # it may be freed only after all others have closed it
