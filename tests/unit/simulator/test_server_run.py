"""Whole runs in virtual time: closed forms, audits, determinism, and the numbers of real ranks."""

import math
import tracemalloc

import numpy as np
import pytest
import torch

from hpcsync import paradigms
from hpcsync.audit.trace_audit import audit
from hpcsync.config.base import LEAST, MOST
from hpcsync.core import coordinator
from hpcsync.paradigms.records import Problem
from hpcsync.report.summary import summarize
from hpcsync.simulator import cluster
from hpcsync.simulator.server_run import ServerSimulation
from hpcsync.trace.schema import TABLES
from hpcsync.training.sampler import batches
from hpcsync.workloads.registry import build
from tests.unit.jobs import LINEAR, make_job
from tests.unit.recorder import Nothing
from tests.unit.simulator.running import PARADIGMS, failed, simulate, timing_job

NETWORK = {"network": {"bandwidth_gbit": 1e-3, "latency_us": 1000}}  # 4 kB take 32 ms
EVENTS = {
    "events": [
        {"worker": 0, "at_iteration": 4, "change": "slow", "factor": 5.0},
        {"worker": 0, "at_iteration": 6, "change": "recover"},
        {"worker": 1, "at_s": 9.5, "change": "leave"},
    ]
}


@pytest.mark.parametrize("paradigm", [{"name": "asp"}, {"name": "ssp", "staleness": 2}, {"name": "bsp"}], ids=str)
def test_the_longest_times_and_the_slowest_links_are_simulated(tmp_path, paradigm):
    slow = [{"worker": worker, "at_s": 0.0, "change": "slow", "factor": MOST} for worker in range(3)]
    network = {"bandwidth_gbit": LEAST, "server_bandwidth_gbit": LEAST, "latency_us": MOST}
    cluster = {"network": network, "update_gbytes_per_s": LEAST, "events": slow}
    cluster["compute"] = {"model": "lognormal", "seconds": MOST, "jitter": 10.0}
    job = timing_job(workers=3, paradigm=paradigm, stop={"updates": 100}, cluster=cluster)
    trace = simulate(job, tmp_path / "trace.h5")
    assert len(trace.tables["updates"]) == 100
    assert math.isfinite(summarize(trace).duration_s)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_round_of_bsp_takes_as_long_as_its_slowest(tmp_path, workers):
    seconds = [1.0 + 0.5 * worker for worker in range(workers)]
    job = timing_job(workers=workers, seconds=seconds, paradigm={"name": "bsp"}, stop={"updates": 10})
    trace = simulate(job, tmp_path / "trace.h5")
    assert trace.tables["updates"]["now_s"] == pytest.approx(np.arange(1, 11) * seconds[-1], rel=1e-12)
    waited = {w.worker: w.wait_share for w in summarize(trace).workers}
    for worker, share in waited.items():  # not before its first iteration
        assert share == pytest.approx(9 * (seconds[-1] - seconds[worker]) / (9 * seconds[-1] + seconds[worker]))


@pytest.mark.parametrize("paradigm", [PARADIGMS[1], {"name": "ssp", "staleness": math.inf}], ids=str)
def test_no_worker_waits_without_a_bound(tmp_path, paradigm):
    job = timing_job(workers=3, seconds=[1.0, 2.0, 4.0], paradigm=paradigm, stop={"seconds": 40.5})
    trace = simulate(job, tmp_path / "trace.h5")
    pushes = trace.tables["pushes"]
    assert np.bincount(pushes[pushes["now_s"] < 40.5]["worker"]).tolist() == [40, 20, 10]
    assert pushes["wait_s"].max() == 0.0


