"""A run without servers in virtual time: workers with weights of their own, and what they exchange with each other.

A worker is a chain of events: it computes, exchanges if it is time to, reports, and goes on. Who exchanges with whom
follows from the seed, what is computed is in `peer_arithmetic`, and the bookkeeping is the same `PeerCoordinator` that
real ranks have. It hears of everything at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from hpcsync.coordinator import Recorder
from hpcsync.devices import Device
from hpcsync.job import Job, Script
from hpcsync.job_paradigms import AllReduce, Gossip, LocalSgd
from hpcsync.learning.schedule import EvaluationSchedule, learning_rate, worker_rate
from hpcsync.learning.workloads import Workload
from hpcsync.peers import Exchanged, Lockstep, PeerCoordinator, drawing, taken_in
from hpcsync.simulator.links import Workers
from hpcsync.simulator.peer_arithmetic import Judged, Model, Parcel, apart, together
from hpcsync.traces.schema import EVERYBODY, NOBODY

Watch = Callable[[float, PeerCoordinator], None]


class _Worker:
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
    """

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
        self._workers = [_Worker(device) for device in workers.devices]
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
            self._loop.after(state.device.seconds(now_s), self._computed, worker)

    def _computed(self, worker: int) -> None:
        state = self._workers[worker]
        state.end_s = self._loop.now_s
        before = state.iteration - 1
        state.loss = self._learn(worker, self._rate(before * self._batch_size, before))
        if state.iteration % self._period == 0:
            self._exchange(worker)
        else:
            self._ended(worker)

    def _ended(self, worker: int, *, peer: int = NOBODY, wire_bytes: int = 0, n_received: int = 0) -> None:
        """The worker's iteration is over, and it goes on."""
        self._report(worker, peer, wire_bytes, n_received, self._workers[worker].end_s)
        self._evaluate_if_due()
        self._go_on(worker)

    def _report(self, worker: int, peer: int, wire_bytes: int, n_received: int, waited_until_s: float) -> None:
        now_s, state = self._loop.now_s, self._workers[worker]
        report = Exchanged(
            worker=worker,
            iteration=state.iteration,
            peer=peer,
            begin_s=state.begin_s,
            end_s=state.end_s,
            compute_s=state.end_s - state.begin_s,
            wait_s=waited_until_s - state.end_s,
            comm_s=now_s - waited_until_s,
            batch_size=self._batch_size,
            loss=state.loss,
            wire_bytes=wire_bytes,
            n_received=n_received,
            weight=self._weight(worker),
        )
        self.coordinator.exchanged(now_s, report)
        self._watch(now_s, self.coordinator)

    def _weight(self, worker: int) -> float:
        return 1.0

    def _go_on(self, worker: int) -> None:
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
        if not coordinator.stopping and self._evaluations.due(coordinator.samples):
            self._evaluations.begun(coordinator.samples)
            self._evaluate(self._loop.now_s)

    def _evaluate(self, now_s: float) -> None:
        """In no time."""
        coordinator = self.coordinator
        judged = self._numbers.evaluate()
        coordinator.evaluated(now_s, coordinator.version, coordinator.samples, *judged)

    def _time_is_up(self) -> None:
        self.coordinator.passed(self._loop.now_s)


# ---- in step ----


