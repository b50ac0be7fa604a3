"""Sync-Switch: BSP up to a round that is due, the second paradigm from there on, and nothing lost in between."""

from __future__ import annotations

import math
import random
import re
from functools import partial

import pytest

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.config.overrides import KINDS
from hpcsync.core.assignments import create_paradigm
from hpcsync.paradigms import create
from hpcsync.paradigms.asp import ASP, AspOptions
from hpcsync.paradigms.bsp import BSP
from hpcsync.paradigms.dssp import DSSP
from hpcsync.paradigms.events import Apply, Decision, Grant, Joined, Left, PushInfo
from hpcsync.paradigms.ssp import SSP, SspOptions
from hpcsync.paradigms.sync_switch import SyncSwitch, SyncSwitchOptions
from tests.unit.jobs import make_job
from tests.unit.paradigms.schedule import fixed, run

WORKERS = pytest.mark.parametrize("n_workers", [1, 2, 3, 5, 8])
SECOND = {
    "asp": ASP,
    "ssp": partial(SSP, staleness=1),
    "dssp": partial(DSSP, staleness_min=0, staleness_max=3),
}
BATCH = 4


def switching(n_workers, second="asp", samples=10 * BATCH, **options):
    return SyncSwitch(n_workers, then=SECOND[second], samples=samples, **options)


def pushes(n_workers, n=200, seed=1):
    """Yield pushes by random workers of those that the paradigm has granted, which is told by `send`."""
    generator, now_s, computing = random.Random(seed), 0.0, set(range(n_workers))
    for _ in range(n):
        now_s += generator.random()
        worker = generator.choice(sorted(computing))
        computing.discard(worker)
        actions = yield PushInfo(now_s, worker, batch_size=BATCH, loss=1.0)
        computing |= {action.worker for action in actions if isinstance(action, Grant)}


def played(paradigm, **options):
    """Return events with their answers."""
    source, found, actions = pushes(paradigm.n_workers, **options), [], None
    while True:
        try:
            event = source.send(actions) if found else next(source)
        except StopIteration:
            return found
        actions = paradigm.handle(event)
        paradigm.check()
        found.append((event, actions))


def at_switch(events):
    return next(i for i, (_, actions) in enumerate(events) if any(isinstance(a, Decision) for a in actions))


@WORKERS
@pytest.mark.parametrize("second", SECOND)
def test_before_the_switch_it_is_bsp_and_after_it_a_new_second_paradigm(n_workers, second):
    events = played(switching(n_workers, second))
    last = at_switch(events)
    bsp, then = BSP(n_workers), SECOND[second](n_workers)
    for event, actions in events[: last + 1]:
        assert [a for a in actions if not isinstance(a, Decision)] == bsp.handle(event)
    rounds = math.ceil(10 / n_workers)
    assert last == rounds * n_workers - 1, "the switch follows the first round with enough samples"
    [decision] = [a for a in events[last][1] if isinstance(a, Decision)]
    assert (decision.controller, decision.worker) == ("switch", events[last][0].worker)
    assert decision.chosen == rounds * n_workers * BATCH
    for event, actions in events[last + 1 :]:
        expected = then.handle(event)
        granted = [a for a in actions if isinstance(a, Grant)]
        assert [a.worker for a in granted] == [a.worker for a in expected if isinstance(a, Grant)]
        for own, other in zip(actions, expected, strict=True):
            if isinstance(own, Grant):
                assert own == other._replace(iteration=other.iteration + rounds), "iterations go on"
            elif isinstance(own, Decision):
                assert own.inputs[-len(other.inputs) :] == pytest.approx(other.inputs, nan_ok=True)
            else:
                assert own == other


@WORKERS
def test_all_samples_before_the_switch_make_it_bsp(n_workers):
    without = played(switching(n_workers, samples=math.inf))
    assert without == played(BSP(n_workers))
    assert without != played(switching(n_workers)), "but not if it switches"


@WORKERS
def test_what_changes_with_the_switch_is_in_force_from_the_next_event_on(n_workers):
    """The update that completes the round is still one of BSP, so the engine must see it as such."""
    paradigm = switching(n_workers, momentum=0.25)
    seen = []
    for event, actions in played_with(paradigm, lambda: seen.append((paradigm.synchronous, paradigm.momentum))):
        assert event and actions is not None
    first = seen.index((False, 0.25))
    assert first == math.ceil(10 / n_workers) * n_workers
    assert all(synchronous and math.isnan(momentum) for synchronous, momentum in seen[:first])
    assert set(seen[first:]) == {(False, 0.25)}


