"""ASHL: stages and their grants, the single switch, and the gate of the fine stage."""

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsync.paradigms import create
from hpcsync.paradigms.ashl import ASHL, CHECKS, COARSE, FINE, PROFILE, _median
from hpcsync.paradigms.events import Apply, Decision, Evaluated, Grant, Joined, Left, PushInfo
from tests.unit.paradigms.schedule import PROPERTY, Schedule, fixed, run, schedules

NAN = math.nan
SHORT = {"warmup": 1, "profiled": 2}
DENSE = {"ratio_coarse": None, "ratio_fine": None}

# Seconds of a step, a push, a pull and compressing: T_update = 20, 12, 6 for 2 steps of the slowest, which the others
# fill with 6 and 16; with 0.1 of its pushes sent by the fastest, the last now, the others send 0.70 and 0.55.
GOLDEN = {0: (4.0, 6.0, 6.0, 1.0), 1: (2.0, 4.0, 4.0, 1.0), 2: (1.0, 2.0, 2.0, 1.0)}


class Driver:
    """Pushes by hand, one second apart, with the latest grant of each worker."""

    def __init__(self, paradigm, times_s=GOLDEN):
        self.paradigm = paradigm
        self.times_s = times_s
        self.granted = {worker: paradigm.first(worker) for worker in range(paradigm.n_workers)}
        self.now_s = 0.0
        self.trace = []

    def push(self, worker, loss=NAN):
        grant = self.granted.pop(worker)
        step_s, push_s, pull_s, encode_s = self.times_s[worker]
        n = grant.local_steps
        # The push time of a sparse push and the compression time of a dense one must not count.
        sparse = grant.ratio < 1
        transfer_s, compress_s = (999.0, encode_s) if sparse else (push_s, 888.0)
        self.now_s += 1.0
        return self._handle(
            PushInfo(
                self.now_s,
                worker,
                compute_s=n * step_s,
                loss=loss,
                local_steps=n,
                pull_s=pull_s,
                comm_s=pull_s + transfer_s,
                encode_s=compress_s,
            )
        )

    def leave(self, worker):
        self.granted.pop(worker, None)
        return self._handle(Left(self.now_s, worker))

    def rounds(self, n, loss=NAN, workers=None):
        for _ in range(n):
            for worker in sorted(self.granted if workers is None else workers):
                self.push(worker, loss)
        return self

    def join(self, worker):
        return self._handle(Joined(self.now_s, worker))

    def evaluate(self, loss):
        self.now_s += 1.0
        return self._handle(Evaluated(self.now_s, min(self.granted), loss, 0, self.now_s))

    def _handle(self, event):
        actions = self.paradigm.handle(event)
        self.paradigm.check()
        self.granted |= {action.worker: action for action in actions if isinstance(action, Grant)}
        self.trace.append((event, actions))
        return actions


def rows(actions, controller):
    return {a.worker: a.chosen for a in actions if isinstance(a, Decision) and a.controller == controller}


def coarse(n_workers=3, **options):
    """Return a driver after the profile."""
    options = {**SHORT, "steps_coarse": 2, "steps_fine": 1, "ratio_coarse": 0.1, **options}
    driver = Driver(create("ashl", n_workers, **options))
    driver.rounds(options["warmup"] + options["profiled"])
    assert driver.paradigm.stage == COARSE
    return driver


def fine(n_workers=3, **options):
    """Return a driver at the switch: all workers but worker 0 are in their last coarse round."""
    driver = coarse(n_workers, loss_preset=1.0, **options)
    driver.push(0, 0.5)
    assert driver.paradigm.stage == FINE
    return driver


# ---- the profile ----


@pytest.mark.parametrize(("warmup", "profiled"), [(0, 2), (1, 2), (3, 5), (10, 20)])
def test_the_profile_takes_so_many_pushes_of_one_step_every_other_one_compressed(warmup, profiled):
    driver = Driver(create("ashl", 2, warmup=warmup, profiled=profiled))
    for t in range(1, warmup + profiled + 1):
        for worker in (0, 1):
            grant = driver.granted[worker]
            sparse = t > warmup and (t - warmup) % 2 == 0
            assert (grant.iteration, grant.local_steps, grant.ratio) == (t, 1, 0.05 if sparse else 1.0)
            assert driver.paradigm.stage == PROFILE
            assert driver.push(worker)[0] == Apply((worker,), (0.5,))
    assert driver.paradigm.stage == COARSE


