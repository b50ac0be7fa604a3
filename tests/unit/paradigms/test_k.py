"""The k family: who is in an update, how stale, and who waits; its limits BSP and ASP; its rates; k as the run goes."""

import heapq
import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsync.paradigms import Apply, Cancel, Collect, Decision, Drop, Grant, Left, Pushed, create
from hpcsync.paradigms.k import FirstK, KAsync, KBatchAsync, KBatchSync, KSync
from hpcsync.planning import adaptive_k
from hpcsync.planning.adaptive_k import INTERVAL, TIME_BETA, staleness_bound
from tests.unit.paradigms.schedule import PROPERTY, Schedule, fixed, run, schedules

NAMES = ("k-sync", "k-batch-sync", "k-async", "k-batch-async")
every_name = pytest.mark.parametrize("name", NAMES)


def script(paradigm, *steps):
    """The answers to pushes of these workers, one a second."""
    answers = []
    for now_s, worker in enumerate(steps, 1):
        answers.append(brief(paradigm.handle(Pushed(float(now_s), worker))))
        paradigm.check()
    return answers


def brief(actions):
    """Actions without the numbers of a grant."""
    return [("grant", action.worker) if isinstance(action, Grant) else action for action in actions]


# ---- the four, step by step ----


def test_k_sync_takes_the_first_k_workers_and_drops_the_late():
    assert script(create("k-sync", 3, k=2), 2, 0, 1, 1, 2) == [
        [],
        [Apply((0, 2)), ("grant", 0), ("grant", 2)],
        [Drop(1), ("grant", 1)],  # computed from version 0
        [],
        [Apply((1, 2)), ("grant", 1), ("grant", 2)],
    ]


def test_k_batch_sync_takes_the_first_k_from_whomever():
    assert script(create("k-batch-sync", 3, k=3), 2, 2, 0, 1, 2) == [
        [Collect(2), ("grant", 2)],
        [Collect(2), ("grant", 2)],
        [Apply((0,)), ("grant", 0)],
        [Drop(1), ("grant", 1)],
        [Drop(2), ("grant", 2)],
    ]


def test_k_async_takes_the_first_k_workers_whatever_they_computed_from():
    assert script(create("k-async", 3, k=2), 2, 0, 1, 0) == [
        [],
        [Apply((0, 2)), ("grant", 0), ("grant", 2)],
        [],
        [Apply((0, 1)), ("grant", 0), ("grant", 1)],
    ]


def test_k_batch_async_holds_nobody():
    assert script(create("k-batch-async", 3, k=2), 2, 2, 0, 1) == [
        [Collect(2), ("grant", 2)],
        [Apply((2,)), ("grant", 2)],
        [Collect(0), ("grant", 0)],
        [Apply((1,)), ("grant", 1)],
    ]


def test_who_computes_from_a_version_that_is_over_is_told_once():
    assert script(create("k-sync", 4, k=2, cancel="abort"), 3, 0, 3, 0, 1, 2) == [
        [],
        [Apply((0, 3)), ("grant", 0), ("grant", 3), Cancel(1), Cancel(2)],
        [],
        [Apply((0, 3)), ("grant", 0), ("grant", 3)],
        [Drop(1), ("grant", 1)],
        [Drop(2), ("grant", 2)],
    ]
    assert script(create("k-batch-sync", 3, k=2, cancel="abort"), 2, 2)[1] == [
        Apply((2,)),
        ("grant", 2),
        Cancel(0),
        Cancel(1),
    ]


def test_a_stale_contribution_weighs_less():
    assert script(create("k-batch-async", 2, k=2, staleness_weight="inverse"), *[0] * 6, 1, 0)[6:] == [
        [Collect(1, 1 / 3), ("grant", 1)],
        [Apply((0,)), ("grant", 0)],
    ]
    answers = script(create("k-async", 4, k=2, staleness_weight="inverse"), *[0, 1] * 2, 2, 0)
    assert answers[3][0] == Apply((0, 1))
    assert answers[5][0] == Apply((0, 2), (1.0, 0.5))


