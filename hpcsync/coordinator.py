"""What the deciding server does with everything it hears, whichever engine it runs in.

An engine reports what it observes (a contribution is in its slot, a worker has left, an evaluation is done) and carries
out the orders that come back, in their order, on every server. In between lie the paradigm's decision, the numbering of
versions, the learning rate, the stopping rule, and a row in the trace for each of them.

The stopping rule, once true, stays true. From then on every answer to a worker is a stop: a reply of zero local steps.
Held workers get theirs at once, computing ones when their next contribution arrives, which is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hpcsync import paradigms
from hpcsync.job import Job, Stop
from hpcsync.job_paradigms import Easgd, Served
from hpcsync.learning.schedule import LearningRate, learning_rate
from hpcsync.paradigms import Apply, Decision, Drop, Event, Grant, Left, Paradigm, Pushed
from hpcsync.traces.schema import APPLIED, DROPPED, LEFT


class Report(NamedTuple):
    """What a worker says with a contribution. Seconds are on the deciding server's clock, since the start of the run.

    begin_s, end_s: the worker's own computation, padding included (compute_s is their difference);
    (Where a push is of several local steps, from the first one's begin to the last one's end.)
    wait_s: for the grant before it; comm_s: reading the weights before it and putting the contribution after it;
    wire_bytes: bytes of both transfers; batch_size: samples, and loss: their mean loss, of all local steps.
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


@dataclass(frozen=True, slots=True)
class Update:
    """Order: one update from these workers' slots, in this order. lr: its rate, see `Coordinator`."""

    workers: tuple[int, ...]
    lr: float


@dataclass(frozen=True, slots=True)
class Reply:
    """Order: let this worker read the current version and start `iteration`; with zero local steps its part is over."""

    worker: int
    iteration: int
    version: int
    batch_size: int
    local_steps: int


Order = Update | Reply


class Recorder(Protocol):
    """What the coordinator needs of a trace: append one row to a table."""

    def append(self, table: str, row: tuple[object, ...]) -> None: ...


def create_paradigm(job: Job) -> Paradigm:
    """A new paradigm, as this job wants it."""
    assert isinstance(job.paradigm, Served)
    return paradigms.create(job.paradigm.name, job.cluster.workers, **job.paradigm.options)


