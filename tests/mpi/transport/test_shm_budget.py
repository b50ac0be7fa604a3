"""A window that a node has no room for is refused before MPI creates it, on all ranks alike, and holds no memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcsync.config.errors import JobError
from hpcsync.mpi.transport import shm_budget
from hpcsync.mpi.transport.node_memory import HostMemory
from hpcsync.mpi.transport.window import Window

FREE = 1 << 24
makers = pytest.mark.parametrize(
    "make",
    [lambda comm, n: Window(comm, n, np.uint8), lambda comm, n: HostMemory(comm, n, torch.uint8)],
    ids=["window", "node memory"],
)


@pytest.fixture
def small(monkeypatch):
    """A place for windows that seems to have 16 MiB free, whatever is touched of them, and to hold none."""
    for name in ("held_bytes", "free_bytes"):
        monkeypatch.setattr(shm_budget._Account, name, 0)
    usage = shm_budget.shutil.disk_usage(shm_budget.directory())._replace(free=FREE, total=FREE)
    monkeypatch.setattr(shm_budget.shutil, "disk_usage", lambda path: usage)


@makers
def test_a_window_that_is_too_large_is_refused_on_all_ranks(comm, needs, small, make):
    needs(2)
    with pytest.raises(JobError) as caught:
        make(comm, FREE if comm.rank == comm.size - 1 else 0)
    assert len(set(comm.allgather(str(caught.value)))) == 1
    assert f"the windows of its {comm.size} ranks need 21 MiB of /dev/shm, and 16 MiB are free" in str(caught.value)


@makers
def test_a_window_counts_until_it_is_freed(comm, needs, small, make):
    needs(2)
    half = FREE // 2 if comm.rank == 0 else 0
    first = make(comm, half)
    with pytest.raises(JobError):
        make(comm, half)
    first.free()
    first.free()
    make(comm, half).free()


def test_provided_memory_takes_no_shared_memory(comm, small):
    Window(comm, 2 * FREE, np.uint8, bytearray(2 * FREE)).free()
    Window(comm, FREE // 4 if comm.rank == 0 else 0, np.uint8).free()


def test_a_rank_alone_on_its_node_has_private_memory(comm, small):
    if comm.size > 1:
        pytest.skip("for one rank")
    Window(comm, 2 * FREE, np.uint8).free()
