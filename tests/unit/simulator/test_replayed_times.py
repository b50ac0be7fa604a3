"""Recorded times: the same job reproduces the run, another job gives a prediction."""

import h5py
import numpy as np
import pytest

from hpcsync.config.errors import JobError
from hpcsync.report.trace_pair import compare
from hpcsync.simulator.replayed_times import Columns, RecordedTimes, columns_of, read
from hpcsync.trace.reader import load
from tests.unit.simulator.running import PARADIGMS, TIMING, simulate, timing_job

FIRST_K = [
    {"name": "k-sync", "k": 2, "cancel": "abort"},
    {"name": "k-batch-sync", "k": 2, "cancel": "abort"},
    {"name": "k-async", "k": 2},
]
NETWORK = {"network": {"bandwidth_gbit": 1e-3, "latency_us": 1000}}


def columns(*rows, local_steps=None):
    each = [np.array(column, float) for column in zip(*rows, strict=True)]
    return Columns(*each, np.ones(len(rows), int) if local_steps is None else local_steps, np.ones(len(rows), bool))


def test_the_first_iteration_is_not_repeated():
    #                               compute  to begin  to server  comm
    times = RecordedTimes(columns((1.0, 9.0, 0.2, 0.2), (2.0, 0.3, 0.2, 0.2), (3.0, 0.3, 0.4, 0.2)))
    seconds = times.seconds()
    assert [next(seconds) for _ in range(7)] == [1.0, 2.0, 3.0, 2.0, 3.0, 2.0, 3.0]
    assert [round(sum(times.steps(i)), 9) for i in range(1, 8)] == [9.2, 0.5, 0.7, 0.5, 0.7, 0.5, 0.7]


def test_a_single_iteration_is_repeated():
    times = RecordedTimes(columns((1.0, 9.0, 0.2, 0.2)))
    seconds = times.seconds()
    assert [next(seconds) for _ in range(3)] == [1.0] * 3
    assert times.steps(3) == times.steps(1)


def test_local_steps_of_one_push_are_taken_to_be_equal():
    rows = [(4.0, 9.0, 0.2, 0.2), (6.0, 0.3, 0.2, 0.2), (5.0, 0.3, 0.4, 0.2)]
    times = RecordedTimes(columns(*rows, local_steps=np.array([4, 2, 1])))
    seconds = times.seconds()
    assert [next(seconds) for _ in range(11)] == [1.0] * 4 + [3.0, 3.0, 5.0] + [3.0, 3.0, 5.0, 3.0]
    assert [round(sum(times.steps(i)), 9) for i in range(1, 5)] == [9.2, 0.5, 0.7, 0.5]


def test_times_of_single_iterations_serve_a_run_that_pushes_several(tmp_path):
    """Elastic averaging from recorded times: the same computations, with fewer transfers between them."""
    network = {"network": {"bandwidth_gbit": 1e-3, "latency_us": 0}}  # a put and a read take 8 ms each
    bsp = timing_job(workers=2, seconds=0.1, paradigm={"name": "asp"}, stop={"updates": 80}, cluster=network)
    simulate(bsp, tmp_path / "asp.h5")
    easgd = {"paradigm": {"name": "easgd", "period": 4}, "stop": {"updates": 20}}
    asked = timing_job(workers=2, **easgd, cluster={"times_from": str(tmp_path / "asp.h5")})
    pushes = simulate(asked, tmp_path / "easgd.h5").tables["pushes"]
    assert pushes["compute_s"] == pytest.approx(0.4)
    assert simulate(bsp, tmp_path / "again.h5").tables["pushes"]["compute_s"] == pytest.approx(0.1)
    back = timing_job(workers=2, stop={"updates": 20}, cluster={"times_from": str(tmp_path / "easgd.h5")})
    assert simulate(back, tmp_path / "back.h5").tables["pushes"]["compute_s"] == pytest.approx(0.1)


def test_transfers_are_part_of_the_delay():
    put_s, report_s, grant_s, read_s = RecordedTimes(columns((1.0, 0.5, 0.2, 0.3))).steps(1)
    assert (put_s, report_s, grant_s, read_s) == pytest.approx((0.15, 0.05, 0.35, 0.15))


def test_clocks_that_disagree_give_no_negative_times():
    steps = RecordedTimes(columns((1.0, -1e-6, 0.2, 0.3))).steps(1)
    assert min(steps) == 0.0
    assert steps.read_s == 0.0


