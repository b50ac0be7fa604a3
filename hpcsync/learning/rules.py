"""What a server's update does to the weights, and what it takes its contributions for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from hpcsync.job import Job
from hpcsync.job_paradigms import Easgd
from hpcsync.learning.optimizers import OptimizerSpec


class Rule(ABC):
    """How a store's weights change. Element by element, so that the bits do not depend on where shards end."""

    @abstractmethod
    def bind(self, weights: torch.nn.Parameter) -> None:
        """These weights it shall change. They may move, as the parameter's `data`, between updates."""

    @abstractmethod
    def update(self, contributions: Sequence[torch.Tensor], rate: float) -> None:
        """Change the weights in place. Contributions, of the weights' shape, are used in this order, and spent."""


class Descent(Rule):
    """A torch optimizer's step along the mean of gradients; the rate is its learning rate."""

    def __init__(self, optimizer: OptimizerSpec) -> None:
        self._spec = optimizer

    def bind(self, weights: torch.nn.Parameter) -> None:
        self._weights = weights
        self._optimizer = self._spec.build(weights)

    def update(self, contributions: Sequence[torch.Tensor], rate: float) -> None:
        gradient = _sum(contributions)
        if len(contributions) > 1:
            gradient.div_(len(contributions))
        self._weights.grad = gradient
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()


class Elastic(Rule):
    """The weights are a centre, and contributions are where workers are: it moves by the sum of its moves towards each
    of them, all measured from where it was."""

    def bind(self, weights: torch.nn.Parameter) -> None:
        self._weights = weights

    def update(self, contributions: Sequence[torch.Tensor], rate: float) -> None:
        centre = self._weights.data
        centre.add_(_sum([towards(centre, position, rate) for position in contributions]))


def of_job(job: Job, optimizer: OptimizerSpec) -> Rule:
    """The rule of a job's servers. optimizer: of the job's gradients, wherever they are applied."""
    return Elastic() if isinstance(job.paradigm, Easgd) else Descent(optimizer)


def towards(place: torch.Tensor, target: torch.Tensor, rate: float) -> torch.Tensor:
    """The move from `place` towards `target`, `rate` of their distance; it takes the memory of `target`.

    To the bit the opposite of the move from `target` towards `place`: two that move towards each other keep their sum,
    but for the roundings of the two additions.
    """
    return target.sub_(place).mul_(rate)


def _sum(contributions: Sequence[torch.Tensor]) -> torch.Tensor:
    total = contributions[0]
    for contribution in contributions[1:]:
        total.add_(contribution)
    return total
