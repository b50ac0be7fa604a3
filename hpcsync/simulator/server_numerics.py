"""Numerics of a run with servers in one process: the workers' gradients and the servers' updates.

Uses the arithmetic of real ranks (`hpcsync.training`) on the versions that they would have read: a granted version
stays unchanged in the store until its reader's gradient has been computed from it. One store represents the shards of
all servers, because the number of servers changes no bit.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from hpcsync.config.job import Job
from hpcsync.config.paradigms import EasgdOptions
from hpcsync.core.coordinator import AccumulateCommand, UpdateCommand
from hpcsync.core.roles import Roles
from hpcsync.simulator.gradients import Gradients, Work
from hpcsync.training import compressor, update_rules
from hpcsync.training.flat_model import FlatModel, trainable
from hpcsync.training.local_update import LocalOptimizer
from hpcsync.training.lr_schedule import worker_rate
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.parameter_store import Store, n_buffers, row_size
from hpcsync.training.update_rules import towards
from hpcsync.workloads.registry import Workload


class Contribution(NamedTuple):
    """Result of a worker's computation.

    Parameters
    ----------
    loss
        Mean loss.
    sizes_bytes
        Bytes sent to each server, shape (n_servers,); empty if the contribution was cancelled.
    """

    loss: float
    sizes_bytes: Sequence[int]


class ContributionEncoder:
    """Encoding of contributions on their way to the servers, with the compressors of all workers.

    Parameters
    ----------
    job
        Job with servers.
    parameters
        Parameters of the model.
    """

    def __init__(self, job: Job, parameters: Sequence[torch.nn.Parameter]) -> None:
        size = sum(p.numel() for p in parameters)
        self._shards = Roles(job.cluster.servers, job.cluster.workers).shards(size)
        self._dense = [(shard.stop - shard.start) * parameters[0].element_size() for shard in self._shards]
        self._compression = compressor.of_job(job, parameters)
        self._compressors = []
        if self._compression is not None:
            self._compressors = [self._compression.compressor(worker) for worker in range(job.cluster.workers)]

    def nominal_bytes(self, ratio: float) -> Sequence[int]:
        """Return the nominal number of bytes sent to each server."""
        if self._compression is None:
            return self._dense
        return [self._compression.nominal_bytes(shard, ratio) for shard in self._shards]

    def put(self, worker: int, vector: torch.Tensor, slot: torch.Tensor, ratio: float) -> Sequence[int]:
        """Write a contribution into a slot as the servers receive it.

        Parameters
        ----------
        worker
            Number of the worker.
        vector
            Contribution, shape (size,).
        slot
            Output, shape (size,); the decoded vector if the job compresses.
        ratio
            Share of the elements that is sent; NaN for the codec's own.

        Returns
        -------
        Sequence[int]
            Bytes sent to each server.
        """
        if self._compression is None:
            slot.copy_(vector)
            return self._dense
        payloads = self._compressors[worker].encode(vector, self._shards, ratio)
        for shard, payload in zip(self._shards, payloads, strict=True):
            self._compression.decode(payload, slot[shard], shard)
        return [payload.nbytes for payload in payloads]


class Arithmetic(Protocol):
    """Numerics of a run with servers, in the order in which the simulation calls them."""

    def grant(self, worker: int) -> None:
        """Let the worker read the current version before its next contribution."""

    def join(self, worker: int) -> None:
        """Let a worker that has joined again read the current version."""

    def contribute(self, worker: int, work: Work) -> Contribution:
        """Compute the worker's next contribution, of all its local steps, into its slot; skip the slot if cancelled."""

    def accumulate(self, accumulation: AccumulateCommand) -> None:
        """Carry out an accumulate command."""

    def apply(self, update: UpdateCommand) -> None:
        """Carry out an update command."""

    def evaluate(self) -> tuple[float, float]:
        """Return loss and accuracy of the current version."""

    def finish(self) -> None:
        """Write the final weights into the workload's model."""