@pytest.mark.parametrize("network", [{}, NETWORK], ids=["ideal", "network"])
@pytest.mark.parametrize("paradigm", [*PARADIGMS, *FIRST_K], ids=str)
def test_replaying_its_own_trace_reproduces_a_run(tmp_path, paradigm, network):
    job = timing_job(workers=3, model="lognormal", paradigm=paradigm, stop={"updates": 60}, cluster=network)
    first = simulate(job, tmp_path / "first.h5")
    again = timing_job(
        workers=3,
        model="exponential",  # not used
        paradigm=paradigm,
        stop={"updates": 60},
        cluster={"times_from": str(tmp_path / "first.h5")},
    )
    second = simulate(again, tmp_path / "second.h5")
    comparison = compare(first, second)
    assert comparison.time_ratio == pytest.approx(1.0, rel=1e-9)
    assert comparison.same_order == 1.0
    a, b = comparison.sides
    assert b.wait_share == pytest.approx(a.wait_share, abs=1e-9 if not network else 0.01)
    assert b.comm_share == pytest.approx(a.comm_share, abs=1e-9 if not network else 0.01)


def test_a_wrong_time_would_be_seen(tmp_path):
    job = timing_job(workers=3, model="lognormal", paradigm={"name": "bsp"}, stop={"updates": 60})
    first = simulate(job, tmp_path / "first.h5")
    other = simulate(job.model_copy(update={"seed": 7}), tmp_path / "other.h5")
    assert abs(compare(first, other).time_ratio - 1.0) > 1e-3


def test_another_paradigm_from_recorded_times(tmp_path):
    """The workers are as fast as recorded, so a bound costs exactly what it costs in the original cluster."""
    seconds = [1.0, 1.0, 3.0]
    asp = timing_job(workers=3, seconds=seconds, paradigm={"name": "asp"}, stop={"updates": 200})
    simulate(asp, tmp_path / "asp.h5")
    ssp = {"paradigm": {"name": "ssp", "staleness": 2}, "stop": {"updates": 200}}
    there = simulate(timing_job(workers=3, seconds=seconds, **ssp), tmp_path / "there.h5")
    asked = timing_job(workers=3, **ssp, cluster={"times_from": str(tmp_path / "asp.h5")})
    here = simulate(asked, tmp_path / "here.h5")
    assert compare(there, here).time_ratio == pytest.approx(1.0, rel=1e-9)


EVENTS = [
    {"worker": 0, "at_iteration": 4, "change": "slow", "factor": 5.0},
    {"worker": 0, "at_iteration": 6, "change": "recover"},
    {"worker": 1, "at_s": 9.5, "change": "leave"},
]


@pytest.mark.parametrize("paradigm", PARADIGMS, ids=str)
def test_recorded_device_changes_are_not_applied_again(tmp_path, paradigm):
    tables = {"workers": 3, "paradigm": paradigm, "stop": {"updates": 60}}
    first = simulate(timing_job(**tables, cluster={"events": EVENTS}), tmp_path / "first.h5")
    again = timing_job(**tables, cluster={"events": EVENTS, "times_from": str(tmp_path / "first.h5")})
    comparison = compare(first, simulate(again, tmp_path / "again.h5"))
    assert comparison.time_ratio == pytest.approx(1.0, rel=1e-9)
    more = [*EVENTS, {"worker": 2, "at_iteration": 2, "change": "slow", "factor": 3.0}]
    slower = timing_job(**tables, cluster={"events": more, "times_from": str(tmp_path / "first.h5")})
    assert compare(first, simulate(slower, tmp_path / "slower.h5")).time_ratio > 1.05


def job_from(path, **tables):
    cluster = {"times_from": str(path), **tables.pop("cluster", {})}
    return timing_job(**{"workers": 3, **tables}, cluster=cluster)


def test_a_trace_that_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "trace.h5"
    simulate(timing_job(workers=3), path)
    assert len(read(job_from(path), 8000).workers) == 3
    for tables, wire_bytes, said in (
        ({"workers": 4}, 8000, "must be of a run with cluster.workers = 4, it has 3"),
        ({"cluster": {"servers": 2}}, 8000, "must be of a run with cluster.servers = 2, it has 1"),
        ({"workload": {"name": "timing", "batch_size": 8}}, 8000, "workload.batch_size = 8, it has 4"),
        ({}, 80, "must be of a run with bytes moved an iteration = 80, it has 8000"),
    ):
        with pytest.raises(JobError, match=f"cluster.times_from = .*{said}"):
            read(job_from(path, **tables), wire_bytes)
    (tmp_path / "text").write_text("no trace")
    with pytest.raises(JobError, match="cluster.times_from: .*text: not a trace"):
        read(job_from(tmp_path / "text"), 8000)


