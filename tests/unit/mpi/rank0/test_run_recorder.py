"""How rank 0 closes the records of a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcsync.mpi.rank0.run_recorder import RunRecorder
from hpcsync.mpi.transport.ulfm import RankFailed
from hpcsync.run_dir import layout, status_file
from hpcsync.run_dir.checkpoint import Checkpoints
from hpcsync.system.signals import Suspended, Terminated
from hpcsync.trace.reader import load
from hpcsync.trace.writer import TraceWriter
from tests.unit.jobs import make_job
from tests.unit.run_dir.test_status_file import writer
from tests.unit.trace import recorder


@pytest.mark.parametrize(
    ("on_death", "error", "status", "watched"),
    [
        ("end", Terminated("SIGTERM"), "interrupted", "interrupted"),
        ("end", RankFailed("rank 1 died"), "failed", "failed"),
        ("restart", Terminated("SIGTERM"), "interrupted", "running"),
        ("restart", RankFailed("rank 1 died"), "failed", "running"),
        ("restart", Suspended("checkpoint 1"), "interrupted", "interrupted"),
    ],
)
def test_who_watches_waits_where_the_ranks_may_be_started_again(
    tmp_path: Path, on_death: str, error: BaseException, status: str, watched: str
) -> None:
    """After a death the launcher tells the other ranks to end, as a user does."""
    RunRecorder.fail(records(tmp_path, on_death), error)
    assert (load(tmp_path).status, status_file.read(tmp_path).status) == (status, watched)


def test_a_checkpoint_during_which_a_worker_died_is_deleted_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be no further one: without servers none, and with servers if the run ends first."""
    monkeypatch.setattr(layout, "conclude", lambda folder, console: None)
    run = records(tmp_path, "continue")
    run._given.checkpoints.begin(1)
    RunRecorder.conclude(run, torch.nn.Linear(1, 1))
    assert (load(tmp_path).status, list((tmp_path / "checkpoints").iterdir())) == ("finished", [])


def records(folder: Path, on_death: str) -> Any:
    """Return the records of a run, without what these functions do not use."""
    run: Any = SimpleNamespace(
        _given=SimpleNamespace(
            job=make_job(cluster={"workers": 2, "on_death": on_death}),
            checkpoints=Checkpoints(folder, 2, None, True),
            evaluate=lambda model: (0.0, 0.0),
        ),
        _status=writer(folder)[0],
        _log=None,
        _console=None,
        coordinator=SimpleNamespace(stopping=True),
        trace=TraceWriter(folder / "trace.h5", recorder.attributes(recorder.job_of("bsp"))),
    )
    run._close = lambda *statuses: RunRecorder._close(run, *statuses)
    return run