def test_a_contribution_beyond_the_bound_is_dropped_and_its_worker_reads_anew():
    paradigm = create("k-batch-async", 2, k=1, staleness_max=2)
    assert script(paradigm, 0, 0, 0, 1, 1)[3:] == [[Drop(1), ("grant", 1)], [Apply((1,)), ("grant", 1)]]
    paradigm = create("k-async", 2, k=1, staleness_max=None)  # 2P/k = 4
    assert script(paradigm, 0, 0, 0, 0, 1)[4] == [Apply((1,)), ("grant", 1)]
    paradigm = create("k-async", 2, k=1, staleness_max=None)
    assert script(paradigm, 0, 0, 0, 0, 0, 1)[5] == [Drop(1), ("grant", 1)]


# ---- departures ----


@pytest.mark.parametrize("name", ["k-sync", "k-async"])
def test_a_departure_completes_a_round_that_nobody_else_can_complete(name):
    paradigm = create(name, 3, k=3)
    script(paradigm, 2, 0)
    assert brief(paradigm.handle(Left(5.0, 1))) == [Apply((0, 2)), ("grant", 0), ("grant", 2)]
    paradigm = create(name, 3, k=2)
    script(paradigm, 2)
    assert paradigm.handle(Left(5.0, 1)) == []  # worker 0 can
    assert brief(paradigm.handle(Left(6.0, 0))) == [Apply((2,)), ("grant", 2)]


@pytest.mark.parametrize("name", ["k-sync", "k-async"])
def test_what_a_worker_pushed_before_it_left_stays_in_its_round(name):
    paradigm = create(name, 3, k=2)
    script(paradigm, 2)
    assert paradigm.handle(Left(2.0, 2)) == []
    assert brief(paradigm.handle(Pushed(3.0, 0))) == [Apply((0, 2)), ("grant", 0)]


@pytest.mark.parametrize("name", ["k-batch-sync", "k-batch-async"])
def test_one_worker_can_fill_a_round_of_mini_batches_and_the_last_departure_ends_it(name):
    paradigm = create(name, 3, k=3)
    script(paradigm, 2, 0)
    assert paradigm.handle(Left(3.0, 1)) == []
    assert paradigm.handle(Left(3.0, 2)) == []
    assert brief(paradigm.handle(Pushed(4.0, 0))) == [Apply((0,)), ("grant", 0)]
    assert brief(paradigm.handle(Pushed(5.0, 0))) == [Collect(0), ("grant", 0)]
    assert paradigm.handle(Left(6.0, 0)) == [Apply(())]


# ---- any schedule: a recount from the actions alone ----


@dataclass
class Account:
    """What became of every push, recounted.

    updates: of each, its contributions as (worker, staleness, weight), in the order in which they were taken.
    """

    n_workers: int
    updates: list[list[tuple[int, int, float]]] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)  # (worker, staleness)
    told: Counter = field(default_factory=Counter)  # (worker, version): how often it was told that it is over

    def __post_init__(self):
        self.read = [0] * self.n_workers
        self.staleness = [0] * self.n_workers  # of the contribution in the slot
        self.round = []

    def see(self, event, actions):
        version = len(self.updates)
        if isinstance(event, Pushed):
            self.staleness[event.worker] = version - self.read[event.worker]
        for action in actions:
            match action:
                case Collect(worker, weight):
                    self.round.append((worker, self.staleness[worker], weight))
                case Apply(workers, weights):
                    weights = weights or (1.0,) * len(workers)
                    for worker, weight in zip(workers, weights, strict=True):
                        self.round.append((worker, self.staleness[worker], weight))
                    self.updates.append(self.round)
                    self.round = []
                case Drop(worker):
                    self.dropped.append((worker, self.staleness[worker]))
                case Cancel(worker):
                    self.told[worker, self.read[worker]] += 1
                case Grant(worker):
                    self.read[worker] = len(self.updates)


def account(paradigm, schedule):
    account = Account(schedule.n_workers)
    for event, actions in run(paradigm, schedule).trace:
        account.see(event, actions)
    return account


