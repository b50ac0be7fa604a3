"""A cluster as a run has measured it: times of its workers in blocks, rates of its links."""

import tomllib
from functools import partial

import numpy as np
import pytest
import scipy.stats
from rich.console import Console

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.config.time_table import read_times
from hpcsync.simulator.measured_cluster import (
    BLOCK,
    MOST_SPREAD,
    computation_s,
    links,
    network,
    pushes_at_once,
    resampled,
    slowdowns,
    stand_ins,
    turnaround_s,
    write_table,
)
from hpcsync.simulator.measured_time import updates_s
from hpcsync.simulator.simulate import simulate
from hpcsync.trace.reader import load
from tests.unit.trace.recorder import with_rows

SECONDS = [0.1, 0.1, 0.3]


def job(paradigm="bsp", **cluster):
    servers = 0 if paradigm == "allreduce" else 1
    return Job.from_table(
        {
            "name": "measured",
            "seed": 3,
            "workload": {"name": "timing", "parameters": 100_000, "batch_size": 8},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "stop": {"updates": 300 if paradigm == "asp" else 100},
            "evaluation": {"every_samples": 0},
            "paradigm": {"name": paradigm},
            "cluster": {
                "workers": 3,
                "servers": servers,
                "compute": {"model": "lognormal", "seconds": SECONDS, "jitter": 0.1},
                **cluster,
            },
        }
    )


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    def trace(of):
        folder = tmp_path_factory.mktemp("run") / "out"
        assert simulate(of, folder, Console(quiet=True)) == 0
        return load(folder)

    return trace


@pytest.mark.parametrize("paradigm", ["bsp", "asp", "allreduce"])
def test_times_are_those_of_the_workers_whatever_they_waited_for(simulated, paradigm):
    each = computation_s(simulated(job(paradigm)), job())
    assert [np.median(seconds) for seconds in each] == pytest.approx(SECONDS, rel=0.06)
    assert [np.log(seconds).std() for seconds in each] == pytest.approx([0.1] * 3, rel=0.4)


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_work_between_iterations_is_computation(simulated, paradigm):
    """Each iteration of a worker begins 50 ms after what it waited for, as after the step of its optimizer."""
    trace = simulated(job(paradigm))
    rows = trace.tables["pushes" if paradigm == "bsp" else "exchanges"].copy()
    for name in ("begin_s", "end_s", "now_s"):
        rows[name] += 0.05 * rows["iteration"]
    name = "pushes" if paradigm == "bsp" else "exchanges"
    for of, more in ((trace, 0.0), (with_rows(trace, name, rows), 0.05)):
        means = [seconds.mean() - more for seconds in computation_s(of, job())]
        assert means == pytest.approx([seconds.mean() for seconds in computation_s(trace, job())], abs=1e-9)


def test_times_of_cancelled_iterations_are_those_of_whole_ones(simulated):
    """The slow worker is cancelled after half, or three quarters, of its batch."""
    table = job(compute={"model": "constant", "seconds": [1.0, 1.0, 1.6]}).model_dump(exclude_none=True)
    trace = simulated(Job.from_table({**table, "paradigm": {"name": "k-sync", "k": 2, "cancel": "abort"}}))
    slow = trace.tables["pushes"]["worker"] == 2
    assert (trace.tables["pushes"]["share"][slow] < 1.0).mean() > 0.9
    assert [seconds.mean() for seconds in computation_s(trace, job())] == pytest.approx([1.0, 1.0, 1.6])


def test_other_workers_other_batches_and_too_short_a_run_are_refused(simulated):
    trace, one = simulated(job()), job()
    table = one.model_dump(exclude_none=True)
    other = partial(Job.from_table)
    for changed, message in (
        ({"cluster": {"workers": 4}}, "must be of a run with cluster.workers = 4, it has 3"),
        ({"workload": {**table["workload"], "batch_size": 9}}, "with workload.batch_size = 9, it has 8"),
    ):
        with pytest.raises(JobError, match=message):
            computation_s(trace, other({**table, **changed}))
    assert len(computation_s(trace, other({**table, "cluster": {"workers": 4}}), extrapolate=True)) == 3
    short = simulated(Job.from_table({**table, "stop": {"updates": 10}}))
    with pytest.raises(JobError, match="must have 30 iterations of every worker; worker 0 has 9"):
        computation_s(short, one)


