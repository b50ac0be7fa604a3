"""Optimizers of a script's classes and options on a server, for the pieces of the parameters in its shard."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from hpcsync.config.errors import JobError
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.optimizer_groups import KeptByOptimizers, kept_of_all, on_device
from hpcsync.training.optimizers import ServerOptimizer
from hpcsync.training.script_optimizers import ScriptOptimizers, different

Reduce = Callable[[float], float]  # sums a number over all servers


class _Piece:
    """The part of a parameter in a shard.

    Attributes
    ----------
    index
        Index of the parameter in the flat model.
    span
        Slice of the server's row.
    parameter
        The elements, in the parameter's type: a view of the row if that has the same type.
    """

    __slots__ = ("index", "parameter", "shape", "span")

    def __init__(self, index: int, span: slice, shape: torch.Size | None, like: torch.nn.Parameter) -> None:
        self.index, self.span = index, span
        self.shape = torch.Size([span.stop - span.start]) if shape is None else shape
        self.parameter = torch.nn.Parameter(like.new_empty(self.shape), requires_grad=True)

    def of(self, row: torch.Tensor) -> torch.Tensor:
        """Return these elements of a row, in the parameter's type."""
        return row[self.span].view(self.shape).to(self.parameter.dtype)


class PieceOptimizer(KeptByOptimizers, ServerOptimizer):
    """Optimizers like those of the script for the pieces of its parameters in one shard.

    Parameters
    ----------
    script
        The script's optimizers, whose state so far (`load_state_dict`) is taken over.
    weights
        The server's row of weights; its `data` may be replaced between steps.
    shard
        Slice of the flat vector that the row begins with.
    reduce
        Sums a number over all servers; they all call it at the same update.
    """

    state_types = {"_options": list[list[float]], "_momentum": float, "_stepped": set[int]}

    def __init__(
        self, script: ScriptOptimizers, weights: torch.nn.Parameter, shard: slice, reduce: Reduce = float
    ) -> None:
        self._script, self._weights, self._reduce, self._begin = script, weights, reduce, shard.start
        self.numbers, self.own_keys = script.numbers, script.own_keys
        self._momentum = math.nan  # chosen by the paradigm
        self._stepped: set[int] = set()  # optimizers that have made a step here
        self._pieces = list(_pieces(script.flat, shard))
        self._present = [True] * len(script.flat.parameters)
        by_parameter = {id(script.flat.parameters[piece.index]): piece for piece in self._pieces}
        self.optimizers = [_twin(optimizer, by_parameter, script.flat, shard) for optimizer in script.optimizers]
        self._row: torch.Tensor | None = None
        self._stated: np.ndarray | None = None  # numbers of the last update

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state; before format 7 it does not tell which optimizers have made a step."""
        super().restore({"stepped": [], **state})

    def follow(self, stated: Sequence[np.ndarray]) -> None:
        """Take over the numbers that the contributors have stated, or their mean, and all gradients that any has.

        Raises
        ------
        JobError
            If they step different optimizers: what they have of the others' gradients is not meant for a step. If a
            script changes a number that the optimizer's own step changes, too.
        """
        n = len(self._present)
        stepping = {self._script.owner[index] for each in stated for index in np.flatnonzero(each[-n:])}
        if len(stepping) > 1:
            raise JobError(different(stepping))
        together = stated[0] if all(np.array_equal(stated[0], each) for each in stated[1:]) else np.mean(stated, axis=0)
        self._refuse_changed(together[:-n])
        self.set_numbers(together[:-n].tolist())
        self._present = [bool(each) for each in np.any([each[-n:] for each in stated], axis=0)]
        if not math.isnan(self._momentum):
            self.set_momentum(self._momentum)

    def _refuse_changed(self, numbers: np.ndarray) -> None:
        """Raise JobError if a script changes a number that the optimizer's own step changes here."""
        last, self._stated = self._stated, numbers.copy()
        if last is None or np.array_equal(last, numbers):
            return
        changed, at = np.flatnonzero(last != numbers), 0
        for index, group, key, count in self.numbers:
            if key in self.own_keys[index][group] and at in changed:
                raise JobError(own_and_changed(self.optimizers[index], key))
            at += max(1, count)

    def step(self, gradient: torch.Tensor, lr: float) -> None:
        """Step with every optimizer of which a parameter has a gradient; `lr` is a factor of the stated rates."""
        self._place()
        stepped = [piece for piece in self._pieces if self._present[piece.index]]
        for piece in self._pieces:
            piece.parameter.grad = None
        for piece in stepped:
            piece.parameter.grad = piece.of(gradient)
        self._clip(stepped)
        for index in sorted({self._script.owner[piece.index] for piece in stepped}):
            self._stepped.add(index)
            with self._script.own_step(index, self.optimizers[index], lr):
                self.optimizers[index].step()
        for piece in stepped:
            if piece.parameter.dtype != self._weights.dtype:
                self._weights.data[piece.span].view(piece.shape).copy_(piece.parameter.data)

    def set_momentum(self, momentum: float) -> None:
        """Change the momentum of all groups that have one, whatever workers state."""
        self._momentum = momentum
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if "momentum" in group:
                    group["momentum"] = momentum

    def kept_pieces(self) -> list[tuple[int, slice, dict[str, Any]]]:
        """Return what is kept for each piece: index of the parameter, the piece's elements in it, values by key."""
        found = []
        for piece in self._pieces:
            state = self.optimizers[self._script.owner[piece.index]].state.get(piece.parameter)
            if state:
                begin = self._begin + piece.span.start - self._script.flat.spans[piece.index].start
                part = slice(begin, begin + piece.parameter.numel())
                found.append((piece.index, part, on_device(state, "cpu")))
        return found

    def kept_of_all(self) -> list[dict[Any, Any]]:
        """Return for each optimizer what it keeps of all parameters together; nothing if it has made no step here."""
        return [
            on_device(kept_of_all(each), "cpu") if index in self._stepped else {}
            for index, each in enumerate(self.optimizers)
        ]

    def _place(self) -> None:
        """Let the pieces be views of the row, which may be another one than in the last step."""
        row = self._weights.data
        if row is self._row:
            return
        self._row = row
        for piece in self._pieces:
            piece.parameter.data = piece.of(row)

    def _clip(self, stepped: Sequence[_Piece]) -> None:
        limit = self._script.clip_norm
        if limit is None:
            return
        gradients = [piece.parameter.grad for piece in stepped if piece.parameter.grad is not None]
        squares = [gradient.double().square().sum() for gradient in gradients]
        total = sum(torch.stack(squares).tolist()) if squares else 0.0  # one wait for a GPU, not one each
        factor = clipped(math.sqrt(self._reduce(total)), limit)
        for gradient in gradients:
            gradient.mul_(factor)


