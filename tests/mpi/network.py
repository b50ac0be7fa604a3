"""A workload with tensors of several shapes: matrices that can be factored, and vectors that are sent as they are."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpcsync.learning.workloads import Workload


def regression(dtype: str = "float64") -> Workload:
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 3)).to(getattr(torch, dtype))
    x = torch.randn(96, 12, dtype=model[0].weight.dtype)
    y = torch.sin(x[:, :3] * 2.0)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), y)

    return Workload(model, loss, TensorDataset(x, y), None)
