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
from hpcsync.config.errors import JobError
from hpcsync.mpi.peer.exchange import Summing
from hpcsync.mpi.transport.thread_ranks import run
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


def clipped(comm: MPI.Intracomm, folder, n_batches: int) -> None:
    """The script changes the mean gradient, of which a worker without a batch knows nothing."""
    model = made(6, 8, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    with hpcsync.connect(model, sgd, "allreduce", comm=comm, out=folder / "run", evaluate=nothing) as sync:
        for x, y in sync.shard(data(n_batches), BATCH):
            sgd.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            sgd.step()


def scaled(comm: MPI.Intracomm, folder, n_batches: int) -> None:
    """A step is skipped on all workers if the gradient of one is not finite, with two optimizers too."""
    models = made(6, 8, 6), made(6, 1)
    first, second = (torch.optim.SGD(each.parameters(), lr=0.05) for each in models)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with hpcsync.connect(models, [first, second], "allreduce", comm=comm, out=folder / "run", evaluate=nothing) as sync:
        for i, (x, y) in enumerate(sync.shard(data(n_batches), BATCH)):
            second.zero_grad()
            scaler.scale(nn.functional.mse_loss(models[1](models[0](x).detach()), y)).backward()
            scaler.step(second)
            first.zero_grad()
            loss = models[1](models[0](x)).square().mean()
            scaler.scale(loss * (float("inf") if i == 1 and sync.worker == 0 else 1.0)).backward()
            nn.utils.clip_grad_norm_(models[0].parameters(), 0.01)
            scaler.step(first)
            scaler.update()
    assert all(p.isfinite().all() and p.abs().max() < 10 for model in models for p in model.parameters())


SCRIPTS = {each.__name__: each for each in (scheduled, unused, in_turn, clipped, scaled)}


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
            "in_turn",
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


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def out_of_phase(comm: MPI.Intracomm, folder, paradigm: str, **options) -> None:
    """Two optimizers; the second steps in every other iteration of an epoch, which are not equally long."""
    models = One(), One()
    first, second = (torch.optim.SGD(each.parameters(), lr=1.0) for each in models)
    with hpcsync.connect(models, [first, second], paradigm, comm=comm, out=folder / "run", **options) as sync:
        for _ in range(2):
            for i, _ in enumerate(sync.shard(data(2 * comm.size - 1), BATCH)):
                first.zero_grad()
                models[0].weight.sum().backward()
                first.step()
                if i % 2 == 0:
                    second.zero_grad()
                    (models[1].weight.sum() - 100 * models[0].weight.sum()).backward()
                    second.step()


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_an_update_is_of_steps_of_one_optimizer(tmp_path, paradigm):
    with pytest.raises(JobError, match="all workers must step the same optimizer in the same update"):
        run(3, lambda comm: out_of_phase(comm, tmp_path, paradigm))


def test_paradigms_that_mix_pushes_are_refused_with_several_optimizers(comm, needs, folder):
    needs(2)
    for paradigm, options in (("k-sync", {"k": 1}), ("ssp", {"staleness": 1, "merge": True})):
        with pytest.raises(JobError, match="must be another with several optimizers"):
            out_of_phase(comm, folder, paradigm, **options)


def test_steps_of_different_optimizers_are_refused():
    models = made(6, 1), made(1, 1)
    flat = FlatModel(nn.ModuleList(models), [p for each in models for p in each.parameters()])
    script = ScriptOptimizers([torch.optim.SGD(each.parameters(), lr=0.1) for each in models], flat)
    numbers = script.step_to_make().numbers
    with (
        pytest.raises(JobError, match="step optimizers 0, 1"),
        script.following([StepToMake(each, -1, numbers, False) for each in (0, 1)]),
    ):
        pass