def test_blocks_are_of_the_same_iterations_for_all_workers(tmp_path):
    each = [np.arange(100.0), 1000 + np.arange(107.0)]
    first, second = resampled(each, 1)
    assert len(first) == 100 and (second - first == 1000).all()
    steps = np.diff(first)
    assert (steps == 1).sum() >= 100 - 100 // BLOCK - 1
    assert not np.array_equal(first, resampled(each, 2)[0])
    assert np.array_equal(first, resampled(each, 1)[0])
    write_table([first, second], tmp_path / "times.csv")
    assert read_times(tmp_path / "times.csv", 2) == [first.tolist(), second.tolist()]


def test_other_numbers_of_workers_are_drawn_from_the_measured_ones():
    assert stand_ins(3, 3, 1) == [0, 1, 2]
    fewer = [stand_ins(3, 2, seed) for seed in range(9)]
    assert {tuple(each) for each in fewer} == {(0, 1), (0, 2), (1, 2)}
    further = stand_ins(3, 8, 1)
    assert further[:3] == [0, 1, 2] and sorted(further[3:6]) == [0, 1, 2] and len(set(further[6:])) == 2
    assert stand_ins(3, 8, 2) != further == stand_ins(3, 8, 1)


def test_further_workers_have_blocks_of_their_own():
    """A worker and the one that stands for it are not slow together; the control: measured ones are."""
    each = [1000 + np.arange(100.0), 1000 + np.arange(100.0)]
    times = resampled(each, 1, 6)
    assert len(times) == 6 and all(map(np.array_equal, times[:2], resampled(each, 1)))
    assert np.array_equal(times[1], times[0]), "of equal speeds"
    for worker in range(2, 6):
        assert set(times[worker]) <= set(each[0]) and not np.array_equal(times[worker], times[0])


def further_levels(levels: list[float], n_further: int, n_seeds: int) -> np.ndarray:
    """Logarithms of the drawn times of further workers, a row for each seed."""
    n = len(levels)
    return np.array(
        [
            (
                np.log(slowdowns(np.exp(levels), seed, n + n_further))
                + np.array(levels)[stand_ins(n, n + n_further, seed)]
            )[n:]
            for seed in range(n_seeds)
        ]
    )


def test_speeds_of_further_workers_are_as_unlike_as_the_measured_ones_leave_open():
    """One of them is of Student's distribution around the measured mean. The mean of many varies as that of a normal
    sample does of which the mean is estimated, so it does not become certain; the control: times of stand-ins do."""
    levels, n = [0.0, 0.1, 0.3, 0.4], 4
    spread = np.std(levels, ddof=1)
    drawn = further_levels(levels, 50, 4000)
    within = np.abs(drawn[:, 0] - np.mean(levels)) < scipy.stats.t.ppf(0.9, n - 1) * spread * (1 + 1 / n) ** 0.5
    assert within.mean() == pytest.approx(0.8, abs=0.02)
    means = drawn.mean(axis=1) - np.mean(levels)
    limit = scipy.stats.t.ppf(0.9, n - 1) * spread * (1 / 50 + 1 / n) ** 0.5
    assert (np.abs(means) < limit).mean() == pytest.approx(0.8, abs=0.02)
    of = np.array([np.array(levels)[stand_ins(n, n + 50, seed)[n:]].mean() for seed in range(100)])
    assert np.abs(of - np.mean(levels)).max() < limit / 10


