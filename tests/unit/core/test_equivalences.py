"""Equivalences in float64 without MPI: coordinator, stores and replicas in one loop."""

import math

import numpy as np
import pytest
import torch

from hpcsync.core.assignments import create_paradigm
from hpcsync.core.coordinator import AccumulateCommand, Coordinator, UpdateCommand
from hpcsync.core.roles import Roles
from hpcsync.paradigms.records import PushInfo
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.gradient import Replica
from hpcsync.training.lr_schedule import learning_rate
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.parameter_store import Store, n_buffers, row_size
from hpcsync.training.sampler import batches
from hpcsync.training.update_rules import Descent
from hpcsync.workloads.registry import Workload, build
from tests.unit.jobs import LINEAR, make_job
from tests.unit.recorder import Nothing

UPDATES = 24


class Server:
    """The shards of all servers as one store."""

    def __init__(self, job, weights: torch.Tensor) -> None:
        roles = Roles(job.cluster.servers, job.cluster.workers)
        spec = OptimizerSpec(job.optimizer.name, job.optimizer.lr, job.optimizer.options)
        self.shards = roles.shards(len(weights))
        self.stores, self.slots = [], []
        for shard in self.shards:
            size, done = shard.stop - shard.start, np.zeros(roles.n_workers + 1, np.int64)
            rows = torch.zeros(n_buffers(roles.n_workers), row_size(size), dtype=weights.dtype)
            rows[0, :size] = weights[shard]
            slots = torch.zeros(roles.n_workers, row_size(size), dtype=weights.dtype)
            self.slots.append(slots[:, :size])
            self.stores.append(Store(rows, slots, done, Descent(spec.on_server), size))

    def put(self, worker: int, gradient: torch.Tensor) -> None:
        for slots, shard in zip(self.slots, self.shards, strict=True):
            slots[worker] = gradient[shard]

    def apply(self, update: UpdateCommand) -> None:
        for store in self.stores:
            store.apply(update.workers, update.lr, update.weights, update.divisor)

    def accumulate(self, accumulation: AccumulateCommand) -> None:
        for store in self.stores:
            store.accumulate(accumulation.worker, accumulation.weight)

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([store.weights for store in self.stores])


def train(job, *, seconds=(1.0, 1.7, 0.6, 1.1), order_seed=None, turned=None) -> torch.Tensor:
    """Return the final weights of the job; workers push in the order of these durations."""
    n_workers = job.cluster.workers
    workload: Workload = build(job)
    flat = FlatModel(workload.model)
    server, replica = Server(job, flat.weights), Replica(flat, workload.loss)
    coordinator = Coordinator(
        create_paradigm(job), Nothing(), n_workers=n_workers, lr=learning_rate(job), stop=job.stop
    )
    data = [
        batches(
            workload.train,
            order_seed or job.seed,
            worker,
            n_workers=n_workers,
            batch_size=job.workload.batch_size,
            epochs=range(999),
        )
        for worker in range(n_workers)
    ]
    read = [server.weights for _ in range(n_workers)]
    due_s = {worker: seconds[worker] for worker in range(n_workers)}  # end of each computation
    now_s = 0.0
    while due_s:
        worker = min(due_s, key=lambda worker: (due_s[worker], worker))
        now_s = due_s.pop(worker)
        flat.weights.copy_(read[worker])
        loss = replica.compute(next(data[worker]))
        server.put(worker, flat.gradient if turned is None else turned(flat.gradient))
        report = PushInfo(now_s, worker, batch_size=job.workload.batch_size, loss=loss)
        for order in coordinator.pushed(now_s, report):
            if isinstance(order, UpdateCommand):
                server.apply(order)
            elif isinstance(order, AccumulateCommand):
                server.accumulate(order)
            elif order.local_steps:
                read[order.worker] = server.weights
                due_s[order.worker] = now_s + seconds[order.worker]
    assert coordinator.version == job.stop.updates
    return server.weights


def job(paradigm="bsp", workers=1, batch_size=4, servers=1, seed=1, **optimizer):
    name, *bounds = [paradigm] if isinstance(paradigm, str) else paradigm
    keys = {"bsp": [], "asp": [], "ssp": ["staleness"], "dssp": ["staleness_min", "staleness_max"]}.get(name, ["k"])
    return make_job(
        workload={**LINEAR, "batch_size": batch_size, "samples": 96},
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9, **optimizer},
        stop={"updates": UPDATES},
        paradigm={"name": name, **dict(zip(keys, bounds, strict=True))},
        cluster={"workers": workers, "servers": servers},
        seed=seed,
    )


