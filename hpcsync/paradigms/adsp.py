"""ADSP: workers never wait and commit equally often, whatever their numbers of local steps.

Workers make local steps and commit the change of their weights. The servers add one M-th of it, where M is the number
of workers at the start. The time to commit is set in seconds, not in steps: in each check period a worker commits dC
times, so it commits::

    max(interval_min_s, period / dC - O)

seconds after it has read the weights, where O is the duration of its last commit (compress, push, pull). Two rules
determine dC::

    cumulative  dC = C_target - c, with c the worker's commits so far and C_target common to all workers, raised by
                `commits` each period: a worker that has fallen behind catches up (the paper)
    released    dC = `commits` for every worker (the released code): a slightly slower worker falls behind further

The number of commits per period is searched for (`hpcsync.planning.commit_rate_search`): all workers stop, work for a
period with c commits each, stop, continue with c + 1, and so on while the loss falls faster. Workers block only there.

Notes
-----
Where paper and code leave it open, a letter in this file marks the branch that settles it::

    a  the global loss is the mean over the active workers of the loss of each worker's latest commit, once all have
       reported one; losses that are not finite are ignored
    b  time is known only when a push arrives: checks and ends of trials happen at the first push at or after their
       time, and periods that passed without a push are made up for at once
    c  the points of a trial are the loss at its start, at the first push from its middle on that is not at its end, and
       when all have stopped. With c = 1 no worker pushes in between, so its reward is -inf, and c = 2 is better
       if the loss falls at all
    d  in a trial no worker is granted more than the rest of the trial, so that all are back soon after its end
    e  the run begins with a trial of 1, for which no worker has to stop; a later search begins with the present number
    f  a search that finds no loss at all ends with its first trial
    g  dC is at least 1, also for a worker that is ahead
    h  after a search, c and C_target start again from the worker that has committed most
    i  no search begins during another one: the change of the loss and the time since the last search are counted from
       its end
    j  a worker that joins counts as having committed as often as the slowest, and has reported no loss; it blocks at a
       barrier too

`EvaluatedADSP` takes the loss from evaluations of the servers' model on held-out data instead, which the authors' code
makes too. It differs in four branches::

    k  the points of a trial are the models at its start, once its workers have made half of their commits, rounded
       down, and when all have stopped; the workers wait there until the evaluation has ended. With c = 1 no model
       changes within a period, so that trial lasts for two: its three models differ. A loss that is not finite is no
       point, and no other model is evaluated in its place
    l  times count from the start of the search, not of each trial, as those of the authors' code count from the start
       of the run: a later trial, which begins nearer to the target, gains nothing by it
    m  the model is also evaluated at each check between searches, for `loss_rise`
    n  an evaluation that is wanted begins when no other is running, of the model as it is then

References
----------
H. Hu, D. Wang and C. Wu, "Distributed Machine Learning through Heterogeneous Edge Systems", AAAI 2020,
arXiv:1911.06949.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import Action, Apply, Decision, Evaluated, Grant, PushInfo
from hpcsync.paradigms.options import (
    Count,
    Finite,
    JobTables,
    OptionError,
    ParadigmOptions,
    Positive,
    computed,
    default,
)
from hpcsync.paradigms.papers import Reference
from hpcsync.paradigms.records import UNTIL
from hpcsync.planning.checks import is_number, is_whole, must_be_one_of
from hpcsync.planning.commit_rate_search import Search, halved, most_commits, reward

SHORTEST = 1e-6  # shortest granted time, as a share of a period


class ADSP(Paradigm):
    """ADSP: commit rates per worker, equal numbers of commits for all.

    Parameters
    ----------
    n_workers
        Number of workers.
    check_period_s
        Seconds of a check period, and of a trial.
    interval_min_s
        Least seconds between two commits of a worker, at most `check_period_s`.
    search_every_s
        Seconds from the end of a search to the begin of the next one.
    rule
        "cumulative" or "released".
    commits
        Commits of each worker per period, at most as many as `interval_min_s` allows. None: searched for.
    loss_rise
        A search also begins if the loss has risen by this share from one check to the next.
    loss_target
        Loss for which the reward of a trial is one over the time to reach it. None: half the loss at the start of the
        search, halved again for trials that begin below it.

    Notes
    -----
    A search is recorded as `Decision` actions of the worker whose event ended a trial: "reward" with the trial's number
    of commits c as `chosen`, and "commits" at the end of the search with the number found. The inputs of "reward" are:

    reward
        Reward of the trial; -inf if it has none.
    loss_start, loss_middle, loss_end
        Losses at the points of the trial; NaN if missing.

    The inputs of "commits" are NaN.
    """

    name = "adsp"
    decision_fields = {
        "reward": ("1/s", "Reward of the trial: one over its time to the target loss; -inf if it has none."),
        "loss_start": ("1", "Average loss at the start of the trial."),
        "loss_middle": ("1", "Average loss in the middle of the trial."),
        "loss_end": ("1", "Average loss at the end of the trial."),
    }
    state_types = {
        "commits": int,
        "_overhead_s": list[float],
        "_losses": list[float],
        "_begun_s": float,
        "_checks": int,
        "_target": int,
        "_counted": list[int],
        "_loss_at_check": float,
        "_search": Search | None,
        "_trial_s": float,
        "_points": list[tuple[float, float]],
        "_halved": float,
        "_stop_s": float,
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
        must_be_one_of("rule", rule, ("cumulative", "released"))
        self._most = most_commits(check_period_s, interval_min_s)
        if commits is not None and not (is_whole(commits) and 1 <= commits <= self._most):
            limit = f"{self._most} (intervals of {interval_min_s} s)"
            raise ValueError(f"commits must be an integer from 1 to {limit}, or None, got {commits}")
        self.commits = commits or 1  # of each worker per period
        self._searches = commits is None
        self._period_s = check_period_s
        self._interval_min_s = interval_min_s
        self._cumulative = rule == "cumulative"
        self._search_every_s = search_every_s
        self._loss_rise = loss_rise
        self._loss_target = loss_target
        self._overhead_s = [0.0] * n_workers
        self._losses = [math.nan] * n_workers  # latest loss of each worker
        # Between searches: the end of the last search, the checks since then, and C_target, c and the loss at the last
        # check.
        self._begun_s = 0.0
        self._checks = 0
        self._target = self.commits
        self._counted = [0] * n_workers
        self._loss_at_check = math.nan
        # In a search: begin of the trial (NaN before the first), its points (seconds since then, loss), the loss target
        # of the previous trial if none is given, and the time from which on all workers stop.
        self._search: Search | None = None
        self._trial_s = math.nan
        self._points: list[tuple[float, float]] = []
        self._halved = math.nan
        self._stop_s = math.inf
        if self._searches:  # (e)
            self._search, self._trial_s = Search(1, self._most), 0.0
            self._stop_s = self._trial_length_s

    def first(self, worker: int) -> Grant:
        """Return the grant with which the worker starts iteration 1."""
        return Grant(worker, 1, local_steps=UNTIL, commit_s=self._commit_s(worker, 0.0))

    def check(self) -> None:
        """Assert the invariants: those of every paradigm, that workers block only for a search, and the counts.

        The distance between commits depends on when workers push, which the paradigm does not control. What can be
        asserted is that at a check all were asked to have committed equally often by the next one.
        """
        super().check()
        active, blocked, iters = self._progress.active, self._blocked_since_s, self._progress.iters
        if blocked:
            assert self._search is not None, f"workers {sorted(blocked)} are blocked outside of a search"
            assert self._now_s >= self._stop_s, f"workers {sorted(blocked)} are blocked in a trial"
            early = sorted(worker for worker, since_s in blocked.items() if since_s < self._stop_s)
            assert not early, f"workers {early} have been blocked since before the barrier"
        assert 1 <= self.commits <= self._most, f"commits is {self.commits}, not from 1 to {self._most}"
        assert self._searches or self._search is None, "a search although commits are given"
        assert all(n <= now for n, now in zip(self._counted, iters, strict=True)), (
            "a worker has fewer iterations than counted commits"
        )
        if self._search is None and self._cumulative:
            asked = {self._counted[worker] + self._rate(worker) for worker in active if self._rate(worker) > 1}
            assert asked <= {self._target}, f"workers are asked for {asked} commits instead of {self._target}"

    def _pushed(self, event: PushInfo) -> list[Action]:
        worker = event.worker
        spent_s = (event.encode_s, event.push_s, event.pull_s)
        self._overhead_s[worker] = math.fsum(time_s for time_s in spent_s if 0 <= time_s < math.inf)
        if math.isfinite(event.loss):
            self._losses[worker] = event.loss
        apply = Apply((worker,), (1 / self.n_workers,))
        if self._search is None:
            self._check_if_due(worker)
        elif self._now_s < self._stop_s:
            self._see_trial()
        return [apply, *self._answer(worker)]

    def _left(self, worker: int) -> list[Action]:
        return self._pass_barrier(worker)

    def _joined(self, worker: int) -> list[Action]:
        self._losses[worker] = math.nan  # (j)
        others = [self._counted[i] for i in self._progress.active - {worker}]
        self._counted[worker] = max(self._counted[worker], min(others, default=0))
        return self._answer(worker)

    def _answer(self, worker: int) -> list[Action]:
        """Grant the worker, or block it if all workers are to stop."""
        if self._now_s < self._stop_s:
            return [self._continue(worker)]
        self._block(worker)
        return self._pass_barrier(worker)

    def _rate(self, worker: int) -> int:
        """Return dC of the worker, in commits per period."""
        if self._search is not None:
            return self._trial_commits
        return max(self._target - self._counted[worker], 1) if self._cumulative else self.commits  # (g)

    @property
    def _trial_commits(self) -> int:
        """Commits of each worker in a period of the present trial, or of the next one where none has begun."""
        assert self._search is not None, "there is no search"
        return self._search.next_to_evaluate

    def _commit_s(self, worker: int, now_s: float) -> float:
        commit_s = max(self._interval_min_s, self._period_s / self._rate(worker) - self._overhead_s[worker])
        return min(commit_s, max(self._stop_s - now_s, SHORTEST * self._period_s))  # (d)

    def _continue(self, worker: int) -> Grant:
        return self._grant(worker, local_steps=UNTIL, commit_s=self._commit_s(worker, self._now_s))

    def _continue_all(self) -> list[Grant]:
        """Return the grants of all blocked workers, each as by `_continue`; a thousand workers may have stopped."""
        workers = sorted(set(self._blocked_since_s))  # a set of small numbers is nearly in order
        period_s, overhead_s = self._period_s, self._overhead_s
        most_s = max(self._stop_s - self._now_s, SHORTEST * period_s)
        least_s = min(self._interval_min_s, most_s)
        if self._search is None and self._cumulative:  # after a search all dC are at least `commits` (h)
            target, counted = self._target, self._counted
            wanted_s = [period_s / (target - counted[i]) - overhead_s[i] for i in workers]
        else:
            every_s = period_s / self._rate(workers[0])
            wanted_s = [every_s - overhead_s[i] for i in workers]
        commit_s = [least_s if one_s < least_s else most_s if one_s > most_s else one_s for one_s in wanted_s]
        return self._grant_blocked(workers, UNTIL, commit_s)

    def _check_if_due(self, worker: int) -> None:
        """Make the check that was due before this worker's push, if any; begin a search if it is time (b)."""
        rose = False
        checks = math.floor((self._now_s - self._begun_s) / self._period_s)
        if checks > self._checks:
            self._target += self.commits * (checks - self._checks)
            self._checks = checks
            self._counted = self._progress.iters.copy()
            self._counted[worker] -= 1
            rose = self._check_loss()
        if self._searches and (rose or self._now_s - self._begun_s >= self._search_every_s):
            self._begin_search()

    def _check_loss(self) -> bool:
        """Return whether the loss has risen by `loss_rise` since the last check, and remember it."""
        now, before = self._loss(), self._loss_at_check
        self._loss_at_check = now
        return now > before and now - before >= self._loss_rise * abs(before)

    def _begin_search(self) -> None:
        self._search = Search(self.commits, self._most)  # (e)
        self._trial_s, self._points, self._halved, self._stop_s = math.nan, [], math.nan, self._now_s

    @property
    def _trial_length_s(self) -> float:
        return self._period_s

    def _see_trial(self) -> None:
        """Record the points at the start of the trial and in its middle; the third comes at its end, when all stop."""
        self._sample(len(self._points) * self._period_s / 2)

    def _sample(self, from_s: float) -> None:
        """Record a point of the trial if the trial is at least `from_s` old and a loss is known (c)."""
        age_s = self._now_s - self._trial_s
        if age_s >= from_s and not math.isnan(loss := self._loss()):
            self._points.append((age_s, loss))

    def _loss(self) -> float:
        """Return the global loss, NaN if it is not known (a)."""
        active = self._progress.active
        losses = self._losses if len(active) == self.n_workers else [self._losses[i] for i in active]
        return math.fsum(losses) / len(losses) if losses else math.nan

    def _pass_barrier(self, worker: int) -> list[Action]:
        """Once all workers have stopped, release them into the next trial, or with the number that was found."""
        if not self._all_have_stopped:
            return []
        self._sample(self._period_s)
        return self._next_trial(worker)

    @property
    def _all_have_stopped(self) -> bool:
        blocked = self._blocked_since_s
        return self._search is not None and 0 < len(blocked) == len(self._progress.active)

    def _next_trial(self, worker: int) -> list[Action]:
        """End the trial, if there is one, and release all workers, which have stopped."""
        rows = [] if math.isnan(self._trial_s) or self._search is None else self._end_trial(worker, self._search)
        if self._search is not None:
            self._trial_s, self._points, self._stop_s = self._now_s, [], self._now_s + self._trial_length_s
            self._sample(0.0)
        return [*rows, *self._continue_all()]

    def _times_s(self) -> list[float]:
        """Return the times of the trial's points, from which the time to the target is counted."""
        return [time_s for time_s, _ in self._points]

    def _end_trial(self, worker: int, search: Search) -> list[Decision]:
        c = search.next_to_evaluate
        losses = [loss for _, loss in self._points]
        target = self._loss_target
        if target is None:
            target = self._halved = halved(self._halved, losses[0]) if losses else math.nan
        trial_reward = reward(self._times_s(), losses, target)
        inputs = (trial_reward, *losses, *[math.nan] * (3 - len(losses)))
        rows = [Decision("reward", worker, float(c), inputs)]
        if search.evaluated(trial_reward) or not losses:  # (f)
            self.commits = search.c
            rows.append(Decision("commits", worker, float(search.c), (math.nan,) * len(self.decision_fields)))
            self._search, self._stop_s = None, math.inf
            self._begun_s, self._checks = self._now_s, 0
            self._counted = self._progress.iters.copy()
            self._target = self._progress.max_iters + self.commits  # (h)
            self._loss_at_check = self._loss()
        return rows


