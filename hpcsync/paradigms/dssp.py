"""Dynamic stale synchronous parallel (DSSP): SSP whose staleness bound is chosen during the run.

DSSP is SSP at the lower bound s_L, with one exception: when the fastest worker would be blocked, it asks a controller
for credits, extra iterations up to r_max = s_U - s_L that it may start without asking again. The controller
extrapolates the push times of this worker and of the slowest one, and chooses the number of extra iterations after
which the two come closest, so that the unavoidable wait is short.

As printed, Algorithm 1 does not enforce s_U: credits are granted again without a test against it. Hence two modes::

    bounded  the start lead never exceeds s_U and the push lead never s_U + 1 (required by the paper's Theorem 2)
    paper    Algorithms 1 and 2 as printed where they are clear; the lead has no bound

Notes
-----
Where the paper is ambiguous or contradicts itself, a letter in this file marks the branch that settles it, in both
modes::

    a  the OKs of lines 13 and 17 exclude each other          h  no history yet: r* = 0
    b  is the iteration granted at line 14 one of the r*?     i  does an interval include the wait?
    c  may credits be granted beyond s_U?                     j  a slowest worker that is overdue
    d  every push is recorded in table A                      k  line 8 is `<=`
    e  slowest worker: by pushes, then by predicted push      l  release by lead, prediction by one push
    f  all workers with the most pushes are the fastest       m  are pushes that meet merged (see ssp.py)?
    g  argmin ties: smallest r, then smallest k               n  a departure releases (see ssp.py)

Of these b, c, i, j and m have two readings, each an option of its own: a mode is a choice of the first four.

References
----------
X. Zhao, A. An, J. Liu and B. X. Chen, "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning",
ICDCS 2019, arXiv:1908.11848. Algorithm 1 is the server, Algorithm 2 the controller.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from hpcsync.paradigms.events import Action, Decision, Grant
from hpcsync.paradigms.options import Allowed, OptionError, ParadigmOptions, Whole, computed
from hpcsync.paradigms.papers import Reference, meeting
from hpcsync.paradigms.ssp import SSP, each_update
from hpcsync.planning.checks import must_be_one_of, must_be_whole

# The readings of each mode: c, b, i and j.
MODES: dict[str, dict[str, Any]] = {
    "bounded": {"enforce_max": True, "first_costs": True, "interval_begin": "grant", "overdue": "now"},
    "paper": {"enforce_max": False, "first_costs": False, "interval_begin": "push", "overdue": "past"},
}


class DSSP(SSP):
    """Dynamic stale synchronous parallel: SSP with a bound between two limits.

    Parameters
    ----------
    n_workers
        Number of workers.
    staleness_min
        s_L, an integer >= 0: largest lead in iterations at which a worker starts an iteration without credits.
    staleness_max
        s_U, an integer >= `staleness_min`: largest lead in iterations up to which credits are granted. If both are
        equal, this is SSP.
    mode
        "bounded" or "paper": values of the options that follow, where they are None.
    enforce_max
        (c) If True, no credits are granted beyond s_U.
    first_costs
        (b) If True, the iteration that is granted together with credits costs one of them.
    interval_begin
        (i) "grant" or "push": event with which an interval begins, and from which the next push is predicted.
    overdue
        (j) When an overdue push of the slowest worker is expected: "now", or in the "past", as predicted.
    merge
        (m) If True, the push of a worker that is blocked is added to the next update in place of being one.

    Notes
    -----
    Each consultation of the controller gives a `Decision` whose `chosen` is the number of credits granted, 0 for none.
    Its inputs, NaN before the worker concerned has pushed twice:

    gap_iters
        Pushes of this worker minus pushes of the slowest.
    interval_s
        Last interval of this worker.
    slowest
        Worker that the controller takes for the slowest.
    slowest_pushed_s
        Time of its last push. With intervals from a grant its next push is predicted from the latest grant instead.
    slowest_interval_s
        Its last interval.
    r_star
        r* of the controller, before it is clipped to what s_U leaves.
    predicted_wait_s
        Predicted push time of the slowest minus that of this worker after r* extra iterations, negative if the slowest
        comes first. Compare it with the `held_s` of a later grant.
    """

    name = "dssp"
    decision_fields = {
        "gap_iters": ("iterations", "Lead of this worker over the slowest."),
        "interval_s": ("s", "Last interval between pushes of this worker; NaN before two pushes."),
        "slowest": ("", "Worker that the controller takes for the slowest."),
        "slowest_pushed_s": ("s", "Time of the slowest worker's last push."),
        "slowest_interval_s": ("s", "Last interval between pushes of the slowest worker; NaN before two pushes."),
        "r_star": ("iterations", "Optimal r* before clipping to what the upper bound leaves."),
        "predicted_wait_s": ("s", "Predicted push of the slowest minus that of this worker after r* more iterations."),
    }
    state_types = {
        "_credits": list[int],
        "_pushed_s": list[float],
        "_interval_s": list[float],
        "_interval_begin_s": list[float],
        "_slowest_by_next_push": list[tuple[float, int]],
        "_slowest_by_next_push_iters": int,
    }

    def __init__(
        self,
        n_workers: int,
        *,
        staleness_min: int,
        staleness_max: int,
        mode: str = "bounded",
        enforce_max: bool | None = None,
        first_costs: bool | None = None,
        interval_begin: str | None = None,
        overdue: str | None = None,
        merge: bool = False,
    ) -> None:
        must_be_whole("staleness_min", staleness_min, 0)
        must_be_whole("staleness_max", staleness_max, 0)
        if staleness_max < staleness_min:
            raise ValueError(f"staleness_max must be at least staleness_min = {staleness_min}, got {staleness_max}")
        must_be_one_of("mode", mode, MODES)
        super().__init__(n_workers, staleness=staleness_min, merge=merge)
        self.staleness_max = staleness_max
        self.r_max = staleness_max - staleness_min
        preset = MODES[mode]
        self.enforce_max = preset["enforce_max"] if enforce_max is None else enforce_max
        self.first_costs = preset["first_costs"] if first_costs is None else first_costs
        self.intervals_from_grants = (interval_begin or preset["interval_begin"]) == "grant"
        self.overdue_now = (overdue or preset["overdue"]) == "now"
        self._credits = [0] * n_workers
        # Table A: the last push, the last interval, and the begin of the current interval.
        self._pushed_s = [math.nan] * n_workers
        self._interval_s = [math.nan] * n_workers
        self._interval_begin_s = [math.nan] * n_workers
        # Heap of the slowest workers, the latest predicted push on top, and the minimum that it was built for.
        self._slowest_by_next_push: list[tuple[float, int]] = []
        self._slowest_by_next_push_iters = -1

    def check(self) -> None:
        """Assert the invariants of SSP with this bound, and the limits of the credits."""
        super().check()
        iters, active = self._progress.iters, self._progress.active
        min_iters = min((iters[worker] for worker in active), default=0)
        for worker in active:
            credits = self._credits[worker]
            assert 0 <= credits <= self.r_max, f"worker {worker} has {credits} credits"
            assert not (credits and worker in self._blocked_since_s), (
                f"worker {worker} is blocked with {credits} credits"
            )
            if self.enforce_max and credits:
                reach_iters = iters[worker] - min_iters + credits
                assert reach_iters <= self.staleness_max, f"worker {worker} has credits up to a lead of {reach_iters}"

    def _start_gap_max_iters(self) -> float:
        return self.staleness_max if self.enforce_max else math.inf

    def _answer(self, worker: int) -> list[Action]:
        """Apply Algorithm 1, lines 3 to 17.

        (a) Lines 13 and 17 exclude each other: one OK per push.
        """
        self._record_push(worker)
        if self._credits[worker] > 0:  # line 3
            self._credits[worker] -= 1
            return [self._grant(worker, credits=self._credits[worker])]
        # (k) Line 8 says `<=`; the text and figure 2 would block at a lead of s_L. The reads of SSP imply `<=` too.
        if self._gate.is_open(worker):
            return [self._grant(worker)]
        gap_iters = self._progress.lead(worker)
        # (f) All workers with the most pushes are the fastest.
        is_fastest = self._progress.iters[worker] == self._progress.max_iters
        credits_max = self._credits_max(gap_iters)
        if not (is_fastest and credits_max > 0):
            self._block(worker)
            return []
        return self._consult(worker, gap_iters, credits_max)

    def _credits_max(self, gap_iters: int) -> int:
        """Return the most credits that may be granted at this lead.

        (c) Lines 11 to 14 never test the lead against s_U and can grant without end. With `enforce_max`: what s_U
        leaves. The iteration granted now starts at this lead, so n credits reach a start lead of gap_iters + n, or
        gap_iters + n - 1 if it costs one of them; then, at the first excess, a lead of s_L + 1, the result is r_max.
        Where it is 0 or less the controller is not consulted.
        """
        return self.staleness_max - gap_iters + self.first_costs if self.enforce_max else self.r_max

    def _consult(self, worker: int, gap_iters: int, credits_max: int) -> list[Action]:
        """Apply lines 12 to 14 and, if the controller grants no credits, line 17."""
        slowest = self._slowest()
        # (h) Algorithm 2 does not cover workers with fewer than two pushes: plain SSP.
        if slowest is None or math.isnan(self._interval_s[worker]):
            r_star, wait_s = 0, math.nan
            about_slowest = (math.nan, math.nan, math.nan)
        else:
            about_slowest = (float(slowest), self._pushed_s[slowest], self._interval_s[slowest])
            r_star, wait_s = closest_approach(
                self._now_s,
                self._interval_s[worker],
                self._interval_begin_s[slowest],
                self._interval_s[slowest],
                self.r_max,
                clamp=self.overdue_now,
            )
        credits = min(r_star, credits_max)
        inputs = (float(gap_iters), self._interval_s[worker], *about_slowest, float(r_star), wait_s)
        decision = Decision(self.name, worker, float(credits), inputs)
        if credits == 0:
            # (l) The prediction is for the next push of the slowest worker; the release requires a lead of s_L, which
            # may take several pushes. The trace has both waits.
            self._block(worker)
            return [decision]
        # (b) Line 14 sends OK without spending a credit, so r* = n gives n + 1 iterations where the text and figure 2
        # have n. With `first_costs` the iteration granted here is the first of the n.
        self._credits[worker] = credits - self.first_costs
        return [decision, self._grant(worker, credits=self._credits[worker])]

    def _record_push(self, worker: int) -> None:
        """Record the push in table A: Algorithm 2, lines 1 and 2.

        (d) On every push: recorded only in the controller, the slowest worker would have no history.
        """
        self._interval_s[worker] = self._now_s - self._interval_begin_s[worker]  # NaN after the first push
        self._pushed_s[worker] = self._interval_begin_s[worker] = self._now_s

    def _joined(self, worker: int) -> list[Action]:
        """Reset the history of the worker: its speed may have changed while it was away."""
        self._credits[worker] = 0
        self._pushed_s[worker] = self._interval_s[worker] = self._interval_begin_s[worker] = math.nan
        self._slowest_by_next_push_iters = -1  # the worker may be among the slowest
        return super()._joined(worker)

    def _grant(self, worker: int, **chosen: Any) -> Grant:
        # (i) The paper's interval runs from push to push and so contains the worker's own wait, which is unrelated to
        # its speed. Otherwise it begins with the grant, and the next push is predicted from there.
        if self.intervals_from_grants:
            self._interval_begin_s[worker] = self._now_s
        return super()._grant(worker, **chosen)

    def _slowest(self) -> int | None:
        """Return the slowest worker of Algorithm 2, line 3; None while one of the candidates has not pushed twice.

        (e) That line says "from table A", Algorithm 1 "from array t"; the latter is used. Of several workers with the
        fewest pushes it is the one whose next push is predicted last, since all of them must push before the minimum
        rises; ties give the lowest worker.

        No worker enters this set while the minimum stays, and the prediction of a member stays valid until it pushes,
        which removes it. So a heap is built once for each minimum and for each worker that joins, and cleaned from the
        top: O(log n_workers) amortised over the pushes. Workers with an unknown next push come first.
        """
        min_iters = self._progress.min_iters
        if self._slowest_by_next_push_iters != min_iters:
            self._slowest_by_next_push_iters = min_iters
            self._slowest_by_next_push = [(-self._next_push_s(worker), worker) for worker in self._progress.slowest()]
            heapq.heapify(self._slowest_by_next_push)
        slowest = self._progress.slowest()
        while self._slowest_by_next_push[0][1] not in slowest:
            heapq.heappop(self._slowest_by_next_push)
        next_push_s, worker = self._slowest_by_next_push[0]
        return None if next_push_s == -math.inf else worker

    def _next_push_s(self, worker: int) -> float:
        """Return the predicted time of the worker's next push; inf if it has not pushed twice."""
        next_push_s = self._interval_begin_s[worker] + self._interval_s[worker]
        return math.inf if math.isnan(next_push_s) else next_push_s