@pytest.mark.parametrize(
    ("name", "bounds"), [("ssp", {"staleness": 3}), ("dssp", {"staleness_min": 1, "staleness_max": 6})]
)
def test_within_a_bound_all_run_at_the_pace_of_the_slowest(tmp_path, name, bounds):
    def updates(paradigm, path):
        job = timing_job(workers=3, seconds=[1.0, 1.0, 3.0], paradigm=paradigm, stop={"seconds": 600.0})
        return len(simulate(job, path).tables["updates"])

    assert 3 * 200 <= updates({"name": name, **bounds}, tmp_path / "bound.h5") <= 3 * 200 + 20
    assert updates({"name": "asp"}, tmp_path / "none.h5") == pytest.approx(600 + 600 + 200, abs=3)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_round_of_bsp_over_a_network(tmp_path, workers):
    """Compute, then all put at once, six latencies in total, and all read at once."""
    job = timing_job(workers=workers, paradigm={"name": "bsp"}, stop={"updates": 5}, cluster=NETWORK)
    trace = simulate(job, tmp_path / "trace.h5")
    transfers_s = workers * 4000 * 8 / 1e6
    round_s = 1.0 + 2 * transfers_s + 6e-3
    assert trace.tables["updates"]["now_s"] == pytest.approx(np.arange(1, 6) * round_s, rel=1e-9)
    assert set(trace.tables["pushes"]["wire_bytes"].tolist()) == {8000}
    comm_s = trace.tables["pushes"]["comm_s"]
    assert comm_s == pytest.approx(np.full(len(comm_s), 2 * transfers_s + 4e-3), rel=1e-9)


def test_what_the_server_can_carry_bounds_asp(tmp_path):
    """With many asynchronous workers its link is busy in both directions; without links nothing bounds them."""

    def updates(path, **more):
        tables = {"paradigm": {"name": "asp"}, "stop": {"seconds": 100.0}, **more}
        job = timing_job(workers=16, seconds=0.1, model="exponential", **tables)
        return len(simulate(job, path).tables["updates"])

    carried = 100.0 / 0.032
    assert 0.85 * carried < updates(tmp_path / "link.h5", cluster=NETWORK) <= carried
    assert updates(tmp_path / "ideal.h5") == pytest.approx(100.0 * 16 / 0.1, rel=0.05)


def test_equal_workers_stay_synchronous(tmp_path):
    """Fair shares of equal transfers end together, so equal workers put, and then read, all at once."""
    job = timing_job(workers=8, seconds=1e-3, paradigm={"name": "asp"}, stop={"seconds": 100.0}, cluster=NETWORK)
    round_s = 2 * 8 * 0.032 + 6e-3 + 1e-3
    assert len(simulate(job, tmp_path / "trace.h5").tables["updates"]) == 8 * int(100.0 / round_s)


# ---- traces ----


@pytest.mark.parametrize(
    "more", [{}, NETWORK, EVENTS, NETWORK | EVENTS | {"servers": 2}], ids=["", "network", "events", "all"]
)
@pytest.mark.parametrize("paradigm", PARADIGMS, ids=str)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_simulated_trace_audits(tmp_path, paradigm, more, workers):
    if workers == 1 and "events" in more:
        more = more | {"events": more["events"][:2]}
    job = timing_job(workers=workers, model="lognormal", paradigm=paradigm, stop={"updates": 60}, cluster=more)
    trace = simulate(job, tmp_path / "trace.h5")
    assert failed(trace) == []
    assert trace.finished
    assert trace.tables["updates"]["version"][-1] == 60
    assert len(trace.tables["membership"]) == workers


def test_the_audit_would_see_another_paradigm(tmp_path):
    job = timing_job(workers=3, seconds=[1.0, 1.0, 3.0], paradigm={"name": "asp"}, stop={"updates": 60})
    trace = simulate(job, tmp_path / "trace.h5")
    trace.attributes["job"] = timing_job(workers=3, paradigm={"name": "ssp", "staleness": 1}).to_toml()
    assert failed(trace) != []


def test_a_worker_leaves_and_the_others_continue(tmp_path):
    job = timing_job(workers=2, paradigm={"name": "bsp"}, stop={"updates": 20}, cluster=EVENTS)
    trace = simulate(job, tmp_path / "trace.h5")
    contributions = trace.tables["updates"]["n_contributions"].tolist()
    assert contributions == sorted(contributions, reverse=True)
    assert set(contributions) == {2, 1}
    left = trace.tables["membership"]
    assert left["worker"].tolist() == [1, 0]
    assert left["now_s"][0] >= 9.5