def check_contributions(paradigm, schedule, *, synchronous, distinct, bound=math.inf):
    """Every push is in one update or dropped, and is neither without reason; every update has its k."""
    k, seen = paradigm.k, account(paradigm, schedule)
    taken = list(itertools.chain(*seen.updates))
    bound = 0 if synchronous else bound
    for update in seen.updates:
        assert 1 <= len(update) <= k, f"{len(update)} contributions, and k is {k}"
        if distinct:
            workers = [worker for worker, _, _ in update]
            assert workers == sorted(set(workers)), f"contributors are {workers}"
    assert all(staleness <= bound for _, staleness, _ in taken), "a stale contribution is applied"
    assert all(staleness > bound for _, staleness in seen.dropped), "a contribution is dropped without reason"
    pushes = sum(map(len, schedule.intervals_s))
    if not schedule.deaths_s:
        assert len(taken) + len(seen.dropped) == pushes, "a contribution is lost"
        shortest = min(map(len, schedule.intervals_s))
        everybody = seen.updates[: max(0, shortest - 1) * (schedule.n_workers // k)] if distinct else seen.updates[:-1]
        assert all(len(update) == k for update in everybody[:shortest]), "an update is made of fewer than k"


@every_name
@PROPERTY
@given(schedule=schedules(), data=st.data())
def test_every_push_is_in_one_update_or_dropped_for_its_staleness(name, schedule, data):
    k = data.draw(st.integers(1, schedule.n_workers))
    forms = {"synchronous": not name.endswith("async"), "distinct": "batch" not in name}
    if name.endswith("async"):
        bound = data.draw(st.sampled_from([0, 1, 3, math.inf]))
        check_contributions(create(name, schedule.n_workers, k=k, staleness_max=bound), schedule, bound=bound, **forms)
    else:
        cancel = data.draw(st.sampled_from(["drop", "abort"]))
        check_contributions(create(name, schedule.n_workers, k=k, cancel=cancel), schedule, **forms)


class TakesTheLate(KSync):
    def _accepted_staleness(self):
        return math.inf


class TakesWorkersTwice(KAsync):
    distinct = False


class DropsTheStale(KBatchAsync):
    def _accepted_staleness(self):
        return 1


class LosesCollected(KBatchAsync):
    def _pushed(self, event):
        return [action for action in super()._pushed(event) if not isinstance(action, Collect)]


class TakesMore(KAsync):
    """A round goes on until one more is there."""

    def _end_round_if_complete(self, worker):
        self.k += 1
        actions = super()._end_round_if_complete(worker)
        self.k -= 1
        return actions

    def check(self):
        pass


class TakesFewer(KAsync):
    def _end_round_if_complete(self, worker):
        self.k -= 1
        actions = super()._end_round_if_complete(worker)
        self.k += 1
        return actions


MIXED = Schedule([[1.0] * 12, [1.3] * 12, [3.1] * 12, [1.1] * 12])


@pytest.mark.parametrize(
    ("broken", "forms", "message"),
    [
        (TakesTheLate(4, k=2), {"synchronous": True, "distinct": True}, "a stale contribution"),
        (TakesWorkersTwice(4, k=3), {"synchronous": False, "distinct": True}, "contributors are"),
        (DropsTheStale(4, k=1), {"synchronous": False, "distinct": False}, "dropped without reason"),
        (LosesCollected(4, k=2), {"synchronous": False, "distinct": False}, "not one contribution|before its own"),
        (TakesMore(4, k=2), {"synchronous": False, "distinct": True}, "3 contributions, and k is 2"),
        (TakesFewer(4, k=3), {"synchronous": False, "distinct": True}, "fewer than k"),
    ],
)
def test_the_recount_sees(broken, forms, message):
    with pytest.raises(AssertionError, match=message):
        check_contributions(broken, MIXED, **forms)


def check_telling(paradigm, schedule):
    """After every update those who compute from an older version have been told once, and nobody else."""
    seen, running = Account(schedule.n_workers), set(range(schedule.n_workers))
    for event, actions in run(paradigm, schedule).trace:
        seen.see(event, actions)
        running = (running - {event.worker}) | {a.worker for a in actions if isinstance(a, Grant)}
        for worker in running:
            expected = seen.read[worker] < len(seen.updates)
            assert seen.told[worker, seen.read[worker]] == expected, f"worker {worker} after {event}"
    assert seen.told.total() <= len(seen.dropped) + len(schedule.deaths_s) + schedule.n_workers


@pytest.mark.parametrize("name", ["k-sync", "k-batch-sync"])
@PROPERTY
@given(schedule=schedules(), data=st.data())
def test_everybody_who_computes_for_nothing_is_told_once(name, schedule, data):
    k = data.draw(st.integers(1, schedule.n_workers))
    check_telling(create(name, schedule.n_workers, k=k, cancel="abort"), schedule)


class TellsAgain(KSync):
    def _end_round_if_complete(self, worker):
        before = set(self._up_to_date)
        actions = super()._end_round_if_complete(worker)
        self._up_to_date |= before & self._progress.active
        return actions

    def check(self):
        pass


@pytest.mark.parametrize("broken", [TellsAgain(4, k=2, cancel="abort"), KSync(4, k=2, cancel="drop")])
def test_telling_twice_or_not_at_all_is_seen(broken):
    with pytest.raises(AssertionError, match="worker [0-3] after"):
        check_telling(broken, MIXED)


# ---- the limits ----

AS_BSP = {
    "k-sync": ("k-sync", {}),
    "k-sync-abort": ("k-sync", {"cancel": "abort"}),
    "k-async": ("k-async", {}),
    "k-async-weighted": ("k-async", {"staleness_weight": "inverse", "staleness_max": None}),
}


@pytest.mark.parametrize("which", AS_BSP)
@PROPERTY
@given(schedule=schedules())
def test_all_workers_are_bsp(which, schedule):
    (name, options), n_workers = AS_BSP[which], schedule.n_workers
    paradigm = create(name, n_workers, k=n_workers, **options)
    assert run(paradigm, schedule, bound_iters=0).trace == run(create("bsp", n_workers), schedule).trace


@pytest.mark.parametrize("name", ["k-async", "k-batch-async"])
@PROPERTY
@given(schedule=schedules())
def test_one_at_a_time_is_asp(name, schedule):
    n_workers = schedule.n_workers
    assert run(create(name, n_workers, k=1), schedule).trace == run(create("asp", n_workers), schedule).trace


@pytest.mark.parametrize(
    ("name", "k", "other"),
    [
        ("k-sync", 3, "bsp"),
        ("k-async", 3, "bsp"),
        ("k-batch-sync", 4, "bsp"),  # a fast worker contributes twice
        ("k-batch-async", 4, "bsp"),
        ("k-async", 2, "asp"),
        ("k-batch-async", 2, "asp"),
        ("k-sync", 1, "asp"),  # the late are dropped
    ],
)
def test_others_are_neither(name, k, other):
    assert run(create(name, 4, k=k), MIXED).trace != run(create(other, 4), MIXED).trace


# ---- rates and staleness of equal workers: closed forms ----

N = 8


def simulate(paradigm, seconds, updates):
    """Seconds of each update, and the account. Who is told to stop does so at once."""
    account, ended_s = Account(N), [0.0]
    due = [(seconds(), worker) for worker in range(N)]
    heapq.heapify(due)
    while len(account.updates) < updates:
        now_s, worker = heapq.heappop(due)
        event = Pushed(now_s, worker)
        actions = paradigm.handle(event)
        account.see(event, actions)
        ended_s += [now_s for action in actions if isinstance(action, Apply)]
        stopped = {action.worker for action in actions if isinstance(action, Cancel)}
        if stopped:
            due = [(now_s if other in stopped else due_s, other) for due_s, other in due]
            heapq.heapify(due)
        for action in actions:
            if isinstance(action, Grant):
                heapq.heappush(due, (now_s + seconds(), action.worker))
    times_s = [after_s - before_s for before_s, after_s in itertools.pairwise(ended_s)]
    return times_s, account


def mean_staleness(account):
    """Of each update."""
    return [fmean(staleness for _, staleness, _ in update) for update in account.updates]


def standard_errors_off(samples, expected, blocks=40):
    """By blocks, since neighbouring updates depend on each other; the first block is left out."""
    size = len(samples) // blocks
    means = [fmean(samples[i * size : (i + 1) * size]) for i in range(1, blocks)]
    return abs(fmean(means) - expected) / max(stdev(means) / math.sqrt(len(means)), 1e-9)


def exponential(seed):
    generator = random.Random(seed)
    return lambda: generator.expovariate(1.0)


def order_statistic_s(k):
    return sum(1 / i for i in range(N - k + 1, N + 1))


def linear_s(k):
    return k / N


UPDATE_S = {
    "k-sync": order_statistic_s,
    "k-async": order_statistic_s,
    "k-batch-sync": linear_s,
    "k-batch-async": linear_s,
}
ABORT = {"k-sync": {"cancel": "abort"}, "k-batch-sync": {"cancel": "abort"}}


def test_the_closed_forms_are_those_of_the_paper():
    assert [order_statistic_s(k) for k in (1, 2, 4, 8)] == pytest.approx([0.125, 0.2679, 0.6345, 2.7179], abs=5e-5)
    assert [linear_s(k) for k in (1, 2, 4, 8)] == [0.125, 0.25, 0.5, 1.0]


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@every_name
def test_updates_of_exponential_workers_take_what_they_should(name, k):
    times_s, _ = simulate(create(name, N, k=k, **ABORT.get(name, {})), exponential(seed=k), updates=2000)
    assert standard_errors_off(times_s, UPDATE_S[name](k)) < 3


@pytest.mark.parametrize(
    ("name", "options", "seconds"),
    [
        ("k-sync", {}, order_statistic_s),  # the late finish first
        ("k-batch-async", {}, order_statistic_s),  # nobody waits
        ("k-async", {}, linear_s),
    ],
)
def test_updates_of_another_form_do_not(name, options, seconds):
    times_s, _ = simulate(create(name, N, k=4, **options), exponential(seed=4), updates=2000)
    assert standard_errors_off(times_s, seconds(4)) > 6


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize(("name", "others"), [("k-async", lambda k: N - k), ("k-batch-async", lambda k: N - 1)])
def test_mean_staleness_of_equal_workers(name, others, k):
    generator = random.Random(k)
    for seconds in (exponential(seed=k), lambda: 1 + generator.uniform(-0.2, 0.2)):
        staleness = mean_staleness(simulate(create(name, N, k=k), seconds, updates=2000)[1])
        # Of constant workers the mean hardly varies, and what is left at the end counts.
        off = abs(fmean(staleness) - others(k) / k)
        assert off < 0.01 or standard_errors_off(staleness, others(k) / k) < 3


def test_mean_staleness_of_another_form_is_another():
    _, account = simulate(TakesWorkersTwice(N, k=4), exponential(seed=4), updates=2000)
    assert standard_errors_off(mean_staleness(account), (N - 4) / 4) > 6


@pytest.mark.parametrize("k", range(1, N + 1))
@every_name
def test_equal_workers_are_never_beyond_the_bound_of_the_stuck(name, k):
    """Any whose iterations take less than twice as long as any other's."""
    generator = random.Random(k)
    for seconds in (lambda: 1.0, lambda: generator.choice([1.0, 1.99]), lambda: generator.uniform(1.0, 1.99)):
        assert largest_staleness(simulate(create(name, N, k=k), seconds, updates=200)[1]) <= staleness_bound(N, k)


def largest_staleness(account):
    """Of what was pushed, applied or dropped."""
    applied = (staleness for update in account.updates for _, staleness, _ in update)
    return max(itertools.chain(applied, (staleness for _, staleness in account.dropped)))


@pytest.mark.parametrize(("name", "k"), [("k-async", 2), ("k-batch-async", 4)])
def test_a_worker_that_takes_three_times_as_long_is_beyond_it(name, k):
    seen = account(create(name, N, k=k), Schedule([[1.0] * 40] * (N - 1) + [[3.4] * 10]))
    assert largest_staleness(seen) > staleness_bound(N, k)


# ---- k as the run goes ----


def k_history(referee, k_start):
    """k of each update, from the decisions; asserts what holds for all of them."""
    ks, k, changed = [], k_start, -INTERVAL
    for _, actions in referee.trace:
        for i, action in enumerate(actions):
            if isinstance(action, Apply):
                ks.append(k)
            elif isinstance(action, Decision):
                assert isinstance(actions[i - 1], Apply), "k changes within a round"
                inputs = dict(zip(adaptive_k.KController.decision_fields, action.inputs, strict=True))
                assert (inputs["version"], inputs["k_before"]) == (len(ks), k), f"{action} after {len(ks)} updates"
                assert abs(action.chosen - k) == 1, f"{action}: k was {k}"
                assert len(ks) - changed >= INTERVAL, f"{action}: the last was after {changed} updates"
                k, changed = int(action.chosen), len(ks)
    return ks


@every_name
def test_a_straggler_is_not_waited_for_while_it_is_slow(name):
    # Worker 3 takes three times as long in the middle third of its time.
    slow = [1.0] * 60 + [3.0] * 60 + [1.0] * 100
    schedule = Schedule([[1.01] * 300, [0.99] * 300, [1.02] * 300, slow], dict.fromkeys(range(4), 299.0))
    paradigm = create(name, 4, k="state")
    referee = run(paradigm, schedule)
    ks = k_history(referee, k_start=4)
    changes = [decision["chosen"] for decision in referee.decisions()]
    assert changes == [3.0, 4.0]
    assert (ks[0], min(ks), ks[-1]) == (4, 3, 4)
    down, up = (event.now_s for event, actions in referee.trace for a in actions if isinstance(a, Decision))
    assert 60 < down < 60 + 3 * (1 / TIME_BETA + INTERVAL)
    assert 240 < up < 240 + 1.5 * (1 / TIME_BETA + INTERVAL)


@pytest.mark.parametrize("policy", adaptive_k.POLICIES)
@every_name
def test_every_update_has_the_k_that_holds(name, policy):
    paradigm = create(name, 4, k=policy)
    k_start = paradigm.k
    schedule = fixed(1.0, 1.1, 1.2, 2.5, until_s=200.0)
    referee = run(paradigm, schedule)
    seen = Account(4)
    for event, actions in referee.trace:
        seen.see(event, actions)
    assert [len(update) for update in seen.updates][:-4] == k_history(referee, k_start)[:-4]
    assert {decision.controller for decision in referee.actions(Decision)} <= {"k"}
    assert referee.decisions() or (policy, paradigm.k) == ("state", 4)


class ForgetsToSay(KAsync):
    def _choose_k(self, worker):
        super()._choose_k(worker)
        return []


def test_a_change_without_a_decision_is_seen():
    schedule = fixed(1.0, 1.1, 1.2, 2.5, until_s=200.0)
    seen = account(ForgetsToSay(4, k="loss"), schedule)
    assert [len(update) for update in seen.updates][:-4] != k_history(run(ForgetsToSay(4, k="loss"), schedule), 1)[:-4]


@pytest.mark.parametrize("name", NAMES)
def test_k_grows_as_the_loss_falls(name):
    # The schedule's losses are 1 / iteration.
    ks = k_history(run(create(name, 4, k="loss"), fixed(1.0, 1.1, 1.2, 1.3, until_s=400.0)), k_start=1)
    assert ks == sorted(ks)
    assert ks[-1] > 2


def test_a_k_that_falls_is_seen():
    class Restless(KAsync):
        def _choose_k(self, worker):
            self._controller.k = 3 if self.k == 4 else 4
            self.k = self._controller.k
            return [Decision("k", worker, float(self.k), (float(self._version), 7.0 - self.k) + (0.0,) * 7)]

    with pytest.raises(AssertionError, match="the last was after 1 updates"):
        k_history(run(Restless(4, k="state"), fixed(1.0, 1.1, 1.2, 1.3, until_s=40.0)), k_start=4)


def test_without_losses_k_stays():
    paradigm = create("k-async", 2, k="loss", k_start=2)
    for now_s in range(200):
        paradigm.handle(Pushed(float(now_s), now_s % 2))
    assert paradigm.k == 2


# ---- options ----


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("k-sync", {"k": 0}, "k is 0; a whole number from 1"),
        ("k-sync", {"k": True}, "k is True"),
        ("k-sync", {"k": 2.0}, "k is 2.0"),
        ("k-sync", {"k": "fast"}, "k is 'fast'; a whole number or one of state, loss, min"),
        ("k-async", {"k": 5}, "k is 5, more than the 4 workers"),
        ("k-async", {"k": 2, "k_min": 2}, "k is 2 all the time; k_min and k_start need one of"),
        ("k-async", {"k": 2, "k_start": 2}, "k is 2 all the time"),
        ("k-async", {"k": "min", "k_min": 5}, "k_min is 5; a whole number from 1 to the 4 workers"),
        ("k-async", {"k": "min", "k_min": 2, "k_start": 1}, "k_start is 1; a whole number from k_min, 2, to 4"),
        ("k-sync", {"k": 2, "cancel": "never"}, "cancel is 'never'; one of drop, abort"),
        ("k-async", {"k": 2, "staleness_max": -1}, "staleness_max is -1; a number from 0 on, inf or None"),
        ("k-async", {"k": 2, "staleness_max": math.nan}, "staleness_max is nan"),
        ("k-async", {"k": 2, "staleness_max": "none"}, "staleness_max is none"),
        ("k-batch-async", {"k": 2, "staleness_weight": "linear"}, "staleness_weight is 'linear'; one of none, inverse"),
    ],
)
def test_values_that_are_not_allowed_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        create(name, 4, **options)


