"""Dynamic SSP (Zhao, An, Liu and Chen, ICDCS 2019): the staleness bound is chosen as the run goes.

SSP at the lower bound s_L, except that the fastest worker, when it would be held, asks a controller for
credits: extra iterations, up to r_max = s_U - s_L, that it may start without asking again. The controller
extrapolates the push times of this worker and of the slowest, and chooses the number of extra iterations
after which the two come closest, so that the wait which cannot be avoided is short.

As printed, Algorithm 1 does not enforce s_U: credits are granted anew without a test against it. Hence two
modes:

    bounded  the start gap never exceeds s_U and the push gap never s_U + 1 (as the paper's Theorem 2 needs)
    paper    Algorithms 1 and 2 to the letter wherever they are clear; the gap has no bound

Where the paper is ambiguous or contradicts itself, a letter in this file marks the branch that settles it:

    a  the OKs of lines 13 and 17 exclude each other          h  no history yet: r* = 0
    b  is the iteration granted at line 14 one of the r*?     i  does waiting belong to an interval?
    c  may credits be granted beyond s_U?                     j  a slowest worker that is overdue
    d  every push is recorded in table A                      k  line 8 is `<=`
    e  the slowest: by pushes, then by predicted push         l  release is by gap, prediction by one push
    f  equally fast workers are all the fastest               m  pushes are applied singly (see ssp.py)
    g  argmin ties: smallest r, then smallest k               n  a departure releases (see ssp.py)

The modes differ in b, c, i and j.
"""

from __future__ import annotations

import heapq
import math

from hpcsync.paradigms.events import Action, Decision, Grant
from hpcsync.paradigms.ssp import SSP
from hpcsync.planning.checks import is_whole

MODES = ("bounded", "paper")


