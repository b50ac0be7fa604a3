"""What a codec is: it makes fewer bytes of a flat vector, for each who holds a piece of it those that it needs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]  # or CuPy's, which has the same methods

BLOCK = 1 << 18  # elements that are worked on at a time, so that a cache holds what several passes over them need


def namespace(array: Array) -> Any:
    """The module whose functions take this array: numpy or cupy."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


def blocks(n: int, length: int = BLOCK) -> Iterator[slice]:
    """n elements in slices of so many, the last of fewer."""
    return (slice(begin, min(begin + length, n)) for begin in range(0, n, length))


def joined(arrays: Sequence[Array]) -> Array:
    """The bytes of these arrays, one after the other."""
    parts = [array.reshape(-1).view(np.uint8) for array in arrays]
    return parts[0] if len(parts) == 1 else namespace(parts[0]).concatenate(parts)


class Piece(NamedTuple):
    """Elements begin to end (both of the flat vector) of a tensor."""

    tensor: int
    begin: int
    end: int


class TensorLayout:
    """Tensors that lie in a flat vector one after the other.

    size:   elements of all.
    begins: where each tensor begins.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        *self.begins, self.size = accumulate(self.sizes, initial=0)

    def is_small(self, tensor: int) -> bool:
        """Whether codecs that work tensor by tensor send it as it is: biases and the like are few and need it."""
        return len(self.shapes[tensor]) <= 1

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """What of each tensor lies between these elements; tensors of which nothing does are left out."""
        within = range(max(0, bisect_right(self.begins, begin) - 1), bisect_left(self.begins, end))
        cut = (Piece(i, max(begin, self.begins[i]), min(end, self.begins[i] + self.sizes[i])) for i in within)
        return [piece for piece in cut if piece.begin < piece.end]


class Encoded(ABC):
    """A vector as a codec sends it. It does not change with the vector or with what is encoded later."""

    @abstractmethod
    def payload(self, begin: int, end: int) -> Array:
        """The bytes (uint8) from which elements begin to end can be decoded."""


class Codec(ABC):
    """Makes payloads of a worker's vectors, or vectors of payloads.

    dtype: of the vectors, float32 or float64.
    seed:  of whatever is drawn.

    One object is one worker's, with what it remembers from one vector to the next, or it only decodes, for which
    nothing is remembered. Elements decoded in pieces have the same bits as decoded at once.
    """

    feeds_back: bool = False  # what is left out or distorted must be sent later: error feedback, unless it is declined
    takes_ratio: bool = False  # the share of elements to send can be told for each vector
    keeps_rest: bool = False  # it remembers itself what it has not sent
    averages: bool = False  # the mean of all ranks' vectors is a product of mean factors, and not a mean of products
    factor_sizes: tuple[int, int] = (0, 0)  # elements of the left ones, and of the right ones

    def __init__(self, layout: TensorLayout, dtype: DTypeLike, *, seed: int = 0) -> None:
        self.layout = layout
        self.dtype = np.dtype(dtype)
        self.seed = seed
        if self.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ValueError(f"dtype is {self.dtype}; float32 or float64 is needed")

    def encode(self, vector: Array, ratio: float = math.nan) -> Encoded:
        """Encode a vector of the layout's size, which stays as it is.

        ratio: the share of its elements to send this once; NaN: as the codec was told.
        """
        if vector.shape != (self.layout.size,) or vector.dtype != self.dtype:
            needed = f"{self.dtype} of shape ({self.layout.size},)"
            raise ValueError(f"the vector is {vector.dtype} of shape {vector.shape}; {needed} is needed")
        if not math.isnan(ratio):
            if not self.takes_ratio:
                raise ValueError(f"ratio is {ratio}; {type(self).__name__} takes none")
            must_be_share("ratio", ratio)
        return self._encode(vector, ratio)

    def subtract(self, encoded: Encoded, vector: Array) -> None:
        """Take from the vector, in place, what `encoded` decodes to."""
        decoded = namespace(vector).empty(self.layout.size, self.dtype)
        self.decode(encoded.payload(0, self.layout.size), 0, self.layout.size, decoded)
        vector -= decoded

    @abstractmethod
    def _encode(self, vector: Array, ratio: float) -> Encoded: ...

    @abstractmethod
    def decode(self, payload: Array, begin: int, end: int, out: Array) -> None:
        """Fill `out`, shape (end - begin,), with elements begin to end. The payload may be followed by anything."""

    @abstractmethod
    def capacity(self, begin: int, end: int) -> int:
        """The most bytes that a payload for elements begin to end can take."""

    def nominal_bytes(self, begin: int, end: int, ratio: float = math.nan) -> int:
        """How many it takes as a rule."""
        return self.capacity(begin, end)

    # ---- where it averages: three steps that all ranks make, each with the mean of what the one before gave them ----

    def left_factors(self, vector: Array) -> Array:
        """Of a vector that stays as it is until the last step; 1-D, in memory of its own."""
        raise TypeError(f"{type(self).__name__} takes no means")

    def right_factors(self, mean: Array) -> Array:
        """1-D, in memory of its own; there may be none. The mean is the codec's to keep."""
        raise NotImplementedError

    def product(self, mean: Array, out: Array) -> None:
        """Fill `out`, which may be the vector, with the mean of all vectors. The mean is the codec's to keep."""
        raise NotImplementedError


def must_be_share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name} is {value}; 0 < {name} <= 1 is needed")
