"""Whole runs: their weights and their traces."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from hpcsync.api import ranks
from hpcsync.cli.rank_main import train
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.core.job_validation import check, optimizer_spec
from hpcsync.paradigms.ssp import SspOptions
from hpcsync.trace.reader import load
from tests.mpi.training import failures, leaving, on_some, one_process

PARADIGMS = {
    "bsp": {},
    "asp": {},
    "ssp": {"staleness": 2},
    "dssp": {"staleness_min": 1, "staleness_max": 4},
    "easgd": {"period": 1},
    "k-sync": {"k": "min"},
    "k-batch-sync": {"k": "loss"},
    "k-async": {"k": "state"},
    "k-batch-async": {"k": "min", "k_start": 1},
}
FIRST_K = ("k-sync", "k-batch-sync", "k-async", "k-batch-async")  # of which test_first_k shows more


def job(paradigm: str, servers: int, workers: int, **tables: dict[str, Any]) -> Job:
    table = {
        "name": "test",
        "seed": 3,
        "workload": {"name": "linear", "batch_size": 8, "features": 11, "samples": 200},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "stop": {"updates": 40},
        "evaluation": {"every_samples": 100},
        "paradigm": {"name": paradigm, **PARADIGMS[paradigm]},
        "cluster": {"servers": servers, "workers": workers},
    }
    return Job.from_table({**table, **tables})


def test_bsp_equals_one_process_with_the_whole_batch_whatever_the_number_of_servers(comm, needs, folder):
    needs(2)
    workers = max(1, comm.size - 3)
    results = []
    for servers in range(1, min(3, comm.size - workers) + 1):
        this = job("bsp", servers, workers)
        for repeat in range(2):
            results.append(on_some(comm, this, folder / f"{servers}-{repeat}"))
    if comm.rank == 0:
        assert all((weights == results[0]).all() for weights in results), "bit for bit"
        np.testing.assert_allclose(results[0], one_process(this, workers), rtol=1e-12)
        assert not np.allclose(results[0], one_process(this, workers + 1), rtol=1e-6)  # the test can tell


@pytest.mark.parametrize("paradigm", ["asp", "ssp", "dssp", "bsp"])
def test_one_worker_is_plain_sgd(comm, needs, folder, paradigm):
    needs(2)
    for servers in range(1, min(3, comm.size - 1) + 1):
        this = job(paradigm, servers, 1)
        weights = on_some(comm, this, folder / str(servers))
        if comm.rank == 0:
            np.testing.assert_allclose(weights, one_process(this, 1), rtol=1e-12)


@pytest.mark.parametrize(
    ("paradigm", "servers"), [(name, n) for name in PARADIGMS for n in (1, 2) if n == 2 or name not in FIRST_K]
)
def test_every_paradigm_keeps_its_bounds(comm, needs, folder, paradigm, servers):
    """The audit recounts staleness, gaps, grants and versions, and replays the pushes through a fresh paradigm."""
    needs(servers + 1)
    workers = comm.size - servers
    seconds = [0.002] * (workers - 1) + [0.004]
    compute = {"model": "lognormal", "seconds": seconds, "jitter": 0.5}
    cluster = {"servers": servers, "workers": workers, "compute": compute}
    this = job(paradigm, servers, workers, cluster=cluster, stop={"updates": 150})
    on_some(comm, this, folder)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert trace.status == "finished"
        assert len(trace.tables["updates"]) >= 150
        assert len(trace.tables["evaluations"]) >= 1
        assert failures(folder / "trace.h5") == []


@pytest.mark.parametrize("servers", [1, 2])
def test_pushes_of_blocked_workers_are_part_of_the_next_update(comm, needs, folder, servers):
    needs(servers + 2)
    workers = comm.size - servers
    compute = {"model": "constant", "seconds": [0.002] * (workers - 1) + [0.006]}
    cluster = {"servers": servers, "workers": workers, "compute": compute}
    for merge in (False, True):
        this = job("ssp", servers, workers, cluster=cluster, stop={"updates": 60})
        this = this.model_copy(update={"paradigm": SspOptions(staleness=1, merge=merge)})
        on_some(comm, this, folder / str(merge))
        if comm.rank == 0:
            most = load(folder / str(merge) / "trace.h5").tables["updates"]["n_contributions"].max()
            assert (most > 1) == merge
            assert failures(folder / str(merge) / "trace.h5") == []


@pytest.mark.parametrize("paradigm", [name for name in PARADIGMS if name not in FIRST_K])
def test_workers_may_finish_early(comm, needs, folder, paradigm):
    """Worker w makes 10 + 15 w iterations; no worker waits for one that has left, and all end with the same weights."""
    needs(2)
    this = job(paradigm, 1, comm.size - 1, stop={"updates": 10**6})
    workload = check(this)
    with ranks.join(comm, this, workload.model, optimizer_spec(this), workload.evaluate, folder) as sync:
        left = 0 if sync.worker is None else 10 + 15 * sync.worker
        leaving(sync, this, workload, left)
    weights = comm.allgather(sync.flat.weights.numpy())
    assert all((other == weights[0]).all() for other in weights)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        counts = np.bincount(trace.tables["pushes"]["worker"], minlength=comm.size - 1)
        assert counts.tolist() == [10 + 15 * worker for worker in range(comm.size - 1)]
        assert len(trace.tables["membership"]) == comm.size - 1
        assert failures(folder / "trace.h5") == []


def test_evaluation_delays_no_worker(comm, needs, folder):
    """The evaluation waits for ten further updates: if it delayed training, these would never happen."""
    needs(2)
    this = job("asp", 1, comm.size - 1, stop={"updates": 400}, evaluation={"every_samples": 80})
    seen: list[tuple[int, int]] = []

    def evaluate(model: torch.nn.Module) -> tuple[float, float]:
        coordinator = sync._recorder.coordinator
        before = coordinator.version
        while coordinator.version < before + 10 and coordinator.active:
            time.sleep(1e-3)
        seen.append((before, coordinator.version))
        return 0.0, 0.0

    workload = check(this)
    with ranks.join(comm, this, workload.model, optimizer_spec(this), evaluate, folder) as sync:
        for x, y in sync.shard(workload.train, batch_size=8, epochs=None):
            sync.flat.zero_gradient()
            loss = workload.loss(workload.model, x, y)
            loss.backward()
            sync.step(loss)
    if comm.rank == 0:
        during = [after - before for before, after in seen if after < 400]
        assert during and min(during) >= 10


def test_a_target_ends_the_run(comm, needs, folder):
    needs(2)
    optimizer = {"name": "sgd", "lr": 0.02}
    stop = {"target_loss": 0.05}
    this = job("asp", 1, comm.size - 1, stop=stop, evaluation={"every_samples": 40}, optimizer=optimizer)
    on_some(comm, this, folder)
    if comm.rank == 0:
        evaluations = load(folder / "trace.h5").tables["evaluations"]
        assert evaluations["loss"][-1] < 0.1
        assert (evaluations["loss"] <= 0.05).any()


def test_a_job_of_another_size_is_refused_on_every_rank(comm, needs, folder):
    needs(2)
    n = comm.size
    takes = f"cluster.workers = {n}: with cluster.servers = 1 this takes {n + 1} ranks, but there are {n}$"
    this = job("asp", 1, n)
    with pytest.raises(JobError, match=takes):
        train(comm, this, folder / "run")
    assert not (folder / "run").exists()