def test_without_ratios_grants_have_none():
    driver = coarse(**DENSE)
    grants = [action for _, actions in driver.trace for action in actions if isinstance(action, Grant)]
    assert all(math.isnan(grant.ratio) for grant in [driver.paradigm.first(0), *grants])
    assert not any(rows(actions, "ratio") for _, actions in driver.trace)
    # Every push is dense and counts, and compression takes no time.
    (plan,) = [actions for _, actions in driver.trace if rows(actions, "stage")]
    assert [a.inputs[:4] for a in plan if isinstance(a, Decision) and a.controller == "local-steps"] == [
        (step_s, push_s, pull_s, 0.0) for step_s, push_s, pull_s, _ in GOLDEN.values()
    ]


def test_the_plan_of_the_coarse_stage_is_the_golden_one():
    driver = Driver(create("ashl", 3, **SHORT, steps_coarse=2, steps_fine=2, ratio_coarse=0.1))
    driver.rounds(2)
    driver.push(0)
    driver.push(1)
    apply, *decisions, grant = driver.push(2)
    assert apply == Apply((2,), (1 / 3,))
    stage, *others = decisions
    assert repr(stage) == repr(Decision("stage", 2, 1.0, (NAN,) * 5))
    assert [row.controller for row in others] == ["local-steps"] * 3 + ["share"] * 3 + ["ratio"] * 3
    assert [row.worker for row in others] == [0, 1, 2] * 3
    assert rows(decisions, "local-steps") == {0: 2, 1: 6, 2: 16}
    assert rows(decisions, "share") == pytest.approx({0: 1 / 12, 1: 1 / 4, 2: 2 / 3})
    assert rows(decisions, "ratio") == pytest.approx({0: 11 / 30, 1: 0.3, 2: 0.1})
    for row in others[:3] + others[6:]:
        assert row.inputs[:4] == GOLDEN[row.worker]
        assert math.isnan(row.inputs[4])
    assert all(map(math.isnan, others[3].inputs))
    assert (grant.local_steps, grant.ratio) == (16, pytest.approx(0.1))
    # The others enter the stage with their next grants, and their commits count their shares.
    apply, grant = driver.push(0)
    assert apply == Apply((0,), (pytest.approx(1 / 12),))
    assert (grant.local_steps, grant.ratio) == (2, pytest.approx(11 / 30))


def test_a_profiled_worker_continues_unchanged_until_all_are_profiled():
    driver = Driver(create("ashl", 2, **SHORT))
    driver.rounds(7, workers=[0])
    assert driver.paradigm.stage == PROFILE
    assert (driver.granted[0].local_steps, driver.granted[0].ratio) == (1, 1.0)
    driver.rounds(3, workers=[1])
    assert driver.paradigm.stage == COARSE


def test_a_departure_completes_the_profile():
    driver = Driver(create("ashl", 3, **SHORT))
    driver.rounds(3, workers=[0, 2])
    actions = driver.leave(1)
    assert rows(actions, "stage") == {1: COARSE}
    assert rows(actions, "local-steps").keys() == {0, 2}
    assert not [action for action in actions if isinstance(action, Grant)]


@given(st.lists(st.floats(0.0, 1e6), max_size=9))
def test_the_median_is_that_of_the_standard_library(times_s):
    assert _median(times_s) == (median(times_s) if times_s else 0.0)


def test_the_medians_are_of_the_newest_pushes_without_warm_up():
    driver = Driver(create("ashl", 1, warmup=2, profiled=3), {0: (50.0, 60.0, 70.0, 80.0)})
    driver.rounds(2)
    for times_s in [(1.0, 2.0, 3.0, 4.0), (9.0, 9.0, 9.0, 9.0), (2.0, 4.0, 5.0, 6.0)]:
        driver.times_s = {0: times_s}
        actions = driver.push(0)
    (row,) = [a for a in actions if isinstance(a, Decision) and a.controller == "local-steps"]
    assert row.inputs[:4] == (2.0, 3.0, 5.0, 9.0)
    assert row.chosen == 16  # one worker fills no time