def played_with(paradigm, look):
    source, actions, found = pushes(paradigm.n_workers), None, []
    try:
        event = next(source)
        while True:
            actions = paradigm.handle(event)
            look()
            found.append((event, actions))
            event = source.send(actions)
    except StopIteration:
        return found


# ---- a flat loss ----


def push(paradigm, now_s, worker, loss):
    return paradigm.handle(PushInfo(float(now_s), worker, batch_size=BATCH, loss=loss))


def rounds_until_switch(losses, **options):
    """Return the rounds of two workers before the switch; None if there is none."""
    paradigm = switching(2, samples=math.inf, **options)
    for i, loss in enumerate(losses):
        for worker in range(2):
            spread = (-0.1, 0.1)[worker]  # the mean of a round is `loss`
            actions = push(paradigm, i, worker, loss + spread)
        if any(isinstance(a, Decision) for a in actions):
            return i + 1, next(a for a in actions if isinstance(a, Decision))
    return None


def test_it_switches_when_a_window_is_hardly_better_than_the_one_before():
    losses = [4.0, 4.0, 3.0, 3.0, 2.9, 2.9, 2.89, 2.89]
    at, decision = rounds_until_switch(losses, plateau=0.05, window=2)
    assert at == 6
    assert decision.inputs[:2] == pytest.approx((2.9, 3.0))
    at, decision = rounds_until_switch(losses, plateau=0.01, window=2)
    assert at == 8
    assert rounds_until_switch(losses, plateau=0.001, window=2) is None
    assert rounds_until_switch(losses, plateau=0.3, window=2)[0] == 4
    assert rounds_until_switch(losses, plateau=0.05, window=4) is None, "3.5 to 2.9 is not flat"


def test_a_rising_loss_is_flat():
    assert rounds_until_switch([1.0, 1.0, 1.5, 1.5], plateau=0.01, window=2)[0] == 4


def test_a_loss_of_0_is_flat():
    assert rounds_until_switch([0.0] * 4, plateau=0.01, window=2)[0] == 4


def test_rounds_without_a_loss_do_not_count():
    assert rounds_until_switch([math.nan] * 50, plateau=0.5, window=2) is None
    losses = [1.0, math.nan, 1.0, math.nan, math.inf, 1.0, 1.0]
    assert rounds_until_switch(losses, plateau=0.5, window=2)[0] == 7
    paradigm = switching(2, samples=math.inf, plateau=0.5, window=2)
    for i, (worker, loss) in enumerate([(0, 1.0), (1, 1.0), (0, math.nan), *[(1, 1.0), (0, 1.0)] * 3]):
        assert not any(isinstance(action, Decision) for action in push(paradigm, i, worker, loss))
    assert any(isinstance(action, Decision) for action in push(paradigm, 9, 1, 1.0)), "four rounds with both losses"


def test_infinities_of_both_signs_in_a_round_do_not_count():
    paradigm = switching(2, samples=math.inf, plateau=0.5, window=2)
    for worker, loss in enumerate((math.inf, -math.inf)):
        paradigm.handle(PushInfo(1.0, worker, batch_size=BATCH, loss=loss))
    assert paradigm.state()["means"] == []


def test_whichever_comes_first():
    flat = [1.0] * 8
    paradigm = lambda samples: SyncSwitch(1, samples=samples, plateau=0.5, window=2)  # noqa: E731

    def at(samples):
        policy = paradigm(samples)
        for i, loss in enumerate(flat):
            if any(isinstance(a, Decision) for a in policy.handle(PushInfo(float(i), 0, batch_size=BATCH, loss=loss))):
                return i + 1
        return None

    assert (at(math.inf), at(2 * BATCH), at(0)) == (4, 2, 1)


# ---- departures and joins ----


def test_a_departure_may_complete_the_last_round():
    paradigm = switching(3, samples=2 * BATCH)
    paradigm.handle(PushInfo(1.0, 0, batch_size=BATCH))
    paradigm.handle(PushInfo(2.0, 1, batch_size=BATCH))
    actions = paradigm.handle(Left(3.0, 2))
    assert [type(action) for action in actions] == [Apply, Decision, Grant, Grant]
    assert actions[1].worker == 2
    assert paradigm.handle(PushInfo(4.0, 0, batch_size=BATCH)) == [Apply((0,)), Grant(0, 3, gap_iters=1)]


