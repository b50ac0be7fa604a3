"""What all ranks of a run compute, in one process: the workers' gradients and the servers' updates.

It is the arithmetic of real ranks (`learning`), on the versions that they would have read: a promised version stays in
the store as it was until its reader's gradient has been computed from it. One store stands for the shards of all
servers, whose number changes no bit.
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


class Contributed(NamedTuple):
    """A contribution's mean loss, and the bytes of it that go to each server; () if it is cancelled."""

    loss: float
    sizes_bytes: Sequence[int]


class Sent:
    """What becomes of a contribution on its way: all workers' compressors, where the job has any.

    parameters: of the model.
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
        """To each server, as a rule."""
        if self._compression is None:
            return self._dense
        return [self._compression.nominal_bytes(shard, ratio) for shard in self._shards]

    def put(self, worker: int, vector: torch.Tensor, slot: torch.Tensor, ratio: float) -> Sequence[int]:
        """Into the slot, shape (size,), what arrives of the vector; the bytes that each server was sent."""
        if self._compression is None:
            slot.copy_(vector)
            return self._dense
        payloads = self._compressors[worker].encode(vector, self._shards, ratio)
        for shard, payload in zip(self._shards, payloads, strict=True):
            self._compression.decode(payload, slot[shard], shard)
        return [payload.nbytes for payload in payloads]


class Arithmetic(Protocol):
    """The numbers of a run, in the order in which the simulation asks for them."""

    def promise(self, worker: int) -> None:
        """The version that is current now is the one that the worker reads before its next contribution."""

    def join(self, worker: int) -> None:
        """The same of a worker that had left, and joins again."""

    def contribute(self, worker: int, work: Work) -> Contributed:
        """Compute the worker's next contribution, of all its local steps, into its slot; not if it is cancelled."""

    def accumulate(self, accumulation: AccumulateCommand) -> None:
        """Carry out a collection."""

    def apply(self, update: UpdateCommand) -> None:
        """Carry out an update."""

    def evaluate(self) -> tuple[float, float]:
        """Loss and accuracy of the current version."""

    def finish(self) -> None:
        """Leave the final weights in the workload's model."""


class NoArithmetic:
    """Of a workload whose vector only travels: nothing to compute, and nothing to keep. What a compressed one takes is
    what it takes as a rule."""

    def __init__(self, job: Job, workload: Workload) -> None:
        self._sent = Sent(job, trainable(workload.model))

    def promise(self, worker: int) -> None: ...

    def join(self, worker: int) -> None: ...

    def contribute(self, worker: int, work: Work) -> Contributed:
        return Contributed(math.nan, self._sent.nominal_bytes(work.ratio) if work.share == 1.0 else ())

    def accumulate(self, accumulation: AccumulateCommand) -> None: ...

    def apply(self, update: UpdateCommand) -> None: ...

    def evaluate(self) -> tuple[float, float]:
        raise RuntimeError("a workload without arithmetic cannot be evaluated")

    def finish(self) -> None: ...


class RealArithmetic:
    """Every gradient and every update. Memory: at most two rows of the flat weights for each worker."""

    def __init__(self, job: Job, workload: Workload) -> None:
        n_workers = job.cluster.workers
        self._evaluate = workload.evaluate
        self._evaluated = FlatModel(copy.deepcopy(workload.model))
        self._gradients = Gradients(job, workload)
        self._flat = self._gradients.flat
        size = self._flat.size
        self._sent = Sent(job, self._flat.parameters)
        buffers, slots = _rows(n_buffers(n_workers), self._flat.weights), _rows(n_workers, self._flat.weights)
        self._versions, self._slots = [list(rows[:, :size]) for rows in (buffers, slots)]  # made once: views cost time
        self._versions[0].copy_(self._flat.weights)
        rule = update_rules.of_job(job, OptimizerSpec.of_job(job))
        self._store = Store(buffers, slots, np.zeros(n_workers + 1, np.int64), rule, size)
        self._promised = [self._versions[0]] * n_workers  # worker -> the version it reads

    def promise(self, worker: int) -> None:
        buffer, _ = self._store.pin(worker)
        self._promised[worker] = self._versions[buffer]

    def join(self, worker: int) -> None:
        self.promise(worker)

    def contribute(self, worker: int, work: Work) -> Contributed:
        loss = self._gradients.compute(worker, self._promised[worker], work)
        if work.share == 1.0:
            return Contributed(loss, self._sent.put(worker, self._flat.gradient, self._slots[worker], work.ratio))
        return Contributed(loss, ())

    def accumulate(self, accumulation: AccumulateCommand) -> None:
        self._store.accumulate(accumulation.worker, accumulation.weight)

    def apply(self, update: UpdateCommand) -> None:
        self._store.apply(update.workers, update.lr, update.weights, update.divisor)

    def evaluate(self) -> tuple[float, float]:
        assert self._evaluate is not None
        self._evaluated.weights.copy_(self._store.weights)
        return self._evaluate(self._evaluated.model)

    def finish(self) -> None:
        self._gradients.finish(self._store.weights)


