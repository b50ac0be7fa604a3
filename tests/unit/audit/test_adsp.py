"""Negative controls of the audit of ASHL, ADSP and pushed bytes: each trace violates one property."""

import dataclasses
import math

import numpy as np
import pytest

from hpcsync.audit.adsp import _CommitAccount, _Due
from hpcsync.audit.ashl import algorithm_1, algorithm_2
from hpcsync.audit.bounds import check_bounds
from hpcsync.audit.compression import check_payloads
from hpcsync.audit.server_recount import Recount
from hpcsync.core import coordinator
from hpcsync.paradigms.ashl import ASHL as ASHLPolicy
from hpcsync.paradigms.events import Apply, Drop, PushInfo
from hpcsync.paradigms.records import Problem
from hpcsync.trace.schema import Outcome
from tests.unit.audit.failing import failing, failing_bounds
from tests.unit.audit.test_bounds import delay_grant
from tests.unit.recorder import Recorder
from tests.unit.trace import recorder
from tests.unit.trace.recorder import (
    ASHL,
    PARADIGMS,
    TOP_K,
    as_trace,
    edit,
    job_of,
    on_ranks,
    record,
    with_job,
    with_rows,
    with_status,
)

FIXED = 'name = "adsp"\ncheck_period_s = 12\ninterval_min_s = 2\ncommits = 3'
SEARCHING = 'name = "adsp"\ncheck_period_s = 3\ninterval_min_s = 0.5\nsearch_every_s = 10'


def rows_of(trace, controller):
    return np.flatnonzero(trace.tables["decisions"]["controller"] == controller.encode())


@pytest.fixture(scope="module")
def ashl():
    """A trace of ASHL whose worker 1 leaves in the fine stage."""
    trace = record("ashl", jitter=0.3, updates=90, leave={1: 18})
    assert len(rows_of(trace, "stage")) == 2
    assert trace.tables["membership"]["now_s"][0] > trace.tables["decisions"]["now_s"][rows_of(trace, "stage")[1]]
    return trace


@pytest.fixture(scope="module")
def adsp():
    """A trace of ADSP with several searches."""
    trace = record(SEARCHING, jitter=0.3, updates=90)
    assert len(rows_of(trace, "commits")) >= 2
    return trace


def test_a_commit_whose_steps_were_all_skipped_has_no_weight(adsp):
    row = int(np.flatnonzero(adsp.tables["pushes"]["weight"] > 0)[3])
    skipped = edit(adsp, "pushes", row, problem=Problem.SKIPPED, weight=0.0)
    name = "each commit has weight 1 / n_workers"
    assert name not in failing_bounds(skipped)
    assert name in failing_bounds(edit(skipped, "pushes", row, weight=0.5))
    assert name in failing_bounds(edit(adsp, "pushes", row, weight=0.0))


# ---- ASHL ----

STAGES, PLANS, DO = (
    "each stage begins once, in order, when due",
    "plans follow from the measured times",
    "local steps and ratios are as planned",
)
SHARE, ALLOCATED = "the weight of a commit is its share", "each sample is allocated exactly once"


@pytest.mark.parametrize("compression", ["", TOP_K])
@pytest.mark.parametrize("share", ["data", "equal"])
@pytest.mark.parametrize("loss", ["loss_preset = 0.12", "plateau = 0.5"])
def test_correct_ashl_traces_pass(loss, share, compression):
    paradigm = f'{ASHL.replace("loss_preset = 0.12", loss)}\nshare = "{share}"\n{compression}'
    trace = record(paradigm, jitter=0.3, updates=120, leave={0: 9})
    assert rows_of(trace, "stage").size == 2
    assert failing(trace) == set()