def clipped(norm: float, limit: float | None) -> float:
    """Return the factor with which `torch.nn.utils.clip_grad_norm_` clips a gradient of this norm."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def own_and_changed(optimizer: torch.optim.Optimizer, key: str) -> str:
    """Return the refusal of a number that both an optimizer's step on a server and the loop on a worker change."""
    return (
        f"optimizer {type(optimizer).__name__}: changes {key} in its step, on the servers, so the loop must not change "
        "it; leave out the scheduler, or choose a paradigm whose workers step"
    )


def _pieces(flat: FlatModel, shard: slice) -> Iterator[_Piece]:
    for index, (span, parameter) in enumerate(zip(flat.spans, flat.parameters, strict=True)):
        begin, end = max(span.start, shard.start), min(span.stop, shard.stop)
        if begin < end:
            whole = end - begin == span.stop - span.start
            part = slice(begin - shard.start, end - shard.start)
            yield _Piece(index, part, parameter.shape if whole else None, parameter)


def _twin(
    optimizer: torch.optim.Optimizer, pieces: dict[int, _Piece], flat: FlatModel, shard: slice
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and options, with its state, for these pieces of its parameters."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler or a session may have replaced it
    for key in [key for key in twin.__dict__ if key.startswith("_optimizer_") and key.endswith("_hooks")]:
        twin.__dict__[key] = OrderedDict()
    kept = [[p for p in group["params"] if id(p) in pieces] for group in optimizer.param_groups]
    twin.param_groups = [
        {**group, "params": [pieces[id(p)].parameter for p in parameters]}
        for group, parameters in zip(optimizer.param_groups, kept, strict=True)
    ]
    twin.state = defaultdict(dict, copy.deepcopy(kept_of_all(optimizer)) if any(kept) else {})
    for parameter in chain.from_iterable(kept):
        piece = pieces[id(parameter)]
        span = flat.spans[piece.index]
        part = slice(piece.span.start + shard.start - span.start, piece.span.stop + shard.start - span.start)
        if parameter in optimizer.state:
            twin.state[piece.parameter] = {
                key: _part(value, parameter, part, piece.shape) for key, value in optimizer.state[parameter].items()
            }
    return twin


def _part(value: Any, parameter: torch.Tensor, part: slice, shape: torch.Size) -> Any:
    """Return a piece's part of a value that an optimizer keeps for a whole parameter."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape:
        return value.clone()
    return value.reshape(-1)[part].view(shape).clone()
