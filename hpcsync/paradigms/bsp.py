"""Bulk synchronous parallel: all workers, one update, all workers.

A round ends with the last outstanding push. Its contributions are applied as one update, in worker order
whatever the order of arrival, so that a run is bitwise reproducible.
"""

from __future__ import annotations

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import Action, Apply, Pushed


class BSP(Paradigm):
    """The barrier: an update takes one contribution of every active worker, and nobody starts before it.

    A departure ends the round if it was the last one outstanding. What a worker pushed before it left stays
    in its round: the contribution is complete, and the others' wait for it has been paid. Who joins takes part in
    the round under way; if a contribution of its own is in it already, in the next one.
    """

    name = "bsp"
    synchronous = True

    def __init__(self, n_workers: int) -> None:
        super().__init__(n_workers)
        self._contributed: list[int] = []  # workers whose contributions wait for the end of the round

    def check(self) -> None:
        """Assert the paradigm's invariants: those of every paradigm, and the barrier."""
        super().check()
        iters, active = self._progress.iters, self._progress.active
        assert {worker for worker in self._contributed if worker in active} == self._blocked_since_s.keys(), (
            "the held workers are not those that wait for the end of the round"
        )
        runnable = {iters[worker] for worker in active if worker not in self._blocked_since_s}
        assert len(runnable) <= 1, f"runnable workers are in different rounds: {sorted(runnable)}"
        for worker in self._blocked_since_s:
            assert {iters[worker] - 1} == runnable, f"worker {worker} is held, but not one push past the others"

    def _pushed(self, event: Pushed) -> list[Action]:
        self._hold(event.worker)
        self._contributed.append(event.worker)
        return self._end_round_if_complete()

    def _left(self, worker: int) -> list[Action]:
        return self._end_round_if_complete()

    def _joined(self, worker: int) -> list[Action]:
        if worker not in self._contributed:
            return [self._grant(worker)]
        self._hold(worker)
        return []

    def _end_round_if_complete(self) -> list[Action]:
        outstanding = len(self._progress.active) - len(self._blocked_since_s)
        if outstanding or not self._contributed:
            return []
        update = Apply(tuple(sorted(self._contributed)))
        self._contributed.clear()
        return [update, *(self._grant(worker) for worker in sorted(self._blocked_since_s))]
