"""What-if analysis: closed forms of the slowdowns, and predictions beside what a simulation really takes."""

import dataclasses
import math

import numpy as np
import pytest

from hpcsync.config.errors import JobError
from hpcsync.report.explanation import explain, sentences
from hpcsync.simulator import what_if
from hpcsync.simulator.what_if import NotReplayed, study
from hpcsync.trace.reader import opened
from tests.unit.jobs import LINEAR
from tests.unit.simulator.runs import simulated
from tests.unit.trace.recorder import edit

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
    # After 10 of 40 iterations of 0.2 s batches become 9, 9, 9 and 5 instead of 8 samples.
    expected_s = None if paradigm["name"] == "local-sgd" else pytest.approx(10 * 0.2 + 30 * 5 / 8 * 0.2)
    assert found.by_speed_s == expected_s  # a job under local SGD cannot have batches by speed


@pytest.mark.parametrize("paradigm", [{"name": "gossip", "mode": "pull"}, {"name": "ad-psgd"}], ids=str)
def test_one_worker_of_half_the_speed_costs_others_nothing_without_waiting(tmp_path, paradigm):
    found = study(simulated(tmp_path, paradigm, [0.1, 0.1, 0.1, 0.2], updates=700))
    assert found.slowdown == pytest.approx(40 / 35, rel=0.02)  # iterations a second of all workers together
    assert found.of_worker(3) == pytest.approx(40 / 35, rel=0.02)
    assert found.of_worker(0) == pytest.approx(1.0, rel=0.02)
    assert found.of_operation("transfer") == 1.0
    assert found.by_speed_s is None


@pytest.mark.parametrize(
    ("paradigm", "seconds"),
    [("asp", [0.0, 0.0]), ("ad-psgd", [0.0, 0.0]), ("bsp", [0.0, 0.0, 0.1]), ("allreduce", [0.0, 0.0, 0.1])],
)
def test_iterations_that_take_no_time(tmp_path, paradigm, seconds):
    """Neither as recorded nor with the median of the workers can slowdowns be divided by them."""
    with pytest.raises(NotReplayed, match="would take no time"):
        study(simulated(tmp_path, {"name": paradigm}, seconds))


@pytest.mark.parametrize(
    "paradigm",
    [{"name": "local-sgd", "steps": 4}, *({"name": "gossip", "mode": mode} for mode in ("pull", "permutation"))],
    ids=str,
)
def test_equal_slow_links_are_no_stragglers(tmp_path, paradigm):
    """The median is that of the transfers made, not of the iterations without one."""
    trace = simulated(tmp_path, paradigm, [0.1] * 4, network={"bandwidth_gbit": 0.001}, updates=200)
    assert trace.tables["exchanges"]["comm_s"].max() > 0.03
    assert study(trace).slowdown == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("paradigm", [*LOCKSTEP, {"name": "asp"}, {"name": "ssp", "staleness": 2}])
def test_equal_workers_have_no_stragglers(tmp_path, paradigm):
    found = study(simulated(tmp_path, paradigm, [0.1, 0.1, 0.1], network=NETWORK, updates=100))
    assert found.slowdown == pytest.approx(1.0, abs=0.02)
    if paradigm["name"] != "local-sgd":
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
        *({"name": "gossip", "mode": mode} for mode in ("pull", "push", "push-sum", "permutation")),
        {"name": "gossip", "mode": "pull", "period": 3},
        {"name": "ad-psgd"},
    ],
    ids=lambda paradigm: " ".join(map(str, paradigm.values())),
)
def test_its_own_times_take_the_time_of_the_run(tmp_path, paradigm):
    found = study(simulated(tmp_path, paradigm, [0.1, 0.15, 0.25], jitter=0.3, network=NETWORK))
    assert found.replayed_s == pytest.approx(found.real_s, rel=0.03)


@pytest.mark.parametrize(
    "paradigm",
    [{"name": "asp"}, {"name": "dssp", "staleness_min": 1, "staleness_max": 4}, {"name": "gossip", "mode": "push"}],
)
def test_an_iteration_that_was_under_way_takes_its_time_too(tmp_path, paradigm):
    """Worker 2 has made one iteration when the last update counts; its next one does not begin again with the first."""
    found = study(simulated(tmp_path, paradigm, [0.1, 0.12, 0.7], jitter=0.5, updates=17))
    assert found.replayed_s == pytest.approx(found.real_s)


