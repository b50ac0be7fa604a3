from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from hpcsync.bench.machine import machine, versions


def test_the_machine_is_named_with_its_size():
    assert re.fullmatch(r".+, \d+ cores, \d+ GiB", machine())


def test_versions_of_relevant_packages_are_named():
    assert re.fullmatch(r"Python 3\S+, numpy \S+, torch \S+, mpi4py \S+, h5py \S+", versions())


def test_versions_without_mpi4py(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert re.fullmatch(r"Python 3\S+, numpy \S+, torch \S+, h5py \S+", versions())


@pytest.fixture
def cupy(monkeypatch):
    """Provide a stub of CuPy with three GPUs."""
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 3,
        getDeviceProperties=lambda i: {"name": b"Small" if i == 1 else b"Large"},
        driverGetVersion=lambda: 13010,
        runtimeGetVersion=lambda: 12090,
    )
    module = SimpleNamespace(__version__="14.0.1", cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy.cuda", module.cuda)
    monkeypatch.setattr(torch.version, "cuda", "12.8")


def test_gpus_are_named_and_counted(cupy):
    assert machine("cuda") == machine() + ", 2 x Large, 1 x Small"


def test_all_versions_of_cuda_are_named(cupy):
    assert versions("cuda") == versions() + ", CuPy 14.0.1, CUDA 13.1 (driver), 12.9 (CuPy), 12.8 (torch)"
