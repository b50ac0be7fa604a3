"""Memory that all ranks of a node address: everybody has it, or nobody, and then it is given back."""

from __future__ import annotations

import pytest
import torch

from hpcsync.mpi import cuda
from hpcsync.mpi.node_memory import DeviceMemory, HostMemory, MemoryUnreachable


def test_shared_memory_is_locked_on_all_ranks_or_given_up_by_all(comm, monkeypatch):
    locked = []

    def lock(arrays):
        if fails:
            raise RuntimeError("cudaErrorMemoryAllocation")
        locked.extend(array.nbytes for array in arrays)
        return locked.clear

    monkeypatch.setattr(cuda, "page_lock", lock)
    fails = False
    memory = HostMemory(comm, 1000, torch.float32, page_lock=True)
    assert len(locked) == comm.size and min(locked) >= 4000
    memory.free()
    memory.free()
    assert locked == []
    fails = comm.rank == comm.size - 1
    with pytest.raises(MemoryUnreachable, match=f"rank {comm.size - 1} cannot lock pages"):
        HostMemory(comm, 1000, torch.float32, page_lock=True)
    assert locked == []


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
