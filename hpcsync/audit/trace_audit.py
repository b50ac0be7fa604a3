"""Audit of a trace: check that it shows the paradigm that its job names.

There are two independent methods. A replay through the paradigm's code shows that the engine did what the paradigm
decided. Invariants recounted from the rows alone show that the decisions are right. Runs without servers have no
decisions to replay; peers are drawn again from the seed (`peers`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hpcsync.audit.batches import check_sizes
from hpcsync.audit.bounds import check_bounds
from hpcsync.audit.check import Check
from hpcsync.audit.compression import check_payloads
from hpcsync.audit.description import check_absences, check_clocks, check_job, check_link, check_rows
from hpcsync.audit.gradient_norms import check_norms
from hpcsync.audit.invariants import check_invariants, values_are_possible
from hpcsync.audit.peers import check_exchanges
from hpcsync.audit.replay import replay
from hpcsync.audit.server_recount import Recount
from hpcsync.audit.stragglers import check_stalls
from hpcsync.core.assignments import create_assignments, create_paradigm
from hpcsync.trace import reader
from hpcsync.trace.reader import Trace

__all__ = ["Check", "audit", "main", "render"]


def audit(trace: Trace | str | Path) -> list[Check]:
    """Return all checks of a trace.

    Parameters
    ----------
    trace
        A trace in memory, or the path of a trace file. An unfinished trace is checked as far as it goes.

    Raises
    ------
    TraceError
        If the file is not a trace, or its paradigm is unknown to this version.
    """
    if not isinstance(trace, Trace):
        trace = reader.load(trace)
    described = check_job(trace)
    if not described.passed:
        return [described]  # the other checks would be those of another job
    whole = [described, *check_rows(trace)]
    if trace.altered:
        return whole  # anything may be in the rows
    try:
        whole += [*check_clocks(trace), check_absences(trace)]
        return [*whole, *(_check_served(trace) if trace.job.has_servers else _check_peers(trace))]
    except (ArithmeticError, LookupError, ValueError, AssertionError) as error:
        return [*whole, Check("rows can be followed", False, 0, _missing(trace) or f"{type(error).__name__}: {error}")]


def _missing(trace: Trace) -> str:
    """Return which table has no rows although others need them, or ""."""
    tables = trace.tables
    needing = [name for name in ("evaluations", "updates", "grants", "pushes", "exchanges") if len(tables[name])]
    needed = ("pushes", "grants", "updates") if trace.job.has_servers else ("exchanges", "updates")
    empty = [name for name in needed if not len(tables[name])]
    return f"/{', /'.join(empty)} has no rows, but /{needing[0]} has" if empty and needing else ""


def _check_peers(trace: Trace) -> list[Check]:
    first, *checks = check_exchanges(trace)
    norms = check_norms(trace) if first.passed else []  # else values cannot be used in computations
    link = check_link(trace) if first.passed else []
    return [first, *checks, *norms, *link, *check_stalls(trace)]


def _check_served(trace: Trace) -> list[Check]:
    first = values_are_possible(trace)
    if not first.passed:
        return [first]  # values cannot be used in computations
    recount = Recount(trace)
    replayed = replay(recount, create_paradigm(trace.job), create_assignments(trace.job))
    bounds = [*check_bounds(recount), *check_sizes(recount), *check_payloads(recount), *check_norms(trace)]
    return [*replayed, first, *check_invariants(recount), *bounds, *check_stalls(trace)]


def render(checks: list[Check]) -> RenderableType:
    """Return a table with one line for each check, followed by its detail."""
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    for check in checks:
        verdict = Text("ok", "green") if check.passed else Text("FAILED", "bold red")
        table.add_row(verdict, check.name, f"{check.n_checked:,}")
        if check.detail:
            table.add_row("", Text(check.detail, "dim" if check.passed else "red"), "")
    return table


def main(
    path: str | Path, console: Console | None = None, further: Callable[[Trace], list[Check]] = lambda trace: []
) -> int:
    """Audit one file and print the result. If all checks have passed, the further ones are made.

    Returns
    -------
    int
        0 if all checks passed, 1 if one failed.

    Raises
    ------
    TraceError
        As `audit` does.
    """
    console = console or Console()
    trace = reader.load(path)
    checks = audit(trace)
    if all(check.passed for check in checks):
        checks += further(trace)
    console.print(render(checks))
    failed = sum(not check.passed for check in checks)
    extent = "" if trace.finished else f" (run {trace.status}; checked as far as it goes)"
    verdict = f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed"
    unit, table = ("pushes", "pushes") if trace.job.has_servers else ("iterations", "exchanges")
    n_rows = np.count_nonzero(trace.tables[table]["batch_size"])
    console.print(f"{trace.job.paradigm.name}, {n_rows:,} {unit}{extent}: {verdict}", highlight=False)
    return 1 if failed else 0
