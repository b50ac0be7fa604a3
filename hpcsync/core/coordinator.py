"""What the deciding server does with everything it hears, whichever engine it runs in.

An engine reports what it observes (a contribution is in its slot, a worker has left or joins again, an evaluation is
done) and carries out the orders that come back, in their order, on every server. In between lie the paradigm's
decision, the numbering of versions, the weight of each contribution, the learning rate, who computes how many samples
next and which, the stopping rule, and a row in the trace for each of them.

The stopping rule, once true, stays true. From then on every answer to a worker is a stop: a reply of zero local steps.
Held workers get theirs at once, computing ones when their next contribution arrives, which is dropped; where that may
take long, they are told to push what they have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from hpcsync.config.job import Job, Stop
from hpcsync.config.paradigms import EasgdOptions
from hpcsync.core.assignments import STOP, Assignment, Assignments, create_assignments
from hpcsync.core.straggler_detector import StragglerDetector
from hpcsync.paradigms import Accumulate, Apply, Cancel, Decision, Drop, Event, Grant, Joined, Left, Paradigm, Pushed
from hpcsync.paradigms.worker_counts import WorkerCounts
from hpcsync.planning.batch_allocation import Allocated, Estimate
from hpcsync.planning.speed_estimator import Estimator
from hpcsync.trace.schema import Change, Outcome
from hpcsync.training.lr_schedule import LearningRate, learning_rate


class PushInfo(NamedTuple):
    """What a worker says with a contribution. Seconds are on the deciding server's clock, since the start of the run.

    begin_s, end_s: the worker's own computation, padding included (compute_s is their difference);
    (Where a push is of several local steps, from the first one's begin to the last one's end.)
    wait_s: for the grant before it; comm_s: reading the weights before it and putting the contribution after it;
    wire_bytes: bytes of both transfers; batch_size: samples, and loss: their mean loss, of all local steps.
    share: 1, or of an iteration that was cancelled the share of its samples that was computed.
    predicted_fixed_s, predicted_sample_s: seconds of each of the worker's next iterations, and of every sample in them;
    NaN where nobody asks.
    pull_s: of comm_s, reading the weights. encode_s: compressing the contribution, which is not in comm_s.
    """

    worker: int
    iteration: int
    version_read: int
    begin_s: float
    end_s: float
    compute_s: float
    wait_s: float
    comm_s: float
    batch_size: int
    local_steps: int
    loss: float
    wire_bytes: int
    share: float = 1.0
    predicted_fixed_s: float = math.nan
    predicted_sample_s: float = math.nan
    pull_s: float = math.nan
    encode_s: float = 0.0

    def event(self, now_s: float) -> Pushed:
        """What a paradigm hears of it."""
        push_s = self.comm_s - self.pull_s
        return Pushed(
            now_s, self.worker, self.iteration_s, self.loss, self.local_steps, self.pull_s, push_s, self.encode_s
        )

    @property
    def iteration_s(self) -> float:
        """Seconds that the whole of it took, or would have taken."""
        return self.compute_s / self.share


def with_prediction(push_info: PushInfo, estimator: Estimator) -> PushInfo:
    """The report with what its worker expects of its next iterations, having learned from this one."""
    n = push_info.local_steps
    fixed_s, sample_s = estimator.observe(push_info.batch_size // n, push_info.iteration_s / n, push_info.comm_s / n)
    return push_info._replace(predicted_fixed_s=fixed_s, predicted_sample_s=sample_s)


@dataclass(frozen=True, slots=True)
class UpdateCommand:
    """Order: one update from what has been collected and these workers' slots, in this order.

    Its gradient is the sum, each contribution times its weight, over the divisor. lr: its rate, see `Coordinator`.
    """

    workers: tuple[int, ...]
    weights: tuple[float, ...]
    divisor: float
    lr: float


@dataclass(frozen=True, slots=True)
class AccumulateCommand:
    """Order: take this worker's contribution, times its weight, out of its slot and into the next update's sum."""

    worker: int
    weight: float


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """Order: tell this worker that it may stop early what it computes from this version, or from one before it: it will
    be dropped, or the run is over."""

    worker: int
    version: int


@dataclass(frozen=True, slots=True)
class GrantCommand:
    """Order: let this worker read the current version and start `iteration`, which consists of what it is assigned;
    with zero local steps its part is over."""

    worker: int
    iteration: int
    version: int
    assignment: Assignment


Command = UpdateCommand | AccumulateCommand | CancelCommand | GrantCommand


class Resumable:
    """What goes on from a checkpoint with all its attributes, but those that follow from the job, in `_of_the_job`."""

    _of_the_job: ClassVar[tuple[str, ...]]

    def state(self) -> dict[str, Any]:
        """All that decides from here on."""
        return {name: value for name, value in vars(self).items() if name not in self._of_the_job}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        vars(self).update(state)


class _Contribution(NamedTuple):
    """One whose fate is open: the push's `seq` and time, and what was said with it."""

    seq: int
    now_s: float
    push_info: PushInfo


