"""A few elements of each tensor, with their positions: top-k and random-k sparsification."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from hpcsync.compression.codec import Array, Codec, Encoded, TensorLayout, joined, must_be_share, namespace

TOO_MANY = 1 << 31  # elements: int32 has no more positions
ALL = -1  # instead of a count: the values of all elements follow
SAMPLED = 0.01  # of a tensor's elements, from which the k-th largest magnitude is guessed
LOWER, LOWERED = 0.8, 10  # a guess that was too high becomes so many times as high; and how often


class Elements(Encoded):
    """A payload is the count (int64), the values, and their positions (int32) from its first element on."""

    def __init__(self, values: Array, indices: Array | None = None) -> None:
        self.values = values
        self.indices = indices  # None: all

    def payload(self, begin: int, end: int) -> Array:
        xp, itemsize = namespace(self.values), self.values.itemsize
        if self.indices is None:
            return joined([xp.full(1, ALL, np.int64), self.values[begin:end]])
        first, last = (int(i) for i in xp.searchsorted(self.indices, xp.asarray([begin, end])))
        values, indices = self.values[first:last], self.indices[first:last] - begin
        if len(values) * (itemsize + 4) < (end - begin) * itemsize:
            return joined([xp.full(1, len(values), np.int64), values, indices.astype(np.int32)])
        dense = xp.zeros(end - begin, self.values.dtype)
        dense[indices] = values
        return joined([xp.full(1, ALL, np.int64), dense])


class Sparse(Codec):
    """Codecs that send a share of the elements, `ratio`, of every tensor, and small tensors whole.

    Where values and positions would take more bytes than all elements, all are sent, whatever the ratio.
    """

    def __init__(self, layout: TensorLayout, dtype: DTypeLike, *, seed: int = 0, ratio: float = 0.01) -> None:
        super().__init__(layout, dtype, seed=seed)
        must_be_share("ratio", ratio)
        if layout.size >= TOO_MANY:
            raise ValueError(f"the vector has {layout.size} elements; fewer than {TOO_MANY} are needed")
        self.ratio = ratio

    def counts(self, ratio: float) -> list[int] | None:
        """How many elements of each tensor are sent; None: all."""
        sizes, small = self.layout.sizes, self.layout.is_small
        counts = [n if small(i) else min(n, max(1, int(n * ratio))) for i, n in enumerate(sizes)]
        itemsize = self.dtype.itemsize
        return counts if sum(counts) * (itemsize + 4) < self.layout.size * itemsize else None

    def select(self, vector: Array, counts: Sequence[int]) -> list[Array]:
        """The positions, ascending, of what is sent of each tensor."""
        xp, selected = namespace(vector), []
        for begin, size, count in zip(self.layout.begins, self.layout.sizes, counts, strict=True):
            of_tensor = vector[begin : begin + size]
            selected.append(begin + (self._select(of_tensor, count) if count < size else xp.arange(size)))
        return selected

    def _encode(self, vector: Array, ratio: float) -> Encoded:
        counts = self.counts(self.ratio if math.isnan(ratio) else ratio)
        if counts is None:
            return Elements(vector.copy())
        selected = self.select(vector, counts)
        values = [self._value(vector[indices], size) for indices, size in zip(selected, self.layout.sizes, strict=True)]
        xp = namespace(vector)
        return Elements(xp.concatenate(values), xp.concatenate(selected))

    def _value(self, values: Array, size: int) -> Array:
        """What is sent for these elements of a tensor of so many."""
        return values

    def subtract(self, encoded: Encoded, vector: Array) -> None:
        assert isinstance(encoded, Elements)
        vector[... if encoded.indices is None else encoded.indices] -= encoded.values

    @abstractmethod
    def _select(self, tensor: Array, count: int) -> Array:
        """The positions, ascending, of the elements to send: so many, or fewer if all others are 0."""

    def decode(self, payload: Array, begin: int, end: int, out: Array) -> None:
        count, body, itemsize = int(payload[:8].view(np.int64)[0]), payload[8:], self.dtype.itemsize
        if count == ALL:
            out[:] = body[: (end - begin) * itemsize].view(self.dtype)
        else:
            out.fill(0)
            indices = body[count * itemsize : count * (itemsize + 4)].view(np.int32)
            out[indices] = body[: count * itemsize].view(self.dtype)

    def capacity(self, begin: int, end: int) -> int:
        return 8 + (end - begin) * self.dtype.itemsize

    def nominal_bytes(self, begin: int, end: int, ratio: float = math.nan) -> int:
        counts = self.counts(self.ratio if math.isnan(ratio) else ratio)
        if counts is None:
            return self.capacity(begin, end)
        sizes = self.layout.sizes
        count = sum((last - first) * counts[i] / sizes[i] for i, first, last in self.layout.pieces(begin, end))
        return min(8 + round(count) * (self.dtype.itemsize + 4), self.capacity(begin, end))


class TopK(Sparse):
    """The elements of largest magnitude (Aji and Heafield, EMNLP 2017). NaN counts as the largest: it shows."""

    feeds_back = True
    takes_ratio = True

    def _select(self, tensor: Array, count: int) -> Array:
        return largest(tensor, count)


class RandomK(Sparse):
    """As many elements, any equally likely (Stich et al., NeurIPS 2018).

    With error feedback they are sent as they are. Without it `rescaled`, n / k times as large, so that the mean over
    many draws is the vector; but a single one is about sqrt(n / k) times as long, for which few learning rates are
    small enough.
    """

    feeds_back = True
    takes_ratio = True

    def __init__(
        self, layout: TensorLayout, dtype: DTypeLike, *, seed: int = 0, ratio: float = 0.01, rescaled: bool = False
    ) -> None:
        super().__init__(layout, dtype, seed=seed, ratio=ratio)
        self.rescaled = rescaled
        self._generator = np.random.default_rng(seed)

    def _select(self, tensor: Array, count: int) -> Array:
        chosen = self._generator.choice(len(tensor), count, replace=False, shuffle=False)
        chosen.sort()
        return namespace(tensor).asarray(chosen)

    def _value(self, values: Array, size: int) -> Array:
        return values * (size / max(1, len(values))) if self.rescaled else values


def largest(tensor: Array, count: int) -> Array:
    """The positions, ascending, of the elements of largest magnitude: so many, or fewer if all others are 0.

    They are exactly the largest, and of equals the first. So that few must be compared with each other, a threshold
    that more elements reach than are wanted is guessed from a sample, as in the code of Lin et al. (ICLR 2018), who
    make do with about as many.
    """
    xp = namespace(tensor)
    magnitudes = xp.abs(tensor)
    candidates = _reaching_a_threshold(magnitudes, count)
    magnitudes = magnitudes[candidates]
    if (excess := len(candidates) - count) <= 0:
        return candidates
    smallest = xp.partition(magnitudes, excess)[excess]
    above = xp.flatnonzero(~(magnitudes <= smallest))[:count]  # NaN is above, and may be too many
    equal = xp.flatnonzero(magnitudes == smallest)[: max(0, count - len(above))]
    return candidates[xp.sort(xp.concatenate([above, equal]))]


def _reaching_a_threshold(magnitudes: Array, count: int) -> Array:
    """The positions of at least so many of the largest, or of all that are not 0."""
    xp, n = namespace(magnitudes), len(magnitudes)
    sample = magnitudes[:: max(1, n // math.ceil(max(SAMPLED * n, 2 * n / count)))]
    expected = len(sample) * count / n  # of the sample among the largest; so many more for its deviation
    rank = min(len(sample), math.ceil(expected + 2 * math.sqrt(expected)))
    threshold = float(xp.partition(sample, len(sample) - rank)[len(sample) - rank])
    for _ in range(LOWERED):
        if not threshold > 0:
            break
        candidates = xp.flatnonzero(~(magnitudes < threshold))
        if len(candidates) >= count:
            return candidates
        threshold *= LOWER
    return xp.flatnonzero(magnitudes)
