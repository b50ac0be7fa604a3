"""Virtual time: actions, each carried out at its time.

SimPy is the kernel that others keep; `hpcsync bench events` measures it beside this loop, ARCHITECTURE.md says why it
is not used: it plans by delays, which miss some times by a rounding, its timeouts have no priorities, and it is slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Loop:
    """A clock that jumps from action to action.

    now_s: the virtual time. What happens at the same time happens in the order of priorities, the lowest first, and
    within one in the order in which it was asked for: the same program always gives the same sequence.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._serial = 0
        self._due: list[tuple[float, int, int, Callable[..., object], tuple[Any, ...]]] = []  # a heap

    @property
    def n_events(self) -> int:
        """How many actions have been carried out, with the one that is being carried out."""
        return self._serial - len(self._due)

    def at(self, time_s: float, action: Callable[..., object], *args: Any, priority: int = 0) -> None:
        """Call action(*args) at time_s. Raises ValueError for a time that is past, or not finite."""
        if not self.now_s <= time_s < math.inf:
            raise ValueError(f"it is {self.now_s} s, nothing can be done at {time_s} s")
        heappush(self._due, (time_s, priority, self._serial, action, args))
        self._serial += 1

    def after(self, delay_s: float, action: Callable[..., object], *args: Any, priority: int = 0) -> None:
        """Call action(*args) when delay_s have passed. Raises ValueError for less than none, or what is not finite."""
        time_s = self.now_s + delay_s
        if not (delay_s >= 0.0 and time_s < math.inf):
            raise ValueError(f"it is {self.now_s} s, nothing can be done {delay_s} s later")
        heappush(self._due, (time_s, priority, self._serial, action, args))
        self._serial += 1

    def run(self) -> None:
        """Carry out what is asked for until nothing is left. What an action raises goes through; the rest stays due."""
        due = self._due
        while due:
            self.now_s, _, _, action, args = heappop(due)
            action(*args)
