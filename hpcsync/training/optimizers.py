"""Which torch.optim optimizers a server may run, and how they are made.

A server holds a contiguous piece of the flat weights that may begin and end inside a layer. Only optimizers that treat
every element by itself give the same bits whatever the pieces are, and only those are allowed. Left out are LBFGS
(needs the loss again), SparseAdam (sparse gradients), Adafactor and Muon (need the shape of each matrix).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hpcsync.config.job import Job
from hpcsync.training.deferred_dynamo import defer

ELEMENTWISE: dict[str, type[torch.optim.Optimizer]] = {
    cls.__name__.lower(): cls
    for cls in (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    )
}

# Ways of computing the same numbers, not settings of the optimizer: servers choose their own.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")

FUSED_ON_GPU = ("adam", "adamw", "sgd")  # in every version of torch that offers fused forms


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer by name, initial learning rate and options, not yet bound to any tensor."""

    name: str
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        """Make the optimizer for one flat parameter, in the fused form where torch has one for its device.

        Raises ValueError for a name that is not in ELEMENTWISE, and whatever torch raises for bad options.
        """
        defer()
        if self.name not in ELEMENTWISE:
            raise ValueError(f"{self.name!r}: must be one of {', '.join(ELEMENTWISE)}")
        cls = ELEMENTWISE[self.name]
        has_fused = self.name in FUSED_ON_GPU if parameter.is_cuda else "fused" in inspect.signature(cls).parameters
        form: dict[str, Any] = {"fused": True} if has_fused else {}
        return cls([parameter], lr=self.lr, **self.options, **form)  # type: ignore[call-arg]

    @staticmethod
    def of_job(job: Job) -> OptimizerSpec:
        """The spec that a job names, not yet checked."""
        return OptimizerSpec(job.optimizer.name, job.optimizer.lr, job.optimizer.options)

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
        """The spec of a user's own optimizer. Raises ValueError for one that cannot run on pieces of flat weights."""
        name = type(optimizer).__name__.lower()
        if ELEMENTWISE.get(name) is not type(optimizer):
            raise ValueError(f"optimizer {type(optimizer).__name__}: allowed is one of {', '.join(ELEMENTWISE)}")
        if len(optimizer.param_groups) != 1:
            raise ValueError(f"optimizer with {len(optimizer.param_groups)} parameter groups: allowed is one")
        accepted = inspect.signature(type(optimizer)).parameters
        options = {
            key: value.item() if isinstance(value, np.generic) else value
            for key, value in optimizer.param_groups[0].items()
            if key in accepted and key not in ("params", "lr", *IMPLEMENTATION)
        }
        return OptimizerSpec(name, float(optimizer.param_groups[0]["lr"]), options)
