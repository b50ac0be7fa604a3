from __future__ import annotations

import numpy as np
import pytest

from hpcsync.compression import TensorLayout, create
from hpcsync.compression.one_bit import OneBit
from tests.unit.compression.vectors import LAYOUT, decoded, vector


def of_tensors(values):
    return [values[begin : begin + n] for begin, n in zip(LAYOUT.begins, LAYOUT.sizes, strict=True)]


def plain(name, tensor):
    """Return the expected result, computed plainly."""
    if name == "sign":
        return np.where(tensor >= 0, 1.0, -1.0) * np.abs(tensor).mean()
    return np.where(tensor >= 0, tensor[tensor >= 0].mean(), tensor[tensor < 0].mean())


def is_plain(name, codec, given):
    pairs = zip(of_tensors(decoded(codec, codec.encode(given))), of_tensors(given), strict=True)
    return all(
        came == pytest.approx(was if len(shape) <= 1 else plain(name, was), rel=1e-5)
        for (came, was), shape in zip(pairs, LAYOUT.shapes, strict=True)
        if len(was)
    )


@pytest.mark.parametrize("name", ["one-bit", "sign"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_element_becomes_the_value_of_its_sign_and_biases_stay(name, dtype):
    assert is_plain(name, create(name, LAYOUT, dtype, error_feedback=False), vector(1, dtype))


def test_one_mean_for_both_signs_would_be_caught():
    class Symmetric(OneBit):
        def _measure(self, tensor, bits, stands_for):
            stands_for[:] = -np.abs(tensor).mean(), np.abs(tensor).mean()

    assert not is_plain("one-bit", Symmetric(LAYOUT, np.float64), vector(1, np.float64))


@pytest.mark.parametrize("name", ["one-bit", "sign"])
def test_zero_counts_as_positive(name):
    codec = create(name, TensorLayout([(1, 4)]), np.float64, error_feedback=False)
    came = decoded(codec, codec.encode(np.array([0.0, -3.0, -0.0, 9.0])))
    assert came.tolist() == ([3.0, -3.0, 3.0, 3.0])


@pytest.mark.parametrize("name", ["one-bit", "sign"])
def test_one_sign_only_leaves_no_mean_of_none(name):
    codec = create(name, TensorLayout([(1, 3)]), np.float64, error_feedback=False)
    for same in (np.full(3, 2.0), np.full(3, -2.0)):
        assert decoded(codec, codec.encode(same)).tolist() == same.tolist()


@pytest.mark.parametrize("name", ["one-bit", "sign"])
def test_an_element_takes_a_bit_and_a_matrix_two_values(name):
    codec = create(name, TensorLayout([(10, 100), (20, 50), (7,)]), np.float32)
    assert codec.capacity(0, 2007) == codec.nominal_bytes(0, 2007) == 2 * 8 + 7 * 4 + 251
    assert codec.capacity(995, 1003) == 2 * 8 + 1
    assert codec.capacity(2001, 2003) == 2 * 4 + 1
