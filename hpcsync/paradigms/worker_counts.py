"""Iterations of each worker, and the gate that bounds the lead of each over the slowest.

The slowest and the fastest worker are available in constant time.

Counts grow by one at a time. The workers are kept in one bucket per count, and the two extremes move along the counts:
up one bucket at a time for the minimum, down for the maximum when the fastest workers leave. Every step of either
movement is paid for by an earlier push, so a push or a departure costs O(1) amortised for any number of workers, unless
the fastest workers leave and join again and again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection
from typing import TypeVar

from hpcsync.planning.checks import is_whole
from hpcsync.state import Stateful

Answer = TypeVar("Answer")


class WorkerCounts(Stateful):
    """Pushes and iterations of each worker, and the extremes over the active workers.

    Parameters
    ----------
    n_workers
        Number of workers; all are active at first.

    Attributes
    ----------
    pushes
        Pushes of each worker. The count of a worker that left stays as it was.
    iters
        Iterations of each worker: its pushes, except that a worker that joins is credited with at least the iterations
        of the slowest active worker, so that no worker blocks for what it has missed.
    active
        Workers that have not left.
    min_iters, max_iters
        Smallest and largest `iters` of the active workers; the last known values once no worker is active.
    """

    state_types = {
        "pushes": list[int],
        "iters": list[int],
        "active": set[int],
        "min_iters": int,
        "max_iters": int,
        "_active_at": dict[int, set[int]],
    }

    def __init__(self, n_workers: int) -> None:
        self.pushes = [0] * n_workers
        self.iters = [0] * n_workers
        self.active = set(range(n_workers))
        self.min_iters = 0
        self.max_iters = 0
        self._active_at = {0: set(range(n_workers))}

    def push(self, worker: int) -> None:
        """Count one push of an active worker."""
        self._take_out(worker)
        self.pushes[worker] += 1
        count = self.iters[worker] = self.iters[worker] + 1
        self._put_in(worker)
        if count > self.max_iters:
            self.max_iters = count
        self._advance_min()

    def leave(self, worker: int) -> None:
        """Remove an active worker from the extremes, where its count would freeze the minimum."""
        self._take_out(worker)
        self.active.remove(worker)
        if self.active:
            self._advance_min()
            while self.max_iters not in self._active_at:
                self.max_iters -= 1

    def join(self, worker: int) -> None:
        """Make a worker that had left active again, with at least the iterations of the slowest."""
        count = self.iters[worker] = max(self.iters[worker], self.min_iters)
        if not self.active:
            self.min_iters = count
        self.max_iters = max(self.max_iters, count)
        self.active.add(worker)
        self._put_in(worker)

    def lead(self, worker: int) -> int:
        """Return the number of iterations by which the worker is ahead of the slowest active worker."""
        return self.iters[worker] - self.min_iters

    def slowest(self) -> set[int]:
        """Return the active workers with the fewest iterations: a live set that must not be modified."""
        return self._active_at.get(self.min_iters, set())

    def check(self) -> None:
        """Assert that the buckets and the extremes equal a plain recount."""
        counts = [self.iters[worker] for worker in self.active]
        assert all(n <= count for n, count in zip(self.pushes, self.iters, strict=True)), (
            "a worker has more pushes than iterations"
        )
        if counts:
            assert self.min_iters == min(counts), f"min_iters is {self.min_iters}, a recount gives {min(counts)}"
            assert self.max_iters == max(counts), f"max_iters is {self.max_iters}, a recount gives {max(counts)}"
        for count, bucket in self._active_at.items():
            members = {worker for worker in self.active if self.iters[worker] == count}
            assert bucket == members, f"bucket {count} holds {bucket}, a recount gives {members}"
        assert sum(map(len, self._active_at.values())) == len(counts), "an active worker is in no bucket"
        assert all(self._active_at.values()), "an empty bucket is kept"

    def _put_in(self, worker: int) -> None:
        count = self.iters[worker]
        bucket = self._active_at.get(count)
        if bucket is None:
            self._active_at[count] = {worker}
        else:
            bucket.add(worker)

    def _take_out(self, worker: int) -> None:
        count = self.iters[worker]
        bucket = self._active_at[count]
        bucket.remove(worker)
        if not bucket:
            del self._active_at[count]

    def _advance_min(self) -> None:
        while self.min_iters not in self._active_at:
            self.min_iters += 1


class Gate(Stateful):
    """Bounded staleness: open to workers at most `staleness` iterations ahead of the slowest active worker.

    A worker further ahead blocks until the slowest has caught up.

    Parameters
    ----------
    progress
        Iterations of each worker. The gate reads the counts and never changes them.
    staleness
        Largest lead that passes, in iterations: an integer >= 0 (0 is lock-step), or math.inf (always open). It is no
        part of the state: a gate whose bound moves is a subclass that declares it.

    Raises
    ------
    ValueError
        If `staleness` has another value.
    """

    state_types = {"_blocked": list[tuple[int, int]]}

    def __init__(self, progress: WorkerCounts, staleness: float) -> None:
        if staleness != math.inf and not (is_whole(staleness) and staleness >= 0):
            raise ValueError(f"staleness must be an integer >= 0 or inf, got {staleness}")
        self.staleness = staleness
        self._progress = progress
        # Heap of (iters, worker) of the blocked workers: O(log n_workers) each.
        self._blocked: list[tuple[int, int]] = []

    def is_open(self, worker: int) -> bool:
        """Return True if the worker may continue."""
        return self._progress.iters[worker] - self._progress.min_iters <= self.staleness

    def block(self, worker: int) -> None:
        """Add the worker to the queue of blocked workers."""
        heapq.heappush(self._blocked, (self._progress.iters[worker], worker))

    def leave(self, worker: int) -> bool:
        """Remove the worker from the queue; return whether it was in it."""
        n_blocked = len(self._blocked)
        self._blocked = [entry for entry in self._blocked if entry[1] != worker]
        heapq.heapify(self._blocked)
        return len(self._blocked) < n_blocked

    def release(self, answer: Callable[[int], Answer]) -> list[Answer]:
        """Release the blocked workers that may continue now.

        Parameters
        ----------
        answer
            Returns what a worker is answered: its grant, possibly with other actions.

        Returns
        -------
        list
            Least advanced worker first, ties in worker order.
        """
        queue, progress, answers = self._blocked, self._progress, []
        while queue and queue[0][0] - progress.min_iters <= self.staleness:
            answers.append(answer(heapq.heappop(queue)[1]))
        return answers

    def check(self, blocked: Collection[int], start_gap_max: float) -> None:
        """Assert that the queue holds exactly the blocked workers, that none is blocked without need, and the bounds.

        Parameters
        ----------
        blocked
            Workers that are blocked.
        start_gap_max
            Largest lead at which an iteration may start; a blocked worker may be one iteration further. The lead of a
            worker only shrinks until its next push, so the lead at its start is also checked at every later event.
        """
        iters, active = self._progress.iters, self._progress.active
        min_iters = min((iters[worker] for worker in active), default=0)
        for worker in active:
            gap_iters = iters[worker] - min_iters
            if worker in blocked:
                assert gap_iters > self.staleness, f"worker {worker} is blocked at lead {gap_iters} without need"
                assert gap_iters <= start_gap_max + 1, f"worker {worker} has pushed at lead {gap_iters}"
            else:
                assert gap_iters <= start_gap_max, f"worker {worker} has started at lead {gap_iters}"
        blocked_iters = sorted((iters[worker], worker) for worker in blocked)
        assert sorted(self._blocked) == blocked_iters, "the queue does not hold the blocked workers"