class LocalStepsArithmetic(RealArithmetic):
    """Workers with optimizers of their own, which make several steps for a contribution."""

    def __init__(self, job: Job, workload: Workload) -> None:
        super().__init__(job, workload)
        self._rate = worker_rate(job)
        spec = OptimizerSpec.of_job(job)
        self._trainees = [_Trainee(self._flat.weights, spec) for _ in range(job.cluster.workers)]

    def contribute(self, worker: int, work: Work) -> Contributed:
        trainee, total = self._trainees[worker], 0.0
        self._begin(worker)
        for step in range(work.n_steps):
            if step > 0:
                trainee.step(self._flat.gradient)
            total += self._gradients.compute(worker, trainee.weights, work.of_step(step))
            trainee.count(work.n_samples // work.n_steps, self._rate)
        sizes_bytes = self._sent.put(worker, self._end(worker), self._slots[worker], work.ratio)
        return Contributed(total / work.n_steps, sizes_bytes)

    def _begin(self, worker: int) -> None:
        """Before the worker's first step."""

    @abstractmethod
    def _end(self, worker: int) -> torch.Tensor:
        """The last gradient is there; what the worker contributes, without look-ahead."""


class ElasticArithmetic(LocalStepsArithmetic):
    """Workers that move towards the store's weights, as those do towards theirs.

    Nobody reads later what is promised now: a worker moves in the moment of its grant. Its last gradient waits for that
    move, as does the worker. Memory: three rows of the flat weights for each worker, and what its optimizer has.
    """

    def __init__(self, job: Job, workload: Workload) -> None:
        super().__init__(job, workload)
        assert isinstance(job.paradigm, EasgdOptions)
        self._alpha = job.paradigm.moving_rate(job.cluster.workers)
        self._centre = torch.empty_like(self._flat.weights)
        self._last = [torch.empty_like(self._flat.weights) for _ in self._trainees]  # worker -> its last gradient

    def promise(self, worker: int) -> None:
        trainee = self._trainees[worker]
        if trainee.steps == 0:
            return  # it begins where the centre is
        self._centre.copy_(self._store.weights)
        trainee.weights.add_(towards(trainee.weights, self._centre, self._alpha))
        trainee.optimizer.look_ahead()
        trainee.step(self._last[worker])

    def join(self, worker: int) -> None:
        """It begins where the centre is. What it remembers, momentum for one, is its own."""
        trainee = self._trainees[worker]
        trainee.weights.copy_(self._store.weights)
        trainee.optimizer.look_ahead()

    def _end(self, worker: int) -> torch.Tensor:
        trainee = self._trainees[worker]
        self._last[worker].copy_(self._flat.gradient)
        trainee.optimizer.drop_look_ahead()
        return trainee.weights


class CommittingArithmetic(LocalStepsArithmetic):
    """Workers that go on from what they read and give by how much their steps have changed it. Memory: three rows of
    the flat weights for each worker, and what its optimizer has."""

    def __init__(self, job: Job, workload: Workload) -> None:
        super().__init__(job, workload)
        self._change = torch.empty_like(self._flat.weights)

    def _begin(self, worker: int) -> None:
        trainee = self._trainees[worker]
        trainee.weights.copy_(self._promised[worker])
        trainee.optimizer.look_ahead()

    def _end(self, worker: int) -> torch.Tensor:
        trainee = self._trainees[worker]
        trainee.step(self._flat.gradient)
        trainee.optimizer.drop_look_ahead()
        return torch.sub(trainee.weights, self._promised[worker], out=self._change)


class _Trainee:
    """A worker's own weights. steps, samples: of gradients computed; rate: of the step along the last of them."""

    def __init__(self, weights: torch.Tensor, spec: OptimizerSpec) -> None:
        self.weights = weights.clone()
        self.optimizer = LocalOptimizer(self.weights, spec)
        self.steps = self.samples = 0
        self.rate = 0.0

    def count(self, n_samples: int, rate: Callable[[int, int], float]) -> None:
        """A gradient of so many samples has been computed."""
        self.rate = rate(self.samples, self.steps)
        self.steps += 1
        self.samples += n_samples

    def step(self, gradient: torch.Tensor) -> None:
        self.optimizer.step(gradient, self.rate)


def _rows(n: int, like: torch.Tensor) -> torch.Tensor:
    """Zeros, shape (n, row_size). NumPy's cost no memory until they are written, most versions never are."""
    return torch.from_numpy(np.zeros((n, row_size(len(like))), like.numpy().dtype))


def arithmetic(job: Job, workload: Workload) -> Arithmetic:
    """The arithmetic of this job, whose workload is `workload`."""
    if workload.loss is None:
        return NoArithmetic(job, workload)
    if job.commits:
        return CommittingArithmetic(job, workload)
    return (ElasticArithmetic if isinstance(job.paradigm, EasgdOptions) else RealArithmetic)(job, workload)
