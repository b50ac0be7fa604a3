"""Seconds of a run: the rows that are exported, and exports whose flows begin or end elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsync.export import pipit
from hpcsync.export.spans import spans
from hpcsync.export.window import part
from hpcsync.trace.reader import load, opened
from tests.unit.export import runs


def test_the_whole_is_the_trace(tmp_path: Path) -> None:
    run = runs.simulated(tmp_path)
    expected = load(run).tables
    with opened(run, slice_rows=7) as trace:
        found = part(trace).tables
    assert found.keys() == expected.keys()
    for table, rows in expected.items():
        assert found[table].dtype == rows.dtype and found[table].tobytes() == rows.tobytes(), (
            table
        )  # NaN differ as values


@pytest.mark.parametrize("kind", runs.KINDS)
def test_spans_are_those_of_iterations_in_these_seconds(kind: str, tmp_path: Path) -> None:
    whole = runs.trace(kind)
    from_s, to_s = (share * float(whole.tables["updates"]["now_s"].max()) for share in (0.4, 0.6))
    some = part(whole, from_s, to_s)
    table = "pushes" if whole.job.has_servers else "exchanges"
    ends = [row["now_s"] for row in some.tables[table]]
    assert min(ends) >= from_s and 0 < len(ends) < len(whole.tables[table])
    assert max(some.tables[table]["begin_s"]) <= to_s
    all_bars, bars = spans(whole), spans(some)
    inside = all_bars[(all_bars["begin_ns"] >= 1e9 * from_s) & (all_bars["end_ns"] <= 1e9 * to_s)]
    keys = ["worker", "iteration", "activity", "begin_ns", "end_ns"]
    missing = inside.merge(bars, on=keys, how="left", indicator=True)
    assert len(inside) > 2 and (missing["_merge"] == "both").all()
    pipit.write(some, tmp_path / "a.csv")
    perfetto = pytest.importorskip("hpcsync.export.perfetto", exc_type=ImportError)
    perfetto.write([some], tmp_path / "a.pftrace")
    assert (tmp_path / "a.pftrace").stat().st_size > 0
