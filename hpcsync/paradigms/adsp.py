"""ADSP (Hu, Wang and Wu, AAAI 2020): nobody waits; everybody commits as often, however many steps it has made.

Workers make local steps and commit the change of their weights, of which the servers take one M-th, M the workers that
began. When to commit is a matter of time, not of steps: in each check period a worker is to commit dC times, so one

    max(interval_min_s, period / dC - O)

after it has read the weights, O what its last commit took (compressing, pushing, pulling). By the rule

    cumulative  dC = C_target - c, c the worker's commits so far, C_target the same for all and `commits` more in each
                period: who has fallen behind catches up (the paper)
    released    dC = `commits` for everybody (the released code): who is a little slower falls behind a little more

How many commits a period should have is searched for (`planning.commit_rate`): all workers stop, work a period with c
commits each, stop, and so on with c + 1 as long as the loss falls better. This is the only time that anybody waits.

Where texts and code leave it open, a letter in this file marks the branch that settles it:

    a  the global loss is the mean over the active workers of what each said last, in its latest commit, once all have
       said one; losses that are not finite say nothing
    b  time is known when a push comes: checks and ends of trials are at the first push at or after their time, and
       periods that have passed unnoticed are made up for at once
    c  a trial's points are the loss at its start, at the first push from its middle on that is not at its end, and when
       all have stopped. With c = 1 nobody pushes in between, so that its reward is that of nothing, and c = 2 is better
       if the loss falls at all
    d  in a trial nobody is sent on for longer than what is left of it, so that all are back soon after its end
    e  the run begins with a trial of 1, for which nobody has to stop; a later search begins with the present number
    f  a search that finds no loss at all ends with its first trial
    g  dC is at least 1, also of a worker that is ahead
    h  after a search c and C_target start afresh from the worker that has committed most
    i  a search is not begun while another is on: what the loss does and how long ago the last was counts from its end
    j  who joins counts as having committed as often as the slowest, and has not said a loss; at a barrier it waits too
"""

from __future__ import annotations

import math
from dataclasses import replace

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import UNTIL, Action, Apply, Decision, Grant, Pushed
from hpcsync.planning.checks import is_number, is_whole
from hpcsync.planning.commit_rate_search import Search, halved, most_commits, reward

RULES = ("cumulative", "released")

SHORTEST = 1e-6  # of a period: the least that anybody is sent on for


