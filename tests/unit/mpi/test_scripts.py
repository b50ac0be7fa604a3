"""The scripts in jobs/scripts train as they did before hpcsync: with all workers' batches joined, in float64.

What a script was before is known from its own comments (tests/scripts_before.py). Every script runs with all that it
shows; its samples are the same in both runs, and nothing else is random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from hpcsync.audit.trace_audit import audit
from hpcsync.mpi.transport.thread_ranks import run
from hpcsync.system import garbage
from hpcsync.trace.reader import load
from hpcsync.training import script_optimizers
from hpcsync.training.sampler import batch_indices
from tests.scripts_before import NAMES, changes, module, source, without_hpcsync

BATCH, STEPS = 4, 20
SETTINGS = [("bsp", 1, 2), ("bsp", 2, 3), ("allreduce", 0, 2), ("allreduce", 0, 3)]  # paradigm, servers, workers


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


def resnet(script: Any, n_workers: int) -> Any:
    torch.manual_seed(1)
    body = [nn.Conv2d(1, 4, 3, 1, 1), script.Block(4, 6, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*body, nn.Linear(6, 10)).double()

    class Alike(script.Augmented):
        """What is drawn follows from the index."""

        def __getitem__(self, index):
            with torch.random.fork_rng():
                torch.manual_seed(index)
                return super().__getitem__(index)

    x, y = digits(BATCH * n_workers * STEPS // 2)
    return [model], Alike(x.view(-1, 1, 8, 8), y), {"epochs": 2}


def transformer(script: Any, n_workers: int) -> Any:
    torch.manual_seed(1)
    n = BATCH * n_workers * STEPS * 4
    tokens = torch.randint(16, (n, 9), generator=torch.Generator().manual_seed(2))
    return [script.Model(16, width=8).double()], list(tokens), {"n_steps": STEPS, "autocast": False}


def finetuning(script: Any, n_workers: int) -> Any:
    torch.manual_seed(1)
    data = TensorDataset(*digits(BATCH * n_workers * STEPS))
    return [script.Model(10).double()], data, {"thaws": (5, 12, 16)}


def iterable(script: Any, n_workers: int) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return [model], script.Walk(BATCH * n_workers * STEPS, dtype=torch.float64), {}


def gan(script: Any, n_workers: int) -> Any:
    torch.manual_seed(1)
    n = BATCH * n_workers * STEPS
    points = random_numbers(n, 6)
    models = [script.perceptron(4, 2).double(), script.perceptron(2, 1).double()]
    return models, TensorDataset(points[:, :2], points[:, 2:]), {}


CASES = {
    "resnet": Case(resnet, epochs=2),
    "transformer": Case(transformer, per_step=4),
    "finetuning": Case(finetuning),
    "iterable": Case(iterable, shuffle=False),
    "gan": Case(gan, steps=2),
}


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


def plain(name: str, n_workers: int, monkeypatch: pytest.MonkeyPatch, *, statistics: bool = True) -> Plain:
    case, script = CASES[name], module(f"plain_{name}", without_hpcsync(source(name)))
    models, data, others = case.make(script, n_workers)
    if statistics:
        for model in models:
            per_worker(model, n_workers)
    batches = list(joint_batches(data, case, n_workers))
    rates: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Optimizer, "__init__", _noting(rates))
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


# ---- with hpcsync ----


class Trained(NamedTuple):
    models: list[nn.Module]
    losses: list[list[float]]  # of each worker
    folder: Path


def trained(name: str, paradigm: str, servers: int, n_workers: int, folder: Path, text: str | None = None) -> Trained:
    case, script = CASES[name], module(name, text or source(name))

    def rank(comm: Any) -> tuple[list[nn.Module], list[float]]:
        models, data, others = case.make(script, n_workers)
        settings = {"servers": servers, "out": folder, "comm": comm}
        if name == "resnet":
            settings["buffers"] = "mean"
        if isinstance(data, IterableDataset):
            loader = DataLoader(data, BATCH)
        else:
            loader = DataLoader(data, BATCH, shuffle=case.shuffle)
        return models, case.call(script, models, loader, paradigm=paradigm, **others, **settings)

    ranks = run(servers + n_workers, rank)
    return Trained(ranks[0][0], [losses for _, losses in ranks[servers:]], folder)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "freeze", lambda: None)  # one process is not at an end after a run


def distance(found: Sequence[nn.Module], expected: Sequence[nn.Module]) -> float:
    pairs = zip(_parameters(found), _parameters(expected), strict=True)
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs)


def _parameters(models: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [p.detach() for model in models for p in model.parameters()]


@pytest.mark.parametrize(("paradigm", "servers", "n_workers"), SETTINGS)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_before(name, paradigm, servers, n_workers, tmp_path, monkeypatch):
    case, before = CASES[name], plain(name, n_workers, monkeypatch)
    found = trained(name, paradigm, servers, n_workers, tmp_path / "run")
    assert distance(found.models, before.models) < 1e-10
    n_steps = STEPS * case.steps
    assert len(before.losses) == len(before.rates) == n_steps

    trace = load(found.folder / "trace.h5")
    assert trace.status == "finished" and [check for check in audit(trace) if not check.passed] == []
    assert trace.tables["updates"]["samples"][-1] == before.n_samples == BATCH * n_workers * n_steps * case.per_step
    rows = trace.tables["pushes" if servers else "exchanges"]
    assert len(rows) == n_steps * n_workers
    losses = []
    for worker in range(n_workers):
        own = rows[rows["worker"] == worker]
        np.testing.assert_allclose(own["lr"], before.rates, rtol=1e-12)
        np.testing.assert_allclose(own["loss"], found.losses[worker], rtol=1e-12)
        losses.append(own["loss"])
    np.testing.assert_allclose(np.mean(losses, axis=0), before.losses, rtol=1e-9)


def test_running_statistics_are_the_mean_of_the_workers(tmp_path, monkeypatch):
    before = plain("resnet", 2, monkeypatch)
    found = trained("resnet", "bsp", 1, 2, tmp_path / "run")
    theirs = [each for each in before.models[0].modules() if isinstance(each, PerWorker)]
    mine = [each for each in found.models[0].modules() if isinstance(each, nn.BatchNorm2d)]
    for one, other in zip(mine, theirs, strict=True):
        for buffer, expected in zip((one.running_mean, one.running_var), other.means(), strict=True):
            assert torch.allclose(buffer, expected, rtol=0, atol=1e-10)


# ---- what would be noticed ----


def stepping_all(self: Any) -> list[bool]:
    return [p.grad is not None for p in self.flat.parameters]


PRESENT, NUMBERS = "ScriptOptimizers.present", "_set_numbers"
BROKEN: dict[str, tuple[str, Any]] = {
    "finetuning": (PRESENT, property(lambda self: [True] * len(self.flat.parameters))),
    "gan": (PRESENT, property(stepping_all)),
    "iterable": (NUMBERS, lambda *_: None),
    "transformer": ("clipped", lambda norm, limit: 1.0),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_server_that_steps_otherwise_is_noticed(name, tmp_path, monkeypatch):
    what, replacement = BROKEN[name]
    before = plain(name, 2, monkeypatch)
    monkeypatch.setattr(f"{script_optimizers.__name__}.{what}", replacement)
    assert distance(trained(name, "bsp", 1, 2, tmp_path / "run").models, before.models) > 1e-6


def test_statistics_of_the_joined_batch_are_noticed(tmp_path, monkeypatch):
    joined = plain("resnet", 2, monkeypatch, statistics=False)
    assert distance(trained("resnet", "bsp", 1, 2, tmp_path / "run").models, joined.models) > 1e-6


# ---- the scripts themselves ----


@pytest.mark.parametrize("name", NAMES)
def test_at_most_five_lines_are_changed_and_all_is_on_a_screen(name):
    text = source(name)
    assert 3 <= len(changes(text)) <= 5
    assert len(text.splitlines()) <= 65
    assert "hpcsync" not in without_hpcsync(text).split('"""', 2)[2]
    assert "sync." not in without_hpcsync(text)


def test_a_changed_line_without_a_comment_is_noticed():
    text = source("resnet").replace("  # hpcsync: was optimizer.step()", "")
    assert "sync." in without_hpcsync(text)
