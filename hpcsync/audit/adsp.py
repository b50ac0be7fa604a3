"""Checks of ADSP (Hu, Wang and Wu, AAAI 2020), recounted from the rows: commit times, blocking and the search's trials.

`_CommitAccount` follows the run event by event. The rewards of trials are taken from the rows. That a reward follows
from the curve l(t) = 1 / (a^2 t + b) + d is verified by the cross ratio of four of its points, which equals that of
their times. `_EvaluatedAccount` does so where the losses are those of evaluations, which are rows of /decisions, too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from hpcsync.audit.ashl import evaluated_losses_are_recorded
from hpcsync.audit.check import SAME, SAME_TIME_S, Check, alike, check_all, check_rows
from hpcsync.audit.progress import is_scheduled, version_at_last_start
from hpcsync.audit.server_recount import Recount
from hpcsync.paradigms.adsp import AdspOptions
from hpcsync.paradigms.records import UNTIL, UNUSED
from hpcsync.trace.iteration_counts import NEVER
from hpcsync.trace.schema import Outcome

POINTS = ("loss_start", "loss_middle", "loss_end")
SHORTEST = 1e-6  # least time until a commit, as a share of the check period


def check_commits(recount: Recount, paradigm: AdspOptions) -> list[Check]:
    """Return the checks of this module."""
    lacking = {"reward", *POINTS} - set(recount.decisions.dtype.names or ())
    if lacking:
        return [Check("searches and trials are recorded", False, 0, f"/decisions lacks {', '.join(sorted(lacking))}")]
    account = (_EvaluatedAccount if paradigm.uses_evaluations else _CommitAccount)(recount, paradigm)
    account.run()
    return [
        *account.evaluations(),
        commits_count_one_of_all(recount),
        commits_come_when_granted(recount, paradigm),
        account.waits(),
        account.times(),
        account.trials(),
        account.counts(),
    ]


def commits_count_one_of_all(recount: Recount) -> Check:
    """Check that a push has weight 1 / n_workers, or 0 if it is dropped or has a problem so that it does not count."""
    pushes = recount.pushes
    counts = (pushes["outcome"] == Outcome.APPLIED) & ~np.isin(pushes["problem"], [*UNUSED])
    expected = np.where(counts, 1 / recount.n_workers, 0.0)
    return check_rows(
        "each commit has weight 1 / n_workers",
        ~alike(pushes["weight"], expected),
        lambda i: f"push of seq {pushes['seq'][i]} has weight {pushes['weight'][i]}, not {expected[i]}",
    )


def commits_come_when_granted(recount: Recount, paradigm: AdspOptions) -> Check:
    """Check that each grant sets the commit time, and nothing else, and that no worker ends its last step earlier.

    The error of a worker's clock is in /clocks. The last push of a worker before it leaves may come earlier.
    """
    grants, pushes, permit = recount.grants[~recount.is_stop], recount.pushes, recount.push_permit
    is_first = permit < 0
    first_s = max(paradigm.interval_min_s, paradigm.check_period_s / (paradigm.commits or 1))
    granted_s = np.where(is_first, 0.0, np.append(recount.grants["now_s"], np.nan)[permit])
    commit_s = np.where(is_first, first_s, np.append(recount.grants["commit_s"], np.nan)[permit])
    took_s = pushes["end_s"] - granted_s
    return check_all(
        "commits come when due",
        (
            grants["local_steps"] != UNTIL,
            lambda i: f"grant of seq {grants['seq'][i]}: {grants['local_steps'][i]} local steps",
        ),
        (~np.isnan(grants["ratio"]), lambda i: f"grant of seq {grants['seq'][i]}: ratio {grants['ratio'][i]}"),
        (
            (took_s < commit_s - recount.clock_error_s - SAME_TIME_S) & ~recount.may_be_cut,
            lambda i: f"push of seq {pushes['seq'][i]}: {took_s[i]} s after its grant, commit_s is {commit_s[i]}",
        ),
    )


class _Due(NamedTuple):
    """An expected row of /decisions."""

    controller: str
    worker: int
    chosen: float
    losses: tuple[float, ...]
    times_s: tuple[float, ...]
    target: float = math.nan  # loss of the target


class _Need(NamedTuple):
    """An evaluation that is needed: from which version on, and since when.

    `n_ended` is the number of evaluations that have ended in the run, at the beginning and at the end of the need.
    """

    version: int
    from_s: float
    until_s: float
    n_ended: tuple[int, int]


class _CommitAccount:
    """State of the run after each event: which workers are blocked, since when, and the state of the search."""

    def __init__(self, recount: Recount, paradigm: AdspOptions) -> None:
        n = recount.n_workers
        self.recount = recount
        self.paradigm = paradigm
        self.commits = paradigm.commits or 1  # commits per period: current, or of the trial
        self.best, self.best_reward = self.commits, math.nan  # of the search so far
        self.searching = paradigm.commits is None
        self.trial_s = 0.0  # start of the trial; NaN before the search's first barrier
        self.stop_s = self.trial_length_s() if self.searching else math.inf
        self.begun_s, self.checks, self.loss_before = 0.0, 0, math.nan
        self.losses = np.full(n, np.nan)  # each worker's latest
        self.iters, self.counted = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.target = self.commits
        self.overhead_s = np.zeros(n)
        self.active = np.ones(n, bool)
        self.blocked: dict[int, int] = {}  # worker -> row of its push, or -1 after a join
        self.points: list[tuple[float, float]] = []
        self.aim = math.nan  # target of the search's last trial, if the job gives none
        # Expected values: the event that answers each push, the commit_s of each grant, and decisions. The last row of
        # the two arrays is for joins.
        self.released = np.full(len(recount.pushes) + 1, NEVER)
        self.commit_s = np.full(len(recount.pushes) + 1, np.nan)  # of the grant that answers each push, seconds
        self.due: list[_Due] = []
        self.apart = 0  # largest difference of commits between active workers at a check
        rows = recount.choices
        self._rewards = iter(rows["reward"][rows["controller"] == b"reward"].tolist())

    def run(self) -> None:
        """Process all events until the run stops."""
        row = 0
        for number, event in enumerate(self.recount.events):
            if event["seq"] > self.recount.stop_seq:
                break
            self._evaluations_until(int(event["seq"]))
            worker, now_s = int(event["worker"]), float(event["now_s"])
            if event["joins"]:
                self._join(worker)
                self.blocked[worker] = -1
                if now_s < self.stop_s:
                    self._release(number, now_s)
            elif not event["is_push"]:
                self.active[worker] = False
                self.blocked.pop(worker, None)
            else:
                push = self.recount.pushes[row]
                if push["outcome"] != Outcome.APPLIED:
                    return  # the run, or the trace, ends here
                self._push(push, now_s)
                self.blocked[worker] = row
                if now_s < self.stop_s:
                    self._release(number, now_s)
                row += 1
            if self.all_have_stopped():
                self._pass_barrier(number, worker, now_s)
        self._evaluations_until(self.recount.stop_seq)

    def all_have_stopped(self) -> bool:
        return self.searching and bool(self.blocked) and len(self.blocked) == self.active.sum()

    def trial_length_s(self) -> float:
        return self.paradigm.check_period_s

    def _evaluations_until(self, seq: int) -> None:
        """Process the evaluations before this `seq`."""

    def _release(self, number: int, now_s: float) -> None:
        """Release all blocked workers."""
        for worker, row in self.blocked.items():
            rate = self.commits
            if not self.searching and self.paradigm.rule == "cumulative":
                rate = max(self.target - int(self.counted[worker]), 1)
            commit_s = self.paradigm.check_period_s / rate - self.overhead_s[worker]
            left_s = max(self.stop_s - now_s, SHORTEST * self.paradigm.check_period_s)
            self.released[row] = number
            self.commit_s[row] = min(max(self.paradigm.interval_min_s, commit_s), left_s)
        self.blocked.clear()

    def _join(self, worker: int) -> None:
        """Let a worker join with the counts of the slowest active worker (or its own, if higher) and no loss."""
        for made in (self.iters, self.counted):
            made[worker] = max(made[worker], min(made[self.active], default=0))
        self.losses[worker], self.active[worker] = math.nan, True

    def _push(self, push: Any, now_s: float) -> None:
        worker, loss = int(push["worker"]), float(push["loss"])
        spent_s = [push["encode_s"], push["comm_s"] - push["pull_s"], push["pull_s"]]
        self.overhead_s[worker] = math.fsum(time_s for time_s in spent_s if 0 <= time_s < math.inf)
        if math.isfinite(loss):
            self.losses[worker] = loss
        if self.searching and now_s < self.stop_s:
            self._see_trial(now_s)
        if not self.searching:
            self._check(now_s)
        self.iters[worker] += 1

    def _see_trial(self, now_s: float) -> None:
        """Add the points at the start and in the middle of the trial; the third comes at its end, when all stop."""
        self._sample(now_s, len(self.points) * self.paradigm.check_period_s / 2)

    def _check(self, now_s: float) -> None:
        """Carry out the check that was due before this push, if any, and begin a search if one is due."""
        paradigm, rose = self.paradigm, False
        checks = math.floor((now_s - self.begun_s) / paradigm.check_period_s)
        if checks > self.checks:
            self.apart = max(self.apart, int(np.ptp(self.iters[self.active])))
            self.target += self.commits * (checks - self.checks)
            self.checks, self.counted = checks, self.iters.copy()
            rose = self._compare_loss(now_s)
        if paradigm.commits is None and (rose or now_s - self.begun_s >= paradigm.search_every_s):
            self._begin_search(now_s)

    def _compare_loss(self, now_s: float) -> bool:
        rise = self._loss() - self.loss_before
        rose = rise > 0 and rise >= self.paradigm.loss_rise * abs(self.loss_before)
        self.loss_before = self._loss()
        return rose

    def _begin_search(self, now_s: float) -> None:
        self.searching, self.best, self.best_reward = True, self.commits, math.nan
        self.aim = math.nan
        self.trial_s, self.points, self.stop_s = math.nan, [], now_s

    def _loss(self) -> float:
        """Return the mean loss of the active workers, NaN until all have reported one."""
        losses = self.losses[self.active]
        return math.fsum(losses) / len(losses) if len(losses) else math.nan

    def _sample(self, now_s: float, from_s: float) -> None:
        """Add a point to the trial if it has lasted `from_s` seconds and the loss is known."""
        if now_s - self.trial_s >= from_s and not math.isnan(loss := self._loss()):
            self.points.append((now_s - self.trial_s, loss))

    def _aim(self, losses: tuple[float, ...]) -> float:
        """Return the trial's target: half the loss at the search's start, halved until the trial begins above it."""
        if self.paradigm.loss_target is not None:
            return self.paradigm.loss_target
        if losses:
            first = losses[0] / 2 if math.isnan(self.aim) else self.aim
            halvings = math.floor(math.log2(first / losses[0])) + 1 if 0 < losses[0] <= first else 0
            self.aim = first / 2**halvings
        return self.aim

    def _pass_barrier(self, number: int, worker: int, now_s: float) -> None:
        """Handle that all workers are blocked."""
        self._sample(now_s, self.paradigm.check_period_s)
        self._next_trial(number, worker, now_s, 0.0)

    def _next_trial(self, number: int, worker: int, now_s: float, since_s: float) -> None:
        """Release all workers, which are blocked, into the next trial or out of the search.

        Times of points count from `since_s` before the trial.
        """
        paradigm = self.paradigm
        if not math.isnan(self.trial_s):
            losses = tuple(loss for _, loss in self.points)
            times_s = tuple(since_s + time_s for time_s, _ in self.points)
            self.due.append(_Due("reward", worker, self.commits, losses, times_s, self._aim(losses)))
            reward = next(self._rewards, math.nan)
            better = math.isnan(self.best_reward) or reward > self.best_reward
            if better:
                self.best, self.best_reward = self.commits, reward
            most = math.floor(paradigm.check_period_s / paradigm.interval_min_s * (1 + 1e-12))
            self.commits += 1
            if not better or self.best >= most or not losses:
                self._end_search(worker, now_s)
        if self.searching:
            self.trial_s, self.points, self.stop_s = now_s, [], now_s + self.trial_length_s()
            self._sample(now_s, 0.0)
        self._release(number, now_s)

    def _end_search(self, worker: int, now_s: float) -> None:
        self.due.append(_Due("commits", worker, self.best, (), ()))
        self.commits, self.searching, self.stop_s = self.best, False, math.inf
        self.begun_s, self.checks, self.loss_before = now_s, 0, self._loss()
        self.counted = self.iters.copy()
        self.target = int(self.counted[self.active].max()) + self.commits

    # ---- the checks ----

    def evaluations(self) -> list[Check]:
        """Return the checks of the evaluations that decide, if any do."""
        return []

    def waits(self) -> Check:
        """Check that workers block only at the barriers before and after a search's trials."""
        recount, pushes = self.recount, self.recount.pushes
        known = (recount.push_grant >= 0) & ~np.append(recount.is_stop, True)[recount.push_grant]
        released = np.append(recount.grant_event, -1)[recount.push_grant]
        return check_rows(
            "workers block only for a trial",
            known & (released != self.released[:-1]),
            lambda i: (
                f"worker {pushes['worker'][i]} pushes with seq {pushes['seq'][i]} and is granted "
                f"{'at once' if released[i] == recount.push_event[i] else 'later'}"
            ),
        )

    def times(self) -> Check:
        """Check that commit_s follows from the rule and the commits made so far."""
        recount, pushes = self.recount, self.recount.pushes
        granted_s = np.append(recount.grants["commit_s"], np.nan)[recount.push_grant]
        known = (recount.push_grant >= 0) & ~np.append(recount.is_stop, True)[recount.push_grant]
        return check_rows(
            f"commit times follow the {self.paradigm.rule} rule, at least {self.paradigm.interval_min_s:g} s apart",
            known & ~(np.abs(granted_s - self.commit_s[:-1]) < SAME_TIME_S),
            lambda i: (
                f"push of seq {pushes['seq'][i]}: the next one is granted after {granted_s[i]} s, the recount gives "
                f"{self.commit_s[i]}"
            ),
        )

    def trials(self) -> Check:
        """Check the trials of each search, that rewards follow from the losses, and that the best rate is chosen."""
        name, rows = "searches raise the rate by one and choose the best", self.recount.choices
        if not self.recount.finished:
            rows = rows[self.recount.event_at(rows["seq"]) < len(self.recount.events) - 1]
        for i, row in enumerate(rows):
            if i >= len(self.due) or (wrong := self._wrong(row, self.due[i])):
                wrong = wrong if i < len(self.due) else "no decision was due"
                return Check(name, False, i, f"decision of seq {row['seq']}: {wrong}")
        missing = len(self.due) - len(self.recount.choices)
        if missing > 0 and self.recount.finished:
            return Check(name, False, len(rows), f"{missing} decisions are missing, the first: {self.due[-missing]}")
        return Check(name, True, len(rows))

    def _wrong(self, row: Any, due: _Due) -> str:
        controller = row["controller"].decode(errors="replace")
        if (controller, row["worker"], row["chosen"]) != due[:3]:
            return f"{controller} {row['chosen']:g} by worker {row['worker']}, expected {due[0]} {due[2]:g} by {due[1]}"
        losses = np.array([*due.losses, *[math.nan] * (3 - len(due.losses))])
        recorded = np.array([row[name] for name in POINTS])
        if not alike(recorded, losses).all():
            return f"losses are {losses.tolist()}, recorded are {recorded.tolist()}"
        if controller == "reward" and not self._is_reward(float(row["reward"]), due):
            return f"the reward {row['reward']} does not follow from the curve through {losses.tolist()}"
        return ""

    def _is_reward(self, reward: float, due: _Due) -> bool:
        """Return True if the curve through the points reaches the target after 1 / reward seconds.

        A reward of -inf is right if it never does.
        """
        if len(due.losses) < 3:
            return reward == -math.inf
        (t0, t1, t2), (l0, l1, l2) = due.times_s, due.losses
        target = due.target
        falls = t0 < t1 < t2 and l0 > l1 > l2 and target < l0
        if not falls:
            return reward == -math.inf
        if reward > 0:
            then_s = 1 / reward
            of_times = (then_s - t0) * (t1 - t2) * (target - l2) * (l1 - l0)
            of_losses = (target - l0) * (l1 - l2) * (then_s - t2) * (t1 - t0)
            scale = (max(then_s, t2) - t0) * (t2 - t0) * (l0 - min(target, l2)) * (l0 - l2)
            return abs(of_times - of_losses) <= SAME * scale
        # The curve stays above the target: 1 / (l - d) is linear in t, and d is at or above the target.
        first, then = (l0 - l1) * (t2 - t1), (l1 - l2) * (t1 - t0)
        d = (first * l2 - then * l0) / (first - then) if first != then else -math.inf
        return reward == -math.inf and first > then and target <= d + SAME * abs(d)

    def counts(self) -> Check:
        """Report the largest difference of commits between workers; no bound follows from the rows."""
        n = self.recount.n_workers
        detail = f"largest difference at a check: {self.apart}"
        return Check("report, not a check: difference of commits between workers", True, n, detail)


