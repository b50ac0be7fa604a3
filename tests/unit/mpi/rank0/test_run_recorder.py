"""How rank 0 closes the records of a run that cannot be finished."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsync.mpi.rank0.run_recorder import RunRecorder
from hpcsync.mpi.transport.ulfm import RankFailed
from hpcsync.run_dir import status_file
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
    job = make_job(cluster={"workers": 2, "on_death": on_death})
    run: Any = SimpleNamespace(
        _given=SimpleNamespace(job=job, checkpoints=Checkpoints(tmp_path, 2, None, True)),
        _status=writer(tmp_path)[0],
        _log=None,
        trace=TraceWriter(tmp_path / "trace.h5", recorder.attributes(recorder.job_of("bsp"))),
    )
    run._close = lambda *statuses: RunRecorder._close(run, *statuses)
    RunRecorder.fail(run, error)
    assert (load(tmp_path).status, status_file.read(tmp_path).status) == (status, watched)
