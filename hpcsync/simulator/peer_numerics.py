"""Numerics of a run without servers in one process: gradients, local steps and mixing.

Uses the arithmetic of real ranks (`hpcsync.training`), called in the order in which things happen in virtual time. A
model in transit is a copy made when it was sent.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from hpcsync.config.job import Job
from hpcsync.config.paradigms import GossipOptions, LocalSgdOptions
from hpcsync.simulator.compressed_mean import compressed_mean
from hpcsync.simulator.gradients import NEXT, Gradients, Work
from hpcsync.training import compressor
from hpcsync.training.flat_model import FlatModel, trainable
from hpcsync.training.local_update import Mean, Outer, Peer, absorb, average
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.update_rules import Descent
from hpcsync.workloads.registry import Workload

Model = torch.Tensor | None  # flat weights, shape (size,); None where there is no arithmetic


class SentModel(NamedTuple):
    """Model that a worker pushes to another; its tensor belongs to the receiver.

    Parameters
    ----------
    model
        Flat weights, shape (size,), or None without arithmetic.
    weight
        Push-sum weight; 1 without push-sum.
    """

    model: Model
    weight: float


class Evaluable(Protocol):
    """Weights that can be evaluated without being modified."""

    def evaluate(self) -> tuple[float, float, float]:
        """Return loss and accuracy of the mean of the workers' weights, and their consensus distance."""

    def finish(self) -> None:
        """Write the mean of the workers' weights into the workload's model."""


class AllReduceNumerics(Evaluable, Protocol):
    """Numerics of all-reduce, where all workers have the same weights."""

    def contribute(self, worker: int, work: Work = NEXT, weight: float = 1.0) -> float:
        """Compute a worker's gradient.

        Parameters
        ----------
        worker
            Number of the worker.
        work
            Samples to use; the worker's next batch by default.
        weight
            Factor of this gradient in the mean.

        Returns
        -------
        float
            Mean loss of the samples.
        """

    def compress(self, workers: Sequence[int]) -> Sequence[int]:
        """Compress these workers' contributions before a step.

        Returns
        -------
        Sequence[int]
            Bytes that each of these workers contributes; empty if gradients are not compressed.
        """

    def step(self, workers: Sequence[int], lr: float, correction: float = 1.0) -> None:
        """Apply one step of all workers.

        Parameters
        ----------
        workers
            Workers whose gradients form the mean, summed in this order.
        lr
            Learning rate.
        correction
            Factor of the mean gradient.
        """


class ReplicaNumerics(Evaluable, Protocol):
    """Numerics of workers with weights of their own."""

    def learn(self, worker: int, lr: float) -> float:
        """Compute the worker's next gradient and apply its local step; return the mean loss."""

    def average(self, workers: Sequence[int]) -> None:
        """Set all workers' weights to the mean of these workers' weights, or to the result of an outer step.

        The mean is summed in the order of `workers`.
        """

    def snapshot(self, worker: int) -> Model:
        """Return a copy of the worker's weights, as published."""

    def mix(self, worker: int, other: Model) -> None:
        """Set the worker's weights to the average of them and the other model."""

    def push(self, worker: int) -> SentModel:
        """Return the model that the worker sends; under push-sum half of it, and the worker keeps the other half."""

    def arrive(self, worker: int, sent: SentModel) -> None:
        """Add a received model to the worker's inbox."""

    def absorb(self, worker: int, *, drew_itself: bool) -> int:
        """Mix the worker's inbox into its weights.

        Parameters
        ----------
        worker
            Number of the worker.
        drew_itself
            True if the worker drew itself in this round and sent nothing.

        Returns
        -------
        int
            Number of models absorbed.
        """

    def weight(self, worker: int) -> float:
        """Return the worker's push-sum weight."""


class _Inbox:
    """Models received since the worker last absorbed its inbox, summed in order of arrival."""

    __slots__ = ("count", "total", "weight")

    def __init__(self) -> None:
        self.count = 0
        self.total: Model = None
        self.weight = 0.0

    def add(self, sent: SentModel) -> None:
        if self.total is None:
            self.total = sent.model
        elif sent.model is not None:
            self.total.add_(sent.model)
        self.count += 1
        self.weight += sent.weight


# ---- without arithmetic ----


class NullNumerics:
    """No arithmetic: a workload whose vector is only transferred."""

    def evaluate(self) -> tuple[float, float, float]:
        """Raise RuntimeError: there is nothing to evaluate."""
        raise RuntimeError("a workload without arithmetic cannot be evaluated")

    def finish(self) -> None:
        """Do nothing."""


