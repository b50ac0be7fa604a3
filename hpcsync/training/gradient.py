"""A worker's side of the arithmetic: the gradient of one batch, at the weights it was given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hpcsync.training.flat_model import FlatModel

Loss = Callable[..., torch.Tensor]


def worker_seed(seed: int, worker: int) -> int:
    """What a worker's torch generator starts from: what a model draws, for dropout say, follows from the job's seed and
    differs between workers."""
    return int(np.random.SeedSequence([seed, 3, worker]).generate_state(1)[0])


def piece_shares(n_samples: int, n_pieces: int) -> list[float]:
    """Of a batch that is computed in so many pieces, as equal as can be and none of them empty: the share of its
    samples that is done after each of them."""
    n_pieces = min(n_pieces, n_samples)
    size, n_larger = divmod(n_samples, n_pieces)
    return [(piece * size + min(piece, n_larger)) / n_samples for piece in range(1, n_pieces + 1)]


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
        return self.compute_in_pieces(batch, 1, lambda share: False)

    def compute_in_pieces(
        self, batch: Sequence[torch.Tensor], n_pieces: int, cancelled: Callable[[float], bool]
    ) -> float:
        """The same from so many micro-batches, one after the other; their tensors are split along the first dimension.

        cancelled: asked after each of them but the last, with the share of the samples that is done, whether to stop
        there. The loss is then the mean of what is done.
        """
        if self._loss is None:
            any(cancelled(piece / n_pieces) for piece in range(1, n_pieces))
            return math.nan
        if n_pieces == 1:
            return self._compute(batch)
        n_samples, loss = len(batch[0]), 0.0
        shares = piece_shares(n_samples, n_pieces)
        gradient = torch.zeros_like(self._flat.gradient)  # a sum of its own: a loss may clear the model's
        for piece, done in zip(zip(*(x.tensor_split(len(shares)) for x in batch), strict=True), shares, strict=True):
            share = len(piece[0]) / n_samples
            loss += share * self._compute(piece)
            gradient.add_(self._flat.gradient, alpha=share)
            if done < 1.0 and cancelled(done):
                break
        self._flat.gradient.copy_(gradient)
        return loss / done

    def _compute(self, batch: Sequence[torch.Tensor]) -> float:
        assert self._loss is not None
        device = self._flat.weights.device
        self._flat.zero_gradient()
        loss = self._loss(self._flat.model, *(x.to(device) if isinstance(x, torch.Tensor) else x for x in batch))
        loss.backward()
        self._flat.gather_gradient()
        return float(loss.detach())