def test_a_trace_of_another_version_is_refused(tmp_path):
    path = tmp_path / "trace.h5"
    simulate(timing_job(workers=3), path)
    with h5py.File(path, "r+") as file:
        file.attrs["job"] = file.attrs["job"].replace('name = "bsp"', 'name = "later"')
    with pytest.raises(JobError, match="cluster.times_from: .*its job cannot be read"):
        read(job_from(path), 8000)


def test_a_killed_run_serves_as_far_as_it_goes(tmp_path):
    path = tmp_path / "trace.h5"
    simulate(timing_job(workers=3, paradigm={"name": "asp"}, stop={"updates": 60}), path)
    trace = load(path)
    pushes, grants = (rows[rows["worker"] == 1] for rows in (trace.tables["pushes"], trace.tables["grants"]))
    assert [len(column) for column in columns_of(pushes, grants[:5], 4)] == [6] * 6  # the first needs no grant
    assert [len(column) for column in columns_of(pushes[:4], grants, 4)] == [4] * 6
    assert [len(column) for column in columns_of(pushes[1:], grants, 4)] == [0] * 6


def test_computations_are_of_whole_iterations_of_the_jobs_batch_size(tmp_path):
    first = simulate(timing_job(model="lognormal", paradigm={"name": "easgd", "period": 3}), tmp_path / "trace.h5")
    pushes, grants = (rows[rows["worker"] == 1] for rows in (first.tables["pushes"], first.tables["grants"]))
    compute_s = columns_of(pushes, grants, 4)[0]
    assert compute_s.tolist() == pushes["compute_s"][: len(compute_s)].tolist(), "not a bit differs"
    pushes["batch_size"][0] *= 2  # 3 local steps of 8
    pushes["share"][1] = 0.25
    pushes["batch_size"][2], pushes["share"][2] = 3, 0.5
    factors = columns_of(pushes, grants, 4)[0] / compute_s
    assert factors.tolist() == pytest.approx([0.5, 4.0, 8.0] + [1.0] * (len(factors) - 3))


def test_allocated_batches_do_not_change_the_batch_size(tmp_path):
    path = tmp_path / "trace.h5"
    simulate(timing_job(workers=3), path)
    with h5py.File(path, "r+") as file:
        sizes = file["pushes"]["batch_size"]
        file["pushes"]["batch_size"] = np.where(file["pushes"]["worker"] == 0, 2, sizes)
    with pytest.raises(JobError, match="workload.batch_size = 4, it has 2"):
        read(job_from(path), 8000)
    for said, is_refused in (("batch_size = 4", False), ("batch_size = 8", True)):
        with h5py.File(path, "r+") as file:
            job = job_from(path, workload={**TIMING, "batch_size": 4}, batches={"policy": "proportional"})
            file.attrs["job"] = job.to_toml().replace("batch_size = 4", said)
        if is_refused:
            with pytest.raises(JobError, match="workload.batch_size = 4, it has 8"):
                read(job_from(path), 8000)
        else:
            seconds = [next(times.seconds()) for times in read(job_from(path), 8000).workers]
            assert seconds == [2.0, 1.0, 1.0], "in proportion"


def test_a_trace_without_a_push_of_every_worker_is_refused(tmp_path):
    leaving = [{"worker": 2, "at_iteration": 1, "change": "leave"}]
    simulate(timing_job(workers=3, paradigm={"name": "asp"}, cluster={"events": leaving}), tmp_path / "trace.h5")
    with pytest.raises(JobError, match="must have an iteration of every worker; worker 2 has none"):
        read(job_from(tmp_path / "trace.h5"), 8000)


@pytest.mark.parametrize("which", ["for", "of"])
def test_compressed_pushes_are_refused(tmp_path, which):
    sign = {"compression": {"name": "sign"}}
    simulate(timing_job(workers=3, **(sign if which == "of" else {})), tmp_path / "trace.h5")
    with pytest.raises(JobError, match=r'times_from = .*: must not be given .*with compression.name = "sign"$'):
        read(job_from(tmp_path / "trace.h5", **(sign if which == "for" else {})), 8000)


