"""DSSP: the controller, each settled ambiguity, the bounds, and an independent implementation of the algorithms."""

import math
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsync.paradigms import create
from hpcsync.paradigms.dssp import DSSP, closest_approach
from hpcsync.paradigms.events import Decision, Grant, Joined, Left, PushInfo
from tests.unit.paradigms.dssp_as_written import READINGS, Readings, brute_force, disagreement
from tests.unit.paradigms.schedule import PROPERTY, Schedule, fixed, run, schedules

both_modes = pytest.mark.parametrize("mode", ["bounded", "paper"])
bounds = st.tuples(st.integers(0, 3), st.integers(0, 6)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def dssp(n_workers, staleness_min, staleness_max, mode="bounded"):
    return create("dssp", n_workers, staleness_min=staleness_min, staleness_max=staleness_max, mode=mode)


# The controller


def test_controller_finds_the_r_of_figure_2():
    # Read off the figure, a push at the end of each compute block; r* = 3 in the paper.
    r_star, wait_s = closest_approach(416.0, 416.0 - 311.5, 383.0, 383.0 - 203.0, r_max=4, clamp=False)
    assert (r_star, wait_s) == (3, (383 + 2 * 180) - (416 + 3 * 104.5))


def test_g_of_equal_distances_the_smallest_r_wins_and_then_the_smallest_k():
    # Pushes of the worker at 10, 11, 12 ..., of the slowest at 12, 14, ...: distance 0 at r = 2, 4, 6 ...
    assert closest_approach(10.0, 1.0, 10.0, 2.0, r_max=8, clamp=False) == (2, 0.0)
    # Both k = 0 and k = 1 are at distance 1 from r = 0: the wait is that for k = 0, in the past.
    assert closest_approach(10.0, 9.0, 7.0, 2.0, r_max=3, clamp=False) == (0, -1.0)


def test_j_an_overdue_slowest_is_expected_now():
    # Expected at 4 and 8, now it is 10: unclamped the push after next, at 12, is met after two iterations.
    assert closest_approach(10.0, 1.0, 0.0, 4.0, r_max=4, clamp=False) == (2, 0.0)
    assert closest_approach(10.0, 1.0, 0.0, 4.0, r_max=4, clamp=True) == (0, 0.0)


_s = st.one_of(st.integers(0, 12).map(float), st.floats(0.0, 50.0), st.floats(0.0, 1e-12), st.floats(0.0, 1e9))


@PROPERTY
@given(pushed_s=_s, interval_s=_s, slowest_begin_s=_s, slowest_interval_s=_s, r_max=st.integers(0, 14))
@both_modes
def test_controller_equals_the_brute_force(pushed_s, interval_s, slowest_begin_s, slowest_interval_s, r_max, mode):
    seen = pushed_s, interval_s, slowest_begin_s, slowest_interval_s, r_max
    clamp = mode == "bounded"
    result = closest_approach(*seen, clamp=clamp)
    assert result == brute_force(*seen, clamp)
    assert 0 <= result[0] <= r_max


# The server: events by hand


def play(paradigm, *pushes):
    """Return the answers to (now_s, worker) pushes, without their updates."""
    return [paradigm.handle(PushInfo(now_s, worker))[1:] for now_s, worker in pushes]


# Worker 1 pushes every 4 s, worker 0 at the end every second: at 11 s its lead is 2, and worker 1 is due at 12 s.
HISTORY = [(4.0, 1), (7.0, 0), (8.0, 1), (9.0, 0), (10.0, 0)]


def credits_used(mode, staleness_max):
    """Extra iterations that worker 0 starts from its first excess of s_L = 1 on, while worker 1 is silent."""
    paradigm = dssp(2, 1, staleness_max, mode)
    play(paradigm, *HISTORY)
    answers = play(paradigm, (11.0, 0))
    now_s = 11.0
    while answers[-1] and isinstance(answers[-1][-1], Grant) and answers[-1][-1].credits:
        now_s += 1.0
        answers += play(paradigm, (now_s, 0))
    return answers


def test_b_r_star_n_gives_n_iterations_bounded_and_n_plus_1_in_the_paper():
    bounded, paper = credits_used("bounded", 7), credits_used("paper", 7)
    for answers in (bounded, paper):
        assert isinstance(answers[0][0], Decision)
        assert answers[0][0].chosen == 1.0  # due at 12 s, one iteration from now
    assert [grants[-1].credits for grants in bounded] == [0]
    assert [grants[-1].credits for grants in paper] == [1, 0]


def test_decision_inputs():
    paradigm = dssp(2, 1, 7)
    answers = play(paradigm, *HISTORY, (11.0, 0))
    assert [len(answer) for answer in answers] == [1, 1, 1, 1, 1, 2]
    decision, grant = answers[-1]
    assert decision == Decision("dssp", 0, 1.0, (2.0, 1.0, 1.0, 8.0, 4.0, 1.0, 0.0))
    assert len(decision.inputs) == len(DSSP.decision_fields)
    assert grant == Grant(0, 5, gap_iters=2, credits=0, held_s=0.0)


def test_c_a_grant_is_clipped_to_staleness_max():
    # Worker 1 takes 100 s: the best r is the largest. At lead 2 the clip leaves all of r_max = 3. Once these are spent,
    # at lead 5 > s_U, the worker blocks without consulting the controller. In paper mode the controller grants more.
    pushes = [(100.0, 1), (199.0, 0), (200.0, 1), (200.5, 0), (201.0, 0), (201.5, 0)]
    more = [(202.0, 0), (202.5, 0), (203.0, 0)]
    bounded, paper = dssp(2, 1, 4), dssp(2, 1, 4, "paper")
    assert play(bounded, *pushes)[-1][0].chosen == 3.0
    assert [[type(action) for action in answer] for answer in play(bounded, *more)] == [[Grant], [Grant], []]
    assert play(paper, *pushes)[-1][0].chosen == 3.0
    answers = play(paper, *more, (203.5, 0))
    assert [[type(action) for action in answer] for answer in answers] == [[Grant]] * 3 + [[Decision, Grant]]
    assert answers[-1][1].gap_iters == 6  # beyond s_U = 4, with credits for more
    assert answers[-1][1].credits == 3


def test_c_a_second_grant_is_clipped_below_r_star():
    # First r* = 1; then the worker gets faster, and r* exceeds the rest.
    paradigm = dssp(2, 0, 2)
    play(paradigm, (10.0, 1), (10.0, 0), (20.0, 1), (28.0, 0))  # worker 1, held until 28 s, is due at 38 s
    first = play(paradigm, (33.0, 0))[-1]
    second = play(paradigm, (33.1, 0))[-1]
    assert (first[0].chosen, first[1].gap_iters) == (1.0, 1)
    r_star = second[0].inputs[list(DSSP.decision_fields).index("r_star")]
    assert (r_star, second[0].chosen, second[1].gap_iters) == (2.0, 1.0, 2)


@both_modes
def test_d_and_h_without_two_pushes_of_both_no_credits_are_granted(mode):
    paradigm = dssp(2, 0, 5, mode)
    # Every push is recorded: worker 1 has never consulted the controller, but has a history.
    answers = play(paradigm, (1.0, 0), (2.0, 1), (3.0, 0), (4.0, 1), (5.0, 0))
    unknown, known = answers[0][0], answers[4][0]
    assert isinstance(unknown, Decision)
    assert unknown.chosen == 0.0
    assert math.isnan(unknown.inputs[list(DSSP.decision_fields).index("slowest")])
    assert answers[2][0].chosen == 0.0
    assert known.inputs[list(DSSP.decision_fields).index("slowest")] == 1.0


def test_e_of_the_slowest_the_one_predicted_last_counts():
    paradigm = dssp(5, 0, 5)
    # All are granted at 5 s. Worker 1 then takes 4 s, workers 2 and 3 take 9 s: due at 13, 23 and 23 s.
    play(paradigm, (2.0, 1), (4.0, 3), (4.0, 2), (5.0, 4), (5.0, 0))
    play(paradigm, (9.0, 1), (10.0, 0), (10.0, 4), (14.0, 2), (14.0, 3))

    def slowest(now_s, worker):
        decision = play(paradigm, (now_s, worker))[0][0]
        return dict(zip(DSSP.decision_fields, decision.inputs, strict=True))

    of_two = slowest(14.5, 0)  # the tie goes to the lower worker
    assert (of_two["slowest"], of_two["slowest_pushed_s"], of_two["slowest_interval_s"]) == (2.0, 14.0, 9.0)
    paradigm.handle(Left(14.5, 2))
    assert slowest(14.6, 4)["slowest"] == 3.0


def test_i_a_slowest_worker_that_was_held_is_expected_from_its_grant():
    """Worker 0 takes 5 s and is held from 10 to 20 s, so it is due at 25 s; as printed it has been due since 15 s."""
    pushes = (5.0, 0), (5.001, 1), (10.0, 0), (20.0, 1), (21.0, 1)
    fields = list(DSSP.decision_fields)
    (bounded, *_), (paper, *_) = (play(dssp(2, 0, 6, mode), *pushes)[-1] for mode in ("bounded", "paper"))
    assert bounded.inputs[fields.index("r_star")] == 4.0
    assert abs(bounded.inputs[fields.index("predicted_wait_s")]) < 0.01
    assert paper.inputs[fields.index("slowest_pushed_s")] + paper.inputs[fields.index("slowest_interval_s")] == 15.0


@both_modes
def test_f_all_equally_fast_workers_consult(mode):
    paradigm = dssp(3, 1, 6, mode)
    answers = play(
        paradigm,
        *[(4.0, 2), (7.0, 0), (7.0, 1), (8.0, 2), (8.0, 0), (8.0, 1), (9.0, 0), (9.0, 1)],
        *[(9.5, 0), (9.5, 1)],
    )
    assert [type(answer[0]) for answer in answers[-2:]] == [Decision, Decision]


@both_modes
def test_only_the_fastest_consults(mode):
    paradigm = dssp(3, 0, 6, mode)
    play(paradigm, (4.0, 2), (4.0, 1), (4.0, 0), (8.0, 2), (8.0, 1), (8.0, 0), (9.0, 0), (9.5, 0))
    assert play(paradigm, (9.7, 1))[-1] == []  # ahead of worker 2, behind worker 0: blocked without consulting


@pytest.mark.parametrize(("mode", "intervals_s"), [("bounded", [1.0, 1.0]), ("paper", [1.0, 9.0])])
def test_i_waiting_counts_as_interval_only_in_the_paper(mode, intervals_s):
    # Granted at 1 s, blocked from 2 s to 10 s, then 1 s of work.
    answers = play(dssp(2, 1, 5, mode), (1.0, 0), (2.0, 0), (10.0, 1), (11.0, 0))
    column = list(DSSP.decision_fields).index("interval_s")
    assert [answers[i][0].inputs[column] for i in (1, 3)] == intervals_s


@both_modes
def test_k_a_gap_of_staleness_min_is_granted(mode):
    answers = play(dssp(2, 3, 9, mode), (1.0, 0), (2.0, 0), (3.0, 0), (4.0, 0))
    assert [[type(action) for action in answer] for answer in answers] == [[Grant]] * 3 + [[Decision]]


def test_l_the_prediction_is_for_one_push_of_the_slowest_the_real_wait_for_several():
    paradigm = dssp(2, 0, 2)
    play(paradigm, (10.0, 1), (10.0, 0), (20.0, 1), (20.0, 0))
    decision = play(paradigm, (22.0, 0), (24.0, 0))[0][0]
    inputs = dict(zip(DSSP.decision_fields, decision.inputs, strict=True))
    assert (decision.chosen, inputs["predicted_wait_s"]) == (2.0, 30.0 - 26.0)
    assert play(paradigm, (26.0, 0)) == [[]]  # the two are used up, at a lead of 3
    assert [len(answer) for answer in play(paradigm, (30.0, 1), (40.0, 1))] == [1, 1]
    assert play(paradigm, (50.0, 1))[0][1] == Grant(0, 6, gap_iters=0, credits=0, held_s=24.0)


@both_modes
def test_n_a_departure_releases_and_leaves_the_slowest(mode):
    paradigm = dssp(3, 0, 0, mode)
    play(paradigm, (1.0, 0), (2.0, 1))
    assert [grant.worker for grant in paradigm.handle(Left(3.0, 2))] == [0, 1]


@both_modes
def test_h_the_history_is_reset_by_a_join(mode):
    paradigm = dssp(2, 0, 5, mode)
    play(paradigm, (1.0, 0), (2.0, 1), (3.0, 0), (4.0, 1))
    paradigm.handle(Left(4.5, 1))
    paradigm.handle(Joined(20.0, 1))
    decision = play(paradigm, (21.0, 0))[0][0]
    assert decision.chosen == 0.0
    assert math.isnan(decision.inputs[list(DSSP.decision_fields).index("slowest")])


# Random schedules


@both_modes
@PROPERTY
@given(schedule=schedules(max_changes=6), limits=bounds)
def test_every_answer_is_that_of_the_algorithms_as_written(mode, schedule, limits):
    assert disagreement(dssp(schedule.n_workers, *limits, mode), *limits, READINGS[mode], schedule) is None


readings = st.builds(Readings, *[st.booleans()] * 4)


@both_modes
@PROPERTY
@given(schedule=schedules(max_changes=6), limits=bounds, read=readings)
def test_every_choice_of_readings_is_that_of_the_algorithms_as_written(mode, schedule, limits, read):
    s_l, s_u = limits
    paradigm = DSSP(schedule.n_workers, staleness_min=s_l, staleness_max=s_u, mode=mode, **read.options)
    assert disagreement(paradigm, s_l, s_u, read, schedule) is None


@PROPERTY
@given(schedule=schedules(max_changes=6), limits=bounds, read=readings)
def test_the_upper_limit_is_kept_under_every_reading_that_enforces_it(schedule, limits, read):
    s_l, s_u = limits
    options = read._replace(c=True).options
    run(DSSP(schedule.n_workers, staleness_min=s_l, staleness_max=s_u, **options), schedule, bound_iters=s_u)


@pytest.mark.parametrize("letter", Readings._fields)
def test_each_reading_matters(letter):
    """On some schedule each of them alone changes the answers of bounded mode."""
    bounded = READINGS["bounded"]
    other = bounded._replace(**{letter: False})
    found = [
        disagreement(DSSP(schedule.n_workers, **LIMITS, **other.options), 1, 5, bounded, schedule)
        for schedule in (NOISY, TAKING_TURNS, STALLING)
    ]
    assert any(event is not None for event in found)


@PROPERTY
@given(schedule=schedules(max_changes=6), limits=bounds)
def test_bounded_mode_keeps_its_bounds_at_every_event(schedule, limits):
    run(dssp(schedule.n_workers, *limits), schedule, bound_iters=limits[1])


@both_modes
@PROPERTY
@given(schedule=schedules(max_changes=6), staleness=st.integers(0, 4))
def test_equal_bounds_give_the_trace_of_ssp(mode, schedule, staleness):
    n_workers = schedule.n_workers
    assert (
        run(dssp(n_workers, staleness, staleness, mode), schedule).trace
        == run(create("ssp", n_workers, staleness=staleness), schedule).trace
    )


def test_unequal_bounds_do_not():
    schedule = fixed(1.0, 2.3, until_s=100.0)
    assert run(dssp(2, 3, 9), schedule).trace != run(create("ssp", 2, staleness=3), schedule).trace


@both_modes
def test_equal_workers_never_consult(mode):
    referee = run(dssp(4, 1, 9, mode), fixed(1.0, 1.0, 1.0, 1.0, until_s=50.0))
    assert referee.actions(Decision) == []
    assert run(dssp(4, 1, 9, mode), fixed(1.0, 1.0, 1.0, 1.5, until_s=50.0)).actions(Decision) != []


@both_modes
@PROPERTY
@given(schedule=schedules(), limits=bounds)
def test_r_star_is_in_range_and_explains_the_choice(mode, schedule, limits):
    s_l, s_u = limits
    for decision in run(dssp(schedule.n_workers, s_l, s_u, mode), schedule).decisions():
        assert 0 <= decision["r_star"] <= s_u - s_l
        assert decision["gap_iters"] > s_l
        left = s_u - decision["gap_iters"] + 1 if mode == "bounded" else math.inf
        assert decision["chosen"] == min(decision["r_star"], left)


# The flaw of the printed algorithm, and its cure by the bound: s_L = 3, s_U = 15.


@pytest.mark.parametrize(("until_s", "lead"), [(200.5, 100), (1000.5, 500), (2000.5, 1000)])
def test_paper_mode_never_blocks_and_its_lead_grows_without_bound(until_s, lead):
    referee = run(dssp(2, 3, 15, "paper"), fixed(1.0, 2.0, until_s=until_s))
    assert referee.pushes == [int(until_s), int(until_s / 2)]
    assert all(grant.held_s == 0.0 for grant in referee.actions(Grant))
    assert referee.largest_push_gap == lead


@pytest.mark.parametrize("interval_s", [2.0, 2.3, math.pi])
def test_bounded_mode_cures_it(interval_s):
    referee = run(dssp(2, 3, 15), fixed(1.0, interval_s, until_s=2000.5), bound_iters=15)
    assert referee.pushes[0] <= referee.pushes[1] + 16
    with pytest.raises(AssertionError, match="beyond the bound of 15"):
        run(dssp(2, 3, 15, "paper"), fixed(1.0, interval_s, until_s=2000.5), bound_iters=15)


# Negative controls


class Unclipped(DSSP):
    def _credits_max(self, gap_iters):
        return self.r_max


class SpendsNoCredit(DSSP):
    def _answer(self, worker):
        credits = self._credits[worker]
        actions = super()._answer(worker)
        self._credits[worker] = max(credits, self._credits[worker])
        return actions


class AsksTheFirstOfTheSlowest(DSSP):
    """Takes the one that pushed first."""

    def _slowest(self):
        slowest = super()._slowest()
        return None if slowest is None else min(self._progress.slowest(), key=lambda w: self._pushed_s[w])


class MeasuresWaits(DSSP):
    def _grant(self, worker, **chosen):
        begin_s = self._interval_begin_s[worker]
        grant = super()._grant(worker, **chosen)
        self._interval_begin_s[worker] = begin_s
        return grant


class PredictsFromThePush(DSSP):
    """Expects a slowest worker as if it had not been held."""

    def _consult(self, worker, gap_iters, credits_max):
        begin_s = self._interval_begin_s.copy()
        self._interval_begin_s[:] = self._pushed_s
        answer = super()._consult(worker, gap_iters, credits_max)
        begin_s[worker] = self._interval_begin_s[worker]
        self._interval_begin_s[:] = begin_s
        return answer


NOISY = Schedule([[1.0, 0.7, 1.2] * 40, [2.2, 1.9, 2.4] * 20, [2.0, 2.5, 2.1] * 20, [1.1, 3.0, 2.0] * 20])
TAKING_TURNS = Schedule([[1.0] * 7 + [7.0] * 7 + [1.0] * 6, [7.0] * 7 + [1.0] * 6 + [7.0] * 5])  # at being slow
STALLING = Schedule([[4.5] * 12, [4.0, 4.0, 22.0, 4.0, 4.0]])  # worker 1, once
LIMITS = {"staleness_min": 1, "staleness_max": 5}


@pytest.mark.parametrize("kind", [Unclipped, SpendsNoCredit])
def test_check_and_the_referee_see_a_controller_without_bound(kind):
    with pytest.raises(AssertionError, match="credits up to a lead of"):
        run(kind(4, **LIMITS), NOISY)
    with pytest.raises(AssertionError, match=r"beyond the bound of 5|push lead"):
        run(kind(4, **LIMITS), NOISY, bound_iters=5, check=False)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        (AsksTheFirstOfTheSlowest, NOISY),
        (MeasuresWaits, NOISY),
        (PredictsFromThePush, TAKING_TURNS),
        (Unclipped, NOISY),
    ],
)
def test_the_comparison_with_the_algorithms_sees_a_wrong_branch(kind, schedule):
    n_workers = schedule.n_workers
    assert disagreement(DSSP(n_workers, **LIMITS), 1, 5, READINGS["bounded"], schedule) is None
    assert disagreement(kind(n_workers, **LIMITS), 1, 5, READINGS["bounded"], schedule) is not None


