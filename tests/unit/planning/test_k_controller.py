"""Adaptive k: the closed forms against their table, stragglers, and the rate of change of k."""

import math
from bisect import bisect_left
from itertools import pairwise
from random import Random
from statistics import median_low

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcsync.planning.k_controller import (
    INTERVAL,
    LOSS_BETA,
    POLICIES,
    THETA,
    KController,
    linear_k,
    most_throughput,
    order_statistic_k,
    staleness_bound,
)

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)
NAN = math.nan

# ---- AdaSync's closed forms ----

LOSS_START = 2.302585  # ln 10: ten classes before training
TABLE = [
    (1.0, 1.466, 1.517),
    (0.5, 1.989, 2.146),
    (0.1, 3.742, 4.799),
    (0.05, 4.676, 6.786),
    (0.01, 6.654, 15.17),
]


@pytest.mark.parametrize(("loss", "quadratic", "square_root"), TABLE)
def test_the_closed_forms_with_8_workers_from_1_on(loss, quadratic, square_root):
    assert order_statistic_k(loss, LOSS_START, 1, 8) == pytest.approx(quadratic, abs=5e-4)
    assert linear_k(loss, LOSS_START, 1) == pytest.approx(square_root, abs=5e-3)


@PROPERTY
@given(st.floats(1e-6, 1e6), st.integers(1, 63))
def test_they_begin_with_k_start_and_solve_their_equation(loss, k_start):
    assert order_statistic_k(loss, loss, k_start, 64) == pytest.approx(k_start)
    assert linear_k(loss, loss, k_start) == k_start
    a = k_start**2 * LOSS_START / ((64 - k_start) * loss)
    k = order_statistic_k(loss, LOSS_START, k_start, 64)
    assert 0 < k <= 64
    assert k**2 + a * k == pytest.approx(a * 64)


def test_their_limits():
    assert order_statistic_k(0.0, LOSS_START, 1, 8) == order_statistic_k(-1.0, LOSS_START, 1, 8) == 8
    assert order_statistic_k(1.7e308, 1e-20, 1, 8) == 0, "the quotient is too small for a float"
    assert order_statistic_k(1.0, LOSS_START, 8, 8) == 8
    assert linear_k(0.0, LOSS_START, 1) == math.inf
    for loss, loss_start in [(NAN, 1.0), (1.0, NAN), (1.0, 0.0), (1.0, -1.0)]:
        assert math.isnan(order_statistic_k(loss, loss_start, 1, 8))
        assert math.isnan(linear_k(loss, loss_start, 1))


def test_the_bound_of_the_stuck():
    assert [staleness_bound(8, k) for k in range(1, 9)] == [16, 8, 6, 4, 4, 3, 3, 2]


# ---- throughput ----


@PROPERTY
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
@example([1.0, 2.0])
def test_the_k_of_most_throughput_is_the_best_of_all(times_s):
    """Whoever comes first: an update of k workers that all begin together takes as long as the k-th of them."""
    k, throughput = most_throughput(sorted(times_s))
    promised = {n: n / max(sorted(times_s)[:n]) for n in range(1, len(times_s) + 1)}
    assert throughput == promised[k] == max(promised.values())
    assert k == max(n for n in promised if promised[n] == throughput)


def test_throughput_may_want_the_stragglers_that_state_leaves_out():
    """Two workers of 1 s and two of 1.6 s: 2 contributions a second with k = 2, and 2.5 with k = 4."""
    times_s = [1.0, 1.0, 1.6, 1.6]
    assert most_throughput(times_s) == (4, 2.5)
    assert most_throughput([0.0, 0.0, 1.0]) == (2, math.inf)
    by_state, by_throughput = new("state", 4), new("throughput", 4)
    feed(by_state, rounds=100, times_s=times_s)
    assert feed(by_throughput, rounds=100, times_s=times_s) == []
    assert (by_state.k, by_throughput.k) == (2, 4)
    changes = feed(by_throughput, rounds=100, times_s=[1.0, 1.0, 2.5, 2.5], version=100)
    assert [k for _, k, _ in changes] == [3, 2]
    assert (changes[-1][2]["k_throughput"], changes[-1][2]["throughput"]) == (2, 2.0)


