"""Properties of every codec."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from hpcsync.compression import CODECS, TensorLayout, create
from hpcsync.compression.codec import blocks
from tests.unit.compression.vectors import CUTS, LAYOUT, decoded, shard, vector

OPTIONS = [
    *((name, {}) for name in CODECS),
    ("top-k", {"ratio": 0.3}),
    ("top-k", {"ratio": 1.0}),
    ("random-k", {"ratio": 0.1, "error_feedback": True}),
    ("fp16", {"error_feedback": True}),
]
EVERY = pytest.mark.parametrize(("name", "options"), OPTIONS, ids=lambda value: value if isinstance(value, str) else "")
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@EVERY
@DTYPES
def test_shards_are_decoded_to_the_same_bits_as_the_whole(name, options, dtype):
    codec = create(name, LAYOUT, dtype, **options)
    server = create(name, LAYOUT, dtype, **options)
    for step in range(3):
        encoded = codec.encode(vector(step, dtype))
        whole = decoded(server, encoded)
        assert whole.dtype == dtype and whole.shape == (LAYOUT.size,)
        for cut in CUTS:
            assert decoded(server, encoded, cut).tobytes() == whole.tobytes()


@EVERY
@DTYPES
def test_a_payload_fits_and_has_the_nominal_size(name, options, dtype):
    codec = create(name, LAYOUT, dtype, **options)
    for step in range(3):
        encoded = codec.encode(vector(step, dtype))
        for begin, end in (bounds for cut in CUTS for bounds in pairwise(cut)):
            n_bytes = len(encoded.payload(begin, end))
            assert n_bytes <= codec.capacity(begin, end)
            if end - begin > 500:
                # The size of a sparse payload of a part of a matrix depends on where the largest elements are.
                assert n_bytes == pytest.approx(codec.nominal_bytes(begin, end), rel=0.25, abs=150)


@EVERY
def test_a_payload_may_be_followed_by_other_bytes(name, options):
    codec = create(name, LAYOUT, np.float32, **options)
    encoded = codec.encode(vector())
    for begin, end in pairwise(CUTS[2]):
        payload = encoded.payload(begin, end)
        slot = np.concatenate([payload, np.full(64, 0xA5, np.uint8)])
        assert shard(codec, slot, begin, end).tobytes() == shard(codec, payload, begin, end).tobytes()


@EVERY
@DTYPES
def test_encoding_changes_neither_the_vector_nor_earlier_results(name, options, dtype):
    codec = create(name, LAYOUT, dtype, **options)
    given = vector(1, dtype)
    encoded = codec.encode(given)
    assert given.tobytes() == vector(1, dtype).tobytes()
    before = encoded.payload(0, LAYOUT.size).tobytes()
    given[:] = 7
    codec.encode(given)
    assert encoded.payload(0, LAYOUT.size).tobytes() == before


@EVERY
@DTYPES
def test_zero_becomes_zero(name, options, dtype):
    codec = create(name, LAYOUT, dtype, **options)
    zero = np.zeros(LAYOUT.size, dtype)
    for _ in range(2):
        assert not decoded(codec, codec.encode(zero)).any()
    assert np.isfinite(decoded(codec, codec.encode(vector(1, dtype)))).all()


@EVERY
def test_the_same_seed_gives_the_same_bytes(name, options):
    payloads = []
    for _ in range(2):
        codec = create(name, LAYOUT, np.float32, seed=3, **options)
        payloads.append([codec.encode(vector(step)).payload(0, LAYOUT.size).tobytes() for step in range(2)])
    assert payloads[0] == payloads[1]


@pytest.mark.parametrize("shapes", [[(5,)], [(0, 3)], [(1, 1)], [(7, 1), (1, 7)]])
@EVERY
def test_any_layout(shapes, name, options):
    layout = TensorLayout(shapes)
    codec = create(name, layout, np.float32, **options)
    given = vector(layout=layout)
    n = layout.size
    assert len(decoded(codec, codec.encode(given), (0, n // 2, n))) == n
    assert len(codec.encode(given).payload(0, n)) <= codec.capacity(0, n)


def test_a_vector_of_another_size_or_type_is_refused_and_changes_nothing():
    codec = create("top-k", LAYOUT, np.float32)
    for wrong in (vector()[:-1], vector(dtype=np.float64), vector().reshape(1, -1)):
        with pytest.raises(ValueError, match="vector must be float32 of shape"):
            codec.encode(wrong)
    with pytest.raises(ValueError, match="ratio must have 0 < ratio <= 1, got 0"):
        codec.encode(vector(), 0)
    assert codec.residual is None


def test_a_ratio_for_a_codec_without_one_is_refused():
    with pytest.raises(ValueError, match="Fp16 takes no ratio, got 0.5"):
        create("fp16", LAYOUT, np.float32).encode(vector(), 0.5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("top", {}, "name must be one of top-k, .* got 'top'"),
        ("top-k", {"ratio": 0}, "ratio must have 0 < ratio <= 1, got 0"),
        ("top-k", {"ratio": 1.5}, "ratio .* got 1.5"),
        ("random-k", {"ratio": float("nan")}, "ratio .* got nan"),
    ],
)
def test_values_that_are_not_allowed_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        create(name, LAYOUT, np.float32, **options)


def test_another_type_of_elements_is_refused():
    with pytest.raises(ValueError, match="dtype must be float32 or float64, got float16"):
        create("top-k", LAYOUT, np.float16)


def test_an_option_that_a_codec_does_not_have_is_refused():
    with pytest.raises(TypeError, match="ratio"):
        create("fp16", LAYOUT, np.float32, ratio=0.1)


def test_pieces_between_two_elements():
    layout = TensorLayout([(2, 3), (4,), (0,), (5,)])
    assert (layout.size, layout.begins) == (15, [0, 6, 10, 10])
    assert layout.pieces(0, 15) == [(0, 0, 6), (1, 6, 10), (3, 10, 15)]
    assert layout.pieces(5, 11) == [(0, 5, 6), (1, 6, 10), (3, 10, 11)]
    assert layout.pieces(6, 10) == [(1, 6, 10)]
    assert layout.pieces(7, 7) == []


def test_blocks_cover_every_element_once():
    assert [*range(10)] == [i for block in blocks(10, 4) for i in range(10)[block]]
    assert list(blocks(0)) == []
