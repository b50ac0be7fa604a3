"""Which workers stall: whose iteration has lasted longer than their own iterations lead one to expect.

A worker's deadline follows from the durations of its last `WINDOW` iterations alone:

    deadline = median + max(SPREAD * 1.4826 * MAD, SHARE * median, SLACK_S)

MAD, their median absolute deviation from their median, times 1.4826 is the standard deviation where they are normally
distributed. Neither it nor the median is moved by a few stalls among them, as a mean and a standard deviation are; so
the second stall is noticed like the first. `SHARE` and `SLACK_S` are for workers whose iterations all take the same
time, whose MAD is 0: nobody wants to hear of less. Of fewer than `KNOWN` iterations nothing is concluded.

Times come in with the calls, in seconds on one clock; nothing here reads one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Container
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

WINDOW = 50
KNOWN = 5
SPREAD = 20.0  # of exponentially distributed times, the widest that are usual, one in 100,000 is above the deadline
SHARE = 2.0  # so the deadline is at least three times the median
SLACK_S = 1.0
NORMAL = 1.4826
LOOK_S = 0.1  # from one look to the next
AWAY_S = 1.0  # so long without one, and nobody knows who did what in the meantime


class Straggler(NamedTuple):
    """An iteration that has lasted longer than its deadline. usual_s: the median of its worker's last ones. ended:
    whether it is over; `lasted_s` is then what it took, waits included."""

    worker: int
    iteration: int
    lasted_s: float
    deadline_s: float
    usual_s: float
    ended: bool = False


@dataclass(slots=True)
class _Iteration:
    number: int
    since_s: float
    size: float
    waited_s: float = 0.0  # since then for others, or while nobody looked
    reported_s: float = 0.0  # how long it had lasted when that was told last
    deadline_s: float | None = None  # once somebody has asked


class StragglerDetector:
    """Keeps the durations of every worker's own iterations, and says which one is overdue.

    An iteration is told of once it is, again whenever it has lasted twice as long as when it was told of last, and when
    such a one ends. What a worker waits for others is not its own, and never makes it overdue.
    """

    def __init__(self) -> None:
        self._durations: dict[int, deque[float]] = {}  # of a worker's last iterations, each per unit of its size
        self._running: dict[int, _Iteration] = {}
        self._over: list[Straggler] = []
        self._looked_s = 0.0

    def began(self, worker: int, iteration: int, now_s: float, size: float = 1.0) -> None:
        """From now on the worker is at this iteration. size: to which its duration is in proportion, in any unit."""
        self._running[worker] = _Iteration(iteration, now_s, size)

    def ended(self, worker: int, now_s: float, waited_s: float = 0.0) -> None:
        """It has ended its iteration. waited_s: of that for others."""
        if (running := self._running.pop(worker, None)) is None:
            return
        took_s = now_s - running.since_s
        if running.reported_s:
            self._over.append(self._stall(worker, running, took_s)._replace(ended=True))
        if (durations := self._durations.get(worker)) is None:
            durations = self._durations[worker] = deque(maxlen=WINDOW)
        durations.append(max(0.0, took_s - waited_s) / running.size)

    def left(self, worker: int) -> None:
        """It makes no iteration for now."""
        self._running.pop(worker, None)

    @property
    def running(self) -> Collection[int]:
        """Workers that are at an iteration."""
        return self._running.keys()

    def deadline_s(self, worker: int, size: float = 1.0) -> float:
        """After so long an iteration of this size is overdue; infinity while nothing is known of it."""
        durations = self._durations.get(worker, ())
        if len(durations) < KNOWN:
            return math.inf
        usual = median(durations)
        mad = median(abs(duration - usual) for duration in durations)
        return size * usual + max(size * SPREAD * NORMAL * mad, size * SHARE * usual, SLACK_S)

    def look(self, now_s: float, waiting: Container[int] = ()) -> list[Straggler]:
        """What is to be told now. waiting: workers that wait for others. To be called every `LOOK_S`."""
        since_s, self._looked_s = now_s - self._looked_s, now_s
        found, self._over = self._over, []
        for worker, running in self._running.items():
            lasted_s = now_s - running.since_s
            if worker in waiting or since_s > AWAY_S:
                running.waited_s += min(since_s, lasted_s)
            elif (lasted_s := lasted_s - running.waited_s) > max(SLACK_S, 2 * running.reported_s):
                if running.deadline_s is None:
                    running.deadline_s = self.deadline_s(worker, running.size)
                if lasted_s > running.deadline_s:
                    running.reported_s = lasted_s
                    found.append(self._stall(worker, running, lasted_s))
        return found

    def _stall(self, worker: int, running: _Iteration, lasted_s: float) -> Straggler:
        assert running.deadline_s is not None
        usual_s = running.size * median(self._durations[worker])
        return Straggler(worker, running.number, lasted_s, running.deadline_s, usual_s)
