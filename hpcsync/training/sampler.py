"""Which samples a worker uses in which iteration.

Where all batches are alike that is a pure function of seed, worker and iteration. Batches are numbered through: batch j
of the run is batch j mod B of training epoch j div B, where B is the number of whole batches in the data set, and every
training epoch is its own random permutation. Iteration i (the first is 1) of worker w of P takes batch (i - 1) P + w.
So the workers' i-th iterations together are the next P batches of one sequence, whichever paradigm runs, and in BSP
they are what one process would use with a batch P times as large.

Where batch sizes change, the samples are one endless sequence, training epoch after training epoch, each a permutation
as above and without a remainder. Whoever is to compute next is handed the next ones, as many as its batch has: every
sample of a training epoch is used once, whoever takes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate


# Workers of a simulation are in many training epochs at once; those of a rank are in one or two.
@lru_cache(maxsize=64)
def _permutation(seed: int, training_epoch: int, size: int) -> np.ndarray:
    # The 0 tells this stream from others of the same seed: trailing zeros do not, [seed, 2] is [seed, 2, 0].
    return np.random.default_rng([seed, 0, training_epoch]).permutation(size)


def whole_batches(batch_size: int, size: int) -> int:
    """Batches in a training epoch of `size` samples. Raises ValueError when there is not even one."""
    if not 1 <= batch_size <= size:
        raise ValueError(f"batch_size = {batch_size}: must be 1 to {size}, the samples of the data set")
    return size // batch_size


def batch_indices(seed: int, batch: int, *, batch_size: int, size: int) -> np.ndarray:
    """Indices, shape (batch_size,), of batch number `batch` (from 0) of a data set of `size` samples.

    Raises ValueError when the data set is smaller than one batch.
    """
    training_epoch, k = divmod(batch, whole_batches(batch_size, size))
    return _permutation(seed, training_epoch, size)[k * batch_size : (k + 1) * batch_size]


def sequence_indices(seed: int, first: int, n_samples: int, *, size: int) -> np.ndarray:
    """Indices, shape (n_samples,), of the run's samples from number `first` (from 0) on, of a data set of `size`."""
    found, end = [], first + n_samples
    while first < end:
        training_epoch, at = divmod(first, size)
        found.append(_permutation(seed, training_epoch, size)[at : at + end - first])
        first += len(found[-1])
    return np.concatenate(found)


def fetch(dataset: Dataset[Any], indices: np.ndarray) -> Any:
    """The batch of these samples: a tuple of tensors for a TensorDataset, else what PyTorch's default collation makes
    of them."""
    if isinstance(dataset, TensorDataset):
        at = torch.from_numpy(indices)
        return tuple(tensor[at] for tensor in dataset.tensors)
    return default_collate([dataset[int(i)] for i in indices])


def n_batches(worker: int, *, n_workers: int, batch_size: int, size: int, epochs: range) -> int:
    """How many batches of these training epochs are the worker's."""
    per_epoch = whole_batches(batch_size, size)
    begin, end = epochs.start * per_epoch, epochs.stop * per_epoch
    return max(0, -(-(end - begin - (worker - begin) % n_workers) // n_workers))


def batches(
    dataset: Dataset[Any], seed: int, worker: int, *, n_workers: int, batch_size: int, epochs: range, skip: int = 0
) -> Iterator[Any]:
    """The worker's batches of these training epochs in order, but for the first `skip` ones. Together the workers use
    every batch of them once.

    Raises ValueError when the data set is smaller than one batch.
    """
    size = len(dataset)  # type: ignore[arg-type]
    per_epoch = whole_batches(batch_size, size)
    begin = epochs.start * per_epoch
    first_of_mine = begin + (worker - begin) % n_workers
    for batch in range(first_of_mine + skip * n_workers, epochs.stop * per_epoch, n_workers):
        yield fetch(dataset, batch_indices(seed, batch, batch_size=batch_size, size=size))
