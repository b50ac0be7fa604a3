"""Choice of k, the number of contributions per update, from the state of the workers, the loss, or both.

The policies are::

    state       number of active workers that are not stragglers (Yu et al. 2019, a straggler-aware parameter server)
    loss        AdaSync (Dutta, Wang and Joshi 2020): small while errors are large, larger as they shrink
    min         the smaller of the two
    throughput  the k that promises most contributions a second, which is what Yu et al. say "state" is for

k is reconsidered after every INTERVAL updates and changes by at most 1.

Notes
-----
Where the texts leave it open, a letter marks the choice::

    a  the median of an even number of times is the lower of the two in the middle: of two workers, one can straggle
    b  a worker is also a straggler if it is stuck: more than ceil(2P/k) versions have been made since it last read. It
       has not pushed for so long that its old times are no longer valid
    c  a worker that has not pushed yet has no time, and is no straggler unless it is stuck
    d  F(w_0) is the mean of the first P losses; F(w_t) are the exponentially smoothed losses of all later pushes.
       While the loss is not known (there are fewer, or the workload has none) k stays, except by "state"
    e  a closed form is rounded to the nearest integer
    f  by "throughput" an update of k workers takes as long as the k-th fastest of them; a worker that has not pushed
       yet counts as the median, one that is stuck never comes; of equal throughputs the largest k counts

References
----------
H. Yu, Z. Zhu, X. Chen, Y. Cheng, Y. Hu and X. Li, "Accelerating Distributed Training in Heterogeneous Clusters via a
Straggler-Aware Parameter Server", HPCC 2019. S. Dutta, J. Wang and G. Joshi, "Slow and Stale Gradients Can Win the
Race" (AdaSync), 2020, arXiv:2003.10579.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from hpcsync.planning.checks import is_whole, must_be_one_of
from hpcsync.state import Stateful

POLICIES = ("state", "loss", "min", "throughput")
FROM_ALL = ("state", "throughput")  # policies whose first k is the number of workers

INTERVAL = 20  # updates
TIME_BETA = 0.3  # weight of the newest iteration in a worker's time
LOSS_BETA = 0.05  # weight of the newest push in the loss: about one interval of pushes at k = 1
THETA = 1.5  # a straggler takes longer than this times the median


def order_statistic_k(loss: float, loss_start: float, k_start: int, n_workers: int) -> float:
    """Return AdaSync's k where an update waits for k distinct workers.

    It is the positive root of k^2 + A k - A P = 0 with A = k_start^2 F(w_0) / ((P - k_start) F(w_t)).

    Parameters
    ----------
    loss, loss_start
        F(w_t) and F(w_0).
    k_start
        Best k at the first loss.
    n_workers
        P.

    Returns
    -------
    float
        Tends to P as the loss tends to 0; NaN if a loss is not known.
    """
    if not loss_start > 0 or math.isnan(loss):
        return math.nan
    if loss <= 0 or k_start == n_workers:
        return float(n_workers)
    a = k_start**2 * loss_start / ((n_workers - k_start) * loss)
    if a == 0:  # the loss is too large for a quotient
        return 0.0
    # (-A + sqrt(A^2 + 4 A P)) / 2, in a form without cancellation for large A.
    return 2 * n_workers / (1 + math.sqrt(1 + 4 * n_workers / a))


def linear_k(loss: float, loss_start: float, k_start: int) -> float:
    """Return AdaSync's k where an update waits for k mini-batches, in a time linear in k.

    It is k_start sqrt(F(w_0) / F(w_t)).

    Parameters
    ----------
    loss, loss_start
        F(w_t) and F(w_0).
    k_start
        Best k at the first loss.

    Returns
    -------
    float
        Without an upper limit: infinite for a loss of 0 or less; NaN if a loss is not known.
    """
    if not loss_start > 0 or math.isnan(loss):
        return math.nan
    return k_start * math.sqrt(loss_start / loss) if loss > 0 else math.inf


def staleness_bound(n_workers: int, k: int) -> int:
    """Return the number of versions that a worker may be behind without counting as stuck, in any form of the k family.

    A worker whose iteration takes less than twice as long as each of the others' is never further behind: meanwhile
    these push at most twice each, so there are at most ceil(2 (P - 1) / k) updates.
    """
    return math.ceil(2 * n_workers / k)


def most_throughput(times_s: Sequence[float]) -> tuple[int, float]:
    """Return the k with most contributions a second where an update waits for k distinct workers.

    Parameters
    ----------
    times_s
        Seconds that each worker takes, ascending; at least one.

    Returns
    -------
    k : int
        The k that maximises k over the k-th time; of several the largest.
    throughput : float
        Contributions a second with it.
    """
    most, k = max((k / time_s if time_s > 0 else math.inf, k) for k, time_s in enumerate(times_s, start=1))
    return k, most


class KController(Stateful):
    """Controller of k, between `k_min` and the number of active workers.

    Parameters
    ----------
    n_workers
        Number of workers P.
    policy
        One of POLICIES.
    distinct
        Whether an update takes k distinct workers rather than any k mini-batches; selects the closed form.
    k_min
        Smallest k.
    k_start
        First k, which AdaSync takes for the best one at the first loss. None: `n_workers` for "state" and
        "throughput", otherwise `k_min`.

    Attributes
    ----------
    k
        Current number of contributions per update.
    decision_fields
        Names of the inputs recorded with each change of k, listed below.

    Notes
    -----
    Inputs of a change of k, NaN if not known or not used by the policy:

    version
        Updates made so far.
    k_before
        k of the update just made.
    k_state
        Active workers that are not stragglers.
    k_loss
        AdaSync's k, neither rounded nor clipped.
    active
        Workers that have not left.
    stuck
        Stragglers by their versions, whatever their times.
    median_s
        Median of the smoothed iteration times of the active workers.
    loss
        Smoothed loss, F(w_t).
    loss_start
        Mean of the first losses, F(w_0).
    k_throughput, throughput
        Only with the policy "throughput": its k, and the contributions a second that it promises.
    """

    decision_fields: Mapping[str, tuple[str, str]] = {  # (unit, description)
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
    fields_by_throughput: ClassVar[Mapping[str, tuple[str, str]]] = {
        "k_throughput": ("workers", "k that promises most contributions a second."),
        "throughput": ("1/s", "Contributions a second that it promises."),
    }
    state_types = {
        "k": int,
        "_time_s": list[float],
        "_first_losses": list[float],
        "_loss": float,
        "_loss_start": float,
    }

    def __init__(
        self, n_workers: int, *, policy: str, distinct: bool, k_min: int = 1, k_start: int | None = None
    ) -> None:
        must_be_one_of("policy", policy, POLICIES)
        if not (is_whole(k_min) and 1 <= k_min <= n_workers):
            raise ValueError(f"k_min must be an integer from 1 to n_workers = {n_workers}, got {k_min}")
        if k_start is None:
            k_start = n_workers if policy in FROM_ALL else k_min
        if not (is_whole(k_start) and k_min <= k_start <= n_workers):
            raise ValueError(
                f"k_start must be an integer from k_min = {k_min} to n_workers = {n_workers}, got {k_start}"
            )
        if policy == "throughput":
            if not distinct:
                raise ValueError('policy "throughput" is for updates of k distinct workers')
            self.decision_fields = {**self.decision_fields, **self.fields_by_throughput}
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
        """Record a push, whether or not it was in time.

        Parameters
        ----------
        worker
            Number of the worker.
        iteration_s
            Seconds of its iteration; ignored if not finite.
        loss
            Loss of its iteration; ignored if not finite.
        """
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
        """Reconsider k after an update.

        Parameters
        ----------
        version
            Version that the update has made. The workers that it released have already read it.
        read_versions
            Version that each worker computes from.
        active
            Workers that have not left.

        Returns
        -------
        tuple of float or None
            Inputs of a new k in the order of `decision_fields`; None if k stays.
        """
        if version % INTERVAL or not active:
            return None
        k_state = k_loss = median_s = stuck = math.nan
        candidates = []
        promised: tuple[float, ...] = ()
        if self._policy != "loss":
            k_state, median_s, stuck = self._state(version, read_versions, active)
        if self._policy in ("state", "min"):
            candidates.append(k_state)
        if self._policy == "throughput":
            k_state, promised = math.nan, self._promised(version, read_versions, active, median_s)
            candidates.append(self.k if math.isnan(promised[0]) else promised[0])
        if self._policy in ("loss", "min"):
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
        return (*inputs, self._loss, self._loss_start, *promised)

    def _promised(
        self, version: int, read_versions: Sequence[int], active: Collection[int], median_s: float
    ) -> tuple[float, float]:
        """Return the k of most throughput and that throughput (f); NaN while no time is known, or all are stuck."""
        oldest = version - staleness_bound(self._n_workers, self.k)
        times_s = [self._time_s[worker] for worker in active if read_versions[worker] >= oldest]
        if math.isnan(median_s) or not times_s:
            return math.nan, math.nan
        k, throughput = most_throughput(sorted(median_s if math.isnan(one_s) else one_s for one_s in times_s))
        return float(k), throughput

    def _state(self, version: int, read_versions: Sequence[int], active: Collection[int]) -> tuple[float, float, float]:
        """Return the number of workers that are not stragglers, the median time, and the number of stuck workers."""
        # With a thousand workers a loop over them takes longer than all the rest, so it is left to C where it can be.
        time_s, every = self._time_s, len(active) == self._n_workers
        known_s = time_s if every else [time_s[worker] for worker in active]
        if math.isnan(sum(known_s)):
            known_s = [one_s for one_s in known_s if not math.isnan(one_s)]
        known_s = sorted(known_s)
        median_s = known_s[(len(known_s) - 1) // 2] if known_s else math.nan
        n_fast = bisect_right(known_s, THETA * median_s)
        stuck: Collection[int] = ()
        oldest = version - staleness_bound(self._n_workers, self.k)
        if min(read_versions) < oldest:
            stuck = [worker for worker in active if read_versions[worker] < oldest]
        n_slow = len(known_s) - n_fast
        n_slow += sum(not time_s[worker] > THETA * median_s for worker in stuck)  # the others count already
        return float(len(active) - n_slow), median_s, float(len(stuck))
