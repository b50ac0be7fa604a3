"""PowerSGD (Vogels et al., NeurIPS 2019): a matrix is sent as the product of two thin ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcsync.compression.codec import BLOCK, Array, Codec, Encoded, Piece, TensorLayout, joined, namespace

RATE_MIN = 2  # a matrix is sent in parts if these have fewer elements by this factor


class Factors(Encoded):
    """A payload is, for each tensor, the rows of P that it touches and Q, or its elements."""

    def __init__(self, codec: PowerSGD, parts: Sequence[tuple[Array, ...]]) -> None:
        self.codec = codec
        self.parts = parts  # of each tensor: P and Q, or its elements where it is sent as it is

    def payload(self, begin: int, end: int) -> Array:
        arrays = [self.parts[0][0][:0]]
        for piece in self.codec.layout.pieces(begin, end):
            first, last = self.codec.rows(piece)
            of_p, *q = self.parts[piece.tensor]
            arrays += [of_p[first:last], *q]
        return joined(arrays)


class PowerSGD(Codec):
    """M becomes P Q^T of rank `rank`, by one step of power iteration from the last Q (Algorithm 1, warm start).

    A tensor is a matrix of its first dimension's rows. One that would not become less than half as large is sent as it
    is, and so are small ones.

    P is made orthonormal by Householder reflections: then every column of M Q is in its span even where these are
    dependent or zero, and a matrix of no higher rank is sent exactly.

    seed: of the first Q, the same for all who take means of factors.
    """

    feeds_back = True
    averages = True

    def __init__(self, layout: TensorLayout, dtype: DTypeLike, *, seed: int = 0, rank: int = 2) -> None:
        super().__init__(layout, dtype, seed=seed)
        if rank < 1:
            raise ValueError(f"rank is {rank}; 1 or more is needed")
        self.rank = rank
        self._ranks = [self._rank(tensor) for tensor in range(len(layout.sizes))]
        self._low = [tensor for tensor, rank in enumerate(self._ranks) if rank]
        self._left_shapes = [
            (self._matrix(i)[0], rank) if rank else (layout.sizes[i],) for i, rank in enumerate(self._ranks)
        ]
        self._right_shapes = [(self._matrix(i)[1], self._ranks[i]) for i in self._low]
        self.factor_sizes = sum(map(math.prod, self._left_shapes)), sum(map(math.prod, self._right_shapes))
        self._qs: dict[int, Array] = {}
        self._matrices: dict[int, Array] = {}  # of the vector that is being sent
        self._lefts: list[Array] = []  # of its mean, orthonormal; the elements of what is sent as it is

    def _rank(self, tensor: int) -> int:
        """0: it is sent as it is."""
        if self.layout.is_small(tensor) or not self.layout.sizes[tensor]:
            return 0
        n, m = self._matrix(tensor)
        rank = min(n, m, self.rank)
        return rank if (n + m) * rank * RATE_MIN < n * m else 0

    def _matrix(self, tensor: int) -> tuple[int, int]:
        n = self.layout.shapes[tensor][0]
        return n, self.layout.sizes[tensor] // n

    def rows(self, piece: Piece) -> tuple[int, int]:
        """The first row that it touches and the one after the last; of what is sent as it is, elements."""
        width = self._matrix(piece.tensor)[1] if self._ranks[piece.tensor] else 1
        first = self.layout.begins[piece.tensor]
        return (piece.begin - first) // width, -(-(piece.end - first) // width)

    def _encode(self, vector: Array, ratio: float) -> Encoded:
        return self._factors(self.right_factors(self.left_factors(vector)))

    def left_factors(self, vector: Array) -> Array:
        """M Q of every matrix, and the elements of what is sent as it is."""
        of = [vector[begin : begin + n] for begin, n in zip(self.layout.begins, self.layout.sizes, strict=True)]
        self._matrices = {i: of[i].reshape(self._matrix(i)) for i in self._low}
        for i, matrix in self._matrices.items():
            of[i] = matrix @ self._orthonormal_q(i, namespace(vector))
        return _in_one(vector[:0], of)

    def right_factors(self, mean: Array) -> Array:
        """M^T P, of the mean's P made orthonormal."""
        self._lefts = _apart(mean, self._left_shapes)
        for i in self._low:
            self._lefts[i] = namespace(mean).linalg.qr(self._lefts[i])[0]
        return _in_one(mean[:0], [matrix.T @ self._lefts[i] for i, matrix in self._matrices.items()])

    def product(self, mean: Array, out: Array) -> None:
        self.decode(self._factors(mean).payload(0, self.layout.size), 0, self.layout.size, out)

    def _factors(self, mean: Array) -> Factors:
        self._qs = dict(zip(self._low, _apart(mean, self._right_shapes), strict=True))
        self._matrices = {}
        return Factors(self, [(p, self._qs[i]) if i in self._qs else (p,) for i, p in enumerate(self._lefts)])

    def _orthonormal_q(self, tensor: int, xp: Any) -> Array:
        """The last Q, or a random one: of its columns' span, so that small gradients do not vanish in products."""
        if tensor not in self._qs:
            drawn = np.random.default_rng([self.seed, tensor])
            shape = (self._matrix(tensor)[1], self._ranks[tensor])
            self._qs[tensor] = xp.asarray(drawn.standard_normal(shape).astype(self.dtype))
        return xp.linalg.qr(self._qs[tensor])[0]

    def decode(self, payload: Array, begin: int, end: int, out: Array) -> None:
        for piece in self.layout.pieces(begin, end):
            n_values = self._values(piece)
            values = payload[: n_values * self.dtype.itemsize].view(self.dtype)
            payload = payload[n_values * self.dtype.itemsize :]
            here = out[piece.begin - begin : piece.end - begin]
            if self._ranks[piece.tensor]:
                self._multiply(values, piece, here)
            else:
                here[:] = values

    def _multiply(self, values: Array, piece: Piece, result: Array) -> None:
        """Row by row and one column of P after the other: the bits do not depend on what rows are asked for."""
        rank, width = self._ranks[piece.tensor], self._matrix(piece.tensor)[1]
        first, last = self.rows(piece)
        p, q = values[: (last - first) * rank].reshape(-1, rank), values[(last - first) * rank :].reshape(-1, rank)
        columns = q.T.copy()
        skipped = piece.begin - self.layout.begins[piece.tensor] - first * width
        step = max(1, BLOCK // width)
        for row in range(0, last - first, step):
            some = p[row : row + step]
            product = some[:, :1] * columns[0]
            for k in range(1, rank):
                product += some[:, k : k + 1] * columns[k]
            begin = row * width - skipped  # of these rows in the result; the first may begin before it
            target = result[max(0, begin) : begin + product.size]
            target[:] = product.reshape(-1)[max(0, -begin) :][: len(target)]

    def _values(self, piece: Piece) -> int:
        """How many are sent for it."""
        first, last = self.rows(piece)
        rank = self._ranks[piece.tensor]
        return (last - first + self._matrix(piece.tensor)[1]) * rank if rank else last - first

    def capacity(self, begin: int, end: int) -> int:
        return sum(self._values(piece) for piece in self.layout.pieces(begin, end)) * self.dtype.itemsize


def _in_one(nothing: Array, arrays: Sequence[Array]) -> Array:
    """A copy of all elements of these; `nothing` is of their type."""
    return namespace(nothing).concatenate([nothing, *(array.reshape(-1) for array in arrays)])


def _apart(vector: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Its elements in these shapes: views."""
    ends = pairwise(accumulate(map(math.prod, shapes), initial=0))
    return [vector[begin:end].reshape(shape) for (begin, end), shape in zip(ends, shapes, strict=True)]