class EvaluatedADSP(ADSP):
    """ADSP whose search is decided by evaluated losses of the servers' model: the branches k to n.

    Parameters
    ----------
    n_workers
        Number of workers.
    **options
        As of `ADSP`, without `commits`: there is a search.

    Notes
    -----
    It says by `wants_evaluation` that the model is to be evaluated, and receives every evaluation of the run. The rows
    of a search are those of `ADSP`.
    """

    uses_evaluations = True
    state_types = {
        "_version": int,
        "_made_s": float,
        "_wanted": int | None,
        "_known": float,
        "_search_s": float,
        "_trial_version": int,
    }

    def __init__(self, n_workers: int, **options: Any) -> None:
        super().__init__(n_workers, **options)
        if not self._searches:
            raise ValueError(f"commits must be None where a search evaluates the model, got {self.commits}")
        self._version, self._made_s = 0, 0.0  # of the servers' model, and when it was made
        self._wanted: int | None = 0  # version from which on an evaluation is wanted
        self._known = math.nan  # latest evaluated loss
        self._search_s = 0.0  # start of the search's first trial
        self._trial_version = 0  # at the start of the present trial

    @property
    def wants_evaluation(self) -> bool:
        """True until a model is evaluated that is as new as the one that a point of the search, or a check, needs."""
        return self._wanted is not None

    @property
    def _evaluation_releases(self) -> bool:
        return self._all_have_stopped and self._wanted is not None and self._wanted <= self._version

    def _pushed(self, event: PushInfo) -> list[Action]:
        self._version, self._made_s = self._version + 1, event.now_s
        return super()._pushed(event)

    def _evaluated(self, event: Evaluated) -> list[Action]:
        if self._wanted is None or event.version < self._wanted:
            return []
        self._wanted = None
        self._known = event.loss if math.isfinite(event.loss) else math.nan
        if self._search is None:
            if super()._check_loss():
                self._begin_search()
            return []
        is_latest = event.version == self._version
        age_s = (self._made_s if is_latest else event.current_s) - self._trial_s
        if not (math.isnan(age_s) or math.isnan(self._known)):
            self._points.append((age_s, self._known))
        if self._now_s < self._stop_s:
            self._see_trial()
        if self._all_have_stopped and is_latest:
            return self._next_trial(event.worker)
        return self._pass_barrier(event.worker)

    def _check_loss(self) -> bool:
        self._wanted = self._version  # (m)
        return False

    def _begin_search(self) -> None:
        super()._begin_search()
        self._wanted = None

    @property
    def _trial_length_s(self) -> float:
        return self._period_s * (2 if self._trial_commits == 1 else 1)  # (k)

    def _see_trial(self) -> None:
        """Want the model in the middle of the trial, once, after the loss at its start is known (k)."""
        least = max(self._trial_commits, 2) // 2 * len(self._progress.active)
        is_next = len(self._points) == 1 and not math.isnan(self._known)
        if self._wanted is None and is_next and self._version - self._trial_version >= least:
            self._wanted = self._version

    def _loss(self) -> float:
        return self._known

    def _pass_barrier(self, worker: int) -> list[Action]:
        """Once all workers have stopped, want the model as it is; `_evaluated` releases them."""
        if self._all_have_stopped and self._wanted is None:
            self._wanted = self._version
        return []

    def _next_trial(self, worker: int) -> list[Action]:
        self._trial_version = self._version
        if math.isnan(self._trial_s):
            self._search_s = self._now_s
        return super()._next_trial(worker)

    def _times_s(self) -> list[float]:
        return [self._trial_s - self._search_s + time_s for time_s in super()._times_s()]  # (l)


