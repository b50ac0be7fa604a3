"""CSV for Pipit: read by Pipit where there is one, and in any case by lines that do what its reader does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from hpcsync.export import pipit as exporting
from hpcsync.export.spans import spans
from hpcsync.export.window import parts
from tests.unit.export import runs


def read(file: Path) -> pd.DataFrame:
    """Read a CSV as `pipit.Trace.from_csv` of version 0.1.0 does."""
    events = pd.read_csv(file, skipinitialspace=True).astype({"Process": "int32"})
    events = events.astype(dict.fromkeys(("Event Type", "Name", "Process"), "category"))
    return events.sort_values("Timestamp (ns)", ignore_index=True)  # an order in which equal times may be exchanged


def matched(events: pd.DataFrame) -> dict[tuple[int, str], int]:
    """Return the nanoseconds of each process and name, of the Leaves that match the Enter before them."""
    open_ns: dict[Any, tuple[str, int]] = {}
    found: dict[tuple[int, str], int] = {}
    for at_ns, kind, name, process in events.itertuples(index=False):
        if kind == "Enter" and process not in open_ns:
            open_ns[process] = (name, at_ns)
        elif kind == "Leave" and open_ns.get(process, ("", 0))[0] == name:
            found[process, name] = found.get((process, name), 0) + at_ns + 1 - open_ns.pop(process)[1]
    return found


def expected(kind: str) -> dict[tuple[int, str], int]:
    trace = runs.trace(kind)
    frame = spans(trace)
    frame = frame.assign(rank=frame["worker"] + trace.job.cluster.servers, lasts_ns=frame["end_ns"] - frame["begin_ns"])
    return {key: int(ns) for key, ns in frame.groupby(["rank", "activity"])["lasts_ns"].sum().items()}


@pytest.mark.parametrize("kind", runs.KINDS)
def test_every_span_is_read_with_its_time(kind: str, tmp_path: Path) -> None:
    exporting.write(runs.trace(kind), tmp_path / "run.csv")
    events = read(tmp_path / "run.csv")
    assert [*events.columns] == [*exporting.COLUMNS]
    assert matched(events) == expected(kind)
    shuffled = events.sample(frac=1, random_state=1).sort_values("Timestamp (ns)", kind="stable")
    assert matched(shuffled) == expected(kind)


def test_spans_that_touched_would_be_found(tmp_path: Path) -> None:
    """In an order that Pipit may choose, Enters would come before the Leaves of the spans before them."""
    frame = exporting.rows(next(parts(runs.trace("bsp"))))
    touching = frame.assign(**{exporting.TIME: frame[exporting.TIME] + (frame[exporting.KIND] == "Leave")})
    order = touching.sort_values([exporting.TIME, exporting.KIND])
    assert matched(order) != expected("bsp")


def test_updates_are_instants_of_server_0() -> None:
    trace = runs.trace("asp")
    frame = exporting.rows(next(parts(trace)))
    updates = frame[frame[exporting.NAME] == "update"]
    assert len(updates) == len(trace.tables["updates"]) > 10
    assert set(updates[exporting.PROCESS]) == {0} and set(updates[exporting.KIND]) == {"Instant"}


def test_pipit_itself(tmp_path: Path) -> None:
    pipit = pytest.importorskip("pipit", reason="only its repository has Pipit; the package on PyPI is empty")
    exporting.write(runs.trace("dssp"), tmp_path / "run.csv")
    trace = pipit.Trace.from_csv(str(tmp_path / "run.csv"))
    trace.calc_inc_metrics()
    events = trace.events[trace.events["Event Type"] == "Enter"]
    seen_ns = (events["time.inc"] + 1).groupby([events["Process"], events["Name"]], observed=True).sum()
    assert {key: int(ns) for key, ns in seen_ns.items()} == expected("dssp")
