"""Detection of stragglers: workers whose iteration has lasted longer than their own iterations suggest.

The deadline of a worker follows from the durations of its last `WINDOW` iterations::

    deadline = median + max(SPREAD * 1.4826 * MAD, SHARE * median, SLACK_S)

MAD is the median absolute deviation from the median; times 1.4826 it is the standard deviation of a normal
distribution. Unlike mean and standard deviation, median and MAD are not moved by a few stalls among the durations, so
the second stall is detected like the first. `SHARE` and `SLACK_S` are for workers whose iterations all take the same
time, with a MAD of 0, where shorter delays are of no interest. With fewer than `KNOWN` iterations there is no deadline.

Times are passed in, in seconds on one clock; this module reads no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Container
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from hpcsync.state import Stateful

WINDOW = 50
KNOWN = 5
SPREAD = 20.0  # of exponential times, the widest usual distribution, one in 100,000 exceeds the deadline
SHARE = 2.0  # so the deadline is at least three times the median
SLACK_S = 1.0
NORMAL = 1.4826
LOOK_S = 0.1  # polling interval in seconds
AWAY_S = 1.0  # longest polling gap that counts


class Straggler(NamedTuple):
    """Iteration that has lasted longer than its deadline.

    Attributes
    ----------
    worker, iteration
        Worker and its iteration.
    lasted_s
        Seconds so far; if `ended`, the whole duration, waits included.
    deadline_s
        Deadline in seconds after the begin.
    usual_s
        Median of the worker's last iterations.
    ended
        True once the iteration is over.
    """

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
    waited_s: float = 0.0  # waiting for others, and polling gaps, since the begin
    reported_s: float = 0.0  # duration at the last report
    deadline_s: float | None = None  # computed on first use


class StragglerDetector(Stateful):
    """Durations of every worker's own iterations, and the iterations that are overdue.

    An iteration is reported once it is overdue, again whenever it has lasted twice as long as at the last report, and
    when it ends. Waiting for others is not part of an iteration and never makes it overdue.
    """

    state_types = {
        "_durations": dict[int, deque[float]],
        "_running": dict[int, _Iteration],
        "_over": list[Straggler],
        "_looked_s": float,
    }

    def __init__(self) -> None:
        self._durations: dict[int, deque[float]] = {}  # of each worker's last iterations, per work unit
        self._running: dict[int, _Iteration] = {}
        self._over: list[Straggler] = []
        self._looked_s = 0.0

    def began(self, worker: int, iteration: int, now_s: float, size: float = 1.0) -> None:
        """Note that the worker has begun an iteration.

        Parameters
        ----------
        worker, iteration
            Worker and its iteration.
        now_s
            Current time in seconds.
        size
            Work units; iteration time is proportional to them.
        """
        self._running[worker] = _Iteration(iteration, now_s, size)

    def ended(self, worker: int, now_s: float, waited_s: float = 0.0) -> None:
        """Note that the worker has ended its iteration, of which it waited `waited_s` seconds for others."""
        if (running := self._running.pop(worker, None)) is None:
            return
        took_s = now_s - running.since_s
        if running.reported_s:
            self._over.append(self._straggler(worker, running, took_s)._replace(ended=True))
        if (durations := self._durations.get(worker)) is None:
            durations = self._durations[worker] = deque(maxlen=WINDOW)
        durations.append(max(0.0, took_s - waited_s) / running.size)

    def left(self, worker: int) -> None:
        """Note that the worker makes no iteration for now."""
        self._running.pop(worker, None)

    @property
    def running(self) -> Collection[int]:
        """Workers in an iteration."""
        return self._running.keys()

    def deadline_s(self, worker: int, size: float = 1.0) -> float:
        """Return the seconds after which an iteration of this size is overdue; infinity while not known."""
        durations = self._durations.get(worker, ())
        if len(durations) < KNOWN:
            return math.inf
        usual = median(durations)
        mad = median(abs(duration - usual) for duration in durations)
        return size * usual + max(size * SPREAD * NORMAL * mad, size * SHARE * usual, SLACK_S)

    def look(self, now_s: float, waiting: Container[int] = ()) -> list[Straggler]:
        """Return the iterations to report now; call this every `LOOK_S` seconds.

        Parameters
        ----------
        now_s
            Current time in seconds.
        waiting
            Workers that wait for others.

        Notes
        -----
        Polling gaps longer than AWAY_S are excluded, since it is not known which worker did what in the meantime.
        """
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
                    found.append(self._straggler(worker, running, lasted_s))
        return found

    def _straggler(self, worker: int, running: _Iteration, lasted_s: float) -> Straggler:
        assert running.deadline_s is not None
        usual_s = running.size * median(self._durations[worker])
        return Straggler(worker, running.number, lasted_s, running.deadline_s, usual_s)


class NoDetector(StragglerDetector):
    """Detector of a simulated run, in which nothing is overdue: it notes nothing."""

    def began(self, worker: int, iteration: int, now_s: float, size: float = 1.0) -> None:
        """Do nothing."""

    def ended(self, worker: int, now_s: float, waited_s: float = 0.0) -> None:
        """Do nothing."""
