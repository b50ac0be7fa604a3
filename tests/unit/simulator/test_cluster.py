"""Simulated cluster of a job: what is specified and what is missing."""

import pytest

from hpcsync.config.errors import JobError
from hpcsync.simulator import cluster
from hpcsync.simulator.server_transfers import Networked, Timed
from hpcsync.workloads.registry import build
from tests.unit.jobs import make_job
from tests.unit.simulator.running import simulate, timing_job


def built(job) -> cluster.SimulatedCluster:
    return cluster.build(job, build(job))


def test_without_a_network_nothing_takes_time_but_computing():
    virtual = built(timing_job(workers=3, seconds=[1.0, 2.0, 4.0]))
    assert [device.seconds(0.0) for device in virtual.devices] == [1.0, 2.0, 4.0]
    assert isinstance(virtual.transfers, Timed)
    assert virtual.shard_bytes == [4000]


def test_a_network_carries_every_servers_shard():
    virtual = built(timing_job(cluster={"servers": 3, "network": {}}))
    assert isinstance(virtual.transfers, Networked)
    assert virtual.shard_bytes == [1332, 1332, 1336]


def test_a_table_of_times_is_read_for_all_workers(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("worker,iteration,seconds\n0,0,1.0\n1,0,3.0\n0,1,2.0\n")
    job = make_job(
        workload={"name": "timing"}, cluster={"workers": 2, "compute": {"model": "table", "table": str(path)}}
    )
    assert [[device.seconds(0.0) for _ in range(3)] for device in built(job).devices] == [[1.0, 2.0, 1.0], [3.0] * 3]


def test_recorded_times_stand_in_for_compute_and_network(tmp_path):
    simulate(timing_job(workers=2, seconds=7.0), tmp_path / "trace.h5")
    job = timing_job(workers=2, seconds=1.0, cluster={"network": {}, "times_from": str(tmp_path / "trace.h5")})
    virtual = built(job)
    assert [device.seconds(0.0) for device in virtual.devices] == [7.0, 7.0]
    assert isinstance(virtual.transfers, Timed)


def test_iteration_times_are_required():
    with pytest.raises(JobError, match="cluster.compute: missing; a simulation must have it"):
        built(make_job())


@pytest.mark.parametrize(
    ("paradigm", "seconds", "endless"),
    [
        ({"name": "asp"}, [1.0, 0.0], True),
        ({"name": "ssp", "staleness": float("inf")}, [1.0, 0.0], True),
        ({"name": "bsp"}, [1.0, 0.0], False),
        ({"name": "ssp", "staleness": 3}, [1.0, 0.0], False),
        ({"name": "bsp"}, 0.0, True),
        ({"name": "easgd"}, [1.0, 0.0], True),
        ({"name": "easgd", "synchronous": True}, [1.0, 0.0], False),
        ({"name": "easgd", "synchronous": True}, 0.0, True),
        ({"name": "asp"}, 1.0, False),
        ({"name": "k-sync", "k": 2}, [1.0, 0.0], False),
        ({"name": "k-sync", "k": 1}, [1.0, 0.0], True),
        ({"name": "k-sync", "k": "min"}, [1.0, 0.0], True),
        ({"name": "k-sync", "k": "min", "k_min": 2}, [1.0, 0.0], False),
        ({"name": "k-sync", "k": 2}, 0.0, True),
        ({"name": "k-async", "k": 2}, [1.0, 0.0], False),
        ({"name": "k-async", "k": 1}, [1.0, 0.0], True),
        ({"name": "k-batch-sync", "k": 2}, [1.0, 0.0], True),
        ({"name": "k-batch-async", "k": 2}, [1.0, 0.0], True),
        ({"name": "k-batch-async", "k": 2}, 1.0, False),
    ],
    ids=str,
)
def test_time_must_pass(paradigm, seconds, endless):
    tables = {"paradigm": paradigm, "seconds": seconds, "stop": {"seconds": 5.0}}
    if endless:
        with pytest.raises(JobError, match="cluster.compute: worker [01]'s iterations take 0 seconds"):
            built(timing_job(**tables))
    else:
        assert built(timing_job(**tables))
    assert built(timing_job(**tables, cluster={"network": {}}))
    assert built(timing_job(**{**tables, "stop": {"seconds": 5.0, "updates": 10}}))


@pytest.mark.parametrize("change", ["leave", "join"])
@pytest.mark.parametrize(
    ("paradigm", "seconds", "worker", "endless"),
    [
        ({"name": "bsp"}, [0.0, 0.0, 1.0], 2, True),  # of which the others need not wait any more, or yet
        ({"name": "bsp"}, [0.0, 0.0, 1.0], 0, False),
        ({"name": "ssp", "staleness": 3}, [0.0, 0.0, 1.0], 2, True),
        ({"name": "k-sync", "k": 3}, [0.0, 0.0, 1.0], 2, True),
        ({"name": "k-sync", "k": 2}, [0.0, 1.0, 1.0], 2, False),
        ({"name": "async-diloco", "quorum": 3}, [0.0, 0.0, 1.0], 2, True),
        ({"name": "bsp"}, [1.0, 1.0, 1.0], 2, False),
    ],
    ids=str,
)
def test_time_must_pass_without_an_absent_worker_too(paradigm, seconds, worker, endless, change):
    event = {"worker": worker, "change": change, "at_s": 1.5}
    tables = {"paradigm": paradigm, "seconds": seconds, "cluster": {"workers": 3, "events": [event]}}
    if endless:
        with pytest.raises(JobError, match="cluster.compute: worker 0's iterations take 0 seconds"):
            built(timing_job(**tables, stop={"seconds": 5.0}))
    else:
        assert built(timing_job(**tables, stop={"seconds": 5.0}))
    assert built(timing_job(**tables, stop={"updates": 10}))


def test_time_must_pass_in_a_table_and_in_a_trace_too(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("worker,iteration,seconds\n0,0,1.0\n1,0,0.0\n1,1,0.0\n")
    asp = {"paradigm": {"name": "asp"}, "stop": {"seconds": 5.0}}
    table = {"model": "table", "table": str(path)}
    with pytest.raises(JobError, match="cluster.compute: worker 1's iterations take 0 seconds"):
        built(timing_job(**asp, cluster={"compute": table}))
    simulate(timing_job(seconds=0.0), tmp_path / "trace.h5")
    with pytest.raises(JobError, match="cluster.times_from: worker 0's iterations take 0 seconds"):
        built(timing_job(**asp, cluster={"times_from": str(tmp_path / "trace.h5")}))
