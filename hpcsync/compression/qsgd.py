"""QSGD: unbiased random rounding of each element to a few levels.

References
----------
D. Alistarh, D. Grubic, J. Li, R. Tomioka and M. Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization
and Encoding", NeurIPS 2017.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from hpcsync.compression.codec import BLOCK, Array, Codec, Draws, Encoded, TensorLayout, blocks, joined, namespace


class Levels(Encoded):
    """Encoded vector: the norm (float32) of every bucket touched, and a level for each element."""

    def __init__(self, norms: Array, levels: Array, bucket: int) -> None:
        self.norms = norms
        self.levels = levels
        self.bucket = bucket

    def payload(self, begin: int, end: int) -> Array:
        """Return the bytes of elements begin to end."""
        first, last = touched(begin, end, self.bucket)
        return joined([self.norms[first:last], self.levels[begin:end]])


class QSGD(Codec):
    """QSGD: ``Q(v_i) = |v| l_i / s`` with an integer l_i from -s to s, drawn so that E Q(v) = v (Equation 3).

    Parameters
    ----------
    layout, dtype, seed
        See `Codec`.
    levels
        s, from 1 to 32767: up to 127 an element takes one byte, above two.
    bucket
        Elements that share a norm ``|v|``, regardless of tensor boundaries.

    Notes
    -----
    ``E |Q(v) - v|^2 <= min(n / s^2, sqrt(n) / s) |v|^2`` in a bucket of n elements (Lemma 3.1).
    """

    state_types = {"_draws": Draws}

    def __init__(
        self, layout: TensorLayout, dtype: DTypeLike, *, seed: int = 0, levels: int = 127, bucket: int = 512
    ) -> None:
        super().__init__(layout, dtype, seed=seed)
        if not 1 <= levels <= 32767:
            raise ValueError(f"levels must have 1 <= levels <= 32767, got {levels}")
        if bucket < 1:
            raise ValueError(f"bucket must be at least 1, got {bucket}")
        self.levels = levels
        self.bucket = min(bucket, max(self.layout.size, BLOCK))  # a bucket is held in whole
        self._type = np.dtype(np.int8 if levels <= 127 else np.int16)
        self._draws = Draws(seed)

    def _encode(self, vector: Array, ratio: float) -> Encoded:
        xp, n, s = namespace(vector), len(vector), self.levels
        generator = self._draws.generator(xp)
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
            # Round down, or up with the probability of the fractional part: E floor(a + u) = a for either sign.
            scaled += generator.random(scaled.shape, dtype=self.dtype)
            xp.floor(scaled, out=scaled)
            xp.clip(scaled, -s, s, out=scaled)  # rounding of the sum may exceed the range
            levels[block] = scaled.reshape(-1)[:length]
        return Levels(norms, levels, self.bucket)

    def decode(self, payload: Array, begin: int, end: int, out: Array) -> None:
        """Decode elements begin to end."""
        first, last = touched(begin, end, self.bucket)
        norms_end, n = 4 * (last - first), end - begin
        units = payload[:norms_end].view(np.float32).astype(self.dtype) / self.levels
        out[:] = payload[norms_end : norms_end + n * self._type.itemsize].view(self._type)
        head = min(-begin % self.bucket, n)  # elements of a bucket that begins before `begin`
        whole = out[head : n - (n - head) % self.bucket].reshape(-1, self.bucket)
        of_whole = units[min(head, 1) :][: len(whole), None]
        for part, unit in (out[:head], units[:1]), (whole, of_whole), (out[head + whole.size :], units[-1:]):
            part *= unit

    def capacity(self, begin: int, end: int) -> int:
        """Return the number of bytes of a payload."""
        first, last = touched(begin, end, self.bucket)
        return 4 * (last - first) + (end - begin) * self._type.itemsize


def touched(begin: int, end: int, bucket: int) -> tuple[int, int]:
    """Return the first bucket that elements begin to end touch, and the one after the last."""
    return begin // bucket, -(-end // bucket)
