"""Splitting a model in two halves before one of its submodules, for workers that train one half each.

This is layer separation (Stanza: Wu, Xu, Li and Xiong, arXiv 1812.10624). The model's forward is traced with torch.fx
down to the submodule and no further: modules that do not contain the submodule are left intact. Effects of pure Python
code on the way (draws from `random`, counters) happen once, during tracing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from hpcsync.config.errors import did_you_mean
from hpcsync.planning.split_cost import Shape
from hpcsync.training.flat_model import trainable
from hpcsync.training.gradient import Loss


class ModelSplit(NamedTuple):
    """The two halves of a model.

    They hold the model's own submodules, parameters and buffers: training a half trains the model, and `train()` and
    `eval()` of the model reach its halves. A deep copy of a half is independent.

    Parameters
    ----------
    below
        From a batch's first tensor to the activations that enter the submodule.
    above
        From those activations to the model's output.
    """

    below: nn.Module
    above: nn.Module


class _Mode(nn.Module):
    """The value of `self.training` of a traced module, which a half calls but does not contain."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = [module]  # in a list, so that its parameters are not registered here

    def forward(self) -> bool:
        """Return True in training mode."""
        return self._module[0].training

    def train(self, mode: bool = True) -> _Mode:
        """Set the mode of the traced module too."""
        self._module[0].training = mode
        return super().train(mode)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mode:
        return _Mode(nn.Module()).train(self())


class _Tracer(fx.Tracer):
    """Traces the forward of these modules, each of which contains the next; all others are leaves."""

    proxy_buffer_attributes = True

    def __init__(self, followed: Sequence[nn.Module]) -> None:
        super().__init__()
        self.followed = followed
        self.modes: dict[str, _Mode] = {}  # by the target of their nodes

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True for all modules but those to trace."""
        return all(m is not module for module in self.followed)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Trace with one argument (defaults for all others), and make `self.training` of each module a node."""
        x = self.create_proxy("placeholder", "x", (), {})
        for i, module in enumerate(self.followed):
            self.modes[f"_training_{i}"] = _Mode(module)
            module.__dict__["training"] = self.create_proxy("call_module", f"_training_{i}", (), {})
        return root_fn, [self.root, x]

    def create_arg(self, a: Any) -> Any:
        """Refuse constant tensors, which belong to neither half."""
        if isinstance(a, torch.Tensor) and all(a is not t for t in (*self.root.parameters(), *self.root.buffers())):
            raise ValueError("it uses a tensor that is neither a parameter nor a buffer of the model")
        return super().create_arg(a)


def cut(model: nn.Module, name: str) -> ModelSplit:
    """Split a model before a submodule.

    Parameters
    ----------
    model
        The model; its forward takes one tensor and returns one.
    name
        Qualified name of the first submodule of the upper half.

    Returns
    -------
    ModelSplit
        The halves.

    Raises
    ------
    ValueError
        If the model cannot be split there; the reason is one line.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if name not in modules or not name:
        top = ", ".join(child for child, _ in model.named_children()) or "none, the model has no submodules"
        raise ValueError(f"must be the name of a submodule (at the top: {top}){did_you_mean(name, modules)}")
    parts = name.split(".")
    tracer = _Tracer([modules[".".join(parts[:depth])] for depth in range(len(parts))])
    graph = _follow(model, tracer)
    held = {**modules, **tracer.modes, **dict(model.named_parameters()), **dict(model.named_buffers())}
    nodes = list(graph.nodes)
    calls = [i for i, node in enumerate(nodes) if node.op == "call_module" and held[node.target] is modules[name]]
    if len(calls) != 1:
        raise ValueError(f"must be called once by the model's forward, not {len(calls)} times")
    call, given, result = nodes[calls[0]], nodes[0], nodes[-1].args[0]
    # Both halves may look up parameters, buffers and modes, wherever forward does so first.
    looked_up = {node for node in nodes if node.op == "get_attr" or node.target in tracer.modes}
    entering = call.args[0] if len(call.args) == 1 and not call.kwargs else None
    if not isinstance(entering, fx.Node) or entering in looked_up:
        raise ValueError("must be called with one tensor, which comes from the batch, and with nothing else")
    if not isinstance(result, fx.Node) or result in looked_up:
        raise ValueError("the model must return one tensor and nothing else")
    before = [node for node in nodes[: calls[0]] if node not in looked_up and node is not given]
    after = [node for node in nodes[calls[0] : -1] if node not in looked_up]
    for node in (*after, nodes[-1]):
        for source in node.all_input_nodes:
            if source is not entering and source not in looked_up and source not in after:
                what = "the batch itself" if source is given else f"{source.name}, which is computed before it,"
                raise ValueError(
                    f"{what} is used after it: the lower half may pass on only the tensor that enters the submodule"
                )
    halves = ModelSplit(
        _half(held, before, given=given, result=entering),
        _half(held, after, given=entering, result=result),
    )
    _check_shares(model, halves)
    return halves


_HELD = ("_parameters", "_buffers", "_modules")  # a module's dictionaries in torch


def _follow(model: nn.Module, tracer: _Tracer) -> fx.Graph:
    """Trace the model's forward. It runs with proxies, and any that it stores in modules are removed afterwards."""
    before = [
        {key: value.copy() if key in _HELD else value for key, value in vars(module).items()}
        for module in tracer.followed
    ]
    try:
        graph = tracer.trace(model)
        if any(isinstance(buffer, fx.Proxy) for module in tracer.followed for buffer in module._buffers.values()):
            raise ValueError("it assigns to a buffer, which it may only change in place")
    except Exception as error:  # the user's forward may raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"the model's forward cannot be traced by torch.fx: {reason}") from None
    finally:
        for module, attributes in zip(tracer.followed, before, strict=True):
            module.__dict__.clear()
            module.__dict__.update(attributes)
    for node in list(graph.nodes):
        if node.target in tracer.modes and not node.users:
            graph.erase_node(node)
    return graph