class _InStep(PeerSimulation):
    """All exchange at once, when the last is ready to. Who has left takes part, and is always ready.

    They end after the same iteration: when that is enough, as each of them counts it, or once they have agreed, as they
    exchanged, that the coordinator wants them to. They are evaluated as they exchange.
    """

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        self._n_absent = len(self._workers)  # not ready
        self._ready: list[int] = []  # that have computed, and wait
        self._learned: set[int] = set()  # that have computed since the last exchange
        self._contributing: Sequence[int] = range(len(self._workers))  # to the last exchange
        self._began_s = 0.0
        self._stop_agreed = False
        self._lockstep = Lockstep(job)
        self._n_steps = 0  # of all workers since the last exchange

    @abstractmethod
    def _exchange_all(self) -> None:
        """Everybody is ready. Everybody is to be said `_done` afterwards."""

    def _computed(self, worker: int) -> None:
        self._learned.add(worker)
        self._n_steps += 1
        super()._computed(worker)

    def _exchange(self, worker: int) -> None:
        self._ready.append(worker)
        self._arrive()

    def _gone(self, worker: int) -> None:
        self._arrive()

    def _arrive(self) -> None:
        self._n_absent -= 1
        if self._n_absent == 0 and self._ready:
            self._n_absent = len(self._workers)
            self._contributing, self._learned = sorted(self._learned), set()
            self._lockstep.exchanged(len(self._contributing), self._n_steps, self._n_steps * self._batch_size)
            self._n_steps = 0
            self._ready = []
            self._began_s = self._loop.now_s
            self._stop_agreed = self.coordinator.stopping
            self._exchange_all()

    def _enough(self, worker: int) -> bool:
        since = self._workers[worker].iteration % self._period
        return self._lockstep.enough(since) or (since == 0 and self._stop_agreed)

    def _evaluate_if_due(self) -> None:
        """Not whenever somebody reports."""

    def _look(self) -> None:
        """At the weights that are being exchanged, if an evaluation is due and this is not the end."""
        lockstep, due = self._lockstep, self._evaluations.due(self._lockstep.samples)
        if due and not (lockstep.enough() or self._stop_agreed):
            self._evaluations.begun(lockstep.samples)
            judged = self._numbers.evaluate()
            self.coordinator.evaluated(self._loop.now_s, lockstep.updates, lockstep.samples, *judged)

    def _all_done(self) -> None:
        """The exchange is over for everybody at the same time."""
        staying = [worker for worker, state in enumerate(self._workers) if not state.has_left]
        n_received = len(self._contributing) - 1
        for worker in staying:
            self._report(worker, EVERYBODY, self._links.all_reduce_bytes, n_received, self._began_s)
        self._n_absent = len(staying)
        for worker in staying:
            self._go_on(worker)


class AllReduceSimulation(_InStep):
    """The all-reduce begins when the last gradient is ready: what of it real ranks hide behind their backward passes is
    not modelled."""

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        self._together = together(job, workload)
        self._lr = learning_rate(job)

    @property
    def _numbers(self) -> Judged:
        return self._together

    def _learn(self, worker: int, lr: float) -> float:
        return self._together.contribute(worker)

    def _exchange_all(self) -> None:
        self._links.all_reduce(self._reduced)

    def _reduced(self) -> None:
        coordinator = self.coordinator  # that has not heard of this step
        lr = self._lr(coordinator.samples, coordinator.version, len(self._workers))
        self._together.step(self._contributing, lr)
        self._look()
        self._all_done()


class _WithReplicas(PeerSimulation):
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


class AveragingSimulation(_WithReplicas, _InStep):
    """Local SGD: now and then everybody gets the mean, by the same all-reduce."""

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        assert isinstance(job.paradigm, LocalSgd)
        self._period = job.paradigm.steps

    def _exchange_all(self) -> None:
        self._look()
        self._links.all_reduce(self._reduced)

    def _reduced(self) -> None:
        self._replicas.average(self._contributing)
        self._all_done()


class PermutationSimulation(_WithReplicas, _InStep):
    """Gossip in step: everybody gives to one and is given by one, and goes on when both transfers are over."""

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        assert isinstance(job.paradigm, Gossip)
        self._period = job.paradigm.period
        self._peers = drawing(job)
        self._round = 0
        self._targets: Sequence[int] = ()  # worker -> whom it gives to in this round
        self._given: list[Model] = [None] * len(self._workers)
        self._under_way = [0] * len(self._workers)  # transfers of each worker

    def _exchange_all(self) -> None:
        self._look()
        self._round += 1
        self._targets = self._peers.permutation(self._round)
        for worker, target in enumerate(self._targets):
            if target == worker:
                self._loop.after(0.0, self._over, worker)
            else:
                self._given[target] = self._replicas.shown(worker)
                self._under_way[worker] = 2
                self._links.send(worker, target, self._arrived, worker, target)

    def _arrived(self, source: int, target: int) -> None:
        for worker in (source, target):
            self._under_way[worker] -= 1
            if self._under_way[worker] == 0:
                self._replicas.mix(worker, self._given[worker])
                self._over(worker)

    def _over(self, worker: int) -> None:
        if self._workers[worker].has_left:
            self._arrive()
            return
        peer, size_bytes = self._targets[worker], self._links.size_bytes
        moved, n_received = (0, 0) if peer == worker else (size_bytes, 1)
        self._report(worker, peer, moved, n_received, self._began_s)
        self._go_on(worker)


