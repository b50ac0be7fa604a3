"""Asynchronous gossip in virtual time: pull and push."""

from __future__ import annotations

from hpcsync.config.job import Job
from hpcsync.config.paradigms import GossipOptions
from hpcsync.core.coordinator import Recorder
from hpcsync.core.peer_coordinator import create_peer_selection, intake_info
from hpcsync.simulator.peer_numerics import Model, SentModel
from hpcsync.simulator.peer_run import Watch, WithReplicas
from hpcsync.simulator.peer_transfers import Workers
from hpcsync.workloads.registry import Workload


class _AsynchronousPeers(WithReplicas):
    """Gossip without blocking; a worker ends after the iteration in which the coordinator asks it to."""

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        assert isinstance(job.paradigm, GossipOptions)
        self._period = job.paradigm.period
        self._peers = create_peer_selection(job)

    def _drawn(self, worker: int) -> int:
        return self._peers.drawn(worker, self._workers[worker].iteration // self._period, self._weight(worker))

    def _enough(self, worker: int) -> bool:
        return self.coordinator.stopping


class PullSimulation(_AsynchronousPeers):
    """Pull gossip: a worker publishes its weights after every step and reads another worker's published replica."""

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        start = self._replicas.snapshot(0)
        self._published = [start] * len(self._workers)  # replaced, never modified

    def _learn(self, worker: int, lr: float) -> float:
        loss = super()._learn(worker, lr)
        self._published[worker] = self._replicas.snapshot(worker)
        return loss

    def _exchange(self, worker: int) -> None:
        peer = self._drawn(worker)
        if peer == worker:
            self._ended(worker, peer=worker)
        else:
            self._links.message(self._request_arrived, worker, peer)

    def _request_arrived(self, worker: int, peer: int) -> None:
        self._links.send(peer, worker, self._response_arrived, worker, peer, self._published[peer])

    def _response_arrived(self, worker: int, peer: int, model: Model) -> None:
        self._replicas.mix(worker, model)
        self._ended(worker, peer=peer, wire_bytes=self._links.size_bytes, n_received=1)


class PushSimulation(_AsynchronousPeers):
    """Push gossip: a worker sends its weights and, once they are acknowledged, absorbs its inbox.

    A worker that must not send behaves as if it had drawn itself.
    """

    def _exchange(self, worker: int) -> None:
        peer = self._drawn(worker)
        if peer == worker:
            self._absorb(worker, peer)
        else:
            self._links.send(worker, peer, self._arrived, worker, peer, self._replicas.push(worker))

    def _arrived(self, worker: int, peer: int, sent: SentModel) -> None:
        self._replicas.arrive(peer, sent)
        self._links.message(self._absorb, worker, peer)

    def _absorb(self, worker: int, peer: int) -> None:
        n_received = self._replicas.absorb(worker, drew_itself=peer == worker)
        moved = 0 if peer == worker else self._links.size_bytes
        self._ended(worker, peer=peer, wire_bytes=moved, n_received=n_received)

    def _absorb_remaining(self, now_s: float) -> None:
        """Absorb the models that arrived after the last rounds; workers leave only after their own sends arrived."""
        for worker, state in enumerate(self._workers):
            if n_received := self._replicas.absorb(worker, drew_itself=False):
                rest = intake_info(worker, state.iteration, now_s, n_received, self._weight(worker))
                self.coordinator.exchanged(now_s, rest)
