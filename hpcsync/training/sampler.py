"""The samples that each worker uses in each iteration.

With equal batches they are a pure function of seed, worker and iteration. Batches are numbered consecutively: batch j
of the run is batch j mod B of training epoch j div B, where B is the number of whole batches in the data set, and each
training epoch is a random permutation of its own (without a seed, the samples in their own order). Iteration i (from
1) of worker w of P takes batch (i - 1) P + w. The i-th iterations of all workers are therefore the next P batches of
one sequence under every paradigm, and under BSP they are what one process would use with a batch P times as large.

With allocated batches the samples are one endless sequence of training epochs, each a permutation as above and without
a remainder. The next worker to start takes as many of the next samples as its batch has: every sample of a training
epoch is used once, by whichever worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate


# The workers of a simulation are in many training epochs at once; a rank is in one or two.
@lru_cache(maxsize=64)
def _permutation(seed: int | None, training_epoch: int, size: int) -> np.ndarray:
    if seed is None:
        return np.arange(size)
    # The 0 separates this stream from others of the same seed. A trailing zero would not: [seed, 2] is [seed, 2, 0].
    return np.random.default_rng([seed, 0, training_epoch]).permutation(size)


def whole_batches(batch_size: int, size: int) -> int:
    """Return the batches in a training epoch of `size` samples. Raises ValueError if there is none."""
    if not 1 <= batch_size <= size:
        raise ValueError(f"batch_size = {batch_size}: must be 1 to {size}, the samples of the data set")
    return size // batch_size


def batch_indices(seed: int | None, batch: int, *, batch_size: int, size: int) -> np.ndarray:
    """Return the sample indices of a batch.

    Parameters
    ----------
    seed
        The job's seed; None: the samples in their own order.
    batch
        Number of the batch in the run, from 0.
    batch_size
        Samples of a batch.
    size
        Samples of the data set.

    Returns
    -------
    numpy.ndarray
        Indices, shape (batch_size,).

    Raises
    ------
    ValueError
        If the data set is smaller than one batch.
    """
    training_epoch, k = divmod(batch, whole_batches(batch_size, size))
    return _permutation(seed, training_epoch, size)[k * batch_size : (k + 1) * batch_size]


def sequence_indices(seed: int | None, first: int, n_samples: int, *, size: int) -> np.ndarray:
    """Return the sample indices at consecutive positions of the run's endless sequence.

    Parameters
    ----------
    seed
        The job's seed; None: the samples in their own order.
    first
        Position of the first sample, from 0.
    n_samples
        Number of samples.
    size
        Samples of the data set.

    Returns
    -------
    numpy.ndarray
        Indices, shape (n_samples,).
    """
    found, end = [], first + n_samples
    while first < end:
        training_epoch, at = divmod(first, size)
        found.append(_permutation(seed, training_epoch, size)[at : at + end - first])
        first += len(found[-1])
    return np.concatenate(found)


def fetch(dataset: Dataset[Any], indices: np.ndarray) -> Any:
    """Return the batch of these samples.

    It is a tuple of tensors for a TensorDataset, and otherwise the result of PyTorch's `default_collate`.
    """
    if isinstance(dataset, TensorDataset):
        at = torch.from_numpy(indices)
        return tuple(tensor[at] for tensor in dataset.tensors)
    if hasattr(dataset, "__getitems__"):
        return default_collate(dataset.__getitems__(indices.tolist()))
    return default_collate([dataset[i] for i in indices.tolist()])


def n_batches(worker: int, *, n_workers: int, batch_size: int, size: int, epochs: range) -> int:
    """Return the number of batches of these training epochs that belong to a worker."""
    per_epoch = whole_batches(batch_size, size)
    begin, end = epochs.start * per_epoch, epochs.stop * per_epoch
    return len(range(begin + (worker - begin) % n_workers, end, n_workers))


def batches(
    dataset: Dataset[Any], seed: int, worker: int, *, n_workers: int, batch_size: int, epochs: range
) -> Iterator[Any]:
    """Yield a worker's batches of some training epochs in order. Together the workers use every batch once.

    Parameters
    ----------
    dataset
        Map-style data set.
    seed
        The job's seed.
    worker, n_workers
        The worker, and the number of workers.
    batch_size
        Samples of a batch.
    epochs
        The training epochs.

    Raises
    ------
    ValueError
        If the data set is smaller than one batch.
    """
    size = len(dataset)  # type: ignore[arg-type]
    per_epoch = whole_batches(batch_size, size)
    begin = epochs.start * per_epoch
    first_of_mine = begin + (worker - begin) % n_workers
    for batch in range(first_of_mine, epochs.stop * per_epoch, n_workers):
        yield fetch(dataset, batch_indices(seed, batch, batch_size=batch_size, size=size))