@pytest.mark.parametrize("synchronous", [False, True])
def test_several_iterations_a_push(tmp_path, synchronous):
    """A push consists of a whole period's iterations, and device events count each of them."""
    events = [
        {"worker": 0, "at_iteration": 6, "change": "slow", "factor": 3.0},
        {"worker": 0, "at_iteration": 8, "change": "recover"},
        {"worker": 1, "at_iteration": 19, "change": "leave"},
    ]
    paradigm = {"name": "easgd", "period": 4, "synchronous": synchronous}
    trace = simulate(timing_job(paradigm=paradigm, stop={"updates": 12}, cluster={"events": events}), tmp_path / "t.h5")
    assert [check for check in audit(trace) if not check.passed] == []
    pushes, updates = trace.tables["pushes"], trace.tables["updates"]
    assert set(zip(pushes["local_steps"].tolist(), pushes["batch_size"].tolist(), strict=True)) == {(4, 16)}
    mine, others = (pushes[pushes["worker"] == worker] for worker in (0, 1))
    assert mine["compute_s"][:4].tolist() == [4.0, 8.0, 4.0, 4.0]
    assert (mine["end_s"] - mine["begin_s"]).tolist() == mine["compute_s"].tolist()
    assert len(others) == 4, "what it did after its 16th iteration is in no push"
    granted_s = trace.tables["grants"]["now_s"][trace.tables["grants"]["worker"] == 1][3]
    assert trace.tables["membership"]["now_s"][0] == granted_s + 2.0, "after two more"
    assert updates["samples"].tolist() == (16 * np.cumsum(updates["n_contributions"])).tolist()


def test_a_run_ends_when_all_workers_have_left(tmp_path):
    leaving = {"events": [{"worker": w, "at_iteration": 3 + w, "change": "leave"} for w in (0, 1)]}
    job = timing_job(workers=2, paradigm={"name": "asp"}, stop={"updates": 10**6}, cluster=leaving)
    trace = simulate(job, tmp_path / "trace.h5")
    assert trace.finished
    assert np.bincount(trace.tables["pushes"]["worker"]).tolist() == [2, 3]


def test_a_slow_device_slows_its_iterations(tmp_path):
    job = timing_job(workers=2, paradigm={"name": "asp"}, stop={"seconds": 20.0}, cluster=EVENTS)
    pushes = simulate(job, tmp_path / "trace.h5").tables["pushes"]
    compute_s = pushes[pushes["worker"] == 0]["compute_s"]
    assert compute_s[:7].tolist() == [1.0, 1.0, 1.0, 5.0, 5.0, 1.0, 1.0]


class Holding(paradigms.create("asp", 1).__class__):
    """A paradigm that never grants."""

    def _pushed(self, worker):
        self._block(worker)
        return []

    def check(self):
        pass


def test_a_paradigm_that_never_grants_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator, "create_paradigm", lambda job: Holding(2))
    job = timing_job(workers=2)
    workload = build(job)
    with pytest.raises(RuntimeError, match=r"workers \[0, 1\] are blocked forever"):
        ServerSimulation(job, workload, cluster.build(job, workload), Nothing()).run()


# ---- determinism ----


def tables(trace) -> list[bytes]:
    return [trace.tables[name].tobytes() for name in TABLES]


@pytest.mark.parametrize("paradigm", PARADIGMS, ids=str)
def test_the_same_job_gives_the_same_bytes(tmp_path, paradigm):
    def run(name, seed=1):
        job = make_job(
            workload=LINEAR,
            evaluation={"every_samples": 40},
            stop={"updates": 60},
            paradigm=paradigm,
            cluster={"workers": 3, "compute": {"model": "exponential", "seconds": 1.0}, **NETWORK},
            seed=seed,
        )
        return tables(simulate(job, tmp_path / name))

    first = run("a")
    assert first == run("b")
    assert first != run("c", seed=2)


def test_pushes_of_equal_workers_arrive_in_worker_order(tmp_path):
    job = timing_job(workers=5, paradigm={"name": "asp"}, stop={"updates": 50})
    assert simulate(job, tmp_path / "trace.h5").tables["pushes"]["worker"][:50].tolist() == list(range(5)) * 10


# ---- arithmetic ----


def final_weights(job, path) -> torch.Tensor:
    workload = build(job)
    simulate(job, path, workload)
    return next(workload.model.parameters()).detach().flatten()


def linear_job(workers, batch_size, paradigm="bsp", **tables):
    return make_job(
        workload={**LINEAR, "batch_size": batch_size, "samples": 96},
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
        stop={"updates": 24},
        paradigm={"name": paradigm},
        cluster={"workers": workers, "compute": {"model": "exponential", "seconds": 1.0}, **tables.pop("cluster", {})},
        **tables,
    )


