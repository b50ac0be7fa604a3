"""Synchronous runs without servers in virtual time: all-reduce, local SGD and synchronous gossip."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

from hpcsync.config.job import Job
from hpcsync.core.device_speed import encode_s
from hpcsync.core.peer_coordinator import (
    broadcast_bytes,
    create_batch_division,
    default_bucket_bytes,
    gradient_buckets,
    ring_bytes,
)
from hpcsync.paradigms.peer_method import PENDING, Agreed, ExchangeResult, StepCounts
from hpcsync.paradigms.records import ALL_PEERS, StepInfo
from hpcsync.planning.batch_allocation import Estimate
from hpcsync.simulator.gradients import Work
from hpcsync.simulator.peer_numerics import Model, NullNumerics, OneReplica, copied
from hpcsync.simulator.peer_run import PeerSimulation
from hpcsync.training import compressor
from hpcsync.training.flat_model import trainable
from hpcsync.training.local_update import Received
from hpcsync.training.speed_models import estimator, nominal_clock
from hpcsync.workloads.registry import Workload


class _SynchronousPeers(PeerSimulation):
    """Workers that exchange together, once the last of them is ready.

    Workers that have left take part and are always ready. Once all have left, they exchange the steps since their last
    exchange, if there are any. All workers end after the same iteration, as their machines count it or agree on the
    coordinator's stop.
    """

    def __init__(self, *of_every_run: Any) -> None:
        super().__init__(*of_every_run)
        self._ready: dict[int, StepCounts] = {}
        self._lr = math.nan  # of the sum
        self._contributing: Sequence[int] = ()  # workers contributing to the exchange

    def _exchange_all(self, agreed: Agreed) -> None:
        """Let all workers exchange; by default they have agreed without delay and exchange models."""
        self._resume_all(agreed)

    def agree(self, worker: int, counts: StepCounts) -> Any:
        """Agree once all workers are ready."""
        self._ready[worker] = counts
        return PENDING

    def sum(self, worker: int, counts: StepCounts, lr: float) -> Any:
        """Sum once all workers are ready."""
        self._ready[worker], self._lr = counts, lr
        return PENDING

    def _computed(self, worker: int) -> None:
        super()._computed(worker)
        self._exchange_if_ready()

    def _participate(self, worker: int) -> None:
        super()._participate(worker)
        self._exchange_if_ready()

    def _exchange_if_ready(self) -> None:
        if len(self._ready) < len(self._workers):
            return
        counts = [self._ready[worker] for worker in range(len(self._workers))]
        self._contributing = [worker for worker, of_worker in enumerate(counts) if of_worker.n_steps]
        if self._contributing:  # otherwise all have ended
            self._ready = {}
            for state in self._workers:
                state.exchange_s = self._loop.now_s
            self._exchange_all(Agreed.of(counts))

    def _resume_all(self, value: Any) -> None:
        self._resume_together((worker, value) for worker in range(len(self._workers)))


class AllReduceSimulation(_SynchronousPeers):
    """All-reduce that begins when the last gradient is ready, or with its first buckets during the backward pass.

    Exchanging the speed estimates takes no time.
    All workers encode compressed gradients at that moment; payloads are all-gathered in a ring, and for PowerSGD the
    means of two factors are formed.
    """

    _numerics: OneReplica | NullNumerics
    _create_numerics = OneReplica

    def __init__(self, job: Job, workload: Workload, *of_every_run: Any) -> None:
        super().__init__(job, workload, *of_every_run)
        self._division = create_batch_division(job)
        self._estimators = [estimator(job, worker, nominal_clock()) for worker in range(len(self._workers))]
        self._encode_s = encode_s(job, self._links.size_bytes)
        compute = job.cluster.compute if job.cluster.times_from is None else None  # recorded transfers did not overlap
        self._backward_share = 0.0 if compute is None else compute.backward_share
        size_bytes, chosen = self._links.size_bytes, self._workers[0].machine.method.bucket_bytes
        self._buckets = gradient_buckets(size_bytes, chosen or default_bucket_bytes(size_bytes, between_nodes=True))
        compression = compressor.of_job(job, trainable(workload.model))
        self._averages = compression is not None and compression.averages

    def _n_samples(self, worker: int) -> int:
        return self._batch_size if self._division is None else self._division.work(worker)[1]

    def _compute(self, worker: int) -> float:
        if self._division is None:
            return self._numerics.compute(worker)
        return self._numerics.compute(worker, Work(*self._division.work(worker)), self._division.weight(worker))

    def _exchange_all(self, agreed: Agreed) -> None:
        if sizes := self._numerics.compress(self._contributing):
            of_worker = dict(zip(self._contributing, sizes, strict=True))
            payload_bytes = [of_worker.get(worker, 0) for worker in range(len(self._workers))]
            self._loop.after(self._encode_s, self._encoded, agreed, payload_bytes)
        elif self._backward_share and self._contributing:
            self._overlap(agreed)
        else:
            self._links.all_reduce(self._reduced, agreed)

    def _overlap(self, agreed: Agreed) -> None:
        """Reduce bucket by bucket; a bucket begins when all workers have computed its gradients.

        A worker waits while it has computed all of its gradients and no bucket is under way.
        """
        states = [self._workers[worker] for worker in self._contributing]
        buckets = []
        for begin, end in self._buckets:
            left = self._backward_share * begin / self._links.size_bytes  # of the computation, after this bucket
            buckets.append((end - begin, max(state.end_s - left * (state.end_s - state.begin_s) for state in states)))
        times = self._links.overlapped_all_reduces_s(buckets)
        for state in states:
            ended_s, waited_s = -math.inf, 0.0
            for begin_s, next_ended_s in times:
                waited_s += max(0.0, begin_s - max(ended_s, state.end_s))
                ended_s = next_ended_s
            state.exchange_s = min(state.end_s + waited_s, ended_s)  # rounding may bring it beyond the end
        self._loop.at(times[-1][1], self._reduced, agreed)

    def _encoded(self, agreed: Agreed, payload_bytes: Sequence[int]) -> None:
        sent, n_workers = ring_bytes if self._averages else broadcast_bytes, len(self._workers)
        sent_bytes = [sent(n_bytes, n_workers) for n_bytes in payload_bytes]
        if self._averages:
            self._links.all_reduce_twice(max(payload_bytes), self._reduced, agreed, sent_bytes)
        else:
            self._links.all_gather(payload_bytes, self._reduced, agreed, sent_bytes)

    def _reduced(self, agreed: Agreed, sent_bytes: Sequence[int] = ()) -> None:
        """Step and resume; `sent_bytes` has what each worker has sent of its compressed gradient, if they are."""
        correction = 1.0
        if self._division is not None:
            correction = self._division.correction(agreed.n_contributing, agreed.n_samples)
        self._numerics.step(self._contributing, self._lr, correction)
        result = ExchangeResult(ALL_PEERS, self._links.all_reduce_bytes, agreed.n_contributing - 1)
        results = [result._replace(wire_bytes=n_bytes) for n_bytes in sent_bytes] or [result] * len(self._workers)
        self._resume_together((worker, (agreed, result)) for worker, result in enumerate(results))

    def _reported(self, infos: Sequence[StepInfo]) -> None:
        """Divide the next batches, after all step infos and before the next iteration."""
        if self._division is None or not infos or not (machine := self._workers[infos[0].worker].machine).in_step:
            return
        estimates: list[Estimate | None] = [None] * len(self._workers)
        for step_info in infos:
            estimator = self._estimators[step_info.worker]
            assert estimator is not None
            estimates[step_info.worker] = estimator.observe(
                step_info.batch_size, step_info.iteration_s, step_info.comm_s
            )
        if allocated := self._division.exchanged(len(self._contributing), lambda: estimates):
            self.coordinator.allocated(self._loop.now_s, machine.lockstep.updates, allocated)


class AveragingSimulation(_SynchronousPeers):
    """Local SGD: all workers get the mean of the weights, by the same all-reduce."""

    def average(self, worker: int, contributes: bool) -> Any:
        """Begin the all-reduce with the last worker; all call at the same time, in order."""
        if worker == len(self._workers) - 1:
            self._links.all_reduce(self._averaged)
        return PENDING

    def _averaged(self) -> None:
        self._resume_all((self._numerics.mean(self._contributing), self._links.all_reduce_bytes))


class SwapSimulation(_SynchronousPeers):
    """Synchronous gossip: a worker continues after its own transfers, of the models that it sends and receives."""

    def __init__(self, *of_every_run: Any) -> None:
        super().__init__(*of_every_run)
        n_workers = len(self._workers)
        self._sent: list[Model] = [None] * n_workers
        self._weights = [1.0] * n_workers  # of push-sum
        self._under_way = [0] * n_workers  # worker -> its transfers in transit

    def publish_for_evaluation(self, worker: int, serial: int) -> None:
        """Evaluate with the first worker: all have made their steps, and none has given away push-sum weight yet."""
        if worker == 0:
            lockstep = self._workers[worker].machine.lockstep
            self._evaluate(lockstep.updates, lockstep.samples)

    def swap(
        self,
        worker: int,
        model: Model,
        weight: float,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
    ) -> Any:
        """Begin to send with the last worker; all call at the same time, in order."""
        self._sent[worker], self._weights[worker] = copied(model), weight
        if worker == len(self._workers) - 1:
            self._send_all(sources, targets)
        return PENDING

    def _send_all(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> None:
        self._under_way = [len(own) + len(sent) for own, sent in zip(sources, targets, strict=True)]
        for worker, sent in enumerate(targets):
            if not self._under_way[worker]:
                self._loop.after(0.0, self._resume, worker)
            for target in sent:
                self._links.send(worker, target, self._arrived, worker, target, sources)

    def _arrived(self, source: int, target: int, sources: Sequence[Sequence[int]]) -> None:
        for worker in (source, target):
            self._under_way[worker] -= 1
            if self._under_way[worker] == 0:
                self._resume(worker, self._received(sources[worker]))

    def _received(self, sources: Sequence[int]) -> Received | None:
        if not sources:
            return None
        models = [self._sent[source] for source in sources]
        total = None if models[0] is None else functools.reduce(operator.add, models)
        return Received(total, len(sources), sum(self._weights[source] for source in sources))
