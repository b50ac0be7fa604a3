"""Batch sizes with which all workers are expected to finish an iteration at the same time.

An iteration of b samples is expected to take worker i the time T_i = a_i + c_i b. All workers finish together at the
time T at which the sizes (T - a_i) / c_i sum to the total (`equal_finish`). Without fixed costs a_i these are the
shares by speed of LB-BSP. Sizes are rounded to integers (`whole`) as in DBS.

References
----------
C. Chen et al. (LB-BSP), SoCC 2020, arXiv:1806.02508. Q. Ye et al. (DBS), 2020, arXiv:2007.11831.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from hpcsync.state import Stateful


class Estimate(NamedTuple):
    """Expected time of an iteration of b samples: fixed_s + sample_s * b seconds.

    Attributes
    ----------
    fixed_s
        Seconds that do not depend on the number of samples.
    sample_s
        Seconds per sample.
    """

    fixed_s: float
    sample_s: float

    def seconds(self, n_samples: float) -> float:
        """Return the expected seconds of an iteration of `n_samples` samples."""
        return self.fixed_s + self.sample_s * n_samples


class Allocated(NamedTuple):
    """Batch size of a worker from its next iteration on.

    Attributes
    ----------
    worker
        Number of the worker.
    size
        Samples per iteration.
    inputs
        Values that the size was chosen from, in the order of `Allocator.decision_fields`.
    """

    worker: int
    size: int
    inputs: tuple[float, ...]


def equal_finish(
    estimates: Sequence[Estimate], total: float, minima: Sequence[float], maxima: Sequence[float]
) -> list[float]:
    """Return real-valued batch sizes that minimise the time of the last worker.

    Workers within their limits finish at the same time.

    Parameters
    ----------
    estimates
        Expected times of each worker.
    total
        Samples of all workers together.
    minima, maxima
        Limits of each worker's batch size.

    Returns
    -------
    list of float
        Sizes that sum to `total`, or the maxima if these sum to less.

    Raises
    ------
    ValueError
        If the minima sum to more than `total`.
    """
    if sum(minima) > total:
        raise ValueError(f"minima must sum to at most total = {total}, got {sum(minima)}")
    if sum(maxima) <= total:
        return list(maxima)
    sizes = [0.0] * len(estimates)
    free, left = list(range(len(estimates))), float(total)
    while free:
        at_s = left + sum(estimates[i].fixed_s / estimates[i].sample_s for i in free)
        at_s /= sum(1.0 / estimates[i].sample_s for i in free)
        for i in free:
            sizes[i] = (at_s - estimates[i].fixed_s) / estimates[i].sample_s
        # If raising to the minima adds more than cutting to the maxima removes, the end comes earlier than at_s, and a
        # worker below its minimum now will be below it then too; and vice versa.
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
    """Return the integer sizes nearest to the ideal ones in the sum of squares.

    Units are added one at a time, starting from the minima, to the worker for which the sum of squares grows least;
    ties go to the lowest worker.

    Parameters
    ----------
    ideal
        Real-valued sizes.
    total
        Sum of the result.
    minima, maxima
        Limits of each size.

    Returns
    -------
    list of int
        Sizes that sum to `total`, or the maxima if these sum to less.
    """
    # Values that differ by rounding errors are equal, so that these do not decide which worker gets a unit.
    ideal = [round(size, 6) for size in ideal]
    n = range(len(ideal))
    # Workers a unit or more short of their ideal precede all others, so all these units are added at once.
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


class Allocator(Stateful):
    """Batch sizes of all workers, and the samples of each push.

    Parameters
    ----------
    n_workers
        Number of workers, numbered from 0.
    total
        Samples of one iteration of all workers together; constant when workers leave or join.
    minimum
        Smallest batch size.
    maxima
        Largest batch size of each worker (what its memory holds), math.inf for none.
    interval
        Pushes per active worker between two allocations.
    gain_min
        An allocation is discarded unless it shortens the iteration of the slowest worker by more than this share.
    local_steps
        Iterations per push, each of the worker's batch size.

    Attributes
    ----------
    sizes
        Current batch size of each worker, 0 for a worker that has left. They sum to `total` if the maxima of the active
        workers allow it, and are the maxima otherwise.
    decision_fields
        Names of the inputs of an allocation: batch_before; fixed_s and sample_s, the worker's estimate (NaN where the
        total was divided equally for want of estimates); gain, the share by which the iteration of the slowest worker
        is shortened (NaN where it was not required).

    Notes
    -----
    The samples form one endless sequence, of which each worker takes the next part when it starts a push. So no sample
    is used twice and none is left out, for any sizes.
    """

    decision_fields: ClassVar[Mapping[str, tuple[str, str]]] = {  # (unit, description)
        "batch_before": ("samples", "Batch size of the worker before."),
        "fixed_s": ("s", "Estimated time independent of the batch size; NaN if divided equally, without estimates."),
        "sample_s": ("s/sample", "Estimated time per sample; NaN if divided equally, without estimates."),
        "gain": ("1", "Share by which the slowest worker's iteration gets shorter; NaN if it was not required."),
    }
    state_types = {
        "sizes": list[int],
        "_active": list[int],
        "_estimates": dict[int, Estimate],
        "_pushes": int,
        "_cursor": int,
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
            raise ValueError(
                f"maxima must have one value for each of n_workers >= 1, got {len(maxima)} for {n_workers}"
            )
        if minimum < 1 or not all(largest >= minimum for largest in maxima):
            raise ValueError(f"batch sizes must have 1 <= minimum <= maximum, got {minimum} and {min(maxima)}")
        if not n_workers * minimum <= total <= sum(maxima):
            raise ValueError(f"total must be from {n_workers * minimum} to {sum(maxima)}, got {total}")
        if interval < 1 or not 0 <= gain_min < 1:
            raise ValueError(f"interval >= 1 and 0 <= gain_min < 1 are required, got {interval} and {gain_min}")
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
        self._cursor = 0  # samples allocated

    def check(self) -> None:
        """Assert the invariants: the total, the limits, and size 0 for workers that have left."""
        active = [self.sizes[worker] for worker in self._active]
        room = sum(self._maxima[worker] for worker in self._active)
        assert not active or sum(self.sizes) == min(self.total, room), f"sizes {self.sizes} do not sum to {self.total}"
        assert all(size >= self.minimum for size in active), f"sizes {self.sizes} are less than {self.minimum}"
        assert all(self.sizes[worker] <= self._maxima[worker] for worker in self._active), (
            f"sizes {self.sizes} exceed the maxima"
        )
        assert sum(active) == sum(self.sizes), f"sizes {self.sizes} are not 0 outside of {self._active}"

    def allocate_next(self, worker: int) -> tuple[int, int]:
        """Return (first_sample, n_samples) of the worker's next push."""
        self._must_be_active(worker)
        first_sample, n_samples = self._cursor, self.sizes[worker] * self.local_steps
        self._cursor += n_samples
        return first_sample, n_samples

    def pushed(self, worker: int, estimate: Estimate) -> list[Allocated]:
        """Count a push and allocate if an allocation is due.

        A due allocation is delayed until every active worker has an estimate.

        Parameters
        ----------
        worker
            Number of the worker that has pushed.
        estimate
            Expected time of its next iteration; NaN if not known yet.

        Returns
        -------
        list of Allocated
            One entry per active worker if there is a new allocation, otherwise empty.
        """
        self._must_be_active(worker)
        self._learn(worker, estimate)
        self._pushes += 1
        return self._allocate() if self._pushes >= self.interval * len(self._active) and self._is_known() else []

    def allocate(self, estimates: Mapping[int, Estimate]) -> list[Allocated]:
        """Allocate at once from estimates of all active workers.

        Parameters
        ----------
        estimates
            Expected time of the next iteration, by worker.

        Returns
        -------
        list of Allocated
            One entry per active worker if there is a new allocation, otherwise empty.
        """
        for worker in estimates:
            self._must_be_active(worker)
        for worker, estimate in estimates.items():
            self._learn(worker, estimate)
        return self._allocate() if self._is_known() else []

    def left(self, worker: int) -> list[Allocated]:
        """Divide the total among the workers that stay, whatever the gain; return the new sizes."""
        self._must_be_active(worker)
        self._active.remove(worker)
        self.sizes[worker] = 0
        return self._divide() if self._active else []

    def joined(self, worker: int) -> list[Allocated]:
        """Divide the total again, including a worker that had left, by its last estimate; return the new sizes."""
        if not 0 <= worker < len(self.sizes) or worker in self._active:
            raise ValueError(f"worker {worker} has not left: workers {self._active} are active")
        self._active = sorted([*self._active, worker])
        return self._divide()

    def _divide(self) -> list[Allocated]:
        """Divide the total among the active workers, whatever the gain."""
        known = self._is_known()
        return self._take(self._chosen(self._estimates if known else None), math.nan, known)

    def _is_known(self) -> bool:
        """Return True if all active workers have an estimate."""
        return all(worker in self._estimates for worker in self._active)

    def _must_be_active(self, worker: int) -> None:
        if not (0 <= worker < len(self.sizes) and self.sizes[worker]):
            raise ValueError(f"worker {worker} is not active: workers {self._active} are")

    def _learn(self, worker: int, estimate: Estimate) -> None:
        if math.isnan(estimate.fixed_s) or math.isnan(estimate.sample_s):
            return
        if not (0 <= estimate.fixed_s < math.inf and 0 < estimate.sample_s < math.inf):
            raise ValueError(f"worker {worker}: fixed_s >= 0 and sample_s > 0 must be finite, got {estimate}")
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
        """Return sizes by these estimates, as equal as possible without."""
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