def torch_alone(job) -> torch.Tensor:
    workload = build(job)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1, momentum=0.9)
    data = batches(workload.train, job.seed, 0, n_workers=1, batch_size=job.workload.batch_size, epochs=range(999))
    for _, batch in zip(range(24), data, strict=False):
        optimizer.zero_grad()
        workload.loss(workload.model, *batch).backward()
        optimizer.step()
    return next(workload.model.parameters()).detach().flatten()


@pytest.mark.parametrize(("workers", "batch_size"), [(1, 12), (2, 6), (3, 4), (4, 3)])
def test_simulated_bsp_is_one_process_with_the_whole_batch(tmp_path, workers, batch_size):
    alone = torch_alone(linear_job(1, 12))
    weights = final_weights(linear_job(workers, batch_size), tmp_path / "bsp.h5")
    assert float((weights - alone).abs().max()) < 1e-12
    if workers > 1:
        stale = final_weights(linear_job(workers, batch_size, "asp"), tmp_path / "asp.h5")
        assert not float((stale - alone).abs().max()) < 1e-12


def test_evaluations_are_of_the_moment_and_end_the_run(tmp_path):
    job = make_job(
        workload={**LINEAR, "noise": 0.0},
        evaluation={"every_samples": 16},
        stop={"target_loss": 1e-3, "updates": 10_000},
        cluster={"workers": 2, "compute": {"model": "constant", "seconds": 1.0}},
    )
    trace = simulate(job, tmp_path / "trace.h5")
    evaluations = trace.tables["evaluations"]
    assert evaluations["now_s"].tolist() == trace.tables["updates"]["now_s"][evaluations["version"] - 1].tolist()
    assert np.flatnonzero(evaluations["loss"] <= 1e-3)[0] == len(evaluations) - 2  # the last is the final one
    assert trace.tables["updates"]["version"][-1] == evaluations["version"][-1]


@pytest.mark.parametrize("seconds", [None, 6.0])
def test_a_target_stops_blocked_workers_when_its_evaluation_ends(tmp_path, seconds):
    """Worker 0 is blocked since 1 s after the update that reaches the target; the control is an evaluation at once."""
    job = make_job(
        workload=LINEAR,
        optimizer={"name": "sgd", "lr": 0.3},
        stop={"updates": 1000, "target_loss": 0.05},
        evaluation={"every_samples": 8} | ({} if seconds is None else {"seconds": seconds}),
        cluster={"workers": 2, "compute": {"model": "constant", "seconds": [1.0, 10.0]}},
    )
    trace = simulate(job, tmp_path / "trace.h5")
    grants, reached_s = trace.tables["grants"], trace.tables["updates"]["now_s"][-1]
    own = grants[(grants["local_steps"] == 0) & (grants["worker"] == 0)]
    assert own[["now_s", "held_s"]].tolist() == [(reached_s + 1.0, 0.0) if seconds is None else (reached_s + 6.0, 5.0)]
    assert failed(trace) == []


def test_the_number_of_servers_changes_no_result(tmp_path):
    one, three = (
        final_weights(linear_job(3, 4, "asp", cluster={"servers": servers}), tmp_path / f"{servers}.h5")
        for servers in (1, 3)
    )
    assert torch.equal(one, three)


def test_an_update_that_a_departure_completes_is_evaluated_then(tmp_path):
    job = make_job(
        workload=LINEAR,
        evaluation={"every_samples": 1},
        stop={"updates": 4},
        cluster={
            "workers": 2,
            "compute": {"model": "constant", "seconds": [1.0, 3.5]},
            "events": [{"worker": 1, "at_iteration": 2, "change": "leave"}],
            **NETWORK,
        },
    )
    trace = simulate(job, tmp_path / "trace.h5")
    updates, evaluations = trace.tables["updates"], trace.tables["evaluations"]
    assert 1 in updates["n_contributions"].tolist()
    assert evaluations["version"].tolist() == [1, 2, 3, 4]
    assert evaluations["now_s"].tolist() == updates["now_s"][evaluations["version"] - 1].tolist()


