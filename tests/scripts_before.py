"""The scripts in jobs/scripts, and what they were before hpcsync: a comment on every changed line says how it was.

import hpcsync  # hpcsync: new
for x, y in sync.shard(loader):  # hpcsync: was for x, y in loader:
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, default_collate

from hpcsync.training.sampler import batch_indices

FOLDER = Path(__file__).parents[1] / "jobs" / "scripts"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
BATCH, STEPS = 4, 20
CHANGED = re.compile(r"^( *)(.*?) *# hpcsync: (new|was (.*))$")


def source(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def changes(text: str) -> list[str]:
    """The lines that were changed for hpcsync."""
    return [line for line in text.splitlines() if CHANGED.match(line)]


def without_hpcsync(text: str) -> str:
    """The script before it was changed. (A new `with` leaves its indentation behind.)"""
    lines = []
    for line in text.splitlines():
        if found := CHANGED.match(line):
            indent, code, _, before = found.groups()
            line = indent + (before or ("if True:" if code.startswith("with ") else "pass"))
        lines.append(line)
    return "\n".join(lines)


def module(name: str, text: str) -> ModuleType:
    """A script as a module, imported as `name`, so that other processes find its classes."""
    made = ModuleType(name)
    made.__file__ = str(FOLDER / f"{name.removeprefix('plain_')}.py")
    sys.modules[name] = made
    exec(compile(text, name, "exec"), made.__dict__)
    return made


# ---- how a test calls a script ----


class Case(NamedTuple):
    """How a script is called.

    `make(script, n_workers)` returns the models, the data, and what else `train` gets; `train(script, models, loader,
    **others)` calls it.
    """

    make: Callable[[Any, int], tuple[list[nn.Module], Any, dict[str, Any]]]
    shuffle: bool = True
    epochs: int = 1
    per_step: int = 1  # batches of a step
    steps: int = 1  # steps of a batch
    call: Callable[..., list[float]] = lambda script, models, loader, **others: script.train(*models, loader, **others)


def random_numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def digits(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x[:n]) / 16, torch.tensor(y[:n])


RESNET = module("resnet", source("resnet"))


class Alike(RESNET.Augmented):
    """What is drawn follows from the index."""

    def __getitem__(self, index: int) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(index)
            return super().__getitem__(index)


def resnet(script: Any, n_workers: int) -> Any:
    torch.manual_seed(1)
    body = [nn.Conv2d(1, 4, 3, 1, 1), script.Block(4, 6, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    x, y = digits(BATCH * n_workers * STEPS // 2)
    return [nn.Sequential(*body, nn.Linear(6, 10)).double()], Alike(x.view(-1, 1, 8, 8), y), {"epochs": 2}


# ---- the script before hpcsync, with the batches of all workers ----


class PerWorker(nn.Module):
    """BatchNorm whose statistics are those of each worker's part of the batch."""

    def __init__(self, norm: nn.BatchNorm2d, n_workers: int) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.running = [(torch.zeros_like(norm.weight), torch.ones_like(norm.weight)) for _ in range(n_workers)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = zip(x.chunk(len(self.running)), self.running, strict=True)
        normed = [F.batch_norm(part, *running, self.weight, self.bias, training=True) for part, running in parts]
        return torch.cat(normed)

    def means(self) -> list[torch.Tensor]:
        return [torch.stack([each.detach() for each in workers]).mean(0) for workers in zip(*self.running, strict=True)]


def per_worker(module: nn.Module, n_workers: int) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, PerWorker(child, n_workers))
        else:
            per_worker(child, n_workers)


def joint_batches(data: Any, case: Case, n_workers: int) -> Iterator[Any]:
    """The batches of all workers, joined: batch j is worker j mod P's."""
    if isinstance(data, IterableDataset):
        batches = list(DataLoader(data, BATCH))
    else:
        sizes = {"batch_size": BATCH, "size": len(data)}
        numbers = range(case.epochs * len(data) // BATCH)
        indices = [batch_indices(0 if case.shuffle else None, number, **sizes) for number in numbers]
        batches = [default_collate([data[int(i)] for i in batch]) for batch in indices]
    for begin in range(0, len(batches), n_workers):
        first, *others = batches[begin : begin + n_workers]
        yield tree_map(lambda *parts: torch.cat(parts), first, *others)


class Loader:
    """A loader of a plain script, which it iterates once an epoch."""

    def __init__(self, batches: Sequence[Any], n_epochs: int) -> None:
        per_epoch = len(batches) // n_epochs
        self._epochs = [batches[begin : begin + per_epoch] for begin in range(0, len(batches), per_epoch)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._epochs.pop(0))


class Plain(NamedTuple):
    models: list[nn.Module]
    losses: list[float]
    rates: list[float]
    n_samples: int


@functools.cache  # the same for all paradigms; callers only read it
def plain(name: str, case: Case, n_workers: int, *, statistics: bool = True) -> Plain:
    script = module(f"plain_{name}", without_hpcsync(source(name)))
    models, data, others = case.make(script, n_workers)
    if statistics:
        for model in models:
            per_worker(model, n_workers)
    batches = list(joint_batches(data, case, n_workers))
    rates: list[float] = []
    with mock.patch.object(torch.optim.Optimizer, "__init__", _noting(rates)):
        losses = case.call(script, models, Loader(batches, case.epochs), **others)
    first = [next(x for x in (batch.values() if isinstance(batch, dict) else batch)) for batch in batches]
    if isinstance(batches[0], torch.Tensor):
        first = batches
    return Plain(models, losses, rates, case.steps * sum(map(len, first)))


def _noting(rates: list[float]) -> Callable[..., None]:
    """An optimizer's constructor, which notes the rate of its first group at every step."""
    construct = torch.optim.Optimizer.__init__

    def __init__(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        self.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))

    return __init__