def closest_approach(
    pushed_s: float,
    interval_s: float,
    slowest_begin_s: float,
    slowest_interval_s: float,
    r_max: int,
    *,
    clamp: bool,
) -> tuple[int, float]:
    """Return the number of extra iterations after which the pushes of two workers come closest.

    Algorithm 2, lines 6 to 8. The worker itself, which has just pushed, would push after r extra iterations at
    ``pushed_s + r * interval_s``; the slowest pushes at ``slowest_begin_s + (k + 1) * slowest_interval_s``, with r and
    k from 0 to r_max (following the index ranges; the text speaks of r_max elements).

    Parameters
    ----------
    pushed_s, interval_s
        Last push and last interval of the worker, in seconds.
    slowest_begin_s, slowest_interval_s
        Begin of the slowest worker's current interval, and its last interval, in seconds.
    r_max
        Largest r and k.
    clamp
        (j) The slowest worker may be overdue: its first predicted push lies in the past, and the distance to it is not
        a wait. With `clamp` that push is expected now, which makes r* = 0.

    Returns
    -------
    r_star : int
        (g) Of equally close pairs, the one with the smallest r (the least staleness), then the smallest k.
    wait_s : float
        Push time of the slowest minus that of the worker at the closest pair, in seconds.

    Notes
    -----
    Both sequences ascend, so one merging pass visits every pair that can be the answer: the lower of the two elements
    is only farther from all later elements of the other sequence, and the pairs skipped come later in the order of
    ties. (A clamped element breaks the order of its sequence, but then the first pair is at distance 0 and wins.) Costs
    O(r_max).
    """
    r = k = 0
    own_s, slowest_s = pushed_s, slowest_begin_s + slowest_interval_s
    if clamp:
        slowest_s = max(slowest_s, pushed_s)
    r_star, wait_s = 0, slowest_s - own_s
    while r <= r_max and k <= r_max:
        if abs(slowest_s - own_s) < abs(wait_s):
            r_star, wait_s = r, slowest_s - own_s
        if own_s < slowest_s:
            r += 1
            own_s = pushed_s + r * interval_s
        else:
            k += 1
            slowest_s = slowest_begin_s + (k + 1) * slowest_interval_s
    return r_star, wait_s


