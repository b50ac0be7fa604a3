"""Option --log on ranks: rank 0 logs, the others do not, and a run that fails says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from hpcsync.api.connect import connect
from hpcsync.cli.rank_main import train
from hpcsync.config.errors import JobError
from hpcsync.trace.reader import load
from tests.unit.mpi.test_buffers import job
from tests.unit.run_dir.fake_logs import Fake


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    fake.wandb(monkeypatch)
    return fake


@pytest.mark.parametrize("paradigm", ["asp", "allreduce"])
def test_rank_0_logs_what_its_trace_holds(comm: Any, needs: Any, folder: Path, fake: Fake, paradigm: str) -> None:
    needs(2)
    train(comm, job({"name": paradigm}, comm.size), folder / "run", None, "wandb")
    comm.Barrier()
    if comm.rank == 0:
        evaluations = load(folder / "run").tables["evaluations"]
        logged = [update for scalars, update, _ in fake.points if "evaluation/loss" in scalars]
        assert logged == evaluations["version"].tolist() != []
        assert any("train/samples_per_s" in scalars for scalars, _, _ in fake.points)
        assert (fake.ended, fake.threads) == ([0], {"log"})
        assert (folder / "run" / "status.json").exists()


def test_without_the_option_nothing_is_logged(comm: Any, needs: Any, folder: Path, fake: Fake) -> None:
    needs(2)
    train(comm, job({"name": "asp"}, comm.size), folder / "run")
    comm.Barrier()
    assert fake.points == fake.ended == []


@pytest.mark.parametrize("paradigm", ["asp", "allreduce"])
def test_a_script_logs_too(comm: Any, needs: Any, folder: Path, fake: Fake, paradigm: str) -> None:
    needs(2)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with connect(model, optimizer, paradigm, out=folder / "run", comm=comm, log="wandb", name="script") as sync:
        for (x,) in sync.shard(TensorDataset(torch.ones(64, 3)), batch_size=4, epochs=1):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            sync.step(loss)
    comm.Barrier()
    if comm.rank == 0:
        assert any("train/loss" in scalars for scalars, _, _ in fake.points)
        assert (fake.ended, fake.threads) == ([0], {"log"})


def test_a_log_that_is_none_is_refused_on_all_ranks(comm: Any, needs: Any, folder: Path) -> None:
    needs(2)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(JobError, match="log visdom: must be one of tensorboard, wandb, mlflow"):
        connect(model, optimizer, "asp", out=folder / "run", comm=comm, log="visdom", name="script")
