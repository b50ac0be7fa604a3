"""The gradients of all workers, computed in one process."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from hpcsync.config.job import Job, Script
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.gradient import Replica, worker_seed
from hpcsync.training.sampler import batches, fetch, sequence_indices
from hpcsync.workloads.registry import Workload


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
        assert workload.train is not None
        n_workers = job.cluster.workers
        self.flat = FlatModel(workload.model)
        self._dataset, self._seed = workload.train, job.seed
        self._replica = Replica(self.flat, workload.loss)
        self._own = [Own(workload.model, job.seed, worker) for worker in range(n_workers)]
        self._batches = [own_batches(job, workload, worker) for worker in range(n_workers)]

    def compute(self, worker: int, weights: torch.Tensor, work: Work = NEXT) -> float:
        """The gradient of the worker's next batch at these weights, into the flat gradient; its mean loss."""
        self.flat.weights.copy_(weights)
        share = work.share
        with self._own[worker].in_use():  # a data set may draw too
            return self._replica.compute_in_pieces(self._take(worker, work), work.n_pieces, lambda done: done >= share)

    def _take(self, worker: int, work: Work) -> Any:
        if work.first_sample < 0:
            return next(self._batches[worker])
        size = len(self._dataset)  # type: ignore[arg-type]
        return fetch(self._dataset, sequence_indices(self._seed, work.first_sample, work.n_samples, size=size))

    def finish(self, weights: torch.Tensor) -> None:
        """Leave these weights in the workload's model. Running statistics end as worker 0's, as on real ranks."""
        self.flat.weights.copy_(weights)
        self._own[0].leave()


def own_batches(job: Job, workload: Workload, worker: int) -> Iterator[Any]:
    """Those of one of the workers that take batches: one after the other, without end."""
    assert not isinstance(job.workload, Script) and workload.train is not None
    takers, size, epochs = job.takers, job.workload.batch_size, range(sys.maxsize)
    number = takers.index(worker)
    return batches(workload.train, job.seed, number, n_workers=len(takers), batch_size=size, epochs=epochs)


class Own:
    """What a worker has for itself where one model stands for every worker's: generator and running statistics."""

    def __init__(self, model: nn.Module, seed: int, worker: int) -> None:
        self._model = model
        self._generator = torch.Generator().manual_seed(worker_seed(seed, worker)).get_state()
        clones: dict[int, torch.Tensor] = {}
        self._statistics = {name: clones.setdefault(id(b), b.clone()) for name, b in _buffers(model).items()}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The model is this worker's: its own tensors are the model's buffers, not copies of them, which would change
        under a backward pass that another worker has yet to make."""
        torch.set_rng_state(self._generator)
        others = _buffers(self._model)
        _put(self._statistics, self._model)
        yield
        self._statistics = _buffers(self._model)  # a forward pass may put new tensors in their places
        _put(others, self._model)
        self._generator = torch.get_rng_state()

    def leave(self) -> None:
        """Leave the worker's running statistics in the model."""
        for name, buffer in _buffers(self._model).items():
            buffer.copy_(self._statistics[name])


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers(remove_duplicate=False))


def _put(buffers: dict[str, torch.Tensor], model: nn.Module) -> None:
    for name, buffer in buffers.items():
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, buffer)
