"""Workers that join late, or leave and return, in virtual time: times, weights and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import Change
from tests.unit.jobs import LINEAR
from tests.unit.simulator.running import failed, simulate, timing_job

EVENTS = [
    {"worker": 1, "at_s": 3.0, "change": "leave"},
    {"worker": 1, "at_s": 9.2, "change": "join"},
    {"worker": 2, "at_s": 5.5, "change": "join"},
]
ADSP = {"name": "adsp", "check_period_s": 4.0, "interval_min_s": 0.5, "search_every_s": 20.0}
BATCHES = {"policy": "equal-finish", "interval": 2, "gain": 0.01, "predictor": "last"}
PARADIGMS: list[dict[str, Any]] = [
    {"name": "bsp"},
    {"name": "asp"},
    {"name": "ssp", "staleness": 2},
    {"name": "dssp", "staleness_min": 1, "staleness_max": 5},
    {"name": "dssp", "staleness_min": 1, "staleness_max": 5, "mode": "paper"},
    {"name": "easgd", "period": 3},
    {"name": "easgd", "period": 3, "synchronous": True},
    {"name": "k-sync", "k": 2},
    {"name": "k-sync", "k": "state", "cancel": "abort"},
    {"name": "k-batch-sync", "k": 2},
    {"name": "k-async", "k": "min", "staleness_max": 3},
    {"name": "k-batch-async", "k": 2},
    {"name": "ashl", "warmup": 1, "profiled": 4, "steps_coarse": 4, "steps_fine": 2, "loss_preset": 1e9},
    ADSP,
    {**ADSP, "commits": 3},
    {"name": "async-diloco", "steps": 3},
    {"name": "async-diloco", "steps": 3, "quorum": 2, "grace_s": 0.6},
]


def run(path: Path, paradigm: dict[str, Any], **tables: Any) -> Trace:
    tables = {"stop": {"seconds": 30.0}, "cluster": {"events": EVENTS}, **tables}
    return simulate(timing_job(workers=4, seconds=(0.7, 1.0, 1.3, 2.0), paradigm=paradigm, **tables), path)


def changes(trace: Trace) -> list[tuple[int, int]]:
    return [(row["worker"], row["change"]) for row in trace.tables["membership"]]


@pytest.mark.parametrize("paradigm", PARADIGMS, ids=lambda p: "-".join(map(str, p.values())))
def test_a_run_with_joining_and_leaving_workers_audits(paradigm: dict[str, Any], tmp_path: Path) -> None:
    trace = run(tmp_path / "a.h5", paradigm)
    assert failed(trace) == []
    of = {worker: [change for who, change in changes(trace) if who == worker] for worker in range(4)}
    assert of[2] == [Change.LEFT, Change.JOINED, Change.LEFT]
    assert of[1] in (
        [Change.LEFT, Change.JOINED, Change.LEFT],
        [Change.LEFT],
    )  # with few barriers no iteration may begin during its absence
    again = run(tmp_path / "b.h5", paradigm)
    assert all(
        trace.tables[name].tobytes() == again.tables[name].tobytes() for name in trace.tables if name != "starts"
    )


@pytest.mark.parametrize("staleness", [0, 2])
def test_commits_that_wait_for_the_gate_while_workers_leave_and_join(staleness: int, tmp_path: Path) -> None:
    """With losses, so that the fine stage begins."""
    paradigm = {"name": "ashl", "warmup": 0, "profiled": 2, "steps_coarse": 1, "loss_preset": 1e9}
    later = [{"worker": worker, "at_s": at_s, "change": change} for worker, at_s, change in
             ((0, 30.0, "leave"), (0, 38.0, "join"), (3, 41.0, "leave"), (3, 55.0, "join"))]  # fmt: skip
    tables = {"workload": LINEAR, "optimizer": {"name": "sgd", "lr": 0.1}, "cluster": {"events": [*EVENTS, *later]}}
    gated = {**paradigm, "staleness": staleness, "commit": "after-gate"}
    trace = run(tmp_path / "a.h5", gated, **tables, stop={"seconds": 80.0}, evaluation={"every_samples": 40})
    assert failed(trace) == []
    assert (trace.tables["grants"]["held_s"] > 0).sum() > 9


@pytest.mark.parametrize("paradigm", PARADIGMS[:8], ids=lambda p: "-".join(map(str, p.values())))
def test_allocated_batches_are_divided_among_all_after_a_join(paradigm: dict[str, Any], tmp_path: Path) -> None:
    trace = run(tmp_path / "t.h5", paradigm, batches=BATCHES)
    assert failed(trace) == []
    joined = trace.tables["membership"]["seq"][trace.tables["membership"]["change"] == Change.JOINED]
    rows = trace.tables["decisions"]
    for seq in joined:
        assert rows[rows["seq"] > seq]["seq"][0] == seq + 1, "sizes are chosen anew at once"


@pytest.mark.parametrize("paradigm", [PARADIGMS[i] for i in (0, 2, 5, 6, 14)], ids=lambda p: p["name"])
def test_a_joining_worker_begins_with_the_servers_weights(paradigm: dict[str, Any], tmp_path: Path) -> None:
    tables = {"workload": LINEAR, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.5}}
    late, at_first = (
        run(tmp_path / f"{len(events)}.h5", paradigm, cluster={"events": events}, **tables)
        for events in ([{"worker": 2, "at_s": 20.0, "change": "join"}], [])
    )
    assert failed(late) == []
    own, others = (
        np.sort(t.tables["pushes"][t.tables["pushes"]["worker"] == 2], order="seq") for t in (late, at_first)
    )
    assert (own["iteration"][0], own["begin_s"][0]) == (1, 20.0)
    assert own["loss"][0] < 0.5 * others["loss"][0], "of the same batch"


def test_an_absence_within_one_iteration_has_no_effect(tmp_path: Path) -> None:
    events = [{"worker": 0, "at_s": 1.2, "change": "leave"}, {"worker": 0, "at_s": 1.8, "change": "join"}]
    job = timing_job(workers=2, paradigm={"name": "asp"}, stop={"seconds": 5.5}, cluster={"events": events})
    trace = simulate(job, tmp_path / "t.h5")
    assert changes(trace) == [(0, Change.LEFT), (1, Change.LEFT)]


def test_no_worker_joins_a_finished_run(tmp_path: Path) -> None:
    events = [{"worker": 0, "at_s": 2.0, "change": "leave"}, {"worker": 0, "at_s": 99.0, "change": "join"}]
    for stop in ({"seconds": 5.5}, {"updates": 7}):
        job = timing_job(workers=3, paradigm={"name": "asp"}, stop=stop, cluster={"events": events})
        trace = simulate(job, tmp_path / f"{len(stop)}{next(iter(stop))}.h5")
        assert changes(trace) == [(0, Change.LEFT), (1, Change.LEFT), (2, Change.LEFT)]
        assert failed(trace) == []
