"""Allocated batches: which worker computes which samples, how many, and how they are weighted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import hpcsync
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.core import coordinator
from hpcsync.core.assignments import create_assignments
from hpcsync.planning.batch_allocation import Allocator
from hpcsync.trace.reader import Trace, load
from hpcsync.trace.schema import Outcome
from tests.mpi.training import failures, on_some, recomputed
from tests.plain import first_of, on_samples, whole_batches
from tests.unit.jobs import make_job

PARADIGMS = {
    "bsp": {},
    "asp": {},
    "dssp": {"staleness_min": 1, "staleness_max": 4},
    "k-batch-async": {"k": "loss"},
    "easgd": {"period": 3},
}
POLICY = {"policy": "proportional", "predictor": "last", "interval": 2, "gain": 0.0}


def job(paradigm: str, workers: int, servers: int = 1, updates: int = 40, **batches: Any) -> Job:
    """Of workers of which each is slower than the one before."""
    seconds = [0.002 * 8.0 ** (worker / max(3, workers - 1)) for worker in range(workers)]
    return make_job(
        seed=3,
        workload={"name": "linear", "batch_size": 12, "features": 11, "samples": 200},
        optimizer={"name": "sgd", "lr": 0.02, "momentum": 0.5},
        stop={"updates": updates},
        evaluation={"every_samples": 0},
        paradigm={"name": paradigm, **PARADIGMS[paradigm]},
        batches={**POLICY, **batches},
        cluster={
            "servers": servers,
            "workers": workers,
            "compute": {"model": "constant", "seconds": seconds},
        },
    )


def sizes(trace: Trace, worker: int) -> list[int]:
    rows = trace.tables["pushes"]
    return rows["batch_size"][rows["worker"] == worker].tolist()


def test_any_split_is_the_whole_batch(comm, needs, folder):
    """Between two servers, where that leaves two workers."""
    needs(2)
    servers = 2 if comm.size > 3 else 1
    this = job("bsp", comm.size - servers, servers)
    weights = on_some(comm, this, folder)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert np.allclose(weights, on_samples(this, whole_batches(this, 40)), rtol=0, atol=1e-12)
        assert failures(folder / "trace.h5") == []
        if this.cluster.workers > 1:
            fastest, slowest = sizes(trace, 0), sizes(trace, this.cluster.workers - 1)
            assert fastest[0] == slowest[0] == 12
            assert 1 <= min(slowest) < 12 < max(fastest)


def test_a_mean_over_workers_does_not(comm, needs, folder, monkeypatch):
    needs(3)
    this = job("bsp", comm.size - 1)
    monkeypatch.setattr(coordinator.Coordinator, "_weigh", lambda self, worker, weight: weight)
    weights = on_some(comm, this, folder)
    if comm.rank == 0:
        assert not np.allclose(weights, on_samples(this, whole_batches(this, 40)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("paradigm", "policy", "predictor"),
    [
        ("bsp", "equal-finish", "blend"),
        *((paradigm, "proportional", "smoothing") for paradigm in ("asp", "dssp", "k-batch-async", "easgd")),
    ],
)
def test_workers_compute_what_they_are_granted(comm, needs, folder, paradigm, policy, predictor):
    """Faster workers compute more, and the servers' weights are those of the trace."""
    needs(2)
    workers = comm.size - 1
    updates = 20 if predictor == "blend" else 60  # it learns in milliseconds that ranks on few cores do not have
    this = job(paradigm, workers, updates=updates, policy=policy, predictor=predictor)
    weights = on_some(comm, this, folder)
    if comm.rank > 0:
        return
    trace = load(folder / "trace.h5")
    pushes, grants = trace.tables["pushes"], trace.tables["grants"]
    work = {(row["worker"], row["iteration"]): row["batch_size"] for row in grants}
    work |= {(worker, 1): first.batch_size for worker, first in enumerate(create_assignments(this).first)}
    steps = PARADIGMS[paradigm].get("period", 1)
    for push in pushes:
        key = (push["worker"], push["iteration"])
        assert push["batch_size"] == work[key]
        assert push["local_steps"] == steps and work[key] % steps == 0
    if workers > 1:
        assert trace.tables["decisions"]["controller"].tolist().count(b"batches") >= workers
        assert np.mean(sizes(trace, 0)) > np.mean(sizes(trace, workers - 1))
    if paradigm != "easgd":
        assert np.allclose(weights, recomputed(this, trace), rtol=0, atol=1e-11)
        taken = pushes[pushes["outcome"] == Outcome.APPLIED]
        assert (taken["weight"] > 0).all()
    assert failures(folder / "trace.h5") == []
    no_sample_twice_or_left_out(this, trace)


