"""Half-precision codecs with two bytes per element: IEEE half precision (fp16), and bfloat16."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from hpcsync.compression.codec import Array, Codec, Encoded, blocks, namespace


class Rounded(Encoded):
    """Encoded vector whose payload has 16 bits per element."""

    def __init__(self, bits: Array) -> None:
        self.bits = bits

    def payload(self, begin: int, end: int) -> Array:
        """Return the bytes of elements begin to end."""
        return self.bits[begin:end].view(np.uint8)


class HalfPrecision(Codec):
    """Base class of codecs that round every element to two bytes: to nearest, ties to even. NaN stays NaN."""

    def _encode(self, vector: Array, ratio: float) -> Encoded:
        bits = namespace(vector).empty(len(vector), np.uint16)
        for block in blocks(len(vector)):
            bits[block] = self._rounded(vector[block])
        return Rounded(bits)

    def decode(self, payload: Array, begin: int, end: int, out: Array) -> None:
        """Decode elements begin to end."""
        bits = payload[: 2 * (end - begin)].view(np.uint16)
        for block in blocks(len(bits)):
            out[block] = self._widened(bits[block])

    def capacity(self, begin: int, end: int) -> int:
        """Return the number of bytes of a payload."""
        return 2 * (end - begin)

    @abstractmethod
    def _rounded(self, values: Array) -> Array:
        """Return the 16 bits of each value."""

    @abstractmethod
    def _widened(self, bits: Array) -> Array: ...


class Fp16(HalfPrecision):
    """IEEE half precision: 11 significant bits, from 6e-8 to 65504; larger values become infinite."""

    def _rounded(self, values: Array) -> Array:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)

    def _widened(self, bits: Array) -> Array:
        return bits.view(np.float16)


class Bf16(HalfPrecision):
    """Bfloat16: 8 significant bits and the range of single precision."""

    def _rounded(self, values: Array) -> Array:
        singles = values.astype(np.float32)
        bits = singles.view(np.uint32)
        # A carry into the exponent is correct: it gives the next exponent, or infinity.
        upper = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
        return namespace(values).where(singles != singles, bits >> 16 | 0x40, upper)

    def _widened(self, bits: Array) -> Array:
        return (bits.astype(np.uint32) << 16).view(np.float32)
