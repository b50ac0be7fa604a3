"""How long iterations take: seeded, independent of other workers, and distributed as the job says; and how that changes
while a worker trains."""

import itertools
import math
import os
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsync.config.cluster import ClusterEvent
from hpcsync.core.device_speed import Device, device, iteration_seconds
from tests.unit.jobs import make_job


def draw(n, worker=0, n_workers=4, seed=1, **compute):
    job = make_job(cluster={"workers": n_workers, "compute": compute})
    return list(itertools.islice(iteration_seconds(job.cluster.compute, seed, worker, n_workers), n))


RANDOM = [{"model": "lognormal", "seconds": 0.02, "jitter": 0.3}, {"model": "exponential", "seconds": 0.02}]


@pytest.mark.parametrize("compute", RANDOM, ids=lambda compute: compute["model"])
def test_times_follow_from_seed_and_worker_alone(compute):
    assert draw(50, worker=1, n_workers=2, **compute) == draw(50, worker=1, n_workers=7, **compute)
    each = [draw(50, worker, seed=seed, **compute) for worker in range(3) for seed in (1, 2)]
    assert all(a != b for a, b in itertools.combinations(each, 2))


@pytest.mark.parametrize("compute", RANDOM, ids=lambda compute: compute["model"])
def test_workers_are_uncorrelated(compute):
    a, b = np.log(draw(4000, 0, **compute)), np.log(draw(4000, 1, **compute))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05  # three standard deviations
    assert np.corrcoef(a, a + 0.5 * b)[0, 1] > 0.5


def test_lognormal_has_the_median_and_the_jitter_of_the_job():
    logarithms = np.log(draw(20_000, model="lognormal", seconds=0.02, jitter=0.3))
    assert np.median(logarithms) == pytest.approx(np.log(0.02), abs=0.01)
    assert np.std(logarithms) == pytest.approx(0.3, abs=0.006)
    assert np.mean(np.exp(logarithms)) > 0.0205  # so it is the median and not the mean


def test_exponential_has_the_mean_of_the_job():
    seconds = np.array(draw(20_000, model="exponential", seconds=0.02))
    assert seconds.mean() == pytest.approx(0.02, rel=0.03)
    assert np.median(seconds) == pytest.approx(0.02 * np.log(2), rel=0.03)


def test_constant_is_constant():
    assert draw(3, model="constant", seconds=0.25) == [0.25] * 3


@pytest.mark.parametrize("model", ["constant", "lognormal", "exponential"])
def test_every_worker_may_have_a_time_of_its_own(model):
    each = [np.median(draw(500, worker, model=model, seconds=[1, 2, 4, 8])) for worker in range(4)]
    assert all(1.5 < b / a < 2.7 for a, b in itertools.pairwise(each))


def test_no_jitter_is_constant():
    assert draw(3, model="lognormal", seconds=0.25, jitter=0.0) == [0.25] * 3