def _policy(n_workers: int, *, loss: str = "commits", **options: Any) -> ADSP:
    """Create the state machine for this option `loss`."""
    return (EvaluatedADSP if loss == "evaluation" else ADSP)(n_workers, **options)


def _must_be_allowed(
    check_period_s: float, interval_min_s: float, search_every_s: float, loss_rise: float, loss_target: float | None
) -> None:
    if not (is_number(check_period_s) and 0 < check_period_s < math.inf):
        raise ValueError(f"check_period_s must be a finite number > 0, got {check_period_s}")
    if not (is_number(interval_min_s) and 0 < interval_min_s <= check_period_s):
        limit = f"<= check_period_s = {check_period_s}"
        raise ValueError(f"interval_min_s must be a number > 0 and {limit}, got {interval_min_s}")
    for name, value in (("search_every_s", search_every_s), ("loss_rise", loss_rise)):
        if not (is_number(value) and value > 0):
            raise ValueError(f"{name} must be a number > 0, got {value}")
    if loss_target is not None and not (is_number(loss_target) and math.isfinite(loss_target)):
        raise ValueError(f"loss_target must be a finite number or None, got {loss_target}")


HU = Reference(
    "hu2020distributed",
    "inproceedings",
    ("Hu, Hanpeng", "Wang, Dan", "Wu, Chuan"),
    "Distributed Machine Learning through Heterogeneous Edge Systems",
    2020,
    {
        "booktitle": "Proceedings of the AAAI Conference on Artificial Intelligence",
        "volume": "34",
        "number": "05",
        "pages": "7179--7186",
        "doi": "10.1609/aaai.v34i05.6207",
    },
)