def test_at_the_switch_steps_and_pulls_are_measured_anew():
    driver = coarse(loss_preset=1.0)
    driver.times_s = {worker: tuple(3 * t for t in times_s) for worker, times_s in GOLDEN.items()}
    driver.rounds(2, loss=2.0)
    for _ in range(20):
        actions = driver.push(0, 0.5)
        if driver.paradigm.stage == FINE:
            break
    measured = {a.worker: a.inputs for a in actions if isinstance(a, Decision) and a.controller == "local-steps"}
    for worker, (step_s, push_s, pull_s, encode_s) in GOLDEN.items():
        assert measured[worker][:4] == (3 * step_s, push_s, 3 * pull_s, encode_s)


# ---- the switch ----


def test_it_is_made_once_and_for_good_when_the_average_loss_is_low_enough():
    driver = coarse(loss_preset=1.0)
    driver.rounds(3, loss=1.5)
    average, commits = 1.5, 0
    while driver.paradigm.stage == COARSE:
        actions = driver.push(commits % 3, 0.5)
        average, commits = 0.9 * average + 0.1 * 0.5, commits + 1
    assert average <= 1.0
    assert commits == 7  # 0.5 + 0.9^7 is the first below 1
    (row,) = [a for a in actions if isinstance(a, Decision) and a.controller == "stage"]
    assert (row.worker, row.chosen, row.inputs[4]) == (0, FINE, pytest.approx(average))
    driver.rounds(20, loss=99.0)
    stages = [a.chosen for _, actions in driver.trace for a in actions if getattr(a, "controller", "") == "stage"]
    assert stages == [COARSE, FINE]


def test_losses_of_the_profile_do_not_count():
    driver = Driver(create("ashl", 3, **SHORT, loss_preset=1.0))
    driver.rounds(3, loss=0.1)
    assert driver.paradigm.stage == COARSE
    driver.rounds(3, loss=1.5)
    assert driver.paradigm.stage == COARSE


def test_a_plateau_is_one_over_several_checks():
    driver = coarse(plateau=0.01)
    loss = 5.0
    for _ in range(40):
        loss *= 0.97
        driver.rounds(1, loss=loss)
    assert driver.paradigm.stage == COARSE
    driver.rounds(CHECKS, loss=loss)
    assert driver.paradigm.stage == COARSE
    driver.rounds(100, loss=loss)
    assert driver.paradigm.stage == FINE
    # Of a loss that never changes the first check that has CHECKS before it.
    driver = coarse()
    driver.rounds(CHECKS, loss=2.0)
    assert driver.paradigm.stage == COARSE
    driver.rounds(1, loss=2.0)
    assert driver.paradigm.stage == FINE


def test_i_an_evaluation_at_the_preset_begins_the_fine_stage():
    driver = coarse(loss="evaluation", loss_preset=1.0)
    driver.rounds(30, loss=0.1)  # losses of commits do not count
    assert driver.evaluate(1.1) == driver.evaluate(NAN) == []
    assert driver.paradigm.stage == COARSE
    (row, *_) = driver.evaluate(1.0)
    assert (row.controller, row.worker, row.chosen, row.inputs[4]) == ("stage", 0, FINE, 1.0)
    assert driver.evaluate(0.5) == []
    assert coarse(loss="commits", loss_preset=1.0).rounds(30, loss=0.1).paradigm.stage == FINE


def test_i_evaluations_of_the_profile_do_not_count():
    driver = Driver(create("ashl", 3, **SHORT, loss="evaluation", loss_preset=1.0))
    assert driver.evaluate(0.1) == []
    driver.rounds(6)
    assert driver.paradigm.stage == COARSE
    driver.evaluate(0.1)
    assert driver.paradigm.stage == FINE