# ---- whenever it suits the worker ----


class _Free(_WithReplicas):
    """Gossip without waiting. A worker ends with the iteration at whose end the coordinator wants it to."""

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        assert isinstance(job.paradigm, Gossip)
        self._period = job.paradigm.period
        self._peers = drawing(job)

    def _drawn(self, worker: int) -> int:
        return self._peers.drawn(worker, self._workers[worker].iteration // self._period, self._weight(worker))

    def _enough(self, worker: int) -> bool:
        return self.coordinator.stopping


class PullSimulation(_Free):
    """A worker shows its weights after every step, and asks another for those that it showed last."""

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        start = self._replicas.shown(0)
        self._published = [start] * len(self._workers)  # replaced, never changed

    def _learn(self, worker: int, lr: float) -> float:
        loss = super()._learn(worker, lr)
        self._published[worker] = self._replicas.shown(worker)
        return loss

    def _exchange(self, worker: int) -> None:
        peer = self._drawn(worker)
        if peer == worker:
            self._ended(worker, peer=worker)
        else:
            self._links.message(self._asked, worker, peer)

    def _asked(self, worker: int, peer: int) -> None:
        self._links.send(peer, worker, self._answered, worker, peer, self._published[peer])

    def _answered(self, worker: int, peer: int, model: Model) -> None:
        self._replicas.mix(worker, model)
        self._ended(worker, peer=peer, wire_bytes=self._links.size_bytes, n_received=1)


class PushSimulation(_Free):
    """A worker gives to another, and when that is acknowledged it takes in what has come for itself.

    If it may not give it is as if it had drawn itself.
    """

    def _exchange(self, worker: int) -> None:
        peer = self._drawn(worker)
        if peer == worker:
            self._take_in(worker, peer)
        else:
            self._links.send(worker, peer, self._arrived, worker, peer, self._replicas.push(worker))

    def _arrived(self, worker: int, peer: int, parcel: Parcel) -> None:
        self._replicas.arrive(peer, parcel)
        self._links.message(self._take_in, worker, peer)

    def _take_in(self, worker: int, peer: int) -> None:
        n_received = self._replicas.absorb(worker, drew_itself=peer == worker)
        moved = 0 if peer == worker else self._links.size_bytes
        self._ended(worker, peer=peer, wire_bytes=moved, n_received=n_received)

    def _take_in_the_rest(self, now_s: float) -> None:
        """What came for workers after their last round. Nobody leaves before what it gave away has arrived."""
        for worker, state in enumerate(self._workers):
            if n_received := self._replicas.absorb(worker, drew_itself=False):
                rest = taken_in(worker, state.iteration, now_s, n_received, self._weight(worker))
                self.coordinator.exchanged(now_s, rest)


def simulation(
    job: Job,
    workload: Workload,
    workers: Workers,
    trace: Recorder,
    watch: Watch = lambda now_s, coordinator: None,
) -> PeerSimulation:
    """The simulation of this job, which has no servers."""
    kind: type[PeerSimulation]
    match job.paradigm:
        case AllReduce():
            kind = AllReduceSimulation
        case LocalSgd():
            kind = AveragingSimulation
        case Gossip(mode="permutation"):
            kind = PermutationSimulation
        case Gossip(mode="pull"):
            kind = PullSimulation
        case _:
            kind = PushSimulation
    return kind(job, workload, workers, trace, watch)
