"""One-bit codecs: one bit per element of a matrix, and two values that it stands for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np

from hpcsync.compression.codec import Array, Codec, Encoded, Piece, TensorLayout, blocks, joined, namespace


class Bits(Encoded):
    """Encoded vector: two values for each matrix touched, the elements of small tensors, and all bits."""

    def __init__(self, layout: TensorLayout, stands_for: Array, vector: Array, bits: Array) -> None:
        self.layout = layout
        self.stands_for = stands_for  # shape (n_tensors, 2): values of a cleared and of a set bit
        self.small = {
            piece.tensor: vector[piece.begin : piece.end].copy()
            for piece in layout.pieces(0, layout.size)
            if layout.is_small(piece.tensor)
        }
        self.bits = bits

    def payload(self, begin: int, end: int) -> Array:
        """Return the bytes of elements begin to end."""
        parts = []
        for piece in self.layout.pieces(begin, end):
            if piece.tensor in self.small:
                first = self.layout.begins[piece.tensor]
                parts.append(self.small[piece.tensor][piece.begin - first : piece.end - first])
            else:
                parts.append(self.stands_for[piece.tensor])
        return joined([*parts, namespace(self.bits).packbits(self.bits[begin:end])])


class Signs(Codec):
    """Base class of codecs that send the sign of each element.

    0 counts as positive. Small tensors are sent uncompressed.
    """

    feeds_back = True

    def _encode(self, vector: Array, ratio: float) -> Encoded:
        xp = namespace(vector)
        bits = vector >= 0
        stands_for = xp.zeros((len(self.layout.sizes), 2), self.dtype)
        for piece in self.layout.pieces(0, self.layout.size):
            if not self.layout.is_small(piece.tensor):
                self._measure(vector[piece.begin : piece.end], bits[piece.begin : piece.end], stands_for[piece.tensor])
        return Bits(self.layout, stands_for, vector, bits)

    @abstractmethod
    def _measure(self, tensor: Array, bits: Array, stands_for: Array) -> None:
        """Write the values of a cleared and of a set bit into `stands_for`, shape (2,)."""

    def decode(self, payload: Array, begin: int, end: int, out: Array) -> None:
        """Decode elements begin to end."""
        xp, itemsize = namespace(payload), self.dtype.itemsize
        pieces = list(self._pieces(begin, end))
        bits_begin = sum(n_values for _, n_values in pieces) * itemsize
        values, packed = payload[:bits_begin].view(self.dtype), payload[bits_begin:]
        bits_of = xp.unpackbits(xp.arange(256, dtype=np.uint8))
        for piece, n_values in pieces:
            low, high = piece.begin - begin, piece.end - begin
            if self.layout.is_small(piece.tensor):
                out[low:high] = values[:n_values]
            else:
                eights = values[bits_of].reshape(256, 8)  # elements for each byte
                of_bytes = xp.take(eights, packed[low // 8 : -(-high // 8)], axis=0)
                out[low:high] = of_bytes.reshape(-1)[low % 8 :][: high - low]
            values = values[n_values:]

    def capacity(self, begin: int, end: int) -> int:
        """Return the number of bytes of a payload."""
        n_values = sum(n_values for _, n_values in self._pieces(begin, end))
        return n_values * self.dtype.itemsize + -(-(end - begin) // 8)

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[Piece, int]]:
        """Yield the pieces between these elements, and the number of values sent for each."""
        for piece in self.layout.pieces(begin, end):
            yield piece, piece.end - piece.begin if self.layout.is_small(piece.tensor) else 2


class OneBit(Signs):
    """1-bit SGD: negative elements become their mean, the others theirs.

    Means are taken over a matrix; in the paper, over each of its columns. Error feedback is part of the method.

    References
    ----------
    F. Seide, H. Fu, J. Droppo, G. Li and D. Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs", Interspeech 2014.
    """

    def _measure(self, tensor: Array, bits: Array, stands_for: Array) -> None:
        xp, n_others = namespace(tensor), bits.sum()
        for block in blocks(len(tensor)):
            stands_for[0] += xp.minimum(tensor[block], 0).sum()
            stands_for[1] += xp.maximum(tensor[block], 0).sum()
        stands_for[0] /= xp.maximum(len(tensor) - n_others, 1)
        stands_for[1] /= xp.maximum(n_others, 1)


class Sign(Signs):
    """EF-signSGD: the sign times the mean magnitude of the matrix.

    In the paper (Karimireddy et al., ICML 2019, Algorithm 1) the learning rate is inside, p = lr g + e. Here the
    optimizer applies it afterwards, which is the same while the rate is constant.
    """

    def _measure(self, tensor: Array, bits: Array, stands_for: Array) -> None:
        xp = namespace(tensor)
        for block in blocks(len(tensor)):
            stands_for[1] += xp.abs(tensor[block]).sum()
        stands_for[1] /= len(tensor)
        stands_for[0] = -stands_for[1]
