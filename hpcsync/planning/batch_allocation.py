"""How many samples each worker computes, and which: batch sizes by which all are expected to finish at the same time.

An iteration of b samples is expected to take worker i the time T_i = a_i + c_i b. All finish together at the T at
which the sizes (T - a_i) / c_i add up to the total (`equal_finish`); without fixed costs a_i these are the shares by
speed of LB-BSP (Chen et al., SoCC 2020). Whole numbers of samples, `whole`, are found as in DBS (Ye et al., 2020).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple


class Estimate(NamedTuple):
    """An iteration of b samples is expected to take fixed_s + sample_s * b seconds."""

    fixed_s: float
    sample_s: float

    def seconds(self, n_samples: float) -> float:
        return self.fixed_s + self.sample_s * n_samples


class Allocated(NamedTuple):
    """A worker's batch size from its next iteration on, and what it was chosen from: `Allocator.decision_fields`."""

    worker: int
    size: int
    inputs: tuple[float, ...]


def equal_finish(
    estimates: Sequence[Estimate], total: float, minima: Sequence[float], maxima: Sequence[float]
) -> list[float]:
    """Each worker's samples, `total` in all, so that the last finishes as early as it can within these limits.

    Those within their limits finish at the same time. Where the maxima cannot hold the total, the maxima; where the
    minima exceed it, ValueError.
    """
    if sum(minima) > total:
        raise ValueError(f"minima of {sum(minima)} samples exceed a total of {total}")
    if sum(maxima) <= total:
        return list(maxima)
    sizes = [0.0] * len(estimates)
    free, left = list(range(len(estimates))), float(total)
    while free:
        at_s = left + sum(estimates[i].fixed_s / estimates[i].sample_s for i in free)
        at_s /= sum(1.0 / estimates[i].sample_s for i in free)
        for i in free:
            sizes[i] = (at_s - estimates[i].fixed_s) / estimates[i].sample_s
        # If the minima add more than the maxima take away, the end comes earlier than at_s, and whoever is below a
        # minimum now will be then; and the other way round.
        below = [i for i in free if sizes[i] < minima[i]]
        above = [i for i in free if sizes[i] > maxima[i]]
        excess = sum(minima[i] - sizes[i] for i in below) - sum(sizes[i] - maxima[i] for i in above)
        fixed = {*(below if excess >= 0 else ()), *(above if excess <= 0 else ())}
        if not fixed:
            break
        for i in fixed:
            sizes[i] = float(min(max(sizes[i], minima[i]), maxima[i]))
            left -= sizes[i]
        free = [i for i in free if i not in fixed]
    return sizes


def whole(ideal: Sequence[float], total: int, minima: Sequence[int], maxima: Sequence[float]) -> list[int]:
    """The whole sizes within these limits, `total` in all, that are nearest to the ideal ones in squares.

    Found by giving one unit after the other, from the minima on, to the worker that it costs least; of equals, the
    lowest gets it. Where the maxima cannot hold the total, the maxima.
    """
    # What differs by errors of rounding is equal, lest these decide who gets a unit.
    ideal = [round(size, 6) for size in ideal]
    n = range(len(ideal))
    # Whoever is a unit or more short of its ideal comes before all that are not: so many steps at once.
    sizes = [int(min(max(math.floor(ideal[i]), minima[i]), maxima[i])) for i in n]
    if sum(sizes) > total:
        sizes = list(minima)
    short = [(sizes[i] - ideal[i], i) for i in n if sizes[i] < maxima[i]]
    heapq.heapify(short)
    for _ in range(total - sum(sizes)):
        if not short:
            break
        lacks, i = short[0]
        sizes[i] += 1
        if sizes[i] + 1 <= maxima[i]:
            heapq.heapreplace(short, (lacks + 1, i))
        else:
            heapq.heappop(short)
    return sizes


