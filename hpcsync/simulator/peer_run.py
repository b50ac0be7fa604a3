"""Simulated run without servers: workers with weights of their own, and their exchanges.

A worker is a chain of events: it computes, exchanges if an exchange is due, sends its step info and continues. What it
does is decided by the machine and the method that real ranks have, too (`core/peer_machine.py`); the simulation is
their transport in virtual time. `peer_numerics` computes the weights; records and the stopping rule are in
the same `PeerCoordinator`, which receives all information without delay.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hpcsync.config.job import Job, Script
from hpcsync.core.coordinator import Recorder
from hpcsync.core.device_speed import Device, update_s
from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.core.peer_machine import PeerMachine, create_method
from hpcsync.core.step_problems import ProblemReport, loss_check
from hpcsync.paradigms.peer_method import PENDING, Actions, ExchangeResult, Transport
from hpcsync.paradigms.records import StepInfo
from hpcsync.simulator.peer_numerics import NullNumerics, Numerics, Replicas
from hpcsync.simulator.peer_transfers import Workers
from hpcsync.training.lr_schedule import EvaluationSchedule
from hpcsync.workloads.registry import Workload

Watch = Callable[[float, PeerCoordinator], None]
Judged = tuple[float, int, int, float, float, float]


class _PeerWorker:
    """State of a worker's event chain.

    Attributes
    ----------
    begin_s, end_s, n_samples, loss
        Of the computation in progress, or the latest one.
    exchange_s
        Begin of the exchange that followed: until then the worker has waited for others.
    actions
        The rest of the iteration.
    """

    __slots__ = ("actions", "begin_s", "device", "end_s", "exchange_s", "has_left", "loss", "machine", "n_samples")

    def __init__(self, device: Device, machine: PeerMachine) -> None:
        self.device, self.machine = device, machine
        self.has_left = False
        self.n_samples = 0
        self.begin_s = self.end_s = self.exchange_s = 0.0
        self.loss = math.nan
        self.actions: Actions


def _carry_on(actions: Actions, value: Any) -> ExchangeResult | None:
    """Resume a coroutine until a call is pending; return the result if the iteration ends."""
    send = actions.send
    try:
        while value is not PENDING:
            value = send(value)
    except StopIteration as end:
        result: ExchangeResult = end.value
        return result
    return None


class PeerSimulation(Transport, ABC):
    """Simulation of one run of a job without servers; a subclass is the transport of its method.

    Parameters
    ----------
    job
        Job without servers.
    workload
        Its workload.
    workers
        Event loop, devices and links.
    trace
        Receiver of the trace rows.
    watch
        Called with the virtual time in seconds and the coordinator after every iteration, to show progress or to end
        the run by raising.

    Attributes
    ----------
    attributes
        Attributes of the trace in addition to those of every run.
    """

    attributes: Mapping[str, int] = {}

    def __init__(
        self,
        job: Job,
        workload: Workload,
        workers: Workers,
        trace: Recorder,
        watch: Watch = lambda now_s, coordinator: None,
    ) -> None:
        assert not isinstance(job.workload, Script)
        self.coordinator = PeerCoordinator(job, trace)
        self._job = job
        self._watch = watch
        self._batch_size = job.workload.batch_size
        self._loop, self._links = workers.loop, workers.links
        self._evaluated = workload.evaluate is not None
        self._numerics = self._create_numerics(workload)
        method = create_method(job)
        self._workers = [
            _PeerWorker(device, PeerMachine(job, worker, method, update, self, evaluated=self._evaluated))
            for worker, (device, update) in enumerate(zip(workers.devices, self._numerics.updates, strict=True))
        ]
        every_samples = job.evaluation.every_samples if self._evaluated and not method.synchronous else 0
        self._evaluations = EvaluationSchedule(every_samples)
        self._problem_of, self._look_at = loss_check(job), ProblemReport(job.stop.on_nan).see
        self._update_s = update_s(job, workers.links.size_bytes)  # of all weights
        self._asynchronous = not method.synchronous  # then a worker hears at once that the run is over
        self._evaluating = False  # while an evaluation that takes time is under way
        self._n_published = 0  # of an iteration of synchronous workers

    def run(self) -> None:
        """Run until every worker has left; then write the final weights into the workload's model and evaluate them."""
        for worker in range(len(self._workers)):
            self._loop.after(0.0, self._begin, worker)
        if self._job.stop.seconds is not None:
            self._loop.at(self._job.stop.seconds, self._time_limit_reached)
        self._loop.run()
        coordinator = self.coordinator
        if coordinator.active:
            raise RuntimeError(f"workers {sorted(coordinator.active)} are blocked forever: no events are left")
        self._absorb_remaining(coordinator.updated_s)
        self._numerics.finish()
        if self._evaluated:
            self._conclude(self._judge(coordinator.version, coordinator.samples, coordinator.updated_s))

    # ---- defined by the transport ----

    @abstractmethod
    def _create_numerics(self, workload: Workload) -> Numerics:
        """Return the numerics of the run."""

    def _compute(self, worker: int) -> float:
        """Carry out the worker's computation that ends now; return its mean loss."""
        return self._numerics.compute(worker)

    def _n_samples(self, worker: int) -> int:
        """Return the number of samples of the worker's iteration."""
        return self._batch_size

    def _step_s(self, worker: int) -> float:
        """Return the seconds of the worker's step."""
        return self._update_s

    def _reported(self, infos: Sequence[StepInfo]) -> None:
        """Handle step infos sent at the same time, before these workers continue."""

    def _absorb_remaining(self, now_s: float) -> None:
        """Absorb received models after all workers have left and nothing is in transit."""

    # ---- event chain of a worker ----

    def _begin(self, worker: int) -> None:
        now_s, state = self._loop.now_s, self._workers[worker]
        if state.device.leaves(now_s):
            self._leave(worker)
        else:
            state.begin_s = now_s
            n_samples = state.n_samples = self._n_samples(worker)
            self._loop.after(state.device.seconds(now_s, n_samples / self._batch_size), self._computed, worker)

    def _computed(self, worker: int) -> None:
        state = self._workers[worker]
        state.end_s = state.exchange_s = self._loop.now_s
        state.loss = self._compute(worker)
        state.actions = state.machine.advance(state.n_samples, stop=self.coordinator.stopping)
        self._resume(worker)

    def _resume(self, worker: int, value: Any = None) -> None:
        """Resume a worker with the result of its call; if its iteration ends, send the step info and continue."""
        state = self._workers[worker]
        result = _carry_on(state.actions, value)
        if result is not None:
            if state.has_left:
                self._participate(worker)
                return
            self._report(worker, result)
            if self._asynchronous:
                self._evaluate_if_due()
            self._continue(worker)

    def _resume_together(self, values: Iterable[tuple[int, Any]]) -> None:
        """Resume workers at the same time, in this order; then those whose iterations end send step infos and continue.

        Parameters
        ----------
        values
            Workers and the results of their calls.
        """
        states = self._workers
        ended: dict[int, ExchangeResult] = {}
        for worker, value in values:
            if (result := _carry_on(states[worker].actions, value)) is not None:
                ended[worker] = result
        self._reported(
            [self._report(worker, result) for worker, result in ended.items() if not states[worker].has_left]
        )
        for worker in ended:
            self._continue(worker)

    def publish_for_evaluation(self, worker: int, serial: int) -> None:
        """Evaluate once all synchronous workers have published the same iteration."""
        self._n_published += 1
        if self._n_published == len(self._workers):
            self._n_published = 0
            lockstep = self._workers[worker].machine.lockstep
            self._evaluate(lockstep.updates, lockstep.samples)

    def _report(self, worker: int, result: ExchangeResult) -> StepInfo:
        now_s, state = self._loop.now_s, self._workers[worker]
        compute_s, waited_s = self._spent(worker)
        begin_s, end_s, exchange_s = state.begin_s, state.end_s, state.exchange_s
        wait_s, comm_s = waited_s + (exchange_s - end_s), now_s - exchange_s
        problem = self._problem_of(state.loss)
        step_info = state.machine.step_info(
            result, begin_s, end_s, compute_s, wait_s, comm_s, state.n_samples, state.loss, problem=problem
        )
        self.coordinator.exchanged(now_s, step_info)
        self._look_at(step_info)
        self._watch(now_s, self.coordinator)
        return step_info

    def _spent(self, worker: int) -> tuple[float, float]:
        """Return the worker's computation time and waiting time in its iteration before `end_s`, in seconds."""
        state = self._workers[worker]
        return state.end_s - state.begin_s, 0.0

    def _continue(self, worker: int) -> None:
        """Let a worker go on, once it has made its step."""
        step_s = self._step_s(worker)
        if step_s and not self._workers[worker].has_left:
            self._loop.after(step_s, self._next, worker)
        else:
            self._next(worker)

    def _next(self, worker: int) -> None:
        state = self._workers[worker]
        if state.has_left:
            self._participate(worker)
        elif state.machine.stopped or (self._asynchronous and self.coordinator.stopping):
            self._leave(worker)
        else:
            self._begin(worker)

    def _leave(self, worker: int) -> None:
        self._workers[worker].has_left = True
        self.coordinator.left(self._loop.now_s, worker)
        self._evaluate_if_due()
        self._participate(worker)

    def _participate(self, worker: int) -> None:
        """Let a synchronous worker that has left take part in the next exchange, for which it is always ready."""
        state = self._workers[worker]
        while state.machine.in_step:
            state.actions = state.machine.advance(0, stop=self.coordinator.stopping)
            if _carry_on(state.actions, None) is None:
                return

    # ---- the run ----

    def _evaluate_if_due(self) -> None:
        """Evaluate asynchronous workers; synchronous ones publish when it is due."""
        coordinator = self.coordinator
        if coordinator.stopping or self._evaluating or not self._evaluations.begin_if_due(coordinator.samples):
            return
        self._evaluate(coordinator.version, coordinator.samples)

    def _evaluate(self, version: int, samples: int) -> None:
        """Evaluate these replicas, unless another evaluation is under way; training goes on while it takes time."""
        if self._evaluating:
            return
        judged, seconds = self._judge(version, samples, self._loop.now_s), self._job.evaluation.seconds
        if seconds is None:
            self._conclude(judged)
        else:
            self._evaluating = True
            self._loop.after(seconds, self._conclude, judged)

    def _judge(self, version: int, samples: int, now_s: float) -> Judged:
        """Return the time, version and samples, and the loss, accuracy and distance of the replicas."""
        return now_s, version, samples, *self._numerics.evaluate()

    def _conclude(self, judged: Judged) -> None:
        self._evaluating = False
        self.coordinator.evaluated(*judged)

    def _time_limit_reached(self) -> None:
        self.coordinator.passed(self._loop.now_s)


class ReplicaSimulation(PeerSimulation):
    """Simulation in which every worker has weights of its own."""

    _numerics: Replicas | NullNumerics

    def _create_numerics(self, workload: Workload) -> Replicas | NullNumerics:
        return (NullNumerics if workload.loss is None else Replicas)(self._job, workload)

    def step(self, worker: int, lr: float, serial: int = 0) -> None:
        """Apply the worker's local step."""
        self._numerics.step(worker, lr)
