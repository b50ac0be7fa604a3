"""Optimizers that keep something in their groups, as Prodigy and schedule-free optimizers do."""

from __future__ import annotations

from typing import Any

import torch


class _CountingSteps(torch.optim.Optimizer):
    """Counts the steps in the groups, and decays a number of theirs."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["weight_decay"] = 0.5 / group["k"]
        return loss


class Counting(_CountingSteps, torch.optim.SGD):
    """SGD that counts its steps."""


class CountingAdam(_CountingSteps, torch.optim.Adam):
    """Adam that counts its steps."""