def test_decision_fields_are_those_of_the_controller():
    assert create("k-sync", 4, k="state").decision_fields == adaptive_k.KController.decision_fields
    assert create("k-sync", 4, k=3).decision_fields == ()


# ---- check() ----


def k_is_too_large(paradigm):
    paradigm.k = 9


def the_round_is_complete(paradigm):
    paradigm.k = 1


def a_contribution_is_collected(paradigm):
    paradigm._collected += 1


def a_contribution_is_forgotten(paradigm):
    paradigm._waiting.clear()


def a_contribution_is_late(paradigm):
    paradigm._read[0] -= 1


def somebody_is_not_up_to_date(paradigm):
    paradigm._up_to_date.remove(1)


def everybody_waits(paradigm):
    for worker in (1, 2, 3):
        paradigm._hold(worker)


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (k_is_too_large, "k is 9"),
        (the_round_is_complete, "1 contributions wait, and k is 1"),
        (a_contribution_is_collected, "1 contributions have been collected"),
        (a_contribution_is_forgotten, "not those that wait for the update"),
        (a_contribution_is_late, "worker 0 waits with a staleness of 1"),
        (somebody_is_not_up_to_date, "not those who compute from the current version"),
        (everybody_waits, "everybody|every active worker is held"),
    ],
)
def test_check_sees_an_inconsistent_state(tamper, message):
    paradigm = create("k-sync", 4, k=3)
    paradigm.handle(Pushed(1.0, 0))
    paradigm.check()
    tamper(paradigm)
    with pytest.raises(AssertionError, match=message):
        paradigm.check()


class HoldsMiniBatches(KBatchSync):
    def _pushed(self, event):
        self._hold(event.worker)
        return []


class WaitsForMoreThanThereAre(FirstK):
    name = "k-sync"

    def _end_round_if_complete(self, worker):
        return []


@pytest.mark.parametrize(
    ("broken", "message"),
    [(HoldsMiniBatches(4, k=2), r"workers \[0\] wait"), (WaitsForMoreThanThereAre(4, k=4), "every active worker")],
)
def test_check_sees(broken, message):
    with pytest.raises(AssertionError, match=message):
        run(broken, MIXED)
