"""Option --log on ranks: rank 0 logs, the others do not, and a run that fails says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcsync.cli.rank_main import train
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
