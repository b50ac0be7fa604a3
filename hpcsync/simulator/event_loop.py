"""Event loop in virtual time.

SimPy is the established kernel for this purpose; `hpcsync bench events` compares it with this loop. It is not used
here because it schedules by delays, which miss some times by one rounding, because its timeouts have no priorities,
and because it is slower (see docs/design/virtual-time.md).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

COLLECT_AFTER = 20_000  # objects more than freed; Python's default is 700


class Loop:
    """Event queue with a clock that jumps from event to event.

    Events at the same time run in order of priority, lowest first, and at equal priority in the order in which they
    were scheduled. The same program therefore always produces the same sequence.

    Attributes
    ----------
    now_s
        Current virtual time, in seconds.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._serial = 0
        self._due: list[tuple[float, int, int, Callable[..., object], tuple[Any, ...]]] = []  # a heap

    @property
    def n_events(self) -> int:
        """Number of events processed, including the one in progress."""
        return self._serial - len(self._due)

    def at(self, time_s: float, action: Callable[..., object], *args: Any, priority: int = 0) -> None:
        """Schedule ``action(*args)`` at an absolute time.

        Parameters
        ----------
        time_s
            Virtual time in seconds.
        action, *args
            Callable and its arguments.
        priority
            Order among events at the same time; lower runs first.

        Raises
        ------
        ValueError
            If `time_s` is in the past or not finite.
        """
        if not self.now_s <= time_s < math.inf:
            raise ValueError(
                f"cannot schedule an event at {time_s} s: must be finite and not before now, {self.now_s} s"
            )
        heappush(self._due, (time_s, priority, self._serial, action, args))
        self._serial += 1

    def after(self, delay_s: float, action: Callable[..., object], *args: Any) -> None:
        """Schedule ``action(*args)`` after a delay.

        Parameters
        ----------
        delay_s
            Delay in seconds.
        action, *args
            Callable and its arguments.

        Raises
        ------
        ValueError
            If `delay_s` is negative or not finite.
        """
        time_s = self.now_s + delay_s
        if not (delay_s >= 0.0 and time_s < math.inf):
            raise ValueError(f"cannot schedule an event after {delay_s} s: must be finite and not negative")
        heappush(self._due, (time_s, 0, self._serial, action, args))
        self._serial += 1

    def run(self) -> None:
        """Process events until the queue is empty.

        An exception raised by an event propagates; the remaining events stay queued. Meanwhile cycles are collected
        seldom: with 10,000 workers each collection visits all that they hold.
        """
        due, thresholds = self._due, gc.get_threshold()
        gc.set_threshold(thresholds[0] and max(COLLECT_AFTER, thresholds[0]), *thresholds[1:])
        try:
            while due:
                self.now_s, _, _, action, args = heappop(due)
                action(*args)
        finally:
            gc.set_threshold(*thresholds)