ZHAO = Reference(
    "zhao2019dynamic",
    "inproceedings",
    ("Zhao, Xing", "An, Aijun", "Liu, Junfeng", "Chen, Bao Xin"),
    "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning",
    2019,
    meeting("IEEE 39th International Conference on Distributed Computing Systems (ICDCS)", "1507--1517"),
)


@dataclass(frozen=True, kw_only=True)
class DsspOptions(ParadigmOptions):
    """Dynamic stale synchronous parallel.

    Parameters
    ----------
    staleness_min
        Lead up to which a worker needs no credits.
    staleness_max
        Lead beyond which no credits are granted.
    mode
        `"paper"` follows the printed algorithm, which does not keep `staleness_max`. It sets the options below.
    enforce_max
        Whether credits end at `staleness_max`.
    first_costs
        Whether the iteration that is granted together with credits costs one of them.
    interval_begin
        Event with which a worker's interval begins, and from which its next push is predicted.
    overdue
        When an overdue push of the slowest worker is expected: now, or in the past, as predicted.
    merge
        Whether the push of a worker that waits is added to the next update in place of being one.
    """

    name: Literal["dssp"] = "dssp"
    staleness_min: Annotated[Whole, Allowed("a whole number of at least 0")]
    staleness_max: Annotated[Whole, Allowed("a whole number of at least staleness_min")]
    mode: Literal["bounded", "paper"] = "bounded"
    enforce_max: bool = computed(lambda given: MODES[given["mode"]]["enforce_max"], 'true in mode `"bounded"`')
    first_costs: bool = computed(lambda given: MODES[given["mode"]]["first_costs"], 'true in mode `"bounded"`')
    interval_begin: Literal["grant", "push"] = computed(
        lambda given: MODES[given["mode"]]["interval_begin"], '`"grant"` in mode `"bounded"`, else `"push"`'
    )
    overdue: Literal["now", "past"] = computed(
        lambda given: MODES[given["mode"]]["overdue"], '`"now"` in mode `"bounded"`, else `"past"`'
    )
    merge: bool = False

    policy = DSSP
    guarantees = ("lead", "slowest-runs", "merged")
    papers = (ZHAO,)
    place = 40
    colour = "#CC79A7"
    waiting = "as in SSP; the server chooses the bound between `staleness_min` and `staleness_max` from recent speeds"
    update = "every gradient is one update"
    source = "Zhao et al., ICDCS 2019"

    def _check_options(self) -> None:
        if self.staleness_max < self.staleness_min:
            must = f"must be at least paradigm.staleness_min = {self.staleness_min}"
            raise OptionError("paradigm.staleness_max", self.staleness_max, must)

    @property
    def merges(self) -> bool:
        """True if the push of a blocked worker is added to the next update."""
        return self.merge

    @property
    def lead_bound(self) -> float:
        """Largest lead over the slowest worker at which a worker starts."""
        return self.staleness_max if self.enforce_max else math.inf

    @property
    def lead_aim(self) -> float:
        """Lead that is aimed at, guaranteed or not."""
        return self.staleness_max

    @property
    def credits_max(self) -> int:
        """Most credits that the controller grants."""
        return self.staleness_max - self.staleness_min

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        at_most = f"with credits {self.staleness_max}" if self.enforce_max else "without credits"
        return f"a worker more than {self.staleness_min} ({at_most}) iterations ahead waits for the slowest"

    @property
    def label(self) -> str:
        """Name with the main options, for figures."""
        words = [f"DSSP, s = {self.staleness_min} to {self.staleness_max}"]
        words += ["paper mode"] * (self.mode == "paper") + ["merged"] * self.merge
        preset = MODES[self.mode]
        return ", ".join(
            words + [f"{name} {getattr(self, name)}" for name in preset if getattr(self, name) != preset[name]]
        )

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        low, high = self.staleness_min, self.staleness_max
        ahead = f"a worker starts more than {low} iterations ahead of the slowest only if the controller allows it"
        return f"{each_update(merge=self.merge)}; {ahead}, " + (
            f"never more than {high}"
            if self.enforce_max
            else f"with {high} as its target (as printed in the paper: no bound)"
        )
