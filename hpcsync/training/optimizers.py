"""The torch.optim optimizers that servers can run, and their construction.

A server holds a contiguous piece of the flat weights that may begin and end inside a layer. Only element-wise
optimizers give the same bits whatever the pieces are, and only those are allowed. Excluded are LBFGS (evaluates the
loss again), SparseAdam (sparse gradients), Adafactor and Muon (need the shape of each matrix).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from hpcsync.config.job import Job
from hpcsync.config.torch_optimizers import CLASSES
from hpcsync.state import Stateful
from hpcsync.training.deferred_dynamo import defer

ELEMENTWISE: dict[str, type[torch.optim.Optimizer]] = {name: getattr(torch.optim, cls) for name, cls in CLASSES.items()}

FUSED_ON_GPU = ("adam", "adamw", "sgd")  # in every version of torch that offers fused forms


@cache
def _takes_fused(name: str) -> bool:
    return "fused" in inspect.signature(ELEMENTWISE[name]).parameters


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer that is not yet bound to a tensor.

    Parameters
    ----------
    name
        Lower-case name of a torch.optim class.
    lr
        Initial learning rate.
    options
        Further options of the class.
    """

    name: str
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        """Return the optimizer of one flat parameter, in fused form where torch has one for its device.

        Raises
        ------
        ValueError
            If the name is not in `ELEMENTWISE`; torch's own exceptions are raised for invalid options.
        """
        defer()
        if self.name not in ELEMENTWISE:
            raise ValueError(f"{self.name!r}: must be one of {', '.join(ELEMENTWISE)}")
        cls = ELEMENTWISE[self.name]
        has_fused = self.name in FUSED_ON_GPU if parameter.is_cuda else _takes_fused(self.name)
        form: dict[str, Any] = {"fused": True} if has_fused else {}
        return cls([parameter], lr=self.lr, **self.options, **form)  # type: ignore[call-arg]

    def on_worker(self, weights: torch.Tensor) -> WorkerOptimizer:
        """Return the optimizer of a worker's flat weights, shape (size,), which it changes in place."""
        return LocalOptimizer(weights, self)

    def on_server(self, weights: torch.nn.Parameter) -> ServerOptimizer:
        """Return the optimizer of a server's row of weights; the parameter's `data` may be replaced between steps."""
        return FlatOptimizer(weights, self)

    @staticmethod
    def of_job(job: Job) -> OptimizerSpec:
        """Return the optimizer that a job names, not yet checked."""
        return OptimizerSpec(job.optimizer.name, job.optimizer.lr, job.optimizer.options)


class OptimizerState(Stateful):
    """What a checkpoint holds of an optimizer: its learning rate, and what it keeps of each parameter.

    All other options follow from the job.

    Parameters
    ----------
    optimizer
        Optimizer with one group of parameters.
    """

    state_types = {"lr": float, "kept": dict[int, dict[str, torch.Tensor | float | None]]}

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def lr(self) -> float:
        """The learning rate."""
        return float(self._optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, lr: float) -> None:
        self._optimizer.param_groups[0]["lr"] = lr

    @property
    def kept(self) -> dict[int, dict[str, Any]]:
        """Values of each parameter by name, such as its momentum; tensors are not copied."""
        kept: dict[int, dict[str, Any]] = self._optimizer.state_dict()["state"]
        return kept

    @kept.setter
    def kept(self, kept: dict[int, dict[str, Any]]) -> None:
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": kept, "param_groups": groups})


class WorkerOptimizer(Stateful, ABC):
    """An optimizer that steps on a worker's flat weights, shape (size,).

    With Nesterov momentum, torch's SGD keeps a parameter at theta + mu v, the point at which the gradient is taken;
    mu v is the look-ahead.
    """

    @abstractmethod
    def step(self, gradient: torch.Tensor, lr: float) -> None:
        """Make one step from the gradient at the weights, shape (size,).

        Parameters
        ----------
        gradient
            The gradient.
        lr
            Learning rate; of a script's optimizers a factor of their own rates.
        """

    @abstractmethod
    def drop_look_ahead(self) -> None:
        """Change the weights from theta + mu v to theta, until `look_ahead`. No-op without Nesterov momentum."""

    @abstractmethod
    def look_ahead(self) -> None:
        """Change the weights from theta to theta + mu v."""

    @abstractmethod
    def without_look_ahead(self) -> torch.Tensor:
        """Return theta: the weights themselves if there is no look-ahead, otherwise a new tensor."""


class ServerOptimizer(Stateful, ABC):
    """An optimizer that steps on a server's row of weights."""

    @abstractmethod
    def step(self, gradient: torch.Tensor, lr: float) -> None:
        """Make one step from the gradient, of the row's shape; `lr` is as for `WorkerOptimizer.step`."""

    @abstractmethod
    def set_momentum(self, momentum: float) -> None:
        """Change the momentum from now on; its buffers stay."""

    def follow(self, stated: Sequence[np.ndarray]) -> None:
        """Prepare the next step as the contributors' scripts have stated it; without scripts nothing is stated."""


# ---- steps of one flat parameter ----