class NullAllReduce(NullNumerics):
    """No arithmetic for all-reduce; compressed gradients have their nominal size."""

    def __init__(self, job: Job, workload: Workload) -> None:
        compression = compressor.of_job(job, trainable(workload.model))
        self._sizes = () if compression is None else (compression.nominal_bytes(compression.whole),)

    def contribute(self, worker: int, work: Work = NEXT, weight: float = 1.0) -> float:
        """Return NaN as the loss."""
        return math.nan

    def compress(self, workers: Sequence[int]) -> Sequence[int]:
        """Return the nominal size of a compressed gradient for each worker."""
        return self._sizes * len(workers)

    def step(self, workers: Sequence[int], lr: float, correction: float = 1.0) -> None:
        """Do nothing."""


class NullReplicas(NullNumerics):
    """No arithmetic for replicas, but received models are counted and push-sum weights are kept."""

    def __init__(self, job: Job) -> None:
        self._push_sum = _push_sum(job)
        self._weights = [1.0] * job.cluster.workers
        self._inboxes = [_Inbox() for _ in range(job.cluster.workers)]

    def learn(self, worker: int, lr: float) -> float:
        """Return NaN as the loss."""
        return math.nan

    def average(self, workers: Sequence[int]) -> None:
        """Do nothing."""

    def snapshot(self, worker: int) -> Model:
        """Return None in place of a model."""
        return None

    def mix(self, worker: int, other: Model) -> None:
        """Do nothing."""

    def push(self, worker: int) -> SentModel:
        """Halve the push-sum weight, if the job has one."""
        if self._push_sum:
            self._weights[worker] *= 0.5
        return SentModel(None, self._weights[worker])

    def arrive(self, worker: int, sent: SentModel) -> None:
        """Count the model and add its weight."""
        self._inboxes[worker].add(sent)

    def absorb(self, worker: int, *, drew_itself: bool) -> int:
        """Add the received push-sum weights; return the number of models."""
        inbox, self._inboxes[worker] = self._inboxes[worker], _Inbox()
        if self._push_sum:
            self._weights[worker] += inbox.weight
        return inbox.count

    def weight(self, worker: int) -> float:
        """Return the worker's push-sum weight."""
        return self._weights[worker]


# ---- with arithmetic ----


class MeanEvaluation:
    """Evaluation of flat weights on a separate copy of the workload's model."""

    def __init__(self, workload: Workload) -> None:
        self._evaluate = workload.evaluate
        self._flat = FlatModel(copy.deepcopy(workload.model))

    def __call__(self, weights: torch.Tensor) -> tuple[float, float]:
        """Return loss and accuracy at these weights."""
        assert self._evaluate is not None
        self._flat.weights.copy_(weights)
        return self._evaluate(self._flat.model)


class OneReplica:
    """Numerics of all-reduce on a single replica.

    All replicas are equal bit for bit, so one represents all of them. It is what a single process would have,
    look-ahead included.
    """

    def __init__(self, job: Job, workload: Workload) -> None:
        self._evaluation = MeanEvaluation(workload)
        self._gradients = Gradients(job, workload)
        start = self._gradients.flat.weights
        self._weights = torch.nn.Parameter(start.clone())
        self._slots = [torch.empty_like(start) for _ in range(job.cluster.workers)]
        self._compressed = compressed_mean(job, self._gradients.flat.parameters)
        self._rule = Descent(OptimizerSpec.of_job(job))
        self._rule.bind(self._weights)

    def contribute(self, worker: int, work: Work = NEXT, weight: float = 1.0) -> float:
        """Compute the worker's gradient into its slot."""
        loss = self._gradients.compute(worker, self._weights.data, work)
        slot = self._slots[worker].copy_(self._gradients.flat.gradient)
        if weight != 1.0:
            slot.mul_(weight)  # a rank scales its gradient before sending it, too
        return loss

    def compress(self, workers: Sequence[int]) -> Sequence[int]:
        """Replace the first slot by the mean of the decoded contributions."""
        if self._compressed is None:
            return ()
        return self._compressed.form(workers, [self._slots[worker] for worker in workers])

    def step(self, workers: Sequence[int], lr: float, correction: float = 1.0) -> None:
        """Apply one step along the mean gradient of these workers."""
        slots = [self._slots[worker] for worker in workers]
        if self._compressed is not None:
            del slots[1:]  # the first holds the mean
        self._rule.update(slots, lr, [1.0] * len(slots), len(slots) / correction)

    def evaluate(self) -> tuple[float, float, float]:
        """Return loss and accuracy; the consensus distance is 0."""
        return (*self._evaluation(self._weights.data), 0.0)

    def finish(self) -> None:
        """Write the weights into the workload's model."""
        self._gradients.finish(self._weights.data)


