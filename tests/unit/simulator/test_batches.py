"""Allocated batches in virtual time: sizes, samples and weights."""

import itertools
import math

import numpy as np
import pytest
import torch

from hpcsync.config.errors import JobError
from hpcsync.core import coordinator
from hpcsync.core.assignments import create_assignments
from hpcsync.planning.batch_allocation import Allocator
from hpcsync.simulator import gradients
from hpcsync.trace.schema import Outcome
from hpcsync.training.sampler import sequence_indices
from hpcsync.workloads.registry import build
from tests.plain import on_samples, whole_batches
from tests.unit.jobs import LINEAR, make_job
from tests.unit.simulator.running import failed, simulate, timing_job

PARADIGMS = [
    {"name": "bsp"},
    {"name": "asp"},
    {"name": "ssp", "staleness": 2},
    {"name": "dssp", "staleness_min": 1, "staleness_max": 5},
    {"name": "k-sync", "k": 2},
    {"name": "k-batch-async", "k": 2},
    {"name": "easgd", "period": 3},
]
POLICIES = ["proportional", "equal-finish"]


def run(path, batches, *, paradigm=None, seconds=(1.0, 3.0), updates=120, batch_size=32, model="constant", **compute):
    cluster = compute.pop("cluster", {})
    job = timing_job(
        workers=len(seconds),
        workload={"name": "timing", "batch_size": batch_size, "parameters": 10},
        paradigm=paradigm or {"name": "bsp"},
        stop={"updates": updates},
        batches={"predictor": "smoothing", **batches},
        cluster={"compute": {"model": model, "seconds": list(seconds), **compute}, **cluster},
    )
    trace = simulate(job, path)
    assert failed(trace) == []
    return trace


def sizes(trace) -> np.ndarray:
    """Return the sizes of each new allocation, shape (n_allocations, n_workers), if no worker leaves."""
    rows = trace.tables["decisions"]
    chosen = rows[rows["controller"] == b"batches"]["chosen"].reshape(-1, trace.n_workers)
    assert (chosen.sum(1) == trace.job.batch_total).all()
    return chosen