def test_by_throughput_stuck_workers_do_not_count_and_unknown_ones_are_like_the_median():
    controller = new("throughput", 4)
    assert feed(new("throughput", 4, k_start=2), rounds=40, times_s=[None] * 4) == []
    assert feed(controller, rounds=40, times_s=[1.0, 1.0, 1.0, None], version=40) == []
    changes = feed(controller, rounds=40, times_s=[1.0, 1.0, 1.0, None], version=80, reads=lambda v: [v, v, v, 60])
    assert [k for _, k, _ in changes] == [3]
    for reads in (lambda v: [v, v, v, v - 2], lambda _: [0] * 4):  # at the bound; all are stuck
        assert feed(new("throughput", 4), rounds=20, times_s=[1.0] * 4, reads=reads) == []
    # In ascending order the times are 1, 4, 4 and 5, with the median in place of the unknown one.
    (change,) = feed(new("throughput", 4), rounds=20, times_s=[4.0, None, 1.0, 5.0])
    assert (change[2]["k_throughput"], change[2]["throughput"]) == (1, 1.0)
    with pytest.raises(ValueError, match="distinct workers"):
        new("throughput", distinct=False)


# ---- the controller ----


def feed(controller, *, rounds, times_s, losses=None, reads=None, active=None, version=0):
    """Make rounds of one push per worker and one update; return the updates at which k changed, with its inputs."""
    changes = []
    n_workers = len(times_s)
    for i in range(1, rounds + 1):
        for worker in range(n_workers) if active is None else active:
            if times_s[worker] is not None:
                controller.pushed(worker, times_s[worker], NAN if losses is None else losses(version + i))
        read = [version + i] * n_workers if reads is None else reads(version + i)
        inputs = controller.updated(version + i, read, range(n_workers) if active is None else active)
        if inputs is not None:
            changes.append((version + i, controller.k, dict(zip(controller.decision_fields, inputs, strict=True))))
    return changes


def new(policy, n_workers=8, *, distinct=True, **options):
    return KController(n_workers, policy=policy, distinct=distinct, **options)


def test_by_state_it_starts_with_all_and_otherwise_with_the_least():
    assert [new(policy).k for policy in POLICIES] == [8, 1, 1, 8]
    assert [new(policy, k_min=3).k for policy in POLICIES] == [8, 3, 3, 8]
    assert new("loss", k_start=4).k == 4


@pytest.mark.parametrize("n_workers", [2, 3, 8])
def test_one_worker_three_times_as_slow_is_left_out_and_comes_back(n_workers):
    controller = new("state", n_workers)
    equal = [1.0] * n_workers
    slowed = [*equal[1:], 3.0]
    assert feed(controller, rounds=40, times_s=equal) == []
    at, k, inputs = feed(controller, rounds=40, times_s=slowed, version=40)[0]
    assert (at, k) == (60, n_workers - 1)
    expected = {"version": 60, "k_before": n_workers, "k_state": n_workers - 1, "active": n_workers, "stuck": 0}
    assert {name: inputs[name] for name in expected} == expected
    assert inputs["median_s"] == 1.0
    assert math.isnan(inputs["k_loss"])
    assert [(at, k) for at, k, _ in feed(controller, rounds=40, times_s=equal, version=80)] == [(100, n_workers)]


def test_it_takes_about_one_over_beta_periods_to_see_it_and_to_forget_it():
    def straggles(periods, before_s, now_s):
        controller = new("state", 4)
        feed(controller, rounds=19, times_s=[1.0, 1.0, 1.0, before_s])
        for _ in range(periods):
            controller.pushed(3, now_s, NAN)
        controller.updated(20, [20] * 4, range(4))
        return controller.k == 3

    assert [straggles(n, 1.0, 3.0) for n in (0, 1, 4)] == [False, True, True]
    assert [straggles(n, 3.0, 1.0) for n in (0, 3, 4, 8)] == [True, True, False, False]


def test_a_worker_at_the_limit_is_no_straggler():
    assert feed(new("state", 3), rounds=40, times_s=[1.0, 1.0, 1.5]) == []
    assert feed(new("state", 3), rounds=40, times_s=[1.0, 1.0, 1.51]) != []


def test_speed_is_relative():
    for scale in (1e-6, 1.0, 1e6):
        controller = new("state", 4)
        feed(controller, rounds=40, times_s=[scale, 1.1 * scale, 0.9 * scale, 2 * scale])
        assert controller.k == 3


def test_a_worker_that_has_not_pushed_is_no_straggler_until_it_is_stuck():
    assert feed(new("state", 4), rounds=40, times_s=[1.0, 1.0, 1.0, None]) == []
    assert feed(new("state", 4), rounds=40, times_s=[None] * 4) == []

    def reads(version):
        return [version, version, version, 18]

    (first,) = feed(new("state", 4), rounds=59, times_s=[1.0] * 4, reads=reads)
    assert first[:2] == (40, 3)  # 2 behind at 20, which is the bound
    assert (first[2]["stuck"], first[2]["k_state"]) == (1, 3)