class Replicas:
    """Numerics of one replica per worker.

    Memory: one row of the flat weights per worker, its optimizer's state, and published models or models in transit.
    """

    def __init__(self, job: Job, workload: Workload) -> None:
        n_workers, spec = job.cluster.workers, OptimizerSpec.of_job(job)
        self._evaluation = MeanEvaluation(workload)
        self._gradients = Gradients(job, workload)
        start = self._gradients.flat.weights
        self._push_sum = _push_sum(job)
        self._weights = [start.clone() for _ in range(n_workers)]
        self._peers = [Peer(weights, spec) for weights in self._weights]
        self._inboxes = [_Inbox() for _ in range(n_workers)]
        self._outer: Outer | None = None
        if isinstance(job.paradigm, LocalSgdOptions):
            # One outer optimizer for all workers: theirs are equal.
            self._outer = Outer(start, job.paradigm.outer_lr, job.paradigm.outer_momentum)

    def learn(self, worker: int, lr: float) -> float:
        """Compute the worker's next gradient and apply its local step."""
        loss = self._gradients.compute(worker, self._weights[worker])
        self._peers[worker].step(self._gradients.flat.gradient, lr)
        return loss

    def average(self, workers: Sequence[int]) -> None:
        """Set all replicas to the mean of these workers' weights, after the outer step."""
        assert self._outer is not None
        mean = self._peers[workers[0]].shown().clone()
        for worker in workers[1:]:
            mean.add_(self._peers[worker].shown())
        if len(workers) > 1:
            mean.div_(len(workers))
        self._outer.step(mean)
        for peer in self._peers:
            with peer.exchanging() as x:
                x.copy_(mean)

    def snapshot(self, worker: int) -> torch.Tensor:
        """Return a copy of the worker's weights."""
        return self._peers[worker].shown().clone()

    def mix(self, worker: int, other: Model) -> None:
        """Average the worker's weights with the other model."""
        assert other is not None
        with self._peers[worker].exchanging() as x:
            average(x, other)

    def push(self, worker: int) -> SentModel:
        """Return the weights, or half of them under push-sum."""
        peer = self._peers[worker]
        if not self._push_sum:
            return SentModel(peer.shown().clone(), 1.0)
        with peer.exchanging() as x:
            x.mul_(0.5)
            peer.weight *= 0.5
            return SentModel(x.clone(), peer.weight)

    def arrive(self, worker: int, sent: SentModel) -> None:
        """Add the model to the worker's inbox."""
        self._inboxes[worker].add(sent)

    def absorb(self, worker: int, *, drew_itself: bool) -> int:
        """Mix the inbox into the worker's weights; an empty inbox leaves them unchanged bit for bit."""
        inbox = self._inboxes[worker]
        if inbox.total is None:
            return 0
        self._inboxes[worker] = _Inbox()
        peer = self._peers[worker]
        with peer.exchanging() as x:
            if self._push_sum:
                x.add_(inbox.total)
                peer.weight += inbox.weight
            else:
                absorb(x, inbox.total, inbox.count, drew_itself=drew_itself)
        return inbox.count

    def weight(self, worker: int) -> float:
        """Return the worker's push-sum weight."""
        return self._peers[worker].weight

    def evaluate(self) -> tuple[float, float, float]:
        """Return loss and accuracy of the mean weights, and the consensus distance."""
        mean = self._mean()
        return (*self._evaluation(mean.values), mean.distance)

    def finish(self) -> None:
        """Write the mean weights into the workload's model."""
        self._gradients.finish(self._mean().values)

    def _mean(self) -> Mean:
        mean = Mean(torch.empty_like(self._weights[0]))
        for peer in self._peers:
            mean.add(peer.shown(), peer.weight)
        return mean


def _push_sum(job: Job) -> bool:
    return isinstance(job.paradigm, GossipOptions) and job.paradigm.mode == "push-sum"


def all_reduce_numerics(job: Job, workload: Workload) -> AllReduceNumerics:
    """Return the numerics of an all-reduce job."""
    return NullAllReduce(job, workload) if workload.loss is None else OneReplica(job, workload)


def replica_numerics(job: Job, workload: Workload) -> ReplicaNumerics:
    """Return the numerics of a job whose workers have weights of their own."""
    return NullReplicas(job) if workload.loss is None else Replicas(job, workload)