class DSSP(SSP):
    """SSP with a bound between two limits.

    staleness_min: s_L, the start gap in iterations up to which nobody needs credits.
    staleness_max: s_U, the start gap in iterations beyond which nobody gets any. With both equal this is SSP.
    mode:          "bounded" or "paper".

    Each time the controller is consulted a Decision says what it `chose`: the credits granted, 0 for none.
    From:

    gap_iters           pushes of this worker minus pushes of the slowest
    interval_s          this worker's last interval
    slowest             the worker that the controller takes for the slowest
    slowest_pushed_s    time of its last push
    slowest_interval_s  its last interval
    r_star              the controller's r*, before it is clipped to what s_U leaves
    predicted_wait_s    predicted push of the slowest minus that of this worker after r* extra iterations,
                        negative where the slowest comes first; to compare with a later grant's held_s

    What is not known yet, for want of two pushes of the worker concerned, is NaN.
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

    def __init__(self, n_workers: int, *, staleness_min: int, staleness_max: int, mode: str = "bounded") -> None:
        for name, value in (("staleness_min", staleness_min), ("staleness_max", staleness_max)):
            if not (is_whole(value) and value >= 0):
                raise ValueError(f"{name} is {value}; a whole number from 0 on is needed")
        if staleness_max < staleness_min:
            raise ValueError(f"staleness_max is {staleness_max}, less than staleness_min, {staleness_min}")
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; one of {', '.join(MODES)} is needed")
        super().__init__(n_workers, staleness=staleness_min)
        self.staleness_max = staleness_max
        self.r_max = staleness_max - staleness_min
        self.bounded = mode == "bounded"
        self._credits = [0] * n_workers
        # Table A: the last push, the last interval, and where the interval now running began.
        self._pushed_s = [math.nan] * n_workers
        self._interval_s = [math.nan] * n_workers
        self._interval_begin_s = [math.nan] * n_workers
        # The slowest workers, the last predicted push on top, of the minimum that it was built for.
        self._slowest_by_next_push: list[tuple[float, int]] = []
        self._slowest_by_next_push_iters = -1

    def check(self) -> None:
        """Assert the paradigm's invariants: those of SSP with this bound, and that credits are in order."""
        super().check()
        iters, active = self._progress.iters, self._progress.active
        min_iters = min((iters[worker] for worker in active), default=0)
        for worker in active:
            credits = self._credits[worker]
            assert 0 <= credits <= self.r_max, f"worker {worker} has {credits} credits"
            assert not (credits and worker in self._blocked_since_s), f"worker {worker} is held with {credits} credits"
            if self.bounded and credits:
                reach_iters = iters[worker] - min_iters + credits
                assert reach_iters <= self.staleness_max, f"worker {worker} has credits up to a gap of {reach_iters}"

    def _start_gap_max_iters(self) -> float:
        return self.staleness_max if self.bounded else math.inf

    def _answer(self, worker: int) -> list[Action]:
        """Algorithm 1, lines 3 to 17. (a) Lines 13 and 17 exclude each other: one OK per push."""
        self._record_push(worker)
        if self._credits[worker] > 0:  # line 3
            self._credits[worker] -= 1
            return [self._grant(worker, self._credits[worker])]
        # (k) Line 8 says `<=`, the text and figure 2 would stop at a gap of s_L. SSP's reads mean `<=` too.
        if self._gate.is_open(worker):
            return [self._grant(worker)]
        gap_iters = self._progress.lead(worker)
        # (f) Equally fast workers are all the fastest.
        is_fastest = self._progress.iters[worker] == self._progress.max_iters
        credits_max = self._credits_max(gap_iters)
        if not (is_fastest and credits_max > 0):
            self._hold(worker)
            return []
        return self._consult(worker, gap_iters, credits_max)

    def _credits_max(self, gap_iters: int) -> int:
        """(c) Lines 11 to 14 never test the gap against s_U and can grant for ever. Bounded: what s_U leaves.

        The iteration granted now starts at this gap, so n credits reach a start gap of gap_iters + n - 1. At
        the first excess, a gap of s_L + 1, this is r_max; beyond s_U it is 0 or less and the controller is
        not asked.
        """
        return self.staleness_max - gap_iters + 1 if self.bounded else self.r_max

    def _consult(self, worker: int, gap_iters: int, credits_max: int) -> list[Action]:
        """Lines 12 to 14 and, where the controller gives nothing, 17."""
        slowest = self._slowest()
        # (h) Algorithm 2 does not say what to do without two pushes of either: plain SSP
        if slowest is None or math.isnan(self._interval_s[worker]):
            r_star, wait_s = 0, math.nan
            about_slowest = (math.nan, math.nan, math.nan)
        else:
            about_slowest = (float(slowest), self._pushed_s[slowest], self._interval_s[slowest])
            r_star, wait_s = closest_approach(
                self._now_s, self._interval_s[worker], *about_slowest[1:], self.r_max, clamp=self.bounded
            )
        credits = min(r_star, credits_max)
        inputs = (float(gap_iters), self._interval_s[worker], *about_slowest, float(r_star), wait_s)
        decision = Decision(self.name, worker, float(credits), inputs)
        if credits == 0:
            # (l) The prediction is for the slowest worker's next push; the release waits until the gap is
            # s_L, which may take several. Both waits are in the trace.
            self._hold(worker)
            return [decision]
        # (b) Line 14 sends OK without spending a credit, so that r* = n would give n + 1 iterations where the
        # text and figure 2 say n. Bounded: the iteration granted here is the first of the n.
        self._credits[worker] = credits - 1 if self.bounded else credits
        return [decision, self._grant(worker, self._credits[worker])]

    def _record_push(self, worker: int) -> None:
        """(d) Algorithm 2, lines 1 and 2, on every push: in the controller the slowest gets no history."""
        self._interval_s[worker] = self._now_s - self._interval_begin_s[worker]  # NaN at first
        self._pushed_s[worker] = self._interval_begin_s[worker] = self._now_s

    def _joined(self, worker: int) -> list[Action]:
        """Nothing is known of whoever joins: it may be slower, or faster, than it was."""
        self._credits[worker] = 0
        self._pushed_s[worker] = self._interval_s[worker] = self._interval_begin_s[worker] = math.nan
        self._slowest_by_next_push_iters = -1  # it may be one of them
        return super()._joined(worker)

    def _grant(self, worker: int, credits: int = 0) -> Grant:
        # (i) The paper's interval runs from push to push and so contains the worker's own wait, which says
        # nothing of its speed. Bounded: it begins with the grant.
        if self.bounded:
            self._interval_begin_s[worker] = self._now_s
        return super()._grant(worker, credits)

    def _slowest(self) -> int | None:
        """The slowest worker of Algorithm 2, line 3; None while one of them has not pushed twice.

        (e) "From table A" there, "from array t" in Algorithm 1: the latter counts. Of several with the fewest
        pushes the one whose next push is predicted last, since all of them must push before the minimum
        rises; then the lowest worker.

        Nobody pushes itself among the slowest while the minimum stays, and a member's prediction stands until it
        pushes, which takes it out. So a heap is built once for each minimum, and for each worker that joins, from
        workers that each had to push to get there, and cleaned from the top: O(log n_workers) amortised over the
        pushes. Whose next push nobody knows comes first.
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
        """When the worker is predicted to push next; inf where nobody knows."""
        next_push_s = self._pushed_s[worker] + self._interval_s[worker]
        return math.inf if math.isnan(next_push_s) else next_push_s


def closest_approach(
    pushed_s: float,
    interval_s: float,
    slowest_pushed_s: float,
    slowest_interval_s: float,
    r_max: int,
    *,
    clamp: bool,
) -> tuple[int, float]:
    """Algorithm 2, lines 6 to 8: the number of extra iterations after which two workers' pushes come closest.

    The worker itself, which has just pushed, would push after r extra iterations at pushed_s + r *
    interval_s; the slowest pushes at slowest_pushed_s + (k + 1) * slowest_interval_s. All times in seconds; r
    and k from 0 to r_max (as the index ranges have it; the text speaks of r_max elements).

    clamp: (j) the slowest may be overdue, its first predicted push in the past, and the distance to it no
    wait at all. Clamped, that push is expected now, which makes r* = 0.

    Returns r* and the slowest's push minus the worker's at the closest. (g) Of equally close pairs the
    smallest r (the least staleness) and then the smallest k.

    Both sequences ascend, so one merging pass sees every pair that can be the answer: the lower of the two
    elements is only farther from all that follow in the other sequence, and pairs passed over come later in
    the order of ties. (A clamped element breaks its sequence's order, but then the first
    pair is at distance 0 and wins.)
    Costs O(r_max).
    """
    r = k = 0
    own_s, slowest_s = pushed_s, slowest_pushed_s + slowest_interval_s
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
            slowest_s = slowest_pushed_s + (k + 1) * slowest_interval_s
    return r_star, wait_s
