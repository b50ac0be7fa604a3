"""How far each worker is, with the slowest and the fastest always at hand.

Counts only ever grow by one, so the workers are kept in one bucket per count and the two extremes are walked
along the counts: up one bucket at a time for the minimum, down for the maximum when the fastest leave. Every
step of either walk is paid for by an earlier push, so a push or a departure costs O(1) amortised, however
many workers there are. (Unless the fastest leave and join again and again.)
"""

from __future__ import annotations


class WorkerCounts:
    """How far each worker is, and the extremes over the active ones.

    pushes:    pushes of worker i so far; those of a departed worker stay as they were.
    iters:     how far it is: its pushes, but one that joins is as far as the slowest active worker if it is not
    farther, so that nobody waits for what it has missed.
    active:    the workers that have not left. min_iters, max_iters: the least and the most iters of the active
    workers; the last ones known once nobody is active.
    """

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
        """Take an active worker out of the extremes; its count would freeze the minimum."""
        self._take_out(worker)
        self.active.remove(worker)
        if self.active:
            self._advance_min()
            while self.max_iters not in self._active_at:
                self.max_iters -= 1

    def join(self, worker: int) -> None:
        """Let a worker that had left be active again, no less far than the slowest."""
        count = self.iters[worker] = max(self.iters[worker], self.min_iters)
        if not self.active:
            self.min_iters = count
        self.max_iters = max(self.max_iters, count)
        self.active.add(worker)
        self._put_in(worker)

    def lead(self, worker: int) -> int:
        """How far this worker is ahead of the slowest active worker."""
        return self.iters[worker] - self.min_iters

    def slowest(self) -> set[int]:
        """The active workers that are least far: a live set, not to be changed, empty in the end."""
        return self._active_at.get(self.min_iters, set())

    def check(self) -> None:
        """Assert that the buckets and the extremes are those of a plain recount."""
        counts = [self.iters[worker] for worker in self.active]
        assert all(n <= count for n, count in zip(self.pushes, self.iters, strict=True)), "pushes that do not count"
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
