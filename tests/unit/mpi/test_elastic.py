"""Elastic averaging: the final positions of workers and centre."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from hpcsync.api import ranks
from hpcsync.audit.trace_audit import audit
from hpcsync.cli.rank_main import train
from hpcsync.config.job import Job
from hpcsync.core.coordinator import UpdateCommand
from hpcsync.core.job_validation import check, optimizer_spec
from hpcsync.core.roles import Roles
from hpcsync.mpi.server.channel import Reader, ServerChannel
from hpcsync.mpi.server.shard import Shard, encode, to
from hpcsync.mpi.transport import messages
from hpcsync.mpi.transport.messages import CommandRecord
from hpcsync.paradigms import easgd
from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.records import Grant
from hpcsync.trace.reader import load
from hpcsync.training.sampler import batches
from hpcsync.training.update_rules import Elastic
from tests.mpi.training import leaving, simulated
from tests.unit.jobs import make_job

SGD = {"name": "sgd", "lr": 0.05}
NESTEROV = {"name": "sgd", "lr": 0.02, "momentum": 0.9, "nesterov": True}
STILL = {"name": "sgd", "lr": 1e-300}  # gradients move nothing


def job(servers: int, workers: int, optimizer: Any = SGD, updates: int = 12, **paradigm: Any) -> Job:
    return make_job(
        seed=3,
        workload={"name": "linear", "batch_size": 8, "features": 11, "samples": 200},
        optimizer=optimizer,
        stop={"updates": updates},
        paradigm={"name": "easgd", **paradigm},
        cluster={"servers": servers, "workers": workers, "compute": {"model": "lognormal", "seconds": 0.001}},
    )


@pytest.mark.parametrize("optimizer", [SGD, NESTEROV], ids=["EASGD", "EAMSGD"])
@pytest.mark.parametrize("servers", [1, 2])
def test_synchronous_averaging_is_its_simulation_to_the_bit(comm, needs, folder, servers, optimizer):
    """The simulation equals NumPy: tests/unit/simulator/test_elastic.py."""
    needs(servers + 1)
    this = job(servers, comm.size - servers, optimizer, period=3, synchronous=True)
    session = train(comm, this, folder)
    if comm.rank == 0:
        assert np.array_equal(session.flat.weights, simulated(this))
        other = job(servers, comm.size - servers, optimizer, period=4, synchronous=True)
        assert not np.allclose(session.flat.weights, simulated(other), rtol=0, atol=1e-6)
        assert [found for found in audit(folder / "trace.h5") if not found.passed] == []


def positions(comm: Any, this: Job, folder: Any, exchanges: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Return where every worker and the centre end, if workers with higher numbers make more exchanges.

    Worker w begins w + 1 away from the centre, which begins at the weights of the job.
    """
    workload = check(this)
    period = this.paradigm.period
    with ranks.join(comm, this, workload.model, optimizer_spec(this), None, folder) as sync:
        left = 0
        if sync.worker is not None:
            sync.flat.weights.add_(sync.worker + 1.0)
            left = (exchanges + 3 * sync.worker) * period
        leaving(sync, this, workload, left)
        mine = sync.flat.weights.numpy().copy()
    everybody = comm.allgather((sync.worker, mine))
    return np.array([x for worker, x in everybody if worker is not None]), sync.flat.weights.numpy().copy()


def start(this: Job) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in check(this).model.parameters()]).numpy()


@pytest.mark.parametrize("servers", [1, 2])
def test_the_sum_of_workers_and_centre_is_kept(comm, needs, folder, servers):
    """This holds in any order of workers, and whatever else the servers do between a worker's read and its move."""
    needs(servers + 1)
    workers = comm.size - servers
    this = job(servers, workers, STILL, updates=10**6, period=2)
    x, centre = positions(comm, this, folder)
    begun = (workers + 1) * start(this) + sum(range(1, workers + 1))
    assert np.allclose(x.sum(0) + centre, begun, rtol=0, atol=1e-12)
    assert not np.allclose(centre, start(this), rtol=0, atol=0.1)


def test_the_sum_is_not_kept_if_workers_see_their_own_moves_of_the_centre(comm, needs, folder, monkeypatch):
    needs(2)
    monkeypatch.setattr(easgd._GrantsFirst, "handle", Paradigm.handle)
    workers = comm.size - 1
    this = job(1, workers, STILL, updates=10**6, period=2)
    x, centre = positions(comm, this, folder, exchanges=2)
    begun = (workers + 1) * start(this) + sum(range(1, workers + 1))
    assert not np.allclose(x.sum(0) + centre, begun, rtol=0, atol=1e-3)


def test_one_worker_and_the_centre_meet_half_way(comm, needs, folder):
    needs(2)
    some = comm.Split(int(comm.rank > 1), comm.rank)
    if comm.rank < 2:
        this = job(1, 1, STILL, updates=10**6, period=1, alpha=0.5)
        x, centre = positions(some, this, folder, exchanges=1)
        assert np.allclose(x[0], start(this) + 0.5, rtol=0, atol=1e-14)
        assert np.allclose(centre, x[0], rtol=0, atol=1e-14)
    some.Free()


