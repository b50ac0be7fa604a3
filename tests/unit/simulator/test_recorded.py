"""Times from another run's trace: the same job again gives the same run, another job an answer."""

import numpy as np
import pytest

from hpcsync.job_errors import JobError
from hpcsync.simulator.recorded import RecordedTimes, recorded_times
from hpcsync.traces.comparing import compare
from tests.unit.simulator.running import PARADIGMS, simulate, timing_job

NETWORK = {"network": {"bandwidth_gbit": 1e-3, "latency_us": 1000}}


def columns(*rows):
    return [np.array(column, float) for column in zip(*rows, strict=True)]


def test_the_first_iteration_does_not_come_again():
    #                               compute  to begin  to server  comm
    times = RecordedTimes(*columns((1.0, 9.0, 0.2, 0.2), (2.0, 0.3, 0.2, 0.2), (3.0, 0.3, 0.4, 0.2)))
    seconds = times.seconds()
    assert [next(seconds) for _ in range(7)] == [1.0, 2.0, 3.0, 2.0, 3.0, 2.0, 3.0]
    assert [round(sum(times.steps(i)), 9) for i in range(1, 8)] == [9.2, 0.5, 0.7, 0.5, 0.7, 0.5, 0.7]


def test_one_iteration_comes_again():
    times = RecordedTimes(*columns((1.0, 9.0, 0.2, 0.2)))
    seconds = times.seconds()
    assert [next(seconds) for _ in range(3)] == [1.0] * 3
    assert times.steps(3) == times.steps(1)


def test_transfers_are_part_of_the_way():
    put_s, report_s, grant_s, read_s = RecordedTimes(*columns((1.0, 0.5, 0.2, 0.3))).steps(1)
    assert (put_s, report_s, grant_s, read_s) == pytest.approx((0.15, 0.05, 0.35, 0.15))


def test_clocks_that_disagree_give_no_negative_times():
    steps = RecordedTimes(*columns((1.0, -1e-6, 0.2, 0.3))).steps(1)
    assert min(steps) == 0.0
    assert steps.read_s == 0.0


@pytest.mark.parametrize("network", [{}, NETWORK], ids=["ideal", "network"])
@pytest.mark.parametrize("paradigm", PARADIGMS, ids=str)
def test_a_run_from_its_own_trace_is_itself(tmp_path, paradigm, network):
    job = timing_job(workers=3, model="lognormal", paradigm=paradigm, stop={"updates": 60}, cluster=network)
    first = simulate(job, tmp_path / "first.h5")
    again = timing_job(
        workers=3,
        model="exponential",  # not looked at
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


def test_what_would_another_paradigm_have_done(tmp_path):
    """The workers are as fast as they were, so a bound costs exactly what it costs in the original cluster."""
    seconds = [1.0, 1.0, 3.0]
    asp = timing_job(workers=3, seconds=seconds, paradigm={"name": "asp"}, stop={"updates": 200})
    simulate(asp, tmp_path / "asp.h5")
    ssp = {"paradigm": {"name": "ssp", "staleness": 2}, "stop": {"updates": 200}}
    there = simulate(timing_job(workers=3, seconds=seconds, **ssp), tmp_path / "there.h5")
    asked = timing_job(workers=3, **ssp, cluster={"times_from": str(tmp_path / "asp.h5")})
    here = simulate(asked, tmp_path / "here.h5")
    assert compare(there, here).time_ratio == pytest.approx(1.0, rel=1e-9)


def job_from(path, **tables):
    return timing_job(**{"workers": 3, **tables}, cluster={"times_from": str(path)})


def test_a_trace_that_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "trace.h5"
    simulate(timing_job(workers=3), path)
    with pytest.raises(JobError, match=r"cluster.times_from = .*: must have cluster.workers = 4 workers, it has 3"):
        recorded_times(job_from(path, workers=4))
    with pytest.raises(JobError, match=r"must have workload.batch_size = 8, it has 4"):
        recorded_times(job_from(path, workload={"name": "timing", "batch_size": 8}))
    (tmp_path / "text").write_text("no trace")
    with pytest.raises(JobError, match="cluster.times_from: .*text: not a trace"):
        recorded_times(job_from(tmp_path / "text"))


def test_a_trace_without_a_push_of_every_worker_is_refused(tmp_path):
    simulate(timing_job(workers=3, seconds=[1.0, 1.0, 99.0], paradigm={"name": "asp"}, cluster={
        "events": [{"worker": 2, "at_iteration": 1, "change": "leave"}],
    }), tmp_path / "trace.h5")  # fmt: skip
    with pytest.raises(JobError, match="must have a push of every worker; worker 2 has none"):
        recorded_times(job_from(tmp_path / "trace.h5"))