@pytest.mark.parametrize("second", SECOND)
def test_a_worker_that_left_before_the_switch_joins_after_it(second):
    paradigm = switching(3, second, samples=6 * BATCH)
    for worker in range(3):
        paradigm.handle(PushInfo(1.0, worker, batch_size=BATCH))
    paradigm.handle(Left(1.5, 2))
    for now_s in (2.0, 3.0):
        for worker in range(2):
            actions = paradigm.handle(PushInfo(now_s, worker, batch_size=BATCH))
    assert any(isinstance(action, Decision) for action in actions)
    paradigm.check()
    actions = [a for a in paradigm.handle(PushInfo(4.0, 0, batch_size=BATCH)) if not isinstance(a, Decision)]
    assert actions[0] == Apply((0,))
    assert actions[1:] == ([] if second == "dssp" else [Grant(0, 5, gap_iters=1)])
    [grant] = [a for a in paradigm.handle(Joined(5.0, 2)) if isinstance(a, Grant)]
    assert (grant.worker, grant.iteration, grant.gap_iters) == (2, 2, 0), "its own second push, level with the slowest"
    paradigm.check()


def test_decisions_of_the_second_paradigm_leave_the_columns_of_the_switch_open():
    paradigm = switching(3, "dssp")
    decisions = [action for _, actions in played(paradigm) for action in actions if isinstance(action, Decision)]
    assert len({decision.controller for decision in decisions}) == 2
    for decision in decisions:
        own = len(SyncSwitch.decision_fields)
        assert len(decision.inputs) == len(paradigm.decision_fields)
        assert decision.controller == "switch" or all(map(math.isnan, decision.inputs[:own]))


class ForgetsWhoLeft(SyncSwitch):
    def _switch(self, worker):
        before, self._progress.active = self._progress.active, set(range(self.n_workers))
        try:
            return super()._switch(worker)
        finally:
            self._progress.active = before


class SwitchesWithinARound(SyncSwitch):
    """It does not wait for the end of the round, so contributions in slots are forgotten."""

    def _pushed(self, event):
        actions = super()._pushed(event)
        if not self._switched and self._samples >= self._samples_wanted:
            actions = [*actions, self._switch(event.worker)]
        return actions


def test_broken_switches_are_caught():
    paradigm = ForgetsWhoLeft(3, samples=2 * BATCH)
    paradigm.handle(Left(0.5, 2))
    for worker in range(2):
        paradigm.handle(PushInfo(1.0, worker, batch_size=BATCH))
    with pytest.raises(AssertionError, match="counts workers that have left"):
        paradigm.check()
    paradigm = SwitchesWithinARound(3, samples=4 * BATCH)
    with pytest.raises(AssertionError, match="blocks other workers"):
        played(paradigm)


def test_before_the_switch_the_slowest_sets_the_pace_and_after_it_nobody_waits():
    referee = run(switching(3, samples=0), fixed(1.0, 1.0, 4.0, until_s=40.0))
    grants = referee.actions(Grant)
    waits = [grant for grant in grants if grant.held_s > 0]
    assert {grant.iteration for grant in waits} == {2}, "only the first round waits: it has all samples that are wanted"
    assert referee.largest_start_gap > 5


# ---- options ----


def options(**keys):
    return make_job(paradigm={"name": "sync-switch", **keys}, stop={"samples": 800}, cluster={"workers": 4})


def test_the_share_is_of_the_samples_of_the_run():
    assert options().paradigm.arguments(options())["samples"] == 50
    assert options(share=0.25).paradigm.arguments(options())["samples"] == 200
    assert options(plateau=0.1).paradigm.arguments(options())["samples"] == math.inf
    assert options(plateau=0.1, share=0.5).paradigm.arguments(options())["samples"] == 400


def test_the_rate_is_scaled_with_the_contributions_unless_the_job_says_otherwise():
    assert options().optimizer.async_lr_scale == "1/workers"
    assert make_job().optimizer.async_lr_scale == 1.0
    kept = make_job(
        paradigm={"name": "sync-switch"}, stop={"samples": 9}, optimizer={"name": "sgd", "lr": 1, "async_lr_scale": 1}
    )
    assert kept.optimizer.async_lr_scale == 1.0