def _half(held: dict[str, Any], nodes: Sequence[fx.Node], *, given: fx.Node, result: fx.Node) -> fx.GraphModule:
    """Return a module that computes `result` from `given` by these nodes."""
    graph = fx.Graph()
    copies = {given: graph.placeholder("x")}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in copies:
                copies[source] = graph.node_copy(source)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[result])
    targets = {node.target for node in graph.nodes if node.op in ("call_module", "get_attr")}
    half = fx.GraphModule(nn.Module(), fx.Graph())
    for name, module in held.items():  # in the model's order, which is that of its parameters
        if name in targets and isinstance(module, nn.Module):
            half.add_submodule(name, module)
        elif isinstance(module, nn.Module):
            for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if f"{name}.{key}".removeprefix(".") in targets:
                    _hold(half, name, key, tensor)
    half.graph = graph
    return half


def _hold(half: fx.GraphModule, name: str, key: str, tensor: torch.Tensor) -> None:
    """Register a tensor of the module `name`, of whose forward the half computes a part."""
    if name and name not in dict(half.named_modules(remove_duplicate=False)):
        half.add_submodule(name, nn.Module())
    module = half.get_submodule(name)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(key, tensor)
    else:
        module.register_buffer(key, tensor)


def _check_shares(model: nn.Module, halves: ModelSplit) -> None:
    """Raise ValueError unless every trainable parameter is in exactly one half and each half has one."""
    below, above = ({id(t) for t in (*half.parameters(), *half.buffers())} for half in halves)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) in below and id(tensor) in above:
            raise ValueError(f"{name} is used both before it and after it, and can be in one half only")
        if tensor.requires_grad and id(tensor) not in below | above:
            raise ValueError(f"{name} is not used by the model's forward, so no worker would train it")
    for half, where in zip(halves, ("before it", "from it on"), strict=True):
        if not any(parameter.requires_grad for parameter in half.parameters()):
            raise ValueError(f"the model has no trainable parameters {where}")


def positions(model: nn.Module, half: nn.Module) -> list[slice]:
    """Return the positions of a half's trainable parameters in the model's flat vector, as slices.

    The slices are in the half's own order. Adjacent parameters share a slice, so that a half whose parameters are
    contiguous in the model has one.
    """
    at, begin = {}, 0
    for parameter in trainable(model):
        at[id(parameter)] = slice(begin, begin := begin + parameter.numel())
    found: list[slice] = []
    for parameter in trainable(half):
        here = at[id(parameter)]
        if found and found[-1].stop == here.start:
            here = slice(found.pop().start, here.stop)
        found.append(here)
    return found


# ---- properties of the halves ----


def _on_meta(half: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode on the meta device: shapes without values."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in half.parameters()
    }
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in half.buffers()}
    return copy.deepcopy(half, memo).eval()


