"""ADSP: times of commits, equal numbers of commits, and the search for their number: trials, barriers, ends."""

import heapq
import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsync.paradigms import adsp, create
from hpcsync.paradigms.adsp import ADSP, AdspOptions, EvaluatedADSP
from hpcsync.paradigms.events import Apply, Decision, Evaluated, Grant, Joined, Left, PushInfo
from hpcsync.paradigms.records import UNTIL
from tests.unit.paradigms.schedule import PROPERTY, fixed, run, schedules

NAN = math.nan
PERIOD_S = 60.0


def make(n_workers, kind=ADSP, **options):
    """Create ADSP with default intervals and searches."""
    period_s = options.setdefault("check_period_s", PERIOD_S)
    return kind(n_workers, **{"interval_min_s": period_s / 6, "search_every_s": period_s * 1000 / 60, **options})


@dataclass(frozen=True)
class Worker:
    """Seconds of one local step and of the parts of a commit."""

    step_s: float
    pull_s: float = 0.0
    encode_s: float = 0.0
    push_s: float = 0.0


def play(paradigm, workers, until_s, loss=lambda now_s: NAN, deaths_s=(), check=True, evaluate=None, takes_s=0.0):
    """Play workers that follow their grants until this time; return every event with its answer.

    `evaluate` returns the loss of the servers' model as it is at this time, which is known `takes_s` later.
    """
    trace, queue, active = [], [], set(range(len(workers)))
    version, evaluating = 0, False

    def evaluate_if_wanted(now_s):
        if not paradigm.wants_evaluation or evaluating or not active:
            return evaluating
        event = Evaluated(now_s + takes_s, min(active), evaluate(now_s), version, now_s)
        heapq.heappush(queue, (event.now_s, len(workers), event))
        return True

    def start(grant, now_s):
        worker = workers[grant.worker]
        assert grant.local_steps == UNTIL
        assert 0 < grant.commit_s < math.inf
        n = max(1, math.ceil(grant.commit_s / worker.step_s))
        at_s = now_s + worker.pull_s + n * worker.step_s + worker.encode_s + worker.push_s
        event = PushInfo(
            at_s,
            grant.worker,
            compute_s=n * worker.step_s,
            comm_s=worker.pull_s + worker.push_s,
            local_steps=n,
            loss=loss(at_s),
            pull_s=worker.pull_s,
            encode_s=worker.encode_s,
        )
        heapq.heappush(queue, (at_s, grant.worker, event))

    for death_s, i in deaths_s:
        heapq.heappush(queue, (death_s, i, Left(death_s, i)))
    for i in range(len(workers)):
        start(paradigm.first(i), 0.0)
    evaluating = evaluate_if_wanted(0.0)
    while queue and queue[0][0] <= until_s:
        _, _, event = heapq.heappop(queue)
        if isinstance(event, Evaluated):
            event = replace(event, worker=min(active))
        if event.worker not in active:
            continue
        if isinstance(event, Left):
            active.remove(event.worker)
        version += isinstance(event, PushInfo)
        evaluating = evaluating and not isinstance(event, Evaluated)
        actions = paradigm.handle(event)
        if check:
            paradigm.check()
        trace.append((event, actions))
        for action in actions:
            if isinstance(action, Grant):
                start(action, event.now_s)
        evaluating = evaluate_if_wanted(event.now_s)
    return trace


def of(trace, kind):
    return [action for _, actions in trace for action in actions if isinstance(action, kind)]


def chosen(trace, controller):
    return [action.chosen for action in of(trace, Decision) if action.controller == controller]


def commit_seconds(actions):
    return {action.worker: action.commit_s for action in actions if isinstance(action, Grant)}


def spread(trace, period_s=PERIOD_S):
    """Return the largest difference of cumulative commits at any check."""
    workers = {event.worker for event, _ in trace}
    counts, largest, check_s = dict.fromkeys(workers, 0), 0, period_s
    for event, _ in trace:
        while event.now_s >= check_s:
            largest = max(largest, max(counts.values()) - min(counts.values()))
            check_s += period_s
        counts[event.worker] += isinstance(event, PushInfo)
    return largest


# ---- when to commit ----