def test_i_a_plateau_is_one_over_several_evaluations():
    driver = coarse(loss="evaluation", plateau=0.01)
    for k in range(20):
        assert driver.evaluate(5.0 * 0.97**k) == []
    loss = 5.0 * 0.97**19
    for _ in range(CHECKS - 1):
        assert driver.evaluate(loss) == []
    driver.evaluate(loss)
    assert driver.paradigm.stage == FINE


@pytest.mark.parametrize("loss", [NAN, math.inf])
@pytest.mark.parametrize("loss_preset", [1.0, None])
def test_losses_that_are_not_finite_never_switch(loss, loss_preset):
    driver = coarse(loss_preset=loss_preset).rounds(50, loss=loss)
    assert driver.paradigm.stage == COARSE


def test_one_missing_loss_does_not_hide_the_others():
    driver = coarse(loss_preset=1.0)
    driver.push(0, NAN)
    driver.push(1, 0.5)
    assert driver.paradigm.stage == FINE


# ---- the fine stage ----


def test_only_commits_begun_in_the_fine_stage_count_for_the_gate():
    driver = fine(2, staleness=0)
    assert driver.paradigm._fine.pushes == [0, 0]
    assert driver.push(0)[1:] == []  # its first: one more than worker 1, which is still in its coarse round
    _, grant = driver.push(1)  # does not count, so worker 0 stays blocked
    assert grant.worker == 1
    assert driver.paradigm._fine.pushes == [1, 0]
    _, own, released = driver.push(1)
    assert (own.worker, released.worker, released.held_s) == (1, 0, 2.0)
    assert driver.paradigm._fine.pushes == [1, 1]


def test_no_worker_blocks_before_the_fine_stage():
    driver = coarse(2, staleness=0)
    driver.rounds(30, workers=[0])
    assert 0 in driver.granted


def test_the_steps_of_the_fine_stage():
    driver = fine(steps_coarse=2, steps_fine=1)
    # T_update = 16, 10, 5 now: (16 - 8) / 2 = 4 and (16 - 4) / 1 = 12 steps.
    assert [driver.paradigm._steps[worker] for worker in range(3)] == [1, 4, 12]
    assert driver.granted[0].local_steps == 1
    assert [driver.granted[worker].local_steps for worker in (1, 2)] == [1, 16]  # of the profile and the coarse stage
    assert driver.push(1)[0] == Apply((1,), (4 / 17,))
    assert driver.granted[1].local_steps == 4


def test_a_departure_releases_the_workers_blocked_by_it():
    driver = fine(3, staleness=1)
    driver.rounds(2, workers=[0])
    assert 0 not in driver.granted
    driver.rounds(2, workers=[1])
    assert driver.leave(2)[-1] == driver.granted[0]
    driver = fine(3, staleness=0)
    driver.push(1)
    driver.push(1)
    driver.push(0)
    assert not driver.granted.keys() & {0, 1}
    actions = driver.leave(2)
    assert [action.worker for action in actions if isinstance(action, Grant)] == [0, 1]


def test_departures_of_a_blocked_worker_and_of_all():
    driver = fine(3, staleness=0)
    driver.push(0)
    driver.leave(0)
    driver.leave(1)
    assert driver.push(2)[0] == Apply((2,), (1.0,))
    assert 2 in driver.granted
    assert driver.leave(2) == []


def test_h_a_worker_that_joins_gets_the_plan_of_the_present_stage():
    driver = Driver(create("ashl", 3, **SHORT, steps_coarse=2, steps_fine=1, ratio_coarse=0.1, loss_preset=1.0))
    driver.leave(2)
    driver.rounds(3)
    assert driver.paradigm.stage == COARSE
    before = rows(driver.join(2), "local-steps")
    assert before == {0: 2, 1: 6, 2: 2}, "it has not been measured"
    assert (driver.granted[2].iteration, driver.granted[2].local_steps, driver.granted[2].ratio) == (1, 2, 1.0)
    driver.rounds(2)
    driver.leave(2)
    actions = driver.join(2)
    assert rows(actions, "local-steps")[2] > 2, "of its newest steps"
    assert sum(rows(actions, "share").values()) == pytest.approx(1)
    assert rows(actions, "stage") == {}
    driver.rounds(1, 0.5)
    assert driver.paradigm.stage == FINE