def no_sample_twice_or_left_out(this: Job, trace: Trace) -> None:
    """Samples granted at the end and no longer computed are excepted."""
    pushes, grants = trace.tables["pushes"], trace.tables["grants"]
    pieces = [(first_of(this, trace, push), int(push["batch_size"])) for push in pushes]
    pushed = {(push["worker"], push["iteration"]) for push in pushes}
    open_at_the_end = [g for g in grants if g["local_steps"] and (g["worker"], g["iteration"]) not in pushed]
    pieces += [(int(g["first_sample"]), int(g["batch_size"])) for g in open_at_the_end]
    end = 0
    for first, n_samples in sorted(pieces):
        assert first == end
        end = first + n_samples


# ---- a script ----

SIZE = 230


def used(comm: Any, folder: Any, epochs: int, paradigm: str = "asp", **options: Any) -> np.ndarray:
    """How often each sample of a data set was used by all workers together, in a script's own loop."""
    torch.manual_seed(5)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    data = TensorDataset(torch.arange(SIZE), torch.randn(SIZE, 6))
    workers = max(1, comm.size - 1)
    compute = {"model": "constant", "seconds": [0.002 * (1 + 3 * worker) for worker in range(workers)]}
    batches = {**POLICY, "total": 8 * workers}
    settings = {"compute": compute, "batches": batches, "out": folder / "run", "comm": comm, **options}
    count = np.zeros(SIZE, int)
    with hpcsync.connect(model, optimizer, paradigm, **settings) as sync:
        for _ in range(epochs):
            for index, x in sync.shard(data, batch_size=8):
                np.add.at(count, index.numpy(), 1)
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                sync.step(loss)
    return np.sum(comm.allgather(count), axis=0)


@pytest.mark.parametrize("paradigm", ["bsp", "asp", "easgd"])
def test_every_sample_of_a_training_epoch_is_used_once_by_any_worker(comm, folder, paradigm):
    """The last batch of all reaches over the end, otherwise it would not be whole."""
    options = {"period": 2} if paradigm == "easgd" else {}
    count = used(comm, folder, 3, paradigm, **options)
    assert count.min() == 3 and count.max() <= 4
    assert (count == 4).sum() < 8 * max(1, comm.size - 1) * (2 if paradigm == "easgd" else 1)
    if comm.rank == 0 and comm.size > 1:
        assert failures(folder / "run" / "trace.h5") == []
        last = max(1, comm.size - 1) - 1
        assert last == 0 or min(sizes(load(folder / "run" / "trace.h5"), last)) < 8 * options.get("period", 1)


def test_the_order_of_equal_batches_would_skip_samples(comm, needs, folder, monkeypatch):
    needs(3)
    turns: dict[int, int] = {}

    def by_number(self: Allocator, worker: int) -> tuple[int, int]:
        turns[worker] = turns.get(worker, -1) + 1
        return turns[worker] * self.total + 8 * worker, self.sizes[worker]

    monkeypatch.setattr(Allocator, "allocate_next", by_number)
    count = used(comm, folder, 3)
    assert not 3 <= count.min() <= count.max() <= 4


def test_a_script_must_name_the_total(comm, folder):
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(JobError, match=r"batches\.total: missing"):
        hpcsync.connect(model, optimizer, batches={"policy": "proportional"}, out=folder / "run", comm=comm)
