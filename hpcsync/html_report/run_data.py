"""What a report says of one run, read from its trace in slices and small enough to hold for many runs at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcsync.audit.check import Check
from hpcsync.config.job import Job
from hpcsync.report import between
from hpcsync.report.explanation import explain
from hpcsync.report.summary import Summary
from hpcsync.trace.reader import Trace, TraceFile, load, opened
from hpcsync.trace.schema import Outcome, Rows

PARTS = (*between.PARTS, "between")  # the last one is no column of the trace
AUDITED_ROWS = 1_000_000  # of all runs of a report: half a minute
AUDITED_ROWS_OF_A_RUN = 250_000  # 500 MB
EVALUATIONS = 500  # rows kept of a run, evenly spaced
DECISIONS = 400  # rows kept of each controller, evenly spaced
OF_WORKERS = ("batches", "local-steps", "ratio", "share")  # controllers whose choice holds until the worker's next one
DECIDED_WORKERS = 6  # workers whose rows are kept of these, if there are more rows
STALLS = 40  # rows kept
MATRIX = 1000  # largest number of workers whose matrix of waiting times is kept


class Decisions(NamedTuple):
    """Decisions of one controller.

    Attributes
    ----------
    n, n_workers
        Number of all decisions, and of the workers that they are for.
    rows
        Some of them, evenly spaced, with the columns now_s, worker and chosen.
    """

    n: int
    n_workers: int
    rows: Rows


class RunData(NamedTuple):
    """One run.

    Attributes
    ----------
    parts_s
        Seconds of each part of the workers' time, shape (n_workers, 5), in the order of `PARTS`.
    staleness, leads
        Number of applied pushes by staleness, and of starts of an iteration by lead; empty without servers.
    slowness
        Mean time of a local step in medians of all workers that train the same layers, shape (n_workers,); NaN without
        one.
    waits_s
        Seconds for which each worker (row) waited for each other, shape (n_workers, n_workers); None with more than
        `MATRIX` workers.
    hosts
        Host of each worker; "" where it is not known.
    stalls, n_stalls
        The first reports of stalls, and the number of all.
    checks
        Result of the audit; None if it was not made.
    """

    path: Path
    job: Job
    attributes: dict[str, Any]
    summary: Summary
    parts_s: Rows
    staleness: Rows
    leads: Rows
    slowness: Rows
    waits_s: Rows | None
    hosts: tuple[str, ...]
    evaluations: Rows
    decisions: dict[str, Decisions]
    membership: Rows
    stalls: Rows
    n_stalls: int
    checks: tuple[Check, ...] | None


def read_all(runs: Iterable[tuple[Path, Summary]], *, audited: bool | None = None) -> Iterator[RunData]:
    """Read runs in turn, and audit all or none of them.

    By default those are audited that have at most `AUDITED_ROWS_OF_A_RUN` rows, and no more than are left of
    `AUDITED_ROWS`.

    Raises
    ------
    TraceError
        If a trace cannot be read.
    """
    left = AUDITED_ROWS
    for path, summary in runs:
        n_rows = summary.pushes or summary.iterations
        is_audited = n_rows <= min(left, AUDITED_ROWS_OF_A_RUN) if audited is None else audited
        yield read(path, summary, audited=is_audited)
        left -= n_rows if is_audited else 0


def read(path: Path, summary: Summary, *, audited: bool = True) -> RunData:
    """Read a run, and audit it if wanted. Raises TraceError if its trace cannot be read or has been altered."""
    from hpcsync.audit.trace_audit import audit

    with opened(path) as file:
        file.verify()
        trace: Trace | TraceFile = load(path) if audited else file
        stalls, found = _rows(trace, "stalls"), explain(trace)
        return RunData(
            path=path,
            job=trace.job,
            attributes=trace.attributes,
            summary=summary,
            parts_s=np.column_stack([found.parts_s, found.between_s]),
            staleness=_counts(trace, "pushes", "staleness"),
            leads=_counts(trace, "grants", "gap_iters"),
            slowness=found.slowness,
            waits_s=found.waits.between_s.toarray() if trace.n_workers <= MATRIX else None,
            hosts=found.hosts,
            evaluations=evenly(_rows(trace, "evaluations"), EVALUATIONS),
            decisions=_decisions(trace),
            membership=_rows(trace, "membership"),
            stalls=stalls[:STALLS],
            n_stalls=len(stalls),
            checks=tuple(audit(trace)) if isinstance(trace, Trace) else None,
        )


def evenly(rows: Any, most: int) -> Any:
    """Return at most `most` evenly spaced items of a sequence or rows of an array, with the first and the last."""
    if len(rows) <= most:
        return rows
    chosen = np.linspace(0, len(rows) - 1, most).round().astype(int)
    return rows[chosen] if isinstance(rows, np.ndarray) else [rows[i] for i in chosen]


def _rows(trace: Trace | TraceFile, table: str) -> Rows:
    return np.concatenate(list(trace.slices(table)))


def _counts(trace: Trace | TraceFile, table: str, column: str) -> Rows:
    counts = np.zeros(0, np.int64)
    for rows in trace.slices(table):
        counted = rows["outcome"] == Outcome.APPLIED if table == "pushes" else rows["local_steps"] != 0
        counts = add(counts, np.bincount(np.maximum(rows[column][counted], 0)))
    return counts


def add(counts: Rows, more: Rows) -> Rows:
    """Return the sum of two arrays of counts, the shorter one filled with zeros."""
    total = np.zeros(max(len(counts), len(more)), np.int64)
    total[: len(counts)] += counts
    total[: len(more)] += more
    return total


def _decisions(trace: Trace | TraceFile) -> dict[str, Decisions]:
    kept: dict[str, list[Rows]] = {}
    for rows in trace.slices("decisions"):
        for name in np.unique(rows["controller"]):
            own = rows[rows["controller"] == name][["now_s", "worker", "chosen"]]
            kept.setdefault(name.decode(errors="replace"), []).append(own.copy())
    found = {name: np.concatenate(each) for name, each in kept.items()}
    return {
        name: Decisions(len(rows), len(np.unique(rows["worker"])), _thinned(rows, of_workers=name in OF_WORKERS))
        for name, rows in found.items()
    }


def _thinned(rows: Rows, *, of_workers: bool) -> Rows:
    """Return at most `DECISIONS` rows; of those of workers as many of each: every n-th might be of the same one."""
    if len(rows) <= DECISIONS or not of_workers:
        return evenly(rows, DECISIONS)
    shown = evenly(np.unique(rows["worker"]), DECIDED_WORKERS)
    kept = np.concatenate([evenly(rows[rows["worker"] == worker], DECISIONS // len(shown)) for worker in shown])
    return kept[np.argsort(kept["now_s"], kind="stable")]


def runs_with(runs: Sequence[RunData], attribute: str) -> list[str]:
    """Return the different values of an attribute of the traces, in order; "unknown" where it is missing."""
    return list(dict.fromkeys(str(run.attributes.get(attribute) or "unknown") for run in runs))