def test_stages_come_in_order(ashl):
    first, second = rows_of(ashl, "stage")
    assert STAGES in failing_bounds(edit(ashl, "decisions", second, chosen=1.0))
    assert STAGES in failing_bounds(edit(ashl, "decisions", first, chosen=2.0))
    assert failing_bounds(edit(ashl, "decisions", second, chosen=3.0)) >= {STAGES, PLANS}
    assert failing_bounds(edit(ashl, "decisions", second, loss=0.5)) == {STAGES}
    fewer = np.delete(ashl.tables["decisions"], rows_of(ashl, "stage")[1])
    assert STAGES in failing_bounds(with_rows(ashl, "decisions", fewer))
    again = np.concatenate([ashl.tables["decisions"], ashl.tables["decisions"][first : first + 1]])
    again["seq"][-1] = ashl.tables["decisions"]["seq"].max() + 1
    assert STAGES in failing_bounds(with_rows(ashl, "decisions", again)), "the stage goes back"


@pytest.mark.parametrize(
    ("was", "other", "names"),
    [
        ("loss_preset = 0.12", "loss_preset = 0.2", {STAGES}),
        ("loss_preset = 0.12", "loss_preset = 0.05", {STAGES}),
        ("loss_preset = 0.12", "plateau = 0.9", {STAGES}),
        ("profiled = 4", "profiled = 5", {STAGES, PLANS}),
        ("warmup = 1", "warmup = 2", {STAGES, PLANS, DO}),
        ("steps_coarse = 4", "steps_coarse = 5", {PLANS}),
        ("steps_fine = 2", "steps_fine = 3", {PLANS}),
        ("staleness = 1", "staleness = 1\nratio_fine = 0.2", {PLANS}),
        ("staleness = 1", "staleness = 1\nratio_coarse = 0.1", {PLANS, DO}),
        ("staleness = 1", 'staleness = 1\nshare = "equal"', {PLANS}),
        ("staleness = 1", "staleness = 0", {"push lead in the fine stage is at most 1"}),
        ("staleness = 1", "staleness = 2", {"no worker is blocked needlessly in the fine stage"}),
    ],
)
def test_other_options_of_ashl(ashl, was, other, names):
    assert failing_bounds(with_job(ashl, f"{ASHL.replace(was, other)}\n{TOP_K}")) == names


@pytest.mark.parametrize(
    ("controller", "column"),
    [
        *((name, "chosen") for name in ("local-steps", "share", "ratio")),
        *((name, column) for name in ("local-steps", "ratio") for column in ("push_s", "pull_s", "encode_s")),
        ("local-steps", "iteration_s"),
    ],
)
def test_plans_must_follow_from_their_inputs(ashl, controller, column):
    for row in rows_of(ashl, controller)[[0, -1]]:
        value = ashl.tables["decisions"][column][row]
        assert PLANS in failing_bounds(edit(ashl, "decisions", row, **{column: value * 1.001 + (column == "chosen")}))


@pytest.mark.parametrize(
    ("column", "sparse"), [("compute_s", False), ("pull_s", True), ("comm_s", False), ("encode_s", True)]
)
def test_plans_must_follow_from_the_measurements(ashl, column, sparse):
    pushes = ashl.tables["pushes"].copy()
    measured = (pushes["worker"] == 2) & (pushes["iteration"] > 1) & (pushes["iteration"] <= 5)
    measured &= (pushes["iteration"] % 2 == 1) == sparse
    assert measured.sum() == 2
    pushes[column][measured] *= 1.5
    assert PLANS in failing_bounds(with_rows(ashl, "pushes", pushes))


def test_a_departure_without_new_shares(ashl):
    shared = rows_of(ashl, "share")[-2:]
    assert ashl.tables["decisions"]["worker"][shared].tolist() == [0, 2]
    kept = np.delete(ashl.tables["decisions"], shared)
    assert PLANS in failing_bounds(with_rows(ashl, "decisions", kept))
    assert PLANS in failing_bounds(with_rows(ashl, "decisions", np.delete(ashl.tables["decisions"], shared[0])))


def test_the_profile_stage_has_no_shares():
    assert failing_bounds(record(ASHL, updates=5)) == set(), "the run ends in it"
    trace = record(ASHL, jitter=0.3, changes=[(3.0, 1)])
    assert failing_bounds(trace) == set()
    decisions, died = trace.tables["decisions"], trace.tables["membership"]["seq"][0]
    assert decisions["seq"][0] > died + 2
    again = decisions[rows_of(trace, "share")[:2]]
    for chosen in (0.5, np.nan):
        again["seq"], again["chosen"] = died + 1, chosen
        assert failing_bounds(with_rows(trace, "decisions", np.concatenate([again, decisions]))) == {PLANS}