def test_a_table_begins_again_after_its_last_row(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("worker,iteration,seconds\n0,0,1\n1,0,5\n0,1,2\n0,2,3\n")
    assert draw(7, 0, 2, model="table", table=str(path)) == [1, 2, 3, 1, 2, 3, 1]
    assert draw(2, 1, 2, model="table", table=str(path)) == [5, 5]


def test_the_times_of_a_seed_are_what_they_always_were():
    """Runs of different versions stay comparable."""
    lognormal = draw(2, 1, model="lognormal", seconds=0.02, jitter=0.3)
    assert lognormal == [0.02 * math.exp(0.3 * z) for z in np.random.default_rng([1, 2, 1]).standard_normal(2)]
    exponential = draw(2, 1, model="exponential", seconds=0.02)
    assert exponential == [0.02 * z for z in np.random.default_rng([1, 2, 1]).standard_exponential(2)]


# ---- a device that changes ----


def slow(factor, **when):
    return ClusterEvent(worker=0, change="slow", factor=factor, **when)


def recover(**when):
    return ClusterEvent(worker=0, change="recover", **when)


def leave(**when):
    return ClusterEvent(worker=0, change="leave", **when)


def durations(n, *events, each=1.0, lead=0.0, kind=Device):
    """Return the durations of n iterations of `each` undisturbed seconds, one `lead` after the other."""
    its, now_s, found = kind(itertools.repeat(each), events), 0.0, []
    for _ in range(n):
        found.append(its.seconds(now_s))
        now_s += found[-1] + lead
    return found


def test_a_slow_device_takes_so_many_times_as_long_until_it_recovers():
    assert durations(6, slow(4.0, at_iteration=2), recover(at_iteration=4)) == [1, 4, 4, 1, 1, 1]
    assert durations(4, slow(0.5, at_iteration=2)) == [1, 0.5, 0.5, 0.5]
    assert durations(3, recover(at_s=0.0)) == [1, 1, 1]


def test_factors_replace_each_other():
    assert durations(4, slow(4.0, at_iteration=2), slow(3.0, at_iteration=3)) == [1, 4, 3, 3]


def test_a_change_within_an_iteration_stretches_only_the_rest():
    assert durations(3, slow(4.0, at_s=1.5)) == [1, 0.5 + 0.5 * 4, 4]
    assert durations(3, slow(4.0, at_s=0.5), recover(at_s=1.5)) == [0.5 + 1.0 + 0.25, 1, 1]
    changes = [slow(2.0, at_s=0.25), slow(4.0, at_s=0.75), slow(0.5, at_s=1.75)]
    assert durations(2, *changes) == [0.25 + 0.5 + 1.0 + 0.25 * 0.5, 0.5]


def test_a_change_between_iterations_waits_for_the_next():
    assert durations(3, slow(4.0, at_s=1.0)) == [1, 4, 4]
    assert durations(3, slow(4.0, at_s=1.5), lead=1.0) == [1, 4, 4]
    assert durations(3, slow(4.0, at_s=1.2), recover(at_s=1.8), lead=1.0) == [1, 1, 1]


def test_of_changes_at_one_moment_the_last_holds():
    assert durations(2, slow(4.0, at_s=0.0), slow(2.0, at_s=0.0)) == [2, 2]
    assert durations(2, slow(2.0, at_s=0.0), slow(4.0, at_s=0.0)) == [4, 4]
    assert durations(2, slow(2.0, at_iteration=1), slow(4.0, at_s=0.0)) == [2, 2], "an iteration's own after all others"


def test_events_need_not_be_sorted():
    events = [slow(4.0, at_s=1.5), recover(at_s=5.0), slow(3.0, at_iteration=9), recover(at_iteration=12)]
    expected = durations(15, *events)
    assert all(durations(15, *order) == expected for order in itertools.permutations(events))


def test_a_worker_leaves_instead_of_beginning_an_iteration():
    its = Device(itertools.repeat(1.0), [leave(at_iteration=3), leave(at_s=7.0)])
    seen = []
    for now_s in (0.0, 2.0, 4.0):
        seen.append(its.leaves(now_s))
        its.seconds(now_s)
    assert seen == [False, False, True]
    early = Device(None, [leave(at_s=7.0), leave(at_s=9.0)])
    assert [early.leaves(now_s) for now_s in (0.0, 6.9, 7.0, 8.0)] == [False, False, True, True]
    assert Device(None, [leave(at_iteration=1)]).leaves(0.0)
    assert not Device(None, [slow(3.0, at_s=0.0), recover(at_iteration=1)]).leaves(1e9)


def test_a_worker_joins_again_when_its_events_say_so_however_late_it_has_left():
    events = [
        ClusterEvent(worker=0, at_s=at_s, change=change) for at_s, change in [(2, "leave"), (5, "join"), (8, "leave")]
    ]
    its = Device(None, events)
    assert [its.leaves(now_s) for now_s in (1.0, 5.0, 7.9)] == [False] * 3, "not while it is away"
    assert [its.leaves(now_s) for now_s in (2.5, 5.5)] == [True, True], "it has begun to leave"
    assert its.joins_s == 5.0
    its.join()
    assert not its.leaves(5.5)
    assert its.leaves(8.0)
    assert its.joins_s == math.inf
    late = Device(None, [ClusterEvent(worker=0, at_s=3, change="join")])
    assert (late.leaves(0.0), late.joins_s) == (True, 3.0)
    late.join()
    assert not late.leaves(3.0)


def test_without_times_iterations_are_still_counted():
    its = Device(None, [leave(at_iteration=3)])
    assert [its.seconds(0.0), its.leaves(0.0), its.seconds(0.0), its.leaves(0.0)] == [0.0, False, 0.0, True]


@pytest.mark.parametrize("compute", RANDOM, ids=lambda compute: compute["model"])
def test_a_device_without_events_takes_its_times_bit_for_bit(compute):
    events = [
        {"worker": 1, "at_s": 0.0, "change": "slow", "factor": 3.0},
        {"worker": 0, "at_s": 9.0, "change": "leave"},
    ]
    job = make_job(cluster={"workers": 2, "compute": compute, "events": events})
    quiet, other = device(job, 0), device(job, 1)
    begins = np.cumsum(np.random.default_rng(0).random(500)).tolist()
    times = list(itertools.islice(iteration_seconds(job.cluster.compute, 1, 0, 2), 500))
    assert [quiet.seconds(begin_s) for begin_s in begins] == times
    assert other.seconds(0.0) == 3.0 * next(iteration_seconds(job.cluster.compute, 1, 1, 2))
    assert quiet.leaves(9.0) and not other.leaves(9.0)


# ---- iterations of more or fewer samples ----


def of_loads(fixed_share, *loads, events=()):
    """Return the durations of consecutive iterations of one undisturbed second at a load of 1."""
    its, now_s, found = Device(itertools.repeat(1.0), events, fixed_share), 0.0, []
    for load in loads:
        found.append(its.seconds(now_s, load))
        now_s += found[-1]
    return found


def test_an_iteration_takes_as_long_as_its_samples_but_for_what_is_fixed():
    assert of_loads(0.0, 1.0, 2.0, 0.5, 1.0) == [1.0, 2.0, 0.5, 1.0]
    assert of_loads(0.25, 1.0, 2.0, 0.0) == [1.0, 0.25 + 0.75 * 2, 0.25]
    assert of_loads(1.0, 1.0, 2.0, 0.5) == [1.0] * 3


def test_a_change_stretches_what_is_left_of_a_loaded_iteration():
    events = [slow(4.0, at_s=1.5), recover(at_s=6.0)]
    assert of_loads(0.0, 1.0, 2.0, 1.0, events=events) == [1.0, 0.5 + 4.5 + 0.375, 1.0]
    assert of_loads(0.5, 3.0, 1.0, events=[slow(4.0, at_s=1.5)]) == [1.5 + 0.5 * 4, 4.0]


@given(st.floats(0.0, 1.0), st.floats(1e-9, 1e9))
def test_at_the_jobs_batch_size_not_a_bit_changes(fixed_share, time_s):
    assert Device(iter([time_s]), [], fixed_share).seconds(0.0, 1.0) == time_s


@pytest.mark.parametrize("compute", [*RANDOM, {"model": "constant", "seconds": 0.3}], ids=lambda c: c["model"])
def test_the_fixed_share_is_the_jobs(compute):
    plain, half, all_of_it = (
        device(make_job(cluster={"workers": 2, "compute": {**compute, "fixed_share": share}}), 1)
        for share in (0.0, 0.5, 1.0)
    )
    for load in (1.0, 3.0, 0.25):
        twice_s, mean_s, fixed_s = (each.seconds(0.0, load) for each in (plain, half, all_of_it))
        assert twice_s == pytest.approx(load * fixed_s)
        assert mean_s == pytest.approx((twice_s + fixed_s) / 2)


# The stretching against its definition, in exact arithmetic: an iteration ends when what it has done since its
# beginning, the integral of 1/factor, is its undisturbed time. Factors are powers of two, so that floats are exact too.

UNIT = Fraction(1, 64)
MOMENTS = st.one_of(
    st.fixed_dictionaries({"at_s": st.integers(0, 40).map(lambda n: float(n * UNIT * 16))}),
    st.fixed_dictionaries({"at_iteration": st.integers(1, 8)}),
)
CHANGES = st.one_of(
    st.fixed_dictionaries({"change": st.just("slow"), "factor": st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0])}),
    st.just({"change": "recover"}),
)
EVENTS = st.lists(
    st.builds(lambda moment, change: ClusterEvent(worker=0, **moment, **change), MOMENTS, CHANGES), max_size=6
)
STEPS = st.lists(st.integers(0, 96).map(lambda n: float(n * UNIT)), min_size=1, max_size=8)


