"""What one of the workers writes down and decides where there is no server, whichever engine it runs in.

Workers report every iteration of theirs, and wait for no answer. From the reports follow the versions, the stopping
rule, and the rows of the trace. With whom a worker exchanges what is decided elsewhere, before the run: in the seed.

An update is a step of the model. Under all-reduce, and where layers are separated, all workers make the same one
together; otherwise every step of a worker is one, of its own replica.

The stopping rule, once true, stays true. Workers that run freely are told; those in step count for themselves what the
reports will say (`Lockstep`), so that all of them end with the same iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpcsync.config.job import Job, Script
from hpcsync.config.paradigms import GossipOptions
from hpcsync.core.assignments import create_allocator
from hpcsync.core.coordinator import Recorder, Resumable
from hpcsync.core.straggler_detector import StragglerDetector
from hpcsync.paradigms.gossip import PeerSelection
from hpcsync.planning.batch_allocation import Allocated, Allocator, Estimate
from hpcsync.trace.schema import NO_PEER, Change
from hpcsync.training.lr_schedule import learning_rate, worker_rate


class StepInfo(NamedTuple):
    """A worker's iteration, and the exchange that ended it. Seconds are on worker 0's clock, from the start of the run.

    peer:       the other worker; itself if it drew itself; EVERYBODY or NOBODY of `traces.schema`.
    begin_s, end_s: of the worker's own computation. compute_s: that, padding included; less than their difference where
    layers are separated, and the worker also waits in between.
    wait_s:     for others; comm_s: transfers.
    wire_bytes: that this worker's transfers moved.
    n_received: models, or gradients, of others that came into its weights.
    weight:     its push-sum weight afterwards; 1 without push-sum.
    A report with batch_size 0 is no iteration: the worker has taken in what had come when it had ended.
    """

    worker: int
    iteration: int
    peer: int
    begin_s: float
    end_s: float
    compute_s: float
    wait_s: float
    comm_s: float
    batch_size: int
    loss: float
    wire_bytes: int
    n_received: int
    weight: float


def intake_info(worker: int, iteration: int, now_s: float, n_received: int, weight: float) -> StepInfo:
    """The report of a worker that has ended with this iteration, and takes in what had come since."""
    return StepInfo(worker, iteration, NO_PEER, now_s, now_s, 0.0, 0.0, 0.0, 0, math.nan, 0, n_received, weight)


def ring_bytes(n_bytes: int, n_workers: int) -> int:
    """Bytes that each worker sends in a ring all-reduce of so many, on the average."""
    return 2 * (n_workers - 1) * n_bytes // n_workers


def broadcast_bytes(n_bytes: int, n_workers: int) -> int:
    """Bytes that a worker sends whose so many all others are given. In a ring it is others who pass them on: all
    together send as much."""
    return (n_workers - 1) * n_bytes


def create_peer_selection(job: Job) -> PeerSelection:
    """Whom the workers of a gossip job draw."""
    assert isinstance(job.paradigm, GossipOptions)
    return PeerSelection(job.cluster.workers, job.seed, job.paradigm.topology, job.paradigm.include_self)


class Lockstep:
    """How far workers are that are in step, as each of them counts it: they end after the same iteration.

    They know it at every exchange. From one to the next it is as if all who contributed to the last one went on; where
    batches may differ between workers, as a script's may, nobody can tell before the next.
    """

    def __init__(self, job: Job) -> None:
        self.samples = 0
        self.updates = 0
        self._n_contributing = len(job.takers)
        self._batch_size = None if isinstance(job.workload, Script) else job.workload.batch_size
        self._one_model = job.one_model
        self._stop = job.stop

    def state(self) -> tuple[int, int, int]:
        """All that was counted."""
        return self.samples, self.updates, self._n_contributing

    def restore(self, state: tuple[int, int, int], n_present: int) -> None:
        """Go on from there, with so many workers."""
        self.samples, self.updates, n_contributing = state
        self._n_contributing = min(n_contributing, n_present)

    def exchanged(self, n_contributing: int, n_steps: int, n_samples: int) -> None:
        """What all have done together since the exchange before."""
        self._n_contributing = n_contributing
        self.samples += n_samples
        self.updates += min(1, n_steps) if self._one_model else n_steps

    def enough(self, since: int = 0) -> bool:
        """Whether training is over so many iterations after the last exchange."""
        if since and self._batch_size is None:
            return False
        steps = since * self._n_contributing
        return self._stop.reached(samples=self.samples + steps * (self._batch_size or 0), updates=self.updates + steps)


class BatchDivision:
    """Who computes which samples, where batches are given out to workers in step: each of them works it out for itself.

    An iteration of all takes the next samples of the run's sequence, worker after worker. Every `interval` iterations,
    and when somebody is found to have left, all tell each other what they expect of their next iterations, and come to
    the same new sizes. Of the iteration in which a worker is first missing its samples are left out.

    A gradient is the mean of its worker's batch. So that the mean of all is that over all samples, each counts as many
    times as its batch is larger than the mean batch, `weight`; if some are missing, what the others then have together
    is too small or too large by a factor, `correction`.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._active = [worker for worker, size in enumerate(allocator.sizes) if size]
        self._total = sum(allocator.sizes)
        self._work = {worker: allocator.first(worker) for worker in self._active}
        self._iterations = 0

    def work(self, worker: int) -> tuple[int, int]:
        """(first_sample, n_samples) of the worker's iteration, which lasts until `exchanged`."""
        return self._work[worker]

    def weight(self, worker: int) -> float:
        """How often its gradient counts; exactly 1 where its batch is the mean batch."""
        return self._work[worker][1] * len(self._active) / self._total

    def correction(self, n_contributing: int, n_samples: int) -> float:
        """What the sum of the weighted gradients, divided by the number that contributed, is to be multiplied by."""
        return n_contributing * self._total / (len(self._active) * n_samples) if n_samples else 1.0

    def exchanged(self, n_contributing: int, gather: Callable[[], Sequence[Estimate | None]]) -> list[Allocated]:
        """An iteration to which so many contributed is over, and another follows.

        gather: what each worker expects; NaN where it does not know, None from one that did not contribute. If it is
        called, then it is by all workers.
        Returns rows of new sizes, if there are any, those of the active workers one or more times.
        """
        self._iterations += 1
        allocated: list[Allocated] = []
        if self._iterations % self._allocator.interval == 0 or n_contributing < len(self._active):
            expected = gather()
            for worker in [worker for worker in self._active if expected[worker] is None]:
                allocated += self._allocator.left(worker)
            known = {worker: estimate for worker, estimate in enumerate(expected) if estimate is not None}
            allocated += self._allocator.allocate(known)
            self._active = sorted(known)
            self._total = sum(self._allocator.sizes)
        self._work = {worker: self._allocator.allocate_next(worker) for worker in self._active}
        return allocated