def last_batches(trace) -> list[int]:
    """Return each worker's batch size in its last push."""
    pushes = trace.tables["pushes"]
    rows = [pushes[pushes["worker"] == worker][-1] for worker in range(trace.n_workers)]
    return [int(row["batch_size"] // row["local_steps"]) for row in rows]


def round_s(trace) -> float:
    """Return the batch sizes in the last update."""
    return float(np.diff(trace.tables["updates"]["now_s"])[-1])


def waited(trace) -> float:
    """Return the share of waiting in the time of the last quarter of all pushes."""
    rows = trace.tables["pushes"][-len(trace.tables["pushes"]) // 4 :]
    return float(rows["wait_s"].sum() / (rows["wait_s"] + rows["compute_s"]).sum())


# ---- sizes ----


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("paradigm", PARADIGMS, ids=str)
def test_sizes_end_at_the_shares_of_speed(tmp_path, paradigm, policy):
    trace = run(tmp_path / "t.h5", {"policy": policy}, paradigm=paradigm)
    assert last_batches(trace) == [48, 16]
    assert sizes(trace)[-1].tolist() == [48, 16]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_round_of_bsp_is_spent_computing(tmp_path, policy):
    trace = run(tmp_path / "t.h5", {"policy": policy})
    assert waited(trace) < 1e-9
    assert round_s(trace) == pytest.approx(1.5)
    equal = run(tmp_path / "equal.h5", {"policy": "equal"})
    assert waited(equal) == pytest.approx(2 / 6)
    assert round_s(equal) == pytest.approx(3.0)


def test_equal_finish_counts_in_what_does_not_depend_on_the_batch(tmp_path):
    """With half of the time of 32 samples fixed, b samples take 1, 1.5 and 2 times 0.5 + b / 64 s.

    Proportional sizes approach this only step by step: a speed in samples/s holds for the measured batch.
    """
    traces = {
        policy: run(
            tmp_path / f"{policy}.h5", {"policy": policy}, seconds=(1.0, 1.5, 2.0), updates=400, fixed_share=0.5
        )
        for policy in POLICIES
    }
    assert len(sizes(traces["equal-finish"])) == 2, "the first changes sizes, and shows what is fixed"
    assert last_batches(traces["equal-finish"]) == [57, 27, 12]
    assert round_s(traces["equal-finish"]) == pytest.approx(0.5 + 57 / 64)
    assert len(sizes(traces["proportional"])) > 2
    assert round_s(traces["proportional"]) > 1.03 * round_s(traces["equal-finish"])
    took_s = {policy: trace.tables["updates"]["now_s"][100] for policy, trace in traces.items()}
    assert took_s["equal-finish"] < 0.97 * took_s["proportional"]


def test_a_worker_that_is_slowed_gets_less_until_it_recovers(tmp_path):
    events = [
        {"worker": 1, "at_iteration": 101, "change": "slow", "factor": 3.0},
        {"worker": 1, "at_iteration": 201, "change": "recover"},
    ]
    trace = run(
        tmp_path / "t.h5", {"policy": "proportional"}, seconds=(1.0, 1.0, 1.0), updates=300, cluster={"events": events}
    )
    mine = trace.tables["pushes"][trace.tables["pushes"]["worker"] == 1]["batch_size"]
    even, slow, again = mine[:100], mine[100:200], mine[200:300]
    assert set(even.tolist()) == {32}
    assert slow[40] == pytest.approx(96 / 7, abs=2)  # within four intervals of 10 iterations; speeds are 3 : 1 : 3
    assert again[40] == pytest.approx(32, abs=2)
    assert waited(trace) < 0.03


def test_a_memory_limit_holds(tmp_path):
    trace = run(tmp_path / "t.h5", {"policy": "proportional", "maximum": [40, 60]})
    assert trace.tables["pushes"]["batch_size"].max() == 40
    assert last_batches(trace) == [40, 24]
    least = run(tmp_path / "least.h5", {"policy": "proportional", "minimum": 20})
    assert last_batches(least) == [44, 20]


def test_samples_of_a_leaving_worker_go_to_the_others(tmp_path):
    events = [{"worker": 1, "at_iteration": 30, "change": "leave"}]
    trace = run(
        tmp_path / "t.h5", {"policy": "equal-finish"}, seconds=(1.0, 3.0, 1.0), updates=90, cluster={"events": events}
    )
    pushes = trace.tables["pushes"]
    assert [int(pushes[pushes["worker"] == worker]["batch_size"][-1]) for worker in (0, 2)] == [48, 48]


# ---- samples ----


def first_work(job) -> list[tuple[int, int]]:
    """Return (first_sample, batch_size) of each worker's first push."""
    return [(one.first_sample, one.batch_size) for one in create_assignments(job).first]


def allocated(trace) -> list[tuple[int, int]]:
    """Return (first, end) of the samples of each granted push, including the first iterations."""
    grants = trace.tables["grants"]
    given = [(int(row["first_sample"]), int(row["batch_size"])) for row in grants if row["local_steps"]]
    return sorted((first, first + n) for first, n in [*first_work(trace.job), *given])


def complete(pieces: list[tuple[int, int]]) -> bool:
    """Return True if they are one sequence from 0 on, without gaps and overlaps."""
    ends = [0, *(end for _, end in pieces)]
    return all(end > first == before for (first, end), before in zip(pieces, ends, strict=False))


def careless(self, worker, local_steps=1):
    """Allocate as `Allocator` does, but advance the position only by the mean."""
    first_sample, n_samples = self._cursor, self.sizes[worker] * local_steps
    self._cursor += self.total // len(self.sizes) * local_steps
    return first_sample, n_samples


@pytest.mark.parametrize("paradigm", PARADIGMS, ids=str)
def test_samples_are_allocated_once(tmp_path, paradigm, monkeypatch):
    trace = run(tmp_path / "t.h5", {"policy": "proportional"}, paradigm=paradigm)
    assert complete(allocated(trace))
    monkeypatch.setattr(Allocator, "allocate_next", careless)
    trace = simulate(trace.job, tmp_path / "careless.h5")
    assert not complete(allocated(trace))
    assert failed(trace) != []


def linear_job(*, workers=3, paradigm=None, batch_size=12, **tables):
    return make_job(
        workload={**LINEAR, "batch_size": batch_size, "samples": 90},
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
        stop={"updates": 40},
        paradigm=paradigm or {"name": "bsp"},
        batches={"policy": "proportional", "predictor": "last", "interval": 2},
        cluster={"workers": workers, "compute": {"model": "lognormal", "seconds": [1.0, 2.0, 4.0][:workers]}},
        **tables,
    )


@pytest.mark.parametrize("paradigm", PARADIGMS, ids=str)
def test_samples_are_computed_once(tmp_path, paradigm, monkeypatch):
    """Every sample of a training epoch, except those allocated and not pushed at the end of the run."""
    used = []

    def noted(seed, first, n_samples, *, size):
        used.append((first, first + n_samples))
        return sequence_indices(seed, first, n_samples, size=size)

    monkeypatch.setattr(gradients, "sequence_indices", noted)
    trace = simulate(linear_job(paradigm=paradigm), tmp_path / "t.h5")
    assert failed(trace) == []
    pushes = trace.tables["pushes"]
    assert sum(end - first for first, end in used) == pushes["batch_size"].sum()
    granted = allocated(trace)
    assert complete(granted)
    seen = sorted(used)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(seen))
    pieces = {n for first, end in granted for n in range(first, end)}
    assert {n for first, end in seen for n in range(first, end)} <= pieces
    assert len(pieces) - pushes["batch_size"].sum() <= 0.5 * len(pieces)


# ---- weights ----


def final_weights(job, path) -> torch.Tensor:
    workload = build(job)
    trace = simulate(job, path, workload)
    assert len(set(trace.tables["pushes"]["batch_size"].tolist())) > 2, "batches are unequal"
    return next(workload.model.parameters()).detach().flatten()


@pytest.mark.parametrize("paradigm", [{"name": "bsp"}, {"name": "k-sync", "k": 3}], ids=str)
@pytest.mark.parametrize("workers", [2, 3])
def test_unequal_batches_are_one_process_with_the_whole_batch(tmp_path, workers, paradigm, monkeypatch):
    if "k" in paradigm:
        paradigm = {**paradigm, "k": workers}
    job = linear_job(workers=workers, paradigm=paradigm)
    whole = torch.from_numpy(on_samples(job, whole_batches(job, job.stop.updates)))
    assert float((final_weights(job, tmp_path / "t.h5") - whole).abs().max()) < 1e-12
    monkeypatch.setattr(coordinator.Coordinator, "_weigh", lambda self, worker, weight: weight)
    assert not float((final_weights(job, tmp_path / "unweighted.h5") - whole).abs().max()) < 1e-6


def test_a_contribution_alone_counts_as_its_batch_is_larger_than_the_mean(tmp_path):
    """Its weight is b P / total, in an update of its own."""
    pushes = run(tmp_path / "t.h5", {"policy": "proportional"}, paradigm={"name": "asp"}).tables["pushes"]
    applied = pushes[pushes["outcome"] == Outcome.APPLIED]
    assert applied["weight"].tolist() == (applied["batch_size"] * 2 / 64).tolist()
    assert set(applied["weight"].tolist()) == {1.0, 1.5, 0.5}


def test_elastic_averaging_computes_its_local_steps_on_samples_in_a_row(tmp_path, monkeypatch):
    used = []

    def noted(seed, first, n_samples, *, size):
        used.append((first, n_samples))
        return sequence_indices(seed, first, n_samples, size=size)

    monkeypatch.setattr(gradients, "sequence_indices", noted)
    trace = simulate(linear_job(paradigm={"name": "easgd", "period": 3}), tmp_path / "t.h5")
    starts = dict(first_work(trace.job)) | {
        int(row["first_sample"]): int(row["batch_size"]) for row in trace.tables["grants"] if row["local_steps"]
    }
    assert used[0] == (0, 12), "the first iterations are of batches too"
    for step in range(0, len(used), 3):
        (first, n), second, third = used[step : step + 3]
        assert starts[first] == 3 * n
        assert (second, third) == ((first + n, n), (first + 2 * n, n))


@pytest.mark.parametrize("predictor", ["last", "smoothing", "gru", "blend"])
def test_every_predictor_finds_the_speeds(tmp_path, predictor):
    trace = run(tmp_path / "t.h5", {"policy": "proportional", "predictor": predictor}, updates=70)
    assert last_batches(trace) == [48, 16]
    rows = trace.tables["pushes"]
    predicted_s = rows["predicted_fixed_s"] + rows["predicted_sample_s"] * rows["batch_size"]
    for worker, speed in ((0, 32.0), (1, 32.0 / 3)):
        mine = rows["worker"] == worker
        assert predicted_s[mine][-1] == pytest.approx(rows["batch_size"][mine][-1] / speed, rel=0.05)


def test_equal_batches_need_no_predictor(tmp_path):
    trace = run(tmp_path / "t.h5", {"policy": "equal"})
    assert np.isnan(trace.tables["pushes"]["predicted_sample_s"]).all()
    assert len(trace.tables["decisions"]) == 0
    assert math.isnan(trace.tables["pushes"]["predicted_fixed_s"][0])
    assert set(trace.tables["grants"]["first_sample"].tolist()) == {-1}


@pytest.mark.parametrize("cluster", [{}, {"network": {"bandwidth_gbit": 10}}], ids=["", "network"])
@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_a_worker_that_computes_in_no_time_has_no_speed_to_allocate_by(paradigm, cluster, tmp_path):
    """Its estimate would never be known, and all batches would stay equal."""
    without = {"servers": 0} if paradigm == "allreduce" else {}
    settings = {"paradigm": {"name": paradigm}, "cluster": {**cluster, **without}}
    run(tmp_path / "control.h5", {"policy": "equal-finish"}, seconds=(0.01, 1.0), **settings)
    with pytest.raises(JobError, match='batches.policy = "equal-finish": must be "equal" where iterations take 0 sec'):
        run(tmp_path / "run.h5", {"policy": "equal-finish"}, seconds=(0.0, 1.0), **settings)
