"""Error feedback: what a codec has not sent of one vector is added to the next (Karimireddy et al., ICML 2019)."""

from __future__ import annotations

import math

from hpcsync.compression.codec import Array, Codec, Encoded, namespace


class ErrorFeedback(Codec):
    """p = g + e is sent as C(p), and e = p - C(p) is kept (Algorithm 2).

    residual: e, once something was encoded.
    """

    keeps_rest = True

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec.layout, codec.dtype, seed=codec.seed)
        if codec.keeps_rest:
            raise ValueError(f"{type(codec).__name__} keeps what it does not send itself: it takes no error feedback")
        self.codec = codec
        self.takes_ratio = codec.takes_ratio
        self.averages, self.factor_sizes = codec.averages, codec.factor_sizes
        self.residual: Array | None = None

    def _encode(self, vector: Array, ratio: float) -> Encoded:
        corrected = self._corrected(vector)
        encoded = self.codec.encode(corrected, ratio)
        self.codec.subtract(encoded, corrected)
        return encoded

    def _corrected(self, vector: Array) -> Array:
        """The vector with the residual, in the residual's place."""
        if self.residual is None:
            self.residual = namespace(vector).zeros_like(vector)
        self.residual += vector
        return self.residual

    def left_factors(self, vector: Array) -> Array:
        return self.codec.left_factors(self._corrected(vector))

    def right_factors(self, mean: Array) -> Array:
        return self.codec.right_factors(mean)

    def product(self, mean: Array, out: Array) -> None:
        """What is kept is this rank's own less the mean of all (Algorithm 2 of Vogels et al., NeurIPS 2019)."""
        assert self.residual is not None
        self.codec.product(mean, out)
        self.residual -= out

    def decode(self, payload: Array, begin: int, end: int, out: Array) -> None:
        self.codec.decode(payload, begin, end, out)

    def capacity(self, begin: int, end: int) -> int:
        return self.codec.capacity(begin, end)

    def nominal_bytes(self, begin: int, end: int, ratio: float = math.nan) -> int:
        return self.codec.nominal_bytes(begin, end, ratio)
