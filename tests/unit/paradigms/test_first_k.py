"""The k family: contributors, staleness and blocking, and the limits BSP and ASP."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsync.paradigms import create
from hpcsync.paradigms.events import Accumulate, Apply, Cancel, Drop, Grant, Joined, Left, PushInfo
from hpcsync.paradigms.first_k import FirstK, KAsync, KBatchAsync, KBatchSync, KSync
from hpcsync.planning.k_controller import KController
from tests.unit.paradigms.k_account import Account, recount
from tests.unit.paradigms.schedule import PROPERTY, Schedule, run, schedules

every_name = pytest.mark.parametrize("name", ["k-sync", "k-batch-sync", "k-async", "k-batch-async"])


def script(paradigm, *steps):
    """Return the answers to pushes of these workers, one second apart."""
    answers = []
    for now_s, worker in enumerate(steps, 1):
        answers.append(brief(paradigm.handle(PushInfo(float(now_s), worker))))
        paradigm.check()
    return answers


def brief(actions):
    """Return the actions without the numbers of a grant."""
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


def test_k_batch_sync_takes_the_first_k_of_any_workers():
    assert script(create("k-batch-sync", 3, k=3), 2, 2, 0, 1, 2) == [
        [Accumulate(2), ("grant", 2)],
        [Accumulate(2), ("grant", 2)],
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


def test_k_batch_async_blocks_no_worker():
    assert script(create("k-batch-async", 3, k=2), 2, 2, 0, 1) == [
        [Accumulate(2), ("grant", 2)],
        [Apply((2,)), ("grant", 2)],
        [Accumulate(0), ("grant", 0)],
        [Apply((1,)), ("grant", 1)],
    ]


def test_a_worker_that_computes_from_an_old_version_is_cancelled_once():
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


def test_a_worker_that_has_left_is_not_cancelled():
    paradigm = create("k-sync", 3, k=1, cancel="abort")
    paradigm.handle(Left(1.0, 2))
    paradigm.check()
    assert [action.worker for action in paradigm.handle(PushInfo(2.0, 0)) if isinstance(action, Cancel)] == [1]


def test_a_stale_contribution_weighs_less():
    assert script(create("k-batch-async", 2, k=2, staleness_weight="inverse"), *[0] * 6, 1, 0)[6:] == [
        [Accumulate(1, 1 / 3), ("grant", 1)],
        [Apply((0,)), ("grant", 0)],
    ]
    answers = script(create("k-async", 4, k=2, staleness_weight="inverse"), *[0, 1] * 2, 2, 0)
    assert answers[3][0] == Apply((0, 1))
    assert answers[5][0] == Apply((0, 2), (1.0, 0.5))


def test_a_contribution_beyond_the_bound_is_dropped_and_its_worker_reads_again():
    paradigm = create("k-batch-async", 2, k=1, staleness_max=2)
    assert script(paradigm, 0, 0, 0, 1, 1)[3:] == [[Drop(1), ("grant", 1)], [Apply((1,)), ("grant", 1)]]
    paradigm = create("k-async", 2, k=1, staleness_max=None)  # 2P/k = 4
    assert script(paradigm, 0, 0, 0, 0, 1)[4] == [Apply((1,)), ("grant", 1)]
    paradigm = create("k-async", 2, k=1, staleness_max=None)
    assert script(paradigm, 0, 0, 0, 0, 0, 1)[5] == [Drop(1), ("grant", 1)]


# ---- departures ----


@pytest.mark.parametrize("name", ["k-sync", "k-async"])
def test_a_departure_completes_a_round_that_no_other_worker_can_complete(name):
    paradigm = create(name, 3, k=3)
    script(paradigm, 2, 0)
    assert brief(paradigm.handle(Left(5.0, 1))) == [Apply((0, 2)), ("grant", 0), ("grant", 2)]
    paradigm = create(name, 3, k=2)
    script(paradigm, 2)
    assert paradigm.handle(Left(5.0, 1)) == []  # worker 0 can complete it
    assert brief(paradigm.handle(Left(6.0, 0))) == [Apply((2,)), ("grant", 2)]


@pytest.mark.parametrize("name", ["k-sync", "k-async"])
def test_a_push_before_a_departure_stays_in_its_round(name):
    paradigm = create(name, 3, k=2)
    script(paradigm, 2)
    assert paradigm.handle(Left(2.0, 2)) == []
    paradigm.check()
    assert brief(paradigm.handle(PushInfo(3.0, 0))) == [Apply((0, 2)), ("grant", 0)]


def test_g_a_worker_that_joins_reads_the_current_version_or_blocks_with_its_earlier_push():
    paradigm = create("k-sync", 3, k=2)
    paradigm.handle(Left(0.0, 0))
    script(paradigm, 2, 1)  # version 1
    assert brief(paradigm.handle(Joined(2.0, 0))) == [("grant", 0)]
    assert brief(paradigm.handle(PushInfo(3.0, 0))) == [], "it counts"
    paradigm.handle(Left(4.0, 0))
    assert paradigm.handle(Joined(5.0, 0)) == []
    assert brief(paradigm.handle(PushInfo(6.0, 1))) == [Apply((0, 1)), ("grant", 0), ("grant", 1)]


@pytest.mark.parametrize("name", ["k-batch-sync", "k-batch-async"])
def test_one_worker_can_fill_a_round_of_mini_batches_and_leave_one_that_is_not_full(name):
    paradigm = create(name, 3, k=3)
    script(paradigm, 2, 0)
    assert paradigm.handle(Left(3.0, 1)) == []
    assert paradigm.handle(Left(3.0, 2)) == []
    assert brief(paradigm.handle(PushInfo(4.0, 0))) == [Apply((0,)), ("grant", 0)]
    assert brief(paradigm.handle(PushInfo(5.0, 0))) == [Accumulate(0), ("grant", 0)]
    assert paradigm.handle(Left(6.0, 0)) == []


# ---- any schedule: a recount from the actions alone ----


def check_contributions(paradigm, schedule, *, synchronous, distinct, bound=math.inf):
    """Assert that every push is in one update or dropped for a reason, and that every update has k contributions."""
    k, seen = paradigm.k, recount(run(paradigm, schedule))
    taken = list(itertools.chain(*seen.updates))
    bound = 0 if synchronous else bound
    for update, left in zip(seen.updates, seen.left, strict=True):
        assert (1 if distinct and left else k) <= len(update) <= k, f"{len(update)} contributions, and k is {k}"
        if distinct:
            workers = [worker for worker, _, _ in update]
            assert workers == sorted(set(workers)), f"contributors are {workers}"
    assert all(staleness <= bound for _, staleness, _ in taken), "a stale contribution is applied"
    assert all(staleness > bound for _, staleness in seen.dropped), "a contribution is dropped without reason"
    n_waiting = sum(map(len, schedule.intervals_s)) - len(taken) - len(seen.dropped)
    assert schedule.deaths_s or schedule.changes or 0 <= n_waiting < (1 if distinct else k), "one is lost"


@every_name
@PROPERTY
@given(schedule=schedules(max_changes=6), data=st.data())
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
        return [action for action in super()._pushed(event) if not isinstance(action, Accumulate)]


class TakesMore(KAsync):
    """A round ends one contribution late."""

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


MIXED = Schedule([[1.0] * 12, [1.3] * 12, [3.1] * 12, [1.1] * 13])


@pytest.mark.parametrize(
    ("broken", "forms", "message"),
    [
        (TakesTheLate(4, k=2), {"synchronous": True, "distinct": True}, "a stale contribution"),
        (TakesWorkersTwice(4, k=3), {"synchronous": False, "distinct": True}, "contributors are"),
        (DropsTheStale(4, k=1), {"synchronous": False, "distinct": False}, "dropped without reason"),
        (LosesCollected(4, k=2), {"synchronous": False, "distinct": False}, "not one contribution|before its own"),
        (TakesMore(4, k=2), {"synchronous": False, "distinct": True}, "3 contributions, and k is 2"),
        (TakesFewer(4, k=3), {"synchronous": False, "distinct": True}, "2 contributions, and k is 3"),
    ],
)
def test_the_recount_sees(broken, forms, message):
    with pytest.raises(AssertionError, match=message):
        check_contributions(broken, MIXED, **forms)


def check_telling(paradigm, schedule):
    """Assert that after every update exactly the workers computing from an older version have been cancelled, once."""
    seen, running = Account(schedule.n_workers), set(range(schedule.n_workers))
    for event, actions in run(paradigm, schedule).trace:
        seen.see(event, actions)
        running = (running - {event.worker}) | {a.worker for a in actions if isinstance(a, Grant)}
        for worker in running:
            expected = seen.read[worker] < len(seen.updates)
            assert seen.cancelled[worker, seen.read[worker]] == expected, f"worker {worker} after {event}"
    assert seen.cancelled.total() <= len(seen.dropped) + seen.departures + schedule.n_workers


@pytest.mark.parametrize("name", ["k-sync", "k-batch-sync"])
@PROPERTY
@given(schedule=schedules(max_changes=6), data=st.data())
def test_every_worker_that_computes_in_vain_is_cancelled_once(name, schedule, data):
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
def test_cancelling_twice_or_not_at_all_is_seen(broken):
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
@given(schedule=schedules(max_changes=6))
def test_all_workers_are_bsp(which, schedule):
    (name, options), n_workers = AS_BSP[which], schedule.n_workers
    paradigm = create(name, n_workers, k=n_workers, **options)
    assert run(paradigm, schedule, bound_iters=0).trace == run(create("bsp", n_workers), schedule).trace


@pytest.mark.parametrize("name", ["k-async", "k-batch-async"])
@PROPERTY
@given(schedule=schedules(max_changes=6))
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


# ---- options ----


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("k-sync", {"k": 0}, "k must be an integer >= 1 or one of state, loss, min, throughput, got 0"),
        ("k-sync", {"k": True}, "k must .* got True"),
        ("k-sync", {"k": 2.0}, "k must .* got 2.0"),
        ("k-sync", {"k": "fast"}, "k must be an integer or one of state, loss, min, throughput, got 'fast'"),
        ("k-async", {"k": 5}, "k must be at most n_workers = 4, got 5"),
        ("k-async", {"k": 2, "k_min": 2}, "k_min and k_start need a k of state, loss, min, throughput, got k = 2"),
        ("k-async", {"k": 2, "k_start": 2}, "got k = 2"),
        ("k-async", {"k": "min", "k_min": 5}, "k_min must be an integer from 1 to n_workers = 4, got 5"),
        (
            "k-async",
            {"k": "min", "k_min": 2, "k_start": 1},
            "k_start must be an integer from k_min = 2 to n_workers = 4, got 1",
        ),
        ("k-sync", {"k": 2, "cancel": "never"}, "cancel must be one of drop, abort, got 'never'"),
        ("k-async", {"k": 2, "staleness_max": -1}, "staleness_max must be a number >= 0, inf or None, got -1"),
        ("k-async", {"k": 2, "staleness_max": math.nan}, "staleness_max .* got nan"),
        ("k-async", {"k": 2, "staleness_max": "none"}, "staleness_max .* got none"),
        (
            "k-batch-async",
            {"k": 2, "staleness_weight": "linear"},
            "staleness_weight must be one of none, inverse, got 'linear'",
        ),
    ],
)
def test_values_that_are_not_allowed_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        create(name, 4, **options)


def test_decision_fields_are_those_of_the_controller():
    assert create("k-sync", 4, k="state").decision_fields == KController.decision_fields
    assert create("k-sync", 4, k=3).decision_fields == {}


# ---- check() ----


def k_is_too_large(paradigm):
    paradigm.k = 9


def the_round_is_complete(paradigm):
    paradigm.k = 1


def a_contribution_is_collected(paradigm):
    paradigm._accumulated += 1


def a_contribution_is_forgotten(paradigm):
    paradigm._waiting.clear()


def a_contribution_is_late(paradigm):
    paradigm._read[0] -= 1


def a_worker_is_not_up_to_date(paradigm):
    paradigm._up_to_date.remove(1)


def every_worker_waits(paradigm):
    for worker in (1, 2, 3):
        paradigm._block(worker)


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (k_is_too_large, "k is 9"),
        (the_round_is_complete, "1 contributions wait although k is 1"),
        (a_contribution_is_collected, "1 contributions have been accumulated"),
        (a_contribution_is_forgotten, "not those with a waiting contribution"),
        (a_contribution_is_late, "worker 0 waits with a staleness of 1"),
        (a_worker_is_not_up_to_date, "not those that compute from the current version"),
        (every_worker_waits, "every worker|every active worker is blocked"),
    ],
)
def test_check_sees_an_inconsistent_state(tamper, message):
    paradigm = create("k-sync", 4, k=3, cancel="abort")
    paradigm.handle(PushInfo(1.0, 0))
    paradigm.check()
    tamper(paradigm)
    with pytest.raises(AssertionError, match=message):
        paradigm.check()


class HoldsMiniBatches(KBatchSync):
    def _pushed(self, event):
        self._block(event.worker)
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
