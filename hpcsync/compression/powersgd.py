"""PowerSGD (Vogels et al., NeurIPS 2019): a matrix is sent as the product of two thin ones."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from hpcsync.compression.codec import BLOCK, Array, Codec, Encoded, Layout, Piece, joined, namespace

RATE_MIN = 2  # a matrix is sent in parts if these have fewer elements by this factor

T = TypeVar("T")
Averaging = Generator[Array, Array, T]  # out comes what every rank has one of, in goes the mean
Parts = list[tuple[Array, ...]]  # of each tensor: P and Q, or its elements where it is sent as it is


class Factors(Encoded):
    """A payload is, for each tensor, the rows of P that it touches and Q, or its elements."""

    def __init__(self, codec: PowerSGD, parts: Parts) -> None:
        self.codec = codec
        self.parts = parts

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

    biased = True

    def __init__(self, layout: Layout, dtype: DTypeLike, *, seed: int = 0, rank: int = 2) -> None:
        super().__init__(layout, dtype, seed=seed)
        if rank < 1:
            raise ValueError(f"rank is {rank}; 1 or more is needed")
        self.rank = rank
        self._ranks = [self._rank(tensor) for tensor in range(len(layout.sizes))]
        self._qs: dict[int, Array] = {}

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
        return Factors(self, carried_out(self._parts(vector), lambda values: values))

    def averaging(self, vector: Array) -> Averaging[Array]:
        """What all ranks' vectors are in the mean, of the rank: the same for all of them.

        Twice a vector comes out of which every rank has its own, and their mean is to be sent in, to keep.
        """
        encoded = Factors(self, (yield from self._parts(vector)))
        return self.decode(encoded.payload(0, self.layout.size), 0, self.layout.size)

    def _parts(self, vector: Array) -> Averaging[Parts]:
        """P of each tensor in the mean and orthonormal, and Q in the mean; the mean of what is sent as it is."""
        xp, tensors = namespace(vector), range(len(self._ranks))
        of = [vector[begin : begin + n] for begin, n in zip(self.layout.begins, self.layout.sizes, strict=True)]
        low = [tensor for tensor in tensors if self._ranks[tensor]]
        matrices = {tensor: of[tensor].reshape(self._matrix(tensor)) for tensor in low}
        firsts = [matrices[i] @ self._orthonormal_q(i, xp) if i in matrices else of[i] for i in tensors]
        firsts = yield from _in_one(firsts, xp)
        ps = {tensor: xp.linalg.qr(firsts[tensor])[0] for tensor in low}
        qs = yield from _in_one([matrices[tensor].T @ ps[tensor] for tensor in low], xp)
        self._qs = dict(zip(low, qs, strict=True))
        return [(ps[i], self._qs[i]) if i in matrices else (firsts[i],) for i in tensors]

    def _orthonormal_q(self, tensor: int, xp: Any) -> Array:
        """The last Q, or a random one: of its columns' span, so that small gradients do not vanish in products."""
        if tensor not in self._qs:
            drawn = np.random.default_rng([self.seed, tensor])
            shape = (self._matrix(tensor)[1], self._ranks[tensor])
            self._qs[tensor] = xp.asarray(drawn.standard_normal(shape).astype(self.dtype))
        return xp.linalg.qr(self._qs[tensor])[0]

    def decode(self, payload: Array, begin: int, end: int) -> Array:
        vector = namespace(payload).empty(end - begin, self.dtype)
        for piece in self.layout.pieces(begin, end):
            n_values = self._values(piece)
            values = payload[: n_values * self.dtype.itemsize].view(self.dtype)
            payload = payload[n_values * self.dtype.itemsize :]
            here = vector[piece.begin - begin : piece.end - begin]
            if self._ranks[piece.tensor]:
                self._multiply(values, piece, here)
            else:
                here[:] = values
        return vector

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


def carried_out(steps: Averaging[T], all_mean: Callable[[Array], Array]) -> T:
    """What comes of it where this gives the mean, over all ranks, of a vector that each of them has."""
    try:
        given = next(steps)
        while True:
            given = steps.send(all_mean(given))
    except StopIteration as end:
        return end.value


def _in_one(arrays: list[Array], xp: Any) -> Averaging[list[Array]]:
    """The means of all of these as one vector."""
    if not arrays:
        return []
    means = yield xp.concatenate([array.reshape(-1) for array in arrays])
    ends = list(np.cumsum([array.size for array in arrays]))
    return [means[end - a.size : end].reshape(a.shape) for a, end in zip(arrays, ends, strict=True)]