def test_a_trace_that_ends_within_a_plan_passes(ashl):
    decisions = ashl.tables["decisions"]
    for seq in decisions["seq"][rows_of(ashl, "stage")[1] :].tolist():
        cut = with_status(ashl, "failed")
        for table in ("pushes", "grants", "decisions", "membership"):
            cut = with_rows(cut, table, ashl.tables[table][ashl.tables[table]["seq"] <= seq])
        assert failing_bounds(cut) == set(), seq
    assert PLANS in failing_bounds(edit(cut, "decisions", rows_of(ashl, "share")[0], chosen=0.9))


@pytest.mark.parametrize("row", [3, 40, 80])
def test_grants_and_pushes_of_ashl(ashl, row):
    grant = ashl.tables["grants"][row]
    assert failing_bounds(edit(ashl, "grants", row, local_steps=grant["local_steps"] + 1)) == {DO, ALLOCATED}
    assert failing_bounds(edit(ashl, "grants", row, ratio=grant["ratio"] * 0.99)) == {DO}
    assert failing_bounds(edit(ashl, "grants", row, ratio=np.nan)) == {DO}
    assert failing_bounds(edit(ashl, "grants", row, commit_s=1.0)) == {DO}
    assert failing_bounds(edit(ashl, "grants", row, first_sample=grant["first_sample"] + 8)) == {ALLOCATED}
    assert failing_bounds(edit(ashl, "grants", row, batch_size=grant["batch_size"] + 8)) == {ALLOCATED}
    assert failing_bounds(edit(ashl, "pushes", row, local_steps=9, batch_size=72)) - {PLANS} == {DO}
    assert failing_bounds(edit(ashl, "pushes", row, weight=0.3)) == {SHARE}


def test_a_stop_grant_allocates_no_samples(ashl):
    assert ashl.tables["grants"]["local_steps"][-1] == 0
    assert failing_bounds(edit(ashl, "grants", -1, first_sample=8)) == {ALLOCATED}


def test_a_worker_that_leaves_may_have_made_fewer_steps(ashl):
    pushes = ashl.tables["pushes"]
    row = np.flatnonzero(pushes["worker"] == 1)[-1]
    steps = int(pushes["local_steps"][row])
    assert failing_bounds(edit(ashl, "pushes", row, local_steps=steps - 1, batch_size=8 * steps - 8)) == set()
    assert failing_bounds(edit(ashl, "pushes", row, local_steps=steps + 1, batch_size=8 * steps + 8)) == {DO}


def test_a_blocked_worker_in_the_profile_stage(ashl):
    assert "no worker is blocked before the fine stage" in failing_bounds(delay_grant(ashl, worker=0, iteration=2))


# ---- ASHL: commits that wait ----

AT_ONCE, GATE = "commits are applied on arrival", "commits are applied once the gate is open"
AFTER_GATE = PARADIGMS["ashl-after-gate"]
ON_ARRIVAL = AFTER_GATE.replace("after-gate", "on-arrival")


class WithTheNextPush(ASHLPolicy):
    """Applies what is kept back with the next push, before its worker may continue; nobody waits longer or less."""

    def _pushed(self, event):
        blocked = set(self._blocked_since_s)
        soon = [action for worker in sorted(blocked) for action in self._kept(worker)]
        self._begun -= blocked
        return [*soon, *super()._pushed(event)]


class AfterItsGrant(ASHLPolicy):
    """Applies what was kept back after the grant of its worker, which reads the weights without it."""

    def _release(self):
        return sorted(super()._release(), key=lambda action: isinstance(action, Apply))


class Dropping(ASHLPolicy):
    """Drops what it should apply after the gate."""

    def _kept(self, worker):
        return [Drop(worker) for _ in super()._kept(worker)]


def record_with(monkeypatch, policy, **how):
    monkeypatch.setattr(coordinator, "create_paradigm", lambda job: policy(job.cluster.workers, **job.paradigm_options))
    return record(AFTER_GATE, jitter=0.3, updates=90, **how)


