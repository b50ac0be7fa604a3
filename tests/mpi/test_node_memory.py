"""Memory that all ranks of a node address: everybody has it, or nobody, and then it is given back."""

from __future__ import annotations

import pytest
import torch

from hpcsync.mpi import cuda
from hpcsync.mpi.node_memory import DeviceMemory, HostMemory, MemoryUnreachable


def test_memory_that_cannot_be_locked_serves_all_the_same_and_says_so(comm, monkeypatch):
    """On one rank or on all: locking is each rank's own affair."""
    locks = []

    class Lock:
        def __init__(self, arrays):
            self.failure = "its pages are not locked: no" if comm.rank == comm.size - 1 else ""
            locks.extend(array.nbytes for array in arrays)

        free = staticmethod(locks.clear)

    monkeypatch.setattr(cuda, "PageLock", Lock)
    memory = HostMemory(comm, 1000, torch.float32, page_lock=True)
    assert len(locks) == comm.size and min(locks) >= 4000
    assert (memory.note != "") == (comm.rank == comm.size - 1)
    memory.free()
    memory.free()
    assert locks == []


def test_everybody_reads_what_everybody_has_written(comm):
    memory = HostMemory(comm, comm.rank, torch.float64)
    assert [len(tensor) for tensor in memory.of] == list(range(comm.size))
    memory.of[comm.rank].fill_(comm.rank)
    memory.sync()
    comm.Barrier()
    memory.sync()
    assert all((tensor == rank).all() for rank, tensor in enumerate(memory.of))
    comm.Barrier()
    memory.free()


def test_gpu_memory_that_one_rank_cannot_open_is_given_up_by_all(comm, needs, monkeypatch):
    """With host memory in its place: what is asked of CUDA, in which order, and that all hear of a failure."""
    needs(2)
    said = []

    def opened(handle, count, dtype, device):
        if comm.rank == comm.size - 1 and handle == b"rank 0":
            raise RuntimeError("cudaErrorPeerAccessUnsupported")
        said.append(handle)
        return torch.zeros(count, dtype=dtype)

    monkeypatch.setattr(cuda, "exported", lambda tensor: f"rank {comm.rank}".encode())
    monkeypatch.setattr(cuda, "opened", opened)
    monkeypatch.setattr(cuda, "close", lambda tensor, device: said.remove(said[0]))
    with pytest.raises(MemoryUnreachable, match=f"rank {comm.size - 1} cannot open rank 0's memory: cudaErrorPeer"):
        DeviceMemory(comm, 5, torch.float32, torch.device("cpu"))
    assert said == [], "what was opened is closed"
