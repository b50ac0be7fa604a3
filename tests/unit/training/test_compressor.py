"""Payloads as tensors: padded and aligned to whole elements."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

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