class Coordinator:
    """One run's decisions.

    lr: rate of the next update, from samples, updates and contributions: the learning rate (`learning.schedule`), or
        where the workers have optimizers and the servers a centre, the share of the distance that it moves.
    """

    def __init__(self, paradigm: Paradigm, trace: Recorder, *, n_workers: int, lr: LearningRate, stop: Stop) -> None:
        self.version = 0
        self.samples = 0
        self.updated_s = 0.0  # time of the latest update
        self.last_loss = math.nan
        self.last_accuracy = math.nan
        self.stopping = False
        self.active = set(range(n_workers))
        self._paradigm = paradigm
        self._trace = trace
        self._lr = lr
        self._stop = stop
        self._seq = 0
        self._now_s = 0.0
        self._pending: dict[int, tuple[int, float, Report]] = {}  # contributions whose fate is open
        self._held: dict[int, tuple[float, Report]] = {}  # workers that wait for an answer
        self._pushes = [0] * n_workers

    def pushed(self, now_s: float, report: Report) -> list[Order]:
        """Worker `report.worker`'s contribution is in its slot."""
        self._now_s = now_s
        seq = self._next_seq()
        self._pending[report.worker] = (seq, now_s, report)
        self._held[report.worker] = (now_s, report)
        self._pushes[report.worker] += 1
        self.last_loss = report.loss
        if not self.stopping:
            return self._decide(Pushed(now_s, report.worker))
        self._settle([report.worker], DROPPED)
        return [self._reply(now_s, self._stop_grant(now_s, report.worker))]

    def left(self, now_s: float, worker: int) -> list[Order]:
        """Worker `worker` takes no further part."""
        self._now_s = now_s
        self._held.pop(worker, None)
        self._trace.append("membership", (self._next_seq(), now_s, worker, LEFT))
        self.active.remove(worker)
        return [] if self.stopping else self._decide(Left(now_s, worker))

    def evaluated(
        self, now_s: float, version: int, samples: int, loss: float, accuracy: float, distance: float = math.nan
    ) -> list[Order]:
        """The weights of `version`, which were current at now_s, have been judged on held-out data, by now."""
        self._trace.append("evaluations", (now_s, version, samples, loss, accuracy, distance))
        self.last_accuracy = accuracy
        return self.stop(max(now_s, self._now_s)) if self._stop.satisfied(loss, accuracy) else []

    def passed(self, now_s: float) -> list[Order]:
        """Time has passed; ends the run when its seconds are up."""
        self._now_s = now_s
        return self.stop(now_s) if self._stop.reached(seconds=now_s) else []

    def stop(self, now_s: float) -> list[Order]:
        """End the run: whoever waits is told at once, whoever computes with the answer to its next contribution."""
        if self.stopping:
            return []
        self.stopping = True
        return self._release_held(now_s)

    def close(self) -> None:
        """Contributions that no update will take any more are dropped, and the trace says so."""
        self._settle(list(self._pending), DROPPED)

    def _decide(self, event: Event) -> list[Order]:
        orders: list[Order] = []
        for action in self._paradigm.handle(event):
            match action:
                case Apply(workers):
                    orders.append(self._update(event.now_s, workers))
                case Grant() as grant:
                    if self.stopping:
                        grant = Grant(grant.worker, grant.iteration, grant.gap_iters, 0, grant.held_s)
                    orders.append(self._reply(event.now_s, grant))
                case Decision(controller, worker, chosen, inputs):
                    row = (self._next_seq(), event.now_s, controller, worker, chosen, *inputs)
                    self._trace.append("decisions", row)
                case Drop(worker):
                    self._settle([worker], DROPPED)
        if self.stopping:
            orders += self._release_held(event.now_s)
        return orders

    def _update(self, now_s: float, workers: tuple[int, ...]) -> Update:
        lr = self._lr(self.samples, self.version, len(workers))
        self.version += 1
        self.updated_s = now_s
        self.samples += sum(self._pending[worker][2].batch_size for worker in workers)
        self._trace.append("updates", (self.version, now_s, len(workers), lr, self.samples))
        self._settle(workers, APPLIED)
        enough = self._stop.reached(samples=self.samples, updates=self.version, seconds=now_s)
        self.stopping = self.stopping or enough
        return Update(workers, lr)

    def _settle(self, workers: Sequence[int], outcome: int) -> None:
        """The fate of these contributions is known: write their rows, in the order in which they arrived."""
        version = self.version - 1 if outcome == APPLIED else self.version
        for seq, now_s, r in sorted(self._pending.pop(worker) for worker in workers):
            head = (seq, now_s, r.worker, r.iteration, r.version_read, version - r.version_read)
            self._trace.append("pushes", head + r[3:] + (outcome,))

    def _reply(self, now_s: float, grant: Grant) -> Reply:
        _, report = self._held.pop(grant.worker)
        batch_size, local_steps = (0, 0) if self.stopping else (report.batch_size, report.local_steps)
        row = (
            self._next_seq(), now_s, grant.worker, grant.iteration, self.version, grant.gap_iters, grant.credits,
            grant.held_s, batch_size, local_steps,
        )  # fmt: skip
        self._trace.append("grants", row)
        return Reply(grant.worker, grant.iteration, self.version, batch_size, local_steps)

    def _stop_grant(self, now_s: float, worker: int) -> Grant:
        pushes = self._pushes[worker]
        slowest = min(self._pushes[w] for w in self.active)
        return Grant(worker, pushes + 1, pushes - slowest, 0, now_s - self._held[worker][0])

    def _release_held(self, now_s: float) -> list[Order]:
        return [self._reply(now_s, self._stop_grant(now_s, worker)) for worker in sorted(self._held)]

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq


def coordinate(job: Job, paradigm: Paradigm, trace: Recorder) -> Coordinator:
    """The coordinator of a run of this job; the paradigm is a new one of it."""
    return Coordinator(paradigm, trace, n_workers=job.cluster.workers, lr=_rate(job), stop=job.stop)


def _rate(job: Job) -> LearningRate:
    if not isinstance(job.paradigm, Easgd):
        return learning_rate(job)
    alpha = job.paradigm.moving_rate(job.cluster.workers)
    return lambda samples, updates, n_contributions: alpha