class Recorder(Protocol):
    """What the coordinator needs of a trace: append one row to a table."""

    def append(self, table: str, row: tuple[object, ...]) -> None: ...


class Coordinator(Resumable):
    """One run's decisions.

    lr: rate of the next update, from samples, updates and contributions: the learning rate (`learning.schedule`), or
        where the workers have optimizers and the servers a centre, the share of the distance that it moves; 1 where
        workers commit what they have changed.
    batch_total: samples that all workers together compute in an iteration each; None where nobody knows it beforehand.
    assignments: who computes how many samples next, and which.
    cuts_short: whether who computes when the run ends is told to push what it has, and not only with its next answer.

    A contribution is the mean gradient of a worker's batch. Where an update is of one version of the weights, it is the
    mean over all its samples, whoever computed them. Where it is not, each contribution counts as many times as its
    batch is larger than the mean batch of all workers that began (so that a sample counts the same all through the
    run), and once more times what the paradigm says; with batches alike both are the mean over contributions.
    """

    _of_the_job = ("_trace", "_lr", "_stop")

    def __init__(
        self,
        paradigm: Paradigm,
        trace: Recorder,
        *,
        n_workers: int,
        lr: LearningRate,
        stop: Stop,
        batch_total: int | None = None,
        assignments: Assignments | None = None,
        cuts_short: bool = False,
    ) -> None:
        self.version = 0
        self.samples = 0
        self.updated_s = 0.0  # time of the latest update
        self.last_loss = math.nan
        self.last_accuracy = math.nan
        self.stopping = False
        self._progress = WorkerCounts(n_workers)
        self.active = self._progress.active
        self._paradigm = paradigm
        self._trace = trace
        self._lr = lr
        self._stop = stop
        self._seq = 0
        self._now_s = 0.0
        self._assignments = assignments or Assignments()
        self._allocator = self._assignments.allocator
        # In a row of /decisions, for the columns of the other controller.
        self._not_the_paradigms = (math.nan,) * len(paradigm.decision_fields)
        n_allocators = 0 if self._allocator is None else len(self._allocator.decision_fields)
        self._not_the_allocators = (math.nan,) * n_allocators
        # A batch's size times this is its size in mean batches: a fraction, so that it is 1 where all are alike.
        self._per_sample: tuple[float, float] | None = None if batch_total is None else (n_workers, batch_total)
        self._pending: dict[int, _Contribution] = {}  # in their slots
        self._accumulated: list[tuple[_Contribution, float]] = []  # out of them, with their weights
        self._blocked: dict[int, float] = {}  # workers that wait for an answer, since when
        self._cuts_short = cuts_short
        self._computing = set(range(n_workers))
        self.stalls = StragglerDetector()

    def pushed(self, now_s: float, push_info: PushInfo) -> list[Command]:
        """Worker `report.worker`'s contribution is in its slot."""
        self._now_s = now_s
        self._pending[push_info.worker] = _Contribution(self._next_seq(), now_s, push_info)
        self._blocked[push_info.worker] = now_s
        self._computing.discard(push_info.worker)
        self.stalls.ended(push_info.worker, now_s)
        self._progress.push(push_info.worker)
        self._assignments.pushed(push_info.worker, push_info.batch_size, push_info.local_steps)
        self.last_loss = push_info.loss
        if not self.stopping:
            if self._allocator is not None:
                estimate = Estimate(push_info.predicted_fixed_s, push_info.predicted_sample_s)
                self._record_sizes(now_s, self._allocator.pushed(push_info.worker, estimate))
            return self._decide(push_info.event(now_s))
        self._drop(push_info.worker)
        return [self._reply(now_s, self._stop_grant(now_s, push_info.worker))]

    def left(self, now_s: float, worker: int, change: int = Change.LEFT) -> list[Command]:
        """Worker `worker` takes no further part. change: LEFT or DIED, for the trace."""
        self._now_s = now_s
        self._blocked.pop(worker, None)
        self._computing.discard(worker)
        self.stalls.left(worker)
        self._trace.append("membership", (self._next_seq(), now_s, worker, change))
        self._progress.leave(worker)
        if self.stopping:
            return []
        if self._allocator is not None:
            self._record_sizes(now_s, self._allocator.left(worker))
        return self._decide(Left(now_s, worker))

    def joined(self, now_s: float, worker: int) -> list[Command]:
        """Worker `worker`, which has left, takes part again; in vain once the run is over, or nobody else does."""
        if self.stopping or not self.active:
            return []
        self._now_s = now_s
        self._blocked[worker] = now_s
        self._trace.append("membership", (self._next_seq(), now_s, worker, Change.JOINED))
        self._progress.join(worker)
        if self._allocator is not None:
            self._record_sizes(now_s, self._allocator.joined(worker))
        return self._decide(Joined(now_s, worker))

    def evaluated(
        self, now_s: float, version: int, samples: int, loss: float, accuracy: float, distance: float = math.nan
    ) -> list[Command]:
        """The weights of `version`, which were current at now_s, have been judged on held-out data, by now."""
        self._trace.append("evaluations", (now_s, version, samples, loss, accuracy, distance))
        self.last_accuracy = accuracy
        return self.stop(max(now_s, self._now_s)) if self._stop.satisfied(loss, accuracy) else []

    def passed(self, now_s: float) -> list[Command]:
        """Time has passed; ends the run when its seconds are up."""
        self._now_s = now_s
        return self.stop(now_s) if self._stop.reached(seconds=now_s) else []

    def stop(self, now_s: float) -> list[Command]:
        """End the run: whoever waits is told at once, whoever computes with the answer to its next contribution."""
        if self.stopping:
            return []
        self.stopping = True
        return self._end(now_s)

    def close(self) -> None:
        """Contributions that no update will take any more are dropped, and the trace says so."""
        accumulated, self._accumulated = self._accumulated, []
        pending, self._pending = self._pending, {}
        for contribution in sorted([*pending.values(), *(contribution for contribution, _ in accumulated)]):
            self._record_push(contribution, 0.0, Outcome.DROPPED)

    @property
    def blocked(self) -> Mapping[int, float]:
        """Workers that wait for an answer, since when."""
        return self._blocked

    @property
    def done(self) -> Sequence[int]:
        """Pushes of each worker so far."""
        return self._progress.pushes

    @property
    def computing(self) -> set[int]:
        """Workers that take part and are not waiting for an answer."""
        return self._computing

    def check(self) -> None:
        """Assert what must hold between events. Costs O(n_workers)."""
        self._paradigm.check()
        if self._allocator is not None:
            self._allocator.check()

    def _decide(self, event: Event) -> list[Command]:
        commands: list[Command] = []
        for action in self._paradigm.handle(event):
            match action:
                case Apply(workers, weights):
                    commands.append(self._update(event.now_s, workers, weights or (1.0,) * len(workers)))
                case Accumulate(worker, weight):
                    weighted = self._weigh(worker, weight)
                    self._accumulated.append((self._pending.pop(worker), weighted))
                    commands.append(AccumulateCommand(worker, weighted))
                case Cancel(worker):
                    commands.append(CancelCommand(worker, self.version - 1))
                case Grant() as grant:
                    if self.stopping:
                        grant = Grant(grant.worker, grant.iteration, grant.gap_iters, 0, grant.held_s)
                    commands.append(self._reply(event.now_s, grant))
                case Decision(controller, worker, chosen, inputs):
                    self._record_decision(event.now_s, controller, worker, chosen, inputs + self._not_the_allocators)
                case Drop(worker):
                    self._drop(worker)
        if self.stopping:
            commands += self._end(event.now_s)
        return commands

    def _update(self, now_s: float, workers: tuple[int, ...], weights: tuple[float, ...]) -> UpdateCommand:
        taken, self._accumulated = self._accumulated, []
        weighted = []
        for worker, weight in zip(workers, weights, strict=True):
            weighted.append(self._weigh(worker, weight))
            taken.append((self._pending.pop(worker), weighted[-1]))
        divisor = float(len(taken))
        if self._paradigm.synchronous and self._per_sample is not None:
            per, samples = self._per_sample
            divisor = sum(contribution.push_info.batch_size for contribution, _ in taken) * per / samples
        lr = self._lr(self.samples, self.version, len(taken))
        self.version += 1
        self.updated_s = now_s
        for contribution, _ in taken:
            self.samples += contribution.push_info.batch_size
        self._trace.append("updates", (self.version, now_s, len(taken), lr, self.samples))
        for contribution, weight in sorted(taken):
            self._record_push(contribution, weight / divisor, Outcome.APPLIED)
        enough = self._stop.reached(samples=self.samples, updates=self.version, seconds=now_s)
        self.stopping = self.stopping or enough
        return UpdateCommand(workers, tuple(weighted), divisor, lr)

    def _weigh(self, worker: int, weight: float) -> float:
        """How often this worker's contribution counts, whose weight in the paradigm is this."""
        batch_size = self._pending[worker].push_info.batch_size
        if self._per_sample is None:
            if not self._paradigm.synchronous:
                return weight
            self._per_sample = (1.0, batch_size)  # any measure will do
        per, samples = self._per_sample
        return weight * (batch_size * per / samples)

    def _drop(self, worker: int) -> None:
        self._record_push(self._pending.pop(worker), 0.0, Outcome.DROPPED)

    def _record_push(self, contribution: _Contribution, weight: float, outcome: int) -> None:
        """Its fate is known."""
        seq, now_s, r = contribution
        version = self.version - 1 if outcome == Outcome.APPLIED else self.version
        head = (seq, now_s, r.worker, r.iteration, r.version_read, version - r.version_read)
        self._trace.append("pushes", head + r[3:] + (weight, outcome))

    def _record_sizes(self, now_s: float, allocated: Sequence[Allocated]) -> None:
        """Batch sizes have changed."""
        for worker, size, inputs in allocated:
            self._record_decision(now_s, "batches", worker, float(size), self._not_the_paradigms + inputs)

    def _record_decision(
        self, now_s: float, controller: str, worker: int, chosen: float, inputs: tuple[float, ...]
    ) -> None:
        self._trace.append("decisions", (self._next_seq(), now_s, controller, worker, chosen, *inputs))

    def _reply(self, now_s: float, grant: Grant) -> GrantCommand:
        del self._blocked[grant.worker]
        assignment = STOP
        if not self.stopping:
            assignment = self._assignments.next(grant)
            self._computing.add(grant.worker)
            self.stalls.began(grant.worker, grant.iteration, now_s, assignment.size)
        head = (self._next_seq(), now_s, grant.worker, grant.iteration, self.version)
        self._trace.append("grants", (*head, grant.gap_iters, grant.credits, grant.held_s, *assignment))
        return GrantCommand(grant.worker, grant.iteration, self.version, assignment)

    def _stop_grant(self, now_s: float, worker: int) -> Grant:
        iteration = self._progress.pushes[worker] + 1
        return Grant(worker, iteration, self._progress.lead(worker), 0, now_s - self._blocked[worker])

    def _end(self, now_s: float) -> list[Command]:
        """The run has just ended: whoever waits hears of it, and where stretches are long who computes does too."""
        told = sorted(self._computing) if self._cuts_short else []
        replies = [self._reply(now_s, self._stop_grant(now_s, worker)) for worker in sorted(self._blocked)]
        return [*replies, *(CancelCommand(worker, self.version) for worker in told)]

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq


def coordinate(job: Job, paradigm: Paradigm, trace: Recorder) -> Coordinator:
    """The coordinator of a run of this job; the paradigm is a new one of it."""
    return Coordinator(
        paradigm,
        trace,
        n_workers=job.cluster.workers,
        lr=_rate(job),
        stop=job.stop,
        batch_total=None if job.steps_on_workers else job.batch_total,
        assignments=create_assignments(job),
        cuts_short=job.commits,
    )


def _rate(job: Job) -> LearningRate:
    if not job.steps_on_workers:
        return learning_rate(job)
    of_all = job.paradigm.moving_rate(job.cluster.workers) if isinstance(job.paradigm, EasgdOptions) else 1.0
    return lambda samples, updates, n_contributions: of_all
