"""Workers without servers that exchange all at once, in virtual time: all-reduce, local SGD, permutations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from hpcsync.config.job import Job
from hpcsync.config.paradigms import GossipOptions, LocalSgdOptions
from hpcsync.core.coordinator import Recorder
from hpcsync.core.device_speed import encode_s
from hpcsync.core.peer_coordinator import (
    Lockstep,
    StepInfo,
    broadcast_bytes,
    create_batch_division,
    create_peer_selection,
    ring_bytes,
)
from hpcsync.planning.batch_allocation import Estimate
from hpcsync.simulator.gradients import Work
from hpcsync.simulator.peer_numerics import Judged, Model, together
from hpcsync.simulator.peer_run import PeerSimulation, Watch, WithReplicas
from hpcsync.simulator.peer_transfers import Workers
from hpcsync.trace.schema import ALL_PEERS
from hpcsync.training import compressor
from hpcsync.training.flat_model import trainable
from hpcsync.training.lr_schedule import learning_rate
from hpcsync.training.speed_models import estimator, nominal_clock
from hpcsync.workloads.registry import Workload


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
        self._n_steps = self._n_samples_computed = 0  # of all workers since the last exchange

    @abstractmethod
    def _exchange_all(self) -> None:
        """Everybody is ready. Everybody is to be said `_done` afterwards."""

    def _computed(self, worker: int) -> None:
        self._learned.add(worker)
        self._n_steps += 1
        self._n_samples_computed += self._n_samples(worker)
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
            self._lockstep.exchanged(len(self._contributing), self._n_steps, self._n_samples_computed)
            self._n_steps = self._n_samples_computed = 0
            self._ready = []
            self._began_s = self._loop.now_s
            self._stop_agreed = self.coordinator.stopping
            self._exchange_all()

    def _enough(self, worker: int) -> bool:
        since = self._workers[worker].iteration % self._period
        return self._lockstep.enough(since) or (since == 0 and self._stop_agreed)

    def _evaluate_if_due(self) -> None:
        """Not whenever somebody reports."""

    @property
    def _is_last(self) -> bool:
        """Whether the exchange under way is the last one."""
        return self._lockstep.enough() or self._stop_agreed

    def _look(self) -> None:
        """At the weights that are being exchanged, if an evaluation is due and this is not the end."""
        lockstep = self._lockstep
        if not self._is_last and self._evaluations.begin_if_due(lockstep.samples):
            judged = self._numbers.evaluate()
            self.coordinator.evaluated(self._loop.now_s, lockstep.updates, lockstep.samples, *judged)

    def _all_done(self) -> None:
        """The exchange is over for everybody at the same time."""
        staying = [worker for worker, state in enumerate(self._workers) if not state.has_left]
        n_received, began_s = len(self._contributing) - 1, self._began_s
        moved = {worker: self._moved_bytes(worker) for worker in staying}
        self._share_out([self._report(worker, ALL_PEERS, moved[worker], n_received, began_s) for worker in staying])
        self._n_absent = len(staying)
        for worker in staying:
            self._continue(worker)

    def _moved_bytes(self, worker: int) -> int:
        """That the worker has sent."""
        return self._links.all_reduce_bytes

    def _share_out(self, infos: Sequence[StepInfo]) -> None:
        """All have reported their iterations, and nobody has begun the next."""


class AllReduceSimulation(_InStep):
    """The all-reduce begins when the last gradient is ready: what of it real ranks hide behind their backward passes is
    not modelled. What workers say of their speeds takes no time.

    Where gradients are compressed all begin to compress them then. Payloads are gathered in a ring, and of PowerSGD's
    factors two means are formed.
    """

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        self._together = together(job, workload)
        self._lr = learning_rate(job)
        self._division = create_batch_division(job)
        self._estimators = [estimator(job, worker, nominal_clock()) for worker in range(len(self._workers))]
        compression = compressor.of_job(job, trainable(workload.model))
        self._averages = compression is not None and compression.averages
        self._encode_s = encode_s(job, self._links.size_bytes)
        self._given_bytes: dict[int, int] = {}  # of compressed gradients: worker -> bytes that it gives the others

    @property
    def _numbers(self) -> Judged:
        return self._together

    def _n_samples(self, worker: int) -> int:
        return self._batch_size if self._division is None else self._division.work(worker)[1]

    def _learn(self, worker: int, lr: float) -> float:
        if self._division is None:
            return self._together.contribute(worker)
        return self._together.contribute(worker, Work(*self._division.work(worker)), self._division.weight(worker))

    def _exchange_all(self) -> None:
        if sizes := self._together.compress(self._contributing):
            self._given_bytes = dict(zip(self._contributing, sizes, strict=True))
            self._loop.after(self._encode_s, self._encoded)
        else:
            self._links.all_reduce(self._reduced)

    def _encoded(self) -> None:
        given = [self._given_bytes.get(worker, 0) for worker in range(len(self._workers))]
        if self._averages:
            self._links.all_reduce_twice(max(given), self._reduced)
        else:
            self._links.all_gather(given, self._reduced)

    def _moved_bytes(self, worker: int) -> int:
        if not self._given_bytes:
            return super()._moved_bytes(worker)
        sent = ring_bytes if self._averages else broadcast_bytes
        return sent(self._given_bytes[worker], len(self._workers))

    def _reduced(self) -> None:
        coordinator = self.coordinator  # that has not heard of this step
        lr = self._lr(coordinator.samples, coordinator.version, len(self._workers))
        correction = 1.0
        if self._division is not None:
            n_samples = sum(map(self._n_samples, self._contributing))
            correction = self._division.correction(len(self._contributing), n_samples)
        self._together.step(self._contributing, lr, correction)
        self._look()
        self._all_done()

    def _share_out(self, infos: Sequence[StepInfo]) -> None:
        if self._division is None or self._is_last:
            return
        said: list[Estimate | None] = [None] * len(self._workers)
        for step_info in infos:
            estimator = self._estimators[step_info.worker]
            assert estimator is not None
            said[step_info.worker] = estimator.observe(step_info.batch_size, step_info.compute_s, step_info.comm_s)
        if allocated := self._division.exchanged(len(self._contributing), lambda: said):
            self.coordinator.allocated(self._loop.now_s, self._lockstep.updates, allocated)


class AveragingSimulation(WithReplicas, _InStep):
    """Local SGD: now and then everybody gets the mean, by the same all-reduce."""

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        assert isinstance(job.paradigm, LocalSgdOptions)
        self._period = job.paradigm.steps

    def _exchange_all(self) -> None:
        self._look()
        self._links.all_reduce(self._reduced)

    def _reduced(self) -> None:
        self._replicas.average(self._contributing)
        self._all_done()


class PermutationSimulation(WithReplicas, _InStep):
    """Gossip in step: everybody gives to one and is given by one, and goes on when both transfers are over."""

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        assert isinstance(job.paradigm, GossipOptions)
        self._period = job.paradigm.period
        self._peers = create_peer_selection(job)
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
        self._continue(worker)
