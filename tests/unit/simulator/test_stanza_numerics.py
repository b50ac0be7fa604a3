"""Separated layers in one process: the numbers of a larger batch, and those of ranks to the bit."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpcsync.config.job import Job
from hpcsync.simulator.stanza_numerics import TwoHalves, _Half
from hpcsync.training.gradient import worker_seed
from hpcsync.training.sampler import batch_indices, batches
from hpcsync.workloads.registry import half_squared_error
from tests import plain
from tests.unit.simulator.separated import LR, NESTEROV, Run, flat, separated, trained, workload


def in_one_process(job: Job) -> np.ndarray:
    """Return the weights of a plain PyTorch loop on the joint batches of all convolution workers."""
    n = job.groups.n_convolution
    steps = (
        np.concatenate([batch_indices(job.seed, j, batch_size=4, size=60) for j in range(i * n, (i + 1) * n)])
        for i in range(job.stop.updates)
    )
    return plain.trained(job, workload(job), steps)


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=1e-10, atol=1e-13))


# ---- numbers ----


@pytest.mark.parametrize("optimizer", [NESTEROV, {"name": "adam", "lr": LR}], ids=["nesterov", "adam"])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize(("n_convolution", "n_fc"), [(1, 1), (2, 1), (3, 2)])
def test_it_is_one_process_with_a_larger_batch(n_convolution, n_fc, pieces, optimizer):
    job = separated(n_convolution, n_fc, pieces=pieces, optimizer=optimizer)
    assert close(trained(job), in_one_process(job))
    longer = job.model_copy(update={"stop": job.stop.model_copy(update={"updates": 7})})
    assert not close(trained(longer), in_one_process(job))


def unweighted(monkeypatch):
    contribute = _Half.contribute
    monkeypatch.setattr(_Half, "contribute", lambda self, worker, weight=1.0: contribute(self, worker))


def of_the_wrong_mean(factor):
    compute = TwoHalves.compute

    def scaled(self, fc):
        loss = compute(self, fc)
        for worker in self._groups.served(fc):
            self._activation_gradients[worker] = [
                gradient * factor(self, fc) for gradient in self._activation_gradients[worker]
            ]
        return loss

    return lambda monkeypatch: monkeypatch.setattr(TwoHalves, "compute", scaled)


@pytest.mark.parametrize(
    "broken",
    [
        unweighted,
        of_the_wrong_mean(lambda halves, fc: 1 / len(halves._groups.served(fc))),
        of_the_wrong_mean(lambda halves, fc: halves._n_pieces),
    ],
    ids=["fully-connected workers' weights", "workers served", "pieces"],
)
def test_a_wrong_factor_gives_other_weights(broken, monkeypatch):
    job = separated(3, 2, pieces=2)
    broken(monkeypatch)
    assert not np.allclose(trained(job), in_one_process(job), rtol=1e-4)


@pytest.mark.parametrize("pieces", [1, 4])
def test_the_first_layer_has_the_gradient_of_the_whole_model(pieces):
    job = separated(3, 2, pieces=pieces, stop={"updates": 1}, optimizer={"name": "sgd", "lr": LR})
    start, first = flat(workload(job).model), slice(0, 5 * 6)
    gradient = (start - in_one_process(job))[first] / LR
    assert np.abs(gradient).min() > 1e-6
    assert np.allclose((start - trained(job))[first] / LR, gradient, rtol=1e-8)


class Rank:
    """A worker with its own model, batches, generator and optimizer, as in a process of its own."""

    def __init__(self, job: Job, worker: int, number: int, whole: nn.Module) -> None:
        model = copy.deepcopy(whole)
        self.model = model.classifier if job.groups.is_fc(worker) else model.features
        self.batches = batches(
            workload(job, dtype=torch.float32).train, job.seed, number,
            n_workers=job.groups.n_convolution, batch_size=job.workload.batch_size, epochs=range(99),
        )  # fmt: skip
        self.generator = torch.Generator().manual_seed(worker_seed(job.seed, worker)).get_state()
        self.flat = nn.Parameter(nn.utils.parameters_to_vector(self.model.parameters()).detach())
        self.optimizer = torch.optim.SGD([self.flat], lr=LR, fused=True, **job.optimizer.options)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_rng_state(self.generator)
        found = self.model(x)
        self.generator = torch.get_rng_state()
        return found

    def gradient(self) -> torch.Tensor:
        found = nn.utils.parameters_to_vector([p.grad for p in self.model.parameters()]).clone()
        self.model.zero_grad()
        return found

    def step(self, gradient: torch.Tensor) -> None:
        self.flat.grad = gradient
        self.optimizer.step()
        nn.utils.vector_to_parameters(self.flat.data.clone(), self.model.parameters())


def by_ranks(job: Job) -> list[Rank]:
    """Train as ranks do; an independent implementation."""
    groups, pieces = job.groups, job.paradigm.micro_batches
    whole = workload(job, noisy=True, dtype=torch.float32).model
    ranks = [Rank(job, worker, worker - groups.n_fc, whole) for worker in range(groups.n_workers)]
    for _ in range(job.stop.updates):
        parts = {w: [t.split(len(t) // pieces) for t in next(ranks[w].batches)] for w in groups.convolution}
        crossing = {w: [ranks[w](x) for x in parts[w][0]] for w in groups.convolution}
        above = []
        for fc in groups.fc:
            total: Any = 0.0
            for piece in range(pieces):
                h = torch.cat([crossing[w][piece].detach() for w in groups.served(fc)]).requires_grad_()
                half_squared_error(ranks[fc], h, torch.cat([parts[w][1][piece] for w in groups.served(fc)])).backward()
                total = ranks[fc].gradient() / pieces + total
                back = len(groups.served(fc)) * (1 / pieces) * h.grad
                for w, rows in zip(groups.served(fc), back.chunk(len(groups.served(fc))), strict=True):
                    crossing[w][piece] = (crossing[w][piece], rows)
            above.append(total * (len(groups.served(fc)) * groups.n_fc / groups.n_convolution))
        below = []
        for w in groups.convolution:
            for h, rows in crossing[w]:
                h.backward(rows)
            below.append(ranks[w].gradient())
        for group, gradients in ((groups.fc, above), (groups.convolution, below)):
            mean = sum(gradients[1:], gradients[0]) / len(gradients)
            for w in group:
                ranks[w].step(mean.clone())
    return ranks


@pytest.mark.parametrize("pieces", [1, 2])  # a half is exact
@pytest.mark.parametrize(("n_convolution", "n_fc"), [(1, 1), (3, 2)])
def test_generators_and_running_statistics_are_each_workers_own(n_convolution, n_fc, pieces):
    job = separated(n_convolution, n_fc, pieces=pieces)
    run, ranks = Run(job, workload(job, noisy=True, dtype=torch.float32)), by_ranks(job)
    model, first = run.workload.model, job.groups.convolution[0]
    for half, rank in ((model.classifier, ranks[0]), (model.features, ranks[first])):
        assert np.array_equal(flat(half), rank.flat.detach().numpy())
        for ours, theirs in zip(half.buffers(), rank.model.buffers(), strict=True):
            assert torch.equal(ours, theirs)
    assert model.features[2].num_batches_tracked == 6 * pieces
