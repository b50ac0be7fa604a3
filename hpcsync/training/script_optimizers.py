"""The optimizers of a training script: where their steps are made, and what of them travels with a push.

A script gives one optimizer with any number of parameter groups, or several optimizers. Where workers step themselves,
the script's own optimizers step on the model's own parameters (`OwnOptimizer`). On servers, each server has optimizers
of the same classes and options for the pieces of the parameters in its shard (`piece_optimizer`).

What a schedule changes on a worker must be what its push is used with. A worker therefore *states* with every push the
numbers of all groups (learning rates, momenta, ...) and the parameters that have a gradient: a parameter without one is
left alone by torch's optimizers, and so it is by a server. A statement is a float64 vector::

    the numbers of group 0, 1, ... of all optimizers | 1 or 0 for each parameter

Shards are cut only between parameters, or at multiples of `CUT` elements from the begin of a parameter. Vectorised
loops then handle every element as they would in the whole parameter, so the number of servers does not change a bit. An
optimizer that is not element-wise needs whole parameters.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcsync.config.errors import JobError, shown
from hpcsync.config.torch_optimizers import IMPLEMENTATION
from hpcsync.state import built, plain
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.optimizer_groups import (
    Groups,
    KeptByOptimizers,
    fixed_options,
    group_numbers,
    is_number,
    kept_of_all,
    lay_out_kept,
    marks,
    on_device,
    parameters_of,
    scaled_rates,
)
from hpcsync.training.optimizers import ELEMENTWISE, WorkerOptimizer

CUT = 64  # a multiple of the vector width of torch's kernels on any CPU
REFUSED = {  # and why
    torch.optim.LBFGS: "a closure: it evaluates the loss several times in a step",
    torch.optim.SparseAdam: "sparse gradients, which have no place in a flat vector",
}
WRAPPERS = frozenset({"accelerate", "lightning", "lightning_fabric"})  # packages whose optimizers call the script's


class StepToMake(NamedTuple):
    """A step of one of a script's optimizers.

    Parameters
    ----------
    stepping, before
        Index of the optimizer, and of that of the step before; -1 if there was none.
    numbers
        Numbers of all groups of all optimizers.
    skips
        Whether the step is skipped.
    """

    stepping: int
    before: int
    numbers: list[float]
    skips: bool


class ScriptOptimizers(Groups):
    """The optimizers of a script.

    Parameters
    ----------
    optimizers
        The optimizers, on parameters of the model.
    flat
        Flat view of exactly these parameters.
    clip_norm
        Largest norm of the gradient that an optimizer gets; None: any.

    Attributes
    ----------
    only
        0 if there is one optimizer, else None.
    stepping
        Index of the optimizer whose step is under way; `only` between the steps.
    skips
        True if the step under way must change nothing, because a gradient is not finite (GradScaler).
    before
        Index of the optimizer of the latest step on this worker; -1 before the first.
    makes_step
        True while an optimizer's own step is made on this worker.
    told_rates
        Learning rates of all groups, as last told.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], flat: FlatModel, clip_norm: float | None = None
    ) -> None:
        self.optimizers, self.flat, self.clip_norm = optimizers, flat, clip_norm
        self.only = 0 if len(optimizers) == 1 else None
        self.stepping, self.skips = self.only, False
        self.before, self.makes_step = -1, False
        self.steps = [optimizer.step for optimizer in optimizers]  # before a session takes them over
        self.numbers = tuple(chain.from_iterable(group_numbers(index, each) for index, each in enumerate(optimizers)))
        self._fixed = [*fixed_options(optimizers)]
        self.told_rates: list[float] = []
        self.own_keys = [[set() for _ in each.param_groups] for each in optimizers]
        owner = {id(p): index for index, each in enumerate(optimizers) for p in parameters_of(each)}
        self.owner = [owner[id(p)] for p in flat.parameters]  # index of each parameter's optimizer
        lay_out_kept(optimizers)  # the flat model may have laid out parameters anew

    @property
    def n_stated(self) -> int:
        """Length of a statement."""
        return sum(max(1, number.count) for number in self.numbers) + len(self.flat.parameters)

    @property
    def present(self) -> list[bool]:
        """Parameters that the step under way changes: those of its optimizer that have a gradient."""
        return [
            not self.skips and owner == self.stepping and parameter.grad is not None
            for owner, parameter in zip(self.owner, self.flat.parameters, strict=True)
        ]

    def state(self) -> dict[str, Any]:
        """Return what a step that is still to be made needs besides its gradient, for a checkpoint."""
        return {**plain(self.step_to_make()), "present": self.present}

    @contextmanager
    def finishing(self, state: Mapping[str, Any] | None) -> Iterator[None]:
        """Let the step be the one of a checkpoint, whose gradient is in the flat vector again, and forget it then.

        Checkpoints of before have none.
        """
        if state is None:
            yield
            return
        self.flat.return_gradient(built(list[bool], state["present"]))
        with self.following([built(StepToMake, {name: state[name] for name in StepToMake._fields})]):
            yield
        self.flat.drop_gradient()

    @property
    def lr(self) -> float:
        """Learning rate of the first group of the optimizer whose step is under way, or of the first one."""
        return float(self.optimizers[self.stepping or 0].param_groups[0]["lr"])

    @property
    def sets_rates(self) -> bool:
        """True if an optimizer's own step on this rank changes a learning rate."""
        return any("lr" in keys for groups in self.own_keys for keys in groups)

    def changed_rates(self) -> list[tuple[int, float]]:
        """Return index and learning rate of each group whose rate has changed since the last call.

        The first call returns all groups. With a single group there are none: its rate is `lr`.
        """
        rates = [float(group["lr"]) for each in self.optimizers for group in each.param_groups]
        before, self.told_rates = self.told_rates or [math.nan] * len(rates), rates
        known = zip(rates, before, strict=False)  # a group that is added in the loop ends the run, as any other change
        return [] if len(rates) == 1 else [(at, rate) for at, (rate, last) in enumerate(known) if rate != last]

    def statement(self) -> np.ndarray:
        """Return what a worker states with its push, shape (n_stated,).

        Raises
        ------
        JobError
            If the script has changed an option that cannot be stated.
        """
        for (optimizer, key, before), (*_, now) in zip(self._fixed, fixed_options(self.optimizers), strict=False):
            if now != before:
                raise JobError(
                    f"optimizer {optimizer}: {key} = {shown(now)}: must stay {shown(before)} where servers step: only "
                    "numbers of its groups may change"
                )
        return np.array([*self._stated_numbers(), *map(float, self.present)])

    def _stated_numbers(self) -> list[float]:
        return [*chain.from_iterable(self._options)]

    @contextmanager
    def own_step(self, index: int, optimizer: torch.optim.Optimizer, lr: float) -> Iterator[None]:
        """Let an optimizer, or its twin, step with its rates times `lr`; note what the step changes in its groups."""
        before = [marks(group) for group in optimizer.param_groups]
        held = [[*group.values()] for group in optimizer.param_groups]  # else a new tensor could have the id of one
        with scaled_rates(optimizer, lr):
            yield
        del held
        for keys, group, then in zip(self.own_keys[index], optimizer.param_groups, before, strict=False):
            keys.update(key for key, mark in marks(group).items() if mark != then.get(key))

    def keep_of_all(self, kept: Sequence[Mapping[Any, Any]]) -> None:
        """Let the optimizers keep what those of a server have kept of all parameters together (`kept_of_all`)."""
        device = self.flat.weights.device
        for optimizer, values in zip(self.optimizers, kept, strict=True):
            optimizer.state.update(on_device(values, device))

    def digest(self) -> int:
        """Return 24 bits that are the same on workers whose optimizers have the same numbers, and step alike so far."""
        return zlib.crc32(np.array([*self._stated_numbers(), self.skips, self.before]).tobytes()) & 0xFFFFFF

    def step_to_make(self) -> StepToMake:
        """Return the step under way, for `following` on all workers."""
        return StepToMake(self.stepping or 0, self.before, self._stated_numbers(), self.skips)

    @contextmanager
    def following(self, steps: Sequence[StepToMake]) -> Iterator[None]:
        """Let the step be that of the workers that contribute to it, with the mean of their numbers, if none skips it.

        Raises
        ------
        JobError
            If they are steps of different optimizers.
        """
        for stepping in ({step.stepping for step in steps}, {step.before for step in steps}):
            if len(stepping) > 1:
                raise JobError(different(stepping))
        own_step, own_numbers = (self.stepping, self.skips), self._stated_numbers()
        same = all(step.numbers == steps[0].numbers for step in steps)
        numbers = steps[0].numbers if same else np.mean([step.numbers for step in steps], axis=0).tolist()
        self.stepping, self.skips = steps[0].stepping, any(step.skips for step in steps)
        self.set_numbers(numbers)
        try:
            yield
        finally:
            self.stepping, self.skips = own_step
            self.set_numbers(own_numbers)

    def cuts(self, n_shards: int) -> list[slice]:
        """Return the shards of the flat vector, as equal as the places of the cuts allow.

        Raises
        ------
        JobError
            If there are more shards than pieces.
        """
        places = sorted(set(self._places()) - {0, self.flat.size})
        if n_shards > len(places) + 1:
            whole = (
                "" if self._elementwise else f" for {type(self.optimizers[0]).__name__}, which needs whole parameters"
            )
            must = f"must be at most {len(places) + 1}{whole}: the model has no more pieces"
            raise JobError(f"cluster.servers = {n_shards}: {must}")
        cuts, at = [0], 0
        for shard in range(1, n_shards):
            last = len(places) - (n_shards - 1 - shard)  # leave a place for each of the other cuts
            ideal = self.flat.size * shard / n_shards
            at = min(range(at, last), key=lambda place: abs(places[place] - ideal))
            cuts.append(places[at])
            at += 1
        return [slice(begin, end) for begin, end in zip(cuts, [*cuts[1:], self.flat.size], strict=True)]

    def adopt(self, pieces: Iterable[tuple[int, slice, dict[str, Any]]]) -> None:
        """Let the script's optimizers keep what the servers' have kept (`PieceOptimizer.kept_pieces`)."""
        for index, part, kept in pieces:
            parameter = self.flat.parameters[index]
            state = self.optimizers[self.owner[index]].state[parameter]
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and value.numel() == part.stop - part.start != 1:
                    whole = state.get(key)
                    if not isinstance(whole, torch.Tensor) or whole.shape != parameter.shape:
                        whole = torch.zeros_like(parameter, dtype=value.dtype)
                    state[key] = whole = whole.contiguous()
                    whole.view(-1)[part] = value.reshape(-1).to(whole.device)
                else:
                    state.update(on_device({key: value}, parameter.device))
        lay_out_kept(self.optimizers)

    def kept_pieces(self) -> list[tuple[int, slice, dict[str, Any]]]:
        """Return what the script's optimizers keep for each parameter, as `PieceOptimizer.kept_pieces` does."""
        found = []
        for index, parameter in enumerate(self.flat.parameters):
            if state := self.optimizers[self.owner[index]].state.get(parameter):
                found.append((index, slice(0, parameter.numel()), on_device(state, "cpu")))
        return found

    def kept_of_all(self) -> list[dict[Any, Any]]:
        """Return for each of the script's optimizers what it keeps of all parameters together."""
        return [on_device(kept_of_all(each), "cpu") for each in self.optimizers]

    @property
    def _elementwise(self) -> bool:
        return all(ELEMENTWISE.get(type(each).__name__.lower()) is type(each) for each in self.optimizers)

    def _places(self) -> Iterator[int]:
        for span in self.flat.spans:
            yield from range(span.start, span.stop, CUT) if self._elementwise else (span.start,)

    def on_worker(self, weights: torch.Tensor) -> OwnOptimizer:
        """Return the optimizers as they step on this worker; `weights` are those of the flat model."""
        assert weights is self.flat.weights
        return OwnOptimizer(self)