def test_a_straggler_is_counted_once():
    controller = new("state", 4)
    feed(controller, rounds=100, times_s=[1.0, 1.0, 1.0, 9.0], reads=lambda version: [version, version, version, 0])
    assert controller.k == 3


def test_departed_workers_do_not_count():
    controller = new("state", 4)
    feed(controller, rounds=20, times_s=[1.0, 1.0, 9.0, 9.0])
    changes = feed(controller, rounds=40, times_s=[1.0, 1.0, 9.0, 9.0], active={2, 3}, version=20)
    assert [(k, inputs["active"], inputs["median_s"]) for _, k, inputs in changes] == [(2, 2, 9.0)]
    assert controller.updated(80, [80] * 4, set()) is None


def counted_one_by_one(n_workers, k, times_s, version, read_versions, active):
    """Return the workers that are no stragglers, the median time, and the number of stuck workers, worker by worker."""
    known_s = [times_s[worker] for worker in active if not math.isnan(times_s[worker])]
    median_s = median_low(known_s) if known_s else NAN
    stuck = {worker for worker in active if version - read_versions[worker] > staleness_bound(n_workers, k)}
    slow = {worker for worker in active if times_s[worker] > THETA * median_s}
    return float(len(active) - len(stuck | slow)), median_s, float(len(stuck))


def check_counts(seed):
    random = Random(seed)
    n_workers = random.randint(1, 12)
    controller = new("state", n_workers)
    controller.k = random.randint(1, n_workers)
    values_s = [1.0, 1.5, 2.0, 3.0, random.uniform(0.5, 4.0), NAN]  # ties, and a time at the limit
    controller._time_s = times_s = random.choices(values_s, weights=(3, 1, 1, 1, 1, random.randint(0, 9)), k=n_workers)
    reads = [random.choice((100, 100, random.randint(60, 100))) for _ in range(n_workers)]
    active = set(random.sample(range(n_workers), random.choice((n_workers, random.randint(1, n_workers)))))
    expected = counted_one_by_one(n_workers, controller.k, times_s, 100, reads, active)
    assert controller._state(100, reads, active) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


@PROPERTY
@given(st.integers(0, 2**32 - 1))
def test_stragglers_are_those_that_a_count_worker_by_worker_finds(seed):
    check_counts(seed)


BROKEN_COUNTS = {
    "a worker at the limit is slow": ("bisect_right", bisect_left),
    "the bound of another number of workers": (
        "staleness_bound",
        lambda n_workers, k: staleness_bound(n_workers, k) + 1,
    ),
}


@pytest.mark.parametrize("broken", BROKEN_COUNTS)
def test_a_wrong_count_of_stragglers_is_caught(broken, monkeypatch):
    name, function = BROKEN_COUNTS[broken]
    monkeypatch.setattr(f"hpcsync.planning.k_controller.{name}", function)
    with pytest.raises(AssertionError):
        for seed in range(300):
            check_counts(seed)


def test_by_loss_k_follows_the_closed_form_of_the_smoothed_loss():
    for distinct in (True, False):
        controller = new("loss", distinct=distinct)
        changes = feed(
            controller, rounds=400, times_s=[1.0] * 8, losses=lambda version: LOSS_START if version < 9 else 0.1
        )
        last = changes[-1][2]
        form = order_statistic_k(0.1, LOSS_START, 1, 8) if distinct else linear_k(0.1, LOSS_START, 1)
        assert last["k_loss"] == pytest.approx(form, rel=0.05)
        assert controller.k == round(form)
        assert last["loss_start"] == pytest.approx(LOSS_START)
        assert math.isnan(last["k_state"])


def test_the_first_loss_is_the_mean_of_one_for_each_worker():
    controller = new("loss", 4)
    for loss in (4.0, NAN, 3.0, math.inf, 2.0):
        controller.pushed(0, 1.0, loss)
    assert math.isnan(controller._loss) and math.isnan(controller._loss_start)
    controller.pushed(0, 1.0, 1.0)
    assert (controller._loss, controller._loss_start) == (2.5, 2.5)
    controller.pushed(0, 1.0, 0.5)
    assert (controller._loss, controller._loss_start) == (2.5 - 2 * LOSS_BETA, 2.5)