@pytest.mark.parametrize(
    "paradigm",
    [*LOCKSTEP, *({"name": "gossip", "mode": mode, "synchronous": True} for mode in ("pull", "permutation"))],
    ids=lambda paradigm: " ".join(map(str, paradigm.values())),
)
def test_a_worker_that_leaves_leaves_the_simulations_too(tmp_path, paradigm):
    leaves = {"events": [{"worker": 0, "change": "leave", "at_s": 1.0}], "network": NETWORK}
    trace = simulated(tmp_path, paradigm, [0.1, 0.15, 0.25], jitter=0.3, **leaves)
    found = study(trace)
    assert found.replayed_s == pytest.approx(found.real_s, rel=0.01)
    assert found.real_s > 2.0


def test_a_script_whose_loop_ends_early_on_a_worker_is_named(tmp_path):
    leaves = {"events": [{"worker": 0, "change": "leave", "at_s": 1.0}]}
    trace = simulated(tmp_path, {"name": "asp"}, [0.1, 0.15, 0.25], **leaves)
    planned = study(trace)
    assert planned.left_early == () and planned.replayed_s == pytest.approx(planned.real_s, rel=0.01)
    job = trace.job.model_copy(update={"cluster": trace.job.cluster.model_copy(update={"events": ()})})
    found = study(dataclasses.replace(trace, attributes={**trace.attributes, "job": job.to_toml()}))
    assert found.left_early == (0,) and found.replayed_s < 0.9 * found.real_s
    said = [each for each in sentences(explain(trace), found) if "before the end" in each]
    assert len(said) == 1 and said[0].startswith(
        "Worker 0 left or died before the end. In the simulations all workers train"
    )
    late = edit(trace, "membership", 0, now_s=0.95 * found.real_s)
    assert study(dataclasses.replace(late, attributes={**trace.attributes, "job": job.to_toml()})).left_early == ()


@pytest.mark.parametrize("paradigm", ["bsp", "ssp", "allreduce"])
def test_allocated_batches_have_their_total_again(tmp_path, paradigm):
    """It is three times 8 samples. The control: most are of worker 0, so the median of all batches is another."""
    options = {"name": paradigm, **({"staleness": 2} if paradigm == "ssp" else {})}
    batches = {"policy": "equal-finish", "predictor": "last", "interval": 3}
    trace = simulated(tmp_path, options, [0.05, 0.4, 0.5], updates=60, batches=batches)
    rows = trace.tables["exchanges" if paradigm == "allreduce" else "pushes"]
    assert np.median(rows["batch_size"]) != 8
    found = study(trace)
    assert found.replayed_s == pytest.approx(found.real_s)


@pytest.mark.parametrize("mode", ["pull", "push", "permutation"])
def test_synchronous_gossip_is_replayed_with_the_transfers_of_both_sides(tmp_path, mode):
    paradigm = {"name": "gossip", "mode": mode, "synchronous": True}
    network = {"bandwidth_gbit": 5e-4}  # a transfer alone takes 0.064 s
    trace = simulated(tmp_path, paradigm, [0.1, 0.15, 0.1, 0.25, 0.1, 0.1], jitter=0.3, network=network)
    assert trace.tables["exchanges"]["comm_s"].mean() > 0.05
    found = study(trace)
    assert found.replayed_s == pytest.approx(found.real_s, rel=1e-6)


@pytest.mark.parametrize(
    "paradigm", [*LOCKSTEP[1:], *({"name": "gossip", "mode": mode} for mode in ("pull", "permutation"))], ids=str
)
def test_steps_between_iterations_count(tmp_path, paradigm):
    slow = 4e3 / 0.05 / 1e9  # a step of 1,000 parameters takes 0.05 s
    trace = simulated(tmp_path, paradigm, [0.1, 0.12, 0.2], update_gbytes_per_s=slow)
    found = study(trace)
    assert found.replayed_s == pytest.approx(found.real_s, rel=0.02)
    rows = trace.tables["exchanges"]
    last = rows[rows["iteration"] > 1]  # a step precedes each iteration but the first
    between_s = explain(trace).between_s
    assert between_s == pytest.approx(0.05 * np.bincount(last["worker"]), rel=1e-6)
    assert any("other work between iterations" in line for line in sentences(explain(trace), None))
    with opened(trace.path, slice_rows=5) as file:
        assert explain(file).between_s == pytest.approx(between_s)


