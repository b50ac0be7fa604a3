"""Memory that all ranks of a node address: either all ranks have it, or none has, and then it is freed."""

from __future__ import annotations

import pytest
import torch

from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.node_memory import DeviceMemory, HostMemory, MemoryUnreachable


def test_memory_that_cannot_be_locked_works_with_a_note(comm, monkeypatch):
    """Each rank locks the pages itself, so locking may fail on one rank or on all. It locks no page with other data."""
    locks = []

    class Lock:
        def __init__(self, arrays):
            self.failure = "pages not locked: no" if comm.rank == comm.size - 1 else ""
            locks.extend((array.ctypes.data, array.nbytes) for array in arrays)

        free = staticmethod(locks.clear)

    monkeypatch.setattr(cuda, "PageLock", Lock)
    memory = HostMemory(comm, 1000, torch.float32, page_lock=True)
    assert len(locks) == comm.size
    assert all(begin % cuda.PAGE_BYTES == n_bytes % cuda.PAGE_BYTES == 0 for begin, n_bytes in locks)
    for tensor, (begin, n_bytes) in zip(memory.of, locks, strict=True):
        assert begin == tensor.data_ptr() and n_bytes >= tensor.nbytes
    assert (memory.note != "") == (comm.rank == comm.size - 1)
    memory.free()
    memory.free()
    assert locks == []


def test_all_ranks_read_what_all_ranks_have_written(comm):
    memory = HostMemory(comm, comm.rank, torch.float64)
    assert [len(tensor) for tensor in memory.of] == list(range(comm.size))
    memory.of[comm.rank].fill_(comm.rank)
    memory.sync()
    comm.Barrier()
    memory.sync()
    assert all((tensor == rank).all() for rank, tensor in enumerate(memory.of))
    comm.Barrier()
    memory.free()


class Cuda:
    """Stub of CUDA IPC: records the calls in order and fabricates other ranks' memory."""

    def __init__(self, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.own_counts = rank, []
        self.refused: bytes | None = None
        for name in ("exported", "opened", "close"):
            monkeypatch.setattr(cuda, name, getattr(self, name))

    def exported(self, tensor):
        self.own_counts.append("export")
        return f"rank {self.rank}".encode()

    def opened(self, handle, count, dtype, device):
        if handle == self.refused:
            raise RuntimeError("cudaErrorPeerAccessUnsupported")
        self.own_counts.append(f"open {handle.decode()}")
        return torch.full((count,), 5.0, dtype=dtype)

    def close(self, tensor, device):
        self.own_counts.append("close")


def test_all_ranks_open_each_others_memory_and_close_it_before_it_is_freed(comm, monkeypatch):
    made = Cuda(comm.rank, monkeypatch)
    memory = DeviceMemory(comm, 3 + comm.rank, torch.float32, torch.device("cpu"))
    assert [len(tensor) for tensor in memory.of] == [3 + rank for rank in range(comm.size)]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    assert made.own_counts == ["export", *(f"open rank {rank}" for rank in others)]
    assert all((memory.of[rank] == 5).all() for rank in others) and (memory.of[comm.rank] == 0).all()
    closed = len(made.own_counts) + len(others)
    barrier = comm.allreduce
    monkeypatch.setattr(memory, "_comm", type("Comm", (), {
        "rank": comm.rank, "Barrier": lambda self: made.own_counts.append("all have closed") or barrier(0)
    })())  # fmt: skip
    memory.free()
    memory.free()
    assert made.own_counts[closed:] == ["all have closed"] and set(made.own_counts[closed - len(others) : closed]) <= {
        "close"
    }


def test_gpu_memory_that_one_rank_cannot_open_is_given_up_by_all(comm, needs, monkeypatch):
    needs(2)
    made = Cuda(comm.rank, monkeypatch)
    made.refused = b"rank 0" if comm.rank == comm.size - 1 else None
    with pytest.raises(MemoryUnreachable, match=f"rank {comm.size - 1} cannot open rank 0's memory: cudaErrorPeer"):
        DeviceMemory(comm, 5, torch.float32, torch.device("cpu"))
    opened = sum(word.startswith("open") for word in made.own_counts)
    assert made.own_counts.count("close") == opened, "what was opened is closed"
