"""Search for the number of commits per period, and the reward of one trial.

All workers commit c times in a period; if the loss falls faster than with c - 1 commits, c + 1 is tried. The reward of
a trial is one over the time in which the loss would reach a target, by the curve l(t) = 1 / (a^2 t + b) + d through
three points of the trial.

References
----------
H. Hu, D. Wang and C. Wu (ADSP), AAAI 2020, arXiv:1911.06949.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpcsync.state import Stateful


def most_commits(period_s: float, interval_s: float) -> int:
    """Return the largest n for which n commits, `interval_s` apart, fit into a period.

    Rounding is compensated: for an interval of exactly one n-th of the period the result is n.
    """
    return math.floor(period_s / interval_s * (1 + 1e-12))


def halved(target: float, loss: float) -> float:
    """Return the loss target of a trial for which none is configured.

    Trials of a search share their target, so that their rewards are comparable. It is half the loss at the start of the
    first trial, and is halved again while the loss is already below it.

    Parameters
    ----------
    target
        Target of the previous trial of the search; NaN before the first.
    loss
        Loss at the start of the trial.
    """
    target = loss / 2 if math.isnan(target) else target
    while 0 < loss <= target:
        target /= 2
    return target


def reward(times_s: Sequence[float], losses: Sequence[float], loss_target: float) -> float:
    """Return one over the seconds after which the loss reaches its target, by the curve through three points.

    Parameters
    ----------
    times_s
        Times of the points in seconds since the start of the trial, from which the time to the target is counted too.
    losses
        Losses at these times.
    loss_target
        Loss to reach.

    Returns
    -------
    float
        -inf if there is no such time: there are not three points, they are not finite or not at different times, the
        loss does not fall from each to the next, is below the target from the start, or never reaches it. (On a
        straight line, where d is infinite, the time is that of the line.)
    """
    if len(times_s) != 3:
        return -math.inf
    (t0, t1, t2), (l0, l1, l2) = times_s, losses
    if not (t0 < t1 < t2 and l0 > l1 > l2 and loss_target < l0):
        return -math.inf
    # Solving (l0 - l1) (t2 - t1) (l2 - d) = (l1 - l2) (t1 - t0) (l0 - d) for d, then for a^2 and b, loses all digits
    # near a straight line. The curve preserves cross ratios: (t - t0) (t1 - t2) / ((t - t2) (t1 - t0)) is the same in
    # l. So the time t of l = target is (q t0 - p t2) / (q - p):
    p = (loss_target - l0) * (l1 - l2) * (t1 - t0)
    q = (loss_target - l2) * (l1 - l0) * (t1 - t2)
    per, seconds = q - p, q * t0 - p * t2
    if not (per > 0 and seconds > 0):  # the loss tends to a d not below the target
        return -math.inf
    return per / seconds if math.isfinite(per / seconds) else -math.inf


class Search(Stateful):
    """Search upwards for the best number of commits per period.

    The search ends with the first number that is no better than the previous one. For rewards with a single peak it
    finds the peak after peak - start + 2 trials, or one fewer if the peak is the largest number allowed.

    Parameters
    ----------
    start
        First number to try.
    largest
        Largest number to try.

    Attributes
    ----------
    c
        Best number so far.
    """

    state_types = {"c": int, "_largest": int, "_reward": float | None}

    def __init__(self, start: int, largest: int) -> None:
        self.c = start
        self._largest = largest
        self._reward: float | None = None  # reward of c

    @property
    def next_to_evaluate(self) -> int:
        """Number of commits of the next trial."""
        return self.c if self._reward is None else self.c + 1

    def evaluated(self, reward: float) -> bool:
        """Record the reward of `next_to_evaluate`; return True if the search is over."""
        better = self._reward is None or reward > self._reward
        if better:
            self.c, self._reward = self.next_to_evaluate, reward
        return not better or self.c >= self._largest
