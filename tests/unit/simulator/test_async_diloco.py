"""Asynchronous DiLoCo in virtual time: weights against plain torch and local SGD, times of updates, audits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hpcsync.core.job_validation import check
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.sampler import batch_indices
from hpcsync.training.update_rules import Commit, DelayedNesterov, of_job
from hpcsync.workloads.registry import build
from tests.plain import committed
from tests.unit.jobs import LINEAR, make_job
from tests.unit.simulator.running import failed, simulate, timing_job

SGD = {"name": "sgd", "lr": 0.05}
NESTEROV = {"name": "sgd", "lr": 0.02, "momentum": 0.9, "nesterov": True}
ADAM = {"name": "adam", "lr": 0.01}
SECONDS = [1.0, 3.0, 1.5, 1.1, 2.3, 1.0, 4.0, 1.7]


def diloco(**options: Any) -> dict[str, Any]:
    return {"name": "async-diloco", "steps": 6, **options}


def trained(tmp_path: Any, paradigm: dict[str, Any], workers: int, updates: int = 24, optimizer: Any = SGD) -> Any:
    """Return job, trace and weights of a run on least squares in float64."""
    how = {"workload": LINEAR, "optimizer": optimizer, "paradigm": paradigm, "stop": {"updates": updates}}
    job = timing_job(workers=workers, seconds=SECONDS[:workers], **how)
    workload = build(job)
    trace = simulate(job, tmp_path / f"{len(list(tmp_path.iterdir()))}.h5", workload)
    return job, trace, torch.cat([p.detach().flatten() for p in workload.model.parameters()]).numpy()


def test_servers_of_changes_add_them_or_step_along_them():
    spec = OptimizerSpec("sgd", 0.1).on_server
    assert type(of_job(make_job(paradigm={"name": "adsp"}), spec)) is Commit
    assert type(of_job(make_job(paradigm=diloco()), spec)) is DelayedNesterov


@pytest.mark.parametrize(
    ("workers", "options", "optimizer"),
    [
        *((workers, {}, SGD) for workers in (1, 2, 3, 5, 8)),
        *((workers, {"quorum": 2, "grace_s": 1.5}, NESTEROV) for workers in (1, 2, 3, 5, 8)),
        (3, {"momentum_every": 1, "outer_lr": 0.2}, ADAM),
        (3, {"momentum_between": 0.1, "momentum_every": 4}, NESTEROV),
        (3, {"outer_momentum": 0.0}, ADAM),
        (5, {"grace_s": 2.5}, SGD),
        (5, {"quorum": 3, "weigh": "equal", "by_speed": False}, ADAM),
    ],
    ids=str,
)
def test_the_weights_are_those_of_the_published_algorithm(tmp_path, workers, options, optimizer):
    """From the contributions of the trace. Other weights of the contributions are the control."""
    paradigm = diloco(**options)
    if paradigm.get("quorum", 1) > workers:
        paradigm["quorum"] = workers
    job, trace, weights = trained(tmp_path, paradigm, workers, optimizer=optimizer)
    assert failed(trace) == []
    assert np.allclose(weights, committed(job, trace), rtol=1e-9, atol=1e-12)
    trace.tables["pushes"]["weight"] *= 0.99
    assert not np.allclose(weights, committed(job, trace), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("by_speed", [True, False])
def test_one_worker_with_outer_steps_of_1_is_plain_training(tmp_path, by_speed):
    """Half the outer rate is the control."""
    alone = diloco(outer_lr=1.0, outer_momentum=0.0, by_speed=by_speed)
    job, trace, weights = trained(tmp_path, alone, 1, updates=6, optimizer=ADAM)
    assert len(trace.tables["pushes"]) == 6
    workload = check(job)
    optimizer = torch.optim.Adam(workload.model.parameters(), lr=0.01)
    for step in range(int(trace.tables["pushes"]["local_steps"].sum())):
        rows = torch.from_numpy(batch_indices(job.seed, step, batch_size=4, size=len(workload.train)))
        optimizer.zero_grad()
        workload.loss(workload.model, *(tensor[rows] for tensor in workload.train.tensors)).backward()
        optimizer.step()
    plain = torch.cat([p.detach().flatten() for p in workload.model.parameters()]).numpy()
    assert np.allclose(weights, plain, rtol=1e-12, atol=1e-14)
    half = trained(tmp_path, {**alone, "outer_lr": 0.5}, 1, updates=6, optimizer=ADAM)[2]
    assert not np.allclose(half, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_a_quorum_of_all_with_equal_steps_is_diloco(tmp_path, workers):
    """As local SGD makes it without servers, with the same outer steps; without a quorum it is not."""
    outer = {"outer_lr": 0.7, "outer_momentum": 0.9}
    together = diloco(**outer, quorum=workers, by_speed=False, momentum_every=1)
    weights = trained(tmp_path, together, workers, updates=8)[2]
    peers = trained_peers(tmp_path, {"name": "local-sgd", "steps": 6, **outer}, workers, iterations=48)
    assert np.allclose(weights, peers, rtol=1e-11, atol=1e-13)
    alone = trained(tmp_path, {**together, "quorum": 1}, workers, updates=8)[2]
    assert not np.allclose(alone, peers, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_diloco_with_and_without_servers_is_evaluated_alike(tmp_path, workers):
    """After every outer step. The control is local SGD, whose steps lead to the mean."""
    outer, every = {"outer_lr": 0.7, "outer_momentum": 0.9}, {"every_samples": 4 * workers * 6}

    def losses(paradigm: dict[str, Any], **stop: int) -> np.ndarray:
        how = {"workload": LINEAR, "optimizer": SGD, "evaluation": every, "paradigm": paradigm, "stop": stop}
        trace = simulate(timing_job(workers=workers, **how), tmp_path / f"{len(list(tmp_path.iterdir()))}.h5")
        assert failed(trace) == []
        rows = trace.tables["evaluations"]
        assert rows["samples"].tolist() == [n * every["every_samples"] for n in range(1, 9)]
        if paradigm != {"name": "local-sgd", "steps": 6}:
            assert not (rows["consensus_distance"] > 0).any(), "all have the same weights"
        return rows["loss"]

    together = losses(diloco(**outer, quorum=workers, by_speed=False, momentum_every=1), updates=8)
    peers = losses({"name": "local-sgd", "steps": 6, **outer}, samples=8 * every["every_samples"])
    assert peers == pytest.approx(together, rel=1e-11)
    assert losses({"name": "local-sgd", "steps": 6}, samples=8 * every["every_samples"]) != pytest.approx(
        peers, rel=1e-3
    )


def trained_peers(tmp_path: Any, paradigm: dict[str, Any], workers: int, iterations: int) -> np.ndarray:
    how = {"workload": LINEAR, "optimizer": SGD, "paradigm": paradigm, "stop": {"samples": 4 * workers * iterations}}
    job = timing_job(workers=workers, **how)
    workload = build(job)
    simulate(job, tmp_path / "peers.h5", workload)
    return torch.cat([p.detach().flatten() for p in workload.model.parameters()]).numpy()


def test_updates_come_at_the_end_of_the_grace_window(tmp_path):
    """Pushes at 1, 1.5, 3, 3.5, 4.25 and 5 s: with a window of 1 s, updates at 2, 4 and 5.25 s and with no push."""
    paradigm = diloco(steps=1, by_speed=False, grace_s=1.0)
    job = timing_job(workers=3, seconds=[1.0, 1.5, 4.25], paradigm=paradigm, stop={"updates": 3})
    trace = simulate(job, tmp_path / "t.h5")
    assert trace.tables["updates"][["now_s", "n_contributions"]].tolist() == [(2.0, 2), (4.0, 2), (5.25, 2)]
    rows = trace.tables["decisions"]
    assert rows[["now_s", "controller", "chosen"]].tolist() == [(at_s, b"elapsed", at_s) for at_s in (2.0, 4.0, 5.25)]
    assert failed(trace) == []


def test_the_run_may_end_within_a_grace_window(tmp_path):
    """At 2 s, with a contribution that has waited since 1 s and would have waited until 4 s."""
    paradigm = diloco(steps=1, by_speed=False, grace_s=3.0)
    job = timing_job(workers=2, seconds=[1.0, 8.0], paradigm=paradigm, stop={"seconds": 2.0})
    trace = simulate(job, tmp_path / "t.h5")
    assert len(trace.tables["updates"]) == len(trace.tables["decisions"]) == 0
    assert trace.tables["membership"]["now_s"].max() <= 8.0
    assert failed(trace) == []


def test_an_evaluation_is_made_of_an_update_at_the_end_of_a_window(tmp_path):
    how = {"workload": LINEAR, "paradigm": diloco(steps=1, by_speed=False, grace_s=1.0), "stop": {"updates": 3}}
    job = timing_job(workers=3, seconds=[1.0, 1.5, 4.0], evaluation={"every_samples": 8}, **how)
    trace = simulate(job, tmp_path / "t.h5")
    assert trace.tables["evaluations"][["now_s", "version"]].tolist()[:2] == [(2.0, 1), (4.0, 2)]
