"""The scripts in jobs/scripts on real ranks: they end with status 0, and leave a trace that passes its audit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.system import launcher
from hpcsync.trace.reader import load
from tests.runs.processes import ended, hpcsync, mpiexec
from tests.scripts_before import FOLDER

SAMPLES = {  # trained on, in whole batches
    "resnet": 2 * 56 * 32,
    "transformer": 62 // 4 * 4 * 3 * 8,
    "finetuning": 56 * 32,
    "iterable": 2400,
    "gan": 2 * 2048,
}


BY_HPCSYNC = ("gan",)


@pytest.mark.parametrize(
    "name", [name if name == "resnet" else pytest.param(name, marks=pytest.mark.once) for name in SAMPLES]
)
def test_a_script_trains_on_four_ranks(tmp_path: Path, name: str) -> None:
    script = FOLDER / f"{name}.py"
    command = hpcsync("launch", "-n", "4", "--", "python", script) if name in BY_HPCSYNC else mpiexec(4, script)
    environ = {**os.environ} if name in BY_HPCSYNC else launcher.environment()
    check(ended(command, cwd=tmp_path, environ=environ), tmp_path, SAMPLES[name])


def check(program, folder: Path, n_samples: int) -> None:
    assert (program.status, program.err) == (0, "")
    (run,) = (folder / "runs").iterdir()
    trace = load(run / "trace.h5")
    assert (trace.status, trace.n_workers) == ("finished", 3)
    assert trace.tables["updates"]["samples"][-1] == n_samples
    assert trace.tables["pushes"]["loss"].min() > 0.0
    assert [found for found in audit(trace) if not found.passed] == []


@pytest.mark.once
def test_a_script_trains_alone_and_leaves_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = ended([sys.executable, str(FOLDER / "finetuning.py")], cwd=tmp_path, environ=environ)
    assert (program.status, program.err) == (0, "")
    assert list(tmp_path.iterdir()) == []