class NoArithmetic:
    """No arithmetic: a workload whose vector is only transferred; compressed contributions have their nominal size."""

    def __init__(self, job: Job, workload: Workload) -> None:
        self._encoder = ContributionEncoder(job, trainable(workload.model))

    def grant(self, worker: int) -> None:
        """Do nothing."""

    def join(self, worker: int) -> None:
        """Do nothing."""

    def contribute(self, worker: int, work: Work) -> Contribution:
        """Return NaN as the loss, and the nominal sizes."""
        return Contribution(math.nan, self._encoder.nominal_bytes(work.ratio) if work.share == 1.0 else ())

    def accumulate(self, accumulation: AccumulateCommand) -> None:
        """Do nothing."""

    def apply(self, update: UpdateCommand) -> None:
        """Do nothing."""

    def evaluate(self) -> tuple[float, float]:
        """Raise RuntimeError: there is nothing to evaluate."""
        raise RuntimeError("a workload without arithmetic cannot be evaluated")

    def finish(self) -> None:
        """Do nothing."""


class RealArithmetic:
    """Every gradient and every update. Memory: at most two rows of the flat weights per worker."""

    def __init__(self, job: Job, workload: Workload) -> None:
        n_workers = job.cluster.workers
        self._evaluate = workload.evaluate
        self._evaluated = FlatModel(copy.deepcopy(workload.model))
        self._gradients = Gradients(job, workload)
        self._flat = self._gradients.flat
        size = self._flat.size
        self._encoder = ContributionEncoder(job, self._flat.parameters)
        buffers, slots = _rows(n_buffers(n_workers), self._flat.weights), _rows(n_workers, self._flat.weights)
        # Views, created once because creating them takes time.
        self._versions, self._slots = [list(rows[:, :size]) for rows in (buffers, slots)]
        self._versions[0].copy_(self._flat.weights)
        rule = update_rules.of_job(job, OptimizerSpec.of_job(job))
        self._store = Store(buffers, slots, np.zeros(n_workers + 1, np.int64), rule, size)
        self._granted = [self._versions[0]] * n_workers  # worker -> the version it reads

    def grant(self, worker: int) -> None:
        """Pin the current version for the worker."""
        buffer, _ = self._store.pin(worker)
        self._granted[worker] = self._versions[buffer]

    def join(self, worker: int) -> None:
        """Pin the current version for the worker."""
        self.grant(worker)

    def contribute(self, worker: int, work: Work) -> Contribution:
        """Compute a gradient from the granted version into the worker's slot."""
        loss = self._gradients.compute(worker, self._granted[worker], work)
        if work.share == 1.0:
            return Contribution(loss, self._encoder.put(worker, self._flat.gradient, self._slots[worker], work.ratio))
        return Contribution(loss, ())

    def accumulate(self, accumulation: AccumulateCommand) -> None:
        """Add the worker's slot to the accumulated contributions."""
        self._store.accumulate(accumulation.worker, accumulation.weight)

    def apply(self, update: UpdateCommand) -> None:
        """Apply an update to the store."""
        self._store.apply(update.workers, update.lr, update.weights, update.divisor)

    def evaluate(self) -> tuple[float, float]:
        """Return loss and accuracy of the current version."""
        assert self._evaluate is not None
        self._evaluated.weights.copy_(self._store.weights)
        return self._evaluate(self._evaluated.model)

    def finish(self) -> None:
        """Write the current version into the workload's model."""
        self._gradients.finish(self._store.weights)


