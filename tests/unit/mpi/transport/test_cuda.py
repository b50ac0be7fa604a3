"""CUDA primitives without a GPU: whole pages, and calls that leave tensors in host memory unchanged."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hpcsync.mpi.transport import cuda

PAGE = cuda.PAGE_BYTES


@pytest.mark.parametrize("n_bytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE])
@pytest.mark.parametrize("offset", [0, 16, PAGE - 16])
def test_whole_pages_hold_the_bytes_wherever_memory_begins(n_bytes, offset):
    memory = np.zeros(cuda.paged(n_bytes) + 2 * PAGE, np.uint8)
    begin = -memory.ctypes.data % PAGE + offset
    pages = cuda.whole_pages(memory[begin : begin + cuda.paged(n_bytes)])
    assert pages.ctypes.data % PAGE == len(pages) % PAGE == 0 and len(pages) >= n_bytes
    assert 0 <= pages.ctypes.data - memory[begin:].ctypes.data < PAGE


def test_pages_are_those_of_this_machine():
    """With smaller ones a page would be locked in parts, and so shared with other data."""
    assert os.sysconf("SC_PAGE_SIZE") == PAGE


def test_zeros_are_there_before_others_can_put_into_the_memory(monkeypatch):
    memory, seen = torch.ones(3), []
    monkeypatch.setitem(
        sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=nullcontext, Memory=lambda n_bytes: n_bytes))
    )
    monkeypatch.setattr(cuda, "_tensor", lambda n_bytes, count, dtype: memory)
    monkeypatch.setattr(cuda, "ready", lambda tensor: seen.append(tensor.clone()))
    assert cuda.allocate(3, torch.float32, torch.device("cuda", 1)) is memory
    assert [tensor.tolist() for tensor in seen] == [[0.0] * 3]


class Runtime:
    """Stands for CUDA's: locks of pages, of which the `limit`-th fails."""

    def __init__(self, limit: int = 99) -> None:
        self.locked: list[tuple[int, int]] = []
        self.limit = limit

    def hostRegister(self, begin: int, size: int, flags: int) -> None:
        if len(self.locked) + 1 >= self.limit:
            raise RuntimeError("cudaErrorMemoryAllocation")
        self.locked.append((begin, size))

    def hostUnregister(self, begin: int) -> None:
        self.locked = [lock for lock in self.locked if lock[0] != begin]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Callable[[Runtime], Runtime]:
    def install(runtime: Runtime) -> Runtime:
        cupy = type("CuPy", (), {"cuda": type("Cuda", (), {"runtime": runtime})})
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        return runtime

    return install


def test_pages_are_locked_until_they_are_unlocked(runtime):
    found, arrays = (
        runtime(Runtime()),
        [np.zeros(3 * PAGE, np.uint8), np.zeros(50 * PAGE, np.uint8), np.zeros(0, np.uint8)],
    )
    lock = cuda.PageLock(arrays)
    assert lock.failure == ""
    assert found.locked == [(array.ctypes.data, array.nbytes) for array in arrays if array.nbytes]
    lock.free()
    lock.free()
    assert found.locked == []


def test_after_a_failure_no_page_stays_locked(runtime):
    found = runtime(Runtime(limit=2))
    lock = cuda.PageLock([np.zeros(PAGE, np.uint8), np.zeros(500 * PAGE, np.uint8), np.zeros(PAGE, np.uint8)])
    assert "MemoryAllocation" in lock.failure and found.locked == []
    lock.free()


def test_on_the_cpu_calls_are_unchanged():
    made = []
    cpu = torch.device("cpu")
    assert cuda.new_stream(cpu) is None
    call = cuda.after_this(lambda: made.append(threading.get_ident()), cpu, None)
    call()
    with cuda.own_stream(torch.device("cpu")):
        cuda.ready(torch.zeros(1))
    assert made == [threading.get_ident()]
    assert torch.equal(cuda.allocate(3, torch.float64, torch.device("cpu")), torch.zeros(3, dtype=torch.float64))
