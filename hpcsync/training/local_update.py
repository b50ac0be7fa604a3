"""Workers with weights of their own: local steps, and mixing of the weights that workers exchange.

Momentum stays on its worker, and so does look-ahead: with Nesterov momentum, torch's SGD keeps the parameter at
theta + mu v, the point at which the gradient is taken, whereas other workers receive theta.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hpcsync.state import Stateful
from hpcsync.training.flat_model import DOT_SIZE
from hpcsync.training.optimizers import OptimizerSpec, OptimizerState, WorkerOptimizer


class Received(NamedTuple):
    """Models that a worker has received.

    Attributes
    ----------
    total : torch.Tensor or None
        Their sum, shape (size,); None without arithmetic. On ranks it is valid until the end of the iteration.
    count : int
        Number of models.
    weight : float
        Sum of their push-sum weights.
    """

    total: Any
    count: int  # type: ignore[assignment]  # the field hides tuple.count, which is not needed here
    weight: float

    def plus(self, other: Received) -> Received:
        """Return both together; the sum is formed in this one's tensor."""
        if self.total is not None:
            self.total.add_(other.total)
        return Received(self.total, self.count + other.count, self.weight + other.weight)


class Peer(Stateful):
    """A worker's weights between its exchanges with others.

    Parameters
    ----------
    weights
        The model's flat weights, shape (size,), at which gradients are taken and steps are made. Changed in place.
    optimizer
        The worker's optimizer of these weights.

    Attributes
    ----------
    n_bytes
        Size of the weights in bytes.
    weight
        w of push-sum; 1 in other modes.

    Notes
    -----
    In stochastic gradient push (Assran et al. 2019) workers exchange the pair (x, w), and the weights are x / w. Steps
    are made on x / w, as in the authors' program, rather than on x, as in the paper: a worker that seldom receives
    anything has a small w, and a step on x would then be a step on x / w that is 1 / w times as long.
    """

    state_types = {"_weights": torch.Tensor, "weight": float, "_optimizer": WorkerOptimizer}

    def __init__(self, weights: torch.Tensor, optimizer: WorkerOptimizer) -> None:
        self.n_bytes = weights.nbytes
        self.weight = 1.0
        self._weights = weights
        self._optimizer = optimizer

    def step(self, gradient: torch.Tensor, lr: float) -> None:
        """Make a local step with learning rate `lr` from the gradient at the weights, shape (size,)."""
        self._optimizer.step(gradient, lr)

    @contextmanager
    def exchanging(self) -> Iterator[torch.Tensor]:
        """Provide the vector to exchange and mix, shape (size,), as a context manager.

        It is the weights without look-ahead, times w under push-sum (x). On exit the changed vector becomes the
        weights again.
        """
        self._optimizer.drop_look_ahead()
        if self.weight != 1.0:
            self._weights.mul_(self.weight)
        yield self._weights
        if self.weight != 1.0:
            self._weights.div_(self.weight)
        self._optimizer.look_ahead()

    def shown(self) -> torch.Tensor:
        """Return the weights without look-ahead, shape (size,), as other workers read them; read-only."""
        return self._optimizer.without_look_ahead()

    def mix(self, other: torch.Tensor, beta: float = 0.5) -> None:
        """Set the weights to 1 - beta of them and beta of another model, shape (size,)."""
        with self.exchanging() as x:
            mix(x, other, beta)

    def meet(self, other: torch.Tensor) -> torch.Tensor:
        """Set the weights to the average of them and another model, shape (size,); return a copy of the average."""
        with self.exchanging() as x:
            mix(x, other)
            return x.clone()

    def adopt(self, model: torch.Tensor) -> None:
        """Set the weights to a model, shape (size,)."""
        with self.exchanging() as x:
            x.copy_(model)

    def give(self) -> torch.Tensor:
        """Return the model to send to another worker, shape (size,); read-only."""
        return self.shown()

    def absorb(self, received: Received, *, drew_itself: bool) -> None:
        """Set the weights to the mean of them and the received models; they count twice if the worker drew itself."""
        own = 2 if drew_itself else 1
        with self.exchanging() as x:
            x.mul_(own).add_(received.total).div_(own + received.count)