def torch_alone(job) -> torch.Tensor:
    """Train the same model and data with plain PyTorch."""
    workload = build(job)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=job.optimizer.lr, **job.optimizer.options)
    data = batches(workload.train, job.seed, 0, n_workers=1, batch_size=job.workload.batch_size, epochs=range(999))
    for _, batch in zip(range(job.stop.updates), data, strict=False):
        optimizer.zero_grad()
        workload.loss(workload.model, *batch).backward()
        optimizer.step()
    return next(workload.model.parameters()).detach().flatten()


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize(
    "optimizer", [{"momentum": 0.0}, {"momentum": 0.9, "weight_decay": 0.01}], ids=["sgd", "momentum"]
)
@pytest.mark.parametrize("paradigm", ["asp", "bsp", ("ssp", 3), ("dssp", 1, 4)], ids=str)
def test_one_worker_is_torch_alone(paradigm, optimizer):
    """Up to the rounding of torch's fused optimizers, which run on servers but not in a plain script."""
    assert difference(train(job(paradigm, **optimizer)), torch_alone(job(**optimizer))) < 1e-13
    assert not difference(train(job(paradigm, **optimizer)), torch_alone(job(**optimizer, lr=0.1 + 1e-9))) < 1e-13


@pytest.mark.parametrize(("workers", "batch_size"), [(2, 4), (2, 6), (3, 4), (4, 2)])
def test_bsp_is_one_process_with_all_the_samples_of_a_round(workers, batch_size):
    alone = torch_alone(job(batch_size=workers * batch_size))
    assert difference(train(job("bsp", workers, batch_size)), alone) < 1e-12


@pytest.mark.parametrize(
    "different",
    [
        lambda: train(job("bsp", 3), order_seed=2),
        lambda: train(job("bsp", 3, lr=0.3)),  # as if the gradients were summed
        lambda: train(job("asp", 3)),
        lambda: train(job("bsp", 3), turned=lambda gradient: gradient * (1 + 1e-9)),
    ],
    ids=["order", "sum", "asp", "slightly wrong"],
)
def test_other_averages_differ_from_bsp(different):
    assert not difference(different(), torch_alone(job(batch_size=12))) < 1e-12  # NaN differs too


def test_bsp_does_not_depend_on_speeds():
    assert torch.equal(train(job("bsp", 3), seconds=(1, 2, 3)), train(job("bsp", 3), seconds=(3, 1, 2)))
    assert not torch.equal(train(job("asp", 3), seconds=(1, 2, 3)), train(job("asp", 3), seconds=(3, 1, 2)))


@pytest.mark.parametrize(
    "paradigm", ["bsp", "asp", ("ssp", 1), ("dssp", 1, 4), ("k-batch-sync", 3), ("k-batch-async", 2)], ids=str
)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_number_of_servers_does_not_change_a_bit(paradigm, optimizer):
    options = {"name": optimizer, "lr": 0.01} | ({"momentum": 0.9} if optimizer == "sgd" else {})
    tables = {"workload": {**LINEAR, "features": 37}, "stop": {"updates": UPDATES}, "optimizer": options}
    paradigm_table = job(paradigm, 3).model_dump(exclude_none=True)["paradigm"]
    one, two, three, seven = (
        train(make_job(**tables, paradigm=paradigm_table, cluster={"workers": 3, "servers": servers}))
        for servers in (1, 2, 3, 7)
    )
    assert torch.equal(one, two)
    assert torch.equal(one, three)
    assert torch.equal(one, seven)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("ssp", math.inf), "asp"),
        (("dssp", 2, 2), ("ssp", 2)),
        (("dssp", 0, 0), ("ssp", 0)),
        (("k-sync", 4), "bsp"),
        (("k-async", 4), "bsp"),
        (("k-async", 1), "asp"),
        (("k-batch-async", 1), "asp"),
        (("k-batch-sync", 1), ("k-sync", 1)),
    ],
    ids=str,
)
def test_paradigms_that_are_one(a, b):
    assert torch.equal(train(job(a, 4)), train(job(b, 4)))


def test_paradigms_that_are_not():
    assert not torch.equal(train(job(("ssp", 1), 4)), train(job("asp", 4)))
    assert not torch.equal(train(job(("dssp", 1, 5), 4)), train(job(("ssp", 1), 4)))
    bsp, asp = train(job("bsp", 4)), train(job("asp", 4))
    for name in ("k-batch-sync", "k-batch-async"):  # of a fast worker more than one mini-batch
        assert not torch.equal(train(job((name, 4), 4)), bsp)
    for name in ("k-sync", "k-async"):
        assert not torch.equal(train(job((name, 3), 4)), bsp)
        assert not torch.equal(train(job((name, 2), 4)), asp)
