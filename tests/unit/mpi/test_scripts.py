"""The scripts in jobs/scripts train as they did before hpcsync: with all workers' batches joined, in float64.

What a script was before is known from its own comments (tests/scripts_before.py). Every script runs with all that it
shows; its samples are the same in both runs, and nothing else is random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hpcsync.audit.trace_audit import audit
from hpcsync.config.errors import JobError
from hpcsync.mpi.transport.thread_ranks import run
from hpcsync.system import garbage
from hpcsync.trace.reader import load
from tests.scripts_before import (
    BATCH,
    NAMES,
    STEPS,
    Case,
    PerWorker,
    changes,
    digits,
    module,
    plain,
    random_numbers,
    resnet,
    source,
    without_hpcsync,
)

SETTINGS = [("bsp", 1, 2), ("bsp", 2, 3), ("allreduce", 0, 2), ("allreduce", 0, 3)]  # paradigm, servers, workers


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


def fabric(script: Any, n_workers: int) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 10)).double()
    data = TensorDataset(*digits(BATCH * n_workers * STEPS))
    return [model], data, {"n_steps": STEPS}


def on_fabric(script: Any, models: list[nn.Module], loader: Any, **others: Any) -> list[float]:
    from lightning_fabric.plugins.environments import LightningEnvironment  # otherwise it asks MPI, which is not there

    lightning = script.Fabric(accelerator="cpu", devices=1, precision="64-true", plugins=LightningEnvironment())
    return script.train(lightning, *models, loader, **others)


def trainer(script: Any, n_workers: int) -> Any:
    torch.manual_seed(1)
    sizes = {"vocab_size": 256, "n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = script.GPT2LMHeadModel(script.GPT2Config(**sizes, **dropouts, **ends)).double()
    model.loss_function = causal_loss
    return [model], script.Text(BATCH * n_workers * STEPS * 2), {}


def causal_loss(logits: torch.Tensor, labels: torch.Tensor, **others: Any) -> torch.Tensor:
    """The loss of GPT-2, which would be float32 otherwise."""
    found = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return found / others["num_items_in_batch"]


class Samples(IterableDataset):
    """The samples of batches, one by one."""

    def __init__(self, batches: Any) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield from ({key: value[i] for key, value in batch.items()} for i in range(len(batch["labels"])))


def on_trainer(script: Any, models: list[nn.Module], loader: Any, **others: Any) -> list[float]:
    losses: list[float] = []
    handle = models[0].register_forward_hook(lambda module, _, output: losses.append(output.loss.item()))
    data, size = (loader.dataset, BATCH) if isinstance(loader, DataLoader) else (Samples(loader), 0)
    size = size or len(data.batches[0]["labels"])
    script.train(*models, data, script.arguments(n_steps=STEPS, batch_size=size), **others)
    handle.remove()
    return [sum(of_step) / 2 for of_step in zip(losses[::2], losses[1::2], strict=True)]


CASES = {
    "resnet": Case(resnet, epochs=2),
    "transformer": Case(transformer, per_step=4),
    "finetuning": Case(finetuning),
    "iterable": Case(iterable, shuffle=False),
    "gan": Case(gan, steps=2),
    "fabric": Case(fabric, call=on_fabric),
    "trainer": Case(trainer, per_step=2, call=on_trainer),
}
PACKAGES = {"fabric": "lightning_fabric", "trainer": "transformers"}


@pytest.fixture
def installed(name: str) -> None:
    """Skip a script whose packages are missing."""
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason="`make scripts` installs it")


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
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage, "freeze", lambda: None)  # one process is not at an end after a run
    torch.set_default_dtype(torch.float64)  # of what Fabric's models return
    yield
    torch.set_default_dtype(torch.float32)


def distance(found: Sequence[nn.Module], expected: Sequence[nn.Module]) -> float:
    pairs = zip(_parameters(found), _parameters(expected), strict=True)
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs)


def _parameters(models: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [p.detach() for model in models for p in model.parameters()]


@pytest.mark.parametrize(("paradigm", "servers", "n_workers"), SETTINGS)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_before(installed, name, paradigm, servers, n_workers, tmp_path, monkeypatch):
    case, before = CASES[name], plain(name, CASES[name], n_workers)
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
    before = plain("resnet", CASES["resnet"], 2)
    found = trained("resnet", "bsp", 1, 2, tmp_path / "run")
    theirs = [each for each in before.models[0].modules() if isinstance(each, PerWorker)]
    mine = [each for each in found.models[0].modules() if isinstance(each, nn.BatchNorm2d)]
    for one, other in zip(mine, theirs, strict=True):
        for buffer, expected in zip((one.running_mean, one.running_var), other.means(), strict=True):
            assert torch.allclose(buffer, expected, rtol=0, atol=1e-10)


# ---- what would be noticed ----


def stepping_all(self: Any) -> list[bool]:
    return [p.grad is not None for p in self.flat.parameters]


PRESENT = "hpcsync.training.script_optimizers.ScriptOptimizers.present"
NUMBERS = "hpcsync.training.optimizer_groups.Groups.set_numbers"
CLIPPED = "hpcsync.training.piece_optimizer.clipped"
BROKEN: dict[str, tuple[str, Any]] = {
    "finetuning": (PRESENT, property(lambda self: [True] * len(self.flat.parameters))),
    "iterable": (NUMBERS, lambda *_: None),
    "transformer": (CLIPPED, lambda norm, limit: 1.0),
    "fabric": (CLIPPED, lambda norm, limit: 1.0),
    "trainer": (CLIPPED, lambda norm, limit: 1.0),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_server_that_steps_otherwise_is_noticed(installed, name, tmp_path, monkeypatch):
    what, replacement = BROKEN[name]
    before = plain(name, CASES[name], 2)
    monkeypatch.setattr(what, replacement)
    assert distance(trained(name, "bsp", 1, 2, tmp_path / "run").models, before.models) > 1e-6


def test_a_worker_that_would_step_both_models_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(PRESENT, property(stepping_all))
    with pytest.raises(JobError, match="all workers must step the same optimizer in the same update"):
        trained("gan", "bsp", 1, 2, tmp_path / "run")


def test_statistics_of_the_joined_batch_are_noticed(tmp_path, monkeypatch):
    joined = plain("resnet", CASES["resnet"], 2, statistics=False)
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
