"""Spans of runs: what the figure `timeline` draws, in nanoseconds, one after the other."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from hpcsync.export.spans import NS, disjoint, instants, nanoseconds, spans
from hpcsync.report import intervals
from hpcsync.trace.schema import Change
from tests.unit.export import runs
from tests.unit.trace.recorder import record, with_rows


def overlaps(frame: pd.DataFrame) -> int:
    """Return how many spans begin before the previous one of their worker has ended, or before time 0."""
    earlier_ns = frame.groupby("worker")["end_ns"].shift(fill_value=0)
    return int((frame["begin_ns"] < earlier_ns).sum())


@pytest.mark.parametrize("kind", runs.KINDS)
def test_spans_have_the_times_of_the_bars_and_none_overlaps(kind: str) -> None:
    trace = runs.trace(kind)
    frame, bars = spans(trace), intervals.bars_of(trace, intervals.iterations(trace))
    bars = bars[bars["begin_s"] >= 0]
    assert overlaps(frame) == 0
    assert len(frame) > 20 and set(frame["worker"]) == set(range(trace.n_workers))
    computed = [part[part["activity"] == "compute"] for part in (frame, bars)]
    np.testing.assert_allclose(computed[0]["begin_ns"] / NS, computed[1]["begin_s"], atol=1e-9)
    np.testing.assert_allclose(computed[0]["end_ns"] / NS, computed[1]["end_s"], atol=1e-9)


def test_what_lies_before_the_start_or_under_an_earlier_bar_is_cut_off() -> None:
    begin_ns, end_ns = [-8, 10, 15, 40, 41, 0, 9, -9, -5], [10, 30, 20, 41, 50, 9, 11, -5, 7]
    bars = pd.DataFrame({"worker": [0] * 5 + [1] * 2 + [2] * 2, "activity": "compute", "iteration": 1})
    bars = bars.assign(begin_ns=begin_ns, end_ns=end_ns)
    assert overlaps(bars) == 3
    frame = disjoint(bars)
    of_0, of_1, of_2 = [[0, 0, 10], [0, 10, 30], [0, 41, 50]], [[1, 0, 9], [1, 9, 11]], [[2, 0, 7]]
    assert frame[["worker", "begin_ns", "end_ns"]].values.tolist() == [*of_0, *of_1, *of_2]


def test_times_are_the_nearest_nanoseconds() -> None:
    assert nanoseconds(np.array([1.001, 0.9999999994])).tolist() == [1_001_000_000, 999_999_999]


def test_instants_are_updates_and_events() -> None:
    trace = runs.trace("bsp")
    rows = np.zeros(1, trace.tables["membership"].dtype)
    rows[0] = (trace.tables["pushes"]["seq"].max() + 1, 2.5, 1, Change.DIED)
    frame = instants(with_rows(trace, "membership", rows))
    updates = frame[frame["activity"] == "update"]
    assert (updates["worker"] == intervals.SERVERS).all()
    assert updates["iteration"].tolist() == trace.tables["updates"]["version"].tolist()
    assert frame[frame["activity"] == "died"][["worker", "now_ns"]].values.tolist() == [[1, 2_500_000_000]]


def test_times_that_elapse_are_no_decisions() -> None:
    trace = record("async-diloco", jitter=0.3)
    controllers = trace.tables["decisions"]["controller"].tolist()
    assert b"elapsed" in controllers
    assert (instants(trace)["activity"] == "decision").sum() == controllers.count(b"local-steps") > 0


def test_a_run_without_events_has_none() -> None:
    trace = runs.trace("local-sgd")
    rows = trace.tables["membership"]
    none = with_rows(trace, "membership", rows[:0])
    ends = with_rows(trace, "membership", np.array([(1, 1e9, 0, Change.LEFT)], rows.dtype))  # with the run: no event
    assert len(instants(none)) == len(instants(ends)) == 0
