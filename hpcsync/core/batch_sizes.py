"""Batch sizes of a job's workers, from the estimates of their next iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hpcsync.config.job import Job
from hpcsync.planning.batch_allocation import Estimate, equal_finish, whole


def sizes_at_first(job: Job) -> np.ndarray:
    """Return the initial batch sizes, as equal as possible: shape (n_workers,)."""
    return np.array(planned(job, range(job.cluster.workers)))


def planned(job: Job, workers: Sequence[int], estimates: Sequence[Estimate] | None = None) -> list[int]:
    """Return the batch sizes of some workers.

    Parameters
    ----------
    job
        Job with a total of samples and limits.
    workers
        Workers that share the total.
    estimates
        Expected times of their iterations; None: sizes are as equal as possible.
    """
    assert job.batch_total is not None
    minima, largest = [job.batches.minimum] * len(workers), [maxima(job)[worker] for worker in workers]
    estimates = [Estimate(0.0, 1.0)] * len(workers) if estimates is None else estimates
    return whole(equal_finish(estimates, job.batch_total, minima, largest), job.batch_total, minima, largest)


def maxima(job: Job) -> Sequence[float]:
    """Return the largest batch size of each worker, math.inf for none."""
    return job.batches.maxima(job.cluster.workers) or [math.inf] * job.cluster.workers
