"""What-if analysis: closed forms of the slowdowns, and predictions beside what a simulation really takes."""

import pytest

from hpcsync.config.errors import JobError
from hpcsync.simulator import what_if
from hpcsync.simulator.what_if import NotReplayed, study
from tests.unit.simulator.runs import simulated

NETWORK = {"bandwidth_gbit": 0.01, "latency_us": 100.0}
LOCKSTEP = [{"name": "bsp"}, {"name": "allreduce"}, {"name": "local-sgd", "steps": 4}]


@pytest.mark.parametrize("paradigm", LOCKSTEP, ids=lambda paradigm: paradigm["name"])
def test_one_worker_of_half_the_speed(tmp_path, paradigm):
    found = study(simulated(tmp_path, paradigm, [0.1, 0.1, 0.1, 0.2]))
    assert found.replayed_s == pytest.approx(found.real_s)
    assert found.slowdown == pytest.approx(2.0)
    assert {worker: round(found.of_worker(worker), 9) for worker in range(4)} == {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0}
    assert found.of_operation("computation") == pytest.approx(2.0)
    assert found.of_operation("transfer") == pytest.approx(1.0)
    # Together 3 / 0.1 + 1 / 0.2 batches a second, so four batches take 4 / 35 s instead of 0.2 s.
    assert found.by_speed_s == pytest.approx(found.real_s * 4 / 35 / 0.2)


@pytest.mark.parametrize("paradigm", [*LOCKSTEP, {"name": "asp"}, {"name": "ssp", "staleness": 2}])
def test_equal_workers_have_no_stragglers(tmp_path, paradigm):
    found = study(simulated(tmp_path, paradigm, [0.1, 0.1, 0.1], network=NETWORK))
    assert found.slowdown == pytest.approx(1.0, abs=0.02)
    assert found.by_speed_s == pytest.approx(found.replayed_s, rel=0.02)


@pytest.mark.parametrize(
    "paradigm",
    [
        *LOCKSTEP,
        {"name": "asp"},
        {"name": "dssp", "staleness_min": 1, "staleness_max": 4},
        {"name": "k-sync", "k": 2},
        {"name": "easgd", "period": 3},
        {"name": "async-diloco", "steps": 3},
        {"name": "adsp", "check_period_s": 3, "interval_min_s": 0.5, "search_every_s": 10},
    ],
    ids=lambda paradigm: paradigm["name"],
)
def test_its_own_times_take_the_time_of_the_run(tmp_path, paradigm):
    found = study(simulated(tmp_path, paradigm, [0.1, 0.15, 0.25], jitter=0.3, network=NETWORK))
    assert found.replayed_s == pytest.approx(found.real_s, rel=0.03)


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_batches_by_speed_are_predicted(tmp_path, paradigm):
    seconds, stop = [0.1, 0.15, 0.1, 0.3], {"samples": 20_000}
    predicted = study(simulated(tmp_path, {"name": paradigm}, seconds, jitter=0.1, stop=stop))
    batches = {"policy": "equal-finish", "predictor": "smoothing", "interval": 1}
    took = simulated(tmp_path, {"name": paradigm}, seconds, jitter=0.1, stop=stop, batches=batches)
    assert predicted.by_speed_s == pytest.approx(float(took.tables["updates"]["now_s"][-1]), rel=0.1)
    assert predicted.by_speed_s < 0.6 * predicted.replayed_s


def test_a_slow_link_is_a_slow_transfer(tmp_path):
    """The medians of a run with one slow link differ from it in transfers, not in computations."""
    network = {"bandwidth_gbit": [0.01, 0.01, 0.001], "server_bandwidth_gbit": 1.0}
    found = study(simulated(tmp_path, {"name": "bsp"}, [0.01, 0.01, 0.01], network=network))
    assert found.of_operation("transfer") > 1.3
    assert found.of_operation("computation") == pytest.approx(1.0, abs=0.02)
    assert max(found.without_worker_s, key=found.of_worker) == 2


def test_only_the_beginning_is_simulated(tmp_path, monkeypatch):
    monkeypatch.setattr(what_if, "ROWS", 30)
    found = study(simulated(tmp_path, {"name": "bsp"}, [0.1, 0.1, 0.2]))
    assert found.samples == 10 * 3 * 8
    assert found.replayed_s == pytest.approx(found.real_s) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("paradigm", "why"),
    [({"name": "gossip", "mode": "pull"}, "times of gossip cannot be replayed")],
)
def test_what_cannot_be_replayed_is_said(tmp_path, paradigm, why):
    with pytest.raises(NotReplayed, match=why):
        study(simulated(tmp_path, paradigm, [0.1, 0.1, 0.2]))


@pytest.mark.parametrize("recorded", ["bsp", "allreduce"])
@pytest.mark.parametrize("other", [{"name": "k-sync", "k": 2}, {"name": "asp"}, {"name": "local-sgd", "steps": 4}])
def test_other_paradigms_are_predicted(tmp_path, recorded, other):
    seconds, stop = [0.1, 0.15, 0.1, 0.3], {"samples": 8_000}
    found = study(simulated(tmp_path, {"name": recorded}, seconds, jitter=0.1, stop=stop), [other])
    took = simulated(tmp_path, other, seconds, jitter=0.1, stop=stop)
    (predicted_s,) = found.others_s.values()
    assert predicted_s == pytest.approx(float(took.tables["updates"]["now_s"][-1]), rel=0.05)


def test_servers_read_and_push_in_the_time_of_an_all_reduce(tmp_path):
    trace = simulated(tmp_path, {"name": "allreduce"}, [0.1, 0.1], network={"bandwidth_gbit": 0.001})
    comm_s = float(trace.tables["exchanges"]["comm_s"][0])
    assert comm_s > 0.01
    found = study(trace, [{"name": "bsp"}])
    assert found.others_s["BSP"] == pytest.approx(found.replayed_s)


def test_another_paradigm_that_is_none_is_refused(tmp_path):
    with pytest.raises(JobError, match="paradigm"):
        study(simulated(tmp_path, {"name": "bsp"}, [0.1, 0.1]), [{"name": "k-sync", "k": 5}])
