"""Runs that ended before they had finished: their status, and what is said of how they resume."""

from pathlib import Path

import pytest

from hpcsync.run_dir import status_file, unfinished
from hpcsync.run_dir.checkpoint import RUN, Checkpoints
from hpcsync.trace.reader import load
from hpcsync.trace.writer import TraceWriter
from tests.unit.run_dir.test_status_file import writer
from tests.unit.run_states import run_state
from tests.unit.trace import recorder


def ended_early(folder: Path, *, checkpoint: bool = False) -> Path:
    """Return the folder of a run whose ranks were killed."""
    folder.mkdir()
    TraceWriter(folder / "trace.h5", recorder.attributes(recorder.job_of("asp"))).close("interrupted")
    status, _ = writer(folder)
    status.close("running")
    if checkpoint:
        store = Checkpoints(folder, 2, None, shared=True)
        store.begin(1)
        store.write(1, RUN, run_state())
        store.commit(1)
    return folder


def statuses(folder: Path) -> tuple[str, str]:
    """Return the status of the trace, and that for `hpcsync watch`."""
    return load(folder / "trace.h5").status, status_file.read(folder).status


@pytest.mark.parametrize(("may_restart", "watched"), [(False, "failed"), (True, "running")])
def test_a_run_whose_ranks_were_killed_is_closed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], may_restart: bool, watched: str
) -> None:
    folder = ended_early(tmp_path / "run")
    assert unfinished.close(folder, "failed", may_restart=may_restart) == "interrupted"
    assert capsys.readouterr().err == f"hpcsync: failed; the trace so far is {folder / 'trace.h5'}\n"
    assert statuses(folder) == ("failed", watched)
    assert unfinished.close(folder, "failed") is None
    assert capsys.readouterr().err == ""


def test_a_trace_that_cannot_be_closed_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unfinished.close(tmp_path, "failed") is None and capsys.readouterr().err == "", "no trace is no error"
    (tmp_path / "trace.h5").write_text("something else")
    assert unfinished.close(tmp_path, "failed") is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hpcsync: {tmp_path / 'trace.h5'}: ")


def test_scripts_are_told_how_their_runs_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = ended_early(tmp_path / "saved", checkpoint=True)
    folders = [ended_early(tmp_path / "finished"), ended_early(tmp_path / "unsaved"), saved]
    (folders[0] / "summary.json").touch()
    unfinished.close_scripts(folders, "failed")
    assert capsys.readouterr().err.splitlines() == [
        "hpcsync: failed; the trace so far is unsaved/trace.h5",
        "hpcsync: failed; the trace so far is saved/trace.h5",
        'hpcsync: use connect(..., out="saved", resume=True) to resume from saved/checkpoints/1',
    ]
    assert [statuses(folder) for folder in folders] == [("interrupted", "running"), *[("failed", "failed")] * 2]
    assert unfinished.resumption(saved, is_script=False) == "--resume"