class LocalStepsArithmetic(RealArithmetic):
    """Workers with optimizers of their own, which make several steps per contribution."""

    def __init__(self, job: Job, workload: Workload) -> None:
        super().__init__(job, workload)
        self._rate = worker_rate(job)
        spec = OptimizerSpec.of_job(job)
        self._local_workers = [_LocalWorker(self._flat.weights, spec) for _ in range(job.cluster.workers)]

    def contribute(self, worker: int, work: Work) -> Contribution:
        """Compute the worker's local steps and its contribution."""
        local, total = self._local_workers[worker], 0.0
        self._begin(worker)
        for step in range(work.n_steps):
            if step > 0:
                local.step(self._flat.gradient)
            total += self._gradients.compute(worker, local.weights, work.of_step(step))
            local.count(work.n_samples // work.n_steps, self._rate)
        sizes_bytes = self._encoder.put(worker, self._end(worker), self._slots[worker], work.ratio)
        return Contribution(total / work.n_steps, sizes_bytes)

    def _begin(self, worker: int) -> None:
        """Prepare the worker's first step."""

    @abstractmethod
    def _end(self, worker: int) -> torch.Tensor:
        """Return the worker's contribution after its last gradient, without look-ahead."""


class ElasticArithmetic(LocalStepsArithmetic):
    """Elastic averaging: workers move towards the store's weights and the store towards theirs.

    A granted version is not read later: the worker moves at the moment of its grant. Its last gradient waits for that
    move, as does the worker. Memory: three rows of the flat weights per worker, and its optimizer's state.
    """

    def __init__(self, job: Job, workload: Workload) -> None:
        super().__init__(job, workload)
        assert isinstance(job.paradigm, EasgdOptions)
        self._alpha = job.paradigm.moving_rate(job.cluster.workers)
        self._centre = torch.empty_like(self._flat.weights)
        self._last = [torch.empty_like(self._flat.weights) for _ in self._local_workers]  # worker -> its last gradient

    def grant(self, worker: int) -> None:
        """Move the worker towards the centre and apply its last gradient; do nothing before its first step."""
        local = self._local_workers[worker]
        if local.steps == 0:
            return  # before its first step it is at the centre
        self._centre.copy_(self._store.weights)
        local.weights.add_(towards(local.weights, self._centre, self._alpha))
        local.optimizer.look_ahead()
        local.step(self._last[worker])

    def join(self, worker: int) -> None:
        """Start the worker at the centre; its optimizer keeps its state, such as momentum."""
        local = self._local_workers[worker]
        local.weights.copy_(self._store.weights)
        local.optimizer.look_ahead()

    def _end(self, worker: int) -> torch.Tensor:
        local = self._local_workers[worker]
        self._last[worker].copy_(self._flat.gradient)
        local.optimizer.drop_look_ahead()
        return local.weights


class CommittingArithmetic(LocalStepsArithmetic):
    """Workers that start from the version they read and contribute the change made by their local steps.

    Memory: three rows of the flat weights per worker, and its optimizer's state.
    """

    def __init__(self, job: Job, workload: Workload) -> None:
        super().__init__(job, workload)
        self._change = torch.empty_like(self._flat.weights)

    def _begin(self, worker: int) -> None:
        local = self._local_workers[worker]
        local.weights.copy_(self._granted[worker])
        local.optimizer.look_ahead()

    def _end(self, worker: int) -> torch.Tensor:
        local = self._local_workers[worker]
        local.step(self._flat.gradient)
        local.optimizer.drop_look_ahead()
        return torch.sub(local.weights, self._granted[worker], out=self._change)


class _LocalWorker:
    """Weights and optimizer of one worker.

    Attributes
    ----------
    steps, samples
        Number of gradients computed, and of their samples.
    rate
        Learning rate of the step along the last gradient.
    """

    def __init__(self, weights: torch.Tensor, spec: OptimizerSpec) -> None:
        self.weights = weights.clone()
        self.optimizer = LocalOptimizer(self.weights, spec)
        self.steps = self.samples = 0
        self.rate = 0.0

    def count(self, n_samples: int, rate: Callable[[int, int], float]) -> None:
        """Count a computed gradient of `n_samples` samples."""
        self.rate = rate(self.samples, self.steps)
        self.steps += 1
        self.samples += n_samples

    def step(self, gradient: torch.Tensor) -> None:
        self.optimizer.step(gradient, self.rate)


def _rows(n: int, like: torch.Tensor) -> torch.Tensor:
    """Return zeros of shape (n, row_size); NumPy's use no memory until written, and most versions never are."""
    return torch.from_numpy(np.zeros((n, row_size(len(like))), like.numpy().dtype))


def arithmetic(job: Job, workload: Workload) -> Arithmetic:
    """Return the numerics of a job with servers."""
    if workload.loss is None:
        return NoArithmetic(job, workload)
    if job.commits:
        return CommittingArithmetic(job, workload)
    return (ElasticArithmetic if isinstance(job.paradigm, EasgdOptions) else RealArithmetic)(job, workload)
