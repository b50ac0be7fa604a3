"""Engine-independent coordinator: turns pushes into updates, grants and trace rows.

An engine passes in what it observes (a contribution is in its slot, a worker leaves or joins, an evaluation has ended)
and carries out the resulting commands, in their order, on every server. The coordinator covers the paradigm's decision,
version numbers, the weight of each contribution, the learning rate, batch allocation and the stopping rule, and writes
a trace row for each of them.

Once the stopping rule is true it stays true. From then on every grant has zero local steps, which stops the worker.
Blocked workers are stopped at once; computing workers when their next contribution arrives, which is discarded. Where
that may take long, they are sent a cancel command and push early.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hpcsync.config.job import Job, Script, Stop
from hpcsync.core.assignments import Assignments, create_assignments, create_paradigm
from hpcsync.core.straggler_detector import StragglerDetector
from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import (
    Accumulate,
    Apply,
    Cancel,
    Decision,
    Drop,
    Elapsed,
    Evaluated,
    Event,
    Grant,
    Joined,
    Left,
    PushInfo,
)
from hpcsync.paradigms.records import UNUSED, StepInfo
from hpcsync.paradigms.worker_counts import WorkerCounts
from hpcsync.planning.batch_allocation import Allocated, Estimate
from hpcsync.state import Stateful
from hpcsync.trace.schema import ELAPSED, EVALUATED, Change, Outcome, Release
from hpcsync.training.lr_schedule import LearningRate, learning_rate


class UpdateCommand(NamedTuple):
    """Command: make one update from everything accumulated and from these workers' slots, in this order.

    Parameters
    ----------
    workers
        Workers whose slots are added.
    weights
        Factor of each of these contributions.
    divisor
        Divisor of the weighted sum.
    lr
        Rate of the update, see `Coordinator`.
    momentum
        Momentum of the servers' optimizer from this update on; NaN: as before.
    """

    workers: tuple[int, ...]
    weights: tuple[float, ...]
    divisor: float
    lr: float
    momentum: float = math.nan


@dataclass(frozen=True, slots=True)
class AccumulateCommand:
    """Command: add this worker's contribution, times its weight, to the sum of the next update and free its slot."""

    worker: int
    weight: float


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """Command: tell this worker that it may abandon work based on `version` or an earlier one.

    The result will be discarded, or the run is over.
    """

    worker: int
    version: int


Command = UpdateCommand | AccumulateCommand | CancelCommand | Grant
Contribution = tuple[int, PushInfo]  # of which the outcome is open: the `seq` of the push, and its push info


class Recorder(Protocol):
    """Interface of the trace that a coordinator needs."""

    def append(self, table: str, row: tuple[object, ...]) -> None:
        """Append one row to a table."""

    def amend(self, table: str, back: int, column: str, value: float) -> None:
        """Set a value of the row that is so far from the latest one, if it is kept and can still be changed."""
        return


class NoRecorder(Recorder):
    """Recorder of nothing."""

    def append(self, table: str, row: tuple[object, ...]) -> None:
        """Do nothing."""


class RunCounts(Stateful):
    """What coordinators with and without servers know of their run.

    Parameters
    ----------
    trace
        Receives the rows.
    stop
        Stopping rule.
    stalls
        Detector of stragglers; by default a new one.

    Attributes
    ----------
    version, samples
        Updates and samples so far.
    updated_s
        Time of the latest update in seconds.
    last_loss, last_accuracy
        Latest loss of a step, and accuracy of an evaluation; NaN before.
    stopping
        True once the stopping rule is true.
    seq
        Latest `seq` of the trace.
    stalls
        As above.
    """

    state_types = {
        "version": int,
        "samples": int,
        "updated_s": float,
        "last_loss": float,
        "last_accuracy": float,
        "stopping": bool,
        "seq": int,
        "stalls": StragglerDetector,
    }

    def __init__(self, trace: Recorder, stop: Stop, stalls: StragglerDetector | None) -> None:
        self.version = self.samples = self.seq = 0
        self.updated_s = 0.0
        self.last_loss = self.last_accuracy = math.nan
        self.stopping = False
        self.stalls = stalls or StragglerDetector()
        self._trace, self._stop = trace, stop