def test_a_worker_blocked_in_the_fine_stage_blocks_again_when_it_joins():
    driver = fine(3, staleness=0)
    driver.push(0)
    assert 0 not in driver.granted
    driver.leave(0)
    assert not [action for action in driver.join(0) if isinstance(action, Grant)]
    driver.rounds(2, workers=[1, 2])
    assert 0 in driver.granted


@pytest.mark.parametrize("stage", [PROFILE, COARSE, FINE])
def test_no_decisions_once_all_have_left(stage):
    driver = {PROFILE: lambda: Driver(create("ashl", 3)), COARSE: coarse, FINE: fine}[stage]()
    for worker in (2, 0, 1):
        actions = driver.leave(worker)
    assert actions == []


# ---- commits of workers that wait ----


def commits_and_grants(actions):
    return [(type(action), getattr(action, "workers", getattr(action, "worker", None))) for action in actions]


@pytest.mark.parametrize("commit", ["on-arrival", "after-gate"])
def test_j_lines_4_to_11_of_algorithm_3(commit):
    """Line 7: a worker that is too far ahead waits. Lines 9 to 11: only then is its commit applied, and sent."""
    kept = commit == "after-gate"
    driver = fine(2, staleness=0, commit=commit)
    assert commits_and_grants(driver.push(0)) == ([] if kept else [(Apply, (0,))])
    assert commits_and_grants(driver.push(1)) == [(Apply, (1,)), (Grant, 1)]
    actions = commits_and_grants(driver.push(1))
    assert actions == [(Apply, (1,)), (Grant, 1), *[(Apply, (0,))] * kept, (Grant, 0)]


def test_k_a_worker_that_leaves_waits_no_more():
    driver = fine(3, staleness=0, commit="after-gate")
    driver.push(0)
    share = driver.paradigm._shares[0]
    commit, *others = driver.leave(0)
    assert commit == Apply((0,), (share,))
    assert rows(others, "share").keys() == {1, 2} and len(others) == 2
    assert driver.join(0)[-1].controller == "ratio", "it is still ahead"
    driver.rounds(1, workers=[1, 2])
    assert commits_and_grants(driver.push(1)) == [], "it waits for worker 2, which counts from its next commit on"
    assert commits_and_grants(driver.push(2)) == [(Apply, (2,)), (Grant, 2), (Grant, 0), (Apply, (1,)), (Grant, 1)]
    driver = fine(3, staleness=0)
    driver.push(0)
    assert driver.leave(0)[0].controller == "share", "it has been applied"


def test_c_a_commit_that_was_kept_back_counts_the_share_of_when_it_is_applied():
    driver = fine(3, staleness=0, commit="after-gate")
    before = driver.paradigm._shares[0]
    driver.push(0)
    driver.rounds(1, workers=[1])
    driver.push(1)
    *shares, first, _, second, _ = driver.leave(2)
    after = rows(shares, "share")
    assert (first, second) == (Apply((0,), (after[0],)), Apply((1,), (after[1],)))
    assert after[0] != before


# ---- weights of commits ----


def test_the_shares_of_the_remaining_workers_sum_to_one():
    driver = coarse()
    actions = driver.leave(2)
    assert rows(actions, "share") == pytest.approx({0: 1 / 4, 1: 3 / 4})  # of 2 and 6 steps
    assert len(actions) == 2
    assert driver.push(1)[0] == Apply((1,), (pytest.approx(3 / 4),))
    assert driver.granted[1].local_steps == 6


def test_equal_shares():
    driver = coarse(share="equal")
    assert driver.paradigm._steps == {0: 2, 1: 6, 2: 16}
    assert driver.push(2)[0] == Apply((2,), (1 / 3,))
    assert rows(driver.leave(0), "share") == {1: 0.5, 2: 0.5}


def test_one_worker_is_sequential():
    driver = coarse(1, **DENSE, loss_preset=1.0)
    assert driver.granted[0].local_steps == 2
    driver.rounds(3, loss=0.5)
    assert driver.paradigm.stage == FINE
    assert driver.granted[0].local_steps == 1
    weights = [a.weights for _, actions in driver.trace for a in actions if isinstance(a, Apply)]
    assert weights == [(1.0,)] * 6


