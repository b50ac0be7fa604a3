"""What decides in a run of a job, made anew: for the run itself, for a simulation of it, for the audit of its trace."""

from __future__ import annotations

import math

from hpcsync import paradigms
from hpcsync.job import Job
from hpcsync.job_paradigms import Served
from hpcsync.paradigms import Paradigm
from hpcsync.planning.batches import Allocator


def create_paradigm(job: Job) -> Paradigm:
    """The paradigm of a job with servers."""
    assert isinstance(job.paradigm, Served)
    return paradigms.create(job.paradigm.name, job.cluster.workers, **job.paradigm.options)


def create_allocator(job: Job) -> Allocator | None:
    """Who computes how many samples, and which; None where all batches are alike."""
    if job.batches.policy == "equal":
        return None
    assert job.batch_total is not None
    n_workers, settings = job.cluster.workers, job.batches
    return Allocator(
        n_workers,
        job.batch_total,
        minimum=settings.minimum,
        maxima=settings.maxima(n_workers) or [math.inf] * n_workers,
        interval=settings.interval,
        gain_min=settings.gain,
        local_steps=job.local_steps,
    )


def first_work(job: Job) -> list[tuple[int, int]] | None:
    """(first_sample, n_samples) of each worker's first push, as a grant would say; None where batches are alike."""
    allocator = create_allocator(job)
    return None if allocator is None else [allocator.first(worker) for worker in range(job.cluster.workers)]


def decision_fields(job: Job) -> tuple[str, ...]:
    """The columns of the trace's /decisions beside those that all have: the paradigm's, then the allocator's.

    Without servers `iteration` comes before these: the one after which all workers agreed on the sizes.
    """
    own = create_paradigm(job).decision_fields if job.has_servers else ("iteration",)
    if job.batches.policy == "equal":
        return own if job.has_servers else ()
    return own + Allocator.decision_fields
