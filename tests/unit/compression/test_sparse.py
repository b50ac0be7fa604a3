from __future__ import annotations

import numpy as np
import pytest

from hpcsync.compression import TensorLayout, create
from hpcsync.compression.sparse import TopK, _reaching_a_threshold, largest
from tests.unit.compression.vectors import LAYOUT, decoded, vector


def by_sorting(tensor, count):
    """Return the positions of the largest; ties go to the first."""
    return np.sort(np.argsort(-np.abs(tensor), kind="stable")[:count])


@pytest.mark.parametrize("n", [1, 7, 1000, 30_011])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.4, 0.99])
def test_the_largest_are_found_exactly(n, share):
    generator = np.random.default_rng(n)
    count = max(1, int(n * share))
    for tensor in (
        generator.standard_normal(n),
        generator.standard_cauchy(n).astype(np.float32),
        np.sort(generator.standard_normal(n)),
        generator.integers(-3, 4, n).astype(np.float32) + 8.0,  # many ties
        np.full(n, -2.0),
    ):
        assert largest(tensor, count).tolist() == by_sorting(tensor, count).tolist()


def test_the_largest_are_found_where_the_sample_misses_them():
    """Every element of a stride is 0, or much too large: the estimate is useless, the result is still right."""
    tensor = np.random.default_rng(1).standard_normal(20_000)
    for misled in (0.0, 1e6):
        tensor[::100] = misled
        assert largest(tensor, 400).tolist() == by_sorting(tensor, 400).tolist()


@pytest.mark.parametrize("count", [1000, 20_000])
def test_few_more_than_wanted_are_compared(count):
    magnitudes = np.abs(np.random.default_rng(1).standard_normal(100_000))
    assert count <= len(_reaching_a_threshold(magnitudes, count)) < 2 * count


def test_zeros_are_not_sent():
    tensor = np.zeros(10_000)
    assert len(largest(tensor, 100)) == 0
    tensor[[5, 777]] = 1.0, -1.0
    assert largest(tensor, 100).tolist() == [5, 777]


def test_nan_is_sent():
    tensor = np.ones(10_000, np.float32)
    tensor[[3, 4567]] = np.nan
    tensor[9] = np.inf
    assert largest(tensor, 3).tolist() == [3, 9, 4567]
    assert len(largest(np.full(100, np.nan), 3)) >= 3


def test_top_k_sends_the_largest_of_each_matrix_and_all_biases():
    codec = create("top-k", LAYOUT, np.float32, ratio=0.05, error_feedback=False)
    given = vector()
    sent = decoded(codec, codec.encode(given))
    for begin, size, shape in zip(LAYOUT.begins, LAYOUT.sizes, LAYOUT.shapes, strict=True):
        was, now = given[begin : begin + size], sent[begin : begin + size]
        if len(shape) <= 1:
            assert now.tolist() == was.tolist()
        elif size:
            chosen = np.flatnonzero(now)
            assert chosen.tolist() == by_sorting(was, max(1, int(size * 0.05))).tolist()
            assert now[chosen].tolist() == was[chosen].tolist()


@pytest.mark.parametrize(("dtype", "itemsize"), [(np.float32, 4), (np.float64, 8)])
def test_a_payload_takes_a_position_and_a_value_for_each(dtype, itemsize):
    codec = create("top-k", TensorLayout([(100, 100)]), dtype, ratio=0.01)
    encoded = codec.encode(np.random.default_rng(1).standard_normal(10_000).astype(dtype))
    assert len(encoded.payload(0, 10_000)) == codec.nominal_bytes(0, 10_000) == 8 + 100 * (itemsize + 4)
    assert codec.nominal_bytes(0, 5_000) == 8 + 50 * (itemsize + 4)


@pytest.mark.parametrize("ends", [(334, 667, 1000), (1, 2, 3, 1000), (64, 512, 900, 950, 1000)])
def test_payloads_of_all_parts_have_as_many_elements_as_the_whole(ends):
    codec = create("top-k", TensorLayout([(30, 30), (100, 1)]), np.float32, ratio=0.05)
    parts = [codec.nominal_bytes(begin, end) - 8 for begin, end in zip((0, *ends), ends, strict=False)]
    assert sum(parts) == codec.nominal_bytes(0, 1000) - 8


def test_a_ratio_counts_once_and_from_a_half_on_everything_is_sent():
    layout = TensorLayout([(100, 100)])
    codec = create("top-k", layout, np.float32, ratio=0.01, error_feedback=False)
    given = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    for ratio, count in ((0.2, 2000), (float("nan"), 100), (0.49, 4900), (0.5, 10_000), (1.0, 10_000)):
        encoded = codec.encode(given, ratio)
        assert np.count_nonzero(decoded(codec, encoded)) == count
        assert len(encoded.payload(0, 10_000)) == codec.nominal_bytes(0, 10_000, ratio) <= codec.capacity(0, 10_000)


def test_random_k_is_unbiased_without_error_feedback():
    layout = TensorLayout([(20, 5), (2, 5), (0, 3), (4,)])
    codec = create("random-k", layout, np.float64, seed=1, ratio=0.1, error_feedback=False)
    given, draws = vector(layout=layout, dtype=np.float64), 4000
    sent = np.array([decoded(codec, codec.encode(given)) for _ in range(draws)])
    # An element is sent 10 times as large with a probability of 0.1: a variance of 9 squares.
    error = 3.0 * np.abs(given) / np.sqrt(draws)
    error[110:] = 1e-12
    assert (np.abs(sent.mean(axis=0) - given) < 4.5 * error).all()
    assert set(np.count_nonzero(sent, axis=1)) == {15}


@pytest.mark.parametrize("name", ["top-k", "random-k", "dgc"])
def test_positions_that_would_not_fit_are_refused(name):
    create(name, TensorLayout([(2**31 - 1,)]), np.float32)
    with pytest.raises(ValueError, match="the vector must have fewer than 2147483648 elements, got 2147483648"):
        create(name, TensorLayout([(2**16, 2**15)]), np.float32)


def test_random_k_with_error_feedback_is_not_rescaled():
    codec = create("random-k", LAYOUT, np.float32, ratio=0.1, error_feedback=True)
    given = vector()
    sent = decoded(codec, codec.encode(given))
    assert 0 < np.count_nonzero(sent) < LAYOUT.size / 4
    assert (sent[sent != 0] == given[sent != 0]).all()


def test_two_seeds_choose_differently():
    chosen = [
        np.flatnonzero(decoded(codec, codec.encode(vector()))).tolist()
        for codec in (create("random-k", LAYOUT, np.float32, seed=seed) for seed in (1, 2))
    ]
    assert chosen[0] != chosen[1]


def test_a_codec_that_sends_the_smallest_would_be_caught():
    class Smallest(TopK):
        def _select(self, tensor, count):
            return np.sort(np.argsort(np.abs(tensor))[:count])

    codec = Smallest(TensorLayout([(10, 10)]), np.float64, ratio=0.1)
    given = np.random.default_rng(1).standard_normal(100)
    assert np.flatnonzero(decoded(codec, codec.encode(given))).tolist() != by_sorting(given, 10).tolist()


def test_too_many_nans_do_not_exceed_the_count():
    given = np.random.default_rng(1).standard_normal(10_000)
    given[::50] = np.nan
    codec = create("top-k", TensorLayout([(100, 100)]), np.float64, ratio=0.01, error_feedback=False)
    assert np.count_nonzero(decoded(codec, codec.encode(given))) == 100
