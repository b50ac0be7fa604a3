"""Simulated run without servers: workers with weights of their own, and their exchanges.

A worker is a chain of events: it computes, exchanges if an exchange is due, sends its step info and continues. What it
does is decided by the machine and the method that real ranks have, too (`core/peer_machine.py`); the simulation is
their transport in virtual time. `peer_numerics` computes the weights; records and the stopping rule are in
the same `PeerCoordinator`, which receives all information without delay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcsync.config.job import Job
from hpcsync.core.coordinator import Recorder
from hpcsync.core.device_speed import Device, update_s
from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.core.peer_machine import Computed, PeerMachine, create_method
from hpcsync.core.straggler_detector import NoDetector
from hpcsync.paradigms.peer_method import PENDING, Actions, ExchangeResult, Transport
from hpcsync.paradigms.records import Problem, StepInfo
from hpcsync.simulator.peer_numerics import NullNumerics, Replicas
from hpcsync.simulator.peer_transfers import Workers
from hpcsync.simulator.run import Judged, Simulation, Watch
from hpcsync.training.lr_schedule import EvaluationSchedule
from hpcsync.workloads.registry import Workload


@dataclass(slots=True)
class _PeerWorker:
    """State of a worker's event chain.

    Attributes
    ----------
    step_s
        Seconds of each step.
    begin_s, end_s, n_samples, loss, gradient_sq
        Of the computation in progress, or the latest one.
    compute_s, waited_s
        Seconds of it in which the worker computed, and waited.
    exchange_s
        Begin of the exchange that followed: until then the worker has waited for others.
    actions
        The rest of the iteration.
    """

    device: Device
    machine: PeerMachine
    step_s: float
    has_left: bool = False
    n_samples: int = 0
    begin_s: float = 0.0
    end_s: float = 0.0
    compute_s: float = 0.0
    waited_s: float = 0.0
    exchange_s: float = 0.0
    loss: float = math.nan
    gradient_sq: float = math.nan
    actions: Actions = field(init=False)


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


class PeerSimulation(Simulation, Transport):
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
        See `Simulation`.
    """

    coordinator: PeerCoordinator
    _numerics: Any
    _create_numerics: Callable[[Job, Workload], Any] = Replicas  # those of the transport with arithmetic

    def __init__(
        self,
        job: Job,
        workload: Workload,
        workers: Workers,
        trace: Recorder,
        watch: Watch = lambda now_s, coordinator: None,
    ) -> None:
        super().__init__(job, workload, workers.loop, trace, watch)
        self.coordinator = PeerCoordinator(job, trace, NoDetector())
        self._links = workers.links
        self._numerics = (NullNumerics if workload.loss is None else self._create_numerics)(job, workload)
        method, step_s = create_method(job), update_s(job, workers.links.size_bytes)  # of all weights
        self._workers = [
            _PeerWorker(device, PeerMachine(job, worker, method, update, self, evaluated=self._evaluated), step_s)
            for worker, (device, update) in enumerate(zip(workers.devices, self._numerics.updates, strict=True))
        ]
        if method.synchronous:  # their machines know when an evaluation is due
            self._evaluations = EvaluationSchedule(0)
        self._n_published = 0  # of an iteration of synchronous workers

    def _start(self) -> None:
        for worker in range(len(self._workers)):
            self._loop.after(0.0, self._begin, worker)

    def _finish(self) -> None:
        ended_s = self.coordinator.updated_s
        for state in self._workers:
            if (step_info := state.machine.absorb_rest(ended_s)) is not None:
                self.coordinator.exchanged(ended_s, step_info)
        self._numerics.finish()

    # ---- defined by the transport ----

    def step(self, worker: int, lr: float, serial: int = 0) -> None:
        """Apply the worker's local step."""
        self._numerics.step(worker, lr)

    def _compute(self, worker: int) -> float:
        """Carry out the worker's computation that ends now; return its mean loss."""
        return self._numerics.compute(worker)

    def _n_samples(self, worker: int) -> int:
        """Return the number of samples of the worker's iteration."""
        return self._batch_size

    def _reported(self, infos: Sequence[StepInfo]) -> None:
        """Handle step infos sent at the same time, before these workers continue."""

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
        now_s = state.end_s = state.exchange_s = self._loop.now_s
        state.compute_s = now_s - state.begin_s
        state.loss = self._compute(worker)
        state.gradient_sq = self._numerics.gradient_sq
        state.actions = state.machine.advance(state.n_samples, stop=self.coordinator.stopping, halt=self._must_halt())
        self._resume(worker)

    def _resume(self, worker: int, value: Any = None) -> None:
        """Resume a worker with the result of its call; if its iteration ends, send the step info and continue."""
        state = self._workers[worker]
        if (result := _carry_on(state.actions, value)) is not None:
            if not state.has_left:
                self._report(worker, result)
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
        computed = Computed(state.n_samples, state.begin_s, state.end_s, state.compute_s)
        wait_s, comm_s = state.waited_s + (state.exchange_s - state.end_s), now_s - state.exchange_s
        problem = Problem.of_losses(state.loss) if worker in self._with_loss else Problem.NONE
        gradients_sq = state.gradient_sq, self._numerics.mean_gradient_sq
        step_info = state.machine.step_info(
            result, computed, wait_s, comm_s, state.loss, problem=problem, gradients_sq=gradients_sq
        )
        self.coordinator.exchanged(now_s, step_info)
        if problem:
            self._look_at(step_info)
        self._watch(now_s, self.coordinator)
        return step_info

    def _continue(self, worker: int) -> None:
        """Let a worker continue, once it has made its step."""
        state = self._workers[worker]
        if state.has_left:
            self._participate(worker)
        elif state.step_s:
            self._loop.after(state.step_s, self._next, worker)
        else:
            self._next(worker)

    def _next(self, worker: int) -> None:
        if self._workers[worker].machine.at_halt(self._must_halt()):
            self._halt(worker, self._after_halt, worker)
        else:
            self._after_halt(worker)

    def _after_halt(self, worker: int) -> None:
        machine = self._workers[worker].machine
        if machine.stopped or (self.coordinator.stopping and not machine.in_step):  # asynchronous ones hear it at once
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

    def _judge(self, version: int, samples: int, now_s: float) -> Judged:
        return now_s, version, samples, *self._numerics.evaluate()

    def _conclude(self, judged: Judged) -> None:
        self.coordinator.evaluated(*judged)

    def _time_has_come(self) -> None:
        self.coordinator.passed(self._loop.now_s)
