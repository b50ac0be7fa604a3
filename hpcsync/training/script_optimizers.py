"""The optimizers of a training script: where their steps are made, and what of them travels with a push.

A script gives one optimizer with any number of parameter groups, or several optimizers. Where workers step themselves,
the script's own optimizers step on the model's own parameters (`OwnOptimizer`). On servers, each server has optimizers
of the same classes and options for the pieces of the parameters in its shard (`PieceOptimizer`).

What a schedule changes on a worker must be what its push is used with. A worker therefore *states* with every push the
numbers of all groups (learning rates, momenta, ...) and the parameters that have a gradient: a parameter without one is
left alone by torch's optimizers, and so it is by a server. A statement is a float64 vector::

    the numbers of group 0, 1, ... of all optimizers | 1 or 0 for each parameter

What an optimizer's own step changes in its groups, such as a count of steps, an estimated distance or the learning
rate, is kept where the step is made: it is neither taken over from statements nor lost in a checkpoint.

Shards are cut only between parameters, or at multiples of `CUT` elements from the begin of a parameter. Vectorised
loops then handle every element as they would in the whole parameter, so the number of servers does not change a bit. An
optimizer that is not element-wise needs whole parameters.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcsync.config.errors import JobError, shown
from hpcsync.config.torch_optimizers import IMPLEMENTATION
from hpcsync.state import Stateful, built, plain
from hpcsync.training.flat_model import FlatModel, laid_out_as
from hpcsync.training.optimizers import ELEMENTWISE, ServerOptimizer, WorkerOptimizer

CUT = 64  # a multiple of the vector width of torch's kernels on any CPU
REFUSED = {  # and why
    torch.optim.LBFGS: "a closure: it evaluates the loss several times in a step",
    torch.optim.SparseAdam: "sparse gradients, which have no place in a flat vector",
}
WRAPPERS = frozenset({"accelerate", "lightning", "lightning_fabric"})  # packages whose optimizers call the script's
CPU = torch.device("cpu")
Reduce = Callable[[float], float]  # sums a number over all servers
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


class _Groups:
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
                    for key in sorted(keys & _marks(group).keys())
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


class ScriptOptimizers(_Groups):
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
        self.numbers = tuple(chain.from_iterable(_numbers(index, each) for index, each in enumerate(optimizers)))
        self._fixed = [*_fixed(optimizers)]
        self.told_rates: list[float] = []
        self.own_keys = [[set() for _ in each.param_groups] for each in optimizers]
        owner = {id(p): index for index, each in enumerate(optimizers) for p in parameters_of(each)}
        self.owner = [owner[id(p)] for p in flat.parameters]  # index of each parameter's optimizer
        _lay_out_kept(optimizers)  # the flat model may have laid out parameters anew

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
        for (optimizer, key, before), (*_, now) in zip(self._fixed, _fixed(self.optimizers), strict=False):
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
        before = [_marks(group) for group in optimizer.param_groups]
        held = [
            [*group.values()] for group in optimizer.param_groups
        ]  # so that no new tensor has the id of one of these
        with scaled_rates(optimizer, lr):
            yield
        del held
        for keys, group, then in zip(self.own_keys[index], optimizer.param_groups, before, strict=False):
            keys.update(key for key, mark in _marks(group).items() if mark != then.get(key))

    def keep_of_all(self, kept: Sequence[Mapping[Any, Any]]) -> None:
        """Let the optimizers keep what those of a server have kept of all parameters together (`kept_of_all`)."""
        device = self.flat.weights.device
        for optimizer, values in zip(self.optimizers, kept, strict=True):
            optimizer.state.update((key, _on(device, value)) for key, value in values.items())

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
                    state[key] = _on(parameter.device, value)
        _lay_out_kept(self.optimizers)

    def kept_pieces(self) -> list[tuple[int, slice, dict[str, Any]]]:
        """Return what the script's optimizers keep for each parameter, as `PieceOptimizer.kept_pieces` does."""
        found = []
        for index, parameter in enumerate(self.flat.parameters):
            if state := self.optimizers[self.owner[index]].state.get(parameter):
                found.append((index, slice(0, parameter.numel()), {key: _on(CPU, each) for key, each in state.items()}))
        return found

    def kept_of_all(self) -> list[dict[Any, Any]]:
        """Return for each of the script's optimizers what it keeps of all parameters together."""
        return [{key: _on(CPU, each) for key, each in kept_of_all(one).items()} for one in self.optimizers]

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


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer whose `step` that of a wrapper from Lightning Fabric or Accelerate calls."""
    packages = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if packages & WRAPPERS and isinstance(inner, torch.optim.Optimizer) else optimizer


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def kept_of_all(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return what an optimizer keeps in its state of all parameters together, such as a count of steps."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}


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


def holds_another(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer has another one, whose parameters a copy of it would step, too."""
    return any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values())


