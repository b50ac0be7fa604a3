"""Workloads whose models have running statistics, and what plain PyTorch makes of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hpcsync.config.job import Job
from hpcsync.core.job_validation import check
from hpcsync.training.sampler import batch_indices
from hpcsync.workloads.registry import Workload, classification, cross_entropy

N_TRAIN, N_TEST = 96, 60
SMALL = {"name": "tests.normalised:small", "batch_size": 4}
RESNET = {"name": "tests.normalised:resnet", "batch_size": 4}


def _workload(model: nn.Module, *shape: int) -> Workload:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N_TRAIN + N_TEST, *shape, generator=generator, dtype=torch.float64) * 3.0 + 1.0
    y = x.flatten(1)[:, :3].argmax(1)
    training, held_out = slice(N_TRAIN), slice(N_TRAIN, None)
    train = TensorDataset(x[training], y[training])
    return Workload(model.double(), cross_entropy, train, classification(x[held_out], y[held_out]))


def small() -> Workload:
    """A perceptron with BatchNorm, and a buffer of integers that is not saved."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model.register_buffer("constants", torch.tensor([[0.1, -float("inf")]]), persistent=False)
    return _workload(model, 6)


class Block(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.main(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.layer1, self.layer2 = Block(4, 4, 1), Block(4, 6, 2)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(functional.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet() -> Workload:
    return _workload(ResNet(), 2, 6, 6)


Buffers = dict[str, torch.Tensor]


def buffers(model: nn.Module) -> Buffers:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def in_step(job: Job, updates: int) -> Iterator[tuple[nn.Module, list[Buffers]]]:
    """The model after each update of all workers together, and the buffers of each worker, by plain PyTorch."""
    workload, n = check(job), job.cluster.workers
    model, size = workload.model, len(workload.train)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.optimizer.lr, **job.optimizer.options)
    of_workers = [buffers(model) for _ in range(n)]
    for update in range(updates):
        optimizer.zero_grad()
        for worker in range(n):
            adopt(model, of_workers[worker])
            batch_size = job.workload.batch_size
            at = torch.from_numpy(batch_indices(job.seed, update * n + worker, batch_size=batch_size, size=size))
            (workload.loss(model, *(tensor[at] for tensor in workload.train.tensors)) / n).backward()
            of_workers[worker] = buffers(model)
        optimizer.step()
        yield model, of_workers


def adopt(model: nn.Module, values: Buffers) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])


def mean(of_workers: Sequence[Buffers]) -> Buffers:
    found = {}
    for name, first in of_workers[0].items():
        values = torch.stack([each[name] for each in of_workers])
        found[name] = values.mean(0) if first.is_floating_point() else values.max(0).values
    return found


def recomputed(job: Job, model: nn.Module) -> Buffers:
    """Mean of the statistics of the first batches, each with the statistics of its own."""
    other, workload = copy.deepcopy(model).train(), check(job)
    for module in other.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = 1.0  # the last batch counts alone
    batch_size, found = job.workload.batch_size, []
    for batch in range(min(32, len(workload.train) // batch_size)):
        at = torch.from_numpy(batch_indices(job.seed, batch, batch_size=batch_size, size=len(workload.train)))
        with torch.no_grad():
            other(workload.train.tensors[0][at])
        found.append(buffers(other))
    last = mean(found)
    return {name: torch.tensor(len(found)) if name.endswith("tracked") else value for name, value in last.items()}


def chosen(job: Job, choice: str, model: nn.Module, of_workers: Sequence[Buffers]) -> Buffers:
    """The buffers of a choice."""
    if choice == "recompute":
        return recomputed(job, model)
    return of_workers[0] if choice == "worker" else mean(of_workers)


def evaluated(job: Job, model: nn.Module, values: Buffers) -> tuple[float, float]:
    """Loss and accuracy of a model with these buffers."""
    other, evaluate = copy.deepcopy(model), check(job).evaluate
    adopt(other, values)
    assert evaluate is not None
    return evaluate(other)
