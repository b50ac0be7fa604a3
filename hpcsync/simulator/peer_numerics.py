"""What the workers of a run without servers compute, in one process: gradients, their own steps, and the mixing.

It is the arithmetic of real ranks (`learning`), asked for in the order in which things happen in virtual time. A model
that is under way is a copy, made when it was sent.
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
    """What a worker pushes to another. Its tensor is the receiver's to change. weight: of push-sum; else 1."""

    model: Model
    weight: float


class Judged(Protocol):
    """Weights that can be looked at, without being touched."""

    def evaluate(self) -> tuple[float, float, float]:
        """Loss and accuracy of the mean of the workers' weights, and their consensus distance."""

    def finish(self) -> None:
        """Leave the mean of the workers' weights in the workload's model."""


class Together(Judged, Protocol):
    """The numbers of all-reduce: all workers have the same weights."""

    def contribute(self, worker: int, work: Work = NEXT, weight: float = 1.0) -> float:
        """Compute the worker's gradient of this batch, which counts `weight` times in the mean; its mean loss."""

    def compress(self, workers: Sequence[int]) -> Sequence[int]:
        """Let these workers compress what they have contributed, before a step. The bytes that each of them gives the
        others; none where gradients travel as they are."""

    def step(self, workers: Sequence[int], lr: float, correction: float = 1.0) -> None:
        """All workers' step from the mean gradient of these, summed in this order, times the correction."""


class Apart(Judged, Protocol):
    """The numbers of workers that have weights of their own."""

    def learn(self, worker: int, lr: float) -> float:
        """The worker's next gradient, and its own step along it; the mean loss."""

    def average(self, workers: Sequence[int]) -> None:
        """Everybody gets the mean of these workers' weights, summed in this order, or where an outer step leads."""

    def shown(self, worker: int) -> Model:
        """What others may see of the worker's weights: a copy."""

    def mix(self, worker: int, other: Model) -> None:
        """The worker's weights become half of them and half of the other's."""

    def push(self, worker: int) -> SentModel:
        """What the worker sends away. Under push-sum half of what it has, and it keeps the other half."""

    def arrive(self, worker: int, sent: SentModel) -> None:
        """A parcel for the worker has come."""

    def absorb(self, worker: int, *, drew_itself: bool) -> int:
        """Mix what has come into the worker's weights; how many parcels that were."""

    def weight(self, worker: int) -> float:
        """Its push-sum weight."""


class _Inbox:
    """Parcels that have come since a worker looked last, added up as they came."""

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


class Nothing:
    """Of a workload whose vector only travels."""

    def evaluate(self) -> tuple[float, float, float]:
        raise RuntimeError("a workload without arithmetic cannot be evaluated")

    def finish(self) -> None: ...


class NothingTogether(Nothing):
    """Compressed gradients take what they take as a rule."""

    def __init__(self, job: Job, workload: Workload) -> None:
        compression = compressor.of_job(job, trainable(workload.model))
        self._sizes = () if compression is None else (compression.nominal_bytes(compression.whole),)

    def contribute(self, worker: int, work: Work = NEXT, weight: float = 1.0) -> float:
        return math.nan

    def compress(self, workers: Sequence[int]) -> Sequence[int]:
        return self._sizes * len(workers)

    def step(self, workers: Sequence[int], lr: float, correction: float = 1.0) -> None: ...


class NothingApart(Nothing):
    """Parcels are counted and weighed all the same."""

    def __init__(self, job: Job) -> None:
        self._push_sum = _push_sum(job)
        self._weights = [1.0] * job.cluster.workers
        self._inboxes = [_Inbox() for _ in range(job.cluster.workers)]

    def learn(self, worker: int, lr: float) -> float:
        return math.nan

    def average(self, workers: Sequence[int]) -> None: ...

    def shown(self, worker: int) -> Model:
        return None

    def mix(self, worker: int, other: Model) -> None: ...

    def push(self, worker: int) -> SentModel:
        if self._push_sum:
            self._weights[worker] *= 0.5
        return SentModel(None, self._weights[worker])

    def arrive(self, worker: int, sent: SentModel) -> None:
        self._inboxes[worker].add(sent)

    def absorb(self, worker: int, *, drew_itself: bool) -> int:
        inbox, self._inboxes[worker] = self._inboxes[worker], _Inbox()
        if self._push_sum:
            self._weights[worker] += inbox.weight
        return inbox.count

    def weight(self, worker: int) -> float:
        return self._weights[worker]