def test_commits_are_spread_over_the_period_minus_the_time_of_the_last_one():
    paradigm = make(2, commits=3)
    assert paradigm.first(1) == Grant(1, 1, local_steps=UNTIL, commit_s=20.0)
    apply, grant = paradigm.handle(PushInfo(20.0, 0, pull_s=3.0, comm_s=5.0, encode_s=1.0))
    assert apply == Apply((0,), (0.5,))
    assert grant == Grant(0, 2, gap_iters=1, local_steps=UNTIL, commit_s=14.0)
    # Unknown times count as 0, and the last of two commits is used.
    assert commit_seconds(paradigm.handle(PushInfo(21.0, 1, pull_s=0.0, comm_s=2.5))) == {1: 17.5}
    assert commit_seconds(paradigm.handle(PushInfo(22.0, 1))) == {1: 20.0}
    # Never more often than interval_min_s.
    assert commit_seconds(paradigm.handle(PushInfo(23.0, 1, pull_s=0.0, comm_s=15.0))) == {1: 10.0}
    assert commit_seconds(
        make(1, commits=3, interval_min_s=1.0).handle(PushInfo(20.0, 0, pull_s=0.0, comm_s=15.0))
    ) == {0: 5.0}


def test_a_worker_with_fewer_commits_is_asked_for_more():
    behind, ahead = [(25.0, 0), (50.0, 0)], [(10.0, 1), (20.0, 1), (30.0, 1), (40.0, 1)]
    for rule, intervals in (("cumulative", {0: 15.0, 1: 30.0}), ("released", {0: 20.0, 1: 20.0})):
        paradigm = make(2, commits=3, rule=rule)
        for now_s, worker in sorted(behind + ahead):
            assert commit_seconds(paradigm.handle(PushInfo(now_s, worker))) == {worker: 20.0}
        # At the check c = 2 and 4, and C_target = 6; the push after it does not count for it.
        assert commit_seconds(paradigm.handle(PushInfo(61.0, 0))) == {0: intervals[0]}
        assert commit_seconds(paradigm.handle(PushInfo(62.0, 1))) == {1: intervals[1]}
        paradigm.check()


def test_a_worker_far_ahead_still_commits_once_in_a_period():
    paradigm = make(2, commits=1)
    for t in range(1, 60):
        paradigm.handle(PushInfo(float(t), 0))
    assert commit_seconds(paradigm.handle(PushInfo(61.0, 0))) == {0: 60.0}
    paradigm.check()


def test_periods_without_a_push_are_made_up_for_at_once():
    paradigm = make(2, commits=2, interval_min_s=1.0)
    paradigm.handle(PushInfo(30.0, 0))
    assert paradigm._target == 2
    # Checks at 60, 120 and 180 s: C_target = 8, c = 1.
    assert commit_seconds(paradigm.handle(PushInfo(190.0, 0))) == {0: pytest.approx(60 / 7)}
    assert commit_seconds(paradigm.handle(PushInfo(1e9, 1))).keys() == {1}
    paradigm.check()


# 4 times as fast, and with other overheads.
UNEQUAL = [
    Worker(1.0),
    Worker(4.0, pull_s=0.5, push_s=1.0),
    Worker(2.5, push_s=3.0, encode_s=0.5),
    Worker(1.3),
]


@pytest.mark.parametrize("commits", [1, 2, 3, 4])
def test_cumulative_commits_stay_together_at_four_times_the_speed(commits):
    trace = play(make(4, commits=commits), UNEQUAL, until_s=3000.0)
    assert spread(trace) <= 2  # 1, and one on its way
    assert all(grant.held_s == 0 for grant in of(trace, Grant))
    pushes = [sum(event.worker == worker for event, _ in trace) for worker in range(4)]
    assert all(abs(n - 50 * commits) <= 2 for n in pushes)


def test_commits_as_in_the_released_code_drift_apart():
    trace = play(make(4, commits=3, rule="released"), UNEQUAL, until_s=3000.0)
    assert spread(trace) > 5


class ForgetsTheOverhead(ADSP):
    def _commit_s(self, worker, now_s):
        self._overhead_s[worker] = 0.0
        return super()._commit_s(worker, now_s)


class NeverCounts(ADSP):
    """C_target grows, but a worker that has fallen behind is asked for no more than the others."""

    def _rate(self, worker):
        return self.commits


def test_variants_that_drift_are_seen():
    assert spread(play(make(4, NeverCounts, commits=3), UNEQUAL, 3000.0, check=False)) > 5
    workers, options = [Worker(0.1), Worker(0.1, push_s=3.0)], {"commits": 3, "rule": "released"}
    assert spread(play(make(2, ForgetsTheOverhead, **options), workers, 3000.0)) > 10
    assert spread(play(make(2, **options), workers, 3000.0)) <= 2


@PROPERTY
@given(schedule=schedules(), rule=st.sampled_from(["cumulative", "released"]), commits=st.integers(1, 6))
def test_no_worker_blocks_outside_of_a_search(schedule, rule, commits):
    referee = run(make(schedule.n_workers, check_period_s=5.0, rule=rule, commits=commits), schedule)
    assert all(grant.held_s == 0 for grant in referee.actions(Grant))
    assert not referee.actions(Decision)


