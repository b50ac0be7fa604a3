"""What all ranks of a run compute, in one process: the workers' gradients and the servers' updates.

It is the arithmetic of real ranks (`learning`), on the versions that they would have read: a promised version stays in
the store as it was until its reader's gradient has been computed from it. One store stands for the shards of all
servers, whose number changes no bit.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from hpcsync.coordinator import Update
from hpcsync.job import Job, Script
from hpcsync.learning.data import batches
from hpcsync.learning.flat import FlatModel
from hpcsync.learning.optimizers import OptimizerSpec
from hpcsync.learning.replica import Replica, worker_seed
from hpcsync.learning.store import Store, n_buffers, row_size
from hpcsync.learning.workloads import Workload


class Arithmetic(Protocol):
    """The numbers of a run, in the order in which the simulation asks for them."""

    def promise(self, worker: int) -> None:
        """The worker's next gradient is to be computed from the version that is current now."""

    def contribute(self, worker: int) -> float:
        """Compute the worker's next gradient into its slot; its mean loss."""

    def apply(self, update: Update) -> None:
        """Carry out an update."""

    def evaluate(self) -> tuple[float, float]:
        """Loss and accuracy of the current version."""

    def finish(self) -> None:
        """Leave the final weights in the workload's model."""


class NoArithmetic:
    """Of a workload whose vector only travels: nothing to compute, and nothing to keep."""

    def promise(self, worker: int) -> None: ...

    def contribute(self, worker: int) -> float:
        return math.nan

    def apply(self, update: Update) -> None: ...

    def evaluate(self) -> tuple[float, float]:
        raise RuntimeError("a workload without arithmetic cannot be evaluated")

    def finish(self) -> None: ...


class RealArithmetic:
    """Every gradient and every update. Memory: at most two rows of the flat weights for each worker."""

    def __init__(self, job: Job, workload: Workload) -> None:
        n_workers, seed = job.cluster.workers, job.seed
        assert not isinstance(job.workload, Script) and workload.train is not None
        self._evaluate = workload.evaluate
        self._evaluated = FlatModel(copy.deepcopy(workload.model))
        self._flat = FlatModel(workload.model)
        self._replica = Replica(self._flat, workload.loss)
        size = self._flat.size
        buffers, slots = _rows(n_buffers(n_workers), self._flat.weights), _rows(n_workers, self._flat.weights)
        self._versions, self._slots = [list(rows[:, :size]) for rows in (buffers, slots)]  # made once: views cost time
        self._versions[0].copy_(self._flat.weights)
        self._store = Store(buffers, slots, np.zeros(n_workers + 1, np.int64), OptimizerSpec.of_job(job), size)
        self._promised = [self._versions[0]] * n_workers  # worker -> the version it reads
        self._own = [_Own(workload, job, worker, seed) for worker in range(n_workers)]

    def promise(self, worker: int) -> None:
        buffer, _ = self._store.pin(worker)
        self._promised[worker] = self._versions[buffer]

    def contribute(self, worker: int) -> float:
        own = self._own[worker]
        self._flat.weights.copy_(self._promised[worker])
        torch.set_rng_state(own.generator)
        if own.statistics:
            _copy(own.statistics, self._flat.model.buffers())
        loss = self._replica.compute(next(own.batches))
        if own.statistics:
            _copy(self._flat.model.buffers(), own.statistics)
        own.generator = torch.get_rng_state()
        self._slots[worker].copy_(self._flat.gradient)
        return loss

    def apply(self, update: Update) -> None:
        self._store.apply(update.workers, update.lr)

    def evaluate(self) -> tuple[float, float]:
        assert self._evaluate is not None
        self._evaluated.weights.copy_(self._store.weights)
        return self._evaluate(self._evaluated.model)

    def finish(self) -> None:
        """Running statistics end as worker 0's, as on real ranks."""
        self._flat.weights.copy_(self._store.weights)
        _copy(self._own[0].statistics, self._flat.model.buffers())


class _Own:
    """What a worker has for itself: its batches, its generator, its running statistics."""

    def __init__(self, workload: Workload, job: Job, worker: int, seed: int) -> None:
        assert not isinstance(job.workload, Script) and workload.train is not None
        self.batches: Iterator[Any] = batches(
            workload.train,
            seed,
            worker,
            n_workers=job.cluster.workers,
            batch_size=job.workload.batch_size,
            epochs=range(sys.maxsize),
        )
        self.generator = torch.Generator().manual_seed(worker_seed(seed, worker)).get_state()
        self.statistics = [buffer.clone() for buffer in workload.model.buffers()]


def _rows(n: int, like: torch.Tensor) -> torch.Tensor:
    """Zeros, shape (n, row_size). NumPy's cost no memory until they are written, most versions never are."""
    return torch.from_numpy(np.zeros((n, row_size(len(like))), like.numpy().dtype))


def _copy(source: Iterable[torch.Tensor], target: Iterable[torch.Tensor]) -> None:
    """Of a model's buffers only the names last: a forward pass may put new tensors in their places."""
    for a, b in zip(source, target, strict=True):
        b.copy_(a)


def arithmetic(job: Job, workload: Workload) -> Arithmetic:
    """The arithmetic of this job, whose workload is `workload`."""
    return NoArithmetic() if workload.loss is None else RealArithmetic(job, workload)