def test_a_run_of_few_iterations_does_not_show_what_batches_by_speed_would_do(tmp_path):
    short, long = (study(simulated(tmp_path, {"name": "bsp"}, [0.1, 0.2], updates=n)) for n in (29, 30))
    assert short.by_speed_s is None
    assert long.by_speed_s < long.replayed_s


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_batches_by_speed_are_predicted(tmp_path, paradigm):
    seconds, stop = [0.1, 0.15, 0.1, 0.3], {"samples": 6_000}
    predicted = study(simulated(tmp_path, {"name": paradigm}, seconds, jitter=0.1, stop=stop))
    batches = {"policy": "equal-finish"}
    took = simulated(tmp_path, {"name": paradigm}, seconds, jitter=0.1, stop=stop, batches=batches)
    assert predicted.by_speed_s == pytest.approx(float(took.tables["updates"]["now_s"][-1]), rel=0.03)
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


def test_a_paradigm_that_decides_by_the_loss_gets_the_recorded_ones(tmp_path, monkeypatch):
    paradigm = {"name": "ashl", "steps_coarse": 8, "steps_fine": 2, "loss_preset": 0.5}
    trace = simulated(
        tmp_path,
        paradigm,
        [0.1, 0.15, 0.25],
        network={"bandwidth_gbit": 0.00002},
        workload=LINEAR,
        optimizer={"name": "sgd", "lr": 0.02},
        stop={"updates": 150},
    )
    steps = trace.tables["pushes"]["local_steps"]
    assert steps.max() == 8  # it has ended the coarse stage
    assert steps[-1] < 8
    found = study(trace)
    assert found.replayed_s == pytest.approx(found.real_s)
    monkeypatch.setattr(what_if, "_losses", lambda each: [[math.nan] for _ in each])
    assert study(trace).replayed_s < 0.95 * found.real_s


@pytest.mark.parametrize(
    ("recorded", "other", "why"),
    [
        ({"name": "bsp"}, {"name": "gossip", "mode": "pull"}, "--paradigm gossip: must have servers, or be allreduce"),
        (
            {"name": "gossip", "mode": "pull"},
            {"name": "bsp"},
            "--paradigm bsp: must be left out for a run under gossip",
        ),
    ],
)
def test_times_of_other_transfers_are_refused(tmp_path, recorded, other, why):
    with pytest.raises(JobError, match=why):
        study(simulated(tmp_path, recorded, [0.1, 0.1, 0.2]), [other])


@pytest.mark.parametrize("recorded", ["bsp", "allreduce"])
@pytest.mark.parametrize("other", [{"name": "k-sync", "k": 2}, {"name": "asp"}, {"name": "local-sgd", "steps": 4}])
def test_other_paradigms_are_predicted(tmp_path, recorded, other):
    seconds, stop = [0.1, 0.15, 0.1, 0.3], {"samples": 8_000}
    found = study(simulated(tmp_path, {"name": recorded}, seconds, jitter=0.1, stop=stop), [other])
    took = simulated(tmp_path, other, seconds, jitter=0.1, stop=stop)
    (predicted_s,) = found.others_s.values()
    assert predicted_s == pytest.approx(float(took.tables["updates"]["now_s"][-1]), rel=0.05)


def test_a_rate_of_single_gradients_hinders_no_other_paradigm(tmp_path):
    optimizer = {"name": "sgd", "lr": 0.1, "async_lr_scale": "1/workers"}
    found = study(simulated(tmp_path, {"name": "asp"}, [0.1, 0.1], optimizer=optimizer), [{"name": "allreduce"}])
    assert found.others_s["all-reduce"] == pytest.approx(found.replayed_s)


def test_servers_read_and_push_in_the_time_of_an_all_reduce(tmp_path):
    trace = simulated(tmp_path, {"name": "allreduce"}, [0.1, 0.1], network={"bandwidth_gbit": 0.001})
    comm_s = float(trace.tables["exchanges"]["comm_s"][0])
    assert comm_s > 0.01
    found = study(trace, [{"name": "bsp"}])
    assert found.others_s["BSP"] == pytest.approx(found.replayed_s)


def test_another_paradigm_that_is_none_is_refused(tmp_path):
    with pytest.raises(JobError, match="paradigm"):
        study(simulated(tmp_path, {"name": "bsp"}, [0.1, 0.1]), [{"name": "k-sync", "k": 5}])
