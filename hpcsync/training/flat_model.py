"""A model's parameters, and their gradients, as views into one contiguous buffer each.

Weights and gradients are transferred as one flat vector, without packing or unpacking: autograd accumulates directly
into the gradient buffer, and a transfer into the weight buffer is the model's new state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn

DTYPES = (torch.float32, torch.float64)
NARROW = (torch.bfloat16, torch.float16)
DOT_SIZE = 2**30  # elements of a part of a dot product; torch's on a GPU takes less than 2^31


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


def squared_norm(vector: torch.Tensor) -> float:
    """Return the sum of squares of a vector, shape (size,), as torch sums it; infinity if the vector is not finite."""
    square: float = _square(vector).item()
    return math.inf if math.isnan(square) else square


def _square(vector: torch.Tensor) -> torch.Tensor:
    if vector.numel() > DOT_SIZE:  # len() of a tensor is a call in Python
        return torch.stack([_square(part).double() for part in vector.split(DOT_SIZE)]).sum()
    if vector.dtype.itemsize < 4:
        vector = vector.float()
    return vector.dot(vector)


class SquaredNorm:
    """The `squared_norm` of a vector, begun; on a GPU it may be read once the stream has been waited for.

    Reading it at once would be another wait.
    """

    def __init__(self, vector: torch.Tensor) -> None:
        self._square = _square(vector)
        if vector.is_cuda:
            here = torch.empty((), dtype=self._square.dtype, pin_memory=True)
            self._square = here.copy_(self._square, non_blocking=True)

    def __float__(self) -> float:
        square: float = self._square.item()
        return math.inf if math.isnan(square) else square


def laid_out_as(parameter: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values of a parameter's shape in a new tensor of its strides.

    torch's fused optimizers take the n-th elements in memory of a parameter, its gradient and its state together.
    """
    return torch.empty_like(parameter, dtype=dtype).copy_(values)


def flat_dtype(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    """Return the type of a flat vector that holds these parameters exactly: float32, or float64 if one of them is.

    Raises
    ------
    ValueError
        If a parameter is of another type than float32, float64, bfloat16 and float16.
    """
    dtypes = {p.dtype for p in parameters}
    if others := dtypes - {*DTYPES, *NARROW}:
        raise ValueError(
            f"parameters of {', '.join(sorted(map(str, others)))} cannot be trained: allowed are float32, float64, "
            "bfloat16 and float16; leave others out of the optimizer"
        )
    return torch.float64 if torch.float64 in dtypes else torch.float32


class FlatModel:
    """A module whose parameters are views into `weights` and their gradients views into `gradient`.

    Parameters of another type than the flat vectors, such as bfloat16, cannot be views: they are copies, which
    `spread` and `collect` keep equal. Rounding such a parameter's elements changes nothing, since they were written by
    it, so the flat vector holds it exactly. The module's buffers (running statistics) are left alone.

    Parameters
    ----------
    model
        The module; its parameters are rebound.
    parameters
        Those of its parameters that the vectors hold; by default the `trainable` ones, all of one type, whose gradients
        are then 0. Otherwise gradients stay as they are.

    Attributes
    ----------
    weights, gradient
        1-D tensors of `size` elements, in the order of `parameters`.
    size
        Number of elements.
    parameters
        The parameters, in the order of the vectors.
    spans
        Slice of the vectors for each parameter.

    Raises
    ------
    ValueError
        From `trainable` or `flat_dtype`.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter] | None = None) -> None:
        self.model = model
        self.parameters = trainable(model) if parameters is None else list(parameters)
        dtype = flat_dtype(self.parameters)
        ends = list(itertools.accumulate(p.numel() for p in self.parameters))
        self.spans = [slice(end - p.numel(), end) for end, p in zip(ends, self.parameters, strict=True)]
        self.size = ends[-1]
        self.weights = torch.empty(self.size, dtype=dtype, device=self.parameters[0].device)
        self.gradient = torch.zeros_like(self.weights)
        self._weight_views = self._views(self.weights)
        self._gradient_views = self._views(self.gradient)
        self._copied = [index for index, p in enumerate(self.parameters) if p.dtype != dtype]
        self._kinds = [(p.dtype, p.device) for p in self.parameters]
        for weights, parameter in zip(self._weight_views, self.parameters, strict=True):
            weights.copy_(parameter.detach())
        for index in set(range(len(self.parameters))) - set(self._copied):
            self.parameters[index].data = self._weight_views[index]
        if parameters is None:
            self.zero_gradient()

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[span].view(p.shape) for span, p in zip(self.spans, self.parameters, strict=True)]

    def spread(self) -> None:
        """Make the parameters equal to `weights`, which have changed."""
        for index in self._copied:
            self.parameters[index].data.copy_(self._weight_views[index])

    def collect(self) -> None:
        """Make `weights` equal to the parameters, which have changed."""
        for index in self._copied:
            self._weight_views[index].copy_(self.parameters[index].data)

    def is_detached(self) -> bool:
        """Return True if a parameter is no longer what it was made: it was moved, cast, or given other memory."""
        kinds, views = self._kinds, self._weight_views
        copied = set(self._copied)
        for index, (parameter, kind, view) in enumerate(zip(self.parameters, kinds, views, strict=True)):
            if (parameter.dtype, parameter.device) != kind:
                return True
            if index not in copied and parameter.data_ptr() != view.data_ptr():
                return True
        return False

    def zero_gradient(self) -> None:
        """Zero the gradient and keep the views, which `zero_grad(set_to_none=True)` would drop."""
        self.gradient.zero_()
        for parameter, view in zip(self.parameters, self._gradient_views, strict=True):
            parameter.grad = view if parameter.dtype == view.dtype else None

    def drop_gradient(self) -> None:
        """Set every parameter's gradient to None, as `zero_grad(set_to_none=True)` does, before a later `gather`.

        Autograd then stores the tensors it has computed, and gathering copies them: two passes over memory fewer than
        zeroing the views and adding to them.
        """
        for parameter in self.parameters:
            parameter.grad = None

    def gather_gradient(self) -> None:
        """Make `gradient` hold every parameter's gradient.

        This is free when autograd wrote into the views, as it does unless `parameter.grad` was replaced; a replaced
        gradient is copied and the view restored. Where a parameter has no gradient it is zero, and stays None.
        """
        for index in range(len(self.parameters)):
            self.gather(index)

    def gather(self, index: int) -> None:
        """Do what `gather_gradient` does for one of `parameters`."""
        parameter, view = self.parameters[index], self._gradient_views[index]
        if parameter.grad is view:
            return
        if parameter.grad is None:
            view.zero_()
            return
        gradient = parameter.grad.detach()  # which has a graph after `backward(create_graph=True)`
        view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        if parameter.dtype == view.dtype:
            parameter.grad = view

    def return_gradient(self, present: Sequence[bool]) -> None:
        """Give the parameters for which `present` is true their gradients, which were changed in `gradient`."""
        for parameter, view, changed in zip(self.parameters, self._gradient_views, present, strict=True):
            if changed:
                same = parameter.dtype == view.dtype
                parameter.grad = view if same else laid_out_as(parameter, view, parameter.dtype)

    def move_gradient(self, buffer: torch.Tensor) -> None:
        """Move the gradient into `buffer`, a 1-D tensor of `size` elements of the same type."""
        self.gather_gradient()
        before, self.gradient = self._gradient_views, buffer.copy_(self.gradient)
        self._gradient_views = self._views(self.gradient)
        for parameter, old, view in zip(self.parameters, before, self._gradient_views, strict=True):
            if parameter.grad is old:
                parameter.grad = view
