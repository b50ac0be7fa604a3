"""Sparsification: some elements of each tensor with their positions, by top-k or random-k."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from hpcsync.compression.codec import Array, Codec, Draws, Encoded, TensorLayout, joined, must_be_share, namespace

TOO_MANY = 1 << 31  # elements: positions are int32
ALL = -1  # instead of a count: all elements follow
SAMPLED = 0.01  # share of a tensor's elements in the sample that estimates the k-th largest magnitude
LOWER, LOWERED = 0.8, 10  # factor for an estimate that was too high, and the most times that it is applied


class Elements(Encoded):
    """Encoded vector: the count (int64), the values, and their positions (int32) relative to the first element."""

    def __init__(self, values: Array, indices: Array | None = None) -> None:
        self.values = values
        self.indices = indices  # None: all

    def payload(self, begin: int, end: int) -> Array:
        """Return the bytes of elements begin to end."""
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
    """Base class of codecs that send a share of the elements of every tensor, and small tensors whole.

    Where values and positions would take more bytes than all elements, all elements are sent.

    Parameters
    ----------
    layout, dtype, seed
        See `Codec`.
    ratio
        Share of the elements to send, above 0 and at most 1.
    """

    def __init__(self, layout: TensorLayout, dtype: DTypeLike, *, seed: int = 0, ratio: float = 0.01) -> None:
        super().__init__(layout, dtype, seed=seed)
        must_be_share("ratio", ratio)
        if layout.size >= TOO_MANY:
            raise ValueError(f"the vector must have fewer than {TOO_MANY} elements, got {layout.size}")
        self.ratio = ratio

    def counts(self, ratio: float) -> list[int] | None:
        """Return the number of elements to send of each tensor; None: all."""
        sizes, small = self.layout.sizes, self.layout.is_small
        counts = [n if small(i) else min(n, max(1, int(n * ratio))) for i, n in enumerate(sizes)]
        itemsize = self.dtype.itemsize
        return counts if sum(counts) * (itemsize + 4) < self.layout.size * itemsize else None

    def select(self, vector: Array, counts: Sequence[int]) -> list[Array]:
        """Return the ascending positions of the elements to send, for each tensor."""
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
        """Return the values sent for these elements of a tensor of `size` elements."""
        return values

    def subtract(self, encoded: Encoded, vector: Array) -> None:
        """Subtract the decoded vector from `vector`, in place."""
        assert isinstance(encoded, Elements)
        vector[... if encoded.indices is None else encoded.indices] -= encoded.values

    @abstractmethod
    def _select(self, tensor: Array, count: int) -> Array:
        """Return the ascending positions of `count` elements to send, or fewer if all others are 0."""

    def decode(self, payload: Array, begin: int, end: int, out: Array) -> None:
        """Decode elements begin to end."""
        count, body, itemsize = int(payload[:8].view(np.int64)[0]), payload[8:], self.dtype.itemsize
        if count == ALL:
            out[:] = body[: (end - begin) * itemsize].view(self.dtype)
        else:
            out.fill(0)
            indices = body[count * itemsize : count * (itemsize + 4)].view(np.int32)
            out[indices] = body[: count * itemsize].view(self.dtype)

    def capacity(self, begin: int, end: int) -> int:
        """Return the largest number of bytes of a payload."""
        return 8 + (end - begin) * self.dtype.itemsize

    def nominal_bytes(self, begin: int, end: int, ratio: float = math.nan) -> int:
        """Return the usual number of bytes of a payload. Those of all parts of the vector have all its elements."""
        counts = self.counts(self.ratio if math.isnan(ratio) else ratio)
        if counts is None:
            return self.capacity(begin, end)

        def before(end: int) -> int:
            pieces = self.layout.pieces(0, end)
            return round(sum((last - first) * counts[i] / self.layout.sizes[i] for i, first, last in pieces))

        count = before(end) - before(begin)
        return min(8 + count * (self.dtype.itemsize + 4), self.capacity(begin, end))


class TopK(Sparse):
    """Top-k: the elements of largest magnitude (Aji and Heafield, EMNLP 2017).

    NaN counts as the largest, so that it is noticed.
    """

    feeds_back = True
    takes_ratio = True

    def _select(self, tensor: Array, count: int) -> Array:
        return largest(tensor, count)


class RandomK(Sparse):
    """Random-k: k elements, all equally likely (Stich, Cordonnier and Jaggi, NeurIPS 2018).

    Parameters
    ----------
    layout, dtype, seed, ratio
        See `Sparse`.
    rescaled
        Whether to multiply the values by n / k, so that the mean over many draws is the vector. A single draw is then
        about sqrt(n / k) times as long, for which few learning rates are small enough. Use it without error feedback.
    """

    feeds_back = True
    takes_ratio = True

    state_types = {"_draws": Draws}

    def __init__(
        self, layout: TensorLayout, dtype: DTypeLike, *, seed: int = 0, ratio: float = 0.01, rescaled: bool = False
    ) -> None:
        super().__init__(layout, dtype, seed=seed, ratio=ratio)
        self.rescaled = rescaled
        self._draws = Draws(seed)

    def _select(self, tensor: Array, count: int) -> Array:
        chosen = self._draws.generator(np).choice(len(tensor), count, replace=False, shuffle=False)
        chosen.sort()
        return namespace(tensor).asarray(chosen)

    def _value(self, values: Array, size: int) -> Array:
        return values * (size / max(1, len(values))) if self.rescaled else values


def largest(tensor: Array, count: int) -> Array:
    """Return the ascending positions of the `count` elements of largest magnitude, or fewer if all others are 0.

    They are exactly the largest; ties go to the first. To limit the number of comparisons, a threshold that more
    elements than wanted reach is estimated from a sample, as in the code of Lin et al. (ICLR 2018), who accept an
    approximate count.
    """
    xp = namespace(tensor)
    magnitudes = xp.abs(tensor)
    candidates = _reaching_a_threshold(magnitudes, count)
    magnitudes = magnitudes[candidates]
    if (excess := len(candidates) - count) <= 0:
        return candidates
    smallest = xp.partition(magnitudes, excess)[excess]
    above = xp.flatnonzero(~(magnitudes <= smallest))[:count]  # NaN counts as above; there may be too many
    equal = xp.flatnonzero(magnitudes == smallest)[: max(0, count - len(above))]
    return candidates[xp.sort(xp.concatenate([above, equal]))]


def _reaching_a_threshold(magnitudes: Array, count: int) -> Array:
    """Return the positions of at least `count` of the largest elements, or of all that are not 0."""
    xp, n = namespace(magnitudes), len(magnitudes)
    sample = magnitudes[:: max(1, n // math.ceil(max(SAMPLED * n, 2 * n / count)))]
    expected = len(sample) * count / n  # sampled elements among the largest, plus two standard deviations below
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
