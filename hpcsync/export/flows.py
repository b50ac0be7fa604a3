"""Instants of a run with what a trace says of them, and the flows that connect pushes, updates and grants."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from hpcsync.export.spans import NS, SERVERS
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import ELAPSED, EVALUATED, EVENTS, Change, Outcome, Phase, Release

GRANTS = ("grant", "end")  # names of the marks of grants: to continue, and to end


class Mark(NamedTuple):
    """Instant on the track of a worker, or of the deciding server.

    Attributes
    ----------
    worker
        The worker; `SERVERS` for the deciding server.
    at_ns
        Time, in nanoseconds.
    name
        What happened.
    key
        What identifies it among the marks: ("update", version), or ("event", seq); ("", 0) if nothing refers to it.
    about
        Further values by name.
    """

    worker: int
    at_ns: int
    name: str
    key: tuple[str, int]
    about: dict[str, float | int]


class Flow(NamedTuple):
    """Arrow from a span or mark to a mark. Positions count the spans of the run first, then its marks."""

    source: int
    target: int


def marks(trace: Trace) -> list[Mark]:
    """Return the instants of a run: updates, grants, changes of membership, stalls and decisions."""
    found = [*_grants(trace), *_events(trace)]
    if trace.job.has_servers:
        for row in _rows(trace, "updates"):
            about = {name: row[name] for name in ("version", "n_contributions", "lr", "samples")}
            found.append(Mark(SERVERS, _ns(row), "update", ("update", row["version"]), about))
    return found


def _grants(trace: Trace) -> Iterator[Mark]:
    for row in _rows(trace, "grants"):
        names = ("iteration", "version", "gap_iters", "held_s", "batch_size", "local_steps", "released_by")
        name = GRANTS[row["local_steps"] == 0]
        yield Mark(row["worker"], _ns(row), name, ("event", row["seq"]), {name: row[name] for name in names})


_EVENTS = {ELAPSED: "time elapsed", EVALUATED: "evaluated"}


def _events(trace: Trace) -> Iterator[Mark]:
    for row in _rows(trace, "membership"):
        yield Mark(row["worker"], _ns(row), Change(row["change"]).name.lower(), ("event", row["seq"]), {})
    for row in _rows(trace, "stalls"):
        about = {name: row[name] for name in ("iteration", "lasted_s", "deadline_s", "n_waiting")}
        yield Mark(row["worker"], _ns(row), f"stall, {Phase(row['phase']).name.lower()}", ("", 0), about)
    for row in _rows(trace, "decisions"):
        controller = row.pop("controller").decode()
        of_all = trace.job.has_servers and controller in ("switch", *EVENTS)
        about = {name: value for name, value in row.items() if name not in ("seq", "now_s")}
        name = _EVENTS.get(controller, f"decision, {controller}")
        yield Mark(SERVERS if of_all else row["worker"], _ns(row), name, ("event", row["seq"]), about)


def flows(trace: Trace, bars: pd.DataFrame, instants: list[Mark]) -> Iterator[Flow]:
    """Yield the flows of a run with servers: from pushes to updates, and from pushes and other events to grants.

    A flow leaves the last span of a push that begins before the server handles it: its transfer, or its computation
    where no time of a transfer is recorded.

    Parameters
    ----------
    bars
        Spans of the run.
    instants
        Its marks.
    """
    by_key = {mark.key: position for position, mark in enumerate(instants, start=len(bars))}
    sources = {seq: position for (kind, seq), position in by_key.items() if kind == "event"}
    pushing = bars[bars["activity"].isin(["compute", "transfer"])][["worker", "iteration", "begin_ns"]]
    of_push: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for position, worker, iteration, begin_ns in pushing.itertuples(name=None):
        of_push[worker, iteration].append((begin_ns, position))
    for push in _rows(trace, "pushes"):
        found = [position for begin_ns, position in of_push[push["worker"], push["iteration"]] if begin_ns < _ns(push)]
        if not found:
            continue
        sources[push["seq"]] = found[-1]
        update = by_key.get(("update", push["version_read"] + push["staleness"] + 1))
        if push["outcome"] == Outcome.APPLIED and update is not None:
            yield Flow(found[-1], update)
    for seq, released_by in _released(trace):
        if released_by in sources:
            yield Flow(sources[released_by], by_key["event", seq])


def _released(trace: Trace) -> Iterator[tuple[int, int]]:
    """Yield the seq of each grant that an event released, and the seq of the event."""
    own: dict[int, int] = {}  # latest push or change of each worker
    rows = [
        *((seq, worker, None) for table in ("pushes", "membership") for seq, worker in _pairs(trace, table)),
        *trace.tables["grants"][["seq", "worker", "released_by"]].tolist(),
    ]
    for seq, worker, released_by in sorted(rows):
        if released_by is None:
            own[worker] = seq
        elif released_by > 0:
            yield seq, released_by
        elif released_by == Release.OWN and worker in own:
            yield seq, own[worker]


def _pairs(trace: Trace, table: str) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = trace.tables[table][["seq", "worker"]].tolist()
    return pairs


def counters(trace: Trace) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Yield the counters of a run: name, unit, times in nanoseconds, and values, both of shape (n_values,)."""
    updates, evaluations = trace.tables["updates"], trace.tables["evaluations"]
    reports = trace.tables["pushes" if trace.job.has_servers else "exchanges"]
    reports = reports[np.argsort(reports["now_s"], kind="stable")]
    applied = reports[reports["outcome"] == Outcome.APPLIED] if trace.job.has_servers else reports[:0]
    yield "version", "updates", updates["now_s"], updates["version"]
    if len(applied):
        yield "staleness", "updates", applied["now_s"], applied["staleness"]
    yield "bytes", "B", reports["now_s"], np.cumsum(reports["wire_bytes"])
    for name in ("loss", "accuracy", "consensus_distance"):
        known = evaluations[~np.isnan(evaluations[name])]
        if len(known):
            yield name.replace("_", " "), "", known["now_s"], known[name]


def _rows(trace: Trace, table: str) -> Iterator[dict[str, Any]]:
    rows = trace.tables[table]
    names = rows.dtype.names or ()
    for values in rows.tolist():
        row = dict(zip(names, values, strict=True))
        yield {name: value for name, value in row.items() if not (isinstance(value, float) and math.isnan(value))}


def _ns(row: dict[str, Any]) -> int:
    return max(0, round(row["now_s"] * NS))
