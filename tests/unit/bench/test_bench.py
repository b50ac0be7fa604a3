"""`hpcsync bench` around its measurements: what may be asked for, and what comes of a job that fails."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hpcsync import bench
from hpcsync.bench import BenchError, Target
from hpcsync.job_errors import JobError
from hpcsync.launcher import Ended


def test_nothing_asked_for_is_everything():
    assert bench.parse([]) == [
        "transfers", "round-trip", "latency", "allreduce", "decisions", "tracing", "events", "simulation",
    ]  # fmt: skip


def test_what_is_asked_for_is_measured_once_and_in_order():
    assert bench.parse(["tracing", "latency", "tracing"]) == ["tracing", "latency"]


def test_an_unknown_target_is_refused_with_what_is_allowed():
    with pytest.raises(JobError, match='"traced": must be one of transfers, .*, simulation; did you mean tracing?'):
        bench.main(["latency", "traced"])


def test_one_target_ends_in_a_table_and_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "figures.json"
    assert bench.main(["tracing"], path) == 0
    told = capsys.readouterr().out
    assert "cores" in told and "numpy" in told and "append a row to /pushes" in told
    measured = json.loads(path.read_text())
    assert all(figure["ratio"] > 0 for figure in measured["targets"]["tracing"]["figures"])


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "measure", None)
    with pytest.raises(JobError, match="--json .*: No such file or directory"):
        bench.main(["tracing"], tmp_path / "missing" / "figures.json")


def test_a_failed_measurement_is_told_and_does_not_stop_the_others(capsys, monkeypatch):
    def fail(target):
        raise BenchError("status 7")

    monkeypatch.setattr(bench, "measure", fail)
    assert bench.main(["transfers", "tracing"]) == 1
    told = capsys.readouterr().out
    assert "transfers: status 7" in told and "tracing: status 7" in told


@pytest.mark.parametrize("status", [0, 3])
def test_a_job_without_figures_is_a_failure_whatever_its_status(status, monkeypatch):
    def launch(n, argv, *, timeout_s, output):
        output.write(b"last words")
        return Ended(status)

    monkeypatch.setattr(bench.launcher, "launch", launch)
    with pytest.raises(BenchError, match="last words"):
        bench.measure(Target("transfers", "", ranks=2))


def test_an_interrupted_job_ends_everything(monkeypatch):
    monkeypatch.setattr(bench.launcher, "launch", lambda *a, **k: Ended(130, signum=2))
    with pytest.raises(KeyboardInterrupt):
        bench.main(["transfers", "tracing"])


def test_importing_it_loads_no_mpi():
    code = "import sys, hpcsync.bench; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