def test_alpha_0_is_training_alone(comm, needs, folder):
    needs(2)
    this = job(1, comm.size - 1, SGD, updates=10**6, period=2, alpha=0.0)
    x, centre = positions(comm, this, folder)
    assert np.array_equal(centre, start(this))
    if comm.rank == 0:
        for worker, mine in enumerate(x):
            workload = check(this)
            with torch.no_grad():
                for parameter in workload.model.parameters():
                    parameter.add_(worker + 1.0)
            optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.05)
            data = batches(workload.train, 3, worker, n_workers=len(x), batch_size=8, epochs=range(99))
            for _, batch in zip(range(2 * (20 + 3 * worker)), data, strict=False):
                optimizer.zero_grad()
                workload.loss(workload.model, *batch).backward()
                optimizer.step()
            alone = torch.cat([p.detach().flatten() for p in workload.model.parameters()]).numpy()
            assert np.allclose(mine, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_push_covers_a_whole_period_and_later_iterations_are_discarded(comm, needs, folder, synchronous):
    needs(2)
    workers = comm.size - 1
    table = job(1, workers, NESTEROV, period=4, synchronous=synchronous, updates=10**6).model_dump(exclude_none=True)
    leaving = [{"worker": w, "change": "leave", "at_iteration": 20 + 3 * w} for w in range(workers)]
    session = train(comm, Job.from_table({**table, "cluster": {**table["cluster"], "events": leaving}}), folder)
    weights = comm.allgather(session.flat.weights.numpy())
    assert all(np.array_equal(other, weights[0]) for other in weights)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert [found for found in audit(trace) if not found.passed] == []
        pushes = trace.tables["pushes"]
        assert set(pushes["local_steps"].tolist()) == {4}
        assert set(pushes["batch_size"].tolist()) == {32}
        assert (pushes["compute_s"] >= 4 * 0.0002).all()
        counts = np.bincount(pushes["worker"], minlength=workers).tolist()
        assert counts == [(19 + 3 * w) // 4 for w in range(workers)]


# ---- between a worker and a server ----


def test_a_promise_before_the_readers_own_update_is_distinguished():
    update, first, second = (
        UpdateCommand((0, 1), (1.0, 1.0), 2.0, 0.5),
        Grant(0, 2, 7),
        Grant(1, 2, 7),
    )
    kinds = [(record.kind, record.grant.worker) for record in encode([first, second, update])]
    assert kinds == [
        (messages.CommandKind.RESERVE, 0),
        (messages.CommandKind.RESERVE, 1),
        (messages.CommandKind.CONTRIBUTION, 0),
        (messages.CommandKind.UPDATE, 1),
    ]
    kinds = [(record.kind, record.grant.worker) for record in encode([update, first, second])]
    assert kinds == [
        (messages.CommandKind.CONTRIBUTION, 0),
        (messages.CommandKind.UPDATE, 1),
        (messages.CommandKind.PROMISE, 0),
        (messages.CommandKind.PROMISE, 1),
    ]
    kinds = [
        (record.kind, record.grant.worker) for record in encode([first, UpdateCommand((1,), (1.0,), 1.0, 0.5), second])
    ]
    assert kinds == [
        (messages.CommandKind.PROMISE, 0),
        (messages.CommandKind.UPDATE, 1),
        (messages.CommandKind.PROMISE, 1),
    ]


def test_a_grant_waits_until_its_workers_slot_is_free(comm, needs):
    """Otherwise the worker could overwrite a position that is not applied yet."""
    needs(2)
    link = ServerChannel(comm, Roles(1, comm.size - 1), 10, torch.float64, contributors_read=True)
    first = [Grant(worker, 1) for worker in range(comm.size - 1)]
    shard = Shard(link, Elastic(), torch.zeros(10, dtype=torch.float64), first) if comm.rank == 0 else None
    reader = None if shard else Reader(link, link.roles.worker(comm.rank))
    if reader:
        reader.wait(iteration=1)
        reader.read([torch.empty(10, dtype=torch.float64)])
    if comm.rank == 1:
        position = torch.full((10,), 4.0, dtype=torch.float64)
        link.tensors.put(position, 0, link.slot(0, 0))
        link.tensors.flush(0)
    comm.Barrier()
    if shard:
        shard.carry_out(CommandRecord(messages.CommandKind.RESERVE, Grant(0, 2)))
    comm.Barrier()
    if comm.rank == 1:
        until_s = time.monotonic() + 0.2
        while time.monotonic() < until_s:
            assert reader._inbox.poll() is None
    comm.Barrier()
    if shard:
        shard.carry_out(CommandRecord(messages.CommandKind.UPDATE, to(0), lr=0.25))
        assert shard.store.weights.tolist() == [1.0] * 10
    if comm.rank == 1:
        read = torch.empty(10, dtype=torch.float64)
        assert reader.wait(iteration=2).version == 0
        reader.read([read])
        assert read.tolist() == [0.0] * 10, "where the centre was"
    link.free()