def step_flat(optimizer: torch.optim.Optimizer, weights: torch.nn.Parameter, gradient: torch.Tensor, lr: float) -> None:
    """Make a step of an optimizer whose only parameter is `weights`.

    Where torch has a fused kernel, it is called directly: `Optimizer.step` around it takes 20 us and more, ten times as
    long as the kernel with a small shard. The first step, which creates the optimizer's state, is `Optimizer.step`.
    """
    group = optimizer.param_groups[0]
    group["lr"] = lr
    kernel = _KERNELS.get(type(optimizer)) if group.get("fused") else None
    if kernel is None or not kernel(group, optimizer.state, weights, gradient):
        weights.grad = gradient
        optimizer.step()


def _sgd(group: Mapping[str, Any], states: Mapping[Any, Any], weights: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Call the kernel of SGD; return False if there is no state to do so."""
    momentum, buffers = group["momentum"], []
    if momentum != 0:
        if (buffer := states.get(weights, {}).get("momentum_buffer")) is None:
            return False
        buffers = [buffer]
    torch._fused_sgd_(
        [weights.data], [gradient], buffers, weight_decay=group["weight_decay"],
        momentum=momentum, lr=group["lr"], dampening=group["dampening"], nesterov=group["nesterov"],
        maximize=group["maximize"], is_first_step=False,
    )  # fmt: skip
    return True


def _adam(
    group: Mapping[str, Any],
    states: Mapping[Any, Any],
    weights: torch.Tensor,
    gradient: torch.Tensor,
    decoupled: bool = False,
) -> bool:
    """Call the kernel of Adam or AdamW; return False if there is no state to do so.

    Until torch 2.6 whether the weight decay is decoupled follows from the class alone.
    """
    if "step" not in (state := states.get(weights, {})):
        return False
    state["step"].add_(1)
    kernel = torch._fused_adamw_ if group.get("decoupled_weight_decay", decoupled) else torch._fused_adam_
    kernel(
        [weights.data], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]],
        [state["max_exp_avg_sq"]] if group["amsgrad"] else [], [state["step"]], lr=group["lr"],
        beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"],
        amsgrad=group["amsgrad"], maximize=group["maximize"],
    )  # fmt: skip
    return True


Kernel = Callable[[Mapping[str, Any], Mapping[Any, Any], torch.Tensor, torch.Tensor], bool]
_KERNELS: dict[type[torch.optim.Optimizer], Kernel] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: partial(_adam, decoupled=True),
}


class FlatOptimizer(ServerOptimizer):
    """A spec's optimizer of one flat parameter, whose `data` may be replaced between steps."""

    state_types = {"_state": OptimizerState}

    def __init__(self, weights: torch.nn.Parameter, spec: OptimizerSpec) -> None:
        self._weights = weights
        self._optimizer = spec.build(weights)
        self._state = OptimizerState(self._optimizer)

    def step(self, gradient: torch.Tensor, lr: float) -> None:
        """Make one step."""
        step_flat(self._optimizer, self._weights, gradient, lr)

    def set_momentum(self, momentum: float) -> None:
        """Change the momentum."""
        self._optimizer.param_groups[0]["momentum"] = momentum


class LocalOptimizer(WorkerOptimizer):
    """An optimizer that steps on a worker.

    Parameters
    ----------
    weights
        The worker's flat weights, shape (size,), changed in place.
    spec
        The optimizer.
    """

    state_types = {"_optimizer_state": OptimizerState, "_lr": float}

    def __init__(self, weights: torch.Tensor, spec: OptimizerSpec) -> None:
        self._parameter = torch.nn.Parameter(weights)  # shares the memory
        self._optimizer = spec.build(self._parameter)
        self._optimizer_state = OptimizerState(self._optimizer)
        nesterov, momentum = spec.options.get("nesterov", False), spec.options.get("momentum", 0.0)
        self._ahead = float(momentum) if nesterov else 0.0  # mu
        self._lr = 0.0

    def step(self, gradient: torch.Tensor, lr: float) -> None:
        """Make one step with learning rate `lr` from the gradient at the weights, shape (size,)."""
        self._lr = lr
        step_flat(self._optimizer, self._parameter, gradient, lr)

    def drop_look_ahead(self) -> None:
        """Change the weights from theta + mu v to theta, until `look_ahead`. No-op without Nesterov momentum."""
        self._move(-1.0)

    def look_ahead(self) -> None:
        """Change the weights from theta to theta + mu v."""
        self._move(1.0)

    def without_look_ahead(self) -> torch.Tensor:
        """Return theta: the weights themselves if there is no look-ahead, otherwise a new tensor."""
        buffer, scale = self._buffer(), self._scale()
        return self._parameter.data if buffer is None else torch.add(self._parameter.data, buffer, alpha=-scale)

    def _move(self, direction: float) -> None:
        if (buffer := self._buffer()) is not None:
            self._parameter.data.add_(buffer, alpha=direction * self._scale())

    def _buffer(self) -> torch.Tensor | None:
        return self._optimizer.state[self._parameter].get("momentum_buffer") if self._ahead else None

    def _scale(self) -> float:
        """Return mu v over torch's momentum buffer (if torch maximizes, the buffer has the negated gradient)."""
        return -self._lr * self._ahead