def falls(controller, losses):
    """Feed these losses, one per push and update; return whether k ever fell, and all values of k."""
    ks = [controller.k]
    for version, loss in enumerate(losses, 1):
        controller.pushed(version % 8, 1.0, loss)
        controller.updated(version, [version] * 8, range(8))
        ks.append(controller.k)
    return any(after < before for before, after in pairwise(ks)), ks


@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("policy", ["loss", "min"])
@PROPERTY
@given(st.lists(st.floats(0.0, 10.0), min_size=60, max_size=120), st.integers(1, 8))
def test_k_never_falls_while_losses_do(policy, distinct, losses, k_start):
    fell, ks = falls(new(policy, distinct=distinct, k_start=k_start), sorted(losses, reverse=True))
    assert not fell
    assert min(ks) >= 1
    assert max(ks) <= 8


def test_k_falls_when_losses_rise():
    fell, _ = falls(new("loss", k_start=4), [0.1] * 60 + [9.0] * 200)
    assert fell


def test_without_losses_k_stays():
    for policy in ("loss", "min"):
        controller = new(policy, k_start=3)
        assert feed(controller, rounds=100, times_s=[1.0] * 8) == []


def test_the_smaller_of_both_counts():
    def falling(version):
        return LOSS_START if version < 9 else 1e-6

    slow = [1.0] * 6 + [9.0] * 2
    controller = new("min")
    changes = feed(controller, rounds=400, times_s=slow, losses=falling)
    assert [k for _, k, _ in changes] == [2, 3, 4, 5, 6]
    assert changes[-1][2]["k_state"] == 6
    assert changes[-1][2]["k_loss"] > 6
    assert feed(new("min"), rounds=400, times_s=slow, losses=lambda _: LOSS_START) == []


def test_k_moves_one_at_a_time_and_not_before_its_time():
    controller = new("loss")
    changes = feed(controller, rounds=8 * INTERVAL, times_s=[1.0] * 8, losses=lambda v: LOSS_START if v == 1 else 0.0)
    assert [(at, k) for at, k, _ in changes] == [(INTERVAL * i, i + 1) for i in range(1, 8)]


def test_k_stays_within_its_limits():
    times_s = [1.0] * 5 + [9.0] * 3
    for k_min in (1, 5, 6, 8):
        controller = new("state", k_min=k_min)
        feed(controller, rounds=400, times_s=times_s)
        assert controller.k == max(5, k_min)
    controller = new("state", k_min=6)
    feed(controller, rounds=400, times_s=times_s, active=range(4))
    assert controller.k == 4  # at most the active workers


def test_times_that_say_nothing_are_ignored():
    controller = new("state", 2)
    for time_s in (1.0, NAN, math.inf, -1.0):
        controller.pushed(0, time_s, NAN)
    controller.pushed(1, 0.0, NAN)
    assert controller._time_s == [1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fast"}, "policy must be one of state, loss, min, throughput, got 'fast'"),
        ({"policy": "min", "k_min": 0}, "k_min must .* got 0"),
        ({"policy": "min", "k_min": True}, "k_min must .* got True"),
        ({"policy": "min", "k_start": 9}, "k_start must be an integer from k_min = 1 to n_workers = 8, got 9"),
        ({"policy": "min", "k_start": 1.5}, "k_start must .* got 1.5"),
    ],
)
def test_values_that_are_not_allowed_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KController(8, distinct=True, **options)


# ---- negative controls ----


class Jumps(KController):
    def updated(self, version, read_versions, active):
        before = self.k
        inputs = super().updated(version, read_versions, active)
        self.k += self.k - before
        return inputs


class NeverWaits(KController):
    def updated(self, version, read_versions, active):
        return super().updated(INTERVAL * version, read_versions, active)


class ForgetsTheFirstLoss(KController):
    """The loss of reference drifts with the loss."""

    def pushed(self, worker, iteration_s, loss):
        super().pushed(worker, iteration_s, loss)
        self._loss_start += 0.5 * (loss - self._loss_start)


@pytest.mark.parametrize("broken", [Jumps, NeverWaits])
def test_a_hasty_controller_is_seen(broken):
    controller = broken(8, policy="loss", distinct=True)
    changes = feed(controller, rounds=8 * INTERVAL, times_s=[1.0] * 8, losses=lambda v: LOSS_START if v == 1 else 0.0)
    assert [(at, k) for at, k, _ in changes] != [(INTERVAL * i, i + 1) for i in range(1, 8)]


def test_a_controller_whose_k_falls_is_seen():
    controller = ForgetsTheFirstLoss(8, policy="loss", distinct=True, k_start=4)
    fell, _ = falls(controller, [5.0 * 0.98**i for i in range(200)])
    assert fell