@dataclass(frozen=True, kw_only=True)
class AdspOptions(ParadigmOptions):
    """ADSP: workers make local steps without waiting, and all commit equally often.

    Parameters
    ----------
    check_period_s
        Seconds of a check period.
    interval_min_s
        Least seconds between two commits of a worker; at most `check_period_s`.
    rule
        `"cumulative"`: a worker catches up on missed commits, as in the paper. `"released"`: it does not, as in the
        authors' code.
    commits
        Commits of each worker in a check period.
    search_every_s
        Seconds from the end of one search to the next.
    loss_rise
        Relative rise of the loss within a period that starts a search.
    loss_target
        Loss that a search aims at.
    loss
        Loss of a search: the average of commits, or evaluations of the servers' model, which the search asks for.
    """

    name: Literal["adsp"] = "adsp"
    check_period_s: Positive = 60.0
    interval_min_s: Positive = computed(lambda given: given["check_period_s"] / 6, "`check_period_s` / 6")
    rule: Literal["cumulative", "released"] = "cumulative"
    commits: Count | None = default(None, "searched for")
    search_every_s: Positive = computed(
        lambda given: given["check_period_s"] * 1000 / 60, "`check_period_s` x 1000 / 60"
    )
    loss_rise: Positive = 0.3
    loss_target: Finite | None = default(None, "half of the loss at the start of a search")
    loss: Literal["commits", "evaluation"] = "commits"

    policy = staticmethod(_policy)
    contribution = "change"
    timed_steps = True
    excludes = MappingProxyType(
        {"commits": (("search_every_s", "loss_rise", "loss_target"), "where nothing is searched for")}
    )
    guarantees = ("commits",)
    papers = (HU,)
    place = 110
    colour = "#DDCC77"
    waiting = "none, except during a search"
    update = "the change of the weights; all workers commit equally often"
    source = "Hu et al., AAAI 2020"

    def _check_options(self) -> None:
        period_s, interval_s = self.check_period_s, self.interval_min_s
        if interval_s > period_s:
            raise OptionError("paradigm.interval_min_s", interval_s, f"must be at most {_PERIOD} = {period_s:g}")
        if self.commits is not None and self.commits > (most := most_commits(period_s, interval_s)):
            raise OptionError(
                "paradigm.commits",
                self.commits,
                f"must be at most {most}: commits are paradigm.interval_min_s = {interval_s:g} apart, in {_PERIOD} = "
                f"{period_s:g}",
            )
        if self.commits is not None and self.loss == "evaluation":
            must = f'must be "commits" with paradigm.commits = {self.commits}, where nothing is searched for'
            raise OptionError("paradigm.loss", self.loss, must)

    def check(self, job: JobTables) -> None:
        """Raise OptionError if the run ends before its first push."""
        first_s = max(self.interval_min_s, self.check_period_s / (self.commits or 1))
        if job.stop.seconds is not None and job.stop.seconds <= first_s:
            raise OptionError(
                "stop.seconds",
                job.stop.seconds,
                f"must be greater than {first_s:g}, the time of the first push by {_PERIOD}, commits and "
                "interval_min_s",
            )

    @property
    def uses_evaluations(self) -> bool:
        """True if the search follows the evaluated loss."""
        return self.loss == "evaluation"

    @property
    def requests_evaluations(self) -> bool:
        """True if the search follows the evaluated loss."""
        return self.uses_evaluations

    @property
    def commits_at_first(self) -> int:
        """First number of pushes of each worker in a period."""
        return self.commits or 1

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        searches = self.commits is None
        return "workers wait for each other during a search only" if searches else "no worker waits for another"

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        return "workers push the weight change of their local steps, equally often, and do not wait"

    def details(self, n_workers: int) -> list[tuple[str, str]]:
        """Return further rows of `hpcsync show`, as names and values."""
        within = f"every {self.check_period_s:g} s, at least {self.interval_min_s:g} s apart"
        missed = "; missed pushes are made up for" if self.rule == "cumulative" else ""
        if self.commits is not None:
            return [("pushes", f"{self.commits} by each worker {within}{missed}")]
        loss = "evaluated loss" if self.uses_evaluations else "average loss"
        again = f"{self.search_every_s:g} s and when the {loss} has risen by {100 * self.loss_rise:g} %"
        return [("pushes", f"the same number by each worker {within}{missed}\nthe number is searched every {again}")]


_PERIOD = "paradigm.check_period_s"
