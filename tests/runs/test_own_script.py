"""The example of a user's own training script, among ranks and alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.system import launcher
from hpcsync.trace.reader import load
from tests.runs.processes import ended, mpiexec

SCRIPT = Path(__file__).parents[2] / "jobs" / "own_script.py"


def accuracies(out: str) -> list[float]:
    return [float(found) for found in re.findall(r"^test accuracy (.*)$", out, re.MULTILINE)]


def plainly() -> list[str]:
    """As its users do: what the launcher sets comes from them or is not there."""
    line = mpiexec(3, SCRIPT)
    if "Open MPI" in subprocess.run([line[0], "--version"], capture_output=True, text=True, timeout=60).stdout:
        line[1:1] = ["--map-by", ":oversubscribe", "--allow-run-as-root"]
    return line


def test_it_trains_on_three_ranks_and_leaves_a_trace(tmp_path: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if key not in launcher.SETTINGS}
    program = ended(plainly(), cwd=tmp_path, environ=environ)
    assert program.status == 0, program.err
    assert len(accuracies(program.out)) == 1, "only one rank speaks"
    assert accuracies(program.out)[0] > 0.9
    (folder,) = (tmp_path / "runs").iterdir()
    trace = load(folder / "trace.h5")
    assert (trace.status, trace.n_workers, trace.job.workload.name) == ("finished", 2, "script")
    assert trace.tables["updates"]["samples"][-1] == 40 * 44 * 32  # every whole batch once, in 40 epochs
    assert [check for check in audit(trace) if not check.passed] == []


@pytest.mark.once
def test_it_trains_alone_and_leaves_nothing(tmp_path: Path) -> None:
    program = ended([sys.executable, str(SCRIPT)], cwd=tmp_path, environ={**os.environ, "OMP_NUM_THREADS": "1"})
    assert program.status == 0, program.err
    assert accuracies(program.out)[0] > 0.9
    assert list(tmp_path.iterdir()) == []


SEPARATED = """
import torch, hpcsync
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(200, 8), torch.randint(0, 3, (200,)))
with hpcsync.connect(model, optimizer, "stanza", cut="2", out="out") as sync:
    for i, (x, y) in enumerate(sync.shard(data, batch_size=8, epochs=3)):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        sync.step(loss)
        if i == 4 and sync.rank == {leaver}:
            break
"""


@pytest.mark.once
def test_whoever_needs_a_worker_that_has_left_says_so(tmp_path: Path) -> None:
    """Where layers are separated nobody can go on without the others."""
    leaver = 0
    script = tmp_path / "script.py"
    script.write_text(SEPARATED.format(leaver=leaver))
    program = ended(mpiexec(3, script), cwd=tmp_path, environ=launcher.environment())
    assert program.status != 0
    assert f"worker {leaver} makes no further iteration, but this one does" in program.err
    assert load(tmp_path / "out" / "trace.h5").status == "failed"
