"""Synchronous runs without servers in virtual time: all-reduce, local SGD and permutation gossip."""

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
from hpcsync.simulator.peer_numerics import Evaluable, Model, all_reduce_numerics
from hpcsync.simulator.peer_run import PeerSimulation, Watch, WithReplicas
from hpcsync.simulator.peer_transfers import Workers
from hpcsync.trace.schema import ALL_PEERS
from hpcsync.training import compressor
from hpcsync.training.flat_model import trainable
from hpcsync.training.lr_schedule import learning_rate
from hpcsync.training.speed_models import estimator, nominal_clock
from hpcsync.workloads.registry import Workload


class _SynchronousPeers(PeerSimulation):
    """Workers that exchange together, once the last of them is ready.

    Workers that have left take part and are always ready. All end after the same iteration: when it satisfies the
    stopping rule, which each of them counts, or when they have agreed in an exchange on the coordinator's stop.
    Evaluations take place at exchanges.
    """

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        self._n_pending = len(self._workers)  # workers that are not ready
        self._ready: list[int] = []  # workers that have computed and are blocked
        self._computed_workers: set[int] = set()  # workers that have computed since the last exchange
        self._contributing: Sequence[int] = range(len(self._workers))  # workers contributing to the last exchange
        self._began_s = 0.0
        self._stop_agreed = False
        self._lockstep = Lockstep(job)
        self._n_steps = self._n_samples_computed = 0  # of all workers, since the last exchange

    @abstractmethod
    def _exchange_all(self) -> None:
        """Begin the exchange of all workers; `_continue` must follow for each of them."""

    def _computed(self, worker: int) -> None:
        self._computed_workers.add(worker)
        self._n_steps += 1
        self._n_samples_computed += self._n_samples(worker)
        super()._computed(worker)

    def _exchange(self, worker: int) -> None:
        self._ready.append(worker)
        self._ready_or_left()

    def _worker_left(self, worker: int) -> None:
        self._ready_or_left()

    def _ready_or_left(self) -> None:
        self._n_pending -= 1
        if self._n_pending == 0 and self._ready:
            self._n_pending = len(self._workers)
            self._contributing, self._computed_workers = sorted(self._computed_workers), set()
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
        """Do nothing: evaluations take place at exchanges."""

    @property
    def _is_last(self) -> bool:
        """True if the exchange in progress is the last one."""
        return self._lockstep.enough() or self._stop_agreed

    def _evaluate_at_exchange(self) -> None:
        """Evaluate the weights being exchanged, if an evaluation is due and the run has not ended."""
        lockstep = self._lockstep
        if not self._is_last and self._evaluations.begin_if_due(lockstep.samples):
            evaluation = self._numerics.evaluate()
            self.coordinator.evaluated(self._loop.now_s, lockstep.updates, lockstep.samples, *evaluation)

    def _finish_exchange(self) -> None:
        """End the exchange for all workers at the same time."""
        staying = [worker for worker, state in enumerate(self._workers) if not state.has_left]
        n_received, began_s = len(self._contributing) - 1, self._began_s
        moved = {worker: self._moved_bytes(worker) for worker in staying}
        self._divide_batches(
            [self._report(worker, ALL_PEERS, moved[worker], n_received, began_s) for worker in staying]
        )
        self._n_pending = len(staying)
        for worker in staying:
            self._continue(worker)

    def _moved_bytes(self, worker: int) -> int:
        """Return the bytes that the worker has sent."""
        return self._links.all_reduce_bytes

    def _divide_batches(self, infos: Sequence[StepInfo]) -> None:
        """Divide the next batches, after all step infos and before the next iteration."""