def by_definition(works, leads, events):
    """Return the durations of the iterations as fractions."""
    now, found = Fraction(0), []
    timed = [(Fraction(e.at_s), 0, i, e) for i, e in enumerate(events) if e.at_s is not None]
    begun = []  # the same, for events at iterations that have begun
    for iteration, (work, lead) in enumerate(zip(works, leads, strict=True), 1):
        begun += [(now, iteration, i, e) for i, e in enumerate(events) if e.at_iteration == iteration]
        history = sorted((*timed, *begun), key=lambda change: change[:3])
        edges = [now, *sorted({moment for moment, *_ in history if moment > now}), None]
        left, end = Fraction(work), now
        for edge, until in itertools.pairwise(edges):
            factor = Fraction(([1.0] + [e.factor or 1.0 for moment, *_, e in history if moment <= edge])[-1])
            done = left if until is None else min(left, (until - edge) / factor)
            left, end = left - done, end + done * factor
            if not left:
                break
        found.append(end - now)
        now = end + Fraction(lead)
    return found


def as_built(works, leads, events, kind=Device):
    its, now, found = kind(iter(works), events), 0.0, []
    for lead in leads:
        found.append(its.seconds(now))
        now += found[-1] + lead
    return found


@given(STEPS, STEPS, EVENTS)
def test_an_iteration_ends_when_its_work_is_done(works, leads, events):
    steps = list(zip(works, leads, strict=False))
    works, leads = [work for work, _ in steps], [lead for _, lead in steps]
    assert as_built(works, leads, events) == by_definition(works, leads, events)


