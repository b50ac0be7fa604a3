"""Separated layers in virtual time: closed forms, traces, and ends."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hpcsync.config.errors import JobError
from hpcsync.paradigms.records import ALL_PEERS, Problem
from hpcsync.planning import stanza_planner
from hpcsync.planning.split_cost import SEPARATED, Shape, Times
from hpcsync.simulator.peer_transfers import build as build_workers
from hpcsync.trace.schema import TABLES
from hpcsync.training.sampler import batch_indices
from hpcsync.workloads.registry import build
from tests.unit.simulator.closed_forms import ring_allreduce_s
from tests.unit.simulator.running import simulate
from tests.unit.simulator.separated import (
    ALEXNET,
    FC_SHARE,
    GBIT,
    LATENCY_S,
    NETWORK,
    TIMING,
    Run,
    separated,
    trained,
    workload,
)

# ---- losses ----


@pytest.mark.parametrize("on_nan", ["stop", "warn"])
def test_a_loss_that_is_not_finite_is_said_by_the_workers_that_have_it(on_nan, capsys):
    """Convolution workers know none."""
    job = separated(2, 1, optimizer={"name": "sgd", "lr": 1e200}, stop={"updates": 6, "on_nan": on_nan})
    if on_nan == "stop":
        with pytest.raises(JobError, match="^worker 0, iteration 2: the loss is not finite$"):
            Run(job, workload(job))
        return
    rows = Run(job, workload(job)).trace.array("exchanges")
    said = rows["problem"] == Problem.LOSS_NOT_FINITE
    assert said.sum() == 5 and np.array_equal(said, (rows["worker"] == 0) & ~np.isfinite(rows["loss"]))
    assert "worker 0, iteration 2: the loss is not finite; stop.on_nan" in capsys.readouterr().err


# ---- durations ----


@pytest.mark.parametrize("fixed", [0.0, 0.4])
@pytest.mark.parametrize("pieces", [1, 2, 8])
@pytest.mark.parametrize("seconds", [0.01, 0.3], ids=["transfers take longer", "computing takes longer"])
@pytest.mark.parametrize(("n_convolution", "n_fc"), [(1, 1), (3, 1), (4, 2)])
def test_an_iteration_takes_the_sum_of_its_parts(n_convolution, n_fc, seconds, pieces, fixed):
    """With few weights above the cut, so that their all-reduce is negligible."""
    below = 4 * 2_999_999
    compute = {"model": "constant", "seconds": seconds, "fixed_share": fixed}
    job = separated(
        n_convolution, n_fc, pieces=pieces, cluster={"network": NETWORK, "compute": compute},
        workload={**TIMING, "classifier": 1},
    )  # fmt: skip
    n_served = n_convolution // n_fc
    parts = (1 - FC_SHARE) * seconds / 3, (1 - FC_SHARE) * seconds * 2 / 3, FC_SHARE * seconds
    times = Times(*parts, fixed * FC_SHARE * seconds, fixed)
    convolution_s, fc_s = (
        share * seconds * (pieces * fixed + (1 - fixed) * load)
        for share, load in ((1 - FC_SHARE, 1), (FC_SHARE, n_served))
    )
    profile = stanza_planner.SplitProfile(times, Shape(below // 4, 1, 50_000), 8)
    ring_s = ring_allreduce_s(n_convolution, below, LATENCY_S, GBIT)
    links = stanza_planner.Link(GBIT, LATENCY_S)
    done_s = stanza_planner.stanza_s(profile, links, job.groups, micro_batches=pieces) - ring_s
    run = Run(job)
    assert run.iteration_s() == pytest.approx(done_s + ring_s, rel=1e-6)
    rows = run.trace.array("exchanges")
    later = rows[rows["iteration"] > 1]
    spent = later["compute_s"] + later["wait_s"] + later["comm_s"]
    assert spent == pytest.approx(done_s + ring_s, rel=1e-6)
    is_fc = later["worker"] < n_fc
    assert later["compute_s"][is_fc] == pytest.approx(fc_s) and later["compute_s"][~is_fc] == pytest.approx(
        convolution_s
    )
    assert later["comm_s"][~is_fc] == pytest.approx(ring_s)
    if pieces == 1:
        span = later["end_s"] - later["begin_s"]
        assert (span[is_fc] > fc_s + parts[0]).all() and span[~is_fc] == pytest.approx(done_s)


def test_pieces_overlap_with_transfers():
    """As in a pipeline: all stages once, and the slowest, the last one, for each further piece.

    This holds until a convolution worker is never idle.
    """
    seconds, took = 0.1, []
    for pieces in (1, 2, 4, 8):
        network = {"network": {**NETWORK, "latency_us": 0.0}}
        job = separated(1, 1, pieces=pieces, seconds=seconds, workload=TIMING, cluster=network)
        forward_s, backward_s = 0.8 * seconds / 3, 0.8 * seconds * 2 / 3
        there_s, back_s = 8 * 200_008 / GBIT, 8 * 200_000 / GBIT
        stages = [forward_s, there_s, 0.2 * seconds, back_s, backward_s]
        took.append(Run(job).iteration_s())
        in_a_pipeline = (sum(stages) + (pieces - 1) * backward_s) / pieces
        assert max(stages) == backward_s
        assert took[-1] == pytest.approx(max(in_a_pipeline, forward_s + backward_s), rel=1e-9)
    assert took[0] > took[1] > took[2] == pytest.approx(took[3])


def test_gradients_share_links_with_the_all_reduce_above_the_cut():
    """The all-reduce takes half of the link until it is over: gradients arrive that much later."""
    tables = {"seconds": 0.1, "cluster": {"network": {**NETWORK, "latency_us": 0.0}}}
    alone, beside = (
        Run(separated(2, 2, workload={**TIMING, "parameters": 3_000_000 + above, "classifier": above}, **tables))
        for above in (1, 100_000)
    )
    assert beside.iteration_s() - alone.iteration_s() == pytest.approx(4 * 99_999 / GBIT, rel=1e-6)


def test_convolution_workers_do_not_wait_for_an_all_reduce_above_the_cut():
    """They begin the next iteration; its activations are processed after the all-reduce."""
    above = 10_000_000
    tables = {"seconds": 0.1, "cluster": {"network": {**NETWORK, "latency_us": 0.0}}}
    run = Run(separated(2, 2, workload={**TIMING, "parameters": 3 + above, "classifier": above}, **tables))
    rows = run.trace.array("exchanges")
    ends = {(row["worker"], row["iteration"]): row["now_s"] for row in rows}
    begins = {(row["worker"], row["iteration"]): row["begin_s"] for row in rows}
    for iteration in range(1, 6):
        assert begins[2, iteration + 1] == ends[2, iteration] < ends[0, iteration] == begins[0, iteration + 1]
        assert ends[0, iteration + 1] - ends[0, iteration] > ring_allreduce_s(2, 4 * above, 0.0, GBIT)


def test_the_slowest_of_a_group_blocks_all():
    """Worker 3's iterations of the whole model take 2 s and not 1, from its third one on 4 s."""
    slow = {"worker": 3, "at_iteration": 3, "change": "slow", "factor": 2.0}
    run = Run(separated(3, 1, seconds=[1.0, 1.0, 1.0, 2.0], workload=TIMING, cluster={"events": [slow]}))
    rows = run.trace.array("exchanges")
    fc_s, fast_s, slow_s = FC_SHARE * 3, 0.8, np.array([1.6, 1.6, 3.2, 3.2, 3.2, 3.2])
    assert np.diff(run.trace.array("updates")["now_s"], prepend=0.0) == pytest.approx(slow_s + fc_s)
    assert rows[rows["worker"] == 3]["wait_s"] == pytest.approx(np.full(6, fc_s))
    assert rows[rows["worker"] == 2]["wait_s"] == pytest.approx(slow_s + fc_s - fast_s)
    assert rows[rows["worker"] == 3]["compute_s"] == pytest.approx(slow_s)


