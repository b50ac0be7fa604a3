"""The gradients of all workers, computed in one process."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from hpcsync.job import Job, Script
from hpcsync.learning.data import batches, fetch, sequence_indices
from hpcsync.learning.flat import FlatModel
from hpcsync.learning.replica import Replica, worker_seed
from hpcsync.learning.workloads import Workload


class Work(NamedTuple):
    """What to compute a gradient from.

    first_sample, n_samples: of the run's sequence of samples; -1 for the next batch in the order of batches that are
    alike. share: of its samples, which is done in `n_pieces` pieces. n_steps: the worker's own, which n_samples are for
    together. ratio: of the contribution's elements that is sent.
    """

    first_sample: int = -1
    n_samples: int = 0
    n_pieces: int = 1
    share: float = 1.0
    n_steps: int = 1
    ratio: float = math.nan

    def of_step(self, step: int) -> Work:
        """What one of its steps computes, from 0 on."""
        n_samples = self.n_samples // self.n_steps
        return Work(-1 if self.first_sample < 0 else self.first_sample + step * n_samples, n_samples)


NEXT = Work()


class Gradients:
    """One model that stands for every worker's, in turn. flat: of the workload's own model."""

    def __init__(self, job: Job, workload: Workload) -> None:
        self.flat = FlatModel(workload.model)
        self._replica = Replica(self.flat, workload.loss)
        self._own = [_Own(workload, job, worker) for worker in range(job.cluster.workers)]

    def compute(self, worker: int, weights: torch.Tensor, work: Work = NEXT) -> float:
        """The gradient of the worker's next batch at these weights, into the flat gradient; its mean loss."""
        own = self._own[worker]
        self.flat.weights.copy_(weights)
        torch.set_rng_state(own.generator)
        if own.statistics:
            _copy(own.statistics, self.flat.model.buffers())
        share = work.share
        loss = self._replica.compute_in_pieces(own.take(work), work.n_pieces, lambda done: done >= share)
        if own.statistics:
            _copy(self.flat.model.buffers(), own.statistics)
        own.generator = torch.get_rng_state()
        return loss

    def finish(self, weights: torch.Tensor) -> None:
        """Leave these weights in the workload's model. Running statistics end as worker 0's, as on real ranks."""
        self.flat.weights.copy_(weights)
        _copy(self._own[0].statistics, self.flat.model.buffers())


class _Own:
    """What a worker has for itself: its batches, its generator, its running statistics."""

    def __init__(self, workload: Workload, job: Job, worker: int) -> None:
        assert not isinstance(job.workload, Script) and workload.train is not None
        self._dataset, self._seed = workload.train, job.seed
        self._batches: Iterator[Any] = batches(
            workload.train,
            job.seed,
            worker,
            n_workers=job.cluster.workers,
            batch_size=job.workload.batch_size,
            epochs=range(sys.maxsize),
        )
        self.generator = torch.Generator().manual_seed(worker_seed(job.seed, worker)).get_state()
        self.statistics = [buffer.clone() for buffer in workload.model.buffers()]

    def take(self, work: Work) -> Any:
        if work.first_sample < 0:
            return next(self._batches)
        size = len(self._dataset)  # type: ignore[arg-type]
        return fetch(self._dataset, sequence_indices(self._seed, work.first_sample, work.n_samples, size=size))


def _copy(source: Iterable[torch.Tensor], target: Iterable[torch.Tensor]) -> None:
    """Of a model's buffers only the names last: a forward pass may put new tensors in their places."""
    for a, b in zip(source, target, strict=True):
        b.copy_(a)
