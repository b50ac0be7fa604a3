"""Two bytes for each element: IEEE's half precision, or the upper half of a single (bfloat16)."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from hpcsync.compression.codec import Array, Codec, Encoded, blocks, namespace


class Rounded(Encoded):
    """A payload is 16 bits for each element."""

    def __init__(self, bits: Array) -> None:
        self.bits = bits

    def payload(self, begin: int, end: int) -> Array:
        return self.bits[begin:end].view(np.uint8)


class HalfPrecision(Codec):
    """Codecs that round every element to two bytes: to the nearest, and of two the even one. NaN stays NaN."""

    def _encode(self, vector: Array, ratio: float) -> Encoded:
        bits = namespace(vector).empty(len(vector), np.uint16)
        for block in blocks(len(vector)):
            bits[block] = self._rounded(vector[block])
        return Rounded(bits)

    def decode(self, payload: Array, begin: int, end: int, out: Array) -> None:
        bits = payload[: 2 * (end - begin)].view(np.uint16)
        for block in blocks(len(bits)):
            out[block] = self._widened(bits[block])

    def capacity(self, begin: int, end: int) -> int:
        return 2 * (end - begin)

    @abstractmethod
    def _rounded(self, values: Array) -> Array:
        """Their 16 bits."""

    @abstractmethod
    def _widened(self, bits: Array) -> Array: ...


class Fp16(HalfPrecision):
    """11 bits of precision, from 6e-8 to 65504: what is larger becomes infinite."""

    def _rounded(self, values: Array) -> Array:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)

    def _widened(self, bits: Array) -> Array:
        return bits.view(np.float16)


class Bf16(HalfPrecision):
    """8 bits of precision, and the range of a single."""

    def _rounded(self, values: Array) -> Array:
        singles = values.astype(np.float32)
        bits = singles.view(np.uint32)
        # A carry out of the upper half is right: the next exponent, or infinity.
        upper = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
        return namespace(values).where(singles != singles, bits >> 16 | 0x40, upper)

    def _widened(self, bits: Array) -> Array:
        return (bits.astype(np.uint32) << 16).view(np.float32)