class OwnOptimizer(KeptByOptimizers, WorkerOptimizer):
    """The script's optimizers, as they step on the model's own parameters.

    Learning rates and the like that the script changes are no part of the state: a resumed script goes through its
    epochs again, and its schedulers with it.

    Parameters
    ----------
    script
        The optimizers.
    """

    state_types = {"_lr": list[list[float]]}

    def __init__(self, script: ScriptOptimizers) -> None:
        self._script, self.optimizers = script, script.optimizers
        self.numbers, self.own_keys = script.numbers, script.own_keys
        self._lr = [[0.0] * len(each.param_groups) for each in script.optimizers]  # of each group's last step

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state; checkpoints of before have the numbers of all groups too."""
        super().restore({name: value for name, value in state.items() if name != "options"})

    def step(self, gradient: torch.Tensor, lr: float) -> None:
        """Make the script's step; the gradient is in the model's flat vector, `lr` a factor of the script's rates."""
        script = self._script
        script.before = at_optimizer = script.stepping or 0
        if script.skips:
            return
        optimizer = script.optimizers[at_optimizer]
        present = script.present
        script.flat.return_gradient(present)
        if script.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(parameters_of(optimizer)), script.clip_norm)
        with script.own_step(at_optimizer, optimizer, lr):
            self._lr[at_optimizer] = [float(group["lr"]) for group in optimizer.param_groups]
            script.makes_step = True
            try:
                script.steps[at_optimizer]()
            finally:
                script.makes_step = False
        script.flat.collect()

    def drop_look_ahead(self) -> None:
        """Change the weights from theta + mu v to theta."""
        for index, buffer, scale in self._ahead():
            self._view(self._script.flat.weights, index).add_(buffer, alpha=-scale)

    def look_ahead(self) -> None:
        """Change the weights from theta to theta + mu v; the next step is from there, whatever the parameters' type."""
        for index, buffer, scale in self._ahead():
            self._view(self._script.flat.weights, index).add_(buffer, alpha=scale)
        self._script.flat.spread()

    def without_look_ahead(self) -> torch.Tensor:
        """Return theta: the weights themselves if there is no look-ahead, otherwise a new tensor."""
        ahead, weights = list(self._ahead()), self._script.flat.weights
        if not ahead:
            return weights
        weights = weights.clone()
        for index, buffer, scale in ahead:
            self._view(weights, index).add_(buffer, alpha=-scale)
        return weights

    def _view(self, vector: torch.Tensor, index: int) -> torch.Tensor:
        return vector[self._script.flat.spans[index]].view(self._script.flat.parameters[index].shape)

    def _ahead(self) -> Iterator[tuple[int, torch.Tensor, float]]:
        """Yield each parameter that looks ahead, its momentum buffer, and the factor that makes it mu v."""
        index_of = {id(p): index for index, p in enumerate(self._script.flat.parameters)}
        for at, optimizer in enumerate(self._script.optimizers):
            for group, lr in zip(optimizer.param_groups, self._lr[at], strict=False):  # see `changed_rates`
                if isinstance(optimizer, torch.optim.SGD) and group["nesterov"]:
                    for parameter in group["params"]:
                        buffer = optimizer.state[parameter].get("momentum_buffer")
                        if buffer is not None:
                            yield index_of[id(parameter)], buffer, -lr * group["momentum"]


