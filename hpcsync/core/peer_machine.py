"""A worker without servers as both engines run it: its counts, its exchanges, its step infos and its end.

The machine knows no clock and no tensors. An engine calls `advance` when a computation has ended, resumes the coroutine
with the result of what it yields (`hpcsync.paradigms.peer_method`), and measures how long it takes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hpcsync.config.job import Job
from hpcsync.core.peer_coordinator import Lockstep
from hpcsync.paradigms.peer_method import (
    NO_EXCHANGE,
    Actions,
    Agreed,
    ExchangeResult,
    LocalUpdate,
    PeerMethod,
    StepCounts,
    Transport,
    without_exchange,
)
from hpcsync.paradigms.records import StepInfo
from hpcsync.state import Stateful
from hpcsync.training.lr_schedule import EvaluationSchedule, learning_rate, worker_rate


def create_method(job: Job) -> PeerMethod:
    """Create the method of a job without servers.

    Raises
    ------
    ValueError
        If the paradigm has servers.
    """
    if (method := job.paradigm.method(job.cluster.workers, job.seed)) is None:
        raise ValueError(f'paradigm.name = "{job.paradigm.name}": must be a paradigm without servers')
    return method


class Computed(NamedTuple):
    """A computation that has ended.

    Attributes
    ----------
    n_samples
        Samples of its batches.
    begin_s, end_s, computed_s, load_s
        Begin and end, and seconds of computing and of waiting for the batches.
    """

    n_samples: int
    begin_s: float
    end_s: float
    computed_s: float
    load_s: float = 0.0


class PeerMachine(Stateful):
    """A worker of a run without servers.

    Parameters
    ----------
    job
        Job without servers.
    worker
        Number of the worker.
    method
        Its exchanges.
    update
        Its weights.
    transport
        Its engine.
    evaluated
        True if weights are evaluated during the run: synchronous workers publish theirs when that is due, asynchronous
        ones after every step, as they also do where others read them.

    Attributes
    ----------
    iteration, samples
        Iterations and samples so far.
    n_steps
        Steps since the last exchange.
    agreed
        Agreement of synchronous workers at the last exchange; None before the first one.
    lockstep
        Progress of synchronous workers.
    stopped
        True if the worker's last iteration has ended; synchronous ones end together.
    """

    # Between iterations; synchronous workers are at an exchange.
    state_types = {"iteration": int, "samples": int, "_evaluations": EvaluationSchedule, "lockstep": Lockstep}
    __slots__ = (
        "_evaluated", "_evaluations", "_lr", "_n_samples", "_n_takers", "_n_workers", "_publishes", "_rate", "agreed",
        "iteration", "lockstep", "method", "n_steps", "samples", "stopped", "transport", "update", "worker",
    )  # fmt: skip

    def __init__(
        self,
        job: Job,
        worker: int,
        method: PeerMethod,
        update: LocalUpdate,
        transport: Transport,
        *,
        evaluated: bool = True,
    ) -> None:
        self.worker, self.method, self.update, self.transport = worker, method, update, transport
        self.iteration = self.samples = 0
        self.n_steps = self._n_samples = 0  # since the last exchange
        self.agreed: Agreed | None = None
        self.lockstep = Lockstep(job)
        self.stopped = False
        self._n_workers = job.cluster.workers
        self._n_takers = len(job.takers)
        self._lr, self._rate = learning_rate(job), worker_rate(job)  # of the shared model, and of a replica
        self._evaluated, self._publishes = evaluated, evaluated or method.peers_read
        self._evaluations = EvaluationSchedule(job.evaluation.every_samples if method.synchronous else 0)

    # ---- an iteration ----

    def advance(self, n_samples: int, *, stop: bool, halt: bool = False) -> Actions:
        """End an iteration: step, and exchange if it is due.

        Parameters
        ----------
        n_samples
            Samples of its gradient; 0 from a synchronous worker whose loop has ended and which participates, without
            contributing, until all have ended.
        stop, halt
            True if the run has asked this worker to stop, or to halt for a checkpoint.

        Returns
        -------
        Actions
            Coroutine to be resumed until it returns the result of the exchange.
        """
        method, lockstep = self.method, self.lockstep
        if method.one_model:
            lr = self._lr(lockstep.samples, lockstep.updates, self._n_workers)
        else:
            lr = self._rate(self.samples, self.iteration)
        self.iteration += 1
        self.samples += n_samples
        round, since = divmod(self.iteration, method.period)
        if not method.synchronous:
            self.stopped = stop or (self._n_workers == 1 and self._done_alone(n_samples))
            return method.iterate(self, lr, None if since else round)
        if n_samples:
            self.n_steps += 1
            self._n_samples += n_samples
            if not method.one_model:
                self.transport.step(self.worker, lr)
        if since:
            self.stopped = lockstep.enough(since)
            return without_exchange()
        return self._exchange_together(round, lr, StepCounts(self.n_steps, self._n_samples, stop, halt))

    def _exchange_together(self, round: int, lr: float, counts: StepCounts) -> Actions:
        method, lockstep, result = self.method, self.lockstep, NO_EXCHANGE
        if method.one_model:
            agreed, result = yield self.transport.sum(self.worker, counts, lr)
        else:
            agreed = yield self.transport.agree(self.worker, counts)
        self.agreed = agreed
        lockstep.exchanged(agreed.n_contributing, agreed.n_steps, agreed.n_samples)
        self.stopped = agreed.stop or agreed.n_steps == 0 or lockstep.enough()
        is_due = not self.stopped and self._evaluations.begin_if_due(lockstep.samples) and self._evaluated
        if is_due and not method.evaluated_after:
            self.transport.publish_for_evaluation(self.worker, self.serial)
        if agreed.n_steps and not method.one_model:
            result = yield from method.exchange(self, round)
        if is_due and method.evaluated_after:
            self.transport.publish_for_evaluation(self.worker, self.serial)
        self.n_steps = self._n_samples = 0
        return result

    def _done_alone(self, n_samples: int) -> bool:
        """Return True if the only worker has done enough; several workers receive a stop command, a little later."""
        self.lockstep.exchanged(1, 1, n_samples)
        return self.lockstep.enough()

    @property
    def serial(self) -> int:
        """Serial number of the weights as they are; the initial ones have 1.

        Synchronous workers publish the same iteration under the same number.
        """
        return 2 + (self.lockstep.updates if self.method.synchronous else self.iteration)

    @property
    def step_serial(self) -> int:
        """Serial number under which an asynchronous step is published; 0 if it is not, since no rank reads it."""
        return self.serial if self._publishes else 0

    @property
    def in_step(self) -> bool:
        """True until all synchronous workers end together."""
        return self.method.synchronous and not self.stopped

    # ---- step infos ----

    def step_info(
        self,
        result: ExchangeResult,
        computed: Computed,
        wait_s: float,
        comm_s: float,
        loss: float,
        lr: float = math.nan,
        problem: int = 0,
        gradients_sq: tuple[float, float] = (math.nan, math.nan),
    ) -> StepInfo:
        """Return the step info of the iteration that has ended, from what the engine has measured.

        `gradients_sq` has the squared norms of the worker's own gradient and of the mean of all workers'.
        """
        peer, wire_bytes, n_received, weight = result
        n_samples, begin_s, end_s, computed_s, load_s = computed
        return StepInfo(
            self.worker, self.iteration, peer, wire_bytes, computed_s, wait_s, comm_s, loss, n_samples, begin_s, end_s,
            n_received, self.update.weight if weight is None else weight, load_s, lr, problem, *gradients_sq,
        )  # fmt: skip

    def absorb_rest(self, now_s: float) -> StepInfo | None:
        """Absorb what has arrived since the last iteration, once no worker sends any more; return the step info."""
        if (received := self.transport.rest(self.worker)) is None:
            return None
        n_received, weight = received.count, self.method.absorb_rest(self.update, received)
        return StepInfo(self.worker, self.iteration, begin_s=now_s, end_s=now_s, n_received=n_received, weight=weight)

    # ---- checkpoints ----

    def at_halt(self, requested: bool) -> bool:
        """Return True if the worker should halt now for a checkpoint.

        Synchronous workers halt after the same iteration, which must end with an exchange; others when requested.
        """
        if not self.method.synchronous:
            return requested
        at_exchange = self.iteration % self.method.period == 0
        return not self.stopped and at_exchange and self.agreed is not None and self.agreed.halt

    def all_halt(self, n_present: int) -> bool:
        """Return False if one of `n_present` synchronous workers has ended its loop, and so cannot halt."""
        if not self.method.synchronous:
            return True
        assert self.agreed is not None
        return self.agreed.n_steps == min(self._n_takers, n_present) * self.method.period

    def resume(self, n_present: int, next_evaluation: int | None) -> None:
        """Continue after restoring a state.

        Parameters
        ----------
        n_present
            Number of workers of the resumed run.
        next_evaluation
            Samples at which the next evaluation is due, if it is not the state's.
        """
        self.lockstep.resume(n_present)
        due = self._evaluations.next_samples if next_evaluation is None else next_evaluation
        self._evaluations.resume(due, self.lockstep.samples)
