"""What all paradigms share: the one door, the refusal of illegal input, and the book of who is held."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from hpcsync.paradigms.events import Action, Event, Grant, Joined, Left, Pushed
from hpcsync.paradigms.worker_counts import WorkerCounts


class Paradigm(ABC):
    """Decides who may go on, and when.

    Every worker may start iteration 1 unasked. From then on each of its pushes is answered by one Grant, in
    the answer to that push or to a later event; in between the worker is held. So is its return after it had left.

    A paradigm implements `_pushed`, `_left` and `_joined`, which run after the event has been validated and counted,
    and answers with actions that it makes by `_grant`, or with none after `_hold`.
    """

    name: ClassVar[str]
    synchronous: bool = False  # whether every contribution of an update is computed from the version just before it
    decision_fields: Mapping[str, tuple[str, str]] = {}  # inputs of its Decisions, in order: (unit, description)

    def __init__(self, n_workers: int) -> None:
        if n_workers < 1:
            raise ValueError(f"n_workers is {n_workers}; at least 1 is needed")
        self.n_workers = n_workers
        self._now_s = -math.inf
        self._progress = WorkerCounts(n_workers)
        self._blocked_since_s: dict[int, float] = {}  # held worker: time of the push, or return, that awaits its grant

    def handle(self, event: Event) -> list[Action]:
        """Take in one event and return the actions that answer it, to be carried out in this order.

        Raises ValueError, with the state untouched, for an event that cannot have happened: of a worker that
        does not exist or has left (or joins and has not), a push of a held worker, or a time that is before the last
        event's or not finite.
        """
        self._refuse_illegal(event)
        worker = event.worker
        self._now_s = event.now_s
        if isinstance(event, Pushed):
            self._progress.push(worker)
            return self._pushed(event)
        if isinstance(event, Joined):
            self._progress.join(worker)
            return self._joined(worker)
        self._progress.leave(worker)
        self._blocked_since_s.pop(worker, None)
        return self._left(worker)

    def first(self, worker: int) -> Grant:
        """What the worker may start with, unasked."""
        return Grant(worker, 1, 0, 0, 0.0)

    def check(self) -> None:
        """Assert the invariants, from plain counts rather than from the bookkeeping that makes `handle` fast.

        Costs O(n_workers): for tests, simulations and audits, after every event.
        """
        self._progress.check()
        active, blocked = self._progress.active, self._blocked_since_s
        assert blocked.keys() <= active, f"held workers {blocked.keys() - active} have left"
        assert all(since_s <= self._now_s for since_s in blocked.values()), "a worker is held from the future on"
        assert not active or blocked.keys() != active, "every active worker is held: nobody can ever release them"

    @abstractmethod
    def _pushed(self, event: Pushed) -> list[Action]:
        """Answer a push that has just been counted."""

    @abstractmethod
    def _left(self, worker: int) -> list[Action]:
        """Answer a departure: the worker is already out of the progress, and no longer held."""

    @abstractmethod
    def _joined(self, worker: int) -> list[Action]:
        """Answer the return of a worker: it is in the progress again."""

    def _hold(self, worker: int) -> None:
        """Let the worker, which has just pushed, wait."""
        self._blocked_since_s[worker] = self._now_s

    def _grant(self, worker: int, credits: int = 0) -> Grant:
        """Let the worker go on, whether it has just pushed or has been held."""
        return Grant(
            worker=worker,
            iteration=self._progress.pushes[worker] + 1,
            gap_iters=self._progress.lead(worker),
            credits=credits,
            held_s=self._now_s - self._blocked_since_s.pop(worker, self._now_s),
        )

    def _refuse_illegal(self, event: Event) -> None:
        if not isinstance(event, (Pushed, Left, Joined)):
            raise ValueError(f"{event!r} is not an event of a paradigm")
        worker = event.worker
        if not 0 <= worker < self.n_workers:
            raise ValueError(f"{event}: there is no worker {worker}, only 0 to {self.n_workers - 1}")
        if isinstance(event, Joined) == (worker in self._progress.active):
            raise ValueError(f"{event}: worker {worker} has {'not ' * isinstance(event, Joined)}left")
        if isinstance(event, Pushed) and worker in self._blocked_since_s:
            raise ValueError(f"{event}: worker {worker} is held and may not have started an iteration")
        # Written so that NaN is refused too.
        if not self._now_s <= event.now_s < math.inf:
            raise ValueError(f"{event}: the last event was at {self._now_s} s; time does not run backwards")
