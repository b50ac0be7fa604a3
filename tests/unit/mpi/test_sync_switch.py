"""Sync-Switch on ranks: BSP's bits up to the switch, and a run that a checkpoint interrupts on either side of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hpcsync
from hpcsync.config.job import Job
from hpcsync.trace.reader import load
from tests.mpi.training import failures, on_some, simulated
from tests.unit.jobs import make_job
from tests.unit.mpi.test_checkpoints import killed
from tests.unit.simulator.test_sync_switch import recomputed

BATCH, UPDATES_EACH = 4, 12


def job(workers: int, share: float, servers: int = 1, every: int = 5) -> Job:
    return make_job(
        seed=3,
        workload={"name": "linear", "batch_size": BATCH, "features": 11, "samples": 200, "noise": 1.0},
        optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9},
        stop={"samples": UPDATES_EACH * workers * BATCH},
        evaluation={"every_samples": 30},
        checkpoint={"updates": every, "keep": 9},
        paradigm={"name": "sync-switch", "share": share, "momentum": 0.5},
        cluster={
            "servers": servers,
            "workers": workers,
            "compute": {"model": "lognormal", "seconds": [0.002 * (1 + (w == 1)) for w in range(workers)]},
        },
    )


@pytest.mark.parametrize("n_checkpoints", [0, 1, 2])
def test_the_weights_follow_from_the_trace_with_and_without_an_interruption(comm, needs, folder, n_checkpoints):
    """The switch is after 8 rounds: the first checkpoint, at update 5, is before it and the others are after it."""
    needs(2)
    servers = 2 if comm.size > 3 else 1
    this = job(comm.size - servers, 2 / 3, servers)
    weights: Any = on_some(comm, this, folder)
    path = folder
    if n_checkpoints:
        path = killed(comm, folder, n_checkpoints)
        weights = on_some(comm, this, path, resume=True)
    if comm.rank == 0:
        trace = load(path / "trace.h5")
        assert failures(trace) == []
        rows = trace.tables["decisions"]
        assert rows["controller"].tolist() == [b"switch"]
        assert rows["chosen"][0] == 8 * this.cluster.workers * BATCH
        np.testing.assert_allclose(weights, recomputed(this, trace, 8, 0.5), rtol=0, atol=1e-12)
        assert np.abs(weights - recomputed(this, trace, 8, 0.9)).max() > 1e-9, "the momentum of before"


def test_without_a_switch_it_has_the_bits_of_its_simulation(comm, needs, folder):
    needs(2)
    this = job(comm.size - 1, 1.0)
    weights = on_some(comm, this, folder)
    if comm.rank == 0:
        assert np.array_equal(weights, simulated(this))
        assert not np.array_equal(weights, simulated(job(comm.size - 1, 0.5)))


@pytest.mark.parametrize("given", [{}, {"async_lr_scale": 1.0}])
def test_the_rate_of_a_script_follows_the_samples_of_an_update(comm, only, folder, given):
    """It does by default, as in a job; the control gives 1.0."""
    only(3)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(torch.ones(3), torch.ones(1))] * 64
    settings = {"share": 0.5, "stop": {"samples": 64}, "out": folder, "comm": comm, **given}
    with hpcsync.connect(model, optimizer, "sync-switch", **settings) as sync:
        for x, y in sync.shard(data, BATCH, epochs=None):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            sync.step(loss)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert failures(trace) == []
        assert set(trace.tables["updates"]["lr"]) == ({0.1} if given else {0.1, 0.05})