def test_unknown_times_give_the_preset():
    paradigm = create("ashl", 2, **SHORT, steps_coarse=5)
    for t in range(4):
        for worker in (0, 1):
            actions = paradigm.handle(PushInfo(float(t), worker))
    assert (actions[-1].local_steps, actions[-1].ratio) == (5, 1.0)
    paradigm.check()


# ---- whole schedules ----


def commits_ahead(referee, *, applied=False):
    """Return the largest lead in commits, counted from the grants of the fine stage, of all or when one is applied."""
    stage, begun, commits, active = PROFILE, set(), [0] * referee.n_workers, set(range(referee.n_workers))
    largest = 0
    for event, actions in referee.trace:
        if isinstance(event, Left):
            active.remove(event.worker)
        elif event.worker in begun:
            commits[event.worker] += 1
        for action in actions:
            if isinstance(action, Decision) and action.controller == "stage":
                stage = action.chosen
            elif isinstance(action, Grant) and stage == FINE:
                begun.add(action.worker)
        commit_of = {worker for action in actions if isinstance(action, Apply) for worker in action.workers}
        leading = active & commit_of if applied else active
        largest = max([largest, *(commits[w] - min(commits[v] for v in active) for w in leading)])
    return largest


OPTIONS = {"warmup": 0, "profiled": 2, "loss_preset": 0.3, **DENSE}


@PROPERTY
@given(schedule=schedules(), staleness=st.sampled_from([0, 1, 3]))
def test_the_gate_bounds_how_far_commits_are_apart(schedule, staleness):
    referee = run(create("ashl", schedule.n_workers, staleness=staleness, **OPTIONS), schedule)
    assert commits_ahead(referee) <= staleness + 1
    stages = [a.chosen for a in referee.actions(Decision) if a.controller == "stage"]
    assert stages in ([], [COARSE], [COARSE, FINE])


@PROPERTY
@given(schedule=schedules(max_changes=4), staleness=st.sampled_from([0, 1, 3]))
def test_who_waits_and_how_long_is_the_same_whenever_commits_are_applied(schedule, staleness):
    readings = [
        run(create("ashl", schedule.n_workers, staleness=staleness, commit=commit, **OPTIONS), schedule)
        for commit in ("on-arrival", "after-gate")
    ]
    grants, commits = ([each.actions(kind) for each in readings] for kind in (Grant, Apply))
    assert grants[0] == grants[1]
    still_kept = len(readings[1].blocked_since_s)
    assert 0 <= len(commits[0]) - len(commits[1]) <= still_kept


@PROPERTY
@given(schedule=schedules(), staleness=st.sampled_from([0, 1, 3]))
def test_after_the_gate_no_commit_is_applied_that_is_too_far_ahead(schedule, staleness):
    referee = run(create("ashl", schedule.n_workers, staleness=staleness, commit="after-gate", **OPTIONS), schedule)
    assert commits_ahead(referee, applied=True) <= staleness


class NoGate(ASHL):
    def _answer(self, worker):
        return [self._continue(worker)]


class CountsTheSwitch(ASHL):
    """Counts rounds begun before the fine stage, too."""

    def _advance(self, worker):
        rows = super()._advance(worker)
        if self.stage == FINE:
            self._begun |= self._progress.active
        return rows


class ForgetsToRelease(ASHL):
    def __init__(self, n_workers, **options):
        super().__init__(n_workers, **options)
        self._gate.release = lambda grant: []


class SwitchesBack(ASHL):
    def _advance(self, worker):
        if self.stage == FINE and self._loss_preset is not None:
            return self._begin(COARSE, worker)
        return super()._advance(worker)


UNEQUAL = fixed(1.0, 3.0, until_s=60.0)