@PROPERTY
@given(schedule=schedules())
def test_workers_block_only_for_a_trial(schedule):
    referee = run(make(schedule.n_workers, check_period_s=5.0, search_every_s=10.0), schedule)
    # All blocked workers are released together, when a trial or the search ends or a trial begins.
    for _, actions in referee.trace:
        grants = [action for action in actions if isinstance(action, Grant)]
        if any(grant.held_s > 0 for grant in grants):
            assert len({grant.local_steps for grant in grants}) == 1
            assert [grant.worker for grant in grants] == sorted(grant.worker for grant in grants)


def test_a_commit_counts_one_over_the_workers_that_began():
    paradigm = make(4, commits=3)
    assert paradigm.handle(PushInfo(1.0, 0))[0] == Apply((0,), (0.25,))
    paradigm.handle(Left(2.0, 3))
    assert paradigm.handle(PushInfo(3.0, 0))[0] == Apply((0,), (0.25,))


# ---- the search ----

EQUAL = [Worker(0.5), Worker(0.5), Worker(1.0)]


def concave(monkeypatch, paradigm, peak):
    monkeypatch.setattr(adsp, "reward", lambda *_: -((paradigm._search.next_to_evaluate - peak) ** 2))


@pytest.mark.parametrize("peak", [1, 3, 5])
def test_the_search_finds_the_peak_with_the_fewest_trials(monkeypatch, peak):
    paradigm = make(3)
    concave(monkeypatch, paradigm, peak)
    trace = play(paradigm, EQUAL, 600.0, loss=lambda now_s: 1.0)
    assert chosen(trace, "reward") == list(range(1, peak + 2))  # peak - 1 + 2 trials
    assert chosen(trace, "commits") == [peak]
    assert paradigm.commits == peak
    assert spread([(e, a) for e, a in trace if e.now_s > 450]) <= 2


def test_the_search_respects_interval_min_s(monkeypatch):
    paradigm = make(3, interval_min_s=16.0)  # 3 in a period
    concave(monkeypatch, paradigm, 99)
    trace = play(paradigm, EQUAL, 600.0, loss=lambda now_s: 1.0)
    assert chosen(trace, "reward") == [1, 2, 3]
    assert chosen(trace, "commits") == [3]


def test_in_a_trial_all_commit_equally_often_and_stop_soon_after_its_end():
    paradigm = make(3)
    workers = [Worker(0.5, push_s=0.25), Worker(2.0), Worker(1.0, pull_s=1.0)]
    trace = play(paradigm, workers, 190.0, loss=lambda now_s: 1 / (now_s + 1))
    ends = [i for i, (_, actions) in enumerate(trace) if any(isinstance(a, Decision) for a in actions)]
    begin, begin_s = 0, 0.0
    for c, end in enumerate(ends, 1):
        pushes = [event.worker for event, _ in trace[begin : end + 1]]
        for worker in range(3):
            assert c <= pushes.count(worker) <= c + 1
        assert begin_s + PERIOD_S <= trace[end][0].now_s <= begin_s + PERIOD_S + 5
        assert {grant.worker for grant in of(trace[end : end + 1], Grant)} == {0, 1, 2}
        begin, begin_s = end + 1, trace[end][0].now_s
    assert len(ends) == 2 + (begin_s > 150)


def test_the_points_of_a_trial_are_at_its_start_its_middle_and_its_end(monkeypatch):
    seen = []
    monkeypatch.setattr(adsp, "reward", lambda *args: seen.append(args) or float(len(seen)))
    paradigm = make(1, loss_target=0.25)
    for now_s, loss in [(60.0, 8.0), (91.0, 7.0), (119.0, NAN), (120.5, 6.0)]:
        actions = paradigm.handle(PushInfo(now_s, 0, loss=loss))
    first, second = seen
    # The first trial has no loss before its end; the next one begins with the loss known then.
    assert first == ([60.0], [8.0], 0.25)
    assert second == ([0.0, 31.0, 60.5], [8.0, 7.0, 6.0], 0.25)
    (row,) = [action for action in actions if isinstance(action, Decision)]
    assert (row.controller, row.worker, row.chosen) == ("reward", 0, 2.0)
    assert row.inputs == (2.0, 8.0, 7.0, 6.0)