class Allocator:
    """Who computes how many samples next, and which.

    n_workers: workers 0 to n_workers - 1.
    total:     samples of one iteration of all workers; it stays, whoever leaves or joins.
    minimum:   least batch size.
    maxima:    largest batch size of each worker, math.inf for none: what its memory holds.
    interval:  pushes per active worker from one allocation to the next.
    gain_min:  an allocation is dropped unless it shortens the iteration of the slowest by more than this share.
    local_steps: iterations of a push, each of its worker's batch size.

    sizes: current batch size of each worker, 0 of one that has left. They add up to the total wherever the maxima of
    those who stay can hold it, and are the maxima otherwise.

    The samples are numbered in one endless stream, of which everyone takes the next piece when it starts on a
    push. So no sample is taken twice and none left out, whatever the sizes.
    """

    decision_fields: ClassVar[Mapping[str, tuple[str, str]]] = {  # (unit, description)
        "batch_before": ("samples", "Batch size of the worker before."),
        "fixed_s": ("s", "Estimated time independent of the batch size; NaN if divided equally, without estimates."),
        "sample_s": ("s/sample", "Estimated time per sample; NaN if divided equally, without estimates."),
        "gain": ("1", "Share by which the slowest worker's iteration gets shorter; NaN if it was not required."),
    }

    def __init__(
        self,
        n_workers: int,
        total: int,
        *,
        minimum: int = 1,
        maxima: Sequence[float],
        interval: int = 10,
        gain_min: float = 0.05,
        local_steps: int = 1,
    ) -> None:
        if n_workers < 1 or len(maxima) != n_workers:
            raise ValueError(f"{len(maxima)} maxima for {n_workers} workers; one for each of at least one is needed")
        if minimum < 1 or not all(largest >= minimum for largest in maxima):
            raise ValueError(f"batches from {minimum} to {min(maxima)} samples; 1 <= minimum <= maximum is needed")
        if not n_workers * minimum <= total <= sum(maxima):
            raise ValueError(f"a total of {total} samples is not within {n_workers * minimum} to {sum(maxima)}")
        if interval < 1 or not 0 <= gain_min < 1:
            raise ValueError(f"interval is {interval}, gain_min {gain_min}; >= 1 and 0 <= gain_min < 1 are needed")
        self.total = total
        self.minimum = minimum
        self.interval = interval
        self.gain_min = gain_min
        self.local_steps = local_steps
        self._maxima = [math.inf if largest == math.inf else math.floor(largest) for largest in maxima]
        self._active = list(range(n_workers))
        self._estimates: dict[int, Estimate] = {}
        self._pushes = 0  # since the last allocation was due
        self.sizes = self._chosen(None)
        self._cursor = 0  # samples handed out
        self._first = [self.allocate_next(worker) for worker in self._active]

    def check(self) -> None:
        """Assert the invariants: the total, the limits, and that those who have left have nothing."""
        active = [self.sizes[worker] for worker in self._active]
        room = sum(self._maxima[worker] for worker in self._active)
        assert not active or sum(self.sizes) == min(self.total, room), f"{self.sizes} are not {self.total} in all"
        assert all(size >= self.minimum for size in active), f"{self.sizes}: less than {self.minimum}"
        assert all(self.sizes[worker] <= self._maxima[worker] for worker in self._active), f"{self.sizes}: too many"
        assert sum(active) == sum(self.sizes), f"{self.sizes}: of {self._active} only"

    def first(self, worker: int) -> tuple[int, int]:
        """(first_sample, n_samples) of the worker's first push."""
        return self._first[worker]

    def allocate_next(self, worker: int) -> tuple[int, int]:
        """(first_sample, n_samples) of the worker's next push."""
        self._must_be_active(worker)
        first_sample, n_samples = self._cursor, self.sizes[worker] * self.local_steps
        self._cursor += n_samples
        return first_sample, n_samples

    def pushed(self, worker: int, estimate: Estimate) -> list[Allocated]:
        """A worker has pushed and expects this of its next iteration; NaN where it does not know yet.

        Returns a row for every active worker if there is a new allocation. Once one is due it waits until everyone's
        estimate is known.
        """
        self._must_be_active(worker)
        self._learn(worker, estimate)
        self._pushes += 1
        return self._allocate() if self._pushes >= self.interval * len(self._active) and self._is_known() else []

    def allocate(self, estimates: Mapping[int, Estimate]) -> list[Allocated]:
        """The same at once, with these estimates of all active workers: for those who gather them together."""
        for worker in estimates:
            self._must_be_active(worker)
        for worker, estimate in estimates.items():
            self._learn(worker, estimate)
        return self._allocate() if self._is_known() else []

    def left(self, worker: int) -> list[Allocated]:
        """A worker has left: the total is divided among those who stay, however little they gain."""
        self._must_be_active(worker)
        self._active.remove(worker)
        self.sizes[worker] = 0
        return self._divide() if self._active else []

    def joined(self, worker: int) -> list[Allocated]:
        """A worker that has left takes part again: the total is divided anew, by what it expected then."""
        if not 0 <= worker < len(self.sizes) or worker in self._active:
            raise ValueError(f"worker {worker} has not left; {self._active} are active")
        self._active = sorted([*self._active, worker])
        return self._divide()

    def _divide(self) -> list[Allocated]:
        """Between those who are there now, whatever they gain."""
        known = self._is_known()
        return self._take(self._chosen(self._estimates if known else None), math.nan, known)

    def _is_known(self) -> bool:
        """Whether all active workers expect something."""
        return all(worker in self._estimates for worker in self._active)

    def _must_be_active(self, worker: int) -> None:
        if not (0 <= worker < len(self.sizes) and self.sizes[worker]):
            raise ValueError(f"worker {worker} is not one of the active, {self._active}")

    def _learn(self, worker: int, estimate: Estimate) -> None:
        if math.isnan(estimate.fixed_s) or math.isnan(estimate.sample_s):
            return
        if not (0 <= estimate.fixed_s < math.inf and 0 < estimate.sample_s < math.inf):
            raise ValueError(f"worker {worker}: {estimate}; fixed_s >= 0 and sample_s > 0, both finite, are needed")
        self._estimates[worker] = estimate

    def _allocate(self) -> list[Allocated]:
        self._pushes = 0
        sizes = self._chosen(self._estimates)
        now_s, then_s = (
            max(self._estimates[worker].seconds(of[worker]) for worker in self._active) for of in (self.sizes, sizes)
        )
        gain = (now_s - then_s) / now_s
        return self._take(sizes, gain, True) if gain > self.gain_min else []

    def _chosen(self, estimates: Mapping[int, Estimate] | None) -> list[int]:
        """Sizes by these estimates, as equal as can be without."""
        of = [Estimate(0.0, 1.0) if estimates is None else estimates[worker] for worker in self._active]
        minima, maxima = [self.minimum] * len(of), [self._maxima[worker] for worker in self._active]
        ideal = equal_finish(of, self.total, minima, maxima)
        sizes = [0] * len(self._maxima)
        for worker, size in zip(self._active, whole(ideal, self.total, minima, maxima), strict=True):
            sizes[worker] = size
        return sizes

    def _take(self, sizes: list[int], gain: float, known: bool) -> list[Allocated]:
        before, self.sizes, self._pushes = self.sizes, sizes, 0
        nothing = Estimate(math.nan, math.nan)
        return [
            Allocated(
                worker,
                sizes[worker],
                (float(before[worker]), *(self._estimates[worker] if known else nothing), gain),
            )
            for worker in self._active
        ]