def test_the_bound_is_reached_and_a_missing_gate_is_seen():
    assert commits_ahead(run(ASHL(2, staleness=1, **OPTIONS), UNEQUAL)) == 2
    assert commits_ahead(run(NoGate(2, staleness=1, **OPTIONS), UNEQUAL, check=False)) > 10
    at_once, kept = (run(ASHL(2, staleness=1, commit=c, **OPTIONS), UNEQUAL) for c in ("on-arrival", "after-gate"))
    assert [commits_ahead(each, applied=True) for each in (at_once, kept)] == [2, 1]
    with pytest.raises(AssertionError, match="has started at lead 2"):
        run(NoGate(2, staleness=1, **OPTIONS), UNEQUAL)


@pytest.mark.parametrize("broken", [ForgetsToRelease, SwitchesBack])
def test_check_sees(broken):
    with pytest.raises(AssertionError, match="every active worker is blocked|without need|outside of the fine stage"):
        run(broken(2, staleness=0, **OPTIONS), UNEQUAL)


def test_check_sees_commits_of_the_coarse_stage():
    options = {**OPTIONS, "staleness": 0}
    assert commits_ahead(run(ASHL(2, **options), UNEQUAL)) == 1
    driver = Driver(CountsTheSwitch(2, **options))
    driver.rounds(2)
    driver.push(0, 0.1)
    driver.push(1)
    assert driver.paradigm._fine.pushes == [0, 1]


def plan_of_the_departed(paradigm):
    paradigm._shares[0] += 0.1


def too_few_steps(paradigm):
    paradigm._steps[0] = 0


def too_sparse(paradigm):
    paradigm._ratios[0] = 0.0


@pytest.mark.parametrize(
    ("tamper", "message"),
    [(plan_of_the_departed, "do not sum to 1"), (too_few_steps, "fewer"), (too_sparse, "ratios are")],
)
def test_check_sees_a_wrong_plan(tamper, message):
    driver = coarse()
    tamper(driver.paradigm)
    with pytest.raises(AssertionError, match=message):
        driver.paradigm.check()


def test_without_a_gate_and_a_preset_no_worker_blocks():
    options = {**OPTIONS, "loss_preset": None, "staleness": math.inf}
    referee = run(create("ashl", 3, **options), Schedule([[1.0] * 40, [2.0] * 20, [0.1] * 90]))
    assert all(grant.held_s == 0 for grant in referee.actions(Grant))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps_coarse": 0}, "steps_coarse must be an integer >= 1, got 0"),
        ({"steps_coarse": 2.5}, "steps_coarse .* got 2.5"),
        ({"steps_fine": True}, "steps_fine .* got True"),
        ({"steps_fine": 17}, "steps_fine must be at most steps_coarse = 16, got 17"),
        ({"staleness": -1}, "staleness must be an integer >= 0 or inf, got -1"),
        ({"staleness": 1.5}, "staleness .* got 1.5"),
        ({"ratio_coarse": 0.0}, "ratio_coarse must be a number > 0 and <= 1, or None, got 0.0"),
        ({"ratio_fine": 1.1}, "ratio_fine .* got 1.1"),
        ({"ratio_fine": True}, "ratio_fine .* got True"),
        ({"ratio_fine": None}, "must both be given or both be None, got 0.05 and None"),
        ({"loss_preset": NAN}, "loss_preset .* got nan"),
        ({"loss_preset": "low"}, "loss_preset .* got low"),
        ({"loss_preset": True}, "loss_preset .* got True"),
        ({"plateau": 0.0}, "plateau must be a number > 0 and < 1, got 0.0"),
        ({"plateau": NAN}, "plateau .* got nan"),
        ({"loss": "global"}, "loss must be one of commits, evaluation, got 'global'"),
        ({"share": "half"}, "share must be one of data, equal, got 'half'"),
        ({"commit": "later"}, "commit must be one of on-arrival, after-gate, got 'later'"),
        ({"warmup": -1}, "warmup must be an integer >= 0, got -1"),
        ({"profiled": 1}, "profiled must be an integer >= 2, got 1"),
    ],
)
def test_values_that_are_not_allowed_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        create("ashl", 3, **options)


def test_values_at_their_limits_are_allowed():
    limits = {"steps_coarse": 1, "steps_fine": 1, "ratio_coarse": 1.0, "ratio_fine": 1, "warmup": 0, "profiled": 2}
    assert create("ashl", 1, **limits, staleness=0).first(0).local_steps == 1