def test_a_trial_without_a_push_before_its_end_has_no_reward():
    """The losses of returning workers, in any order, are not a curve of the trial."""
    for losses in ((2.2, 2.1, 2.0), (2.0, 2.1, 2.2)):
        paradigm = make(3)
        for worker, loss in enumerate(losses):
            actions = paradigm.handle(PushInfo(60.0 + 0.3 * worker, worker, loss=loss))
        (row,) = [action for action in actions if isinstance(action, Decision)]
        assert row.inputs[:2] == (-math.inf, pytest.approx(2.1))


def test_grants_of_a_trial_end_with_it():
    paradigm = make(2)
    assert paradigm.first(0).commit_s == 60.0
    assert commit_seconds(paradigm.handle(PushInfo(25.0, 0))) == {0: 35.0}
    (short,) = commit_seconds(paradigm.handle(PushInfo(59.999999999, 0))).values()
    assert 0 < short < 1e-3
    assert commit_seconds(paradigm.handle(PushInfo(60.0, 0, loss=1.0))) == {}
    assert commit_seconds(paradigm.handle(PushInfo(61.0, 1, loss=1.0))) == {0: 30.0, 1: 30.0}


def test_a_search_in_which_the_loss_falls_goes_up_and_one_without_losses_ends_at_once():
    paradigm = make(3)
    trace = play(paradigm, EQUAL, 600.0, loss=lambda now_s: 3 / (1 + now_s / 60))
    assert chosen(trace, "reward")[:2] == [1, 2]
    assert of(trace, Decision)[0].inputs[0] == -math.inf  # no worker pushes before its end
    assert 0 < of(trace, Decision)[1].inputs[0] < math.inf
    assert paradigm.commits >= 2
    paradigm = make(3)
    trace = play(paradigm, EQUAL, 900.0)
    assert chosen(trace, "reward") == chosen(trace, "commits") == [1]
    assert repr(of(trace, Decision)[0].inputs) == repr((-math.inf, NAN, NAN, NAN))


def test_periods_restart_after_a_search():
    paradigm = make(2)
    for now_s, worker in [(10.0, 0), (20.0, 0), (30.0, 0), (60.0, 0), (61.0, 1)]:
        actions = paradigm.handle(PushInfo(now_s, worker))
    assert chosen([(None, actions)], "commits") == [1]
    # Worker 0 has committed 4 times, worker 1 once: it must make up for 3.
    assert commit_seconds(actions) == {0: 60.0, 1: 15.0}
    paradigm.check()
    assert commit_seconds(paradigm.handle(PushInfo(119.0, 1))) == {1: 15.0}
    assert paradigm._target == 5
    paradigm.handle(PushInfo(121.0, 0))
    assert paradigm._target == 6


@pytest.mark.parametrize(("search_every_s", "searches"), [(1000.0, 2), (300.0, 5)])
def test_a_search_begins_so_long_after_the_last(search_every_s, searches):
    trace = play(make(2, search_every_s=search_every_s), [Worker(1.0)] * 2, 1500.0)
    ends_s = [event.now_s for event, actions in trace if chosen([(event, actions)], "commits")]
    # A barrier of at most a period, and a trial.
    assert len(ends_s) == searches
    assert all(search_every_s + 60 <= b - a <= search_every_s + 182 for a, b in pairwise(ends_s))


def test_a_search_is_forced_only_by_a_rise_of_loss_rise():
    for loss, searches in [(1.29, 1), (1.31, 2), (0.1, 1), (NAN, 1)]:
        paradigm = make(1, loss_rise=0.3)
        now_s = 0.0
        while paradigm._search is not None:  # two trials, of a loss that does not fall
            now_s += 60.0
            actions = paradigm.handle(PushInfo(now_s, 0, loss=1.0))
        assert chosen([(None, actions)], "commits") == [1]
        paradigm.handle(PushInfo(now_s + 60.0, 0, loss=1.0))
        paradigm.handle(PushInfo(now_s + 90.0, 0, loss=1.0))
        assert paradigm._search is None
        paradigm.handle(PushInfo(now_s + 119.0, 0, loss=loss))
        assert paradigm._search is None
        trace = [(None, paradigm.handle(PushInfo(now_s + 120.0, 0)))]
        assert (paradigm._search is not None) == (searches == 2)
        paradigm.check()
        assert commit_seconds(trace[0][1]) == {0: 60.0}


