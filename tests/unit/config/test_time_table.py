"""Recorded compute times."""

from pathlib import Path

import pytest

from hpcsync.config.errors import JobError
from hpcsync.config.time_table import read_times
from tests.unit.jobs import refusal

HEAD = "worker,iteration,seconds\n"


def test_times_are_by_worker_and_iteration(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("iteration,seconds,worker\n0,0.5,1\n0,1,0\n1,2e-3,0\n2,0,0\n")
    assert read_times(path, 2) == [[1.0, 0.002, 0.0], [0.5]]


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path) -> None:
    """Spreadsheets write one into their CSV files in UTF-8."""
    path = tmp_path / "t.csv"
    path.write_text(HEAD + "0,0,0.5\n", encoding="utf-8-sig")
    assert read_times(path, 1) == [[0.5]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must have exactly the columns worker,iteration,seconds"),
        ("worker,iteration\n", "must have exactly the columns worker,iteration,seconds"),
        ("worker,iteration,seconds,x\n", "must have exactly the columns worker,iteration,seconds"),
        (HEAD, "must have rows for every worker, 0 to 1; worker 0 has none"),
        (HEAD + "0,0,1\n", "must have rows for every worker, 0 to 1; worker 1 has none"),
        (HEAD + "0,0,1\nx,0,1\n", "line 3: must be two whole numbers and a number of seconds"),
        (HEAD + "0,0\n", "line 2: must be two whole numbers and a number of seconds"),
        (HEAD + "0,0,1,5\n", "line 2: must be two whole numbers and a number of seconds"),
        (HEAD + "2,0,1\n", "line 2: worker = 2: must be 0 to 1 (cluster.workers = 2)"),
        (HEAD + "-1,0,1\n", "line 2: worker = -1: must be 0 to 1 (cluster.workers = 2)"),
        (HEAD + "0,1,1\n", "line 2: iteration = 1: must be 0, the next of worker 0"),
        (HEAD + "0,0,1\n0,0,1\n", "line 3: iteration = 0: must be 1, the next of worker 0"),
        (HEAD + "0,0,-1\n", "line 2: seconds = -1.0: must be a number from 0 to 1e+15"),
        (HEAD + "0,0,nan\n", "line 2: seconds = nan: must be a number from 0 to 1e+15"),
        (HEAD + "0,0,inf\n", "line 2: seconds = inf: must be a number from 0 to 1e+15"),
        (HEAD + "0,0,1e300\n", "line 2: seconds = 1e+300: must be a number from 0 to 1e+15"),
    ],
)
def test_errors_name_their_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str) -> None:
    monkeypatch.chdir(tmp_path)  # long paths are cut short in messages
    path = Path("t.csv")
    path.write_text(text)
    assert refusal(read_times, path, 2) == f'cluster.compute.table = "{path}": {problem}'


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="No such file or directory$"):
        read_times(tmp_path / "no.csv", 1)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobError, match="not a CSV file$"):
        read_times(tmp_path / "binary.csv", 1)