class PushSumPeer(Peer):
    """A worker's weights under push-sum; the totals of x and w over all workers and all models in transit are constant.

    Parameters
    ----------
    weights, optimizer
        See `Peer`.
    """

    def give(self) -> torch.Tensor:
        """Halve x and w, and return a copy of x, shape (size,)."""
        with self.exchanging() as x:
            x.mul_(0.5)
            self.weight *= 0.5
            return x.clone()

    def absorb(self, received: Received, *, drew_itself: bool) -> None:
        """Add the received x and w."""
        with self.exchanging() as x:
            x.add_(received.total)
            self.weight += received.weight


class NullPeer:
    """A worker without arithmetic: models are None, but push-sum weights are kept.

    Parameters
    ----------
    n_bytes
        Size of a model in bytes.
    push_sum
        True if models are exchanged with a weight.
    """

    def __init__(self, n_bytes: int = 0, *, push_sum: bool = False) -> None:
        self.n_bytes = n_bytes
        self.weight = 1.0
        self._push_sum = push_sum

    def _nothing(self, *of_any_kind: Any, **options: Any) -> None:
        """Do nothing; None takes the place of a model."""

    shown = mix = meet = adopt = _nothing

    def give(self) -> None:
        """Halve w under push-sum."""
        if self._push_sum:
            self.weight *= 0.5

    def absorb(self, received: Received, *, drew_itself: bool) -> None:
        """Add the received w under push-sum."""
        if self._push_sum:
            self.weight += received.weight


class Outer(Stateful):
    """The outer optimizer, which turns the mean of all workers' weights into their next weights.

    Parameters
    ----------
    weights
        Initial weights of all workers, shape (size,).
    options
        Options of the outer `torch.optim.SGD`, `lr` among them; none: the step leads to the mean itself (local SGD).

    Notes
    -----
    The outer gradient is the previous weights minus the mean (DiLoCo, Douillard et al. 2023).
    """

    state_types = {"_weights": torch.Tensor | None, "_optimizer_state": OptimizerState | None}

    def __init__(self, weights: torch.Tensor, **options: Any) -> None:
        self._weights = self._optimizer = self._optimizer_state = None
        if options:
            self._parameter = torch.nn.Parameter(weights.clone())
            self._weights = self._parameter.data  # in the same memory
            self._optimizer = OptimizerSpec("sgd", options.pop("lr"), options).build(self._parameter)
            self._optimizer_state = OptimizerState(self._optimizer)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state; before format 8 it has weights without an outer optimizer, too."""
        super().restore({**state, "weights": None} if self._optimizer is None else state)

    def step(self, mean: torch.Tensor) -> None:
        """Replace the mean, shape (size,), in place by the next weights of all workers."""
        if self._optimizer is not None:
            self._parameter.grad = torch.sub(self._parameter.data, mean, out=mean)
            self._optimizer.step()
            self._parameter.grad = None
            mean.copy_(self._parameter.data)


# ---- mixing: x is changed in place; tensors have the shape (size,) ----


def mix(x: torch.Tensor, other: torch.Tensor, beta: float = 0.5) -> None:
    """Replace x by (1 - beta) x + beta other. Equal vectors stay as they are, bit for bit."""
    if beta == 0.5:
        x.add_(other).mul_(0.5)
    else:
        x.lerp_(other, beta)


class Mean:
    """Running mean of replicas, and their distance from it. Under push-sum replicas are weighted by w.

    Parameters
    ----------
    into
        Memory of the mean, shape (size,); overwritten.

    Attributes
    ----------
    values
        The mean of the replicas added so far.

    Notes
    -----
    By Welford's method the mean of equal replicas equals them bit for bit.
    """

    def __init__(self, into: torch.Tensor) -> None:
        self.values = into.zero_()
        self._weight = 0.0  # sum of the weights so far
        self._squares = 0.0

    def add(self, replica: torch.Tensor, weight: float = 1.0) -> None:
        """Add a replica, shape (size,)."""
        self._weight += weight
        before = replica - self.values
        self.values.add_(before, alpha=weight / self._weight)
        parts = zip(before.split(DOT_SIZE), (replica - self.values).split(DOT_SIZE), strict=True)
        self._squares += weight * sum(float(torch.dot(a.double(), b.double())) for a, b in parts)

    @property
    def distance(self) -> float:
        """Consensus distance: root mean squared distance of the replicas from their mean."""
        squares = self._squares if math.isnan(self._squares) else max(0.0, self._squares)  # not NaN as 0
        return float(squares / (self._weight or 1.0)) ** 0.5
