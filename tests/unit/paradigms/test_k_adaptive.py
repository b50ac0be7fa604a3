"""Adaptive k: it changes between rounds, by one, and only with a Decision."""

import pytest

from hpcsync.paradigms import create
from hpcsync.paradigms.events import Apply, Decision, PushInfo
from hpcsync.paradigms.first_k import KAsync
from hpcsync.planning.k_controller import INTERVAL, POLICIES, TIME_BETA, KController
from tests.unit.paradigms.k_account import recount
from tests.unit.paradigms.schedule import Schedule, fixed, run

NAMES = ["k-sync", "k-batch-sync", "k-async", "k-batch-async"]
every_name = pytest.mark.parametrize("name", NAMES)


def k_history(referee, k_start):
    """Return k of each update from the decisions, and assert their invariants."""
    ks, k, changed = [], k_start, -INTERVAL
    for _, actions in referee.trace:
        for i, action in enumerate(actions):
            if isinstance(action, Apply):
                ks.append(k)
            elif isinstance(action, Decision):
                assert isinstance(actions[i - 1], Apply), "k changes within a round"
                inputs = dict(zip(KController.decision_fields, action.inputs, strict=False))
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


def sizes_before_departures(referee):
    """Return the number of contributions of each update while all workers are active."""
    account = recount(referee)
    return [len(update) for update, left in zip(account.updates, account.left, strict=True) if not left]


@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, policy) for name in NAMES for policy in POLICIES if name == "k-sync" or policy != "throughput"],
)
def test_every_update_has_the_current_k(name, policy):
    paradigm = create(name, 4, k=policy)
    k_start = paradigm.k
    referee = run(paradigm, fixed(1.0, 1.1, 1.2, 2.5, until_s=200.0))
    sizes = sizes_before_departures(referee)
    assert sizes == k_history(referee, k_start)[: len(sizes)]
    assert {decision.controller for decision in referee.actions(Decision)} <= {"k"}
    assert referee.decisions() or (policy, paradigm.k) == ("state", 4)


class ForgetsToSay(KAsync):
    def _choose_k(self, worker):
        super()._choose_k(worker)
        return []


def test_a_change_without_a_decision_is_seen():
    referee = run(ForgetsToSay(4, k="loss"), fixed(1.0, 1.1, 1.2, 2.5, until_s=200.0))
    sizes = sizes_before_departures(referee)
    assert sizes != k_history(referee, k_start=1)[: len(sizes)]


@every_name
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
        paradigm.handle(PushInfo(float(now_s), now_s % 2))
    assert paradigm.k == 2
