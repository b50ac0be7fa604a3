"""Workers that commit the change of their own steps."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

import hpcsync
from hpcsync.config.job import Job
from hpcsync.core.job_validation import check
from hpcsync.mpi.server.leader import Leader
from hpcsync.trace.reader import load
from hpcsync.trace.schema import Outcome
from hpcsync.training.sampler import batch_indices
from tests.mpi.training import failures, on_some
from tests.plain import committed
from tests.unit.jobs import make_job

SGD = {"name": "sgd", "lr": 0.05}
NESTEROV = {"name": "sgd", "lr": 0.02, "momentum": 0.9, "nesterov": True}
ADAM = {"name": "adam", "lr": 0.01}
ASHL = {"name": "ashl", "warmup": 1, "profiled": 4, "steps_coarse": 3, "steps_fine": 2, "loss_preset": 1.5}
AFTER_GATE = {**ASHL, "staleness": 0, "commit": "after-gate"}
ADSP = {"name": "adsp", "check_period_s": 0.03, "interval_min_s": 0.005, "commits": 3}
DILOCO = {"name": "async-diloco", "steps": 6, "quorum": 1, "grace_s": 0.004}


def job(
    workers: int,
    paradigm: Any,
    optimizer: Any = SGD,
    updates: int = 24,
    servers: int = 1,
    compression: Any = None,
    seconds: float = 0.001,
) -> Job:
    return make_job(
        seed=3,
        workload={"name": "linear", "batch_size": 4, "features": 11, "samples": 200},
        optimizer=optimizer,
        stop={"updates": updates},
        evaluation={"every_samples": 0},
        paradigm=paradigm,
        cluster={
            "servers": servers,
            "workers": workers,
            "compute": {"model": "constant", "seconds": [seconds * (1 + 2 * (w == 1)) for w in range(workers)]},
        },
        **({} if compression is None else {"compression": compression}),
    )


@pytest.mark.parametrize("optimizer", [SGD, NESTEROV, ADAM], ids=["sgd", "nesterov", "adam"])
@pytest.mark.parametrize("paradigm", [ASHL, AFTER_GATE, ADSP, DILOCO], ids=["ashl", "gate", "adsp", "async-diloco"])
def test_the_weights_are_those_of_the_commits_in_the_trace(comm, needs, folder, paradigm, optimizer):
    """Plain torch obtains the same from the commits, in the order of their versions. Another weight is the control."""
    needs(2)
    servers = 2 if comm.size > 3 else 1
    this = job(comm.size - servers, paradigm, optimizer, servers=servers)
    weights = on_some(comm, this, folder)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert failures(folder / "trace.h5") == []
        expected = committed(this, trace)
        assert np.allclose(weights, expected, rtol=1e-9, atol=1e-12)
        trace.tables["pushes"]["weight"] *= 0.99
        assert not np.allclose(weights, committed(this, trace), rtol=1e-6, atol=1e-9)


def test_one_committing_worker_is_plain_training(comm, needs, folder):
    """Its commits count 1, and no other worker changes the weights it reads."""
    needs(2)
    some = on_some(comm, job(1, ADSP, ADAM, updates=6), folder)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        n_steps = int(trace.tables["pushes"]["local_steps"][:6].sum())
        workload = check(job(1, ADSP, ADAM))
        optimizer = torch.optim.Adam(workload.model.parameters(), lr=0.01)
        for step in range(n_steps):
            rows = torch.from_numpy(batch_indices(3, step, batch_size=4, size=200))
            optimizer.zero_grad()
            workload.loss(workload.model, *(tensor[rows] for tensor in workload.train.tensors)).backward()
            optimizer.step()
        alone = torch.cat([p.detach().flatten() for p in workload.model.parameters()]).numpy()
        assert np.allclose(some, alone, rtol=1e-9, atol=1e-12)


def test_an_evaluation_begins_the_fine_stage(comm, needs, folder):
    needs(3)
    paradigm = {**ASHL, "loss": "evaluation"}
    given = job(comm.size - 1, ASHL, updates=150, seconds=0.008)
    table = {**given.model_dump(exclude_none=True), "paradigm": paradigm, "evaluation": {"every_samples": 40}}
    on_some(comm, Job.from_table(table), folder)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert failures(folder / "trace.h5") == []
        rows = trace.tables["decisions"]
        assert rows["chosen"][rows["controller"] == b"stage"].tolist() == [1.0, 2.0]
        at = int(np.flatnonzero(rows["controller"] == b"stage")[1])
        assert rows["controller"][at - 1] == b"evaluated"
        assert rows["loss"][at] == rows["chosen"][at - 1] <= 1.5


@pytest.mark.parametrize("every_samples", [0, 40])
def test_a_search_evaluates_the_model(comm, needs, folder, every_samples):
    needs(3)
    paradigm = {"name": "adsp", "check_period_s": 0.06, "interval_min_s": 0.01, "loss": "evaluation"}
    given = job(comm.size - 1, ADSP, updates=30 * (comm.size - 1), seconds=0.004)
    table = given.model_dump(exclude_none=True) | {"paradigm": paradigm, "evaluation": {"every_samples": every_samples}}
    on_some(comm, Job.from_table(table), folder)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert failures(folder / "trace.h5") == []
        rows, evaluations = trace.tables["decisions"], trace.tables["evaluations"]
        rewards = rows[rows["controller"] == b"reward"]
        assert rewards["chosen"][0] == 1.0
        losses = np.array([rewards[name] for name in ("loss_start", "loss_middle", "loss_end")])
        assert np.isfinite(losses[0, 0]) and np.isin(losses[np.isfinite(losses)], evaluations["loss"]).all()
        assert (rows["controller"] == b"commits").sum() >= 1


@pytest.mark.once
def test_a_search_evaluates_the_initial_model_also_where_server_0_begins_late(comm, only, folder, monkeypatch):
    """Pushes wait by then; the audit verifies that the evaluation is of version 0."""
    only(3)
    serve = Leader.serve

    def late(self: Leader) -> None:
        time.sleep(0.3)
        serve(self)

    paradigm = {"name": "adsp", "check_period_s": 0.06, "interval_min_s": 0.01, "loss": "evaluation"}
    monkeypatch.setattr(Leader, "serve", late)
    on_some(comm, job(2, paradigm), folder)
    if comm.rank == 0:
        assert load(folder / "trace.h5").tables["evaluations"]["version"][0] == 0
        assert not failures(folder / "trace.h5")


@pytest.mark.flaky(reruns=3)  # a pause of the process makes a fast worker slow
def test_stages_are_in_order_and_fast_workers_make_more_steps(comm, needs, folder):
    needs(3)
    compression = {"name": "top-k"}
    # The loss is below its limit after some 30 updates; which ones depends on the order of arrival.
    on_some(comm, job(comm.size - 1, ASHL, updates=150, compression=compression, seconds=0.008), folder)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert failures(folder / "trace.h5") == []
        decisions = trace.tables["decisions"]
        assert decisions["chosen"][decisions["controller"] == b"stage"].tolist() == [1.0, 2.0]
        steps = decisions[decisions["controller"] == b"local-steps"][: comm.size - 1]
        chosen = dict(zip(steps["worker"].tolist(), steps["chosen"].tolist(), strict=True))
        assert chosen[0] > chosen[1] == 3, "worker 1 is three times as slow"
        dense = trace.tables["grants"]["ratio"][:4]
        assert set(dense.tolist()) <= {1.0, 0.05}


def test_no_worker_commits_before_it_is_due(comm, needs, folder):
    """How soon afterwards is exact only in virtual time: tests/unit/simulator/test_commits.py."""
    needs(2)
    on_some(comm, job(comm.size - 1, ADSP, updates=8 * (comm.size - 1)), folder)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        due_s = {(g["worker"], g["iteration"]): g["now_s"] + g["commit_s"] for g in trace.tables["grants"]}
        pushes = trace.tables["pushes"]
        # What the end of the run cuts short is dropped.
        later = pushes[(pushes["iteration"] > 1) & (pushes["outcome"] == Outcome.APPLIED)]
        assert len(later)
        for push in later:
            assert push["end_s"] >= due_s[push["worker"], push["iteration"]]


@pytest.mark.parametrize("paradigm", ["easgd", "ashl", "adsp", "async-diloco"])
def test_a_script_whose_workers_step_by_themselves(comm, folder, paradigm):
    """This works on one rank too, without servers to commit to."""
    options: dict[str, Any] = {
        "easgd": {"period": 4, "alpha": 0.2},
        "ashl": {"warmup": 1, "profiled": 2, "steps_coarse": 4, "steps_fine": 2, "loss_preset": 1.0},
        "adsp": {"commits": 1},
        "async-diloco": {"steps": 2, "outer_momentum": 0.5},
    }[paradigm]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 6, generator=generator)
    data = torch.utils.data.TensorDataset(x, (x @ torch.arange(6.0)).unsqueeze(1))
    torch.manual_seed(5)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with hpcsync.connect(model, optimizer, paradigm, out=folder / "run", comm=comm, **options) as sync:
        for _ in range(40):
            for features, targets in sync.shard(data, batch_size=16):
                loss = torch.nn.functional.mse_loss(model(features), targets)
                optimizer.zero_grad()
                loss.backward()
                sync.step(loss)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert all(torch.equal(weights, other) for other in comm.allgather(weights))
    assert torch.allclose(model.weight, torch.arange(6.0), atol=0.2), "also if nobody was ever asked to commit"
    if comm.rank == 0 and comm.size > 1:
        assert failures(folder / "run" / "trace.h5") == []
