"""All-reduce of scripts in which not all workers have as many batches: all replicas still make the same steps."""

from __future__ import annotations

import itertools

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import TensorDataset

import hpcsync
from hpcsync.audit.trace_audit import audit
from hpcsync.mpi.peer.exchange import Summing
from hpcsync.trace.reader import load
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.script_optimizers import ScriptOptimizers, StepToMake

BATCH = 2


def nothing(model: nn.Module) -> tuple[float, float]:
    return 0.0, 0.0


def data(n_batches: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(n_batches * BATCH, n, generator=generator) for n in (6, 1)))


def made(*sizes: int) -> nn.Sequential:
    """Return layers of these sizes, with the same weights on all ranks, which are threads here."""
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def scheduled(comm: MPI.Intracomm, folder, n_batches: int) -> None:
    """The rate changes with the epoch, which a worker begins before the other has ended it."""
    model = made(6, 8, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    with hpcsync.connect(model, sgd, "allreduce", comm=comm, out=folder / "run", evaluate=nothing) as sync:
        for epoch in range(3):
            for x, y in sync.shard(data(n_batches), BATCH):
                assert sgd.param_groups[0]["lr"] == 0.05 * 0.5**epoch, "the script sees its own rates"
                sgd.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                sgd.step()
            schedule.step()


def unused(comm: MPI.Intracomm, folder, n_batches: int) -> None:
    """A layer takes part in nothing: neither weight decay nor momentum must move it."""
    model, head = made(6, 8), made(8, 1)
    model.append(head)
    model.append(made(1, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.5)
    with hpcsync.connect(model, sgd, "allreduce", comm=comm, out=folder / "run", evaluate=nothing) as sync:
        for x, y in sync.shard(data(n_batches), BATCH):
            sgd.zero_grad()
            nn.functional.mse_loss(model[:2](x), y).backward()
            sgd.step()


def in_turn(comm: MPI.Intracomm, folder, n_batches: int) -> None:
    """Two optimizers step one after the other with each batch."""
    models = made(6, 8, 6), made(6, 1)
    first, second = (torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in models)
    with hpcsync.connect(models, [first, second], "allreduce", comm=comm, out=folder / "run", evaluate=nothing) as sync:
        for x, y in sync.shard(data(n_batches), BATCH):
            second.zero_grad()
            nn.functional.mse_loss(models[1](models[0](x).detach()), y).backward()
            second.step()
            first.zero_grad()
            models[1](models[0](x)).square().mean().backward()
            first.step()


SCRIPTS = {"scheduled": scheduled, "unused": unused, "in turn": in_turn}


def distances(comm: MPI.Intracomm, folder, name: str) -> tuple[list[float], set[str]]:
    """Return the distances of the replicas from their mean, and the checks of the trace that fail; the same on all."""
    SCRIPTS[name](comm, folder, 4 * comm.size + 1)
    comm.Barrier()
    trace = load(folder / "run" / "trace.h5")
    failed = {check.name for check in audit(trace) if not check.passed}
    return trace.tables["evaluations"]["consensus_distance"].tolist(), failed


@pytest.mark.parametrize("name", SCRIPTS)
def test_replicas_stay_equal(comm, needs, folder, name):
    needs(2)
    found, failed = distances(comm, folder, name)
    assert found and set(found) == {0.0} and not failed


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "what", "broken", "variant"),
    [
        (
            "scheduled",
            Summing,
            "_step_together",
            lambda self, _, lr, contributes: self.peer.step(self._flat.gradient, lr),
        ),
        (
            "in turn",
            Summing,
            "_step_together",
            lambda self, _, lr, contributes: self.peer.step(self._flat.gradient, lr),
        ),
        ("unused", FlatModel, "drop_gradient", FlatModel.zero_gradient),
    ],
)
def test_without_an_agreement_they_do_not(comm, only, folder, monkeypatch, name, what, broken, variant):
    only(3)
    monkeypatch.setattr(what, broken, variant)
    found, failed = distances(comm, folder, name)
    assert max(found) > 0 and "all replicas have equal weights" in failed


def test_steps_of_different_optimizers_are_refused():
    models = made(6, 1), made(1, 1)
    flat = FlatModel(nn.ModuleList(models), [p for each in models for p in each.parameters()])
    script = ScriptOptimizers([torch.optim.SGD(each.parameters(), lr=0.1) for each in models], flat)
    numbers = script.step_to_make().numbers
    with (
        pytest.raises(RuntimeError, match="step optimizers 0, 1"),
        script.following([StepToMake(0, numbers), StepToMake(1, numbers)]),
    ):
        pass
