"""Transports of asynchronous gossip in virtual time: published replicas and inboxes."""

from __future__ import annotations

from typing import Any

from hpcsync.paradigms.peer_method import PENDING
from hpcsync.simulator.peer_numerics import Model, copied
from hpcsync.simulator.peer_run import PeerSimulation
from hpcsync.training.local_update import Received


class PullSimulation(PeerSimulation):
    """A worker publishes its weights after every step, and reads another worker's published replica."""

    def __init__(self, *of_every_run: Any) -> None:
        super().__init__(*of_every_run)
        start = self._shown(0)
        self._published: list[Model] = [start] * len(self._workers)  # replaced, never modified

    def step(self, worker: int, lr: float, serial: int = 0) -> None:
        """Apply the worker's local step and publish."""
        self._numerics.step(worker, lr)
        self._published[worker] = self._shown(worker)

    def _shown(self, worker: int) -> Model:
        return copied(self._numerics.updates[worker].shown())

    def read(self, worker: int, peer: int) -> Any:
        """Request what the peer has published when the request arrives."""
        self._links.message(self._request_arrived, worker, peer)
        return PENDING

    def _request_arrived(self, worker: int, peer: int) -> None:
        self._links.send(peer, worker, self._resume, worker, self._published[peer])


class PushSimulation(PeerSimulation):
    """A worker sends a model and, once it is acknowledged, empties its inbox."""

    def __init__(self, *of_every_run: Any) -> None:
        super().__init__(*of_every_run)
        self._inboxes: list[Received | None] = [None] * len(self._workers)
        self._sending = [False] * len(self._workers)  # until the acknowledgement

    def send(self, worker: int, peer: int, model: Model, weight: float) -> None:
        """Send a copy of the model."""
        self._sending[worker] = True
        self._links.send(worker, peer, self._arrived, worker, peer, Received(copied(model), 1, weight))

    def _arrived(self, worker: int, peer: int, sent: Received) -> None:
        inbox = self._inboxes[peer]
        self._inboxes[peer] = sent if inbox is None else inbox.plus(sent)
        self._links.message(self._acknowledged, worker)

    def _acknowledged(self, worker: int) -> None:
        self._sending[worker] = False
        self._resume(worker, self.collect(worker))

    def collect(self, worker: int) -> Any:
        """Empty the inbox, once what the worker has sent is acknowledged."""
        if self._sending[worker]:
            return PENDING
        received, self._inboxes[worker] = self._inboxes[worker], None
        return received

    rest = collect  # workers leave only after their own sends arrived