def test_the_second_paradigm_is_a_table_of_its_own():
    assert KINDS["then"] == [*SECOND]
    assert options().paradigm.then == AspOptions()
    found = options(then={"name": "ssp", "staleness": 3})
    assert found.paradigm.then == SspOptions(staleness=3)
    assert found.paradigm.lead_bound == 3
    assert type(create_paradigm(found)._then) is SSP
    assert Job.from_toml(found.to_toml()) == found
    corrected = options(then={"name": "asp", "compensation": "constant"}).paradigm
    assert corrected.delay_correction == (0.04, None)
    assert {paper.key for paper in corrected.papers} == {"li2021syncswitch", "dean2012large", "zheng2017asynchronous"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"then": {"name": "bsp"}},
            'paradigm.then.name = "bsp": must be a paradigm in which each gradient is an update',
        ),
        (
            {"then": {"name": "dssp", "staleness_min": 5, "staleness_max": 3}},
            "paradigm.then.staleness_max = 3: must be at least paradigm.then.staleness_min = 5",
        ),
        (
            {"then": {"name": "asp", "strength": 0.1}},
            'paradigm.then.strength = 0.1: must be left out with paradigm.then.compensation = "none"',
        ),
        ({"then": {"name": "k-async", "k": 1}}, 'paradigm.then.name = "k-async"'),
        ({"then": {"name": "easgd"}}, 'paradigm.then.name = "easgd"'),
        ({"then": {"name": "gossip", "mode": "pull"}}, 'paradigm.then.name = "gossip"'),
        ({"then": {"name": "allreduce"}}, 'paradigm.then.name = "allreduce"'),
        ({"then": {"name": "sync-switch"}}, 'paradigm.then.name = "sync-switch": must be one of asp, ssp, dssp'),
        (
            {"then": {"name": "ssp", "staleness": 1, "merge": True}},
            "paradigm.then.merge = true: must be false, since each",
        ),
        ({"then": {"name": "ssp"}}, "staleness"),
        ({"then": {"name": "ssp", "staleness": -1}}, "staleness = -1: must be a whole number of at least 0"),
        ({"share": 0}, "paradigm.share = 0: must be"),
        ({"plateau": 1.0}, "paradigm.plateau = 1.0: must be"),
        ({"momentum": 0.5}, "paradigm.momentum = 0.5: needs optimizer.momentum"),
    ],
)
def test_mistakes_are_one_line(keys, message):
    with pytest.raises(JobError, match=re.escape(message)) as caught:
        options(**keys)
    assert "\n" not in str(caught.value)


def test_a_share_needs_the_samples_of_the_run():
    with pytest.raises(JobError, match=re.escape("paradigm.share = 0.0625: needs stop.samples")):
        make_job(paradigm={"name": "sync-switch"})
    make_job(paradigm={"name": "sync-switch", "plateau": 0.1})


def test_a_worker_that_joins_while_its_contribution_waits_is_blocked():
    paradigm = switching(2)
    for event in (PushInfo(1.0, 0, batch_size=BATCH, loss=1.0), Left(2.0, 0), Joined(3.0, 0)):
        assert paradigm.handle(event) == []
        paradigm.check()
    grants = [a for a in paradigm.handle(PushInfo(4.0, 1, batch_size=BATCH, loss=1.0)) if isinstance(a, Grant)]
    assert {grant.worker: grant.held_s for grant in grants} == {0: 1.0, 1: 0.0}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"samples": -1}, "samples must be a number >= 0 or inf, got -1"),
        ({"samples": math.nan}, "samples must be a number >= 0 or inf, got nan"),
        ({"plateau": 1.0}, "plateau must be a number > 0 and < 1, got 1.0"),
        ({"window": 0}, "window must be an integer >= 1, got 0"),
        ({"momentum": 1.0}, "momentum must be a number >= 0 and < 1, got 1.0"),
        ({"momentum": False}, "momentum must be a number >= 0 and < 1, got False"),
    ],
)
def test_the_policy_refuses_values_that_make_no_sense(keys, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        create("sync-switch", 2, **{"samples": 1, **keys})


def test_the_policy_allows_values_at_their_limits():
    paradigm = switching(1, samples=0, plateau=0.5, window=1, momentum=0.0)
    _, decision, _ = paradigm.handle(PushInfo(1.0, 0, batch_size=BATCH, loss=1.0))
    assert decision.chosen == BATCH and decision.inputs[2] == 0.0


def test_the_names_of_the_declaration():
    paradigm = SyncSwitchOptions()
    assert paradigm.label == "BSP, then ASP"
    assert dict(paradigm.details(4))["switch"] == "after 0.0625 of the samples"
    both = SyncSwitchOptions(plateau=0.1, share=0.5, momentum=0.0, then=SspOptions(staleness=2))
    expected = (
        "after 0.5 of the samples or when 20 rounds improve the loss by at most 0.1 of itself; then the momentum is 0"
    )
    assert dict(both.details(4))["switch"] == expected
