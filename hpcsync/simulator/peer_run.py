"""Simulated run without servers: workers with weights of their own, and their exchanges.

A worker is a chain of events: it computes, exchanges if an exchange is due, sends its step info and continues. The seed
determines which workers exchange with each other; `peer_numerics` computes the weights; records and the stopping rule
are in the same `PeerCoordinator` that real ranks use, which receives all information without delay.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from hpcsync.config.job import Job, Script
from hpcsync.core.coordinator import Recorder
from hpcsync.core.device_speed import Device
from hpcsync.core.peer_coordinator import PeerCoordinator, StepInfo
from hpcsync.simulator.peer_numerics import Evaluable, replica_numerics
from hpcsync.simulator.peer_transfers import Workers
from hpcsync.trace.schema import NO_PEER
from hpcsync.training.lr_schedule import EvaluationSchedule, worker_rate
from hpcsync.workloads.registry import Workload

Watch = Callable[[float, PeerCoordinator], None]


class _PeerWorker:
    """State of a worker's event chain; `iteration` is the one in progress, or the last one computed."""

    __slots__ = ("begin_s", "device", "end_s", "has_left", "iteration", "loss")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.has_left = False
        self.iteration = 0
        self.begin_s = 0.0
        self.end_s = 0.0
        self.loss = math.nan


class PeerSimulation(ABC):
    """Simulation of one run of a job without servers.

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
        self._rate = worker_rate(job)
        self._loop, self._links = workers.loop, workers.links
        self._workers = [_PeerWorker(device) for device in workers.devices]
        self._evaluated = workload.evaluate is not None
        self._evaluations = EvaluationSchedule(job.evaluation.every_samples if self._evaluated else 0)
        self._period = 1

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
            self._evaluate(coordinator.updated_s)

    # ---- defined by the paradigm ----

    @property
    @abstractmethod
    def _numerics(self) -> Evaluable:
        """Numerics of the run."""

    @abstractmethod
    def _learn(self, worker: int, lr: float) -> float:
        """Carry out the worker's computation that ends now; return its mean loss."""

    @abstractmethod
    def _exchange(self, worker: int) -> None:
        """Begin the worker's exchange after its computation; the worker then sends its step info and continues."""

    @abstractmethod
    def _enough(self, worker: int) -> bool:
        """Return True if the iteration that the worker has just finished is its last."""

    def _n_samples(self, worker: int) -> int:
        """Return the number of samples of the worker's iteration."""
        return self._batch_size

    def _worker_left(self, worker: int) -> None:  # noqa: B027
        """Handle a worker that computes no more."""

    def _absorb_remaining(self, now_s: float) -> None:  # noqa: B027
        """Absorb received models after all workers have left and nothing is in transit."""

    # ---- event chain of a worker ----

    def _begin(self, worker: int) -> None:
        now_s, state = self._loop.now_s, self._workers[worker]
        if state.device.leaves(now_s):
            self._leave(worker)
        else:
            state.iteration += 1
            state.begin_s = now_s
            load = self._n_samples(worker) / self._batch_size
            self._loop.after(state.device.seconds(now_s, load), self._computed, worker)

    def _computed(self, worker: int) -> None:
        state = self._workers[worker]
        state.end_s = self._loop.now_s
        before = state.iteration - 1
        state.loss = self._learn(worker, self._rate(before * self._batch_size, before))
        if state.iteration % self._period == 0:
            self._exchange(worker)
        else:
            self._ended(worker)

    def _ended(self, worker: int, *, peer: int = NO_PEER, wire_bytes: int = 0, n_received: int = 0) -> None:
        """End the worker's iteration and continue."""
        self._report(worker, peer, wire_bytes, n_received, self._workers[worker].end_s)
        self._evaluate_if_due()
        self._continue(worker)

    def _report(self, worker: int, peer: int, wire_bytes: int, n_received: int, waited_until_s: float) -> StepInfo:
        now_s, state = self._loop.now_s, self._workers[worker]
        computed_s, waited_s = self._spent(worker)
        step_info = StepInfo(
            worker=worker,
            iteration=state.iteration,
            peer=peer,
            begin_s=state.begin_s,
            end_s=state.end_s,
            compute_s=computed_s,
            wait_s=waited_s + (waited_until_s - state.end_s),
            comm_s=now_s - waited_until_s,
            batch_size=self._n_samples(worker),
            loss=state.loss,
            wire_bytes=wire_bytes,
            n_received=n_received,
            weight=self._weight(worker),
        )
        self.coordinator.exchanged(now_s, step_info)
        self._watch(now_s, self.coordinator)
        return step_info

    def _spent(self, worker: int) -> tuple[float, float]:
        """Return the worker's computation time and waiting time in its iteration before `end_s`, in seconds."""
        state = self._workers[worker]
        return state.end_s - state.begin_s, 0.0

    def _weight(self, worker: int) -> float:
        return 1.0

    def _continue(self, worker: int) -> None:
        if self._enough(worker):
            self._leave(worker)
        else:
            self._begin(worker)

    def _leave(self, worker: int) -> None:
        self._workers[worker].has_left = True
        self.coordinator.left(self._loop.now_s, worker)
        self._evaluate_if_due()
        self._worker_left(worker)

    # ---- the run ----

    def _evaluate_if_due(self) -> None:
        coordinator = self.coordinator
        if not coordinator.stopping and self._evaluations.begin_if_due(coordinator.samples):
            self._evaluate(self._loop.now_s)

    def _evaluate(self, now_s: float) -> None:
        """Evaluate in zero virtual time."""
        coordinator = self.coordinator
        evaluation = self._numerics.evaluate()
        coordinator.evaluated(now_s, coordinator.version, coordinator.samples, *evaluation)

    def _time_limit_reached(self) -> None:
        self.coordinator.passed(self._loop.now_s)


class WithReplicas(PeerSimulation):
    """Simulation in which every worker has weights of its own."""

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        self._replicas = replica_numerics(job, workload)

    @property
    def _numerics(self) -> Evaluable:
        return self._replicas

    def _learn(self, worker: int, lr: float) -> float:
        return self._replicas.learn(worker, lr)

    def _weight(self, worker: int) -> float:
        return self._replicas.weight(worker)
