"""The k family with equal workers: durations and staleness of updates against the closed forms."""

import heapq
import itertools
import math
import random
from statistics import fmean, stdev

import pytest

from hpcsync.paradigms import create
from hpcsync.paradigms.events import Apply, Cancel, Grant, PushInfo
from hpcsync.paradigms.first_k import KAsync
from hpcsync.planning.k_controller import staleness_bound
from tests.unit.paradigms.k_account import Account, largest_staleness, mean_staleness, recount
from tests.unit.paradigms.schedule import Schedule, run

every_name = pytest.mark.parametrize("name", ["k-sync", "k-batch-sync", "k-async", "k-batch-async"])

N = 8


def simulate(paradigm, seconds, updates):
    """Return the seconds of each update, and the account; cancelled workers stop at once."""
    account, ended_s = Account(N), [0.0]
    due = [(seconds(), worker) for worker in range(N)]
    heapq.heapify(due)
    while len(account.updates) < updates:
        now_s, worker = heapq.heappop(due)
        event = PushInfo(now_s, worker)
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
def test_durations_of_updates_of_exponential_workers(name, k):
    times_s, _ = simulate(create(name, N, k=k, **ABORT.get(name, {})), exponential(seed=k), updates=2000)
    assert standard_errors_off(times_s, UPDATE_S[name](k)) < 3


@pytest.mark.parametrize(
    ("name", "options", "seconds"),
    [
        ("k-sync", {}, order_statistic_s),  # the late finish first
        ("k-batch-async", {}, order_statistic_s),  # no worker blocks
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
        # With constant workers the mean hardly varies, and the rest at the end counts.
        off = abs(fmean(staleness) - others(k) / k)
        assert off < 0.01 or standard_errors_off(staleness, others(k) / k) < 3


class WaitsForNobody(KAsync):
    distinct = False


def test_mean_staleness_of_another_form_is_another():
    _, account = simulate(WaitsForNobody(N, k=4), exponential(seed=4), updates=2000)
    assert standard_errors_off(mean_staleness(account), (N - 4) / 4) > 6


@pytest.mark.parametrize("k", range(1, N + 1))
@every_name
def test_equal_workers_are_never_beyond_the_bound_of_the_stuck(name, k):
    """Any whose iterations take less than twice as long as any other's."""
    generator = random.Random(k)
    for seconds in (lambda: 1.0, lambda: generator.choice([1.0, 1.99]), lambda: generator.uniform(1.0, 1.99)):
        assert largest_staleness(simulate(create(name, N, k=k), seconds, updates=200)[1]) <= staleness_bound(N, k)


@pytest.mark.parametrize(("name", "k"), [("k-async", 2), ("k-batch-async", 4)])
def test_a_worker_that_takes_three_times_as_long_is_beyond_it(name, k):
    seen = recount(run(create(name, N, k=k), Schedule([[1.0] * 40] * (N - 1) + [[3.4] * 10])))
    assert largest_staleness(seen) > staleness_bound(N, k)