class _EvaluatedAccount(_CommitAccount):
    """The same where evaluations of the servers' model decide.

    One is needed of the model at the start of a search, in the middle of a trial (once half of the commits, rounded
    down, have been made), when all workers have stopped, and at each check. It is the first of that version or a later
    one.
    """

    def __init__(self, recount: Recount, paradigm: AdspOptions) -> None:
        super().__init__(recount, paradigm)
        self.n_evaluated = 0  # processed
        self.version, self.made_s = 0, 0.0
        self.needed: int | None = None  # version from which on an evaluation is needed
        self.needs: list[_Need] = []
        self.known = math.nan  # latest evaluated loss
        self.search_s, self.trial_version = 0.0, 0
        self._need(0.0)

    def trial_length_s(self) -> float:
        return self.paradigm.check_period_s * (2 if self.commits == 1 else 1)

    def _need(self, now_s: float) -> None:
        if self.needed is None:
            self.needed = self.version
            self.needs.append(_Need(self.version, now_s, math.inf, (self.n_evaluated, NEVER)))

    def _needs_no_more(self, now_s: float) -> None:
        if self.needed is not None:
            self.needed = None
            need = self.needs[-1]
            self.needs[-1] = need._replace(until_s=now_s, n_ended=(need.n_ended[0], self.n_evaluated))

    def _evaluations_until(self, seq: int) -> None:
        rows, evaluations = self.recount.evaluated, self.recount.evaluations
        while self.n_evaluated < min(len(rows), len(evaluations)) and rows["seq"][self.n_evaluated] < seq:
            self._evaluated(rows[self.n_evaluated], evaluations[self.n_evaluated])
            self.n_evaluated += 1

    def _evaluated(self, row: Any, evaluation: Any) -> None:
        version, now_s, worker = int(evaluation["version"]), float(row["now_s"]), int(row["worker"])
        if self.needed is None or version < self.needed:
            return
        self._needs_no_more(now_s)
        self.known = float(row["chosen"]) if math.isfinite(row["chosen"]) else math.nan
        if not self.searching:
            if super()._compare_loss(now_s):
                self._begin_search(now_s)
            return
        latest = version == self.version
        at_s = self.made_s if latest else float(evaluation["now_s"])
        self._sample(at_s, -math.inf)
        if now_s < self.stop_s:
            self._see_trial(now_s)
        if self.all_have_stopped():
            if latest:
                number = int(self.recount.event_at(row["seq"]))
                self._next_trial(number, worker, now_s, self.trial_s - self.search_s)
            else:
                self._need(now_s)

    def _push(self, push: Any, now_s: float) -> None:
        self.version, self.made_s = self.version + 1, now_s
        super()._push(push, now_s)

    def _see_trial(self, now_s: float) -> None:
        of_each = 1 if self.commits == 1 else math.floor(self.commits / 2)
        least = of_each * int(self.active.sum())
        is_next = len(self.points) == 1 and not math.isnan(self.known)
        if is_next and self.version - self.trial_version >= least:
            self._need(now_s)

    def _compare_loss(self, now_s: float) -> bool:
        self._needs_no_more(now_s)
        self._need(now_s)
        return False

    def _begin_search(self, now_s: float) -> None:
        if self.needed == self.version:  # by the check at the same push
            self.needs.pop()
            self.needed = None
        self._needs_no_more(now_s)
        super()._begin_search(now_s)

    def _loss(self) -> float:
        return self.known

    def _pass_barrier(self, number: int, worker: int, now_s: float) -> None:
        self._need(now_s)

    def _next_trial(self, number: int, worker: int, now_s: float, since_s: float) -> None:
        self.trial_version = self.version
        if math.isnan(self.trial_s):
            self.search_s = now_s
        super()._next_trial(number, worker, now_s, since_s)

    def evaluations(self) -> list[Check]:
        """Return the checks that evaluations are recorded as they decide, and made where they are due or needed."""
        rows = self.recount.evaluations[:-1]  # the last one may be that at the end
        versions, now_s = rows["version"][:, None], rows["now_s"][:, None]
        from_version, from_s, until_s = np.array([need[:3] for need in self.needs]).reshape(-1, 3).T
        is_needed = ((from_version <= versions) & (from_s <= now_s) & (now_s <= until_s)).any(axis=1)
        is_due = is_scheduled(rows["samples"], self.recount.job.evaluation.every_samples)
        if (resumed := version_at_last_start(self.recount.trace)) is not None:  # evaluations may have come more often
            is_due[: np.count_nonzero(rows["version"] <= resumed) + 1] = True
        return [
            evaluated_losses_are_recorded(self.recount),
            check_rows(
                "evaluations beside those that are due are needed",
                ~(is_needed | is_due),
                lambda i: f"/evaluations row {i}, of version {rows['version'][i]}, is neither due nor needed",
            ),
            self._needed_ones_begin_at_once(),
        ]

    def _needed_ones_begin_at_once(self) -> Check:
        """Check that each evaluation that is needed begins at once or, if another is running, when that one has ended.

        It is of the version as it is then; a simulation also begins it at that time. On ranks the time depends on the
        load of server 0, and a need during which the run resumed is left out.
        """
        wrong = [self._lateness(need) for need in self.needs]
        return check_rows(
            "evaluations that are needed begin at once, or after the one before",
            np.array([bool(text) for text in wrong], bool),
            lambda i: f"needed of version {self.needs[i].version} from {self.needs[i].from_s} s: {wrong[i]}",
        )

    def _lateness(self, need: _Need) -> str:
        """Return what is wrong with the evaluation that is to meet this need; empty if nothing is."""
        recount, ended, rows = self.recount, self.recount.evaluated, self.recount.evaluations
        running, n_ended = need.n_ended
        at = max(running, int(np.searchsorted(rows["version"], need.version)))
        begins_s, version = need.from_s, need.version
        if at > running:
            if min(n_ended, self.n_evaluated) < at:
                return ""  # the need, or the run, ended before the evaluation that was running
            begins_s, version = float(ended["now_s"][at - 1]), int(recount.version_at(ended["seq"][at - 1]))
        if begins_s >= self._end_s():
            return ""
        if at == len(rows):
            return "there is none" if recount.finished else ""
        begun_s, begun = float(rows["now_s"][at]), int(rows["version"][at])
        starts_s = recount.trace.tables["starts"]["now_s"][1:]
        if ((need.from_s <= starts_s) & (starts_s <= begun_s)).any():
            return ""
        simulated = recount.trace.attributes.get("engine") == "simulator"
        if begun > version or (simulated and begun_s > begins_s + SAME_TIME_S):
            return f"it is of version {begun} at {begun_s} s, could be of {version} at {begins_s} s"
        return ""

    def _end_s(self) -> float:
        """Return the time at which the run is known to have ended."""
        stops_s = self.recount.grants["now_s"][self.recount.is_stop]
        return float(stops_s[0] if len(stops_s) else self.recount.events["now_s"].max(initial=0.0))
