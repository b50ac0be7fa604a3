"""Runs part by part, and the seconds of a run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from hpcsync.export import pipit, window
from hpcsync.export.spans import instants, spans, spans_of_part
from hpcsync.export.window import TIMED, parts
from hpcsync.trace.reader import Trace, load, opened
from tests.unit.export import runs
from tests.unit.export.runs import in_slices
from tests.unit.trace import peer_recorder, recorder
from tests.unit.trace.recorder import with_rows

KEYS = ["worker", "iteration", "activity", "begin_ns", "end_ns"]


def all_spans(trace: Trace) -> pd.DataFrame:
    frame = pd.concat([spans_of_part(part) for part in parts(trace)])
    return frame.sort_values(["worker", "begin_ns"], ignore_index=True)


@pytest.mark.parametrize("kind", runs.KINDS)
def test_parts_have_the_spans_and_instants_of_the_whole(kind: str) -> None:
    trace = runs.trace(kind)
    cut = in_slices(trace, 15)
    assert len(list(parts(cut))) > 2
    expected = spans(trace).sort_values(["worker", "begin_ns"], ignore_index=True)
    pd.testing.assert_frame_equal(all_spans(cut), expected)
    found = pd.concat([instants(part.trace, part.end_s) for part in parts(cut)])
    assert sorted(found.values.tolist(), key=str) == sorted(instants(trace).values.tolist(), key=str)


@pytest.mark.parametrize(("recorded", "kind"), [(recorder, "asp"), (peer_recorder, "push")])
def test_transfers_that_do_not_fit_are_shortened_in_parts_as_in_the_whole(recorded: ModuleType, kind: str) -> None:
    trace = recorded.record(kind)
    table = "pushes" if trace.job.has_servers else "exchanges"
    rows = trace.tables[table].copy()
    rows["comm_s"] *= 3
    longer = with_rows(trace, table, rows)
    for n_rows in (7, 15):
        expected = spans(longer).sort_values(["worker", "begin_ns"], ignore_index=True)
        pd.testing.assert_frame_equal(all_spans(in_slices(longer, n_rows)), expected)


def test_parts_without_earlier_iterations_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "_last_two", lambda rows: rows[:0])
    trace = runs.trace("bsp")
    assert len(all_spans(in_slices(trace, 15))) != len(spans(trace))


def test_every_row_is_in_one_part_also_out_of_order() -> None:
    trace = runs.trace("asp")
    generator = np.random.default_rng(1)
    tables = {name: generator.permutation(rows) for name, rows in trace.tables.items()}
    found = list(parts(in_slices(Trace(trace.path, trace.attributes, tables), 15)))
    for name in TIMED:
        rows = np.concatenate([part.trace.tables[name] for part in found])
        assert sorted(rows["now_s"]) == sorted(trace.tables[name]["now_s"])
    assert {part.end_s for part in found} == {trace.tables["pushes"]["end_s"].max()}
    pushes = [part.trace.tables["pushes"]["now_s"] for part in found]
    ends_s = [now_s.max() for now_s in pushes if len(now_s)]
    assert ends_s == sorted(ends_s)


def test_a_file_in_parts_is_that_of_the_trace(tmp_path: Path) -> None:
    run = runs.simulated(tmp_path)
    pipit.write(load(run), tmp_path / "whole.csv")
    with opened(run, slice_rows=7) as trace:
        pipit.write(trace, tmp_path / "parts.csv")
    whole, found = (sorted((tmp_path / name).read_text().splitlines()) for name in ("whole.csv", "parts.csv"))
    assert found == whole and len(whole) > 100


@pytest.mark.parametrize("kind", runs.KINDS)
def test_spans_are_those_of_iterations_in_these_seconds(kind: str, tmp_path: Path) -> None:
    whole = runs.trace(kind)
    from_s, to_s = (share * float(whole.tables["updates"]["now_s"].max()) for share in (0.4, 0.6))
    (some,) = parts(whole, from_s, to_s)
    table = "pushes" if whole.job.has_servers else "exchanges"
    ends = [row["now_s"] for row in some.trace.tables[table]]
    assert min(ends) >= from_s and 0 < len(ends) < len(whole.tables[table])
    assert max(some.trace.tables[table]["begin_s"]) <= to_s
    all_bars, bars = spans(whole), spans_of_part(some)
    inside = all_bars[(all_bars["begin_ns"] >= 1e9 * from_s) & (all_bars["end_ns"] <= 1e9 * to_s)]
    missing = inside.merge(bars, on=KEYS, how="left", indicator=True)
    assert len(inside) > 2 and (missing["_merge"] == "both").all()
    pipit.write(whole, tmp_path / "a.csv", from_s, to_s)
    perfetto = pytest.importorskip("hpcsync.export.perfetto", exc_type=ImportError)
    perfetto.write([whole], tmp_path / "a.pftrace", from_s, to_s)
    assert (tmp_path / "a.pftrace").stat().st_size > 0
