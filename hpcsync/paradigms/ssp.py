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

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import Action, Apply, Pushed
from hpcsync.paradigms.staleness_gate import Gate


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
        self._gate = Gate(self._progress, staleness)

    def check(self) -> None:
        """Assert the invariants: those of every paradigm, the bounds, and that nobody is held needlessly."""
        super().check()
        self._gate.check(self._blocked_since_s, self._start_gap_max_iters())

    def _start_gap_max_iters(self) -> float:
        return self._gate.staleness

    def _pushed(self, event: Pushed) -> list[Action]:
        # DSSP's ambiguity m, the same here: the papers leave open whether pushes that meet are merged. They
        # are not: each is applied when it arrives and counts as one update.
        return [Apply((event.worker,)), *self._answer(event.worker), *self._gate.release(self._grant)]

    def _left(self, worker: int) -> list[Action]:
        # DSSP's ambiguity n, the same here: a departure can raise the minimum as a push does.
        self._gate.leave(worker)
        return [*self._gate.release(self._grant)]

    def _joined(self, worker: int) -> list[Action]:
        # It may have left far ahead of the slowest, and has to wait for it as it would have had to then.
        return SSP._answer(self, worker)

    def _answer(self, worker: int) -> list[Action]:
        """Grant or hold the worker that has just pushed, or joined."""
        if self._gate.is_open(worker):
            return [self._grant(worker)]
        self._hold(worker)
        return []

    def _hold(self, worker: int) -> None:
        super()._hold(worker)
        self._gate.hold(worker)