class Coordinator(RunCounts):
    """Decisions of one run with servers.

    Parameters
    ----------
    paradigm
        New paradigm of the job.
    trace, stop, stalls
        See `RunCounts`.
    n_workers
        Number of workers.
    lr
        Rate of the next update as a function of samples, updates and contributions: the learning rate
        (`hpcsync.training.lr_schedule`); where workers have optimizers and the servers a centre, the share of the
        distance that the centre moves; where workers push the change of their weights, 1 or an outer learning rate.
    batch_total
        Samples of one iteration of all workers together; None if not known in advance.
    assignments
        Batch sizes, samples and local steps.
    cuts_short
        Whether computing workers are sent a cancel command when the run ends, so that they push early.
    of_own_rates
        Whether `lr` is a factor of the rates that scripts state with their pushes.
    sums
        Whether an update is the sum of its contributions, as if each were one, and not their mean.

    Notes
    -----
    A contribution is the mean gradient of a worker's batch; one with a problem in UNUSED does not count. In a
    synchronous paradigm an update is the mean over all its samples. Otherwise each contribution is weighted by its
    batch size over the mean batch size of all initial workers, so that a sample counts the same throughout the run,
    times the paradigm's weight. With equal batches both are the mean over contributions, or with `sums` their sum.
    """

    state_types = {
        "_progress": WorkerCounts,
        "_paradigm": Paradigm,
        "_now_s": float,
        "_assignments": Assignments,
        "_per_sample": tuple[float, float] | None,
        "_pending": dict[int, Contribution],
        "_accumulated": list[tuple[Contribution, float]],
        "_blocked": dict[int, float],
        "_computing": set[int],
        "_left_since": set[int],
    }

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
        of_own_rates: bool = False,
        sums: bool = False,
        stalls: StragglerDetector | None = None,
    ) -> None:
        super().__init__(trace, stop, stalls)
        self._progress = WorkerCounts(n_workers)
        self.active = self._progress.active
        self._paradigm = paradigm
        self._lr = lr
        self._now_s = 0.0
        self._assignments = assignments or Assignments()
        self._allocator = self._assignments.allocator
        # Fill a row of /decisions in the columns of the other controller.
        self._paradigm_nan = (math.nan,) * len(paradigm.decision_fields)
        n_allocators = 0 if self._allocator is None else len(self._allocator.decision_fields)
        self._allocator_nan = (math.nan,) * n_allocators
        # Batch size times this fraction is the size in mean batches: exactly 1 where all are equal.
        self._per_sample: tuple[float, float] | None = None if batch_total is None else (n_workers, batch_total)
        self._knows_mean = batch_total is not None
        self._pending: dict[int, Contribution] = {}  # contributions in their slots
        self._accumulated: list[tuple[Contribution, float]] = []  # in the sum of the next update, with their weights
        self._blocked: dict[int, float] = {}  # blocked workers, and since when
        self._cuts_short = cuts_short
        self._of_own_rates = of_own_rates
        self._sums = sums
        self._computing = set(range(n_workers))
        self._left_since: set[int] = set()  # workers that have left since the latest update

    def pushed(self, now_s: float, push_info: PushInfo) -> list[Command]:
        """Process a push: the worker's contribution is in its slot."""
        self._now_s = now_s
        if push_info.now_s != now_s:
            push_info = PushInfo(now_s, *push_info[1:])
        seq, worker = self._next_seq(), push_info.worker
        self._pending[worker] = (seq, push_info)
        self._blocked[worker] = now_s
        self._computing.discard(worker)
        self.stalls.ended(worker, now_s)
        self._progress.push(worker)
        self._assignments.pushed(worker, push_info.batch_size, push_info.local_steps)
        self.last_loss = push_info.loss
        if not self.stopping:
            if self._allocator is not None:
                estimate = Estimate(push_info.predicted_fixed_s, push_info.predicted_sample_s)
                self._record_sizes(now_s, self._allocator.pushed(worker, estimate))
            return self._decide(push_info, seq)
        self._drop(worker)
        return [self._grant(now_s, self._next_grant(now_s, worker), Release.OWN)]

    def left(self, now_s: float, worker: int, change: int = Change.LEFT) -> list[Command]:
        """Process a departure; `change` is LEFT or DIED, for the trace."""
        self._now_s = now_s
        self._blocked.pop(worker, None)
        self._computing.discard(worker)
        self.stalls.left(worker)
        seq = self._next_seq()
        self._trace.append("membership", (seq, now_s, worker, change))
        self._progress.leave(worker)
        self._left_since.add(worker)
        if self.stopping:
            return []
        if self._allocator is not None:
            self._record_sizes(now_s, self._allocator.left(worker))
        return self._decide(Left(now_s, worker), seq)

    def joined(self, now_s: float, worker: int) -> list[Command]:
        """Process the join of a worker that had left; without effect once the run is over or no worker is active."""
        if self.stopping or not self.active:
            return []
        self._now_s = now_s
        self._blocked[worker] = now_s
        seq = self._next_seq()
        self._trace.append("membership", (seq, now_s, worker, Change.JOINED))
        self._progress.join(worker)
        if self._allocator is not None:
            self._record_sizes(now_s, self._allocator.joined(worker))
        return self._decide(Joined(now_s, worker), seq)

    def evaluated(
        self,
        now_s: float,
        version: int,
        samples: int,
        loss: float,
        accuracy: float,
        distance: float = math.nan,
        *,
        known_s: float = 0.0,
    ) -> list[Command]:
        """Record an evaluation, stop the run if it satisfies the stopping rule, or pass it to a paradigm that uses it.

        Parameters
        ----------
        now_s
            Time at which the evaluated weights were current.
        version, samples
            Their version, and the samples that it was trained on.
        loss, accuracy
            Results on held-out data.
        distance
            Distance of the replicas from their mean; NaN with servers.
        known_s
            Time at which the evaluation has ended, if later than the coordinator's latest event.
        """
        self._trace.append("evaluations", (now_s, version, samples, loss, accuracy, distance))
        self.last_accuracy = accuracy
        if self._stop.satisfied(loss, accuracy):
            return self.stop(max(now_s, self._now_s, known_s))
        if self.stopping or not self.active or not self._paradigm.uses_evaluations:
            return []
        self._now_s = max(now_s, self._now_s, known_s)
        event = Evaluated(self._now_s, min(self.active), loss, version, now_s)
        nans = self._paradigm_nan + self._allocator_nan
        self._record_decision(event.now_s, EVALUATED, event.worker, loss, nans)
        return self._decide(event, self.seq)

    def updated(self, version: int, gradient_sq: float) -> None:
        """Record the squared norm of the gradient with which the servers have made this version."""
        self._trace.amend("updates", self.version - version, "gradient_sq", gradient_sq)

    def passed(self, now_s: float) -> list[Command]:
        """Note that time has passed; end the run once its seconds are up, and tell the paradigm what is due."""
        self._now_s = now_s
        if self._stop.reached(seconds=now_s):
            return self.stop(now_s)
        due = self.due
        if due is None or due.now_s > now_s:
            return []
        self._record_decision(now_s, ELAPSED, due.worker, due.now_s, self._paradigm_nan + self._allocator_nan)
        return self._decide(Elapsed(now_s, due.worker), self.seq)

    @property
    def due(self) -> Elapsed | None:
        """Event that `passed` hands to the paradigm once its time has come; None: there is none."""
        return None if self.stopping else self._paradigm.due

    @property
    def wants_evaluation(self) -> bool:
        """True if the present version is to be evaluated, as soon as no other evaluation is running."""
        return self._paradigm.wants_evaluation and not self.stopping and bool(self.active)

    def stop(self, now_s: float) -> list[Command]:
        """End the run: blocked workers stop at once, computing workers after their next push."""
        if self.stopping:
            return []
        self.stopping = True
        return self._end(now_s)

    def close(self) -> None:
        """Record the contributions that no update will use as dropped."""
        accumulated, self._accumulated = self._accumulated, []
        pending, self._pending = self._pending, {}
        for contribution in sorted([*pending.values(), *(contribution for contribution, _ in accumulated)]):
            self._record_push(contribution, 0.0, Outcome.DROPPED)

    def is_pending(self, worker: int) -> bool:
        """Return whether a contribution of this worker is in its slot, neither used nor dropped."""
        return worker in self._pending

    @property
    def blocked(self) -> Mapping[int, float]:
        """Blocked workers, and the time since which each is blocked."""
        return self._blocked

    @property
    def done(self) -> Sequence[int]:
        """Pushes of each worker so far."""
        return self._progress.pushes

    @property
    def iters(self) -> Sequence[int]:
        """Iterations of each worker by which leads are counted: a join raises them to those of the slowest."""
        return self._progress.iters

    @property
    def trained_by(self) -> list[int]:
        """Workers that took part when the current version was made, or joined since, and have pushed."""
        return [worker for worker in sorted(self.active | self._left_since) if self.done[worker]]

    @property
    def computing(self) -> set[int]:
        """Active workers that are not blocked."""
        return self._computing

    def check(self) -> None:
        """Assert the invariants that hold between events. Costs O(n_workers)."""
        self._paradigm.check()
        if self._allocator is not None:
            self._allocator.check()

    def _decide(self, event: Event, seq: int) -> list[Command]:
        """Return the commands that answer an event; `seq` is that of its row."""
        commands: list[Command] = []
        now_s, awaits = event.now_s, event.worker if isinstance(event, (PushInfo, Joined)) else -1
        for action in self._paradigm.handle(event):
            match action:
                case Grant():
                    commands.append(self._grant(now_s, action, Release.OWN if action.worker == awaits else seq))
                case Apply() if self.stopping:
                    pass  # an update before it has ended the run: the contributions are dropped at its end
                case Apply(workers, weights):
                    commands.append(self._update(now_s, workers, weights or (1.0,) * len(workers)))
                case Accumulate(worker, weight):
                    weighted = self._weigh(worker, weight)
                    self._accumulated.append((self._pending.pop(worker), weighted))
                    commands.append(AccumulateCommand(worker, weighted))
                case Cancel(worker):
                    commands.append(CancelCommand(worker, self.version - 1))
                case Decision(controller, worker, chosen, inputs):
                    self._record_decision(now_s, controller, worker, chosen, inputs + self._allocator_nan)
                case Drop(worker):
                    self._drop(worker)
        if self.stopping:
            commands += self._end(now_s)
        return commands

    def _update(self, now_s: float, workers: tuple[int, ...], weights: tuple[float, ...]) -> UpdateCommand:
        weighted = tuple([self._weigh(*each) for each in zip(workers, weights, strict=True)])
        taken, self._accumulated = self._accumulated, []
        taken += zip(map(self._pending.pop, workers), weighted, strict=True)
        infos = [push_info for (_, push_info), _ in taken]
        used = [push_info for push_info in infos if push_info.problem not in UNUSED]
        divisor = 1.0 if self._sums else float(len(used) or 1)
        if used and self._paradigm.synchronous and self._per_sample is not None:
            per, samples = self._per_sample
            divisor = sum(push_info.batch_size for push_info in used) * per / samples
        rate = self._lr(self.samples, self.version, 1 if self._sums else len(taken))
        lr = rate * own_rate(infos) if self._of_own_rates else rate
        self.version += 1
        self.updated_s = now_s
        self._left_since.clear()
        self.samples += sum([push_info.batch_size for push_info in infos])
        self._trace.append("updates", (self.version, now_s, len(taken), lr, self.samples, math.nan))
        for contribution, weight in sorted(taken):
            self._record_push(contribution, weight / divisor, Outcome.APPLIED)
        if self._stop.reached(samples=self.samples, updates=self.version, seconds=now_s):
            self.stopping = True
        return UpdateCommand(workers, weighted, divisor, rate, self._paradigm.momentum)

    def _weigh(self, worker: int, weight: float) -> float:
        """Return the weight of this worker's contribution, given its weight in the paradigm."""
        push_info = self._pending[worker][1]
        if push_info.problem in UNUSED:
            return 0.0
        batch_size = push_info.batch_size
        if not (self._knows_mean or self._paradigm.synchronous):
            return weight
        if self._per_sample is None:
            self._per_sample = (1.0, batch_size)  # any unit works: the divisor uses the same one
        per, samples = self._per_sample
        return weight * (batch_size * per / samples)

    def _drop(self, worker: int) -> None:
        self._record_push(self._pending.pop(worker), 0.0, Outcome.DROPPED)

    def _record_push(self, contribution: Contribution, weight: float, outcome: int) -> None:
        """Record a push whose outcome is known."""
        seq, push_info = contribution
        version = self.version - 1 if outcome == Outcome.APPLIED else self.version
        staleness = version - push_info.version_read
        self._trace.append("pushes", (seq, *push_info[:4], staleness, *push_info[4:], weight, outcome))

    def _record_sizes(self, now_s: float, allocated: Sequence[Allocated]) -> None:
        """Record new batch sizes."""
        for worker, size, inputs in allocated:
            self._record_decision(now_s, "batches", worker, float(size), self._paradigm_nan + inputs)

    def _record_decision(
        self, now_s: float, controller: str, worker: int, chosen: float, inputs: tuple[float, ...]
    ) -> None:
        self._trace.append("decisions", (self._next_seq(), now_s, controller, worker, chosen, *inputs))

    def _grant(self, now_s: float, grant: Grant, released_by: int) -> Grant:
        """Complete a grant by the version and the samples, and record it; once the run is over it stops the worker."""
        del self._blocked[grant.worker]
        if self.stopping:
            grant = grant._replace(version=self.version).stop()
        else:
            grant = self._assignments.next(grant, self.version)
            self._computing.add(grant.worker)
            self.stalls.began(grant.worker, grant.iteration, now_s, grant.size)
        self._trace.append("grants", (self._next_seq(), now_s, *grant, released_by))
        return grant

    def _next_grant(self, now_s: float, worker: int) -> Grant:
        """Return the grant of a blocked worker that the paradigm is not asked for."""
        held_s = now_s - self._blocked[worker]
        return Grant(worker, self._progress.pushes[worker] + 1, gap_iters=self._progress.lead(worker), held_s=held_s)

    def _end(self, now_s: float) -> list[Command]:
        """Stop all blocked workers; if computing workers are to push early, cancel their iterations."""
        cancelled = sorted(self._computing) if self._cuts_short else []
        blocked = sorted(self._blocked)
        grants = [self._grant(now_s, self._next_grant(now_s, worker), Release.END) for worker in blocked]
        return [*grants, *(CancelCommand(worker, self.version) for worker in cancelled)]

    def _next_seq(self) -> int:
        self.seq += 1
        return self.seq


def own_rate(infos: Sequence[PushInfo | StepInfo]) -> float:
    """Return the mean learning rate of the scripts that contribute, of which a schedule is a factor; 1 for a job."""
    rates = [info.lr for info in infos]
    if math.isnan(rates[0]):
        return 1.0
    return rates[0] if len(set(rates)) == 1 else sum(rates) / len(rates)


def coordinate(job: Job, trace: Recorder, stalls: StragglerDetector | None = None) -> Coordinator:
    """Create the coordinator of a run of this job, with a new paradigm of the job."""
    return Coordinator(
        create_paradigm(job),
        trace,
        n_workers=job.cluster.workers,
        lr=_rate(job),
        stop=job.stop,
        batch_total=None if job.paradigm.steps_on_workers else job.batch_total,
        assignments=create_assignments(job),
        cuts_short=job.commits,
        of_own_rates=isinstance(job.workload, Script) and not job.paradigm.steps_on_workers,
        sums=job.paradigm.merges,
        stalls=stalls,
    )


def _rate(job: Job) -> LearningRate:
    if not job.paradigm.steps_on_workers:
        return learning_rate(job)
    of_all = job.paradigm.moving_rate(job.cluster.workers)
    return lambda samples, updates, n_contributions: of_all
