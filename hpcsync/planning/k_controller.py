"""How many contributions an update should wait for: from the workers' run-time state, from the loss, or from both.

    state  the active workers that are no stragglers (Yu et al. 2019, a straggler-aware parameter server)
    loss   AdaSync (Dutta, Wang and Joshi 2020): few while errors are large, more as they get small
    min    the smaller of the two

k is reconsidered after every INTERVAL updates and then moves by 1 at most. Where the texts leave it open:

    a  the median of an even number of times is the lower of the two in the middle: of two workers, one can straggle
    b  a worker is a straggler too if it is stuck: more than ceil(2P/k) versions have been made since it read. It has
       not pushed for so long that its old times say nothing of it any more
    c  a worker that has not pushed yet has no time, and is no straggler unless it is stuck
    d  F(w_0) is the mean of the first P losses, F(w_t) the exponentially smoothed losses of all pushes from there on.
       While the loss is not known (there are fewer, or the workload has none) k stays, except by "state"
    e  a closed form is rounded to the nearest whole number
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median_low
from typing import ClassVar

from hpcsync.planning.checks import is_whole

POLICIES = ("state", "loss", "min")

INTERVAL = 20  # updates
TIME_BETA = 0.3  # weight of the newest iteration in a worker's time
LOSS_BETA = 0.05  # weight of the newest push in the loss: about the pushes of an interval at k = 1
THETA = 1.5  # a straggler takes longer than this times the median


def order_statistic_k(loss: float, loss_start: float, k_start: int, n_workers: int) -> float:
    """AdaSync's k where an update waits for k distinct workers: the positive root of k^2 + A k - A P = 0.

    A = k_start^2 F(w_0) / ((P - k_start) F(w_t)). Tends to P as the loss tends to 0; NaN where a loss is not known.
    """
    if not loss_start > 0 or math.isnan(loss):
        return math.nan
    if loss <= 0 or k_start == n_workers:
        return float(n_workers)
    a = k_start**2 * loss_start / ((n_workers - k_start) * loss)
    # (-A + sqrt(A^2 + 4 A P)) / 2, written so that nothing cancels where A is large.
    return 2 * n_workers / (1 + math.sqrt(1 + 4 * n_workers / a))


def linear_k(loss: float, loss_start: float, k_start: int) -> float:
    """AdaSync's k where an update waits for k mini-batches, in a time linear in k: k_start sqrt(F(w_0) / F(w_t)).

    It has no upper limit, and is infinite for a loss of 0 or less; NaN where a loss is not known.
    """
    if not loss_start > 0 or math.isnan(loss):
        return math.nan
    return k_start * math.sqrt(loss_start / loss) if loss > 0 else math.inf


def staleness_bound(n_workers: int, k: int) -> int:
    """How many versions behind a worker may be that is not stuck, whatever the form of the k family.

    Whose iteration takes less than twice as long as each of the others' is never further behind: meanwhile they push
    at most twice each, so that there are at most ceil(2 (P - 1) / k) updates.
    """
    return math.ceil(2 * n_workers / k)


class KController:
    """Chooses k, between k_min and the number of active workers.

    policy:   one of POLICIES.
    distinct: an update takes k workers, not k mini-batches from whomever: which closed form holds.
    k_start:  the first k, which AdaSync takes for the best one at the first loss.

    Each change of k comes with what it was chosen from, in the order of `decision_fields`:

    version     updates made so far
    k_before    k of the update just made
    k_state     active workers that are no stragglers
    k_loss      AdaSync's k, neither rounded nor clipped
    active      workers that have not left
    stuck       stragglers by their versions, whatever their times
    median_s    median of the active workers' smoothed iteration times
    loss        smoothed loss, F(w_t)
    loss_start  mean of the first losses, F(w_0)

    What is not known, or does not count under this policy, is NaN.
    """

    decision_fields: ClassVar[Mapping[str, tuple[str, str]]] = {  # (unit, description)
        "version": ("updates", "Updates made so far."),
        "k_before": ("contributions", "k of the update just made."),
        "k_state": ("workers", "Active workers that are no stragglers; NaN if the policy does not use it."),
        "k_loss": ("1", "k of AdaSync, neither rounded nor clipped; NaN if the policy does not use it."),
        "active": ("workers", "Active workers."),
        "stuck": ("workers", "Stragglers by their versions, whatever their times."),
        "median_s": ("s", "Median of the active workers' smoothed iteration times."),
        "loss": ("1", "Smoothed loss F(w_t)."),
        "loss_start": ("1", "Mean of the first losses, F(w_0)."),
    }

    def __init__(
        self, n_workers: int, *, policy: str, distinct: bool, k_min: int = 1, k_start: int | None = None
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"the policy of k is {policy!r}; one of {', '.join(POLICIES)} is needed")
        if not (is_whole(k_min) and 1 <= k_min <= n_workers):
            raise ValueError(f"k_min is {k_min}; a whole number from 1 to the {n_workers} workers is needed")
        if k_start is None:
            k_start = n_workers if policy == "state" else k_min
        if not (is_whole(k_start) and k_min <= k_start <= n_workers):
            raise ValueError(f"k_start is {k_start}; a whole number from k_min, {k_min}, to {n_workers} is needed")
        self.k = k_start
        self.k_min = k_min
        self._n_workers = n_workers
        self._policy = policy
        self._distinct = distinct
        self._k_start = k_start
        self._time_s = [math.nan] * n_workers  # smoothed
        self._first_losses: list[float] = []
        self._loss = self._loss_start = math.nan

    def pushed(self, worker: int, iteration_s: float, loss: float) -> None:
        """The worker has pushed, whether or not it was in time; what is not finite says nothing."""
        if 0 <= iteration_s < math.inf:
            before_s = self._time_s[worker]
            self._time_s[worker] = (
                iteration_s if math.isnan(before_s) else before_s + TIME_BETA * (iteration_s - before_s)
            )
        if not math.isfinite(loss):
            return
        if len(self._first_losses) < self._n_workers:
            self._first_losses.append(loss)
            if len(self._first_losses) == self._n_workers:
                self._loss = self._loss_start = math.fsum(self._first_losses) / self._n_workers
        else:
            self._loss += LOSS_BETA * (loss - self._loss)

    def updated(self, version: int, read_versions: Sequence[int], active: Collection[int]) -> tuple[float, ...] | None:
        """Update `version` has been made and those it released have read it: what a new k was chosen from, or None.

        read_versions: of each worker, the version that it computes from.
        """
        if version % INTERVAL or not active:
            return None
        k_state = k_loss = median_s = stuck = math.nan
        candidates = []
        if self._policy != "loss":
            k_state, median_s, stuck = self._state(version, read_versions, active)
            candidates.append(k_state)
        if self._policy != "state":
            k_loss = (
                order_statistic_k(self._loss, self._loss_start, self._k_start, self._n_workers)
                if self._distinct
                else linear_k(self._loss, self._loss_start, self._k_start)
            )
            candidates.append(self.k if math.isnan(k_loss) else k_loss)
        wanted = min(max(round(min(*candidates, len(active))), self.k_min), len(active))
        k_before = self.k
        self.k += (wanted > k_before) - (wanted < k_before)
        if self.k == k_before:
            return None
        inputs = (float(version), float(k_before), k_state, k_loss, float(len(active)), stuck, median_s)
        return (*inputs, self._loss, self._loss_start)

    def _state(self, version: int, read_versions: Sequence[int], active: Collection[int]) -> tuple[float, float, float]:
        """How many are no stragglers, the median time, and how many are stuck."""
        known_s = [self._time_s[worker] for worker in active if not math.isnan(self._time_s[worker])]
        median_s = median_low(known_s) if known_s else math.nan
        bound = staleness_bound(self._n_workers, self.k)
        stuck = {worker for worker in active if version - read_versions[worker] > bound}
        slow = {worker for worker in active if self._time_s[worker] > THETA * median_s}  # not so where it is NaN
        return float(len(active) - len(stuck | slow)), median_s, float(len(stuck))
