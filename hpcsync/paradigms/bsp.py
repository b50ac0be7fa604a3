"""Bulk synchronous parallel (BSP): each update takes one contribution of every active worker.

A round ends with the last outstanding push. Its contributions are summed in worker order, whatever the order of
arrival, so that a run is bitwise reproducible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import Action, Apply, PushInfo
from hpcsync.paradigms.options import ParadigmOptions
from hpcsync.paradigms.papers import Reference, journal


class BSP(Paradigm):
    """Bulk synchronous parallel: no worker starts an iteration before the update of the previous one.

    Parameters
    ----------
    n_workers
        Number of workers.

    Notes
    -----
    A departure ends the round if only this worker's push was outstanding. A contribution pushed before its worker left
    stays in the round: it is complete, and the others have already waited for it. A worker that joins takes part in the
    current round, or in the next one if the current round already contains a contribution of its own.
    """

    name = "bsp"
    synchronous = True
    state_types = {"_contributed": list[int]}

    def __init__(self, n_workers: int) -> None:
        super().__init__(n_workers)
        self._contributed: list[int] = []  # workers with a contribution in the current round

    def check(self) -> None:
        """Assert the invariants of every paradigm, and the barrier."""
        super().check()
        iters, active = self._progress.iters, self._progress.active
        assert {worker for worker in self._contributed if worker in active} == self._blocked_since_s.keys(), (
            "the blocked workers are not those with a contribution in the current round"
        )
        runnable = {iters[worker] for worker in active if worker not in self._blocked_since_s}
        assert len(runnable) <= 1, f"runnable workers are in different rounds: {sorted(runnable)}"
        for worker in self._blocked_since_s:
            assert {iters[worker] - 1} == runnable, f"worker {worker} is blocked, but not exactly one push ahead"

    def _pushed(self, event: PushInfo) -> list[Action]:
        self._block(event.worker)
        self._contributed.append(event.worker)
        return self._end_round_if_complete()

    def _left(self, worker: int) -> list[Action]:
        return self._end_round_if_complete()

    def _joined(self, worker: int) -> list[Action]:
        if worker not in self._contributed:
            return [self._grant(worker)]
        self._block(worker)
        return []

    def _end_round_if_complete(self) -> list[Action]:
        outstanding = len(self._progress.active) - len(self._blocked_since_s)
        if outstanding or not self._contributed:
            return []
        workers = tuple(sorted(self._contributed))
        self._contributed.clear()
        return [Apply(workers), *self._grant_blocked(workers)]


VALIANT = Reference(
    "valiant1990bridging",
    "article",
    ("Valiant, Leslie G.",),
    "A Bridging Model for Parallel Computation",
    1990,
    journal("Communications of the ACM", "33", "103--111", "8"),
)


@dataclass(frozen=True, kw_only=True)
class BspOptions(ParadigmOptions):
    """Bulk synchronous parallel: a barrier in every iteration."""

    name: Literal["bsp"] = "bsp"

    policy = BSP
    of_one_version = True
    counts_workers = True
    lead_bound = 0
    guarantees = ("no-staleness", "complete-rounds", "slowest-runs")
    papers = (VALIANT,)
    place = 10
    colour = "#0072B2"
    waiting = "all workers wait for the slowest, in every iteration"
    update = "the mean of all gradients"
    source = "Valiant, 1990"

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        return "each update is the mean of all workers' gradients; all wait for the slowest"
