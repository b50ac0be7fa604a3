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
from tests.unit.mpi.test_checkpoints import killed
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


def script(comm: Any, out: Path, paradigm: str, **how: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with connect(model, optimizer, paradigm, out=out, comm=comm, log="wandb", name="script", **how) as sync:
        for (x,) in sync.shard(TensorDataset(torch.ones(64, 3)), batch_size=4, epochs=1):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            sync.step(loss)
    comm.Barrier()


@pytest.mark.parametrize("paradigm", ["asp", "allreduce"])
def test_a_script_logs_too(comm: Any, needs: Any, folder: Path, fake: Fake, paradigm: str) -> None:
    needs(2)
    script(comm, folder / "run", paradigm)
    if comm.rank == 0:
        assert any("train/loss" in scalars for scalars, _, _ in fake.points)
        assert (fake.ended, fake.threads) == ([0], {"log"})


@pytest.mark.parametrize("has_checkpoint", [True, False])
@pytest.mark.parametrize("paradigm", ["asp", "allreduce"])
def test_a_run_that_resumes_continues_its_log(
    comm: Any, only: Any, folder: Path, fake: Fake, paradigm: str, has_checkpoint: bool
) -> None:
    """Without a checkpoint it begins anew, and its log too: the control."""
    only(3)
    checkpoint = {"updates": 2, "keep": 9}
    script(comm, folder / "a", paradigm, checkpoint=checkpoint)
    if comm.rank == 0:
        for name in ("mlflow.id", "tensorboard"):
            (folder / "a" / name).write_text("of the first start")
    torn = killed(comm, folder / "a", 1 if has_checkpoint else 0)
    script(comm, torn, paradigm, checkpoint=checkpoint, resume=True)
    if comm.rank == 0:
        assert fake.begun == [None, "run 1" if has_checkpoint else None]
        assert (torn / "wandb.id").read_text() == f"run {1 if has_checkpoint else 2}"
        assert all((torn / name).exists() is has_checkpoint for name in ("mlflow.id", "tensorboard"))
        assert len(load(torn).tables["starts"]) == 1 + has_checkpoint


def test_a_log_that_is_none_is_refused_on_all_ranks(comm: Any, needs: Any, folder: Path) -> None:
    needs(2)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(JobError, match="log visdom: must be one of tensorboard, wandb, mlflow"):
        connect(model, optimizer, "asp", out=folder / "run", comm=comm, log="visdom", name="script")