def test_a_rise_while_a_search_is_on_forces_none():
    paradigm = make(2)
    trace = play(paradigm, [Worker(1.0)] * 2, 900.0, loss=lambda now_s: 1.0 if now_s < 50 else 1.0 + now_s / 20)
    assert chosen(trace, "commits")[0] == 1
    rewards = chosen(trace, "reward")
    assert rewards == [1, 2] * (len(rewards) // 2)


def test_given_commits_disable_the_search():
    trace = play(make(2, commits=2, search_every_s=60.0), [Worker(1.0)] * 2, 900.0, lambda now_s: now_s**3)
    assert not of(trace, Decision)
    assert all(grant.held_s == 0 for grant in of(trace, Grant))


# ---- departures ----


def test_a_departure_opens_a_barrier_that_waited_for_it():
    paradigm = make(3)
    paradigm.handle(PushInfo(60.0, 0, loss=1.0))
    paradigm.handle(PushInfo(60.0, 2, loss=1.0))
    paradigm.check()
    actions = paradigm.handle(Left(70.0, 1))
    paradigm.check()
    assert [action.worker for action in actions if isinstance(action, Decision)] == [1]
    assert [(g.worker, g.held_s) for g in actions if isinstance(g, Grant)] == [(0, 10.0), (2, 10.0)]


def test_departures_in_a_trial_and_of_a_blocked_worker():
    paradigm = make(3)
    assert paradigm.handle(Left(10.0, 0)) == []
    paradigm.handle(PushInfo(60.0, 1, loss=1.0))
    assert paradigm.handle(Left(61.0, 1)) == []
    paradigm.check()
    assert commit_seconds(paradigm.handle(PushInfo(62.0, 2, loss=1.0))) == {2: 30.0}
    assert paradigm.handle(Left(63.0, 2)) == []
    paradigm.check()


@pytest.mark.parametrize("death_s", [30.0, 60.0, 61.0, 90.0, 200.0, 500.0])
def test_the_others_continue_whenever_workers_leave(death_s):
    deaths_s = [(death_s, 2), (death_s + 70.0, 0)]
    trace = play(make(3), UNEQUAL[:3], 900.0, lambda now_s: 1 / (now_s + 1), deaths_s)
    assert trace[-1][0].now_s > 830
    assert len(chosen(trace, "commits")) == 1


def test_a_worker_that_joins_counts_as_the_slowest_and_is_not_asked_to_catch_up():
    paradigm = make(3, commits=1)
    paradigm.handle(Left(0.0, 2))
    for now_s, worker in [(10.0, 0), (20.0, 1), (61.0, 0), (62.0, 1), (121.0, 0), (122.0, 1)]:
        paradigm.handle(PushInfo(now_s, worker, loss=1.0))
    (grant,) = paradigm.handle(Joined(130.0, 2))
    paradigm.check()
    assert (grant.iteration, grant.gap_iters, grant.commit_s) == (1, 0, PERIOD_S)
    assert math.isnan(paradigm._loss()), "it has not reported a loss"


def test_a_worker_that_joins_at_a_barrier_waits_for_it():
    paradigm = make(2)
    paradigm.handle(Left(0.0, 1))
    paradigm.handle(Joined(1.0, 1))
    assert paradigm.handle(Left(2.0, 1)) == []
    paradigm.handle(PushInfo(30.0, 0, loss=1.0))
    assert paradigm.handle(Joined(61.0, 1)) == []
    grants = commit_seconds(paradigm.handle(PushInfo(62.0, 0, loss=0.5)))
    assert grants.keys() == {0, 1}
    paradigm.check()


def test_one_worker_is_sequential():
    trace = play(make(1), [Worker(0.7)], 2000.0, loss=lambda now_s: 1 / (now_s + 1))
    assert {action.weights for action in of(trace, Apply)} == {(1.0,)}
    assert all(grant.held_s == 0 for grant in of(trace, Grant))
    assert len(of(trace, Grant)) == len(of(trace, Apply)) == len(trace)


def test_the_same_events_give_the_same_answers():
    first = play(make(4), UNEQUAL, 2500.0, loss=lambda now_s: 3 / (1 + now_s / 60))
    again = make(4)
    assert repr([again.handle(event) for event, _ in first]) == repr([actions for _, actions in first])


# ---- negative controls of check() ----


class BlocksTheFast(ADSP):
    def _pushed(self, event):
        actions = super()._pushed(event)
        if self._search is None and self._progress.lead(event.worker) > 2:
            self._block(event.worker)
            return actions[:1]
        return actions


class BlocksInATrial(ADSP):
    def _pushed(self, event):
        actions = super()._pushed(event)
        if self._search is not None and len(actions) == 2 and event.worker == 0:
            self._block(0)
            return actions[:1]
        return actions


class NeverReleases(ADSP):
    def _pass_barrier(self, worker):
        return []


@pytest.mark.parametrize(
    ("broken", "options", "message"),
    [
        (BlocksTheFast, {"commits": 3}, "blocked outside of a search"),
        (BlocksInATrial, {}, "blocked in a trial"),
        (NeverReleases, {}, "every active worker is blocked"),
        (NeverCounts, {"commits": 3}, "instead of"),
    ],
)
def test_check_sees(broken, options, message):
    schedule = fixed(1.0, 3.0, until_s=60.0)
    run(make(2, check_period_s=5.0, **options), schedule)
    with pytest.raises(AssertionError, match=message):
        run(make(2, broken, check_period_s=5.0, **options), schedule)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check_period_s": 0.0}, "check_period_s must be a finite number > 0, got 0.0"),
        ({"check_period_s": NAN}, "check_period_s .* got nan"),
        ({"check_period_s": math.inf}, "check_period_s .* got inf"),
        ({"check_period_s": True}, "check_period_s .* got True"),
        ({"interval_min_s": 0.0}, "interval_min_s must be a number > 0 and <= check_period_s = 60.0, got 0.0"),
        ({"interval_min_s": 61.0}, "interval_min_s .* got 61.0"),
        ({"interval_min_s": True}, "interval_min_s .* got True"),
        ({"rule": "code"}, "rule must be one of cumulative, released, got 'code'"),
        ({"commits": 0}, r"commits must be an integer from 1 to 6 \(intervals of 10.0 s\), or None, got 0"),
        ({"commits": 2.5}, "commits .* got 2.5"),
        ({"commits": True}, "commits .* got True"),
        ({"commits": 7}, "commits must be an integer from 1 to 6 .* got 7"),
        ({"search_every_s": 0.0}, "search_every_s must be a number > 0, got 0.0"),
        ({"search_every_s": True}, "search_every_s .* got True"),
        ({"loss_rise": -0.1}, "loss_rise must be a number > 0, got -0.1"),
        ({"loss_target": math.inf}, "loss_target must be a finite number or None, got inf"),
        ({"loss_target": True}, "loss_target .* got True"),
    ],
)
def test_values_that_are_not_allowed_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(3, **options)


