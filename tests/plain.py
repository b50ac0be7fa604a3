"""What plain PyTorch makes of a job, in one process and with no part of hpcsync's servers and means."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from hpcsync.job import Job
from hpcsync.learning.data import batch_indices, sequence_indices
from hpcsync.learning.validation import check
from hpcsync.learning.workloads import Workload


def on_batches(job: Job, steps: Iterable[Iterable[int]]) -> np.ndarray:
    """The weights after one step on each of these groups of batches together."""
    workload = check(job)
    shape = {"batch_size": job.workload.batch_size, "size": len(workload.train)}
    return _trained(
        job, workload, (np.concatenate([batch_indices(job.seed, j, **shape) for j in numbers]) for numbers in steps)
    )


def on_samples(job: Job, steps: Iterable[np.ndarray]) -> np.ndarray:
    """The weights after one step on each of these groups of samples of the run's sequence together."""
    workload = check(job)
    return _trained(job, workload, (sequence(job, numbers, len(workload.train)) for numbers in steps))


def sequence(job: Job, numbers: np.ndarray, size: int) -> np.ndarray:
    """Which samples of a data set of this size these ones of the run's sequence are."""
    return sequence_indices(job.seed, 0, int(numbers.max()) + 1, size=size)[numbers]


def whole_batches(job: Job, iterations: int) -> list[np.ndarray]:
    """The samples of the run's sequence that all workers take together, iteration by iteration."""
    return list(np.arange(job.batch_total * iterations).reshape(iterations, -1))


def _trained(job: Job, workload: Workload, steps: Iterable[np.ndarray]) -> np.ndarray:
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=job.optimizer.lr, **job.optimizer.options)
    assert workload.loss is not None
    for indices in steps:
        at = torch.from_numpy(indices)
        optimizer.zero_grad()
        workload.loss(workload.model, *(tensor[at] for tensor in workload.train.tensors)).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in workload.model.parameters()]).numpy()