# ---- traces ----


@pytest.mark.parametrize(("n_convolution", "n_fc"), [(8, 1), (6, 2), (3, 1)])
@pytest.mark.parametrize("network", [{}, {"network": NETWORK}], ids=["", "network"])
def test_bytes_sent_per_iteration(n_convolution, n_fc, network):
    run = Run(separated(n_convolution, n_fc, pieces=2, workload=ALEXNET, stop={"updates": 2}, cluster=network))
    rows = run.trace.array("exchanges")
    p_c, p_f, crossing = 2_469_696, 58_631_144, n_convolution * 128 * 9216
    floats = 2 * (n_convolution - 1) * p_c + 2 * (n_fc - 1) * p_f + 2 * crossing
    assert rows["wire_bytes"].sum() == 2 * (4 * floats + 8 * n_convolution * 128)
    is_fc = rows["worker"] < n_fc
    assert (rows["peer"][is_fc] == ALL_PEERS).all()
    served = n_convolution // n_fc
    assert (rows["peer"] == (rows["worker"] - n_fc) // served)[~is_fc].all()
    assert (rows["batch_size"] == np.where(is_fc, 128 * served, 128)).all()
    assert (rows["n_received"] == np.where(is_fc, n_fc, n_convolution) - 1).all()
    updates = run.trace.array("updates")
    assert updates["samples"].tolist() == [n_convolution * 128, 2 * n_convolution * 128]
    assert (updates["n_contributions"] == n_convolution).all()


def test_the_trace_holds_the_sizes_of_the_parts(tmp_path):
    job = separated(3, 2, stop={"updates": 1})
    attributes = simulate(job, tmp_path / "trace.h5", workload(job)).attributes
    assert [attributes[name] for name in SEPARATED] == [8 * 64, 8 * 5, 8 * 4, 8]
    timing = separated(3, 2, workload=TIMING)
    assert list(Run(timing).simulation.attributes.values()) == [8_000_000, 4_000_000, 200_000, 8]


def test_ten_machines_that_train_alexnet_move_243_megabytes():
    rows = Run(separated(9, 1, workload=ALEXNET, stop={"updates": 1})).trace.array("exchanges")
    labels = 9 * 128 * 8
    assert (rows["wire_bytes"].sum() - labels) / 1e6 == pytest.approx(243.0, abs=0.05)


def test_only_fully_connected_workers_have_losses():
    job = separated(3, 2, pieces=2)
    rows = Run(job, workload(job)).trace.array("exchanges")
    is_fc = rows["worker"] < 2
    assert np.isnan(rows["loss"][~is_fc]).all() and np.isfinite(rows["loss"][is_fc]).all()
    training = workload(job)
    for fc, numbers in ((0, [0]), (1, [1, 2])):
        at = torch.from_numpy(np.concatenate([batch_indices(1, j, batch_size=4, size=60) for j in numbers]))
        loss = training.loss(training.model, *(tensor[at] for tensor in training.train.tensors))
        assert rows["loss"][rows["worker"] == fc][0] == pytest.approx(float(loss.detach()), rel=1e-12)


@pytest.mark.parametrize("stop", [{"samples": 100}, {"samples": 96}, {"updates": 7}, {"seconds": 7.2}], ids=str)
@pytest.mark.parametrize("network", [{}, {"network": NETWORK}], ids=["", "network"])
def test_all_end_with_the_same_iteration(network, stop):
    run = Run(separated(3, 2, pieces=2, stop=stop, seconds=[1.0, 1.1, 1.3, 1.0, 1.2], workload=TIMING, cluster=network))
    rows = run.trace.array("exchanges")
    made = [int(rows["iteration"][rows["worker"] == worker].max()) for worker in range(5)]
    updates = run.trace.array("updates")
    assert made == [len(updates)] * 5 and not run.simulation.coordinator.active
    if "seconds" in stop:
        agreed = rows[(rows["worker"] < 2) & (rows["end_s"] >= 7.2)]["iteration"].min()
        assert len(updates) == agreed + 1 and updates["now_s"][-4] < 7.2
    else:
        assert len(updates) == {100: 5, 96: 4, 7: 7}[next(iter(stop.values()))]  # 24 samples an iteration


def test_an_evaluation_is_of_both_halves_after_the_same_step():
    """Evaluation changes nothing; at the end of each run the weights of that version are evaluated."""
    job = separated(3, 2, pieces=2, cluster={"network": NETWORK}, evaluation={"every_samples": 12})
    run = Run(job, workload(job))
    evaluations = run.trace.array("evaluations")
    assert evaluations["version"].tolist() == [1, 2, 3, 4, 5, 6] and (evaluations["samples"] % 12 == 0).all()
    assert (evaluations["consensus_distance"] == 0.0).all()
    for n in (1, 3, 6):
        alone = separated(3, 2, pieces=2, cluster={"network": NETWORK}, stop={"updates": n})
        assert Run(alone, workload(alone)).trace.array("evaluations")["loss"].tolist() == [evaluations["loss"][n - 1]]
    assert np.array_equal(run.weights, trained(separated(3, 2, pieces=2)))


def test_a_target_ends_the_run_two_iterations_later():
    """Fully-connected workers agree on it with the next gradient sum, and notify the others one iteration later."""
    tables = {"stop": {"target_loss": 0.3}, "evaluation": {"every_samples": 12}}
    job = separated(3, 2, cluster={"network": NETWORK}, **tables)
    trace = Run(job, workload(job)).trace
    reached = int(np.flatnonzero(trace.array("evaluations")["loss"] <= 0.3)[0]) + 1
    assert len(trace.array("updates")) == reached + 2


@pytest.mark.parametrize("network", [{}, {"network": NETWORK}], ids=["", "network"])
def test_the_same_job_gives_the_same_bytes(network):
    def tables(seed: int) -> tuple[list[bytes], bytes]:
        compute = {"model": "lognormal", "seconds": 1.0}
        job = separated(3, 2, pieces=2, seed=seed, cluster={**network, "compute": compute})
        run = Run(job, workload(job))
        return [run.trace.array(table).tobytes() for table in TABLES], run.weights.tobytes()

    assert tables(1) == tables(1)
    assert tables(1) != tables(2)


def test_the_network_changes_no_weights():
    job, slow = separated(3, 2, pieces=2), separated(3, 2, pieces=2, cluster={"network": NETWORK})
    assert np.array_equal(trained(job), trained(slow))


@pytest.mark.parametrize(("seconds", "fc_share"), [(0.0, 0.5), ([1.0, 0.0, 0.0], 0.0), ([0.0, 1.0, 1.0], 1.0)], ids=str)
def test_time_must_advance_for_at_least_one_worker(seconds, fc_share):
    """Worker 0 is the fully-connected one."""
    options = {"fc_share": fc_share}
    job = separated(2, 1, seconds=seconds, options=options, workload=TIMING, stop={"seconds": 1.0})
    with pytest.raises(JobError, match=r"^cluster.compute: worker 0's iterations take 0 seconds"):
        build_workers(job, build(job))
    ends = separated(2, 1, seconds=seconds, options=options, workload=TIMING)
    assert list(itertools.pairwise(Run(ends).trace.array("updates")["now_s"].tolist())) == [(0.0, 0.0)] * 5
