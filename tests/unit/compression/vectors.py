"""Layouts and vectors that the tests of the codecs share."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hpcsync.compression import TensorLayout

# Matrices, a kernel, biases, a scalar, an empty tensor, and sizes that no bucket, byte or block divides.
LAYOUT = TensorLayout([(37, 53), (53,), (8, 3, 5, 5), (), (0, 4), (41, 29), (3,), (2, 2)])
CUTS = [
    (0, LAYOUT.size),
    (0, 1000, LAYOUT.size),
    (0, 1, 777, 1961, 1962, 2020, 2613, 2614, 3333, LAYOUT.size),
    (0, 0, 1313, 1313, LAYOUT.size),
]


def vector(seed=1, dtype=np.float32, layout=LAYOUT):
    """Return normal numbers with a different scale in every tensor."""
    generator = np.random.default_rng(seed)
    tensors = [generator.normal(0.1, 2.0 ** (i % 5 - 2), n) for i, n in enumerate(layout.sizes)]
    return np.concatenate(tensors).astype(dtype)


def decoded(codec, encoded, cut=None):
    """Decode the whole vector from the payloads of these shards."""
    cut = cut or (0, codec.layout.size)
    return np.concatenate([shard(codec, encoded.payload(a, b), a, b) for a, b in pairwise(cut)])


def shard(codec, payload, begin, end):
    """Decode elements begin to end into a vector with other contents."""
    out = np.full(end - begin, np.nan, codec.dtype)
    codec.decode(payload, begin, end, out)
    return out
