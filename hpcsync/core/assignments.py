"""Deciding objects of a run, created anew for the run itself, for its simulation and for the audit of its trace."""

from __future__ import annotations

from collections.abc import Iterable

from hpcsync import paradigms
from hpcsync.config.job import Job, Script
from hpcsync.core.batch_sizes import maxima
from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.records import OF_THE_JOB, Grant
from hpcsync.planning.batch_allocation import Allocator
from hpcsync.state import Stateful


class Assignments(Stateful):
    """What a paradigm's grants leave open: the size of each batch, its samples and the local steps.

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
        Grant of every worker's first iteration.
    allocator
        The allocator, or None.
    """

    state_types = {"allocator": Allocator | None, "_next_sample": int, "_last_step_samples": dict[int, int]}

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
        self.first = [self.next(grant, 0) for grant in first]

    def pushed(self, worker: int, batch_size: int, local_steps: int) -> None:
        """Record the samples and local steps of this worker's push."""
        self._last_step_samples[worker] = batch_size // local_steps

    def next(self, grant: Grant, version: int) -> Grant:
        """Return this grant with the version of the weights, its samples and local steps."""
        worker, iteration, _, gap_iters, credits, held_s, _, _, local_steps, commit_s, ratio = grant
        if local_steps == OF_THE_JOB:
            local_steps = self._local_steps
        if self.allocator is not None:
            first_sample, n_samples = self.allocator.allocate_next(worker)
        else:
            first_sample = -1
            n_samples = self._last_step_samples.get(worker, self._step_samples or 0) * max(1, local_steps)
            if self._step_samples is not None:
                first_sample = self._next_sample
                self._next_sample += n_samples
        samples = first_sample, n_samples, local_steps
        return Grant(worker, iteration, version, gap_iters, credits, held_s, *samples, commit_s, ratio)


def create_paradigm(job: Job) -> Paradigm:
    """Create the paradigm of a job with servers."""
    return paradigms.create(job.paradigm.name, job.cluster.workers, **job.paradigm_options)


def create_allocator(job: Job) -> Allocator | None:
    """Create the allocator of a job's batch sizes; None if they are all equal."""
    if job.batches.policy == "equal":
        return None
    assert job.batch_total is not None
    settings = job.batches
    return Allocator(
        job.cluster.workers,
        job.batch_total,
        minimum=settings.minimum,
        maxima=maxima(job),
        interval=settings.interval,
        gain_min=settings.gain,
        local_steps=job.local_steps,
    )


def create_assignments(job: Job) -> Assignments:
    """Create the assignments of a job, including those of the first iterations."""
    paradigm, step_samples = create_paradigm(job), None
    if job.paradigm.shares_samples and not isinstance(job.workload, Script):
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
