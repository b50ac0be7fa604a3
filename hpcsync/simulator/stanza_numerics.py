"""What the workers of a run with separated layers compute, in one process: halves of an iteration, and its two steps.

It is the arithmetic of real ranks. Within a group all have the same weights, bit for bit, so that one model stands for
all of them; batches, generators and running statistics are each worker's own.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import nn

from hpcsync.config.job import Job
from hpcsync.config.paradigms import StanzaOptions
from hpcsync.simulator.gradients import Own, own_batches
from hpcsync.simulator.peer_numerics import Judged, MeanEvaluation, Nothing
from hpcsync.training.flat_model import FlatModel, trainable
from hpcsync.training.gradient import Replica
from hpcsync.training.model_split import ModelSplit
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.update_rules import Descent
from hpcsync.workloads.registry import Workload


class InHalves(Judged, Protocol):
    """The numbers of one iteration after the other.

    Of an iteration all convolution workers go forward, then fully-connected workers compute, then the former go back.
    """

    def forward(self, worker: int) -> None:
        """The activations of this convolution worker's next batch."""

    def compute(self, fc: int) -> float:
        """The gradient of this fully-connected worker, and those of the activations that it is given; its mean loss."""

    def backward(self, worker: int) -> None:
        """The gradient of this convolution worker."""

    def step(self, lr: float, *, above: bool) -> None:
        """The step of all workers of one group."""


class NothingInHalves(Nothing):
    def forward(self, worker: int) -> None: ...

    def compute(self, fc: int) -> float:
        return math.nan

    def backward(self, worker: int) -> None: ...

    def step(self, lr: float, *, above: bool) -> None: ...


class _Half:
    """One half of the model, and what each of those workers that train it has for itself."""

    def __init__(self, model: nn.Module, job: Job, workers: range) -> None:
        self.model, self.flat = model, FlatModel(model)
        self.own = {worker: Own(model, job.seed, worker) for worker in workers}
        self._slots = {worker: torch.empty_like(self.flat.weights) for worker in workers}
        self._rule = Descent(OptimizerSpec.of_job(job))
        self._rule.bind(nn.Parameter(self.flat.weights))  # in the same memory

    def contribute(self, worker: int, weight: float = 1.0) -> None:
        """The flat gradient is the worker's, and counts so many times in the mean."""
        slot = self._slots[worker].copy_(self.flat.gradient)
        if weight != 1.0:
            slot.mul_(weight)  # as a rank does before it gives it away

    def step(self, lr: float) -> None:
        slots = list(self._slots.values())
        self._rule.update(slots, lr, [1.0] * len(slots), len(slots))


class TwoHalves:
    """Both halves of the model. Memory: beside them, what autograd keeps of all workers' batches at once."""

    def __init__(self, job: Job, workload: Workload, halves: ModelSplit) -> None:
        assert isinstance(job.paradigm, StanzaOptions)
        self._groups, self._n_pieces = job.groups, job.paradigm.micro_batches
        self._parameters = trainable(workload.model)
        self._evaluation = MeanEvaluation(workload)
        self._below = _Half(halves.below, job, self._groups.convolution)
        self._above = _Half(halves.above, job, self._groups.fc)
        self._replica = Replica(self._above.flat, workload.loss)
        self._batches = {worker: own_batches(job, workload, worker) for worker in job.takers}
        self._crossing: dict[int, list[torch.Tensor]] = {}  # convolution worker -> activations of each piece
        self._labels: dict[int, list[tuple[torch.Tensor, ...]]] = {}  # so
        self._back: dict[int, list[torch.Tensor]] = {}  # so: the activations' gradients

    def forward(self, worker: int) -> None:
        with self._below.own[worker].in_use():
            pieces = [tensor.tensor_split(self._n_pieces) for tensor in next(self._batches[worker])]
            self._crossing[worker] = [self._below.model(x) for x in pieces[0]]
            self._labels[worker] = list(zip(*pieces[1:], strict=True)) or [()] * self._n_pieces

    def compute(self, fc: int) -> float:
        served, n_pieces = self._groups.served(fc), self._n_pieces
        order = [(worker, piece) for piece in range(n_pieces) for worker in served]
        activations = torch.cat([self._crossing[worker][piece].detach() for worker, piece in order]).requires_grad_()
        labels = [torch.cat(parts) for parts in zip(*(self._labels[w][piece] for w, piece in order), strict=True)]
        with self._above.own[fc].in_use():
            loss = self._replica.compute_in_pieces((activations, *labels), n_pieces, lambda done: False)
        self._above.contribute(fc, self._groups.weight(fc))
        assert activations.grad is not None
        gradients = (self._groups.own_mean(fc, n_pieces) * activations.grad).tensor_split(len(order))
        for (worker, _), gradient in zip(order, gradients, strict=True):
            self._back.setdefault(worker, []).append(gradient)
        return loss

    def backward(self, worker: int) -> None:
        flat = self._below.flat
        flat.zero_gradient()
        with self._below.own[worker].in_use():
            for activations, gradient in zip(self._crossing.pop(worker), self._back.pop(worker), strict=True):
                activations.backward(gradient)
        flat.gather_gradient()
        self._below.contribute(worker)

    def step(self, lr: float, *, above: bool) -> None:
        (self._above if above else self._below).step(lr)

    def evaluate(self) -> tuple[float, float, float]:
        return (*self._evaluation(nn.utils.parameters_to_vector(self._parameters).detach()), 0.0)

    def finish(self) -> None:
        """The weights are in the workload's model. Running statistics end as each group's first worker's."""
        for half in (self._below, self._above):
            next(iter(half.own.values())).leave()
