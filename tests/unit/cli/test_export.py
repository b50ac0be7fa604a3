"""Command export: the files that it writes, and what it refuses in one line."""

from __future__ import annotations

import builtins
import importlib.util
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
from click.testing import Result
from typer.testing import CliRunner

from hpcsync.cli import app
from tests.unit.export import runs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return runs.simulated(tmp_path)


def hpcsync(*arguments: object) -> Result:
    return CliRunner().invoke(app.app, [*map(str, arguments)])


def refused(*arguments: object) -> str:
    result = hpcsync("export", *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("hpcsync: ")
    return result.stderr.removeprefix("hpcsync: ")


def test_the_suffix_tells_the_format(run: Path) -> None:
    result = hpcsync("export", run, "-o", "a.csv")
    assert (result.exit_code, result.stdout) == (0, "written: a.csv\n")
    assert Path("a.csv").read_text().startswith("Timestamp (ns),Event Type,Name,Process\n")
    pytest.importorskip("perfetto")
    assert hpcsync("export", run, "-o", "a.pftrace").stdout == "written: a.pftrace\n"
    pytest.importorskip("pyarrow")
    assert hpcsync("export", run / "trace.h5", "-o", "tables", "--format", "parquet").stdout.endswith("11 tables\n")
    assert hpcsync("export", run, "-o", "tables", "--format", "parquet").exit_code == 0  # replaced
    assert Path("tables/pushes.parquet").stat().st_size
    assert hpcsync("export", run.parent, "-o", "a.csv").exit_code == 0  # the folder with the run
    whole = Path("a.csv").read_text().splitlines()
    middle_s = 0.5e-9 * int(whole[-1].split(",")[0])
    assert hpcsync("export", run, "-o", "a.csv", "--from", middle_s).exit_code == 0
    assert 0.3 < len(Path("a.csv").read_text().splitlines()) / len(whole) < 0.7


def test_refusals(run: Path) -> None:
    trace = run / "trace.h5"
    Path("empty").mkdir()
    before = trace.read_bytes()
    assert refused(run, "-o", trace) == (
        f"{trace}: must end in .pftrace or .perfetto-trace (Perfetto) or .csv, or --format be one of perfetto, csv, "
        "parquet\n"
    )
    assert refused(run, "-o", trace, "--format", "csv") == f"{trace}: must end in .csv for --format csv\n"
    assert refused(run, "-o", "a", "--format", "otf2") == "--format otf2: must be one of perfetto, csv, parquet\n"
    assert "must be a folder" in refused(run, "-o", trace, "--format", "parquet")
    assert trace.read_bytes() == before
    assert "takes one RUN; 2 were given" in refused(run, run, "-o", "a.csv")
    assert refused("empty", "-o", "a.csv").startswith("empty: must be a trace, or a folder with the traces of runs")
    assert refused("absent", "-o", "a.csv").startswith("absent: no such file")
    if importlib.util.find_spec("perfetto"):
        assert refused(run, run, "-o", "a.pftrace").endswith("given twice\n")
    assert refused(run, "-o", "a.csv", "--from", 3, "--to", 2) == "--from 3: must be less than --to 2\n"
    assert refused(run, "-o", "a.csv", "--from", "nan") == "--from nan: must be less than --to inf\n"
    assert refused(run, "-o", "a.csv", "--from", 1e6).startswith("--from 1e+06: must be at most ")
    assert not Path("a.csv").exists()
    assert "must be left out with --format parquet" in refused(run, "-o", "a", "--format", "parquet", "--to", 2)
    assert refused(run, "-o", "absent/a.csv") == "absent/a.csv: No such file or directory\n"


@pytest.mark.parametrize("file", ["a.csv", "a.pftrace", "a.parquet"])
def test_a_trace_whose_rows_have_changed_is_refused_in_one_line(run: Path, file: str) -> None:
    if file != "a.csv":
        pytest.importorskip({"a.pftrace": "perfetto", "a.parquet": "pyarrow"}[file])
    with h5py.File(run / "trace.h5", "r+") as trace:
        rows = trace["membership"][:]
        rows["change"][0] = 77
        trace["membership"][:] = rows
    wrong = f"{run / 'trace.h5'}: a damaged trace: the rows of /membership are not those that were written\n"
    out = ("-o", file) if file != "a.parquet" else ("-o", "tables", "--format", "parquet")
    assert refused(run, *out) == wrong


@pytest.mark.parametrize(
    ("package", "file"), [("pandas", "a.csv"), ("pyarrow", "a.parquet"), ("perfetto", "a.pftrace")]
)
def test_a_missing_package_is_one_line_with_the_extra(
    package: str, file: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=package)
        return find(name, *rest, **more)

    for name in [name for name in sys.modules if name.startswith("hpcsync.export.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    says = f"needs {package}, which is not installed: pip install 'hpcsync[export]'\n"
    assert refused(run, "-o", file).endswith(says)
    assert not Path(file).exists()


@pytest.mark.parametrize("raised", ['ImportError("{}\\nmore")', 'AttributeError("{}")'])
def test_a_package_that_does_not_fit_the_others_is_one_line(
    raised: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "numpy.core.multiarray failed to import"
    (tmp_path / "pyarrow.py").write_text(f"raise {raised.format(text)}")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith(("hpcsync.export.", "pyarrow"))]:
        monkeypatch.delitem(sys.modules, name)
    says = f"--format parquet: a package that it needs cannot be imported: {text}\n"
    assert refused(run, "-o", "tables", "--format", "parquet").endswith(says)
