"""The gradient of one batch at a worker's current weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hpcsync.training.flat_model import FlatModel

Loss = Callable[..., torch.Tensor]


def worker_seed(seed: int, worker: int) -> int:
    """Return the seed of a worker's torch generator.

    Random draws of a model (dropout, for instance) then follow from the job's seed and differ between workers.
    """
    return int(np.random.SeedSequence([seed, 3, worker]).generate_state(1)[0])


def piece_shares(n_samples: int, n_pieces: int) -> list[float]:
    """Return the cumulative share of a batch's samples after each of its micro-batches.

    The `n_pieces` micro-batches are as equal as possible; there are fewer if the batch has fewer samples.
    """
    n_pieces = min(n_pieces, n_samples)
    size, n_larger = divmod(n_samples, n_pieces)
    return [(piece * size + min(piece, n_larger)) / n_samples for piece in range(1, n_pieces + 1)]


class Replica:
    """A model that computes gradients into one contiguous buffer, independent of their communication.

    Parameters
    ----------
    flat
        The model.
    loss
        `loss(model, *batch)` returns the mean loss of the batch as a scalar tensor. None does no arithmetic (workload
        `timing`) and leaves the gradient unchanged.
    """

    def __init__(self, flat: FlatModel, loss: Loss | None) -> None:
        self._flat = flat
        self._loss = loss
        self._depends = False  # whether a loss has been seen to depend on the parameters

    def compute(self, batch: Sequence[torch.Tensor]) -> float:
        """Write the batch's mean gradient to the flat gradient; return its mean loss (NaN without arithmetic)."""
        return self.compute_in_pieces(batch, 1, lambda share: False)

    def compute_in_pieces(
        self, batch: Sequence[torch.Tensor], n_pieces: int, cancelled: Callable[[float], bool]
    ) -> float:
        """Compute the same in micro-batches, one after the other.

        Parameters
        ----------
        batch
            Tensors, which are split along the first dimension.
        n_pieces
            Number of micro-batches.
        cancelled
            Called after every micro-batch but the last with the share of samples computed so far; True stops there.

        Returns
        -------
        float
            Mean loss of the samples computed.
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
        here = (x.to(device, non_blocking=True) if isinstance(x, torch.Tensor) else x for x in batch)
        loss = self._loss(self._flat.model, *here)
        if self._depends:
            loss.backward()
        else:
            self._first_backward(loss)
        self._flat.gather_gradient()
        return float(loss.detach())

    def _first_backward(self, loss: torch.Tensor) -> None:
        """Compute the first gradient.

        Raises
        ------
        RuntimeError
            If no parameter has one, as torch does for a loss that requires no gradient.
        """
        reached: list[torch.Tensor] = []
        hook = torch.autograd.graph.register_multi_grad_hook(self._flat.parameters, reached.append, mode="any")
        loss.backward()
        hook.remove()
        if not reached:
            raise RuntimeError("the loss depends on none of the model's parameters that are trained")
        self._depends = True