class ADSP(Paradigm):
    """Commit rates by worker, equal commits for all.

    check_period_s: seconds of a check period, and of a trial.
    interval_min_s: least time between two commits of a worker, up to the period.
    search_every_s: a search begins so long after the last one's end,
    loss_rise:      and when from one check to the next the loss has risen by this share.
    rule:           "cumulative" or "released".
    commits:        of each worker in a period, up to as many as interval_min_s has room for. None: searched for.
    loss_target:    a trial's reward is one over the time to it. None: to half the loss that the search began with, and
                    half as much again for trials that begin below.

    With a search, Decisions tell of each trial's end, "reward", its c with what it was worth and the losses from which
    (what is missing is NaN, -inf a reward of nothing); and of the search's, "commits", what was chosen. They are of
    the worker whose event brought the end on.
    """

    name = "adsp"
    decision_fields = {
        "reward": ("1/s", "Reward of the trial: one over its time to the target loss; -inf if it has none."),
        "loss_start": ("1", "Average loss at the start of the trial."),
        "loss_middle": ("1", "Average loss in the middle of the trial."),
        "loss_end": ("1", "Average loss at the end of the trial."),
    }

    def __init__(
        self,
        n_workers: int,
        *,
        check_period_s: float,
        interval_min_s: float,
        search_every_s: float,
        rule: str = "cumulative",
        commits: int | None = None,
        loss_rise: float = 0.3,
        loss_target: float | None = None,
    ) -> None:
        super().__init__(n_workers)
        _must_be_allowed(check_period_s, interval_min_s, search_every_s, loss_rise, loss_target)
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}; one of {', '.join(RULES)} is needed")
        self._most = most_commits(check_period_s, interval_min_s)
        if commits is not None and not (is_whole(commits) and 1 <= commits <= self._most):
            room = f"the {self._most} that intervals of {interval_min_s} s allow"
            raise ValueError(f"commits is {commits}; a whole number from 1 to {room}, or None, is needed")
        self.commits = commits or 1  # of each worker in a period
        self._searches = commits is None
        self._period_s = check_period_s
        self._interval_min_s = interval_min_s
        self._cumulative = rule == "cumulative"
        self._search_every_s = search_every_s
        self._loss_rise = loss_rise
        self._loss_target = loss_target
        self._overhead_s = [0.0] * n_workers
        self._losses = [math.nan] * n_workers  # that each said last
        # Between searches: when the last one ended, checks since, and as it was at the last of them, C_target, c and
        # the loss.
        self._begun_s = 0.0
        self._checks = 0
        self._target = self.commits
        self._counted = [0] * n_workers
        self._loss_at_check = math.nan
        # In a search: when the trial began, NaN before the first; its points, seconds since then and loss; the target
        # of the one before, if none is given; and from when on everybody stops.
        self._search: Search | None = None
        self._trial_s = math.nan
        self._points: list[tuple[float, float]] = []
        self._halved = math.nan
        self._stop_s = math.inf
        if self._searches:  # (e)
            self._search, self._trial_s, self._stop_s = Search(1, self._most), 0.0, check_period_s

    def first(self, worker: int) -> Grant:
        return Grant(worker, 1, 0, 0, 0.0, local_steps=UNTIL, commit_s=self._commit_s(worker, 0.0))

    def check(self) -> None:
        """Assert the invariants: those of every paradigm, that nobody waits but for a trial, and the counts.

        How far commits are apart depends on when workers come, which none of this knows. What can be said is that at
        a check all were asked to have committed equally often at the next.
        """
        super().check()
        active, blocked, iters = self._progress.active, self._blocked_since_s, self._progress.iters
        if blocked:
            assert self._search is not None, f"workers {sorted(blocked)} are held outside of a search"
            assert self._now_s >= self._stop_s, f"workers {sorted(blocked)} are held in a trial"
            early = sorted(worker for worker, since_s in blocked.items() if since_s < self._stop_s)
            assert not early, f"workers {early} have been held since before the barrier"
        assert 1 <= self.commits <= self._most, f"{self.commits} commits a period"
        assert self._searches or self._search is None, "a search for commits that are given"
        assert all(n <= now for n, now in zip(self._counted, iters, strict=True)), "commits that were not made"
        if self._search is None and self._cumulative:
            asked = {self._counted[worker] + self._rate(worker) for worker in active if self._rate(worker) > 1}
            assert asked <= {self._target}, f"workers are asked for {asked} commits, not all for {self._target}"

    def _pushed(self, event: Pushed) -> list[Action]:
        worker = event.worker
        spent_s = (event.encode_s, event.push_s, event.pull_s)
        self._overhead_s[worker] = math.fsum(time_s for time_s in spent_s if 0 <= time_s < math.inf)
        if math.isfinite(event.loss):
            self._losses[worker] = event.loss
        apply = Apply((worker,), (1 / self.n_workers,))
        if self._search is None:
            self._check_if_due(worker)
        elif len(self._points) < 2 and self._now_s < self._stop_s:
            self._sample(len(self._points) * self._period_s / 2)
        return [apply, *self._answer(worker)]

    def _left(self, worker: int) -> list[Action]:
        return self._pass_barrier(worker)

    def _joined(self, worker: int) -> list[Action]:
        self._losses[worker] = math.nan  # (j)
        others = [self._counted[i] for i in self._progress.active - {worker}]
        self._counted[worker] = max(self._counted[worker], min(others, default=0))
        return self._answer(worker)

    def _answer(self, worker: int) -> list[Action]:
        """Send the worker on, unless all are to stop."""
        if self._now_s < self._stop_s:
            return [self._continue(worker)]
        self._hold(worker)
        return self._pass_barrier(worker)

    def _rate(self, worker: int) -> int:
        """dC of the worker."""
        if self._search is not None:
            return self._search.next_to_evaluate
        return max(self._target - self._counted[worker], 1) if self._cumulative else self.commits  # (g)

    def _commit_s(self, worker: int, now_s: float) -> float:
        commit_s = max(self._interval_min_s, self._period_s / self._rate(worker) - self._overhead_s[worker])
        return min(commit_s, max(self._stop_s - now_s, SHORTEST * self._period_s))  # (d)

    def _continue(self, worker: int) -> Grant:
        return replace(self._grant(worker), local_steps=UNTIL, commit_s=self._commit_s(worker, self._now_s))

    def _check_if_due(self, worker: int) -> None:
        """(b) The check that was due before this worker's push, if one was; begins a search if it is time."""
        rose = False
        checks = math.floor((self._now_s - self._begun_s) / self._period_s)
        if checks > self._checks:
            self._target += self.commits * (checks - self._checks)
            self._checks = checks
            self._counted = self._progress.iters.copy()
            self._counted[worker] -= 1
            now, before = self._loss(), self._loss_at_check
            rose = now > before and now - before >= self._loss_rise * abs(before)
            self._loss_at_check = now
        if self._searches and (rose or self._now_s - self._begun_s >= self._search_every_s):
            self._search = Search(self.commits, self._most)  # (e)
            self._trial_s, self._points, self._halved, self._stop_s = math.nan, [], math.nan, self._now_s

    def _sample(self, from_s: float) -> None:
        """(c) Take a point of the trial if it is so old, and a loss is known."""
        age_s = self._now_s - self._trial_s
        if age_s >= from_s and not math.isnan(loss := self._loss()):
            self._points.append((age_s, loss))

    def _loss(self) -> float:
        """(a)"""
        said = [self._losses[i] for i in self._progress.active]
        return math.fsum(said) / len(said) if said else math.nan

    def _pass_barrier(self, worker: int) -> list[Action]:
        """Send everybody on once all stand still: into the next trial, or with the number that was found."""
        if self._search is None or not self._blocked_since_s or self._blocked_since_s.keys() != self._progress.active:
            return []
        rows = [] if math.isnan(self._trial_s) else self._end_trial(worker, self._search)
        if self._search is not None:
            self._trial_s, self._points, self._stop_s = self._now_s, [], self._now_s + self._period_s
            self._sample(0.0)
        return [*rows, *(self._continue(blocked) for blocked in sorted(self._blocked_since_s))]

    def _end_trial(self, worker: int, search: Search) -> list[Decision]:
        c = search.next_to_evaluate
        self._sample(self._period_s)
        losses = [loss for _, loss in self._points]
        target = self._loss_target
        if target is None:
            target = self._halved = halved(self._halved, losses[0]) if losses else math.nan
        worth = reward([time_s for time_s, _ in self._points], losses, target)
        inputs = (worth, *losses, *[math.nan] * (3 - len(losses)))
        rows = [Decision("reward", worker, float(c), inputs)]
        if search.evaluated(worth) or not losses:  # (f)
            self.commits = search.c
            rows.append(Decision("commits", worker, float(search.c), (math.nan,) * len(self.decision_fields)))
            self._search, self._stop_s = None, math.inf
            self._begun_s, self._checks = self._now_s, 0
            self._counted = self._progress.iters.copy()
            self._target = max(self._counted[i] for i in self._progress.active) + self.commits  # (h)
            self._loss_at_check = self._loss()
        return rows


def _must_be_allowed(
    check_period_s: float, interval_min_s: float, search_every_s: float, loss_rise: float, loss_target: float | None
) -> None:
    if not (is_number(check_period_s) and 0 < check_period_s < math.inf):
        raise ValueError(f"check_period_s is {check_period_s}; a finite number above 0 is needed")
    if not (is_number(interval_min_s) and 0 < interval_min_s <= check_period_s):
        up_to = f"up to check_period_s, {check_period_s}"
        raise ValueError(f"interval_min_s is {interval_min_s}; a number above 0 and {up_to}, is needed")
    for name, value in (("search_every_s", search_every_s), ("loss_rise", loss_rise)):
        if not (is_number(value) and value > 0):
            raise ValueError(f"{name} is {value}; a number above 0 is needed")
    if loss_target is not None and not (is_number(loss_target) and math.isfinite(loss_target)):
        raise ValueError(f"loss_target is {loss_target}; a finite number or None is needed")
