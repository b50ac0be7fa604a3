"""A worker's side of the arithmetic: the gradient of one batch, at the weights it was given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hpcsync.learning.flat import FlatModel

Loss = Callable[..., torch.Tensor]


def worker_seed(seed: int, worker: int) -> int:
    """What a worker's torch generator starts from: what a model draws, for dropout say, follows from the job's seed and
    differs between workers."""
    return int(np.random.SeedSequence([seed, 3, worker]).generate_state(1)[0])


class Replica:
    """A model that computes gradients into one contiguous buffer, and does not know who communicates them.

    loss: `loss(model, *batch)` gives the mean loss of the batch as a scalar tensor; None does no arithmetic at all
    (the `timing` workload), and then the gradient stays as it is.
    """

    def __init__(self, flat: FlatModel, loss: Loss | None) -> None:
        self._flat = flat
        self._loss = loss

    def compute(self, batch: Sequence[torch.Tensor]) -> float:
        """Leave the batch's mean gradient in the flat gradient; return its mean loss (NaN without arithmetic)."""
        if self._loss is None:
            return math.nan
        self._flat.zero_gradient()
        device = self._flat.weights.device
        loss = self._loss(self._flat.model, *(x.to(device) if isinstance(x, torch.Tensor) else x for x in batch))
        loss.backward()
        self._flat.gather_gradient()
        return float(loss.detach())