def without_values(half: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the half's output for x in evaluation mode on the meta device; nothing is computed."""
    with torch.no_grad():
        found: torch.Tensor = _on_meta(half)(x.to("meta"))
    return found


def activation_shape(below: nn.Module, x: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of one sample's activations at the cut, without computing anything.

    Parameters
    ----------
    below
        The lower half.
    x
        First tensor of any batch.

    Raises
    ------
    ValueError
        If the activations of a batch are not one floating-point tensor with one row per sample.
    """
    try:
        h = without_values(below, x)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"what enters it must have a shape that can be determined: {reason}") from None
    if not isinstance(h, torch.Tensor) or not h.is_floating_point():
        what = str(h.dtype) if isinstance(h, torch.Tensor) else type(h).__name__
        raise ValueError(f"what enters it must be one tensor of floating-point numbers, not {what}")
    if h.ndim == 0 or len(h) != len(x):
        raise ValueError(
            f"what enters it must have one row per sample: of {len(x)} samples it has shape {tuple(h.shape)}"
        )
    return tuple(h.shape[1:])


def flops(half: nn.Module, x: torch.Tensor) -> int:
    """Return the floating-point operations of a forward pass; only the shape and type of x matter."""
    from torch.utils.flop_counter import FlopCounterMode  # loads all decompositions

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        _on_meta(half)(x.to("meta"))
    return int(counter.get_total_flops())


def shape(halves: ModelSplit, batch: Sequence[torch.Tensor]) -> Shape:
    """Return the sizes of the halves for a batch (inputs, then labels). Raises as `activation_shape`."""
    x, *labels = (tensor[:1] for tensor in batch)
    below, above = (trainable(half) for half in halves)
    at_cut = activation_shape(halves.below, x)
    return Shape(
        sum(p.numel() for p in below),
        sum(p.numel() for p in above),
        math.prod(at_cut),
        sum(label.nbytes for label in labels),
        below[0].element_size(),
        flops(halves.below, x),
        flops(halves.above, torch.empty(1, *at_cut, dtype=below[0].dtype, device="meta")),
    )


def tensors_of(batch: Any) -> Sequence[torch.Tensor]:
    """Return the batch. Raises ValueError unless it is a tuple of tensors with one row per sample."""
    tensors = isinstance(batch, tuple | list) and all(isinstance(item, torch.Tensor) and item.ndim for item in batch)
    if not tensors or len({len(item) for item in batch}) != 1:
        raise ValueError("a sample must be a tuple of tensors, of which the first is what the model is called with")
    return batch


def check_halves(model: nn.Module, halves: ModelSplit, x: torch.Tensor) -> None:
    """Raise ValueError unless the halves compute what the model does, in evaluation mode.

    The upper half must not change its input in place either.
    """
    with _evaluating(model), torch.no_grad():
        expected = model(x)
        entering = halves.below(x)
        version = entering._version
        found = halves.above(entering)
    if entering._version != version:
        raise ValueError("the upper half must not change its input in place, as modules with inplace=True do")
    if not torch.allclose(expected, found, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise ValueError("the model computes something else than its halves do: is its forward defined by its class?")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode, and restore the mode of each afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def check_cut(model: nn.Module, halves: ModelSplit, loss: Loss, batch: Sequence[torch.Tensor]) -> None:
    """Raise ValueError unless the halves have the model's loss and gradient on a batch, in evaluation mode.

    The check does not cover that the loss is a mean over samples, which is required everywhere.
    """
    x, *rest = tensors_of(batch)
    check_halves(model, halves, x)
    lower, upper = (trainable(half) for half in halves)

    def whole() -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
        value = loss(model, x, *rest)
        return value, torch.autograd.grad(value, [*lower, *upper], allow_unused=True)

    def in_halves() -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
        h = halves.below(x)
        value = loss(halves.above, entering := h.detach().requires_grad_(), *rest)
        back, *of_upper = torch.autograd.grad(value, [entering, *upper], allow_unused=True)
        return value, (*torch.autograd.grad(h, lower, back, allow_unused=True), *of_upper)

    with _evaluating(model):
        expected = _numbers(whole)
        try:
            found = _numbers(in_halves)
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(f"the loss cannot be computed from what enters it: {reason}") from None
    for what, a, b in zip(("loss", *("gradient" for _ in (*lower, *upper))), expected, found, strict=True):
        if not math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6):
            raise ValueError(
                f"the {what} of a batch computed in halves must be that of the model, but differs: does the loss do "
                "more than call the model once, with the batch's first tensor?"
            )


def _numbers(compute: Callable[[], tuple[torch.Tensor, Sequence[torch.Tensor | None]]]) -> list[float]:
    """Return the loss and the norm of each gradient, with the same random draws every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        value, gradients = compute()
        return [float(value.detach()), *(0.0 if g is None else float(g.norm()) for g in gradients)]
