"""Numerics of a run with separated layers in one process.

Uses the arithmetic of real ranks. All workers of a group have the same weights, bit for bit, so one model represents
them; batches, generators and running statistics belong to each worker.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from hpcsync.config.job import Job
from hpcsync.core.stanza_resolution import stanza_options
from hpcsync.simulator.evaluation import Evaluation
from hpcsync.simulator.gradients import WorkerContext, worker_batches
from hpcsync.training.buffers import Buffers
from hpcsync.training.flat_model import FlatModel, trainable
from hpcsync.training.gradient import Replica
from hpcsync.training.local_update import NullPeer
from hpcsync.training.model_split import ModelSplit
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.update_rules import Descent
from hpcsync.workloads.registry import Workload


class _Half:
    """One part of the model, and the generator and running statistics of each worker that trains it."""

    def __init__(self, model: nn.Module, job: Job, workers: range) -> None:
        self.model, self.flat = model, FlatModel(model)
        self.contexts = {worker: WorkerContext(model, job.seed, worker) for worker in workers}
        self._slots = {worker: torch.empty_like(self.flat.weights) for worker in workers}
        self._rule = Descent(OptimizerSpec.of_job(job).on_server)
        self._rule.bind(nn.Parameter(self.flat.weights))  # shares memory

    def contribute(self, worker: int, weight: float = 1.0) -> None:
        """Store the flat gradient as the worker's contribution, multiplied by `weight`."""
        slot = self._slots[worker].copy_(self.flat.gradient)
        if weight != 1.0:
            slot.mul_(weight)  # a rank scales its gradient before sending it, too

    def step(self, lr: float) -> None:
        slots = list(self._slots.values())
        self._rule.update(slots, lr, [1.0] * len(slots), len(slots))


class TwoHalves:
    """Both parts of the model.

    In an iteration all convolution workers call `forward`, the fully-connected workers call `compute`, and then the
    convolution workers call `backward`.

    Memory: in addition to them, the autograd graphs of all workers' batches at once.
    """

    gradient_sq = mean_gradient_sq = math.nan  # no worker has a gradient of the whole model

    def __init__(self, job: Job, workload: Workload, halves: ModelSplit) -> None:
        self._groups, self._n_pieces = job.groups, stanza_options(job).micro_batches
        self._parameters = trainable(workload.model)
        self._evaluation = Evaluation(job, workload)
        self._buffers = Buffers(workload.model)
        self._below = _Half(halves.below, job, self._groups.convolution)
        self._above = _Half(halves.above, job, self._groups.fc)
        self._replica = Replica(self._above.flat, workload.loss)
        self._batches = {worker: worker_batches(job, workload, worker) for worker in job.takers}
        self.updates = [NullPeer() for _ in range(job.cluster.workers)]
        self._activations: dict[int, list[torch.Tensor]] = {}  # convolution worker -> activations per piece
        self._labels: dict[int, list[tuple[torch.Tensor, ...]]] = {}  # the same, for labels
        self._activation_gradients: dict[int, list[torch.Tensor]] = {}  # the same, for the activations' gradients

    def forward(self, worker: int) -> None:
        """Compute the activations of the worker's next batch, piece by piece."""
        with self._below.contexts[worker].in_use():
            pieces = [tensor.tensor_split(self._n_pieces) for tensor in next(self._batches[worker])]
            self._activations[worker] = [self._below.model(x) for x in pieces[0]]
            self._labels[worker] = list(zip(*pieces[1:], strict=True)) or [()] * self._n_pieces

    def compute(self, fc: int) -> float:
        """Compute the gradients of a fully-connected worker and of its activations; return its mean loss."""
        served, n_pieces = self._groups.served(fc), self._n_pieces
        order = [(worker, piece) for piece in range(n_pieces) for worker in served]
        activations = torch.cat([self._activations[worker][piece].detach() for worker, piece in order]).requires_grad_()
        labels = [torch.cat(parts) for parts in zip(*(self._labels[w][piece] for w, piece in order), strict=True)]
        with self._above.contexts[fc].in_use():
            loss = self._replica.compute_in_pieces((activations, *labels), n_pieces, lambda done: False)
        self._above.contribute(fc, self._groups.weight(fc))
        assert activations.grad is not None
        gradients = (self._groups.own_mean(fc, n_pieces) * activations.grad).tensor_split(len(order))
        for (worker, _), gradient in zip(order, gradients, strict=True):
            self._activation_gradients.setdefault(worker, []).append(gradient)
        return loss

    def backward(self, worker: int) -> None:
        """Compute the gradient of a convolution worker from those of its activations."""
        flat = self._below.flat
        flat.zero_gradient()
        with self._below.contexts[worker].in_use():
            for activations, gradient in zip(
                self._activations.pop(worker), self._activation_gradients.pop(worker), strict=True
            ):
                activations.backward(gradient)
        flat.gather_gradient()
        self._below.contribute(worker)

    def step(self, lr: float, *, above: bool) -> None:
        """Apply the step of all workers of one group; `above` selects the fully-connected workers."""
        (self._above if above else self._below).step(lr)

    def evaluate(self) -> tuple[float, float, float]:
        """Return loss and accuracy of the whole model; the consensus distance is 0."""
        weights = nn.utils.parameters_to_vector(self._parameters).detach()
        return (*self._evaluation(weights, self._first_buffers()), 0.0)

    def finish(self) -> None:
        """Set the buffers of the workload's model, which has the weights."""
        self._evaluation.finish(self._first_buffers())

    def _first_buffers(self) -> list[torch.Tensor]:
        """Return the buffers of the whole model, of which each group's first worker has one part."""
        for half in (self._below, self._above):
            next(iter(half.contexts.values())).leave()
        return [self._buffers.packed()]
