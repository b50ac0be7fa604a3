"""Straggler reports on rank 0: whom they name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpcsync.core.straggler_detector import KNOWN, StragglerDetector
from hpcsync.mpi.rank0.straggler_report import LONG_S, StragglerReport
from hpcsync.trace.schema import Phase


def lines(
    phases: list[Phase],
    until_s: float,
    capsys: pytest.CaptureFixture[str],
    *,
    known: int = KNOWN,
    blocked: dict[int, float] | None = None,
    pause_s: float = 0.0,
) -> list[str]:
    """What is said of workers with so many iterations of 0.1 s, which remain in these phases in the next one.

    After ten seconds rank 0 does not look for `pause_s`."""
    detector, stalls = StragglerDetector(), []
    for worker in range(len(phases)):
        for iteration in range(known):
            detector.began(worker, iteration + 1, 0.1 * iteration)
            detector.ended(worker, 0.1 * (iteration + 1))
        detector.began(worker, known + 1, 0.1 * known)
    run: Any = SimpleNamespace(stalls=detector, blocked=blocked, iters=[known] * len(phases))
    states: Any = SimpleNamespace(seen=lambda: [(known, phase) for phase in phases])
    trace: Any = SimpleNamespace(append=lambda table, row: stalls.append(row[1]), flush=lambda: None)
    report = StragglerReport(run, states, trace, [(rank, "n1") for rank in range(len(phases))], "all wait for all")
    for tick in range(5, round(10 * until_s)):
        if not 100 < tick < 100 + 10 * pause_s:
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


def test_long_transfers_of_first_iterations_are_reported_once(capsys):
    """They have no deadline, and a connection that does not work is often seen in them."""
    phases = [Phase.READING, Phase.COMPUTING, Phase.PUSHING, Phase.UNKNOWN]
    said = lines(phases, 3 * LONG_S, capsys, known=KNOWN - 1)
    where = "worker 0 (rank 0 on n1, reading), worker 2 (rank 2 on n1, pushing)"
    assert said == [f"hpcsync: transfers have lasted 60 s: {where}; a connection may be blocked"]
    assert not lines(phases, 0.9 * LONG_S, capsys, known=KNOWN - 1)
    assert not any("transfers" in line for line in lines(phases, 3 * LONG_S, capsys)), "deadlines are known"


def test_many_long_transfers_are_one_line(capsys):
    (said,) = lines([Phase.READING] * 11, 2 * LONG_S, capsys, known=1)
    assert said.endswith("worker 7 (rank 7 on n1, reading), 3 more workers; a connection may be blocked")


def test_workers_that_wait_for_others_make_no_long_transfers(capsys):
    waits, computes = Phase.WAITING, Phase.COMPUTING
    assert not lines([waits, computes], 2 * LONG_S, capsys, known=1)
    assert not lines([waits, computes], 2 * LONG_S, capsys, known=1, blocked={0: 0.5})
    assert len(lines([waits, waits], 2 * LONG_S, capsys, known=1)) == 1, "of each other: the exchange is blocked"
    assert len(lines([waits, computes], 2 * LONG_S, capsys, known=1, blocked={})) == 1, "a grant does not arrive"


def test_while_rank_0_did_not_run_transfers_may_have_stood_still_too(capsys):
    assert not lines([Phase.READING], 2 * LONG_S, capsys, known=1, pause_s=LONG_S)
    assert len(lines([Phase.READING], 2 * LONG_S, capsys, known=1, pause_s=LONG_S / 2)) == 1
