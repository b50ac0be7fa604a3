"""Gradients of all workers, computed in one process."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from hpcsync.config.job import Job, Script
from hpcsync.training.buffers import Buffers
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.gradient import Replica, worker_seed
from hpcsync.training.sampler import batches, fetch, sequence_indices
from hpcsync.workloads.registry import Workload


class Work(NamedTuple):
    """Samples from which a gradient is computed.

    Parameters
    ----------
    first_sample
        Index of the first sample in the run's sequence; -1 takes the next batch of the worker's sampler.
    n_samples
        Number of samples of all steps together.
    n_pieces
        Number of micro-batches.
    share
        Share of the samples that is computed; below 1 if the work was cancelled.
    n_steps
        Number of local steps.
    ratio
        Share of the contribution's elements that is sent; NaN for the codec's own.
    """

    first_sample: int = -1
    n_samples: int = 0
    n_pieces: int = 1
    share: float = 1.0
    n_steps: int = 1
    ratio: float = math.nan

    def of_step(self, step: int) -> Work:
        """Return the work of one local step, counted from 0."""
        n_samples = self.n_samples // self.n_steps
        return Work(-1 if self.first_sample < 0 else self.first_sample + step * n_samples, n_samples)


NEXT = Work()


class Gradients:
    """Gradients of all workers, computed in turn on one model.

    Attributes
    ----------
    flat
        Flat view of the workload's model; `compute` writes the gradient into its gradient buffer.
    """

    def __init__(self, job: Job, workload: Workload) -> None:
        assert workload.train is not None
        n_workers = job.cluster.workers
        self.flat = FlatModel(workload.model)
        self._dataset, self._seed = workload.train, job.seed
        self._buffers = Buffers(workload.model)
        self._replica = Replica(self.flat, workload.loss)
        self._contexts = [WorkerContext(workload.model, job.seed, worker) for worker in range(n_workers)]
        self._batches = [worker_batches(job, workload, worker) for worker in range(n_workers)]

    def compute(self, worker: int, weights: torch.Tensor, work: Work = NEXT) -> float:
        """Compute a worker's gradient into the flat gradient buffer.

        Parameters
        ----------
        worker
            Number of the worker.
        weights
            Flat weights, shape (size,).
        work
            Samples to use; the worker's next batch by default.

        Returns
        -------
        float
            Mean loss of the samples.
        """
        self.flat.weights.copy_(weights)
        share = work.share
        with self._contexts[worker].in_use():  # data sets may draw random numbers too
            return self._replica.compute_in_pieces(self._take(worker, work), work.n_pieces, lambda done: done >= share)

    def _take(self, worker: int, work: Work) -> Any:
        if work.first_sample < 0:
            return next(self._batches[worker])
        size = len(self._dataset)  # type: ignore[arg-type]
        return fetch(self._dataset, sequence_indices(self._seed, work.first_sample, work.n_samples, size=size))

    def buffers(self, worker: int) -> torch.Tensor:
        """Return a copy of a worker's buffers, shape (n_words,)."""
        return self._buffers.packed(self._contexts[worker].buffers)

    def all_buffers(self) -> list[torch.Tensor]:
        """Return the buffers of all workers."""
        return [self.buffers(worker) for worker in range(len(self._contexts))] if self.has_buffers else []

    @property
    def has_buffers(self) -> bool:
        """Whether the model has buffers."""
        return self._buffers.n_words > 0


def worker_batches(job: Job, workload: Workload, worker: int) -> Iterator[Any]:
    """Yield a worker's batches without end, for workers that have samples of their own."""
    assert not isinstance(job.workload, Script) and workload.train is not None
    takers, size, epochs = job.takers, job.workload.batch_size, range(sys.maxsize)
    number = takers.index(worker)
    return batches(workload.train, job.seed, number, n_workers=len(takers), batch_size=size, epochs=epochs)


class WorkerContext:
    """Random generator and buffers of one worker, where one model serves all workers."""

    def __init__(self, model: nn.Module, seed: int, worker: int) -> None:
        self._model = model
        self._generator = torch.Generator().manual_seed(worker_seed(seed, worker)).get_state()
        clones: dict[int, torch.Tensor] = {}
        self.buffers = {name: clones.setdefault(id(b), b.clone()) for name, b in _buffers(model).items()}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Install the worker's generator and buffers.

        The worker's own tensors become the model's buffers. Copies into shared buffers would modify tensors that
        another worker's pending backward pass needs.
        """
        torch.set_rng_state(self._generator)
        others = _buffers(self._model)
        _put(self.buffers, self._model)
        yield
        self.buffers = _buffers(self._model)  # a forward pass may replace the tensors

        _put(others, self._model)
        self._generator = torch.get_rng_state()

    def leave(self) -> None:
        """Copy the worker's buffers into the model."""
        for name, buffer in _buffers(self._model).items():
            buffer.copy_(self.buffers[name])


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers(remove_duplicate=False))


def _put(buffers: dict[str, torch.Tensor], model: nn.Module) -> None:
    for name, buffer in buffers.items():
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, buffer)
