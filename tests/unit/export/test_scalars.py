"""Scalars of a run: points of its rows as they are flushed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hpcsync.export import scalars
from hpcsync.export.scalars import Point, Reports
from hpcsync.trace.schema import TABLES, Outcome
from tests.unit.trace import peer_recorder, recorder


def all_points(trace: Any, flushes: int = 3) -> list[tuple[str, Point]]:
    """Return the points of a trace that is flushed a few times, with their table."""
    reports = Reports(trace.job.takers)
    edges_s = np.linspace(0, trace.tables["updates"]["now_s"].max(), flushes + 1)[1:-1]
    found = []
    for part in range(flushes):
        for name, rows in trace.tables.items():
            if "now_s" in (rows.dtype.names or ()):
                found += [
                    (name, point) for point in reports.points(name, rows[np.digitize(rows["now_s"], edges_s) == part])
                ]
    return found


def named(name: str, points: list[tuple[str, Point]]) -> list[float]:
    return [point.scalars[name] for _, point in points if name in point.scalars]


@pytest.mark.parametrize(("recorded", "kind"), [(recorder, "dssp"), (recorder, "bsp"), (peer_recorder, "local-sgd")])
def test_points_follow_time_and_updates(recorded: ModuleType, kind: str) -> None:
    trace = recorded.record(kind)
    table = "pushes" if recorded is recorder else "exchanges"
    points = all_points(trace)
    reports = [point for name, point in points if name == table]
    assert len(reports) > 20
    assert [p.now_s for p in reports] == sorted(p.now_s for p in reports)
    assert [p.update for p in reports] == sorted(p.update for p in reports)
    updates = trace.tables["updates"]
    assert 1 < reports[-1].update == updates["version"].max()
    if table == "exchanges":  # known in time
        for point in reports:
            assert point.update == updates["version"][updates["now_s"] <= point.now_s].max(initial=0)


def test_means_are_weighted_by_samples() -> None:
    rows = np.zeros(4, TABLES["pushes"])
    rows["now_s"], rows["batch_size"], rows["loss"] = [1, 2, 3, 4], [1, 3, 4, 8], [4.0, 0.0, np.nan, 1.0]
    rows["staleness"], rows["version_read"] = [0, 2, 9, 4], [0, 0, 0, 1]
    rows["outcome"][2] = Outcome.DROPPED
    one, rest = Reports(range(1)), Reports(range(1))
    (whole,) = one.points("pushes", rows[:1])
    assert whole == Point({"train/samples_per_s": 1.0, "train/loss": 4.0, "train/staleness": 0.0}, 1, 1.0)
    point = rest._of_part(rows, has_servers=True)
    assert point.scalars == {"train/samples_per_s": 3.0, "train/loss": 1.0, "train/staleness": 2.0}
    assert (point.update, point.now_s) == (9, 4.0)


SIZES = {"name": "timing", "parameters": 10, "classifier": 5, "activations": 1}
STANZA = {"name": "stanza", "cut": "classifier", "fc_share": 0.3}
TRAINED = {
    "a push that is dropped": lambda: recorder.record("k-sync", jitter=0.3),
    "a worker above the cut": lambda: peer_recorder.record(STANZA, workload=SIZES, samples=2000),
}


@pytest.mark.parametrize("case", TRAINED)
def test_rates_are_of_the_samples_that_were_trained(case: str) -> None:
    trace = TRAINED[case]()
    rows = trace.tables["pushes" if trace.job.has_servers else "exchanges"]
    since_s, total = rows["begin_s"].min(), 0.0
    for _, point in all_points(trace):
        if "train/samples_per_s" in point.scalars:
            total += point.scalars["train/samples_per_s"] * (point.now_s - since_s)
            since_s = point.now_s
    assert total == pytest.approx(trace.tables["updates"]["samples"].max(), rel=0.02)  # the last ones may have no time
    assert rows["batch_size"].sum() > 1.1 * total, "the case is in the trace"


def test_samples_of_a_point_without_time_count_for_the_next_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scalars, "BINS", 4)
    rows = np.zeros(4, TABLES["pushes"])
    rows["now_s"], rows["batch_size"] = [1, 1, 2, 3], [1, 2, 3, 4]
    rates = [point.scalars.get("train/samples_per_s") for point in Reports(range(1)).points("pushes", rows)]
    assert rates == [1.0, None, 5.0, 4.0]


def test_points_of_rows_out_of_order_do_not_go_back_in_time() -> None:
    rows = np.zeros(2, TABLES["pushes"])
    rows["now_s"], rows["batch_size"] = [2, 1], 8
    assert [point.now_s for point in Reports(range(1)).points("pushes", rows)] == [2.0, 2.0]


def test_a_point_before_the_updates_of_its_flush_has_the_last_one_before() -> None:
    reports, updates, rows = Reports(range(1)), np.zeros(3, TABLES["updates"]), np.zeros(1, TABLES["exchanges"])
    updates["now_s"], updates["version"], rows["now_s"] = [5, 6, 7], [1, 2, 3], 5.5
    for flush in (updates[:2], updates[2:]):
        assert [*reports.points("updates", flush)] == []
    assert [point.update for point in reports.points("exchanges", rows)] == [2]


def test_the_rate_of_a_resumed_run_begins_with_its_first_iteration() -> None:
    rows = np.zeros(1, TABLES["pushes"])
    rows["begin_s"], rows["now_s"], rows["batch_size"] = 100.0, 102.0, 8
    (point,) = Reports(range(1)).points("pushes", rows)
    assert point.scalars["train/samples_per_s"] == 4.0


def test_evaluations_are_points_without_what_is_not_known() -> None:
    rows = np.array([(1.5, 7, 64, 0.5, np.nan, np.nan)], TABLES["evaluations"])
    assert [*Reports(range(1)).points("evaluations", rows)] == [Point({"evaluation/loss": 0.5}, 7, 1.5)]
    assert [*Reports(range(1)).points("pushes", rows[:0])] == []
