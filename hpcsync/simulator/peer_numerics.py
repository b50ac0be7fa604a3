"""Numerics of a run without servers in one process: gradients, local steps and mixing.

Uses the arithmetic of real ranks (`hpcsync.training`), called in the order in which things happen in virtual time. A
model in transit is a copy made when it was sent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from hpcsync.config.job import Job
from hpcsync.core.peer_machine import create_method
from hpcsync.simulator.compressed_mean import compressed_mean
from hpcsync.simulator.evaluation import Evaluation
from hpcsync.simulator.gradients import NEXT, Gradients, Work
from hpcsync.simulator.peer_transfers import replica_bytes
from hpcsync.training import compressor
from hpcsync.training.flat_model import squared_norm, trainable
from hpcsync.training.local_update import Mean, NullPeer, Outer, Peer, PushSumPeer
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.update_rules import Descent
from hpcsync.workloads.registry import Workload

Model = torch.Tensor | None  # flat weights, shape (size,); None where there is no arithmetic


def copied(model: Model) -> Model:
    """Return a copy of a model, as it is now."""
    return None if model is None else model.clone()


class NullNumerics:
    """No arithmetic, whatever the exchange: vectors are only transferred; compressed ones have their nominal size."""

    def __init__(self, job: Job, workload: Workload) -> None:
        parameters = trainable(workload.model)
        compression = compressor.of_job(job, parameters)
        self._sizes = () if compression is None else (compression.nominal_bytes(compression.whole),)
        n_bytes, push_sum = replica_bytes(workload), create_method(job).push_sum
        self.updates = [NullPeer(n_bytes, push_sum=push_sum) for _ in range(job.cluster.workers)]

    gradient = None
    gradient_sq = mean_gradient_sq = math.nan

    def compute(self, worker: int, *work: Any) -> float:
        """Return NaN as the loss."""
        return math.nan

    def compress(self, workers: Sequence[int]) -> Sequence[int]:
        """Return the nominal size of a compressed gradient for each worker."""
        return self._sizes * len(workers)

    def evaluate(self) -> tuple[float, float, float]:
        """Raise RuntimeError: there is nothing to evaluate."""
        raise RuntimeError("a workload without arithmetic cannot be evaluated")

    def _nothing(self, *of_any_kind: Any, **options: Any) -> None:
        """Do nothing; None takes the place of a model."""

    mean = step = forward = backward = finish = _nothing


class _Trained(ABC):
    """Gradients of all workers, and evaluations of the mean of their weights.

    Attributes
    ----------
    updates
        The workers' weights; where all workers have one model these are placeholders.
    gradient_sq, mean_gradient_sq
        Squared norms of the gradient computed last, and of the mean gradient of the latest common step; NaN: not
        measured, or there is none.
    """

    updates: Sequence[Any]
    gradient_sq = mean_gradient_sq = math.nan

    def __init__(self, job: Job, workload: Workload) -> None:
        self._evaluation = Evaluation(job, workload)
        self._gradients = Gradients(job, workload)

    @abstractmethod
    def _mean(self) -> tuple[torch.Tensor, float]:
        """Return the mean of the workers' weights, shape (size,), and their consensus distance."""

    def evaluate(self) -> tuple[float, float, float]:
        """Return loss and accuracy of the mean weights, and the consensus distance."""
        mean, distance = self._mean()
        return (*self._evaluation(mean, self._gradients.all_buffers()), distance)

    def finish(self) -> None:
        """Write the mean weights, and buffers, into the workload's model."""
        self._gradients.flat.weights.copy_(self._mean()[0])
        self._evaluation.finish(self._gradients.all_buffers())


class OneReplica(_Trained):
    """Numerics of all-reduce on a single replica.

    All replicas are equal bit for bit, so one represents all of them. It is what a single process would have,
    look-ahead included.
    """

    def __init__(self, job: Job, workload: Workload) -> None:
        super().__init__(job, workload)
        start = self._gradients.flat.weights
        self._weights = torch.nn.Parameter(start.clone())
        self._slots = [torch.empty_like(start) for _ in range(job.cluster.workers)]
        self._compressed = compressed_mean(job, self._gradients.flat.parameters)
        self._rule = Descent(OptimizerSpec.of_job(job).on_server)
        self._rule.bind(self._weights)
        self.updates = [NullPeer() for _ in self._slots]

    def compute(self, worker: int, work: Work = NEXT, weight: float = 1.0) -> float:
        """Compute the worker's gradient, times its weight in the mean, into its slot; return the mean loss."""
        loss = self._gradients.compute(worker, self._weights.data, work)
        self.gradient_sq = squared_norm(self._gradients.flat.gradient)
        slot = self._slots[worker].copy_(self._gradients.flat.gradient)
        if weight != 1.0:
            slot.mul_(weight)  # a rank scales its gradient before sending it, too
        return loss

    def compress(self, workers: Sequence[int]) -> Sequence[int]:
        """Replace the first slot by the mean of the decoded contributions; return the bytes of each worker, if any."""
        if self._compressed is None:
            return ()
        return self._compressed.form(workers, [self._slots[worker] for worker in workers])

    def step(self, workers: Sequence[int], lr: float, correction: float = 1.0) -> None:
        """Apply one step along the mean gradient of these workers, summed in this order and then multiplied."""
        slots = [self._slots[worker] for worker in workers]
        if self._compressed is not None:
            del slots[1:]  # the first holds the mean
        self.mean_gradient_sq = float(self._rule.update(slots, lr, [1.0] * len(slots), len(slots) / correction))

    def _mean(self) -> tuple[torch.Tensor, float]:
        return self._weights.data, 0.0


class Replicas(_Trained):
    """Numerics of one replica per worker.

    Memory: one row of the flat weights per worker, its optimizer's state, and published models or models in transit.
    """

    def __init__(self, job: Job, workload: Workload) -> None:
        super().__init__(job, workload)
        spec = OptimizerSpec.of_job(job)
        start = self._gradients.flat.weights
        self._weights = [start.clone() for _ in range(job.cluster.workers)]
        method = create_method(job)
        peer = PushSumPeer if method.push_sum else Peer
        self.updates = [peer(weights, spec.on_worker(weights)) for weights in self._weights]
        # One outer optimizer for all workers: theirs are equal.
        self._outer = None if method.outer is None else Outer(start, **method.outer)

    def compute(self, worker: int) -> float:
        """Compute the worker's next gradient; return the mean loss."""
        loss = self._gradients.compute(worker, self._weights[worker])
        self.gradient_sq = squared_norm(self.gradient)
        return loss

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient computed last, until the next one is."""
        return self._gradients.flat.gradient

    def step(self, worker: int, lr: float, gradient: Model = None) -> None:
        """Apply the worker's local step; by default along the gradient computed last."""
        self.updates[worker].step(self.gradient if gradient is None else gradient, lr)

    def mean(self, workers: Sequence[int]) -> torch.Tensor:
        """Return the mean of these workers' weights, summed in this order, after the outer step."""
        assert self._outer is not None
        mean = self.updates[workers[0]].shown().clone()
        for worker in workers[1:]:
            mean.add_(self.updates[worker].shown())
        if len(workers) > 1:
            mean.div_(len(workers))
        self._outer.step(mean)
        return mean

    def _mean(self) -> tuple[torch.Tensor, float]:
        mean = Mean(torch.empty_like(self._weights[0]))
        for peer in self.updates:
            mean.add(peer.shown(), peer.weight)
        return mean.values, mean.distance