@pytest.mark.parametrize(
    "paradigm",
    [
        {"name": "ashl", "warmup": 1, "profiled": 2},
        {"name": "adsp", "check_period_s": 12, "commits": 3},
    ],
    ids=lambda paradigm: paradigm["name"],
)
def test_committing_workers_have_recorded_times(tmp_path, paradigm):
    """Their own times reproduce the run if local steps are equally long; other times give a prediction."""
    times = {"seconds": [1.0, 0.7, 1.6], "cluster": NETWORK}
    job = {"workers": 3, "paradigm": paradigm, "stop": {"updates": 40}}
    first = simulate(timing_job(**job, **times), tmp_path / "first.h5")
    again = simulate(job_from(tmp_path / "first.h5", **job), tmp_path / "again.h5")
    assert again.tables["pushes"]["local_steps"].tolist() == first.tables["pushes"]["local_steps"].tolist()
    assert again.tables["pushes"]["now_s"] == pytest.approx(first.tables["pushes"]["now_s"])
    simulate(timing_job(workers=3, **times), tmp_path / "bsp.h5")
    other = simulate(job_from(tmp_path / "bsp.h5", **job), tmp_path / "other.h5")
    assert other.tables["pushes"]["now_s"] == pytest.approx(first.tables["pushes"]["now_s"], rel=0.1)


def test_times_of_all_reduces_serve_a_run_with_servers(tmp_path):
    """Half of an all-reduce reads the weights, half pushes the gradient."""
    compute, network = {"model": "constant", "seconds": [0.1, 0.2]}, {"bandwidth_gbit": 1e-3, "latency_us": 0}
    together = timing_job(workers=2, paradigm={"name": "allreduce"}, cluster={"compute": compute, "network": network})
    exchanges = simulate(together, tmp_path / "allreduce.h5").tables["exchanges"]
    (sum_s,) = set(exchanges["comm_s"].round(9).tolist())
    assert sum_s > 0.01
    asked = timing_job(workers=2, paradigm={"name": "asp"}, cluster={"times_from": str(tmp_path / "allreduce.h5")})
    pushes = simulate(asked, tmp_path / "asp.h5").tables["pushes"]
    assert pushes["comm_s"] == pytest.approx(sum_s) and pushes["pull_s"] == pytest.approx(sum_s / 2)
    for worker, seconds in enumerate(compute["seconds"]):
        assert pushes["compute_s"][pushes["worker"] == worker] == pytest.approx(seconds)
    wrong = asked.model_copy(update={"workload": asked.workload.model_copy(update={"parameters": 1001})})
    with pytest.raises(JobError, match="must be of a run with bytes moved an iteration = 4004, it has 4000"):
        simulate(wrong, tmp_path / "wrong.h5")


@pytest.mark.parametrize("paradigm", [{"name": "allreduce"}, {"name": "local-sgd", "steps": 3}], ids=str)
def test_a_run_in_step_is_reproduced_from_its_own_times(tmp_path, paradigm):
    compute = {"model": "lognormal", "seconds": [0.1, 0.2], "jitter": 0.3}
    cluster = {"compute": compute, "network": {"bandwidth_gbit": 1e-3, "latency_us": 0}, "update_gbytes_per_s": 1e-3}
    first = simulate(timing_job(workers=2, paradigm=paradigm, cluster=cluster), tmp_path / "first.h5")
    times = {"times_from": str(tmp_path / "first.h5")}
    again = simulate(timing_job(workers=2, paradigm=paradigm, cluster=times), tmp_path / "again.h5")
    for column in ("now_s", "wait_s", "comm_s", "wire_bytes"):
        assert again.tables["exchanges"][column] == pytest.approx(first.tables["exchanges"][column]), column
    slow = {**times, "events": [{"at_s": 0.5, "worker": 0, "change": "slow", "factor": 5.0}]}
    slowed = simulate(timing_job(workers=2, paradigm=paradigm, cluster=slow), tmp_path / "slow.h5")
    assert slowed.tables["updates"]["now_s"][-1] > 1.5 * first.tables["updates"]["now_s"][-1]


def test_times_of_pushes_do_not_serve_an_all_reduce(tmp_path):
    simulate(timing_job(workers=2), tmp_path / "bsp.h5")
    asked = timing_job(workers=2, paradigm={"name": "allreduce"}, cluster={"times_from": str(tmp_path / "bsp.h5")})
    with pytest.raises(JobError, match="must be of a run whose workers exchange all together, as under allreduce"):
        simulate(asked, tmp_path / "asked.h5")


def test_times_of_gossip_are_refused(tmp_path):
    gossip = {"name": "gossip", "mode": "pull"}
    simulate(timing_job(workers=2, paradigm=gossip), tmp_path / "gossip.h5")
    asked = timing_job(workers=2, cluster={"times_from": str(tmp_path / "gossip.h5")})
    with pytest.raises(JobError, match="must be of a run with servers, or of one whose workers exchange all together"):
        simulate(asked, tmp_path / "asked.h5")
    asked = timing_job(workers=2, paradigm=gossip, cluster={"times_from": str(tmp_path / "gossip.h5")})
    with pytest.raises(JobError, match='must be left out with paradigm.name = "gossip"'):
        simulate(asked, tmp_path / "asked.h5")
