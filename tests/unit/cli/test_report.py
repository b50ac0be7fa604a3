"""Command report: the file it writes, what it refuses, and unfinished runs."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest
from click.testing import Result
from typer.testing import CliRunner

from hpcsync.cli import app, finished_runs
from hpcsync.cli.report import main
from hpcsync.config.errors import JobError
from tests.unit.html_report import pages


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return pages.simulated(tmp_path, "stop={updates = 30}")


def hpcsync(*arguments: object) -> Result:
    return CliRunner().invoke(app.app, [*map(str, arguments)])


def test_one_run_whatever_its_status(run: Path) -> None:
    result = hpcsync("report", run)
    assert (result.exit_code, result.stdout) == (0, "written: report.html\n")
    assert "<h1>small</h1>" in Path("report.html").read_text()
    assert "1 of 1" in Path("report.html").read_text()
    assert hpcsync("report", run, "--no-audit").exit_code == 0
    assert "none made" in Path("report.html").read_text()
    with h5py.File(run / "trace.h5", "r+") as file:
        file.attrs["status"] = "interrupted"
    assert hpcsync("report", run, "-o", "one.html").exit_code == 0
    assert "its status is interrupted" in Path("one.html").read_text()


def test_the_folder_of_the_file_is_created(run: Path) -> None:
    result = hpcsync("report", run, "-o", "absent/deep/a.html")
    assert (result.exit_code, result.stdout) == (0, "written: absent/deep/a.html\n")
    assert "<h1>small</h1>" in Path("absent/deep/a.html").read_text()


def test_the_name_of_a_run_may_have_bytes_that_are_no_text(run: Path) -> None:
    other = run.rename(run.with_name("named-\udcff"))
    assert main([other], Path("named.html")) == 0
    assert "named-\\udcff" in Path("named.html").read_text()


def test_unfinished_ones_of_several_runs_are_left_out(run: Path, tmp_path: Path) -> None:
    other = pages.simulated(tmp_path, "stop={updates = 30}", "seed=6")
    with h5py.File(run / "trace.h5", "r+") as file:
        file.attrs["status"] = "failed"
    result = hpcsync("report", run, other, "-o", "two.html")
    assert result.exit_code == 0
    assert "hpcsync: 1 run has not finished and is left out: " in result.stderr
    assert "<dt>runs</dt><dd>1</dd>" in Path("two.html").read_text()
    with h5py.File(other / "trace.h5", "r+") as file:
        file.attrs["status"] = "failed"
    is_refused(hpcsync("report", run, other), "report: no run has finished")


def test_a_file_that_cannot_be_written_is_refused_before_runs_are_read(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finished_runs, "traces", lambda paths: pytest.fail("it has begun"))
    Path("a.html").mkdir()
    with pytest.raises(JobError, match="a.html: Is a directory"):
        main([run], Path("a.html"))


def is_refused(result: Result, line: str) -> None:
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.splitlines()[-1].startswith(f"hpcsync: {line}")


def test_a_trace_whose_rows_have_changed_is_refused_in_one_line(run: Path) -> None:
    with h5py.File(run / "trace.h5", "r+") as trace:
        rows = trace["pushes"][:]
        rows["staleness"][0] = 2**62
        trace["pushes"][:] = rows
    wrong = f"{run / 'trace.h5'}: a damaged trace: the rows of /pushes are not those that were written"
    for audited in ("--no-audit", "--audit"):
        is_refused(hpcsync("report", run, audited), wrong)


def test_refusals(run: Path, tmp_path: Path) -> None:
    trace = run / "trace.h5"
    before = trace.read_bytes()
    is_refused(hpcsync("report", run, "-o", trace), f"{trace}: must end in .html or .htm")
    for option in ("--csv", "--latex"):
        is_refused(hpcsync("compare", run, option, trace), f"{trace}: must not end in .toml or .h5")
    assert trace.read_bytes() == before
    is_refused(hpcsync("report", "absent"), "absent: no such file")
    is_refused(hpcsync("report", run, "-o", trace / "a.html"), f"{trace / 'a.html'}: Not a directory")
    empty = tmp_path / "empty"
    empty.mkdir()
    is_refused(
        hpcsync("report", empty),
        f"{empty}: must be a trace, or a folder",
    )
    job = tmp_path / "small.toml"
    vary = ("--vary", "seed=[1]", "--simulate", "--report", "a.txt")
    is_refused(hpcsync("compare", job, *vary), "a.txt: must end in .html or .htm")
