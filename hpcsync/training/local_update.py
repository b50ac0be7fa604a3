"""A worker that has weights of its own: its local steps, and how weights are mixed when workers exchange them.

Momentum never leaves a worker, and neither does its look-ahead: where torch's SGD runs Nesterov's method, its parameter
is theta + mu v, the point at which the gradient is taken, and what others get to see is theta.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hpcsync.training.optimizers import OptimizerSpec


class LocalOptimizer:
    """An optimizer that steps on a worker. weights: its flat weights, shape (size,), changed in place."""

    def __init__(self, weights: torch.Tensor, spec: OptimizerSpec) -> None:
        self._parameter = torch.nn.Parameter(weights)  # in the same memory
        self._optimizer = spec.build(self._parameter)
        nesterov, momentum = spec.options.get("nesterov", False), spec.options.get("momentum", 0.0)
        self._ahead = float(momentum) if nesterov else 0.0  # mu
        self._lr = 0.0

    def step(self, gradient: torch.Tensor, lr: float) -> None:
        """One step from the gradient, shape (size,), which was taken at the weights."""
        self._parameter.grad = gradient
        self._optimizer.param_groups[0]["lr"] = self._lr = lr
        self._optimizer.step()

    def drop_look_ahead(self) -> None:
        """Leave theta in the weights, until `look_ahead`. Nothing to do without Nesterov's method."""
        self._move(-1.0)

    def look_ahead(self) -> None:
        """Leave theta + mu v in the weights."""
        self._move(1.0)

    def without_look_ahead(self) -> torch.Tensor:
        """theta, for others to read: the weights themselves where there is no look-ahead, else a new tensor."""
        buffer, scale = self._buffer(), self._scale()
        return self._parameter.data if buffer is None else torch.add(self._parameter.data, buffer, alpha=-scale)

    def state(self) -> dict[str, Any]:
        """What it remembers from step to step; the weights are not in it."""
        return {"optimizer": self._optimizer.state_dict(), "lr": self._lr}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._lr = state["lr"]

    def _move(self, direction: float) -> None:
        if (buffer := self._buffer()) is not None:
            self._parameter.data.add_(buffer, alpha=direction * self._scale())

    def _buffer(self) -> torch.Tensor | None:
        return self._optimizer.state[self._parameter].get("momentum_buffer") if self._ahead else None

    def _scale(self) -> float:
        """mu v is this times torch's momentum buffer; where torch maximizes it has turned the gradient around first."""
        return -self._lr * self._ahead


class Peer:
    """A worker's weights between its exchanges with others.

    weights: the model's flat weights, shape (size,): where gradients are taken and steps are made. Changed in place.
    weight:  w of push-sum, in which workers exchange the pair (x, w), and the weights are x / w (Assran et al. 2019,
             stochastic gradient push). Steps are made of x / w, as the authors' program does it, and not of x, as they
             print it: a worker that is seldom given anything has a small w, and there a step of x would be one of
             x / w that is 1 / w times as long.
    """

    def __init__(self, weights: torch.Tensor, spec: OptimizerSpec) -> None:
        self.weight = 1.0
        self._weights = weights
        self._optimizer = LocalOptimizer(weights, spec)

    def step(self, gradient: torch.Tensor, lr: float) -> None:
        """A local step from the gradient at the weights, shape (size,)."""
        self._optimizer.step(gradient, lr)

    def state(self) -> dict[str, Any]:
        """All that it consists of, between exchanges."""
        return {"weights": self._weights, "weight": self.weight, "optimizer": self._optimizer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._weights.copy_(state["weights"])
        self.weight = state["weight"]
        self._optimizer.restore(state["optimizer"])

    @contextmanager
    def exchanging(self) -> Iterator[torch.Tensor]:
        """What others may see and mixing changes, shape (size,): without look-ahead; x of push-sum, whose w is 1
        elsewhere."""
        self._optimizer.drop_look_ahead()
        if self.weight != 1.0:
            self._weights.mul_(self.weight)
        yield self._weights
        if self.weight != 1.0:
            self._weights.div_(self.weight)
        self._optimizer.look_ahead()

    def shown(self) -> torch.Tensor:
        """The weights without look-ahead, shape (size,), for others to read: not to be changed."""
        return self._optimizer.without_look_ahead()


class Outer:
    """What becomes of the mean of all workers' weights: the weights of all, or where an outer step towards it leads.

    The outer gradient is the old weights minus the mean (DiLoCo, Douillard et al. 2023); with learning rate 1 and
    without momentum the step leads to the mean itself, which is local SGD.
    """

    def __init__(self, weights: torch.Tensor, lr: float, momentum: float) -> None:
        self._parameter = torch.nn.Parameter(weights.clone())
        self._optimizer = None
        if lr != 1.0 or momentum != 0.0:
            options = {"momentum": momentum, "nesterov": momentum > 0.0}
            self._optimizer = OptimizerSpec("sgd", lr, options).build(self._parameter)

    def step(self, mean: torch.Tensor) -> None:
        """Replace the mean, shape (size,), by the next weights of all."""
        if self._optimizer is not None:
            self._parameter.grad = self._parameter.data - mean
            self._optimizer.step()
            mean.copy_(self._parameter.data)

    def state(self) -> dict[str, Any]:
        """What it remembers from one mean to the next."""
        return {"weights": self._parameter.data, "optimizer": self._optimizer and self._optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._parameter.data.copy_(state["weights"])
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])


# ---- mixing: x is changed in place; tensors have the shape (size,) ----


def average(x: torch.Tensor, other: torch.Tensor) -> None:
    """Half of each. Equal ones stay as they are, bit for bit."""
    x.add_(other).mul_(0.5)


def absorb(x: torch.Tensor, total: torch.Tensor, count: int, *, drew_itself: bool) -> None:
    """The mean of x and of `count` models that were pushed here, whose sum is `total`; who drew itself counts twice."""
    own = 2 if drew_itself else 1
    x.mul_(own).add_(total).div_(own + count)


class Mean:
    """The mean of replicas, one after the other, and how far they are from it. Under push-sum they are weighted by w.

    Replicas that are equal have a mean that equals them, bit for bit (Welford's method).
    """

    def __init__(self, into: torch.Tensor) -> None:
        self.values = into.zero_()
        self._weight = 0.0  # of all so far
        self._squares = 0.0

    def add(self, replica: torch.Tensor, weight: float = 1.0) -> None:
        """replica: shape (size,)."""
        self._weight += weight
        before = replica - self.values
        self.values.add_(before, alpha=weight / self._weight)
        self._squares += weight * float(torch.dot(before.double(), (replica - self.values).double()))

    @property
    def distance(self) -> float:
        """Root of the mean squared distance of the replicas from their mean, over the replicas: the consensus
        distance."""
        return float(max(0.0, self._squares) / (self._weight or 1.0)) ** 0.5