def test_values_at_their_limits_are_allowed():
    options = {"check_period_s": 1e-3, "interval_min_s": 1e-3, "search_every_s": 1e-3}
    made = create("adsp", 2, **options, loss_target=-1.0)
    assert (type(made), made.first(0).commit_s) == (ADSP, 1e-3)
    assert type(create("adsp", 2, **options, loss="evaluation")) is EvaluatedADSP


# ---- evaluations of the servers' model ----


class Model:
    """Model whose loss falls as 1 / (x + 1); how fast x grows with time depends on the commits a period."""

    def __init__(self, speeds):
        self.speeds, self.x, self.now_s = speeds, 0.0, 0.0
        self.paradigm = make(3, EvaluatedADSP, loss_target=1 / (self.reached + 1))

    reached = 1000.0

    def __call__(self, now_s):
        search = self.paradigm._search
        commits = self.paradigm.commits if search is None else search.next_to_evaluate
        self.x, self.now_s = self.x + self.speeds[commits] * (now_s - self.now_s), now_s
        return 1 / (self.x + 1)


@pytest.mark.parametrize(
    ("speeds", "best"),
    [((1.0, 0.9), 1), ((1.0, 1.1, 1.0), 2), ((1.0, 1.1, 1.2, 1.3, 1.4, 1.5), 6), ((1.0, 1.1, 1.2, 1.19), 3)],
)
def test_k_l_evaluations_find_the_best_number_of_commits_even_if_it_is_one(speeds, best):
    """The rewards are those of the curve: one over the time from the start of the search to the target."""
    model = Model(dict(enumerate(speeds, 1)))
    trace = play(model.paradigm, EQUAL, 900.0, evaluate=model)
    tried = list(range(1, len(speeds) + 1))
    assert chosen(trace, "reward") == tried
    assert chosen(trace, "commits") == [best] == [model.paradigm.commits]
    x, now_s = 0.0, 0.0
    for c, row in zip(tried, of(trace, Decision), strict=False):
        then_s = now_s + (Model.reached - x) / speeds[c - 1]
        assert row.inputs[0] == pytest.approx(1 / then_s)
        assert row.inputs[1] == pytest.approx(1 / (x + 1))
        length_s = PERIOD_S * (2 if c == 1 else 1)
        x, now_s = x + speeds[c - 1] * length_s, now_s + length_s
        assert row.inputs[3] == pytest.approx(1 / (x + 1))


