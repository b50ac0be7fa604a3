"""Payloads as tensors: padded and aligned to whole elements."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hpcsync.training import compressor
from hpcsync.training.compressor import Compression
from tests.unit.jobs import make_job

SHAPES = [(7, 9), (5,), (3, 4, 2)]
SIZE = 63 + 5 + 24
NAMES = ["top-k", "random-k", "dgc", "qsgd", "one-bit", "sign", "powersgd", "fp16", "bf16"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cuts", [(0, SIZE), (0, 31, 62, SIZE), (0, 2, 50, SIZE)])
def test_payloads_are_whole_elements_and_decode_to_the_same_bits_however_it_is_cut(name, dtype, cuts):
    job = make_job(compression={"name": name})
    vector = torch.randn(SIZE, generator=torch.Generator().manual_seed(1), dtype=dtype)
    shards = [slice(begin, end) for begin, end in pairwise(cuts)]
    whole, cut = (torch.empty_like(vector) for _ in range(2))
    for found, those in ((whole, [slice(0, SIZE)]), (cut, shards)):
        compression = Compression(job, SHAPES, dtype)
        for shard, payload in zip(those, compression.compressor(0).encode(vector, those), strict=True):
            assert len(payload) <= compression.slot_size(shard) * dtype.itemsize
            elements = payload.view(dtype).numpy()
            assert elements.flags.aligned
            assert memoryview(elements).format == np.dtype(elements.dtype).char, "which MPI can send"
            slot = torch.full((compression.slot_size(shard),), torch.nan, dtype=dtype)
            slot[: len(elements)] = payload.view(dtype)
            compression.decode(slot.view(torch.uint8), found[shard], shard)
    assert torch.equal(whole, cut)
    assert torch.isfinite(whole).all()


# ---- stand-ins for a GPU's memory and streams ----


def on_gpu(index: int) -> SimpleNamespace:
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))


def test_cupy_computes_on_the_gpu_of_the_tensor(monkeypatch):
    """A script may use another one than the current one, and autograd's threads have one of their own."""
    current = []

    class Device:
        def __init__(self, index: int) -> None:
            self._index = index

        def use(self) -> None:
            current.append(self._index)

    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=Device), from_dlpack=lambda tensor: (current[-1], tensor))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    tensor = on_gpu(1)
    assert compressor.as_array(tensor) == (1, tensor)


@pytest.mark.parametrize("here", ["default", "own"])
def test_torch_waits_for_cupy_where_it_computes_on_another_stream(here, monkeypatch):
    class Stream(str):
        def wait_stream(self, other: Stream) -> None:
            waits.append((str(self), str(other)))

    waits: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(f"{here} of {device}"))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream(f"default of {device}"))
    compressor.written(on_gpu(1))
    assert waits == [("own of cuda:1", "default of cuda:1")] * (here == "own")


def test_a_decoded_vector_is_said_to_be_written(monkeypatch):
    said: list[torch.Tensor] = []
    monkeypatch.setattr(compressor, "written", said.append)
    compression, into = Compression(make_job(compression={"name": "fp16"}), SHAPES, torch.float32), torch.zeros(SIZE)
    (payload,) = compression.compressor(0).encode(torch.ones(SIZE), [compression.whole])
    compression.decode(payload, into, compression.whole)
    assert said == [into] and (into == 1).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_are_not_finite_stay_so_without_a_warning_of_numpy(name):
    compression = Compression(make_job(compression={"name": name}), SHAPES, torch.float32)
    sender, decoded = compression.compressor(0), torch.zeros(SIZE)
    for value in (1.0, math.inf, math.nan):  # what is not sent of one is added to the next
        payload, *_ = sender.encode(torch.full((SIZE,), value), [compression.whole])
        compression.decode(payload, decoded, compression.whole)
    assert not torch.isfinite(decoded).all()