def same(one: Any, other: Any) -> bool:
    """Return True if two states of optimizers are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other.to(one.device))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


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


def parameters_of(*optimizers: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of all groups of optimizers."""
    return chain.from_iterable(group["params"] for optimizer in optimizers for group in optimizer.param_groups)


def _numbers(index: int, optimizer: torch.optim.Optimizer) -> Iterator[Number]:
    for at, group in enumerate(optimizer.param_groups):
        for key in sorted(optimizer.defaults.keys() & group.keys()):  # a scheduler adds keys of its own
            value = group[key]
            if isinstance(value, tuple | list) and all(map(is_number, value)):
                yield Number(index, at, key, len(value))
            elif is_number(value):
                yield Number(index, at, key, 0)


def _fixed(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, str, Any]]:
    """Yield the options that are no numbers and change what a step does: name of the optimizer, key and value."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key in sorted(optimizer.defaults.keys() & group.keys() - {*IMPLEMENTATION}):
                if isinstance(group[key], bool | str):
                    yield type(optimizer).__name__, key, group[key]


def is_number(value: Any) -> bool:
    """Return whether an option is a number, or a tensor of one."""
    return not isinstance(value, bool) and (
        isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    )


def _set(group: dict[str, Any], key: str, values: Sequence[float], count: int) -> None:
    """Set an option; a whole number stays one."""
    before = group[key]
    if count:
        group[key] = type(before)(values)
    elif isinstance(before, torch.Tensor):
        before.fill_(values[0])
    else:
        group[key] = int(values[0]) if isinstance(before, int) and values[0] == int(values[0]) else values[0]


def clipped(norm: float, limit: float | None) -> float:
    """Return the factor with which `torch.nn.utils.clip_grad_norm_` clips a gradient of this norm."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


@contextmanager
def scaled_rates(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Let the optimizer step with its learning rates times this factor; rates that its step changes stay changed."""
    given = [group["lr"] for group in optimizer.param_groups]
    scaled = given if factor == 1.0 else [rate * factor for rate in given]
    marks = [*map(_mark, scaled)]
    for group, rate in zip(optimizer.param_groups, scaled, strict=True):
        group["lr"] = rate
    try:
        yield
    finally:
        for group, rate, mark in zip(optimizer.param_groups, given, marks, strict=True):
            if factor == 0.0 or _mark(group["lr"]) == mark:
                group["lr"] = rate
            elif factor != 1.0:
                group["lr"] = group["lr"] / factor


def unscale(optimizer: torch.optim.Optimizer) -> None:
    """Divide the gradients by the scale that a `torch.amp.GradScaler` has left to the optimizer's step, if any."""
    if (scale := getattr(optimizer, "grad_scale", None)) is not None:
        factor = float(scale)  # waits for a GPU, hence once
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                parameter.grad.div_(factor)


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


def own_and_changed(optimizer: torch.optim.Optimizer, key: str) -> str:
    """Return the refusal of a number that both an optimizer's step on a server and the loop on a worker change."""
    return (
        f"optimizer {type(optimizer).__name__}: changes {key} in its step, on the servers, so the loop must not change "
        "it; leave out the scheduler, or choose a paradigm whose workers step"
    )


# ---- on a worker ----


class _Keeping(_Groups, Stateful):
    """State of what optimizers keep of their parameters and in their groups."""

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
        _lay_out_kept(self.optimizers)


class OwnOptimizer(_Keeping, WorkerOptimizer):
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


# ---- on a server ----


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


class PieceOptimizer(_Keeping, ServerOptimizer):
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
                here = {key: _on(CPU, value) for key, value in state.items()}
                found.append((piece.index, slice(begin, begin + piece.parameter.numel()), here))
        return found

    def kept_of_all(self) -> list[dict[Any, Any]]:
        """Return for each optimizer what it keeps of all parameters together; nothing if it has made no step here."""
        return [
            {key: _on(CPU, value) for key, value in kept_of_all(each).items()} if index in self._stepped else {}
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


# ---- what an optimizer keeps ----


def _marks(group: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return what tells whether the numbers, bools and Nones of a group have changed."""
    return {
        key: _mark(value)
        for key, value in group.items()
        if value is None or isinstance(value, bool) or is_number(value)
    }


def _mark(value: Any) -> tuple[Any, ...]:
    """Return what tells whether a value has changed; a tensor is not read, for which a GPU would be waited for."""
    return (id(value), value._version) if isinstance(value, torch.Tensor) else (value,)


def _lay_out_kept(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Lay out what is kept of each parameter as the parameter is, such as with its channels last."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, torch.Tensor):  # what an optimizer keeps for all parameters
                continue
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    if value.stride() != parameter.stride():
                        state[key] = laid_out_as(parameter, value, value.dtype)
