"""Instants of a run with what a trace says of them, and the flows that connect pushes, updates and grants."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from hpcsync.export.spans import NS, SERVERS
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import ELAPSED, EVALUATED, EVENTS, Change, Outcome, Phase, Release, Rows

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
        of_all = controller in ("switch", *EVENTS)
        about = {name: value for name, value in row.items() if name not in ("seq", "now_s")}
        name = _EVENTS.get(controller, f"decision, {controller}")
        yield Mark(SERVERS if of_all else row["worker"], _ns(row), name, ("event", row["seq"]), about)


class Flows:
    """Flows of a run with servers: from pushes to updates, and from pushes and other events to grants.

    The `seq` of a push, and of a grant, tells the flow that leads to its update, and that leads to it.

    Attributes
    ----------
    leaving
        Flows that leave the spans of an iteration, ("push", worker, iteration), or a mark, by its key.
    arriving
        Flows that reach a mark, by its key.
    handled_ns
        When the server handled the push of an iteration, in nanoseconds.
    """

    def __init__(self) -> None:
        self.leaving: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        self.arriving: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.handled_ns: dict[tuple[Any, ...], int] = {}
        self._own: dict[int, tuple[Any, ...]] = {}  # key of the latest push or change of each worker

    def add(self, trace: Trace) -> None:
        """Add the flows of a part of the run; a grant has the time of the event that released it."""
        keys: dict[int, tuple[Any, ...]] = {}
        tables = ("pushes", "membership", "decisions", "grants")
        rows = [(row["seq"], table, row) for table in tables for row in _rows(trace, table)]
        for seq, table, row in sorted(rows, key=lambda each: each[0]):
            if table == "grants":
                self._release(seq, row["worker"], row["released_by"], keys)
                continue
            keys[seq] = ("push", row["worker"], row["iteration"]) if table == "pushes" else ("event", seq)
            if table != "decisions":
                self._own[row["worker"]] = keys[seq]
            if table == "pushes":
                self.handled_ns[keys[seq]] = _ns(row)
                if row["outcome"] == Outcome.APPLIED:
                    self.leaving[keys[seq]].append(seq)
                    self.arriving["update", row["version_read"] + row["staleness"] + 1].append(seq)

    def _release(self, seq: int, worker: int, released_by: int, keys: Mapping[int, tuple[Any, ...]]) -> None:
        key = self._own.get(worker) if released_by == Release.OWN else keys.get(released_by)
        if key is not None:  # else no event released it, or the trace does not know which
            self.leaving[key].append(seq)
            self.arriving["event", seq].append(seq)

    def of_spans(self, bars: pd.DataFrame) -> dict[int, list[int]]:
        """Return the flows that leave the spans of complete iterations, by position.

        A flow leaves the last span of a push that begins before the server handles it: its transfer, or its computation
        where no time of a transfer is recorded.
        """
        last: dict[tuple[Any, ...], int] = {}
        pushing = bars[bars["activity"].isin(["compute", "transfer"])][["worker", "iteration", "begin_ns"]]
        for position, worker, iteration, begin_ns in pushing.itertuples(name=None):
            key = ("push", worker, iteration)
            if begin_ns < self.handled_ns.get(key, 0):
                last[key] = position
        for key in last:
            del self.handled_ns[key]
        return {position: self.leaving.pop(key, []) for key, position in last.items()}


def counters(trace: Trace, n_bytes: int) -> Iterator[tuple[str, str, Rows, Rows]]:
    """Yield the counters of a run: name, unit, times in seconds, and values, both of shape (n_values,).

    `n_bytes` were transferred before, if the trace is a part of the run.
    """
    updates, evaluations = trace.tables["updates"], trace.tables["evaluations"]
    reports = trace.tables["pushes" if trace.job.has_servers else "exchanges"]
    reports = reports[np.argsort(reports["now_s"], kind="stable")]
    applied = reports[reports["outcome"] == Outcome.APPLIED] if trace.job.has_servers else reports[:0]
    yield "version", "updates", updates["now_s"], updates["version"]
    if len(applied):
        yield "staleness", "updates", applied["now_s"], applied["staleness"]
    yield "bytes", "B", reports["now_s"], n_bytes + np.cumsum(reports["wire_bytes"])
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