CHANGES = [(40.0, 0), (60.0, 0), (61.3, 2), (70.0, 2)]


@pytest.mark.parametrize("how", [{}, {"leave": {1: 18}}, {"changes": CHANGES}], ids=["", "leave", "join"])
def test_traces_of_commits_that_wait_pass(how):
    trace = record("ashl-after-gate", jitter=0.3, updates=90, **how)
    assert failing(trace) == set()
    recount = Recount(trace)
    assert (recount.applied_after != trace.tables["pushes"]["seq"]).sum() > 9


def test_a_commit_that_is_not_applied_when_it_may_is_found(monkeypatch):
    late, early = record("ashl-after-gate", jitter=0.3), record(ON_ARRIVAL, jitter=0.3)
    assert GATE in failing_bounds(with_job(early, AFTER_GATE))
    assert failing_bounds(with_job(late, ON_ARRIVAL)) == {AT_ONCE}
    assert failing_bounds(record_with(monkeypatch, ASHLPolicy)) == set()
    assert GATE in failing_bounds(record_with(monkeypatch, WithTheNextPush))
    assert GATE in failing_bounds(record_with(monkeypatch, Dropping))
    trace = record_with(monkeypatch, AfterItsGrant)
    assert "each grant names the current version" in failing(trace)


def test_a_departed_worker_s_commit_must_be_applied_at_its_departure(monkeypatch):
    """Worker 0 dies while its commit is kept back; with none made of it, the audit fails."""

    class Forgetting(ASHLPolicy):
        def _left(self, worker):
            self._begun.discard(worker)
            return super()._left(worker)

    sound = record_with(monkeypatch, ASHLPolicy)
    pushes = sound.tables["pushes"]
    row = np.flatnonzero((Recount(sound).applied_after != pushes["seq"]) & (pushes["worker"] == 0))[3]
    die = [(pushes["now_s"][row] + 1e-6, 0)]
    trace = record_with(monkeypatch, ASHLPolicy, changes=die)
    assert failing(trace) == set()
    assert Recount(trace).applied_after[row] == trace.tables["membership"]["seq"][0]
    assert GATE in failing_bounds(record_with(monkeypatch, Forgetting, changes=die))


