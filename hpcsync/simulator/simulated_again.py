"""A second simulation of a recorded simulation: every row of its trace follows from its job."""

from __future__ import annotations

import numpy as np
import torch

from hpcsync.audit.check import Check
from hpcsync.core.assignments import decision_fields
from hpcsync.core.job_validation import check
from hpcsync.core.stanza_resolution import resolved
from hpcsync.run_dir import layout
from hpcsync.simulator.recompute import KeptRows, compared_weights, differing, recorded_job
from hpcsync.simulator.simulate import prepare
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import ADDED, TABLES, Rows, decisions_dtype

ROWS = "simulated again, all rows are the recorded ones"
COMPARED = ("pushes", "grants", "updates", "decisions", "exchanges", "membership", "evaluations", "starts")


def is_simulation(trace: Trace) -> bool:
    """Return True for the trace of a simulation that came to its end."""
    return trace.finished and trace.attributes.get("engine") == "simulator"


def simulated_again(trace: Trace) -> list[Check]:
    """Simulate the job of a trace again, and compare all rows, and the final weights if they lie beside the trace.

    Parameters
    ----------
    trace
        Trace of a simulation that has finished.

    Returns
    -------
    list of Check
        Integers must be equal, other numbers up to a relative difference of `recompute.SAME`: another processor may
        round sums differently. The detail says whether all bits are equal.

    Raises
    ------
    JobError
        If the job cannot be simulated here.
    """
    torch.set_num_threads(1)
    given = recorded_job(trace)
    workload = check(given)
    job, rows = resolved(given, workload), KeptRows()
    prepare(job, workload)(rows).run()
    dtypes = {**TABLES, "decisions": decisions_dtype(decision_fields(job))}
    n_rows, n_differ, wrong = 0, 0, ""
    for table in COMPARED:
        recorded, again = trace.tables[table], np.array(rows.of[table], dtypes[table])
        if table == "pushes":
            again = again[np.argsort(again["seq"], kind="stable")]
        n_rows += len(recorded)
        kept = [name for name in again.dtype.names or () if ADDED.get(name, 0) <= trace.attributes["format_version"]]
        n, found = _differences(table, recorded[kept], again[kept])
        n_differ, wrong = n_differ + n, wrong or found
    detail = wrong or (f"{n_differ:,} values differ by rounding" if n_differ else "bit by bit")
    checks = [Check(ROWS, not wrong, n_rows, detail)]
    weights = trace.path.parent / layout.WEIGHTS
    return [*checks, compared_weights(workload, weights)] if workload.loss and weights.is_file() else checks


def _differences(table: str, recorded: Rows, again: Rows) -> tuple[int, str]:
    """Return how many values differ by rounding, and the first one that differs by more, in words."""
    if len(recorded) != len(again):
        return 0, f"/{table} has {len(recorded):,} rows, simulated again {len(again):,}"
    n_differ = 0
    for name in again.dtype.names or ():
        differ, far = differing(recorded[name], again[name])
        if far.any():
            row = int(far.argmax())
            return 0, f"/{table} row {row}: {name} is {recorded[name][row]}, simulated again {again[name][row]}"
        n_differ += int(differ.sum())
    return n_differ, ""