def test_measured_workers_and_a_single_one_are_taken_as_they_are():
    assert (slowdowns([1.0, 3.0], 1, 2) == 1).all() and (slowdowns([2.0], 1, 5) == 1).all()
    assert (slowdowns([1.0, 3.0, 4.0], 1, 2) == 1).all()
    factors = slowdowns([1.0, 3.0], 1, 4)
    assert (factors[:2] == 1).all() and (factors[2:] != 1).all()
    assert (slowdowns([2.0, 2.0], 1, 4) == 1).all()


def test_two_workers_do_not_make_others_a_thousand_times_as_slow():
    drawn = further_levels([0.0, 0.1], 5, 1000)
    assert np.abs(drawn).max() < 0.05 + MOST_SPREAD * 0.1 / 2**0.5 * 6


def test_seeds_differ_by_what_the_record_leaves_open_too():
    """A mean over a whole record varies by its own error and by that of the run that left it."""
    seconds = np.random.default_rng(1).exponential(size=2000)
    variance = np.var([resampled([seconds], seed)[0].mean() for seed in range(4000)])
    blocks = np.convolve(seconds, np.ones(BLOCK) / BLOCK, "valid")
    once = blocks.var() / (len(seconds) / BLOCK)
    assert variance == pytest.approx(2 * once, rel=0.1)


def test_rates_are_those_of_the_links(simulated):
    """Of pushes that meet no others; the server's is as much as it was seen to carry, which may be less than it can."""
    assert links(simulated(job())) is None and network(simulated(job())) == {}
    own = {"bandwidth_gbit": [0.5, 1.0, 2.0], "server_bandwidth_gbit": 8.0, "latency_us": 0.0}
    trace = simulated(job("asp", network=own))
    assert links(trace).workers == pytest.approx([0.5, 1.0, 2.0], rel=0.05)
    assert 0.5 < links(trace).server < 2.0
    assert network(trace)["latency_us"] == pytest.approx(0.0, abs=0.1)
    more = network(trace, 1, 5)
    assert more["bandwidth_gbit"] == [links(trace).workers[measured] for measured in stand_ins(3, 5, 1)]
    assert more["server_bandwidth_gbit"] == links(trace).server, "no wider than was seen"


def test_a_server_whose_link_all_pushes_share_is_seen_as_it_is(simulated):
    """Equal workers of a synchronous run push almost together: half of the iteration is a queue."""
    narrow = {"bandwidth_gbit": 0.1, "latency_us": 0.0}
    compute = {"model": "lognormal", "seconds": 0.1, "jitter": 0.1}
    found = links(simulated(job("bsp", network=narrow, compute=compute)))
    assert found.server == pytest.approx(0.1, rel=0.02)
    assert max(found.workers) < 0.11


def test_rates_of_pushes_that_always_meet_others_are_known_as_such(simulated):
    """Three equal workers push together, and each sees a third of its link."""
    narrow, equal = {"bandwidth_gbit": 0.1, "latency_us": 0.0}, {"model": "constant", "seconds": 0.1}
    trace = simulated(job("bsp", network=narrow, compute=equal))
    assert pushes_at_once(trace) == pytest.approx(3.0)
    assert [3 * rate for rate in links(trace).workers] == pytest.approx([0.1] * 3, rel=1e-3)
    two = {"model": "constant", "seconds": SECONDS}
    assert pushes_at_once(simulated(job("bsp", network=narrow, compute=two))) == pytest.approx(2.0)
    assert pushes_at_once(simulated(job("asp", network={"bandwidth_gbit": 1.0}))) < 1.2, "control: most meet no other"
    assert pushes_at_once(simulated(job("allreduce", network=narrow))) == 1.0, "control: no pushes"


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_each_of_several_servers_has_its_part_of_what_all_were_seen_to_carry(simulated, servers):
    """Simulated with what was measured, a run takes the time that it took."""
    own = {"bandwidth_gbit": 1.0, "server_bandwidth_gbit": 0.1, "latency_us": 0.0}
    compute = {"model": "lognormal", "seconds": 0.1, "jitter": 0.2}
    this = job("asp", network=own, compute=compute, servers=servers)
    found = network(simulated(this))
    assert found["server_bandwidth_gbit"] == pytest.approx(0.1, rel=0.02)

    again = job("asp", network=found, compute=compute, servers=servers)
    assert updates_s(again, 200) == pytest.approx(updates_s(this, 200), rel=0.02)


