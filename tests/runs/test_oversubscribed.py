"""More ranks than cores."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.trace.reader import load
from tests.runs.processes import ended, hpcsync

JOB = Path(__file__).parents[2] / "jobs" / "oversubscribed.toml"


WORKERS = min(8, 2 * (os.cpu_count() or 1) + 1)


@pytest.mark.flaky(reruns=3, only_rerun="nobody starves")  # a rank that pauses in a run of two seconds
def test_many_more_ranks_than_cores_finish(tmp_path: Path) -> None:
    """How fast they are is not for a test on a machine that others use too; the job file says how to see it."""
    settings = ("--set", f"cluster.workers={WORKERS}", "--set", "stop.updates=160")
    program = ended(hpcsync("run", JOB, *settings, "--out", tmp_path / "out"))
    assert program.status == 0, program.err
    trace = load(tmp_path / "out" / "trace.h5")
    assert trace.n_workers == WORKERS
    assert len(trace.tables["updates"]) >= 160
    made = np.bincount(trace.tables["pushes"]["worker"], minlength=WORKERS)
    assert (made > 160 / WORKERS / 3).all(), "nobody starves"
    assert trace.tables["pushes"]["compute_s"].min() >= 0.05
    assert [check for check in audit(trace) if not check.passed] == []
    rate = len(trace.tables["updates"]) / trace.tables["updates"]["now_s"][-1]
    print(f"{rate:.1f} of {20 * WORKERS} updates a second on {os.cpu_count()} cores")
