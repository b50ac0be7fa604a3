"""What decides in a run of a job, made anew: for the run itself, for a simulation of it, for the audit of its trace."""

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
    """What a worker is given to do until its next push; columns of the trace's /grants say the same.

    first_sample: of the run's sequence of samples, -1 where it follows from worker and iteration which it takes.
    batch_size:   of all local steps together; 0 where the worker knows, or is to stop.
    local_steps, commit_s, ratio: as a paradigm grants them (`paradigms.protocol.Grant`); 0 local steps: it is to stop.
    With local steps UNTIL it is time, batch_size is that of one.
    """

    first_sample: int = -1
    batch_size: int = 0
    local_steps: int = 1
    commit_s: float = math.inf
    ratio: float = math.nan

    @property
    def size(self) -> float:
        """To which the time that it takes is in proportion; comparable with that of the same worker's other ones."""
        return self.commit_s if self.local_steps == UNTIL else float(self.batch_size or self.local_steps)

    @property
    def of_a_step(self) -> int:
        """Samples of each local step."""
        return self.batch_size // max(1, self.local_steps)

    def is_done(self, n_steps: int, since_read_s: float) -> bool:
        """Whether the local step that has just ended is the last before a push: the worker has made so many, and its
        weights were read so long ago."""
        return since_read_s >= self.commit_s if self.local_steps == UNTIL else n_steps == self.local_steps


STOP = Assignment(local_steps=0)


class Assignments:
    """Makes assignments of a paradigm's grants: who computes how many samples next, and which.

    first: of every worker's first iteration, in the order of the workers, from the grants given.
    local_steps: where the paradigm does not say it. allocator: of batch sizes; None where everybody goes on with what
    it has, also who joins again. dealt: samples of a local step, where the next ones of the run's sequence go to
    whoever is granted, so that everybody gets its share by making its steps; None where they do not.
    """

    def __init__(
        self,
        first: Iterable[Grant] = (),
        local_steps: int = 1,
        allocator: Allocator | None = None,
        dealt: int | None = None,
    ) -> None:
        self.allocator = allocator
        self._local_steps = local_steps
        self._dealt = dealt
        self._n_dealt = 0
        self._of_a_step: dict[int, int] = {}  # samples of the last one that each worker made
        self.first = [self._first(grant) for grant in first]

    def pushed(self, worker: int, batch_size: int, local_steps: int) -> None:
        """This worker's push is of so many samples and local steps."""
        self._of_a_step[worker] = batch_size // local_steps

    def next(self, grant: Grant) -> Assignment:
        """Of the iteration that this grant starts."""
        if self.allocator is not None:
            return Assignment(*self.allocator.allocate_next(grant.worker), self._local_steps)
        return self._assignment(grant)

    def _first(self, grant: Grant) -> Assignment:
        if self.allocator is not None:
            return Assignment(*self.allocator.first(grant.worker), self._local_steps)
        return self._assignment(grant)

    def _assignment(self, grant: Grant) -> Assignment:
        local_steps, first_sample = grant.local_steps or self._local_steps, -1
        n_samples = self._of_a_step.get(grant.worker, self._dealt or 0) * max(1, local_steps)
        if self._dealt is not None:
            first_sample = self._n_dealt
            self._n_dealt += n_samples
        return Assignment(first_sample, n_samples, local_steps, grant.commit_s, grant.ratio)


def create_paradigm(job: Job) -> Paradigm:
    """The paradigm of a job with servers."""
    assert isinstance(job.paradigm, ServedOptions)
    return paradigms.create(job.paradigm.name, job.cluster.workers, **job.paradigm_options)


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


def create_assignments(job: Job) -> Assignments:
    """Of this job; those of the first iterations are given."""
    paradigm, dealt = create_paradigm(job), None
    if isinstance(job.paradigm, AshlOptions) and not isinstance(job.workload, Script):
        dealt = job.workload.batch_size
    first = map(paradigm.first, range(job.cluster.workers))
    return Assignments(first, job.local_steps, create_allocator(job), dealt)


ITERATION = {"iteration": ("", "Iteration after which the workers agreed on the batch sizes.")}


def decision_fields(job: Job) -> dict[str, tuple[str, str]]:
    """Return the inputs of the job's controllers, (unit, description) by name: further columns of /decisions.

    The paradigm's come first, then the allocator's. Without servers `iteration` precedes the latter.
    """
    own = create_paradigm(job).decision_fields if job.has_servers else ITERATION
    if job.batches.policy == "equal":
        return dict(own) if job.has_servers else {}
    return {**own, **Allocator.decision_fields}
