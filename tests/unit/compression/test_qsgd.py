from __future__ import annotations

import numpy as np
import pytest

from hpcsync.compression import TensorLayout, create
from hpcsync.compression.codec import BLOCK
from hpcsync.compression.qsgd import QSGD, touched
from tests.unit.compression.vectors import LAYOUT, decoded, vector

N = 40


def draws(codec, given, n=5000):
    """Return decoded draws of one vector per bucket; buckets are drawn independently."""
    wide = type(codec)(TensorLayout([(n * len(given),)]), codec.dtype, levels=codec.levels, bucket=codec.bucket)
    return decoded(wide, wide.encode(np.tile(given, n))).reshape(n, len(given))


def is_unbiased(codec, given, n=5000):
    """Return whether the mean of the draws is the vector, within 4.5 standard errors (of at most half a level)."""
    norm = np.linalg.norm(given)
    error = 0.5 * norm / codec.levels / np.sqrt(n)
    return bool((np.abs(draws(codec, given, n).mean(axis=0) - given) < 4.5 * error + 1e-7 * norm).all())


def one(levels, dtype=np.float64, codec=QSGD):
    return codec(TensorLayout([(N,)]), dtype, levels=levels, bucket=N)


@pytest.mark.parametrize("levels", [1, 4, 127, 1000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_mean_of_many_draws_is_the_vector(levels, dtype):
    assert is_unbiased(one(levels, dtype), np.random.default_rng(1).standard_normal(N).astype(dtype))


def test_rounding_to_the_nearest_level_would_be_caught():
    class Nearest(QSGD):
        def _encode(self, vector, ratio):
            class Half:
                def random(self, shape, dtype):
                    return np.full(shape, 0.5, dtype)

            self._draws.generator = lambda xp: Half()
            return super()._encode(vector, ratio)

    assert not is_unbiased(one(4, codec=Nearest), np.random.default_rng(1).standard_normal(N))


@pytest.mark.parametrize("levels", [1, 4, 15])
def test_the_variance_is_within_its_bound(levels):
    given = np.random.default_rng(2).standard_normal(N)
    square = ((draws(one(levels), given, 2000) - given) ** 2).sum(axis=1)
    bound = min(N / levels**2, np.sqrt(N) / levels) * (given**2).sum()
    assert 0.1 * bound < square.mean() + 4 * square.std() / np.sqrt(2000) and square.mean() < bound


@pytest.mark.parametrize(("levels", "dtype"), [(1, np.int8), (127, np.int8), (128, np.int16), (32767, np.int16)])
def test_no_level_is_beyond_the_last_even_of_an_element_that_is_its_buckets_norm(levels, dtype):
    codec = create("qsgd", TensorLayout([(20_000,)]), np.float32, levels=levels, bucket=4)
    given = np.zeros(20_000, np.float32)
    given[::8], given[4::8] = np.float32(1 / 3), np.float32(-1e5 / 3)
    encoded = codec.encode(given)
    assert encoded.levels.dtype == dtype
    assert {abs(level) for level in encoded.levels.tolist()} <= {0, levels - (levels == 32767), levels}
    assert np.allclose(decoded(codec, encoded), given, rtol=1e-4)


def test_a_bucket_of_zeros_is_zero_beside_others():
    codec = create("qsgd", TensorLayout([(12,)]), np.float64, bucket=4)
    given = np.array([1.0, 2, 3, 4, 0, 0, 0, 0, 1e-300, 0, 0, 0])
    came = decoded(codec, codec.encode(given))
    assert came[:4].all() and not came[4:].any()


def test_a_payload_is_a_norm_for_each_bucket_touched_and_a_level_for_each_element():
    codec = create("qsgd", TensorLayout([(2000,)]), np.float32)
    assert codec.capacity(0, 2000) == codec.nominal_bytes(0, 2000) == 4 * 4 + 2000
    assert codec.capacity(511, 513) == 2 * 4 + 2
    assert create("qsgd", TensorLayout([(2000,)]), np.float32, levels=128).capacity(512, 1024) == 4 + 2 * 512
    assert touched(512, 1024, 512) == (1, 2)


def test_a_bucket_beyond_the_vector_takes_no_more_memory_than_a_vector():
    given = np.random.default_rng(3).standard_normal(2000).astype(np.float32)
    codecs = [create("qsgd", TensorLayout([(2000,)]), np.float32, bucket=bucket) for bucket in (BLOCK, 2**40)]
    for _ in range(2):  # the generator, too
        payloads = {codec.encode(given).payload(0, 2000).tobytes() for codec in codecs}
        assert len(payloads) == 1
    assert codecs[1].capacity(0, 2000) == 4 + 2000
    for size, bucket in ((2000, 5000), (2 * BLOCK, 2 * BLOCK)):
        assert create("qsgd", TensorLayout([(size,)]), np.float32, bucket=bucket).bucket == bucket


def test_two_seeds_draw_differently():
    payloads = {
        create("qsgd", LAYOUT, np.float32, seed=seed).encode(vector()).payload(0, 100).tobytes() for seed in (1, 2)
    }
    assert len(payloads) == 2


@pytest.mark.parametrize("options", [{"levels": 0}, {"levels": 32768}, {"bucket": 0}])
def test_values_that_are_not_allowed_are_refused(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))} must"):
        create("qsgd", LAYOUT, np.float32, **options)