def different(stepping: Iterable[int]) -> str:
    """Return the refusal of an update to which workers contribute with different optimizers."""
    numbers = ", ".join(map(str, sorted(stepping)))
    return f"step: all workers must step the same optimizer in the same update; they step optimizers {numbers}"


def different_rates(last: Iterable[tuple[tuple[int, int], list[float]] | None]) -> str:
    """Return a line if workers that have come equally far have different learning rates; "" if there are none.

    Parameters
    ----------
    last
        Of each rank the numbers of its steps and training epochs, and the rates of all groups in the last one; None for
        a server.
    """
    first: dict[tuple[int, int], list[float]] = {}
    for at, rates in filter(None, last):
        for one, other in zip(first.setdefault(at, rates), rates, strict=False):
            if not math.isclose(one, other, rel_tol=1e-9):
                return (
                    f"the workers' learning rates differ in step {at[0]}: {one:.4g} and {other:.4g}; a scheduler that "
                    "follows a loss, such as ReduceLROnPlateau, must get the same one on every worker"
                )
    return ""


def trained_parameters(optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that the optimizers have, in the order of the model.

    Raises
    ------
    JobError
        If an optimizer cannot run, or has a parameter that is not the model's or that another one has.
    """
    for optimizer in optimizers:
        refused = next((each for each in REFUSED if isinstance(optimizer, each)), None)
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if refused is None and closure is not None and closure.default is inspect.Parameter.empty:
            refused = torch.optim.LBFGS  # another like it
        if refused is not None:
            raise JobError(f"optimizer {type(optimizer).__name__}: must be one without {REFUSED[refused]}")
        if not all(is_number(group.get("lr")) for group in optimizer.param_groups):
            raise JobError(
                f"optimizer {type(optimizer).__name__}: must have a learning rate (lr), a number, in each of its groups"
            )
    given = [*parameters_of(*optimizers)]
    own = {id(p) for p in model.parameters()}
    if any(id(p) not in own for p in given):
        raise JobError(
            "optimizer: must have parameters of the model only; a parameter in its groups is not the model's"
        )
    if len({id(p) for p in given}) < len(given):
        raise JobError("optimizer: must have each parameter once; several optimizers have the same")
    if not given:
        raise JobError("optimizer: must have a parameter")
    chosen = {id(p) for p in given}
    return [p for p in model.parameters() if id(p) in chosen]


def describe(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the keys of a job's [optimizer] that these optimizers give."""
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    first, *others = [
        {"name": type(optimizer).__name__.lower(), **_plain(optimizer, group)} for optimizer, group in groups
    ]
    if not others:
        return first
    sizes = [len(group["params"]) for _, group in groups]
    return first | {"groups": [table | {"parameters": n} for table, n in zip([first, *others], sizes, strict=True)]}


def _plain(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group that a job file can hold, without those that only select an implementation."""
    kept: dict[str, Any] = {}
    for key in optimizer.defaults.keys() & group.keys() - {*IMPLEMENTATION}:
        value = group.get("initial_lr", group[key]) if key == "lr" else group[key]  # a scheduler may begin at 0
        if isinstance(value, bool | str):
            kept[key] = value
        elif is_number(value):
            kept[key] = int(value) if isinstance(value, int) else float(value)
        elif isinstance(value, tuple | list) and all(map(is_number, value)):
            kept[key] = [*map(float, value)]
    return dict(sorted(kept.items()))


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer whose `step` that of a wrapper from Lightning Fabric or Accelerate calls."""
    packages = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if packages & WRAPPERS and isinstance(inner, torch.optim.Optimizer) else optimizer


def holds_another(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer has another one, whose parameters a copy of it would step, too."""
    return any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values())


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> Callable[[], None]:
    """Let this be the `step` of an optimizer; return what gives it back its own."""
    own = optimizer.__dict__.get("step")
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # what a scheduler looks for
    optimizer.step = step  # type: ignore[method-assign]

    def give_back() -> None:
        del optimizer.step
        if own is not None:
            optimizer.step = own  # type: ignore[method-assign]

    return give_back


def unscale(optimizer: torch.optim.Optimizer) -> None:
    """Divide the gradients by the scale that a `torch.amp.GradScaler` has left to the optimizer's step, if any."""
    if (scale := getattr(optimizer, "grad_scale", None)) is not None:
        factor = float(scale)  # waits for a GPU, hence once
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                parameter.grad.div_(factor)


def same(one: Any, other: Any) -> bool:
    """Return True if two states of optimizers are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other.to(one.device))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)
