"""Which samples a worker uses in which iteration: a pure function of seed, worker and iteration.

Batches are numbered through: batch j of the run is batch j mod B of training epoch j div B, where B is the number of
whole batches in the data set, and every training epoch is its own random permutation. Iteration i (the first is 1) of
worker w of P takes batch (i - 1) P + w. So the workers' i-th iterations together are the next P batches of one
sequence, whichever paradigm runs, and in BSP they are what one process would use with a batch P times as large.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate


@lru_cache(maxsize=2)
def _permutation(seed: int, training_epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, training_epoch]).permutation(size)


def batch_indices(seed: int, batch: int, *, batch_size: int, size: int) -> np.ndarray:
    """Indices, shape (batch_size,), of batch number `batch` (from 0) of a data set of `size` samples.

    Raises ValueError when the data set is smaller than one batch.
    """
    per_epoch = size // batch_size
    if per_epoch == 0:
        raise ValueError(f"batch_size = {batch_size}: must be at most the {size} samples of the data set")
    training_epoch, k = divmod(batch, per_epoch)
    return _permutation(seed, training_epoch, size)[k * batch_size : (k + 1) * batch_size]


def fetch(dataset: Dataset[Any], indices: np.ndarray) -> Any:
    """The batch of these samples: a tuple of tensors for a TensorDataset, else what PyTorch's default collation gives."""
    if isinstance(dataset, TensorDataset):
        at = torch.from_numpy(indices)
        return tuple(tensor[at] for tensor in dataset.tensors)
    return default_collate([dataset[int(i)] for i in indices])


def batches(
    dataset: Dataset[Any], seed: int, worker: int, *, n_workers: int, batch_size: int, epochs: range | None
) -> Iterator[Any]:
    """The worker's batches of these training epochs in order; None is all there are, without end.

    Together the workers use every batch of the training epochs once.
    """
    size = len(dataset)  # type: ignore[arg-type]
    per_epoch = size // batch_size
    numbers = itertools.count() if epochs is None else range(epochs.start * per_epoch, epochs.stop * per_epoch)
    for batch in numbers:
        if batch % n_workers == worker:
            yield fetch(dataset, batch_indices(seed, batch, batch_size=batch_size, size=size))
