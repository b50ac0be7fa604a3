"""The example of a user's own training script, among ranks and alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcsync import launcher
from hpcsync.traces.audit import audit
from hpcsync.traces.reading import load
from tests.runs.processes import ended, mpiexec

SCRIPT = Path(__file__).parents[2] / "jobs" / "own_script.py"


def accuracies(out: str) -> list[float]:
    return [float(found) for found in re.findall(r"^test accuracy (.*)$", out, re.MULTILINE)]


def plainly() -> list[str]:
    """As its users do: what the launcher sets comes from them or is not there."""
    line = mpiexec(4, SCRIPT)
    if "Open MPI" in subprocess.run([line[0], "--version"], capture_output=True, text=True, timeout=60).stdout:
        line[1:1] = ["--map-by", ":oversubscribe", "--allow-run-as-root"]
    return line


def test_it_trains_on_four_ranks_and_leaves_a_trace(tmp_path: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if key not in launcher.SETTINGS}
    program = ended(plainly(), cwd=tmp_path, environ=environ)
    assert program.status == 0, program.err
    assert len(accuracies(program.out)) == 1, "only one rank speaks"
    assert accuracies(program.out)[0] > 0.9
    (folder,) = (tmp_path / "runs").iterdir()
    trace = load(folder / "trace.h5")
    assert (trace.status, trace.n_workers, trace.job.workload.name) == ("finished", 3, "script")
    assert trace.tables["updates"]["samples"][-1] == 40 * 44 * 32  # every whole batch once, in 40 epochs
    assert [check for check in audit(trace) if not check.passed] == []


@pytest.mark.once
def test_it_trains_alone_and_leaves_nothing(tmp_path: Path) -> None:
    program = ended([sys.executable, str(SCRIPT)], cwd=tmp_path)
    assert program.status == 0, program.err
    assert accuracies(program.out)[0] > 0.9
    assert list(tmp_path.iterdir()) == []