def peak_bytes(updates: int) -> int:
    """Return the memory of a simulation of 80 workers, by tracemalloc."""
    job = timing_job(workers=80, model="lognormal", paradigm=PARADIGMS[3], stop={"updates": updates}, cluster=NETWORK)
    workload = build(job)
    simulation = ServerSimulation(job, workload, cluster.build(job, workload), Nothing())
    tracemalloc.start()
    try:
        simulation.run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_by_workers_not_by_events():
    short, long = peak_bytes(800), peak_bytes(3200)
    assert long < 1.3 * short


def test_a_trace_that_keeps_its_rows_is_detected(monkeypatch):
    rows = []
    short = peak_bytes(800)
    monkeypatch.setattr(Nothing, "append", lambda self, table, row: rows.append(row))
    assert not peak_bytes(3200) < 1.3 * short


UPDATES = {"update_gbytes_per_s": 1e-3}  # 4 kB, the model, take 4 ms


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_adds_up_the_contributions_before_it_grants(tmp_path, workers, servers):
    """Each server its shard of all workers' contributions; the control is that updates take no time."""
    job = timing_job(
        workers=workers, paradigm={"name": "bsp"}, stop={"updates": 5}, cluster=UPDATES | {"servers": servers}
    )
    trace = simulate(job, tmp_path / "trace.h5")
    update_s = workers * 4e-3 / servers
    assert trace.tables["updates"]["now_s"] == pytest.approx(1.0 + np.arange(5) * (1.0 + update_s), rel=1e-9)
    waited_s = trace.tables["pushes"]["wait_s"]
    assert waited_s[trace.tables["pushes"]["iteration"] > 1] == pytest.approx(update_s)
    assert failed(trace) == []


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_grant_that_precedes_an_update_is_sent_after_it(tmp_path, workers, monkeypatch):
    """As on real servers under EASGD: workers read the centre as it was before their update, but only once it is made.

    The control begins these transfers at once.
    """
    job = timing_job(
        workers=workers,
        paradigm={"name": "easgd", "period": 1, "synchronous": True},
        stop={"updates": 5},
        cluster=UPDATES,
    )

    def made_s(path):
        trace = simulate(job, path)
        assert failed(trace) == []
        return trace.tables["updates"]["now_s"]

    assert made_s(tmp_path / "trace.h5") == pytest.approx(1.0 + np.arange(5) * (1.0 + workers * 4e-3), rel=1e-9)
    monkeypatch.setattr(ServerSimulation, "_once_updated", lambda self, transfer: transfer())
    assert made_s(tmp_path / "control.h5") == pytest.approx(1.0 + np.arange(5), rel=1e-9)


def test_a_cancelled_gradient_has_no_problem(tmp_path):
    """As on real ranks: nothing of it is used. The control is a gradient that is pushed."""
    job = make_job(
        workload={**LINEAR, "batch_size": 16},
        optimizer={"name": "sgd", "lr": 1e200},
        paradigm={"name": "k-sync", "k": 1, "cancel": "abort"},
        cluster={"workers": 2, "compute": {"model": "constant", "seconds": [1.0, 1.5]}},
    )
    pushes = simulate(job, tmp_path / "trace.h5").tables["pushes"]
    lost = pushes[~np.isfinite(pushes["loss"])]
    problems = {int(worker): set(lost[lost["worker"] == worker]["problem"].tolist()) for worker in (0, 1)}
    assert problems == {0: {Problem.LOSS_NOT_FINITE}, 1: {Problem.NONE}}
    assert (lost[lost["worker"] == 1]["share"] < 1.0).all()


@pytest.mark.parametrize("paradigm", PARADIGMS, ids=str)
def test_a_busy_server_handles_one_push_after_the_other(tmp_path, paradigm):
    """Iterations take a tenth of what the server needs for the pushes of all workers."""
    job = timing_job(workers=5, seconds=2e-3, paradigm=paradigm, stop={"updates": 60}, cluster=UPDATES)
    trace = simulate(job, tmp_path / "trace.h5")
    handled_s = np.unique(trace.tables["pushes"]["now_s"])
    n_contributions = trace.tables["updates"]["n_contributions"]
    assert float(handled_s[-1]) >= 4e-3 * (n_contributions.sum() - n_contributions[-1])
    assert failed(trace) == []
    if paradigm["name"] == "asp":
        assert np.diff(handled_s[5:]) == pytest.approx(4e-3)
