"""A worker's side of the arithmetic: the gradient of one batch, at the weights it was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hpcsync.learning.flat import FlatModel

Loss = Callable[..., torch.Tensor]


class Replica:
    """A model that computes gradients into one contiguous buffer, and does not know who communicates them.

    loss: `loss(model, *batch)` gives the mean loss of the batch as a scalar tensor; None does no arithmetic at all
    (the `timing` workload), and then the gradient stays zero.
    """

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        self.flat = FlatModel(model)
        self._loss = loss

    def compute(self, batch: Sequence[torch.Tensor]) -> float:
        """Leave the batch's mean gradient in `flat.gradient`; return its mean loss (NaN without arithmetic)."""
        if self._loss is None:
            return float("nan")
        self.flat.zero_gradient()
        loss = self._loss(self.flat.model, *batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())
