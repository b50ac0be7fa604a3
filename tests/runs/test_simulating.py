"""`hpcsync simulate` from the command line."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.system.standard_output import READER_LEFT
from hpcsync.trace.reader import load
from tests.runs.processes import ended, hpcsync, started

pytestmark = pytest.mark.once

JOB = """
name = "both"
seed = 1
workload = {name = "linear", batch_size = 4, samples = 96, features = 7}
optimizer = {name = "sgd", lr = 0.05, momentum = 0.9}
evaluation.every_samples = 100
stop.updates = 120
paradigm = {name = "bsp"}
cluster = {servers = 1, workers = 2, compute = {model = "lognormal", seconds = [0.004, 0.008]}}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "both.toml"
    path.write_text(JOB)
    return path


def test_a_signal_ends_it_and_leaves_a_trace(tmp_path, path):
    out = tmp_path / "out"
    arguments = ("--set", "stop.updates=100000000", "--set", "evaluation.every_samples=0", "--out", out)
    with started(hpcsync("simulate", path, *arguments)) as program:
        program.wait_for(lambda p: "samples/s" in p.out)
        program.process.send_signal(signal.SIGTERM)
        assert program.status == 1
    assert f"interrupted: SIGTERM; the trace so far is {out / 'trace.h5'}" in program.err
    trace = load(out / "trace.h5")
    assert trace.status == "interrupted"
    assert len(trace.tables["pushes"]) > 0
    assert [check for check in audit(trace) if not check.passed] == []


def test_a_simulation_whose_output_nobody_reads_is_finished(path: Path, tmp_path: Path) -> None:
    # The reader has ended long before anything is printed.
    line = f"set -o pipefail; {shlex.join(hpcsync('simulate', path, '--out', tmp_path / 'run'))} | true"
    program = ended(["bash", "-c", line])
    assert (program.status, program.err) == (READER_LEFT, "")
    assert load(tmp_path / "run").finished
