"""A model's trainable parameters, and their gradients, as views into one contiguous buffer each.

Whoever moves weights or gradients moves one flat vector, and nothing is ever packed or unpacked: autograd accumulates
straight into the gradient buffer, and a transfer into the weight buffer is the model's new state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

DTYPES = (torch.float32, torch.float64)


def device_of(model: nn.Module) -> torch.device:
    """Where the model is: where its first parameter is, and on the CPU without one."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that training changes, in the order of `model.parameters()`; a tied one counts once.

    Raises ValueError for a model that has none, or whose parameters differ in type or have a type that cannot be moved
    exactly.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    dtypes = {p.dtype for p in parameters}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        found = ", ".join(sorted(map(str, dtypes))) or "no trainable parameters"
        raise ValueError(f"the model has {found}: allowed is one type for all, float32 or float64")
    return parameters


class FlatModel:
    """Rebinds a module's trainable parameters to `weights` and their gradients to `gradient`.

    weights, gradient: 1-D tensors of `size` elements, in the order of `trainable`, which may raise ValueError. The
    module's buffers (running statistics) stay where they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._parameters = trainable(model)
        self.size = sum(p.numel() for p in self._parameters)
        self.weights = torch.empty(self.size, dtype=self._parameters[0].dtype, device=self._parameters[0].device)
        self.gradient = torch.zeros_like(self.weights)
        self._weight_views = self._views(self.weights)
        self._gradient_views = self._views(self.gradient)
        for parameter, weights, gradient in zip(
            self._parameters, self._weight_views, self._gradient_views, strict=True
        ):
            weights.copy_(parameter.detach())
            parameter.data = weights
            parameter.grad = gradient

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """In the order in which they lie in the buffers."""
        return self._parameters

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [p.numel() for p in self._parameters]
        return [part.view(p.shape) for part, p in zip(flat.split(sizes), self._parameters, strict=True)]

    def zero_gradient(self) -> None:
        """Clear the gradient without giving up the views, which `zero_grad(set_to_none=True)` would do."""
        self.gradient.zero_()
        for parameter, gradient in zip(self._parameters, self._gradient_views, strict=True):
            parameter.grad = gradient

    def drop_gradient(self) -> None:
        """Let no parameter have a gradient, as `zero_grad(set_to_none=True)` does: for those who gather afterwards.

        Autograd then hands over the tensors it has computed, and gathering copies them: two passes over the memory
        fewer than clearing the views and adding to them.
        """
        for parameter in self._parameters:
            parameter.grad = None

    def gather_gradient(self) -> None:
        """Make `gradient` hold every parameter's gradient.

        Costs nothing when autograd wrote into the views, as it does unless somebody replaced `parameter.grad`; such a
        gradient is copied in and the view put back. A parameter that took no part in the loss counts as zero.
        """
        for index in range(len(self._parameters)):
            self.gather(index)

    def gather(self, index: int) -> None:
        """Do so for one of `parameters`."""
        parameter, view = self._parameters[index], self._gradient_views[index]
        if parameter.grad is view:
            return
        if parameter.grad is None:
            view.zero_()
        else:
            view.copy_(parameter.grad)
        parameter.grad = view

    def move_gradient(self, buffer: torch.Tensor) -> None:
        """Let the gradient, its values too, live in `buffer` from now on: 1-D, `size` elements of the same type."""
        self.gather_gradient()
        self.gradient = buffer.copy_(self.gradient)
        self._gradient_views = self._views(self.gradient)
        for parameter, view in zip(self._parameters, self._gradient_views, strict=True):
            parameter.grad = view