def test_unfinished_traces_of_commits_that_wait():
    """They may end at any row. A row too few before is found."""
    job, rows = job_of("ashl-after-gate", updates=90), Recorder()
    fields = recorder.play(job, rows, (1.0, 1.3, 2.1), jitter=0.3)
    continues = 0
    for n in range(200, len(rows.rows), 3):
        cut = as_trace(job, rows.rows[:n], fields, status="failed")
        assert failing(cut) == set(), n
        continues += Recount(cut).continues
    assert continues > 9
    pushes = cut.tables["pushes"]
    fewer = with_rows(cut, "pushes", np.delete(pushes, len(pushes) // 2))
    assert "seq numbers each row once" in failing(fewer)


def test_the_algorithms_by_hand():
    """Compare the algorithms with a calculation by hand.

    Steps take 1 s and 2 s, pushes 1 s and 4 s, pulls 1 s each. With 2 steps the slow worker needs 4 + 5 s; in 9 s the
    fast one makes 7 steps. To send an eighth of the elements with their indices takes the slow worker 1 of 6.5 s, and
    the fast one 0.25 of 8.75 s, the longest.
    """
    times = np.array([[1.0, 1.0, 1.0, 0.5], [2.0, 4.0, 1.0, 0.5]])
    assert algorithm_1(times, 2).tolist() == [7, 2]
    assert algorithm_2(times, np.array([7, 2]), 0.125).tolist() == [0.125, 3.25 / 8]
    assert algorithm_2(times, np.array([7, 2]), 0.5).tolist() == [1.0, 1.0], "sending all elements takes no longer"
    assert algorithm_1(np.zeros((2, 4)), 3).tolist() == [3, 3], "there are no measurements"
    assert algorithm_2(np.array([[0.4, 0.3, 0.0, 0.0]]), np.array([1]), 0.75).tolist() == [1.0]
    assert algorithm_2(np.zeros((2, 4)), np.array([3, 3]), 0.125).tolist() == [1, 1]


# ---- ADSP ----

ONE_OF_ALL, DUE = "each commit has weight 1 / n_workers", "commits come when due"
WAITS, TRIALS = "workers block only for a trial", "searches raise the rate by one and choose the best"


def rule(interval_s, name="cumulative"):
    return f"commit times follow the {name} rule, at least {interval_s:g} s apart"


@pytest.mark.parametrize("rule", ["cumulative", "released"])
@pytest.mark.parametrize("paradigm", [FIXED, SEARCHING, f"{SEARCHING}\nloss_target = 0.1"])
def test_correct_adsp_traces_pass(paradigm, rule):
    trace = record(f'{paradigm}\nrule = "{rule}"', jitter=0.3, updates=90, leave={0: 9})
    assert failing(trace) == set()


def test_grants_of_adsp(adsp):
    grant = adsp.tables["grants"][30]
    assert failing_bounds(edit(adsp, "pushes", 30, weight=0.5)) == {ONE_OF_ALL}
    assert failing_bounds(edit(adsp, "grants", 30, local_steps=2)) == {DUE}
    assert failing_bounds(edit(adsp, "grants", 30, ratio=0.5)) == {DUE}
    assert failing_bounds(edit(adsp, "grants", 30, commit_s=grant["commit_s"] + 0.01)) == {rule(0.5)}
    pushes = adsp.tables["pushes"]
    late = edit(adsp, "pushes", 30, end_s=pushes["begin_s"][30])
    assert failing_bounds(late) == {DUE}, "its last step ends before the commit is due"


def test_the_clock_of_a_worker_may_say_that_its_commit_came_early(adsp):
    pushes = adsp.tables["pushes"].copy()
    own = (pushes["worker"] == 1) & (pushes["iteration"] > 1)
    for column in ("begin_s", "end_s"):
        pushes[column][own] -= 2.0
    early = with_rows(adsp, "pushes", pushes)
    assert DUE in failing_bounds(early)
    n_servers, n_workers = adsp.job.cluster.servers, adsp.n_workers
    for worker in range(n_workers):
        uncertain_s = np.where(np.arange(n_servers + n_workers) == n_servers + worker, 2.01, 0.0)
        assert (DUE in failing_bounds(on_ranks(early, uncertain_s))) == (worker != 1)


@pytest.mark.parametrize(
    ("was", "other", "names"),
    [
        ("commits = 3", "commits = 4", {rule(2), DUE}),
        ("commits = 3", 'commits = 3\nrule = "released"', {rule(2, "released")}),
        ("interval_min_s = 2", "interval_min_s = 3", {rule(3)}),
        ("check_period_s = 12", "check_period_s = 13", {rule(2), DUE}),
    ],
)
def test_other_options_of_adsp(was, other, names):
    trace = record(FIXED, updates=90)
    assert failing_bounds(trace) == set()
    assert names - {DUE} <= failing_bounds(with_job(trace, FIXED.replace(was, other))) <= names


def test_a_search_begins_when_the_loss_rises(monkeypatch):
    def rising(**info):
        return PushInfo(**{**info, "loss": 1 / info["iteration"] + (info["now_s"] > 20)})

    monkeypatch.setattr(recorder, "PushInfo", rising)
    paradigm = SEARCHING.replace("search_every_s = 10", "search_every_s = 1e4\nloss_rise = 0.5")
    trace = record(paradigm, jitter=0.3, updates=200)
    assert np.diff(trace.tables["decisions"]["now_s"][rows_of(trace, "commits")] > 20).tolist() == [True]
    assert failing(trace) == set()
    searches = "searches raise the rate by one and choose the best"
    assert searches in failing_bounds(with_job(trace, paradigm.replace("loss_rise = 0.5", "loss_rise = 9e9")))


@pytest.mark.parametrize("paradigm", [SEARCHING, ASHL.replace("loss_preset = 0.12", "loss_preset = 0.06")])
@pytest.mark.parametrize("known", [0, 1], ids=["never", "seldom"])
def test_losses_that_are_not_known(monkeypatch, paradigm, known):
    """Worker 1 states a loss with every third commit, or with none: its last one counts, or nothing is decided."""

    def unknown(**info):
        if info["worker"] == 1 and (not known or info["iteration"] % 3):
            info["loss"] = np.nan
        return PushInfo(**info)

    monkeypatch.setattr(recorder, "PushInfo", unknown)
    trace = record(paradigm, jitter=0.3, updates=90)
    assert rows_of(trace, "reward" if paradigm == SEARCHING else "stage").size >= (1 if paradigm == SEARCHING else 2)
    assert failing(trace) == set()


def test_a_commit_that_is_not_applied(adsp):
    dropped = edit(adsp, "pushes", 30, outcome=Outcome.DROPPED, weight=0.0)
    assert failing_bounds(dropped) >= {WAITS, rule(0.5)}


def test_difference_of_commits_is_reported():
    (check,) = [check for check in check_bounds(Recount(record(FIXED))) if "difference of commits" in check.name]
    assert check.detail == "largest difference at a check: 1" and check.name.startswith("report, not a check: ")


def test_no_worker_blocks_outside_of_a_search(adsp):
    trace = record(FIXED, updates=30)
    assert failing_bounds(delay_grant(trace, worker=0, iteration=3)) == {WAITS}
    over = adsp.tables["decisions"]["now_s"][rows_of(adsp, "commits")[0]]
    grants = adsp.tables["grants"]
    after = grants[(grants["now_s"] > over) & (grants["held_s"] == 0)][1]
    assert failing_bounds(delay_grant(adsp, after["worker"], after["iteration"])) >= {WAITS}


def test_workers_block_for_a_trial(adsp):
    grants = adsp.tables["grants"]
    row = np.flatnonzero(grants["held_s"] > 0)[0]
    (push,) = np.flatnonzero(Recount(adsp).push_grant == row)
    pushes = adsp.tables["pushes"]
    seq, next_seq = pushes["seq"][push], pushes["seq"][push + 1]
    swapped = edit(edit(adsp, "pushes", push + 1, seq=grants["seq"][row]), "grants", row, seq=next_seq)
    assert seq < next_seq < grants["seq"][row]
    assert WAITS in failing_bounds(swapped)


@pytest.mark.parametrize(
    ("controller", "column"),
    [
        ("reward", "chosen"),
        ("reward", "reward"),
        ("reward", "loss_start"),
        ("reward", "loss_end"),
        ("commits", "chosen"),
    ],
)
def test_trials_must_follow_from_the_run(adsp, controller, column):
    for row in rows_of(adsp, controller)[1:3]:
        value = adsp.tables["decisions"][column][row]
        assert TRIALS in failing_bounds(edit(adsp, "decisions", row, **{column: 1.001 * value + (column == "chosen")}))


def test_missing_and_extra_decisions(adsp):
    decisions = adsp.tables["decisions"]
    assert TRIALS in failing_bounds(with_rows(adsp, "decisions", np.delete(decisions, rows_of(adsp, "commits")[0])))
    assert TRIALS in failing_bounds(with_rows(adsp, "decisions", decisions[:-1]))
    again = np.concatenate([decisions, decisions[-1:]])
    assert TRIALS in failing_bounds(with_rows(adsp, "decisions", again))
    assert TRIALS in failing_bounds(with_job(adsp, f"{SEARCHING}\ncommits = 2"))


@pytest.mark.parametrize(("a2", "b", "d"), [(0.5, 0.5, 0.25), (0.01, 1.0, -3.0), (3.0, 1.0, 0.0)])
def test_rewards_of_a_known_curve(a2, b, d):
    """l(t) = 1 / (a^2 t + b) + d reaches the target after a known time, or never if it is at or below d."""
    times_s = (0.0, 1.5, 3.25)
    losses = tuple(1 / (a2 * t + b) + d for t in times_s)
    account = _CommitAccount(Recount(record(FIXED, updates=1)), record(FIXED, updates=1).job.paradigm)

    def is_reward(reward, target, losses=losses):
        return account._is_reward(reward, _Due("reward", 0, 1.0, losses, times_s, target))

    for then_s in (0.25, 2.0, 40.0):
        target = 1 / (a2 * then_s + b) + d
        assert is_reward(1 / then_s, target)
        assert not is_reward(1.0001 / then_s, target)
        assert not is_reward(-math.inf, target)
    assert is_reward(-math.inf, d - 0.5)
    assert not is_reward(0.1, d - 0.5)
    assert is_reward(-math.inf, losses[0] + 1), "the loss is below the target from the start"
    assert is_reward(-math.inf, target, losses[:2])
    assert is_reward(-math.inf, target, losses[::-1]), "the loss rises"


def test_unfinished_traces_of_searches(adsp):
    for n in range(20, 60):
        seq = adsp.tables["pushes"]["seq"][n]
        cut = with_status(adsp, "failed")
        for table in ("pushes", "grants", "decisions"):
            cut = with_rows(cut, table, adsp.tables[table][adsp.tables[table]["seq"] <= seq])
        assert failing_bounds(cut) == set()


@pytest.mark.parametrize("paradigm", [FIXED, f"{ASHL}\n{TOP_K}"])
def test_decisions_without_their_columns(paradigm):
    assert len(failing_bounds(with_job(record("asp"), paradigm))) >= 1


# ---- bytes and encoding time ----

BYTES, PARTS = "wire_bytes match the compression", "transfer time includes reading and excludes encoding"


def failing_payloads(trace):
    return failing(trace, check_payloads)


@pytest.mark.parametrize("compression", ["", '[compression]\nname = "sign"'])
def test_bytes_independent_of_values_are_equal(compression):
    trace = record(f'name = "asp"\n{compression}')
    assert failing_payloads(trace) == set()
    assert failing_payloads(edit(trace, "pushes", 5, wire_bytes=trace.tables["pushes"]["wire_bytes"][5] + 4)) == {BYTES}
    assert failing_payloads(edit(trace, "pushes", slice(None), wire_bytes=0)) == {BYTES}
    assert failing_payloads(edit(trace, "pushes", 5, encode_s=0.01)) == (set() if compression else {PARTS})
    assert failing_payloads(edit(trace, "pushes", 5, encode_s=-0.01)) == {PARTS}
    for pull_s in (-0.1, math.nan, trace.tables["pushes"]["comm_s"][5] + 0.1):
        assert failing_payloads(edit(trace, "pushes", 5, pull_s=pull_s)) == {PARTS}


def test_cancelled_iterations_only_read():
    trace = record("k-batch-sync")
    (row, *_) = np.flatnonzero(trace.tables["pushes"]["share"] < 1)
    assert failing_payloads(trace) == set()
    assert failing_payloads(edit(trace, "pushes", row, wire_bytes=4000)) == {BYTES}


@pytest.mark.parametrize("sized", [True, False])
def test_a_sparse_push_has_no_more_bytes_than_a_dense_one(ashl, sized):
    """Also in a trace of an earlier format, which lacks the sizes of tensors."""
    if not sized:
        known = {name: value for name, value in ashl.attributes.items() if name not in ("tensors", "element_bytes")}
        ashl = dataclasses.replace(ashl, attributes={**known, "format_version": 8})
    pushes = ashl.tables["pushes"]
    assert failing_payloads(ashl) == set()
    dense, sparse = (np.flatnonzero((pushes["worker"] == 0) & (pushes["iteration"] == n))[0] for n in (2, 3))
    most = int(pushes["wire_bytes"][dense])
    assert pushes["wire_bytes"][sparse] < most
    assert failing_payloads(edit(ashl, "pushes", dense, wire_bytes=most + 4)) == {BYTES}
    assert failing_payloads(edit(ashl, "pushes", sparse, wire_bytes=most + 4)) == {BYTES}
    assert failing_payloads(edit(ashl, "pushes", sparse, wire_bytes=most // 2 - 8)) == {BYTES}


def test_compression_of_the_jobs():
    assert job_of("ashl").compresses and not job_of(FIXED).compresses