@pytest.mark.parametrize(
    ("worker", "credits", "message"),
    [(0, 1, "blocked with 1 credits"), (1, 4, "has 4 credits")],
)
def test_check_sees_credits_out_of_order(worker, credits, message):
    paradigm = dssp(3, 1, 3)
    play(paradigm, (1.0, 2), (1.0, 0), (2.0, 0))
    assert 0 in paradigm._blocked_since_s
    paradigm.check()
    paradigm._credits[worker] = credits
    with pytest.raises(AssertionError, match=message):
        paradigm.check()


@pytest.mark.parametrize(("mode", "sees"), [("bounded", True), ("paper", False)])
def test_check_sees_a_lead_above_the_largest_bound_where_there_is_one(mode, sees):
    paradigm = dssp(2, 0, 1, mode)
    for _ in range(2):
        paradigm._progress.push(0)
    with pytest.raises(AssertionError, match="worker 0 has started at lead 2") if sees else nullcontext():
        paradigm.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"staleness_min": -1, "staleness_max": 3}, "staleness_min .* got -1"),
        ({"staleness_min": 1, "staleness_max": math.inf}, "staleness_max .* got inf"),
        ({"staleness_min": 4, "staleness_max": 3}, "staleness_max must be at least staleness_min = 4, got 3"),
        (
            {"staleness_min": 1, "staleness_max": 3, "mode": "literal"},
            "mode must be one of bounded, paper, got 'literal'",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        create("dssp", 2, **options)
