from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcsync.compression import TensorLayout, create
from hpcsync.compression.half_precision import Bf16
from tests.unit.compression.vectors import decoded

CASTS = [("fp16", torch.float16), ("bf16", torch.bfloat16)]


def awkward():
    """Numbers of every size, halfway cases to even and to odd, subnormal and too large ones, and NaN."""
    generator = np.random.default_rng(1)
    bits = generator.integers(0, 1 << 32, 50_000, dtype=np.uint32)
    halfway = np.concatenate([bits & 0xFFFF0000 | 0x8000, bits & 0xFFFFE000 | 0x1000])
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65519.9, 65520.0, -7e4, 6e-8, 2.9e-8, 3e-8, 1e-45, 3.4e38]
    near_one = generator.standard_normal(50_000).astype(np.float32)
    return np.concatenate([bits.view(np.float32), halfway.view(np.float32), np.float32(special), near_one])


def casts(codec, dtype, given):
    """Return the results of the codec and of torch's own cast."""
    came = decoded(codec, codec.encode(given))
    return came, torch.from_numpy(given).to(dtype).to(torch.float32).numpy().astype(given.dtype)


@pytest.mark.parametrize(("name", "dtype"), CASTS)
def test_every_bit_is_that_of_torchs_cast(name, dtype):
    given = awkward()
    came, cast = casts(create(name, TensorLayout([given.shape]), np.float32), dtype, given)
    assert (np.isnan(came) == np.isnan(given)).all()
    number = ~np.isnan(given)
    assert came[number].tobytes() == cast[number].tobytes()


@pytest.mark.parametrize(("name", "dtype"), CASTS)
def test_doubles_are_rounded_too(name, dtype):
    given = np.random.default_rng(2).standard_normal(1000)
    came, cast = casts(create(name, TensorLayout([given.shape]), np.float64), dtype, given)
    assert came.dtype == np.float64 and came.tolist() == cast.tolist()


def test_cutting_off_the_lower_half_would_be_caught():
    class Cut(Bf16):
        def _rounded(self, values):
            return values.view(np.uint32) >> 16

    given = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    came, cast = casts(Cut(TensorLayout([given.shape]), np.float32), torch.bfloat16, given)
    assert (came != cast).mean() > 0.4


def test_an_element_takes_two_bytes():
    codec = create("bf16", TensorLayout([(7,)]), np.float32)
    assert codec.capacity(2, 7) == codec.nominal_bytes(2, 7) == 10
