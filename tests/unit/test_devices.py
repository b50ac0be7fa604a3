"""How long iterations take: seeded, independent of other workers, and distributed as the job says."""

import itertools

import numpy as np
import pytest

from hpcsync.devices import iteration_seconds
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
