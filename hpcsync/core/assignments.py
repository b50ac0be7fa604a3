"""Deciding objects of a run, created anew for the run itself, for its simulation and for the audit of its trace."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from hpcsync import paradigms
from hpcsync.config.job import Job, Script
from hpcsync.config.paradigms import AshlOptions, ServedOptions
from hpcsync.paradigms import Grant, Paradigm
from hpcsync.paradigms.events import UNTIL
from hpcsync.planning.batch_allocation import Allocator


class Assignment(NamedTuple):
    """Work of one worker until its next push; the trace's /grants has these columns.

    Attributes
    ----------
    first_sample
        Position in the run's sequence of samples; -1 where it follows from worker and iteration.
    batch_size
        Samples of all local steps together; 0 if the worker knows it, or is to stop. With local steps UNTIL, samples of
        one.
    local_steps, commit_s, ratio
        As in `hpcsync.paradigms.events.Grant`, but 0 local steps stop the worker.
    """

    first_sample: int = -1
    batch_size: int = 0
    local_steps: int = 1
    commit_s: float = math.inf
    ratio: float = math.nan

    @property
    def size(self) -> float:
        """Work units of the same worker; the time of the assignment is proportional to them."""
        return self.commit_s if self.local_steps == UNTIL else float(self.batch_size or self.local_steps)

    @property
    def of_a_step(self) -> int:
        """Samples of each local step."""
        return self.batch_size // max(1, self.local_steps)

    def is_done(self, n_steps: int, since_read_s: float) -> bool:
        """Return True if the local step that has just ended is the last before a push.

        Parameters
        ----------
        n_steps
            Local steps made for this assignment.
        since_read_s
            Seconds since the weights were read.
        """
        return since_read_s >= self.commit_s if self.local_steps == UNTIL else n_steps == self.local_steps


STOP = Assignment(local_steps=0)


class Assignments:
    """Factory of assignments from a paradigm's grants: the size of each batch and its samples.

    Parameters
    ----------
    first
        Grants of the first iteration, one per worker.
    local_steps
        Local steps where the paradigm does not set them.
    allocator
        Allocator of batch sizes. None: every worker keeps its size, also after it joins again.
    step_samples
        Samples of a local step if each grant takes the next samples of the run's sequence, so that a worker's share
        follows from its steps. None if the samples follow from worker and iteration.

    Attributes
    ----------
    first
        Assignment of every worker's first iteration.
    allocator
        The allocator, or None.
    """

    def __init__(
        self,
        first: Iterable[Grant] = (),
        local_steps: int = 1,
        allocator: Allocator | None = None,
        step_samples: int | None = None,
    ) -> None:
        self.allocator = allocator
        self._local_steps = local_steps
        self._step_samples = step_samples
        self._next_sample = 0
        self._last_step_samples: dict[int, int] = {}  # samples of each worker's last local step
        self.first = [self._first(grant) for grant in first]

    def pushed(self, worker: int, batch_size: int, local_steps: int) -> None:
        """Record the samples and local steps of this worker's push."""
        self._last_step_samples[worker] = batch_size // local_steps

    def next(self, grant: Grant) -> Assignment:
        """Return the assignment of the iteration that this grant starts."""
        if self.allocator is not None:
            return Assignment(*self.allocator.allocate_next(grant.worker), self._local_steps)
        return self._assignment(grant)

    def _first(self, grant: Grant) -> Assignment:
        if self.allocator is not None:
            return Assignment(*self.allocator.first(grant.worker), self._local_steps)
        return self._assignment(grant)

    def _assignment(self, grant: Grant) -> Assignment:
        local_steps, first_sample = grant.local_steps or self._local_steps, -1
        n_samples = self._last_step_samples.get(grant.worker, self._step_samples or 0) * max(1, local_steps)
        if self._step_samples is not None:
            first_sample = self._next_sample
            self._next_sample += n_samples
        return Assignment(first_sample, n_samples, local_steps, grant.commit_s, grant.ratio)


def create_paradigm(job: Job) -> Paradigm:
    """Create the paradigm of a job with servers."""
    assert isinstance(job.paradigm, ServedOptions)
    return paradigms.create(job.paradigm.name, job.cluster.workers, **job.paradigm_options)


def create_allocator(job: Job) -> Allocator | None:
    """Create the allocator of a job's batch sizes; None if they are all equal."""
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


def create_assignments(job: Job) -> Assignments:
    """Create the assignments of a job, including those of the first iterations."""
    paradigm, step_samples = create_paradigm(job), None
    if isinstance(job.paradigm, AshlOptions) and not isinstance(job.workload, Script):
        step_samples = job.workload.batch_size
    first = map(paradigm.first, range(job.cluster.workers))
    return Assignments(first, job.local_steps, create_allocator(job), step_samples)


ITERATION = {"iteration": ("", "Iteration after which the workers agreed on the batch sizes.")}


def decision_fields(job: Job) -> dict[str, tuple[str, str]]:
    """Return the inputs of the job's controllers, (unit, description) by name: further columns of /decisions.

    The paradigm's come first, then the allocator's. Without servers `iteration` precedes the latter.
    """
    own = create_paradigm(job).decision_fields if job.has_servers else ITERATION
    if job.batches.policy == "equal":
        return dict(own) if job.has_servers else {}
    return {**own, **Allocator.decision_fields}