def test_l_a_later_trial_gains_nothing_by_its_later_start():
    """All numbers of commits are equally good, and so are the rewards; counted from each trial they rise."""
    model = Model(dict.fromkeys(range(1, 7), 1.0))
    trace = play(model.paradigm, EQUAL, 300.0, evaluate=model)
    assert [row.inputs[0] for row in of(trace, Decision)[:2]] == pytest.approx([1 / Model.reached] * 2)

    class FromEachTrial(EvaluatedADSP):
        _times_s = ADSP._times_s

    model = Model(dict.fromkeys(range(1, 7), 1.0))
    model.paradigm = make(3, FromEachTrial, loss_target=1 / (Model.reached + 1))
    trace = play(model.paradigm, EQUAL, 900.0, evaluate=model)
    assert chosen(trace, "commits") == [6]


def test_commits_alone_cannot_tell_that_one_is_the_best():
    """The same losses, with the commits: the trial of one commit has no reward."""
    trace = play(make(3, loss_target=1 / 1001), EQUAL, 600.0, loss=lambda now_s: 1 / (now_s + 1))
    assert of(trace, Decision)[0].inputs[0] == -math.inf
    assert chosen(trace, "commits")[0] > 1


@pytest.mark.parametrize("takes_s", [0.0, 3.0, 70.0])
def test_k_workers_wait_for_the_evaluation_at_the_end_of_a_trial(takes_s):
    """One that takes longer than half a trial delays the next one, and the workers."""
    trace = play(make(3, EvaluatedADSP), UNEQUAL[:3], 900.0, evaluate=lambda s: 2 / (s + 100), takes_s=takes_s)
    assert chosen(trace, "commits")
    for event, actions in trace:
        grants = [action for action in actions if isinstance(action, Grant)]
        if any(isinstance(action, Decision) for action in actions):
            assert isinstance(event, Evaluated) and len(grants) == 3
            assert all(grant.held_s >= takes_s - 1e-9 for grant in grants)
        else:
            assert all(grant.held_s == 0 for grant in grants)


def test_k_the_middle_is_the_model_once_half_of_the_commits_are_made():
    paradigm = make(2, EvaluatedADSP)
    paradigm.handle(Evaluated(0.0, 0, 8.0, 0, 0.0))
    for now_s, worker in ((60.0, 0), (61.0, 1)):
        assert not paradigm.wants_evaluation
        paradigm.handle(PushInfo(now_s, worker))
    assert paradigm.wants_evaluation
    assert paradigm.handle(Evaluated(61.5, 0, 9.0, 1, 60.5)) == []
    assert paradigm.wants_evaluation, "that was the model before"
    paradigm.handle(Evaluated(62.0, 0, 7.0, 2, 61.5))
    assert not paradigm.wants_evaluation
    paradigm.handle(PushInfo(120.0, 0))
    assert not paradigm.wants_evaluation
    assert not of([(None, paradigm.handle(PushInfo(121.0, 1)))], Grant)
    paradigm.check()
    assert paradigm.wants_evaluation
    row, *grants = paradigm.handle(Evaluated(125.0, 0, 6.0, 4, 122.0))
    assert row.inputs[1:] == (8.0, 7.0, 6.0)
    assert [(grant.worker, grant.held_s, grant.commit_s) for grant in grants] == [(0, 5.0, 30.0), (1, 4.0, 30.0)]
    # It was made at 121 s, whenever it was evaluated.
    assert row.inputs[0] == adsp.reward([0.0, 61.0, 121.0], [8.0, 7.0, 6.0], 4.0)


def test_n_the_middle_is_wanted_as_soon_as_the_start_is_known():
    paradigm = make(1, EvaluatedADSP)
    paradigm.handle(PushInfo(60.0, 0))
    assert paradigm._wanted == 0
    paradigm.handle(Evaluated(90.0, 0, 8.0, 0, 1.0))
    assert paradigm._wanted == 1
    paradigm.handle(PushInfo(120.0, 0))
    assert paradigm.handle(Evaluated(125.0, 0, 7.0, 1, 90.0)) == []
    paradigm.check()
    row, _ = paradigm.handle(Evaluated(130.0, 0, 6.0, 2, 125.0))
    assert row.inputs == (adsp.reward([1.0, 90.0, 120.0], [8.0, 7.0, 6.0], 4.0), 8.0, 7.0, 6.0)


def test_n_a_late_evaluation_in_the_middle_is_of_the_time_at_which_it_began():
    paradigm = make(1, EvaluatedADSP)
    paradigm.handle(Evaluated(0.0, 0, 8.0, 0, 0.0))
    paradigm.handle(PushInfo(60.0, 0))
    paradigm.handle(PushInfo(70.0, 0))
    paradigm.handle(PushInfo(80.0, 0))
    paradigm.handle(Evaluated(85.0, 0, 7.0, 2, 75.0))  # not of version 1, during which another one was running
    paradigm.handle(PushInfo(120.0, 0))
    row, _ = paradigm.handle(Evaluated(121.0, 0, 6.0, 4, 120.0))
    assert row.inputs[0] == adsp.reward([0.0, 75.0, 120.0], [8.0, 7.0, 6.0], 4.0)


