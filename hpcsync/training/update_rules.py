"""What a server's update does to the weights, and what it takes its contributions for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpcsync.config.job import Job
from hpcsync.config.paradigms import EasgdOptions
from hpcsync.training.optimizers import OptimizerSpec


class Rule(ABC):
    """How a store's weights change. Element by element, so that the bits do not depend on where shards end."""

    @abstractmethod
    def bind(self, weights: torch.nn.Parameter) -> None:
        """These weights it shall change. They may move, as the parameter's `data`, between updates."""

    @abstractmethod
    def update(
        self, contributions: Sequence[torch.Tensor], rate: float, weights: Sequence[float], divisor: float
    ) -> None:
        """Change the weights in place. Contributions, of the weights' shape, are used in this order, and spent.

        weights: what each of them is multiplied by; divisor: what their sum is divided by.
        """

    def state(self) -> Mapping[str, Any]:
        """What it remembers from update to update."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Go on from there."""


class Descent(Rule):
    """A torch optimizer's step along a weighted mean of gradients; the rate is its learning rate."""

    def __init__(self, optimizer: OptimizerSpec) -> None:
        self._spec = optimizer

    def bind(self, weights: torch.nn.Parameter) -> None:
        self._weights = weights
        self._optimizer = self._spec.build(weights)

    def update(
        self, contributions: Sequence[torch.Tensor], rate: float, weights: Sequence[float], divisor: float
    ) -> None:
        gradient = weighted_sum(contributions, weights)
        if divisor != 1.0:
            gradient.div_(divisor)
        self._weights.grad = gradient
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()

    def state(self) -> Mapping[str, Any]:
        return self._optimizer.state_dict()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(dict(state))


class Elastic(Rule):
    """The weights are a centre, and contributions are where workers are: it moves by the sum of its moves towards each
    of them, all measured from where it was. Every worker's position counts once, whatever its batches."""

    def bind(self, weights: torch.nn.Parameter) -> None:
        self._weights = weights

    def update(
        self, contributions: Sequence[torch.Tensor], rate: float, weights: Sequence[float], divisor: float
    ) -> None:
        centre = self._weights.data
        moves = [towards(centre, position, rate) for position in contributions]
        centre.add_(weighted_sum(moves, [1.0] * len(moves)))


class Commit(Rule):
    """Contributions are by how much workers have changed the weights: so they change, each commit by its weight."""

    def bind(self, weights: torch.nn.Parameter) -> None:
        self._weights = weights

    def update(
        self, contributions: Sequence[torch.Tensor], rate: float, weights: Sequence[float], divisor: float
    ) -> None:
        self._weights.data.add_(weighted_sum(contributions, weights), alpha=rate / divisor)


def of_job(job: Job, optimizer: OptimizerSpec) -> Rule:
    """The rule of a job's servers. optimizer: of the job's gradients, wherever they are applied."""
    if job.commits:
        return Commit()
    return Elastic() if isinstance(job.paradigm, EasgdOptions) else Descent(optimizer)


def towards(place: torch.Tensor, target: torch.Tensor, rate: float) -> torch.Tensor:
    """The move from `place` towards `target`, `rate` of their distance; it takes the memory of `target`.

    To the bit the opposite of the move from `target` towards `place`: two that move towards each other keep their sum,
    but for the roundings of the two additions.
    """
    return target.sub_(place).mul_(rate)


def weighted_sum(contributions: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The sum of each times its weight, in this order, in the memory of the first."""
    total = contributions[0]
    if weights[0] != 1.0:
        total.mul_(weights[0])
    for contribution, weight in zip(contributions[1:], weights[1:], strict=True):
        total.add_(contribution, alpha=weight)
    return total
