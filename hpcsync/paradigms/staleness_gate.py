"""Bounded staleness: who is too far ahead of the slowest waits at a gate until the slowest has come close enough."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection

from hpcsync.paradigms.events import Grant
from hpcsync.paradigms.worker_counts import WorkerCounts
from hpcsync.planning.checks import is_whole


class Gate:
    """Open to whoever is at most `staleness` iterations ahead of the slowest active worker.

    progress:  what is counted. It goes on counting: the gate only looks.
    staleness: a whole number from 0 (lock-step) on, or math.inf (nobody ever waits).
    """

    def __init__(self, progress: WorkerCounts, staleness: float) -> None:
        if staleness != math.inf and not (is_whole(staleness) and staleness >= 0):
            raise ValueError(f"staleness is {staleness}; a whole number from 0 on, or inf, is needed")
        self.staleness = staleness
        self._progress = progress
        # (iters, worker) of those that wait. A heap: each costs O(log n_workers).
        self._waiting: list[tuple[int, int]] = []

    def is_open(self, worker: int) -> bool:
        """Whether the worker may go on."""
        return self._progress.iters[worker] - self._progress.min_iters <= self.staleness

    def hold(self, worker: int) -> None:
        """Let the worker wait."""
        heapq.heappush(self._waiting, (self._progress.iters[worker], worker))

    def leave(self, worker: int) -> None:
        """The worker does not wait any more, if it did."""
        self._waiting = [entry for entry in self._waiting if entry[1] != worker]
        heapq.heapify(self._waiting)

    def release(self, grant: Callable[[int], Grant]) -> list[Grant]:
        """Grant those that wait and may go on now: the furthest behind first, and equals in worker order."""
        waiting, progress, grants = self._waiting, self._progress, []
        while waiting and waiting[0][0] - progress.min_iters <= self.staleness:
            grants.append(grant(heapq.heappop(waiting)[1]))
        return grants

    def check(self, blocked: Collection[int], start_gap_max: float) -> None:
        """Assert that these wait and nobody else, that none of them does needlessly, and the bounds.

        start_gap_max: how many iterations ahead a worker may go on; it may wait one further. Until its next push its
        gap only shrinks, so the gap that it has gone on at is checked at every later event as well.
        """
        iters, active = self._progress.iters, self._progress.active
        min_iters = min((iters[worker] for worker in active), default=0)
        for worker in active:
            gap_iters = iters[worker] - min_iters
            if worker in blocked:
                assert gap_iters > self.staleness, f"worker {worker} is held at gap {gap_iters}: needlessly"
                assert gap_iters <= start_gap_max + 1, f"worker {worker} has pushed at gap {gap_iters}"
            else:
                assert gap_iters <= start_gap_max, f"worker {worker} has started at gap {gap_iters}"
        held_iters = sorted((iters[worker], worker) for worker in blocked)
        assert sorted(self._waiting) == held_iters, "the queue is not that of the held"
