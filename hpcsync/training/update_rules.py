"""Update rules of servers: how contributions change the weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

import numpy as np
import torch

from hpcsync.config.job import Job
from hpcsync.config.workloads import Timing
from hpcsync.state import Stateful
from hpcsync.training.flat_model import SquaredNorm
from hpcsync.training.optimizers import ServerOptimizer

OnServer = Callable[[torch.nn.Parameter], ServerOptimizer]  # creates the optimizer of a server's row of weights

EPSILON = 1e-7  # is added to a mean square before its root is taken


class Rule(Stateful, ABC):
    """Update rule of a store's weights. It is element-wise, so the bits do not depend on where shards end.

    Attributes
    ----------
    corrects
        True if `correct` changes contributions, for which the store keeps the weights that each was computed from.
    """

    corrects = False

    def bind(self, weights: torch.nn.Parameter) -> None:
        """Set the weights to change. The parameter's `data` may be replaced between updates."""
        self._weights = weights

    @abstractmethod
    def update(
        self, contributions: Sequence[torch.Tensor], rate: float, weights: Sequence[float], divisor: float
    ) -> SupportsFloat:
        """Change the weights in place.

        Parameters
        ----------
        contributions
            Tensors of the weights' shape, summed in this order; their contents are lost.
        rate
            Rate of the update.
        weights
            Factor of each contribution.
        divisor
            Divisor of the weighted sum.

        Returns
        -------
        SupportsFloat
            Squared norm of the gradient; NaN if the update is along none, or it is not measured. On a GPU it may be
            read once the stream has been waited for.
        """

    def correct(self, worker: int, contribution: torch.Tensor, read: torch.Tensor) -> None:
        """Change a contribution in place, before it is used.

        Parameters
        ----------
        worker
            Its worker.
        contribution
            Contribution, of the weights' shape.
        read
            Weights from which it was computed, of the same shape; they may be the present weights.
        """

    def follow(self, stated: Sequence[np.ndarray]) -> None:
        """Prepare the next update as its contributors have stated it (`training.script_optimizers`)."""

    def set_momentum(self, momentum: float) -> None:
        """Change the momentum of the rule's optimizer. Raises TypeError if the rule has none."""
        raise TypeError(f"{type(self).__name__} has no momentum")


class Descent(Rule):
    """A step of a torch optimizer with the weighted mean of gradients; the rate is its learning rate.

    Parameters
    ----------
    optimizer
        Creates the optimizer.
    measures
        Whether the norms of the mean gradients are measured.
    """

    state_types = {"_optimizer": ServerOptimizer}

    def __init__(self, optimizer: OnServer, *, measures: bool = True) -> None:
        self._create = optimizer
        self._measures = measures

    def bind(self, weights: torch.nn.Parameter) -> None:
        """Set the weights, and create their optimizer."""
        super().bind(weights)
        self._optimizer = self._create(weights)

    def follow(self, stated: Sequence[np.ndarray]) -> None:
        """Pass on what the contributors' scripts have stated."""
        self._optimizer.follow(stated)

    def update(
        self, contributions: Sequence[torch.Tensor], rate: float, weights: Sequence[float], divisor: float
    ) -> SupportsFloat:
        """Make one step of the optimizer."""
        gradient = weighted_sum(contributions, weights)
        if divisor != 1.0:
            gradient.div_(divisor)
        gradient_sq = SquaredNorm(gradient) if self._measures else math.nan
        self._optimizer.step(gradient, rate)
        return gradient_sq

    def set_momentum(self, momentum: float) -> None:
        """Change the optimizer's momentum; its buffer stays."""
        self._optimizer.set_momentum(momentum)


