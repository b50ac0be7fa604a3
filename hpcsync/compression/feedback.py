"""Error feedback: what a codec has not sent of one vector is added to the next (Karimireddy et al., ICML 2019)."""

from __future__ import annotations

import math

from hpcsync.compression.codec import Array, Codec, Encoded, namespace
from hpcsync.compression.powersgd import Averaging, PowerSGD


class ErrorFeedback(Codec):
    """p = g + e is sent as C(p), and e = p - C(p) is kept (Algorithm 2).

    residual: e, once something was encoded.
    """

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec.layout, codec.dtype, seed=codec.seed)
        if codec.keeps_rest or codec.fed_back:
            raise ValueError(f"{type(codec).__name__} keeps what it does not send itself: it takes no error feedback")
        codec.fed_back = self.fed_back = True
        self.codec = codec
        self.biased = codec.biased
        self.takes_ratio = codec.takes_ratio
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

    def averaging(self, vector: Array) -> Averaging[Array]:
        """The mean of all ranks' vectors as PowerSGD finds it; what is kept is this rank's own less that mean."""
        if not isinstance(self.codec, PowerSGD):
            raise TypeError(f"{type(self.codec).__name__} takes no means")
        corrected = self._corrected(vector)
        found = yield from self.codec.averaging(corrected)
        corrected -= found
        return found

    def decode(self, payload: Array, begin: int, end: int) -> Array:
        return self.codec.decode(payload, begin, end)

    def capacity(self, begin: int, end: int) -> int:
        return self.codec.capacity(begin, end)

    def nominal_bytes(self, begin: int, end: int, ratio: float = math.nan) -> int:
        return self.codec.nominal_bytes(begin, end, ratio)
