"""How often the workers should commit: a search by trying, and what one trial was worth.

ADSP (Hu, Wang and Wu, AAAI 2020) lets all workers commit c times in a period, looks at how the loss fell meanwhile,
and goes on to c + 1 as long as that is better. A trial's reward is one over the time in which the loss would have
come down to a target, by the curve l(t) = 1 / (a^2 t + b) + d through three points of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def most_commits(period_s: float, interval_s: float) -> int:
    """How many commits a period has room for that are so far apart: whatever the rounding, n of an n-th part of it."""
    return math.floor(period_s / interval_s * (1 + 1e-12))


def halved(target: float, loss: float) -> float:
    """What a trial that begins with this loss is to aim at, where nobody says it, after a target of the same search:
    the same one, so that trials are measured alike, but half as much again while the loss is there already. NaN before
    the first: half of its loss."""
    target = loss / 2 if math.isnan(target) else target
    while 0 < loss <= target:
        target /= 2
    return target


def reward(times_s: Sequence[float], losses: Sequence[float], loss_target: float) -> float:
    """One over the seconds after which the loss reaches its target, by the curve through these three points.

    times_s:     of the points, counted from where the trial began: so are the seconds to the target.
    -inf, less than any other reward, where there is no such time: the points are not three, not finite or not at
    different times, the loss does not fall from each to the next, is below the target from the start, or never comes
    down to it. (On a straight line, where d is infinite, the time is that of the line.)
    """
    if len(times_s) != 3 or not all(map(math.isfinite, (*times_s, *losses))):
        return -math.inf
    (t0, t1, t2), (l0, l1, l2) = times_s, losses
    if not (t0 < t1 < t2 and l0 > l1 > l2 and loss_target < l0):
        return -math.inf
    # Solving (l0 - l1) (t2 - t1) (l2 - d) = (l1 - l2) (t1 - t0) (l0 - d) for d, then for a^2 and b, loses all digits
    # near a straight line. The curve keeps cross ratios, (t - t0) (t1 - t2) / ((t - t2) (t1 - t0)) is the same in l,
    # so that the t of l = target is (q t0 - p t2) / (q - p):
    p = (loss_target - l0) * (l1 - l2) * (t1 - t0)
    q = (loss_target - l2) * (l1 - l0) * (t1 - t2)
    per, seconds = q - p, q * t0 - p * t2
    if not (per > 0 and seconds > 0):  # the loss tends to a d that is not below the target
        return -math.inf
    return per / seconds if math.isfinite(per / seconds) else -math.inf


class Search:
    """Which count of commits to try next, from `start` on upwards, and the best so far.

    c: the best so far. largest: the largest to try.

    It ends with the first that is no better than the one before: of rewards with a single peak it finds that, and has
    tried the peak minus `start` plus 2 counts then, or one fewer if the peak is the largest.
    """

    def __init__(self, start: int, largest: int) -> None:
        self.c = start
        self._largest = largest
        self._reward: float | None = None  # of c

    @property
    def next_to_evaluate(self) -> int:
        return self.c if self._reward is None else self.c + 1

    def evaluated(self, reward: float) -> bool:
        """`next_to_evaluate` was worth this; whether the search is over."""
        better = self._reward is None or reward > self._reward
        if better:
            self.c, self._reward = self.next_to_evaluate, reward
        return not better or self.c >= self._largest