def create_batch_division(job: Job) -> BatchDivision | None:
    """Of this job; None where all batches are alike."""
    allocator = create_allocator(job)
    return None if allocator is None else BatchDivision(allocator)


class PeerCoordinator(Resumable):
    """One run's bookkeeping.

    updated_s: time of the latest update. active: workers that have not left. done: iterations that each has ended.
    stalls: what is known of their durations.
    """

    blocked = None  # nobody is answered

    _of_the_job = ("_trace", "_stop", "_lr", "_rate")

    def __init__(self, job: Job, trace: Recorder) -> None:
        n_workers = job.cluster.workers
        self.version = 0
        self.samples = 0
        self.updated_s = 0.0
        self.last_loss = math.nan
        self.last_accuracy = math.nan
        self.stopping = False
        self.active = set(range(n_workers))
        self.done = [0] * n_workers
        self.stalls = StragglerDetector()
        self._trace = trace
        self._stop = job.stop
        self._n_workers = n_workers
        self._lr, self._rate = learning_rate(job), worker_rate(job)
        self._one_model = job.one_model
        # Under layer separation the samples of those who take batches pass through the others too, who have the loss.
        self._counting = job.takers
        self._judging = range(self._counting.start) or self._counting
        self._own_samples = [0] * n_workers
        self._round: dict[int, list[StepInfo]] = {}  # of all together: iteration -> who has reported it
        self._seq = 0

    def exchanged(self, now_s: float, step_info: StepInfo) -> None:
        """A worker has ended an iteration."""
        r = step_info
        self._trace.append(
            "exchanges",
            (
                now_s, r.worker, r.iteration, r.peer, r.wire_bytes, r.compute_s, r.wait_s, r.comm_s, r.loss,
                r.batch_size, r.begin_s, r.end_s, r.n_received, r.weight,
            ),
        )  # fmt: skip
        if r.batch_size == 0:
            return
        self.done[r.worker] = r.iteration
        self.stalls.ended(r.worker, now_s, r.wait_s)
        if r.worker in self._judging:
            self.last_loss = r.loss
        if self._one_model:
            infos = self._round.setdefault(r.iteration, [])
            infos.append(r)
            if len(infos) >= len(self.active):  # otherwise one of them is missing
                self._end_rounds(now_s)
        else:
            self._update(now_s, [r])
        if not self.stopping:
            self.stalls.began(r.worker, r.iteration + 1, now_s)

    def allocated(self, now_s: float, iteration: int, allocated: Sequence[Allocated]) -> None:
        """After this iteration the workers have agreed on new batch sizes."""
        for worker, size, inputs in allocated:
            self._seq += 1
            row = (self._seq, now_s, "batches", worker, float(size), float(iteration), *inputs)
            self._trace.append("decisions", row)

    def left(self, now_s: float, worker: int, change: int = Change.LEFT) -> None:
        """A worker makes no further iteration. change: LEFT or DIED, for the trace."""
        self._seq += 1
        self._trace.append("membership", (self._seq, now_s, worker, change))
        self.active.discard(worker)  # one who has left may die, too
        self.stalls.left(worker)
        self._end_rounds(now_s)

    def evaluated(
        self, now_s: float, version: int, samples: int, loss: float, accuracy: float, distance: float
    ) -> None:
        """The mean of the replicas of now_s has been judged on held-out data, by now; `distance` is theirs from it."""
        self._trace.append("evaluations", (now_s, version, samples, loss, accuracy, distance))
        self.last_accuracy = accuracy
        self.stopping = self.stopping or self._stop.satisfied(loss, accuracy)

    def passed(self, now_s: float) -> None:
        """Time has passed; ends the run when its seconds are up."""
        self.stopping = self.stopping or self._stop.reached(seconds=now_s)

    def stop(self) -> None:
        """End the run."""
        self.stopping = True

    def continued(self, now_s: float) -> None:
        """Workers that have waited for a checkpoint make their next iterations."""
        for worker in [*self.stalls.running]:
            self.stalls.began(worker, self.done[worker] + 1, now_s)

    def _end_rounds(self, now_s: float) -> None:
        """All together: an iteration is an update once everybody who still takes part has reported it."""
        for iteration in sorted(self._round):
            if all(self.done[worker] >= iteration for worker in self.active):
                self._update(now_s, self._round.pop(iteration))

    def _update(self, now_s: float, infos: list[StepInfo]) -> None:
        worker, iteration = infos[0].worker, infos[0].iteration
        if self._one_model:
            lr = self._lr(self.samples, self.version, self._n_workers)
        else:
            lr = self._rate(self._own_samples[worker], iteration - 1)
        self.version += 1
        self.updated_s = now_s
        counted = [step_info for step_info in infos if step_info.worker in self._counting]
        for step_info in counted:
            self.samples += step_info.batch_size
            self._own_samples[step_info.worker] += step_info.batch_size
        self._trace.append("updates", (self.version, now_s, len(counted), lr, self.samples))
        self.stopping = self.stopping or self._stop.reached(samples=self.samples, updates=self.version, seconds=now_s)
