"""QSGD (Alistarh et al., NeurIPS 2017): each element is rounded to a few levels, at random, right on the average."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcsync.compression.codec import BLOCK, Array, Codec, Encoded, TensorLayout, blocks, joined, namespace


class Levels(Encoded):
    """A payload is the norm (float32) of every bucket that it touches, and a level for each element."""

    def __init__(self, norms: Array, levels: Array, bucket: int) -> None:
        self.norms = norms
        self.levels = levels
        self.bucket = bucket

    def payload(self, begin: int, end: int) -> Array:
        first, last = touched(begin, end, self.bucket)
        return joined([self.norms[first:last], self.levels[begin:end]])


class QSGD(Codec):
    """Q(v_i) = |v| l_i / s of a whole l_i from -s to s, drawn so that E Q(v) = v (Equation 3 of the paper).

    levels: s; up to 127 an element takes a byte, up to 32767 two.
    bucket: elements that share a norm |v|. E |Q(v) - v|^2 <= min(n / s^2, sqrt(n) / s) |v|^2 in a bucket of n
            (Lemma 3.1). Buckets do not care for tensors.
    """

    def __init__(
        self, layout: TensorLayout, dtype: DTypeLike, *, seed: int = 0, levels: int = 127, bucket: int = 512
    ) -> None:
        super().__init__(layout, dtype, seed=seed)
        if not 1 <= levels <= 32767:
            raise ValueError(f"levels is {levels}; 1 <= levels <= 32767 is needed")
        if bucket < 1:
            raise ValueError(f"bucket is {bucket}; 1 or more is needed")
        self.levels = levels
        self.bucket = bucket
        self._type = np.dtype(np.int8 if levels <= 127 else np.int16)
        self._generator: Any = None

    def _encode(self, vector: Array, ratio: float) -> Encoded:
        xp, n, s = namespace(vector), len(vector), self.levels
        if self._generator is None:
            self._generator = xp.random.default_rng(self.seed)
        norms = xp.empty(touched(0, n, self.bucket)[1], np.float32)
        levels = xp.empty(n, self._type)
        rows = max(1, BLOCK // self.bucket)
        for block in blocks(n, rows * self.bucket):
            length = block.stop - block.start
            scaled = xp.zeros((-(-length // self.bucket), self.bucket), self.dtype)
            scaled.reshape(-1)[:length] = vector[block]
            here = norms[block.start // self.bucket :][: len(scaled)]
            here[:] = xp.sqrt((scaled * scaled).sum(axis=1))
            zero = here == 0
            scaled *= xp.where(zero, 0, s / xp.where(zero, 1, here)).astype(self.dtype)[:, None]
            # Down to the level below, or with a probability of how far it is above that to the next: E floor(a + u)
            # is a, whatever its sign.
            scaled += self._generator.random(scaled.shape, dtype=self.dtype)
            xp.floor(scaled, out=scaled)
            xp.clip(scaled, -s, s, out=scaled)  # a rounding of a sum may have taken it beyond
            levels[block] = scaled.reshape(-1)[:length]
        return Levels(norms, levels, self.bucket)

    def decode(self, payload: Array, begin: int, end: int, out: Array) -> None:
        first, last = touched(begin, end, self.bucket)
        norms_end, n = 4 * (last - first), end - begin
        units = payload[:norms_end].view(np.float32).astype(self.dtype) / self.levels
        out[:] = payload[norms_end : norms_end + n * self._type.itemsize].view(self._type)
        head = min(-begin % self.bucket, n)  # elements of a bucket that began before
        whole = out[head : n - (n - head) % self.bucket].reshape(-1, self.bucket)
        of_whole = units[min(head, 1) :][: len(whole), None]
        for part, unit in (out[:head], units[:1]), (whole, of_whole), (out[head + whole.size :], units[-1:]):
            part *= unit

    def capacity(self, begin: int, end: int) -> int:
        first, last = touched(begin, end, self.bucket)
        return 4 * (last - first) + (end - begin) * self._type.itemsize


def touched(begin: int, end: int, bucket: int) -> tuple[int, int]:
    """The first bucket that elements begin to end touch, and the one after the last."""
    return begin // bucket, -(-end // bucket)