class AllReduceSimulation(_SynchronousPeers):
    """All-reduce that begins when the last gradient is ready.

    Overlap with the backward pass on real ranks is not modelled, and exchanging the speed estimates takes no time.
    All workers encode compressed gradients at that moment; payloads are all-gathered in a ring, and for PowerSGD the
    means of two factors are formed.
    """

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        self._replica = all_reduce_numerics(job, workload)
        self._lr = learning_rate(job)
        self._division = create_batch_division(job)
        self._estimators = [estimator(job, worker, nominal_clock()) for worker in range(len(self._workers))]
        compression = compressor.of_job(job, trainable(workload.model))
        self._averages = compression is not None and compression.averages
        self._encode_s = encode_s(job, self._links.size_bytes)
        self._payload_bytes: dict[int, int] = {}  # worker -> bytes of its compressed gradient

    @property
    def _numerics(self) -> Evaluable:
        return self._replica

    def _n_samples(self, worker: int) -> int:
        return self._batch_size if self._division is None else self._division.work(worker)[1]

    def _learn(self, worker: int, lr: float) -> float:
        if self._division is None:
            return self._replica.contribute(worker)
        return self._replica.contribute(worker, Work(*self._division.work(worker)), self._division.weight(worker))

    def _exchange_all(self) -> None:
        if sizes := self._replica.compress(self._contributing):
            self._payload_bytes = dict(zip(self._contributing, sizes, strict=True))
            self._loop.after(self._encode_s, self._encoded)
        else:
            self._links.all_reduce(self._reduced)

    def _encoded(self) -> None:
        payload_bytes = [self._payload_bytes.get(worker, 0) for worker in range(len(self._workers))]
        if self._averages:
            self._links.all_reduce_twice(max(payload_bytes), self._reduced)
        else:
            self._links.all_gather(payload_bytes, self._reduced)

    def _moved_bytes(self, worker: int) -> int:
        if not self._payload_bytes:
            return super()._moved_bytes(worker)
        sent = ring_bytes if self._averages else broadcast_bytes
        return sent(self._payload_bytes[worker], len(self._workers))

    def _reduced(self) -> None:
        coordinator = self.coordinator  # it has not received this step yet
        lr = self._lr(coordinator.samples, coordinator.version, len(self._workers))
        correction = 1.0
        if self._division is not None:
            n_samples = sum(map(self._n_samples, self._contributing))
            correction = self._division.correction(len(self._contributing), n_samples)
        self._replica.step(self._contributing, lr, correction)
        self._evaluate_at_exchange()
        self._finish_exchange()

    def _divide_batches(self, infos: Sequence[StepInfo]) -> None:
        if self._division is None or self._is_last:
            return
        estimates: list[Estimate | None] = [None] * len(self._workers)
        for step_info in infos:
            estimator = self._estimators[step_info.worker]
            assert estimator is not None
            estimates[step_info.worker] = estimator.observe(step_info.batch_size, step_info.compute_s, step_info.comm_s)
        if allocated := self._division.exchanged(len(self._contributing), lambda: estimates):
            self.coordinator.allocated(self._loop.now_s, self._lockstep.updates, allocated)


class AveragingSimulation(WithReplicas, _SynchronousPeers):
    """Local SGD: every `steps` iterations all workers get the mean of the weights, by the same all-reduce."""

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        assert isinstance(job.paradigm, LocalSgdOptions)
        self._period = job.paradigm.steps

    def _exchange_all(self) -> None:
        self._evaluate_at_exchange()
        self._links.all_reduce(self._reduced)

    def _reduced(self) -> None:
        self._replicas.average(self._contributing)
        self._finish_exchange()


class PermutationSimulation(WithReplicas, _SynchronousPeers):
    """Permutation gossip: each worker sends to one worker, receives from one, and continues after both transfers."""

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        assert isinstance(job.paradigm, GossipOptions)
        self._period = job.paradigm.period
        self._peers = create_peer_selection(job)
        self._round = 0
        self._targets: Sequence[int] = ()  # worker -> its target in this round
        self._incoming: list[Model] = [None] * len(self._workers)
        self._under_way = [0] * len(self._workers)  # worker -> its transfers in transit

    def _exchange_all(self) -> None:
        self._evaluate_at_exchange()
        self._round += 1
        self._targets = self._peers.permutation(self._round)
        for worker, target in enumerate(self._targets):
            if target == worker:
                self._loop.after(0.0, self._finish_worker, worker)
            else:
                self._incoming[target] = self._replicas.snapshot(worker)
                self._under_way[worker] = 2
                self._links.send(worker, target, self._arrived, worker, target)

    def _arrived(self, source: int, target: int) -> None:
        for worker in (source, target):
            self._under_way[worker] -= 1
            if self._under_way[worker] == 0:
                self._replicas.mix(worker, self._incoming[worker])
                self._finish_worker(worker)

    def _finish_worker(self, worker: int) -> None:
        if self._workers[worker].has_left:
            self._ready_or_left()
            return
        peer, size_bytes = self._targets[worker], self._links.size_bytes
        moved, n_received = (0, 0) if peer == worker else (size_bytes, 1)
        self._report(worker, peer, moved, n_received, self._began_s)
        self._continue(worker)
