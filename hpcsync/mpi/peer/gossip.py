"""Gossip that suits the worker: it reads or writes the memory of a peer that it draws, and nobody waits for anybody."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hpcsync.config.job import Job
from hpcsync.config.paradigms import GossipOptions
from hpcsync.core.peer_coordinator import create_peer_selection
from hpcsync.mpi.peer.channel import PeerChannel
from hpcsync.mpi.peer.exchange import Exchange, ExchangeResult
from hpcsync.mpi.transport.push_inbox import PushInbox
from hpcsync.trace.schema import Phase
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.local_update import absorb, average
from hpcsync.training.optimizers import OptimizerSpec


class _Gossiping(Exchange):
    """Every `period` iterations an exchange with a peer that this worker draws."""

    one_sided = True
    phase = Phase.PUSHING

    def __init__(self, job: Job, link: PeerChannel, flat: FlatModel, optimizer: OptimizerSpec) -> None:
        super().__init__(job, link, flat, optimizer)
        assert isinstance(job.paradigm, GossipOptions)
        self.period = job.paradigm.period
        # Where the run goes on with fewer workers than it began with, the last ones are missing.
        self._peers = replace(create_peer_selection(job), dead=tuple(range(link.comm.size, job.cluster.workers)))

    def step(self, lr: float, *, n_samples: int, stop: bool, exchanging: bool) -> None:
        self._step(lr)

    def exchange(self, round: int) -> ExchangeResult:
        drawn = self._peers.drawn(self._link.comm.rank, round, self.peer.weight)
        begin_s = time.perf_counter()
        outcome = self._exchange(drawn)
        return outcome._replace(comm_s=time.perf_counter() - begin_s)

    def forget(self, worker: int) -> None:
        self._peers = replace(self._peers, dead=(*self._peers.dead, worker))

    @abstractmethod
    def _exchange(self, drawn: int) -> ExchangeResult:
        """With this peer, which may be the worker itself."""


class Pulling(_Gossiping):
    """Read the peer's published weights, and average with them."""

    phase = Phase.READING

    def __init__(self, job: Job, link: PeerChannel, flat: FlatModel, optimizer: OptimizerSpec) -> None:
        super().__init__(job, link, flat, optimizer)
        self._other = torch.empty_like(flat.weights)

    def _exchange(self, drawn: int) -> ExchangeResult:
        if drawn == self._link.comm.rank:
            return ExchangeResult(drawn)
        self._link.published.read(drawn, self._other)
        with self.peer.exchanging() as x:
            average(x, self._other)
        return ExchangeResult(drawn, wire_bytes=self._n_bytes, n_received=1)


class Pushing(_Gossiping):
    """Give the peer the weights; average one's own with those that have come."""

    def __init__(self, job: Job, link: PeerChannel, flat: FlatModel, optimizer: OptimizerSpec) -> None:
        super().__init__(job, link, flat, optimizer)
        self._inbox = PushInbox(link.comm, flat.size, flat.weights.dtype, link.transport)

    def _exchange(self, drawn: int) -> ExchangeResult:
        to_itself = drawn == self._link.comm.rank
        if not to_itself:
            self._send(drawn)
        n_received = self._take_in(to_itself)
        return ExchangeResult(drawn, wire_bytes=0 if to_itself else self._n_bytes, n_received=n_received)

    def _send(self, drawn: int) -> None:
        self._inbox.send(drawn, self.peer.shown())

    def _take_in(self, to_itself: bool) -> int:
        if (received := self._inbox.collect()) is None:
            return 0
        with self.peer.exchanging() as x:
            absorb(x, received.total, received.count, drew_itself=to_itself)
        return received.count

    def settle(self) -> int:
        return self._take_in(False)

    def forget(self, worker: int) -> None:
        super().forget(worker)
        self._inbox.forget(worker)

    def state(self) -> dict[str, Any]:
        """With what has come, which is taken in at the next exchange."""
        return super().state() | {"inbox": self._inbox.keep()}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._inbox.put_back(state["inbox"])

    def free(self) -> None:
        self._inbox.free()


class PushSumming(Pushing):
    """Give the peer half of x and of w, and add to them what has come: what all have together stays the same."""

    def _send(self, drawn: int) -> None:
        with self.peer.exchanging() as x:
            x.mul_(0.5)
            self.peer.weight *= 0.5
            self._inbox.send(drawn, x, self.peer.weight)

    def _take_in(self, to_itself: bool) -> int:
        if (received := self._inbox.collect()) is None:
            return 0
        with self.peer.exchanging() as x:
            x.add_(received.total)
            self.peer.weight += received.weight
        return received.count