@pytest.mark.parametrize(
    "wrong", [{"_wanted": None}, {"_wanted": 3}, {"_search": None, "_wanted": 2}], ids=["nothing", "later", "no search"]
)
def test_workers_must_not_all_wait_unless_an_evaluation_releases_them(wrong):
    """Both wait for that of version 2; it is the control."""
    paradigm = make(2, EvaluatedADSP)
    for event in (Evaluated(0.0, 0, 8.0, 0, 0.0), PushInfo(120.0, 0), PushInfo(121.0, 1)):
        paradigm.handle(event)
    paradigm.check()
    vars(paradigm).update(wrong)
    with pytest.raises(AssertionError, match="deadlock: every active worker is blocked"):
        paradigm.check()


def test_an_evaluation_without_a_loss_is_no_point():
    trace = play(make(3, EvaluatedADSP), EQUAL, 600.0, evaluate=lambda now_s: NAN)
    assert chosen(trace, "reward") == chosen(trace, "commits") == [1]
    assert repr(of(trace, Decision)[0].inputs) == repr((-math.inf, NAN, NAN, NAN))


@pytest.mark.parametrize("takes_s", [0.0, 3.0])
def test_k_a_middle_without_a_loss_is_evaluated_once(takes_s):
    """The model diverges after the start: its middle and its end are evaluated, and the trial has no reward."""
    evaluate = {"evaluate": lambda now_s: NAN if now_s else 8.0, "takes_s": takes_s}
    trace = play(make(3, EvaluatedADSP), EQUAL, 170.0, **evaluate)
    assert sum(isinstance(event, Evaluated) for event, _ in trace) == 3
    assert repr(of(trace, Decision)[0].inputs) == repr((-math.inf, 8.0, NAN, NAN))


def test_m_checks_evaluate_the_model_and_a_rise_begins_a_search():
    for loss, searches in ((1.29, False), (1.31, True)):
        paradigm, now_s = make(1, EvaluatedADSP, loss_rise=0.3), 0.0
        play(paradigm, [Worker(1.0)], 300.0, evaluate=lambda now_s: 1.0)
        assert paradigm._search is None and paradigm.commits == 1 and not paradigm.wants_evaluation
        now_s = paradigm._now_s + PERIOD_S
        paradigm.handle(PushInfo(now_s, 0, loss=5.0))
        assert paradigm.wants_evaluation and paradigm._search is None
        assert paradigm.handle(Evaluated(now_s + 1.0, 0, loss, paradigm._version, now_s)) == []
        assert (paradigm._search is not None) == searches
        assert bool(of([(None, paradigm.handle(PushInfo(now_s + 60.0, 0)))], Grant)) != searches
        assert paradigm.wants_evaluation
        paradigm.check()


@pytest.mark.parametrize("death_s", [30.0, 60.0, 61.0, 120.0, 121.5, 125.0, 200.0, 500.0])
@pytest.mark.parametrize("takes_s", [0.0, 3.0])
def test_the_others_continue_whenever_workers_leave_while_models_are_evaluated(death_s, takes_s):
    deaths_s = [(death_s, 2), (death_s + 70.0, 0)]
    evaluate = {"evaluate": lambda now_s: 1 / (now_s + 100), "takes_s": takes_s}
    trace = play(make(3, EvaluatedADSP), UNEQUAL[:3], 900.0, deaths_s=deaths_s, **evaluate)
    assert trace[-1][0].now_s > 830
    assert len(chosen(trace, "commits")) == 1


def test_the_option_chooses_between_the_two():
    options = {"check_period_s": 60.0, "interval_min_s": 10.0, "search_every_s": 1000.0}
    assert type(create("adsp", 2, **options)) is type(create("adsp", 2, **options, loss="commits")) is ADSP
    assert type(create("adsp", 2, **options, loss="evaluation")) is EvaluatedADSP
    with pytest.raises(ValueError, match="commits must be None where a search evaluates the model, got 2"):
        create("adsp", 2, **options, loss="evaluation", commits=2)


def test_its_workers_wait_during_a_search_only() -> None:
    assert AdspOptions().bound == "workers wait for each other during a search only"
    assert AdspOptions(commits=2).bound == "no worker waits for another"
