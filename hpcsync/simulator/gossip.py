"""Workers without servers that exchange with one other when it suits them, in virtual time: pulls and pushes."""

from __future__ import annotations

from hpcsync.config.job import Job
from hpcsync.config.paradigms import GossipOptions
from hpcsync.core.coordinator import Recorder
from hpcsync.core.peer_coordinator import create_peer_selection, intake_info
from hpcsync.simulator.peer_numerics import Model, SentModel
from hpcsync.simulator.peer_run import Watch, WithReplicas
from hpcsync.simulator.peer_transfers import Workers
from hpcsync.workloads.registry import Workload


class _Free(WithReplicas):
    """Gossip without waiting. A worker ends with the iteration at whose end the coordinator wants it to."""

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        assert isinstance(job.paradigm, GossipOptions)
        self._period = job.paradigm.period
        self._peers = create_peer_selection(job)

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

    def _arrived(self, worker: int, peer: int, sent: SentModel) -> None:
        self._replicas.arrive(peer, sent)
        self._links.message(self._take_in, worker, peer)

    def _take_in(self, worker: int, peer: int) -> None:
        n_received = self._replicas.absorb(worker, drew_itself=peer == worker)
        moved = 0 if peer == worker else self._links.size_bytes
        self._ended(worker, peer=peer, wire_bytes=moved, n_received=n_received)

    def _take_in_the_rest(self, now_s: float) -> None:
        """What came for workers after their last round. Nobody leaves before what it gave away has arrived."""
        for worker, state in enumerate(self._workers):
            if n_received := self._replicas.absorb(worker, drew_itself=False):
                rest = intake_info(worker, state.iteration, now_s, n_received, self._weight(worker))
                self.coordinator.exchanged(now_s, rest)
