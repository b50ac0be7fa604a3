"""Batch sizes of a job's workers, planned from what the workers predict of their next iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hpcsync.config.job import Job
from hpcsync.planning.batch_allocation import Estimate, equal_finish, whole


def sizes_at_first(job: Job) -> np.ndarray:
    """As equal as can be, shape (n_workers,)."""
    return np.array(planned(job, range(job.cluster.workers)))


def planned(job: Job, workers: Sequence[int], estimates: Sequence[Estimate] | None = None) -> list[int]:
    """The sizes of these workers that expect this; as equal as can be without."""
    assert job.batch_total is not None
    minima, largest = [job.batches.minimum] * len(workers), [maxima(job)[worker] for worker in workers]
    estimates = [Estimate(0.0, 1.0)] * len(workers) if estimates is None else estimates
    return whole(equal_finish(estimates, job.batch_total, minima, largest), job.batch_total, minima, largest)


def maxima(job: Job) -> Sequence[float]:
    """Of each worker."""
    return job.batches.maxima(job.cluster.workers) or [math.inf] * job.cluster.workers