# ---- with it ----


class MeanEvaluation:
    """The workload's evaluation, on a model of its own."""

    def __init__(self, workload: Workload) -> None:
        self._evaluate = workload.evaluate
        self._flat = FlatModel(copy.deepcopy(workload.model))

    def __call__(self, weights: torch.Tensor) -> tuple[float, float]:
        assert self._evaluate is not None
        self._flat.weights.copy_(weights)
        return self._evaluate(self._flat.model)


class OneReplica:
    """The replicas of all-reduce are equal, bit for bit, so that one stands for all of them. They are what a single
    process would have, look-ahead included."""

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
        loss = self._gradients.compute(worker, self._weights.data, work)
        slot = self._slots[worker].copy_(self._gradients.flat.gradient)
        if weight != 1.0:
            slot.mul_(weight)  # as a rank does before it gives it away
        return loss

    def compress(self, workers: Sequence[int]) -> Sequence[int]:
        if self._compressed is None:
            return ()
        return self._compressed.form(workers, [self._slots[worker] for worker in workers])

    def step(self, workers: Sequence[int], lr: float, correction: float = 1.0) -> None:
        slots = [self._slots[worker] for worker in workers]
        if self._compressed is not None:
            del slots[1:]  # the first holds the mean
        self._rule.update(slots, lr, [1.0] * len(slots), len(slots) / correction)

    def evaluate(self) -> tuple[float, float, float]:
        return (*self._evaluation(self._weights.data), 0.0)

    def finish(self) -> None:
        self._gradients.finish(self._weights.data)


class Replicas:
    """Memory: a row of the flat weights for each worker, what its optimizer has, and what is shown or under way."""

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
            self._outer = Outer(
                start, job.paradigm.outer_lr, job.paradigm.outer_momentum
            )  # everybody's, they are equal

    def learn(self, worker: int, lr: float) -> float:
        loss = self._gradients.compute(worker, self._weights[worker])
        self._peers[worker].step(self._gradients.flat.gradient, lr)
        return loss

    def average(self, workers: Sequence[int]) -> None:
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

    def shown(self, worker: int) -> torch.Tensor:
        return self._peers[worker].shown().clone()

    def mix(self, worker: int, other: Model) -> None:
        assert other is not None
        with self._peers[worker].exchanging() as x:
            average(x, other)

    def push(self, worker: int) -> SentModel:
        peer = self._peers[worker]
        if not self._push_sum:
            return SentModel(peer.shown().clone(), 1.0)
        with peer.exchanging() as x:
            x.mul_(0.5)
            peer.weight *= 0.5
            return SentModel(x.clone(), peer.weight)

    def arrive(self, worker: int, sent: SentModel) -> None:
        self._inboxes[worker].add(sent)

    def absorb(self, worker: int, *, drew_itself: bool) -> int:
        """Where nothing has come the weights stay as they are, bit for bit."""
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
        return self._peers[worker].weight

    def evaluate(self) -> tuple[float, float, float]:
        mean = self._mean()
        return (*self._evaluation(mean.values), mean.distance)

    def finish(self) -> None:
        self._gradients.finish(self._mean().values)

    def _mean(self) -> Mean:
        mean = Mean(torch.empty_like(self._weights[0]))
        for peer in self._peers:
            mean.add(peer.shown(), peer.weight)
        return mean


def _push_sum(job: Job) -> bool:
    return isinstance(job.paradigm, GossipOptions) and job.paradigm.mode == "push-sum"


def together(job: Job, workload: Workload) -> Together:
    """The arithmetic of this all-reduce job, whose workload is `workload`."""
    return NothingTogether(job, workload) if workload.loss is None else OneReplica(job, workload)


def apart(job: Job, workload: Workload) -> Apart:
    """The arithmetic of this job, whose workers have weights of their own."""
    return NothingApart(job) if workload.loss is None else Replicas(job, workload)
