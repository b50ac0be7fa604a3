"""Layer separation with recorded times: replays beside their runs, and transfers found from the times of both sides."""

import numpy as np
import pytest

from hpcsync.config.errors import JobError
from hpcsync.simulator import replayed_layers, replayed_times
from hpcsync.simulator.simulate import prepare
from hpcsync.simulator.what_if import study
from hpcsync.workloads.registry import build
from tests.unit.recorder import Recorder
from tests.unit.simulator.runs import simulated
from tests.unit.simulator.separated import GBIT, LATENCY_S, NETWORK, TIMING
from tests.unit.trace.recorder import with_rows

SLOW = [0.1, 0.15, 0.1, 0.25, 0.1]


def stanza(pieces=1, n_fc=1, fc_share=0.2):
    options = {"fc_workers": n_fc, "fc_share": fc_share, "micro_batches": pieces}
    return {"name": "stanza", "cut": "classifier", **options}


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize(("n_fc", "fc_share"), [(1, 0.5), (2, 0.1)])
@pytest.mark.parametrize("network", [{}, {"network": NETWORK}], ids=["at once", "network"])
def test_its_own_times_take_the_time_of_the_run(tmp_path, pieces, n_fc, fc_share, network):
    paradigm = stanza(pieces, n_fc, fc_share)
    found = study(simulated(tmp_path, paradigm, SLOW, jitter=0.3, workload=TIMING, updates=30, **network))
    assert found.replayed_s == pytest.approx(found.real_s, rel=1e-3)
    if not network:
        assert found.of_operation("transfer") == pytest.approx(1.0)
        assert found.slowdown == pytest.approx(found.of_operation("computation"))
    assert max(found.without_worker_s, key=found.of_worker) == 3
    assert found.by_speed_s is None


def test_transfers_that_were_left_out_would_be_found(tmp_path, monkeypatch):
    monkeypatch.setattr(replayed_layers, "_transfer_s", lambda rows, *_: np.zeros(len(rows)))
    found = study(simulated(tmp_path, stanza(), SLOW, workload=TIMING, network=NETWORK))
    assert found.replayed_s < 0.98 * found.real_s


def test_steps_between_iterations_count(tmp_path):
    trace = simulated(tmp_path, stanza(), [0.1] * 3, workload=TIMING, update_gbytes_per_s=0.1)
    found = study(trace)
    without_s = simulated(tmp_path, stanza(), [0.1] * 3, workload=TIMING).tables["updates"]["now_s"][-1]
    assert found.replayed_s == pytest.approx(found.real_s, rel=1e-3)
    assert found.real_s > 1.5 * without_s


def test_a_slow_convolution_worker_costs_its_part_of_the_time(tmp_path):
    found = study(simulated(tmp_path, stanza(), [0.1, 0.1, 0.1, 0.2], workload=TIMING))
    assert found.slowdown == pytest.approx((0.8 * 0.2 + 3 * 0.2 * 0.1) / (0.8 * 0.1 + 3 * 0.2 * 0.1))
    assert found.of_worker(3) == pytest.approx(found.slowdown)
    assert found.of_worker(0) == pytest.approx(1.0)


def test_transfers_follow_from_the_times_of_both_sides(tmp_path):
    trace = simulated(tmp_path, stanza(), [0.1] * 2, workload=TIMING, network=NETWORK)
    _, below = replayed_layers.columns(trace.job, trace.tables["exchanges"])
    sent_bytes, returned_bytes = (8 * (4 * TIMING["activations"] + labels) for labels in (8, 0))
    assert below.to_server_s[1:] == pytest.approx(LATENCY_S + sent_bytes / GBIT, rel=1e-3)
    assert below.to_begin_s[1:] == pytest.approx(LATENCY_S + returned_bytes / GBIT, rel=1e-3)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_job_with_the_times_of_a_run_takes_its_time(tmp_path, pieces):
    job, took_s = times_from(tmp_path, stanza(pieces))
    assert updates_s(job) == pytest.approx(took_s)


@pytest.mark.parametrize(
    ("paradigm", "workload", "why"),
    [
        (stanza(2), TIMING, "a run with paradigm.micro_batches = 2, it has 1"),
        (stanza(n_fc=2), TIMING, "a run with paradigm.fc_workers = 2, it has 1"),
        (stanza(), TIMING | {"activations": 7}, "a run with layers of these bytes"),
        (stanza(), TIMING | {"batch_size": 16}, "a run with workload.batch_size = 16, it has 8"),
    ],
)
def test_times_of_other_layers_are_refused(tmp_path, paradigm, workload, why):
    recorded, _ = times_from(tmp_path, stanza())
    job = simulated(tmp_path, paradigm, SLOW, workload=workload, updates=2).job
    with pytest.raises(JobError, match=why):
        updates_s(with_times(job, recorded.cluster.times_from))


def test_a_trace_without_an_iteration_of_some_worker_is_refused(tmp_path, monkeypatch):
    job, _ = times_from(tmp_path, stanza())
    whole = replayed_times.load

    def without(path):
        trace = whole(path)
        rows = trace.tables["exchanges"]
        return with_rows(trace, "exchanges", rows[rows["worker"] > 0])

    monkeypatch.setattr(replayed_times, "load", without)
    with pytest.raises(JobError, match="a run with an iteration of worker 0, it has none"):
        updates_s(job)


def times_from(tmp_path, paradigm):
    trace = simulated(tmp_path, paradigm, SLOW, jitter=0.2, workload=TIMING, network=NETWORK)
    return with_times(trace.job, str(trace.path)), trace.tables["updates"]["now_s"]


def with_times(job, path):
    cluster = job.cluster.model_copy(update={"times_from": path, "network": None})
    return job.model_copy(update={"cluster": cluster})


def updates_s(job):
    trace = Recorder()
    prepare(job, build(job))(trace).run()
    return np.array(trace.array("updates")["now_s"])
