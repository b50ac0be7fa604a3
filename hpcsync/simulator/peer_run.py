"""A run without servers in virtual time: workers with weights of their own, and what they exchange with each other.

A worker is a chain of events: it computes, exchanges if it is time to, reports, and goes on. Who exchanges with whom
follows from the seed, what is computed is in `peer_arithmetic`, and the bookkeeping is the same `PeerCoordinator` that
real ranks have. It hears of everything at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from hpcsync.config.job import Job, Script
from hpcsync.core.coordinator import Recorder
from hpcsync.core.device_speed import Device
from hpcsync.core.peer_coordinator import PeerCoordinator, StepInfo
from hpcsync.simulator.peer_numerics import Judged, apart
from hpcsync.simulator.peer_transfers import Workers
from hpcsync.trace.schema import NO_PEER
from hpcsync.training.lr_schedule import EvaluationSchedule, worker_rate
from hpcsync.workloads.registry import Workload

Watch = Callable[[float, PeerCoordinator], None]


class _PeerWorker:
    """Where a worker is in its chain. iteration: that it computes, or has computed last."""

    __slots__ = ("begin_s", "device", "end_s", "has_left", "iteration", "loss")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.has_left = False
        self.iteration = 0
        self.begin_s = 0.0
        self.end_s = 0.0
        self.loss = math.nan


class PeerSimulation(ABC):
    """One run of a job.

    watch: called after every iteration, for whoever wants to show how far the run is, or to end it by raising.
    attributes: that a trace is to have besides those of every run.
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
        """Until every worker has left; the final weights are then in the workload's model, and evaluated."""
        for worker in range(len(self._workers)):
            self._loop.after(0.0, self._begin, worker)
        if self._job.stop.seconds is not None:
            self._loop.at(self._job.stop.seconds, self._time_is_up)
        self._loop.run()
        coordinator = self.coordinator
        if coordinator.active:
            raise RuntimeError(f"workers {sorted(coordinator.active)} wait for ever: nothing can happen any more")
        self._take_in_the_rest(coordinator.updated_s)
        self._numbers.finish()
        if self._evaluated:
            self._evaluate(coordinator.updated_s)

    # ---- what the paradigm says ----

    @property
    @abstractmethod
    def _numbers(self) -> Judged:
        """The arithmetic."""

    @abstractmethod
    def _learn(self, worker: int, lr: float) -> float:
        """The worker's computation, over now; its mean loss."""

    @abstractmethod
    def _exchange(self, worker: int) -> None:
        """The worker has computed and is to exchange now: it reports, and goes on, when that is over."""

    @abstractmethod
    def _enough(self, worker: int) -> bool:
        """Whether the worker's iteration, which it has reported, is its last."""

    def _n_samples(self, worker: int) -> int:
        """Of the worker's iteration."""
        return self._batch_size

    def _gone(self, worker: int) -> None:  # noqa: B027
        """The worker computes no more."""

    def _take_in_the_rest(self, now_s: float) -> None:  # noqa: B027
        """All have left, the last of them now, and nothing is under way any more."""

    # ---- a worker's chain ----

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
        """The worker's iteration is over, and it goes on."""
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
        """Seconds that the worker has computed in its iteration, and that it has waited before the end of that."""
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
        self._gone(worker)

    # ---- the run ----

    def _evaluate_if_due(self) -> None:
        coordinator = self.coordinator
        if not coordinator.stopping and self._evaluations.begin_if_due(coordinator.samples):
            self._evaluate(self._loop.now_s)

    def _evaluate(self, now_s: float) -> None:
        """In no time."""
        coordinator = self.coordinator
        judged = self._numbers.evaluate()
        coordinator.evaluated(now_s, coordinator.version, coordinator.samples, *judged)

    def _time_is_up(self) -> None:
        self.coordinator.passed(self._loop.now_s)


class WithReplicas(PeerSimulation):
    """Every worker has weights of its own."""

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        self._replicas = apart(job, workload)

    @property
    def _numbers(self) -> Judged:
        return self._replicas

    def _learn(self, worker: int, lr: float) -> float:
        return self._replicas.learn(worker, lr)

    def _weight(self, worker: int) -> float:
        return self._replicas.weight(worker)
