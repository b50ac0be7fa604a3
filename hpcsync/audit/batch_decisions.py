"""Check that new batch sizes follow from their recorded inputs, with or without servers.

How sizes follow from predicted times is asked of the code that plans them (`core.batch_sizes`).
"""

from __future__ import annotations

import numpy as np

from hpcsync.audit.check import SAME
from hpcsync.config.job import Job
from hpcsync.core.batch_sizes import planned
from hpcsync.planning.batch_allocation import Estimate
from hpcsync.trace.schema import Rows


def possible(rows: Rows, fixed_s: str, sample_s: str) -> Rows:
    """Return where a worker's predicted times are valid, bool of shape (n_rows,).

    Both are seconds, or both are NaN.
    """
    known = np.isfinite(rows[fixed_s]) & (rows[fixed_s] >= 0) & np.isfinite(rows[sample_s]) & (rows[sample_s] > 0)
    return known | (np.isnan(rows[fixed_s]) & np.isnan(rows[sample_s]))


def not_following(job: Job, rows: Rows, before: Rows, for_a_departure: bool) -> str:
    """Return why an allocation does not follow from its inputs, or "".

    Parameters
    ----------
    rows
        Rows of /decisions, one for each worker that is active afterwards.
    before
        Sizes of these workers before the allocation, in samples.
    for_a_departure
        True if a departure caused the allocation. No gain is then required, and sizes are equal if some workers have
        no prediction.
    """
    if rows["batch_before"].tolist() != before.tolist():
        return f"sizes were {before.tolist()}, recorded are {rows['batch_before'].tolist()}"
    estimates = list(map(Estimate, rows["fixed_s"].tolist(), rows["sample_s"].tolist()))
    n_known = int((~np.isnan(rows["sample_s"])).sum())
    if n_known not in (0, len(rows)) or (n_known == 0 and not for_a_departure):
        return f"{n_known} of {len(rows)} workers have a prediction"
    if job.batches.policy == "proportional" and (rows["fixed_s"] > 0).any():
        return "there are fixed costs, but sizes must be proportional to speeds"
    workers = rows["worker"].tolist()
    sizes = planned(job, workers, estimates if n_known else None)
    if rows["chosen"].tolist() != sizes:
        return f"chosen sizes are {rows['chosen'].tolist()}, planned {sizes}"
    if for_a_departure:
        return "" if np.isnan(rows["gain"]).all() else "an allocation after a departure has no gain"
    now_s, then_s = (max(map(Estimate.seconds, estimates, of)) for of in (before.tolist(), sizes))
    gain = (now_s - then_s) / now_s
    if not (np.abs(rows["gain"] - gain) <= SAME).all() or not gain > job.batches.gain:
        return f"the gain is {gain}, recorded is {rows['gain'][0]}; it must exceed {job.batches.gain}"
    return ""
