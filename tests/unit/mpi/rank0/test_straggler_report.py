"""Straggler reports on rank 0: whom they name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpcsync.core.straggler_detector import KNOWN, StragglerDetector
from hpcsync.mpi.rank0.straggler_report import StragglerReport
from hpcsync.trace.schema import Phase


def lines(phases: list[Phase], until_s: float, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is said of workers with known iterations of 0.1 s, which remain in these phases in the next one."""
    detector, stalls = StragglerDetector(), []
    for worker in range(len(phases)):
        for iteration in range(KNOWN):
            detector.began(worker, iteration + 1, 0.1 * iteration)
            detector.ended(worker, 0.1 * (iteration + 1))
        detector.began(worker, KNOWN + 1, 0.1 * KNOWN)
    run: Any = SimpleNamespace(stalls=detector, blocked=None, iters=[KNOWN] * len(phases))
    states: Any = SimpleNamespace(seen=lambda: [(KNOWN, phase) for phase in phases])
    trace: Any = SimpleNamespace(append=lambda table, row: stalls.append(row[1]), flush=lambda: None)
    report = StragglerReport(run, states, trace, [(rank, "n1") for rank in range(len(phases))], "all wait for all")
    for tick in range(5, round(10 * until_s)):
        report.look(tick / 10)
    said = capsys.readouterr().err.splitlines()
    assert len(stalls) == sum(" stalls (" in line for line in said)
    return said


def test_a_worker_whose_script_has_not_begun_its_loop_does_not_stall(capsys):
    """The iterations of a run that resumes are known before its script has loaded its data."""
    said = lines([Phase.UNKNOWN, Phase.COMPUTING], 2.5, capsys)
    assert len(said) == 2
    assert said[0].startswith("hpcsync: worker 1 stalls (rank 1 on n1, computing): its iteration 6 has lasted 1.")
    assert said[1] == "hpcsync:   blocked: none; all wait for all"
