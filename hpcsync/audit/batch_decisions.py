"""Whether new batch sizes follow from what they say they were chosen from, whoever chose them.

How sizes follow from what workers expect is asked of the code that plans them.
"""

from __future__ import annotations

import numpy as np

from hpcsync.config.job import Job
from hpcsync.core.batch_sizes import planned
from hpcsync.planning.batch_allocation import Estimate

SAME = 1e-9  # relative difference of numbers that are computed in another order


def possible(rows: np.ndarray, fixed_s: str, sample_s: str) -> np.ndarray:
    """Where what a worker expects can be: seconds, or nothing at all."""
    known = np.isfinite(rows[fixed_s]) & (rows[fixed_s] >= 0) & np.isfinite(rows[sample_s]) & (rows[sample_s] > 0)
    return known | (np.isnan(rows[fixed_s]) & np.isnan(rows[sample_s]))


def not_following(job: Job, rows: np.ndarray, before: np.ndarray, for_a_departure: bool) -> str:
    """What is wrong with an allocation, or nothing.

    rows: of /decisions, one for each worker that takes part from then on. before: their sizes until then.
    for_a_departure: nobody then asks what is gained, and where some have not said what they expect sizes are equal.
    """
    if rows["batch_before"].tolist() != before.tolist():
        return f"sizes were {before.tolist()}, told are {rows['batch_before'].tolist()}"
    estimates = list(map(Estimate, rows["fixed_s"].tolist(), rows["sample_s"].tolist()))
    n_known = int((~np.isnan(rows["sample_s"])).sum())
    if n_known not in (0, len(rows)) or (n_known == 0 and not for_a_departure):
        return f"{n_known} of {len(rows)} workers expect anything"
    if job.batches.policy == "proportional" and (rows["fixed_s"] > 0).any():
        return "there are fixed costs, and sizes are to be proportional to speeds"
    workers = rows["worker"].tolist()
    sizes = planned(job, workers, estimates if n_known else None)
    if rows["chosen"].tolist() != sizes:
        return f"chosen are {rows['chosen'].tolist()}, planned {sizes}"
    if for_a_departure:
        return "" if np.isnan(rows["gain"]).all() else "after a departure nobody asks for a gain"
    now_s, then_s = (max(map(Estimate.seconds, estimates, of)) for of in (before.tolist(), sizes))
    gain = (now_s - then_s) / now_s
    if not (np.abs(rows["gain"] - gain) <= SAME).all() or not gain > job.batches.gain:
        return f"the gain is {gain}, told is {rows['gain'][0]}; more than {job.batches.gain} is needed"
    return ""
