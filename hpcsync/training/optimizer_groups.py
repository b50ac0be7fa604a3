"""What optimizers have in their groups and keep of their parameters: read, set, and saved in a checkpoint.

What an optimizer's own step changes in its groups, such as a count of steps, an estimated distance or the learning
rate, is kept where the step is made: it is neither taken over from workers nor lost in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch

from hpcsync.config.torch_optimizers import IMPLEMENTATION
from hpcsync.state import Stateful
from hpcsync.training.flat_model import laid_out_as

KeptInGroups = list[list[dict[str, bool | int | float | None]]]  # for each group of each optimizer


class Number(NamedTuple):
    """A number, or a tuple of numbers, among the options of a group.

    Parameters
    ----------
    optimizer, group
        Indices of the optimizer and its group.
    key
        Key of the option.
    count
        Length of the tuple; 0 for a single number.
    """

    optimizer: int
    group: int
    key: str
    count: int  # type: ignore[assignment]  # the field hides tuple.count, which is not needed here


class Groups:
    """The groups of optimizers: numbers that are stated, and what the optimizers' own steps on this rank change.

    Attributes
    ----------
    optimizers
        The optimizers.
    numbers
        Numbers of all groups.
    own_keys
        For each group of each optimizer, the keys whose values its own steps change.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    numbers: Sequence[Number]
    own_keys: list[list[set[str]]]

    @property
    def _options(self) -> list[list[float]]:
        found = []
        for optimizer, group, key, count in self.numbers:
            value = self.optimizers[optimizer].param_groups[group][key]
            found.append([*map(float, value)] if count else [float(value)])
        return found

    @_options.setter
    def _options(self, saved: list[list[float]]) -> None:
        for (optimizer, group, key, count), values in zip(self.numbers, saved, strict=True):
            _set(self.optimizers[optimizer].param_groups[group], key, values, count)

    def set_numbers(self, stated: Sequence[float]) -> None:
        """Set the numbers of all groups, as in a `StepToMake`, but not the optimizers' own."""
        at = 0
        for optimizer, group, key, count in self.numbers:
            n = max(1, count)
            if key not in self.own_keys[optimizer][group]:
                _set(self.optimizers[optimizer].param_groups[group], key, stated[at : at + n], count)
            at += n

    @property
    def kept_in_groups(self) -> KeptInGroups:
        """The values of `own_keys` in each group; those of a server or of a checkpoint can be assigned."""
        return [
            [
                {
                    key: group[key].item() if isinstance(group[key], torch.Tensor) else group[key]
                    for key in sorted(keys & marks(group).keys())
                }
                for group, keys in zip(each.param_groups, own, strict=False)
            ]
            for each, own in zip(self.optimizers, self.own_keys, strict=True)
        ]

    @kept_in_groups.setter
    def kept_in_groups(self, kept: KeptInGroups) -> None:
        for optimizer, of_groups, values in zip(self.optimizers, self.own_keys, kept, strict=False):
            for group, keys, own in zip(optimizer.param_groups, of_groups, values, strict=False):
                keys.update(own)
                for key, value in own.items():
                    if isinstance(before := group.get(key), torch.Tensor) and value is not None:
                        before.fill_(value)
                    else:
                        group[key] = value


class KeptByOptimizers(Groups, Stateful):
    """Optimizers whose state is what they keep of their parameters and in their groups."""

    state_types = {"_kept": list[dict[int | str, Any]], "kept_in_groups": KeptInGroups}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state; before format 7 it has nothing of the groups."""
        super().restore({"kept_in_groups": [], **state})

    @property
    def _kept(self) -> list[dict[int | str, Any]]:
        return [optimizer.state_dict()["state"] for optimizer in self.optimizers]

    @_kept.setter
    def _kept(self, saved: list[dict[int | str, Any]]) -> None:
        for optimizer, kept in zip(self.optimizers, saved, strict=True):
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": kept, "param_groups": groups})
        lay_out_kept(self.optimizers)


def parameters_of(*optimizers: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of all groups of optimizers."""
    return chain.from_iterable(group["params"] for optimizer in optimizers for group in optimizer.param_groups)


def is_number(value: Any) -> bool:
    """Return whether an option is a number, or a tensor of one."""
    return not isinstance(value, bool) and (
        isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    )


def group_numbers(index: int, optimizer: torch.optim.Optimizer) -> Iterator[Number]:
    """Yield the numbers among the options of an optimizer's groups; `index` is that of the optimizer."""
    for at, group in enumerate(optimizer.param_groups):
        for key in sorted(optimizer.defaults.keys() & group.keys()):  # a scheduler adds keys of its own
            value = group[key]
            if isinstance(value, tuple | list) and all(map(is_number, value)):
                yield Number(index, at, key, len(value))
            elif is_number(value):
                yield Number(index, at, key, 0)


def fixed_options(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, str, Any]]:
    """Yield the options that are no numbers and change what a step does: name of the optimizer, key and value."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key in sorted(optimizer.defaults.keys() & group.keys() - {*IMPLEMENTATION}):
                if isinstance(group[key], bool | str):
                    yield type(optimizer).__name__, key, group[key]


def _set(group: dict[str, Any], key: str, values: Sequence[float], count: int) -> None:
    """Set an option; a whole number stays one."""
    before = group[key]
    if count:
        group[key] = type(before)(values)
    elif isinstance(before, torch.Tensor):
        before.fill_(values[0])
    else:
        group[key] = int(values[0]) if isinstance(before, int) and values[0] == int(values[0]) else values[0]


@contextmanager
def scaled_rates(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Let the optimizer step with its learning rates times this factor; rates that its step changes stay changed."""
    given = [group["lr"] for group in optimizer.param_groups]
    scaled = given if factor == 1.0 else [rate * factor for rate in given]
    before = [*map(_mark, scaled)]
    for group, rate in zip(optimizer.param_groups, scaled, strict=True):
        group["lr"] = rate
    try:
        yield
    finally:
        for group, rate, mark in zip(optimizer.param_groups, given, before, strict=True):
            if factor == 0.0 or _mark(group["lr"]) == mark:
                group["lr"] = rate
            elif factor != 1.0:
                group["lr"] = group["lr"] / factor


def kept_of_all(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return what an optimizer keeps in its state of all parameters together, such as a count of steps."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}


def on_device(kept: Mapping[Any, Any], device: torch.device | str) -> dict[Any, Any]:
    """Return what is kept, with its tensors on this device."""
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in kept.items()}


def marks(group: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return what tells whether the numbers, bools and Nones of a group have changed."""
    return {
        key: _mark(value)
        for key, value in group.items()
        if value is None or isinstance(value, bool) or is_number(value)
    }


def _mark(value: Any) -> tuple[Any, ...]:
    """Return what tells whether a value has changed; a tensor is not read, for which a GPU would be waited for."""
    return (id(value), value._version) if isinstance(value, torch.Tensor) else (value,)


def lay_out_kept(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Lay out what is kept of each parameter as the parameter is, such as with its channels last."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, torch.Tensor):  # what an optimizer keeps for all parameters
                continue
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    if value.stride() != parameter.stride():
                        state[key] = laid_out_as(parameter, value, value.dtype)
