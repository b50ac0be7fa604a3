"""A model's trainable parameters, and their gradients, as views into one contiguous buffer each.

Weights and gradients are transferred as one flat vector, without packing or unpacking: autograd accumulates directly
into the gradient buffer, and a transfer into the weight buffer is the model's new state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

DTYPES = (torch.float32, torch.float64)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter; the CPU for a model without parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters in the order of `model.parameters()`; a tied parameter counts once.

    Raises
    ------
    ValueError
        If the model has no trainable parameters, or not all of them are float32 or all float64.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    dtypes = {p.dtype for p in parameters}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        found = ", ".join(sorted(map(str, dtypes))) or "no trainable parameters"
        raise ValueError(f"the model has {found}: allowed is one type for all, float32 or float64")
    return parameters


class FlatModel:
    """A module whose trainable parameters are views into `weights` and their gradients views into `gradient`.

    The module's buffers (running statistics) are left alone.

    Parameters
    ----------
    model
        The module; its parameters are rebound.

    Attributes
    ----------
    weights, gradient
        1-D tensors of `size` elements, in the order of `trainable`.
    size
        Number of elements.

    Raises
    ------
    ValueError
        From `trainable`.
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
        """The trainable parameters, in the order of the buffers."""
        return self._parameters

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [p.numel() for p in self._parameters]
        return [part.view(p.shape) for part, p in zip(flat.split(sizes), self._parameters, strict=True)]

    def zero_gradient(self) -> None:
        """Zero the gradient and keep the views, which `zero_grad(set_to_none=True)` would drop."""
        self.gradient.zero_()
        for parameter, gradient in zip(self._parameters, self._gradient_views, strict=True):
            parameter.grad = gradient

    def drop_gradient(self) -> None:
        """Set every parameter's gradient to None, as `zero_grad(set_to_none=True)` does, before a later `gather`.

        Autograd then stores the tensors it has computed, and gathering copies them: two passes over memory fewer than
        zeroing the views and adding to them.
        """
        for parameter in self._parameters:
            parameter.grad = None

    def gather_gradient(self) -> None:
        """Make `gradient` hold every parameter's gradient.

        This is free when autograd wrote into the views, as it does unless `parameter.grad` was replaced; a replaced
        gradient is copied and the view restored. The gradient of a parameter that does not enter the loss is zero.
        """
        for index in range(len(self._parameters)):
            self.gather(index)

    def gather(self, index: int) -> None:
        """Do what `gather_gradient` does for one of `parameters`."""
        parameter, view = self._parameters[index], self._gradient_views[index]
        if parameter.grad is view:
            return
        if parameter.grad is None:
            view.zero_()
        else:
            view.copy_(parameter.grad)
        parameter.grad = view

    def move_gradient(self, buffer: torch.Tensor) -> None:
        """Move the gradient into `buffer`, a 1-D tensor of `size` elements of the same type."""
        self.gather_gradient()
        self.gradient = buffer.copy_(self.gradient)
        self._gradient_views = self._views(self.gradient)
        for parameter, view in zip(self._parameters, self._gradient_views, strict=True):
            parameter.grad = view