class OnlyAtItsBeginning(Device):
    """Reads the factor only when an iteration begins."""

    def seconds(self, begin_s):
        self._change_speed(begin_s)
        self._iteration += 1
        return next(self._times) * self._factor


class Multiplying(Device):
    """Multiplies a second factor with the first."""

    def __init__(self, times, events):
        factor, multiplied = 1.0, []
        for event in sorted(events, key=lambda event: event.at_s):
            factor *= event.factor or 1.0
            multiplied.append(slow(factor, at_s=event.at_s))
        super().__init__(times, multiplied)


@pytest.mark.parametrize("kind", [OnlyAtItsBeginning, Multiplying])
def test_the_definition_tells_other_devices_apart(kind):
    works, leads, events = [1.0] * 4, [0.5] * 4, [slow(2.0, at_s=1.75), slow(4.0, at_s=2.0)]
    assert as_built(works, leads, events) == by_definition(works, leads, events)
    assert as_built(works, leads, events, kind) != by_definition(works, leads, events)


def test_a_table_that_has_changed_is_read_again(tmp_path):
    path = tmp_path / "times.csv"
    compute = {"model": "table", "table": str(path)}
    for nth, seconds in enumerate((1.0, 2.0)):
        path.write_text(f"worker,iteration,seconds\n0,0,{seconds}\n")
        os.utime(path, ns=(nth, nth))
        assert draw(2, n_workers=1, **compute) == [seconds] * 2
