"""Workloads with tensors of several shapes.

There are matrices that can be factored, vectors that are sent uncompressed, and images for layers that can be
separated.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpcsync.workloads.registry import Workload, classification, cross_entropy


def regression(dtype: str = "float64") -> Workload:
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 3)).to(getattr(torch, dtype))
    x = torch.randn(96, 12, dtype=model[0].weight.dtype)
    y = torch.sin(x[:, :3] * 2.0)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), y)

    return Workload(model, loss, TensorDataset(x, y), None)


class Convolutional(nn.Module):
    """Two halves, of 76 and 40 hidden + 3 parameters; 36 numbers of a sample lie between them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Linear(36, hidden), nn.Tanh(), nn.Linear(hidden, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).flatten(1))


def convolutional(dtype: str = "float64", hidden: int = 8) -> Workload:
    model = Convolutional(hidden).to(getattr(torch, dtype))
    x = torch.randn(96, 2, 6, 6, dtype=model.classifier[0].weight.dtype)
    y = x.sum((2, 3)).argmax(1) + (x[:, 0, 0, 0] > 0)
    return Workload(model, cross_entropy, TensorDataset(x, y), classification(x, y))
