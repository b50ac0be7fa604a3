"""Base class of all paradigms: event validation, progress counts and the set of blocked workers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import ClassVar

from hpcsync.paradigms.events import Action, Elapsed, Evaluated, Event, Grant, Joined, Left, PushInfo
from hpcsync.paradigms.records import OF_THE_JOB
from hpcsync.paradigms.worker_counts import WorkerCounts
from hpcsync.state import Stateful


class Paradigm(Stateful, ABC):
    """State machine that decides when workers may continue.

    Every worker starts iteration 1 without a grant. Afterwards each push is answered by exactly one `Grant`, either in
    the answer to that push or in the answer to a later event; until then the worker is blocked. The same holds for a
    worker that joins again after it left.

    A subclass implements `_pushed`, `_left` and `_joined`. They run after the event has been validated and counted, and
    either grant the worker with `_grant` or block it with `_block`.

    Parameters
    ----------
    n_workers
        Number of workers, at least 1. Workers are numbered from 0.

    Attributes
    ----------
    name
        Name of the paradigm in a job file.
    synchronous
        True if every contribution of an update is computed from the version just before that update.
    momentum
        Momentum of the servers' optimizer from the next update on; NaN: as before.
    uses_evaluations
        True if the paradigm is to receive `Evaluated`.
    decision_fields
        Inputs recorded with the `Decision` actions of the paradigm, in order: (unit, description) by name.
    """

    name: ClassVar[str]
    synchronous: bool = False
    momentum: float = math.nan
    uses_evaluations: bool = False
    decision_fields: Mapping[str, tuple[str, str]] = {}
    state_types = {"_now_s": float, "_progress": WorkerCounts, "_blocked_since_s": dict[int, float]}

    def __init__(self, n_workers: int) -> None:
        if n_workers < 1:
            raise ValueError(f"n_workers must be at least 1, got {n_workers}")
        self.n_workers = n_workers
        self._now_s = -math.inf
        self._progress = WorkerCounts(n_workers)
        self._blocked_since_s: dict[int, float] = {}  # time of the push or join that awaits its grant

    def handle(self, event: Event) -> list[Action]:
        """Process one event and return the actions that answer it.

        Parameters
        ----------
        event
            The next event of the run. Times must not decrease from event to event.

        Returns
        -------
        list of Action
            Actions to carry out in this order.

        Raises
        ------
        ValueError
            If the event is impossible: unknown worker, worker that has left (or joins without having left), push of a
            blocked worker, time not finite or earlier than the previous event, time elapsed that was not set,
            evaluation that the paradigm does not use. The state is then unchanged.
        """
        self._refuse_illegal(event)
        worker = event.worker
        self._now_s = event.now_s
        if isinstance(event, PushInfo):
            self._progress.push(worker)
            return self._pushed(event)
        if isinstance(event, Joined):
            self._progress.join(worker)
            return self._joined(worker)
        if isinstance(event, Elapsed):
            return self._elapsed(worker)
        if isinstance(event, Evaluated):
            return self._evaluated(event)
        self._progress.leave(worker)
        self._blocked_since_s.pop(worker, None)
        return self._left(worker)

    def first(self, worker: int) -> Grant:
        """Return the grant with which the worker starts iteration 1."""
        return Grant(worker, 1)

    @property
    def due(self) -> Elapsed | None:
        """Event that is to be handled at its time even if no other one comes; None: there is none."""
        return None

    @property
    def wants_evaluation(self) -> bool:
        """True if the servers' model is to be evaluated, as soon as no other evaluation is running."""
        return False

    @property
    def _evaluation_releases(self) -> bool:
        """True if an evaluation of the present version, which the paradigm wants, releases workers."""
        return False

    def check(self) -> None:
        """Assert the invariants, recomputed from plain counts instead of the incremental bookkeeping of `handle`.

        Costs O(n_workers). Tests and simulations call it after every event.
        """
        self._progress.check()
        active, blocked = self._progress.active, self._blocked_since_s
        assert blocked.keys() <= active, f"blocked workers {blocked.keys() - active} have left"
        assert all(since_s <= self._now_s for since_s in blocked.values()), (
            "a worker is blocked since a time in the future"
        )
        assert not active or blocked.keys() != active or self._evaluation_releases, (
            "deadlock: every active worker is blocked"
        )

    @abstractmethod
    def _pushed(self, event: PushInfo) -> list[Action]:
        """Answer a push that has just been counted."""

    @abstractmethod
    def _left(self, worker: int) -> list[Action]:
        """Answer a departure; the worker is already inactive and no longer blocked."""

    @abstractmethod
    def _joined(self, worker: int) -> list[Action]:
        """Answer a join; the worker is already active again."""

    def _elapsed(self, worker: int) -> list[Action]:
        """Answer that the time which was due has come."""
        raise NotImplementedError

    def _evaluated(self, event: Evaluated) -> list[Action]:
        """Answer an evaluation of the servers' model."""
        raise NotImplementedError

    def _block(self, worker: int) -> None:
        """Block the worker, which has just pushed or joined."""
        self._blocked_since_s[worker] = self._now_s

    def _grant(
        self,
        worker: int,
        *,
        credits: int = 0,
        local_steps: int = OF_THE_JOB,
        commit_s: float = math.inf,
        ratio: float = math.nan,
    ) -> Grant:
        """Return the worker's next grant and release the worker if it is blocked."""
        progress, now_s = self._progress, self._now_s
        lead, held_s = progress.iters[worker] - progress.min_iters, now_s - self._blocked_since_s.pop(worker, now_s)
        # By position: keywords would add a tenth to the time of a decision.
        return Grant(worker, progress.pushes[worker] + 1, 0, lead, credits, held_s, -1, 0, local_steps, commit_s, ratio)

    def _grant_blocked(
        self, workers: Sequence[int], local_steps: int = OF_THE_JOB, commit_s: Sequence[float] = ()
    ) -> list[Grant]:
        """Return the next grants of the blocked ones of these workers, in their order, and release them.

        `commit_s` has one value for each worker, if it is given.
        """
        # An update may release a thousand workers: fields by position, and no calls but those of C.
        progress, blocked, now_s = self._progress, self._blocked_since_s, self._now_s
        pushes, iters, least = progress.pushes, progress.iters, progress.min_iters
        new, pop, nan = tuple.__new__, blocked.pop, math.nan
        return [
            new(Grant, (i, pushes[i] + 1, 0, iters[i] - least, 0, now_s - pop(i), -1, 0, local_steps, end_s, nan))
            for i, end_s in zip(workers, commit_s or repeat(math.inf, len(workers)), strict=True)
            if i in blocked
        ]

    def _refuse_illegal(self, event: Event) -> None:
        if not isinstance(event, (PushInfo, Left, Joined, Elapsed, Evaluated)):
            raise ValueError(f"event must be PushInfo, Left, Joined, Elapsed or Evaluated, got {event!r}")
        worker = event.worker
        if not 0 <= worker < self.n_workers:
            raise ValueError(f"{event}: worker must be from 0 to {self.n_workers - 1}")
        if isinstance(event, Elapsed):
            due = self.due
            if due is None or due.worker != worker or not due.now_s <= event.now_s:
                raise ValueError(f"{event}: must be {due}, or later" if due else f"{event}: nothing is due")
        elif isinstance(event, Evaluated) and not self.uses_evaluations:
            raise ValueError(f"{event}: {self.name} uses no evaluations")
        elif isinstance(event, Joined) == (worker in self._progress.active):
            raise ValueError(f"{event}: worker {worker} has {'not ' * isinstance(event, Joined)}left")
        if isinstance(event, PushInfo) and worker in self._blocked_since_s:
            raise ValueError(f"{event}: worker {worker} is blocked and cannot push")
        # This form of the comparison also rejects NaN.
        if not self._now_s <= event.now_s < math.inf:
            raise ValueError(
                f"{event}: now_s must be finite and at least {self._now_s}, the time of the previous event"
            )