class DelayCompensated(Descent):
    """Descent along gradients that are corrected for their delay (DC-ASGD, `hpcsync.paradigms.asp`).

    The gradient g of weights w_read becomes g + c g^2 (w - w_read), element by element. Without a decay, c is the
    strength; otherwise it is the strength over the root of a moving average of g^2, of this worker's gradients.

    Parameters
    ----------
    optimizer
        Creates the optimizer of the corrected gradients.
    strength
        Strength of the correction, above 0.
    decay
        Factor of the moving average with each gradient; None: there is none.
    measures
        See `Descent`.
    """

    corrects = True
    state_types = {"_mean_squares": dict[int, torch.Tensor]}

    def __init__(
        self, optimizer: OnServer, strength: float, decay: float | None = None, *, measures: bool = True
    ) -> None:
        super().__init__(optimizer, measures=measures)
        self._strength = strength
        self._decay = decay
        self._mean_squares: dict[int, torch.Tensor] = {}  # by worker
        self._square, self._correction = torch.empty(0), torch.empty(0)

    def correct(self, worker: int, contribution: torch.Tensor, read: torch.Tensor) -> None:
        """Correct a gradient. Only operations that are rounded once are used: vectorised or not, the bits are equal."""
        if self._square.shape != contribution.shape:
            self._square, self._correction = torch.empty_like(contribution), torch.empty_like(contribution)
        square, correction = self._square, self._correction
        torch.mul(contribution, contribution, out=square)
        torch.sub(self._weights.data, read, out=correction)
        correction.mul_(square).mul_(self._strength)
        if self._decay is not None:
            if worker not in self._mean_squares:
                self._mean_squares[worker] = torch.zeros_like(contribution)
            mean_square = self._mean_squares[worker]
            mean_square.mul_(self._decay).add_(square.mul_(1.0 - self._decay))
            correction.div_(torch.add(mean_square, EPSILON, out=square).sqrt_())
        contribution.add_(correction)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer's state and the moving averages, on the weights' device."""
        super().restore(state)
        self._mean_squares = {worker: mean.to(self._weights.device) for worker, mean in self._mean_squares.items()}


class Elastic(Rule):
    """Elastic averaging: the weights are a centre, and contributions are the positions of workers.

    The centre moves by the sum of its moves towards each worker, all measured from its previous position. Every
    worker's position counts once, whatever its batches, or not at all if its steps have a problem.
    """

    def update(
        self, contributions: Sequence[torch.Tensor], rate: float, weights: Sequence[float], divisor: float
    ) -> SupportsFloat:
        """Move the centre; `rate` is alpha."""
        centre = self._weights.data
        counted = [position for position, weight in zip(contributions, weights, strict=True) if weight]
        if counted:
            moves = [towards(centre, position, rate) for position in counted]
            centre.add_(weighted_sum(moves, [1.0] * len(moves)))
        return math.nan


class Commit(Rule):
    """Commits: contributions are changes that workers made to the weights, applied with the weight of each."""

    def update(
        self, contributions: Sequence[torch.Tensor], rate: float, weights: Sequence[float], divisor: float
    ) -> SupportsFloat:
        """Add the weighted changes to the weights."""
        self._weights.data.add_(weighted_sum(contributions, weights), alpha=rate / divisor)
        return math.nan


class DelayedNesterov(Rule):
    """Outer steps with delayed Nesterov momentum; contributions are changes that workers made to the weights.

    The outer gradient g of an update is the negative of the weighted mean change. With the period N, the momentum beta
    and the share c of it that is used in between::

        every update       sum = sum + g
        every N-th one     m = beta m + sum / N;  sum = 0;  w = w - rate ((1 - c (N - 1)) beta m + g / N)
        the others         w = w - rate (c beta m + g / N)

    With N = 1 an update is a step of `torch.optim.SGD` with Nesterov momentum, to the bit of its form that is not
    fused. With c = 0 and without delays, N updates together are such a step along the mean of their gradients.

    Parameters
    ----------
    momentum
        beta, from 0 and below 1.
    period
        N, at least 1.
    between
        c, from 0 to 1 / N.

    References
    ----------
    Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, arXiv:2401.09135.
    """

    state_types = {"_momentum": torch.Tensor, "_sum": torch.Tensor, "_count": int}

    def __init__(self, momentum: float, period: int = 1, between: float = 0.0) -> None:
        self._beta = momentum
        self._period = period
        self._between = between

    def bind(self, weights: torch.nn.Parameter) -> None:
        """Set the weights; momentum and sum begin at zero."""
        super().bind(weights)
        self._count = 0  # updates since the last N-th one
        self._sum, self._momentum = torch.zeros_like(weights.data), torch.zeros_like(weights.data)

    def update(
        self, contributions: Sequence[torch.Tensor], rate: float, weights: Sequence[float], divisor: float
    ) -> SupportsFloat:
        """Make an outer step."""
        gradient = weighted_sum(contributions, weights).div_(-divisor)
        self._count = (self._count + 1) % self._period
        used = self._between
        if self._beta > 0:
            self._sum.add_(gradient)
            if self._count == 0:
                self._momentum.mul_(self._beta).add_(self._sum, alpha=1 / self._period)
                self._sum.zero_()
                used = 1 - self._between * (self._period - 1)
        gradient.div_(self._period)
        if self._beta * used > 0:
            gradient.add_(self._momentum, alpha=used * self._beta)
        self._weights.data.add_(gradient, alpha=-rate)
        return math.nan


def of_job(job: Job, optimizer: OnServer) -> Rule:
    """Return the update rule of a job's servers; `optimizer` creates that of rules that apply gradients."""
    match job.paradigm.contribution:
        case "change":
            outer = job.paradigm.outer(job.cluster.workers)
            return Commit() if outer is None else DelayedNesterov(*outer)
        case "position":
            return Elastic()
    correction, measures = job.paradigm.delay_correction, not isinstance(job.workload, Timing)
    if correction is None:
        return Descent(optimizer, measures=measures)
    return DelayCompensated(optimizer, *correction, measures=measures)


def towards(place: torch.Tensor, target: torch.Tensor, rate: float) -> torch.Tensor:
    """Return `rate` times the distance from `place` to `target`, in the memory of `target`.

    It is bit for bit the negative of the move from `target` towards `place`: two vectors that move towards each other
    keep their sum, except for the rounding of the two additions.
    """
    return target.sub_(place).mul_(rate)


def weighted_sum(contributions: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted sum of contributions, added in this order, in the memory of the first."""
    total = contributions[0]
    if weights[0] != 1.0:
        total.mul_(weights[0])
    for contribution, weight in zip(contributions[1:], weights[1:], strict=True):
        total.add_(contribution, alpha=weight)
    return total
