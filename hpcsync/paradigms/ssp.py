"""Stale synchronous parallel (Ho et al., NIPS 2013): nobody starts more than `staleness` iterations ahead.

Every push is applied on arrival, as an update of its own. Then the worker may go on if it is at most
`staleness` pushes ahead of the slowest active worker; otherwise it is held until the slowest has caught up
that far. So

    start gap (pushes ahead of the slowest when an iteration starts)    <= staleness
    push gap  (the same at any instant, the push just made counted)     <= staleness + 1

which is what the paper's reads guarantee: iteration c (from 0) sees every update of every active worker's
first c - staleness iterations, and all of its own.
"""

from __future__ import annotations

import heapq
import math

from hpcsync.paradigms.paradigm import Paradigm
from hpcsync.paradigms.protocol import Action, Apply, Grant, Pushed


class SSP(Paradigm):
    """Bounded staleness.

    staleness: largest start gap, in iterations; a whole number from 0 (lock-step) on, or math.inf (nobody
    ever waits).

    An answer's order: the update, the pushing worker's own grant, then the grants of those that it releases,
    the furthest behind first and equals in worker order.
    """

    name = "ssp"

    def __init__(self, n_workers: int, *, staleness: float) -> None:
        super().__init__(n_workers)
        if staleness != math.inf and not (isinstance(staleness, int) and staleness >= 0):
            raise ValueError(f"staleness is {staleness}; a whole number from 0 on, or inf, is needed")
        self.staleness = staleness
        # (pushes, worker) of the held. A held worker pushes nothing, so an entry goes stale only when its
        # worker leaves; such entries are dropped when they come up.
        self._held_by_pushes: list[tuple[int, int]] = []

    def check(self) -> None:
        """Assert the invariants: those of every paradigm, the bounds, and that nobody is held needlessly.

        A grant's start gap is checked at every later event as well: until its next push a worker's gap only
        shrinks.
        """
        super().check()
        pushes, held = self._progress.pushes, self._held_since_s
        bound_iters = self._start_gap_max_iters()
        min_iters = min((pushes[worker] for worker in self._progress.active), default=0)
        for worker in self._progress.active:
            gap_iters = pushes[worker] - min_iters
            if worker in held:
                assert gap_iters > self.staleness, f"worker {worker} is held at gap {gap_iters}: needlessly"
                assert gap_iters <= bound_iters + 1, f"worker {worker} has pushed at gap {gap_iters}"
            else:
                assert gap_iters <= bound_iters, f"worker {worker} has started at gap {gap_iters}"
        waiting = sorted(entry for entry in self._held_by_pushes if entry[1] in self._progress.active)
        assert waiting == sorted((pushes[worker], worker) for worker in held), "the queue is not that of the held"

    def _start_gap_max_iters(self) -> float:
        return self.staleness

    def _pushed(self, event: Pushed) -> list[Action]:
        # DSSP's ambiguity m, the same here: the papers leave open whether pushes that meet are merged. They
        # are not: each is applied when it arrives and counts as one update.
        return [Apply((event.worker,)), *self._answer(event.worker), *self._release()]

    def _left(self, worker: int) -> list[Action]:
        # DSSP's ambiguity n, the same here: a departure can raise the minimum as a push does.
        return [*self._release()]

    def _answer(self, worker: int) -> list[Action]:
        """Grant or hold the worker that has just pushed."""
        if self._progress.gap(worker) <= self.staleness:
            return [self._grant(worker)]
        self._hold(worker)
        return []

    def _hold(self, worker: int) -> None:
        super()._hold(worker)
        heapq.heappush(self._held_by_pushes, (self._progress.pushes[worker], worker))

    def _release(self) -> list[Grant]:
        """Grant the held workers that the slowest has come close enough to."""
        queue, grants = self._held_by_pushes, []
        while queue and queue[0][0] - self._progress.min_iters <= self.staleness:
            _, worker = heapq.heappop(queue)
            if worker in self._held_since_s:
                grants.append(self._grant(worker))
        return grants
