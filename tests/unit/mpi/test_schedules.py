"""A script that resumes has the learning rates that it had, with a scheduler that it does not save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from torch.utils.data import TensorDataset

import hpcsync
from hpcsync.core.session import Session
from tests.unit.mpi.test_checkpoints import killed
from tests.unit.mpi.test_narrow_models import SETTINGS

EPOCHS = 4
NO_WARNING = "error:Detected call of `lr_scheduler.step"


def script(comm: MPI.Intracomm, out: Path, paradigm: str, per: str, *, resume: bool = False) -> torch.Tensor:
    """The scheduler steps at the end of each epoch, or with every batch."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5 if per == "epoch" else 0.9)
    settings = SETTINGS[paradigm] | {"checkpoint": {"updates": 7, "keep": 9}}
    with hpcsync.connect(model, sgd, paradigm, comm=comm, out=out, resume=resume, **settings) as sync:
        for _ in range(sync.batches_before if per == "batch" else 0):
            schedule.step()
        for _ in range(EPOCHS):
            for x, y in sync.shard(data, batch_size=4):
                sgd.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                sgd.step()
                if per == "batch":
                    schedule.step()
            if per == "epoch":
                schedule.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.once
@pytest.mark.filterwarnings(NO_WARNING)
@pytest.mark.parametrize("per", ["epoch", "batch"])
@pytest.mark.parametrize("paradigm", SETTINGS)
def test_it_resumes_with_the_same_bits(comm, only, folder, paradigm, per):
    only(2)
    finished = script(comm, folder / "a", paradigm, per)
    resumed = script(comm, killed(comm, folder / "a"), paradigm, per, resume=True)
    assert torch.equal(finished, resumed)


@pytest.mark.once
@pytest.mark.parametrize("paradigm", SETTINGS)
def test_without_the_batches_before_it_has_not(comm, only, folder, monkeypatch, paradigm):
    only(2)
    finished = script(comm, folder / "a", paradigm, "batch")
    monkeypatch.setattr(Session, "batches_before", property(lambda self: 0, lambda self, n: None), raising=False)
    resumed = script(comm, killed(comm, folder / "a"), paradigm, "batch", resume=True)
    assert not torch.equal(finished, resumed)


@pytest.mark.parametrize("servers", [1, 2])
def test_after_the_run_all_ranks_have_the_rates_of_the_workers(comm, needs, folder, servers):
    needs(servers + 1)
    model = torch.nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    data = TensorDataset(torch.zeros(8 * (comm.size - servers), 3))
    with hpcsync.connect(model, sgd, "bsp", servers=servers, comm=comm, out=folder / "run") as sync:
        for (x,) in sync.shard(data, batch_size=2):
            sgd.zero_grad()
            model(x).sum().backward()
            sgd.step()
            schedule.step()
    assert sgd.param_groups[0]["lr"] == 0.5**4


@pytest.mark.filterwarnings(NO_WARNING)
@pytest.mark.parametrize("paradigm", ["bsp", "easgd", "allreduce"])
def test_a_scheduler_finds_no_step_missing(comm, needs, folder, paradigm):
    """Neither on a server, which makes none, nor with the step of the session."""
    needs(2)
    model = torch.nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    data = TensorDataset(torch.ones(2 * comm.size, 3))
    with hpcsync.connect(model, sgd, paradigm, comm=comm, out=folder / "run") as sync:
        for _ in range(2):
            for (x,) in sync.shard(data, batch_size=2):
                sgd.zero_grad()
                loss = model(x).sum()
                loss.backward()
                sync.step(loss)
            schedule.step()


@pytest.mark.filterwarnings(NO_WARNING)
def test_a_scheduler_that_steps_too_early_warns(comm, only, folder):
    only(2)
    sgd = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    with pytest.raises(UserWarning, match="before `optimizer.step"):
        schedule.step()