def test_a_colocated_worker_has_the_link_of_its_server(simulated):
    """What it sends to its own server uses no link, and shows no rate."""
    own, compute = {"bandwidth_gbit": 0.1, "latency_us": 10.0}, {"model": "lognormal", "seconds": 0.1, "jitter": 0.2}
    this = job("asp", network=own, compute=compute, colocated=True)
    found = network(simulated(this))
    assert found.pop("server_bandwidth_gbit") == pytest.approx(0.1, rel=0.02)
    assert found["bandwidth_gbit"] == pytest.approx([0.1] * 3, rel=0.02)
    again = job("asp", network=found, compute=compute, colocated=True)
    assert updates_s(again, 200) == pytest.approx(updates_s(this, 200), rel=0.03)


@pytest.mark.parametrize("paradigm", ["bsp", "asp"])
def test_the_turnaround_is_what_a_worker_waits_that_waits_for_nobody(simulated, paradigm):
    """Of the push info and the grant, each one latency; waiting for stragglers is no part of it."""
    trace = simulated(job(paradigm, network={"bandwidth_gbit": 1.0, "latency_us": 500.0}))
    assert turnaround_s(trace) == pytest.approx(1e-3, rel=0.05)
    assert network(trace)["latency_us"] == pytest.approx(1e3 / 6, rel=0.05)
    assert turnaround_s(simulated(job("allreduce"))) == 0.0


def test_without_servers_a_server_would_have_the_widest_link(simulated):
    own = {"bandwidth_gbit": 0.1, "latency_us": 0.0}
    found = links(simulated(job("allreduce", network=own)))
    assert found.server == max(found.workers) < 0.12


@pytest.mark.parametrize("latency_us", [0.0, 3_000.0])
@pytest.mark.parametrize("target", ["bsp", "asp", "allreduce"])
def test_another_paradigm_takes_the_time_that_it_really_would(simulated, tmp_path, target, latency_us):
    """Measured under BSP, the times of another paradigm are within a few percent of those on the true cluster."""
    links = {"bandwidth_gbit": 1.0, "latency_us": latency_us}
    trace = simulated(job("bsp", network=links))
    write_table(resampled(computation_s(trace, job()), 1), tmp_path / "times.csv")
    table = job(target, network=links).model_dump(exclude_none=True)
    table["cluster"]["compute"] = {"model": "table", "table": str(tmp_path / "times.csv")}
    table["cluster"]["network"] = network(trace)
    found = updates_s(Job.from_table(table), 200)
    assert found == pytest.approx(updates_s(job(target, network=links), 200), rel=0.05)
    slow = {
        **table["cluster"]["compute"],
        "table": str(tmp_path / "slow.csv"),
    }  # control: times that are half as long again
    write_table([1.5 * each for each in resampled(computation_s(trace, job()), 1)], tmp_path / "slow.csv")
    table["cluster"]["compute"] = slow
    assert updates_s(Job.from_table(table), 200) > 1.3 * found


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_the_time_of_an_update_counts_the_bytes_of_the_models_own_type(simulated, paradigm):
    """The model is float64; without arithmetic, vectors of float32 move."""
    this = job(paradigm, network={"bandwidth_gbit": 1e-3}, compute={"model": "constant", "seconds": 0.001})
    linear = {"workload": {"name": "linear", "features": 1000, "batch_size": 8}, "stop": {"updates": 10}}
    of_linear = Job.from_table(tomllib.loads(this.to_toml()) | linear)
    updates = simulated(of_linear).tables["updates"]
    assert updates_s(of_linear, 10) == pytest.approx(updates["now_s"][-1] / len(updates))
