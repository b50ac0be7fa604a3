"""Optimizers that keep something in their groups, as Prodigy and schedule-free optimizers do, and of all parameters."""

from __future__ import annotations

from typing import Any

import torch


class _CountingSteps(torch.optim.Optimizer):
    """Counts the steps in the groups and in the state, as SPAM does there, and decays a number of the groups."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.state["steps"] = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.state["steps"] += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["weight_decay"] = 1 / (group["k"] + self.state["steps"])
        return loss


class Counting(_CountingSteps, torch.optim.SGD):
    """SGD that counts its steps."""


class CountingAdam(_CountingSteps, torch.optim.Adam):
    """Adam that counts its steps."""
