"""What ends a worker's iteration where there is no server: its step, and what it exchanges with the others.

Two kinds. Workers in step agree, at every exchange, on who contributes and whether to stop, and wait for each other
there. Gossiping ones read or write a peer's memory when it suits them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hpcsync.config.job import Job
from hpcsync.config.paradigms import AllReduceOptions, GossipOptions, LocalSgdOptions, StanzaOptions
from hpcsync.core.batches import Iterations
from hpcsync.core.peer_coordinator import BatchDivision, create_peer_selection
from hpcsync.mpi.collectives.allreduce import Agreed, Said, mean_vector
from hpcsync.mpi.collectives.bucket_reducer import BucketReducer
from hpcsync.mpi.peer.channel import PeerChannel
from hpcsync.mpi.transport import messages
from hpcsync.trace.schema import ALL_PEERS, NO_PEER, Phase
from hpcsync.training import compressor
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.gradient import Loss
from hpcsync.training.local_update import Outer, Peer, average
from hpcsync.training.optimizers import OptimizerSpec


class ExchangeResult(NamedTuple):
    """What an exchange was, in the terms of `peers.Exchanged`, without what the iteration itself knows."""

    peer: int = NO_PEER
    wait_s: float = 0.0
    comm_s: float = 0.0
    wire_bytes: int = 0
    n_received: int = 0


class Exchange(ABC):
    """A worker's weights, its steps, and its exchanges. Gradients are in the model's flat buffer.

    in_step: whether all workers make their exchanges together.
    one_sided: whether others put and get while this worker computes.
    period:  iterations from one exchange to the next.
    phase:   what a worker is doing in an exchange; those in step can only wait for others.
    agreed:  of those in step, at the last exchange; None before the first one.
    """

    in_step = False
    one_sided = False
    period = 1
    phase = Phase.WAITING

    def __init__(self, job: Job, link: PeerChannel, flat: FlatModel, optimizer: OptimizerSpec) -> None:
        self.peer = Peer(flat.weights, optimizer)
        self.agreed: Agreed | None = None
        self._link = link
        self._flat = flat
        self._n_bytes = flat.size * flat.weights.element_size()

    def prepare(self, dataset: Any, batch_size: int, iterations: Iterations) -> Mapping[str, int]:
        """A loop over these samples begins; the first time, collective, and then the attributes that the trace is to
        have of it."""
        return {}

    def loss_here(self, loss: Loss | None) -> Loss | None:
        """What a job's loop computes with the model, if its loss is this."""
        return loss

    def begin(self, batch: Any) -> Any:
        """A batch has been handed out: what a gradient will be computed from."""
        return batch

    def end_computation(self, n_samples: int, stop: bool) -> None:  # noqa: B027
        """The gradient of so many samples is there, padding included."""

    @abstractmethod
    def step(self, lr: float, *, n_samples: int, stop: bool, exchanging: bool) -> None:
        """The worker's own step, and what is agreed before an exchange.

        n_samples: that the gradient was computed from; 0 from a worker in step that has ended, and goes along until all
        have. stop: whether this worker was told to. exchanging: whether the exchange is due.
        """

    @abstractmethod
    def exchange(self, round: int) -> ExchangeResult:
        """The exchange of a round; they count from 1."""

    def show(self, serial: int) -> bool:
        """Publish the worker's weights; False where they cannot be now (`Exposure.publish`)."""
        return self._link.published.publish(self.peer.shown(), serial, self.peer.weight)

    def end(self, *, early: bool) -> bool:
        """The loop is over; early: before it was agreed that the run is. Whether this worker goes along, contributing
        nothing, until all have ended."""
        return early

    def settle(self) -> int:
        """When nobody sends any more: take in what has come. The number of models."""
        return 0

    def state(self) -> dict[str, Any]:
        """All that this worker has, while everybody has halted after an iteration; in step, after an exchange."""
        return {"peer": self.peer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there, with an exchange that is new."""
        self.peer.restore(state["peer"])

    def forget(self, worker: int) -> None:  # noqa: B027
        """This worker has died: there is no exchange with it any more."""

    def free(self) -> None:  # noqa: B027
        """Collective."""

    def _step(self, lr: float) -> None:
        """From the gradient in the model."""
        self._flat.gather_gradient()
        self.peer.step(self._flat.gradient, lr)


# ---- in step ----


class Summing(Exchange):
    """Replicas that stay equal: every step is along the mean gradient of all ranks of `comm`.

    at_end_of_backward: as of `BucketReducer`. With padded iterations nothing is sent before the padding is over: to the
    others, only then the gradient is there.
    """

    in_step = True

    def __init__(
        self,
        job: Job,
        link: PeerChannel,
        flat: FlatModel,
        optimizer: OptimizerSpec,
        comm: MPI.Intracomm,
        at_end_of_backward: Callable[[], None] | None = None,
    ) -> None:
        assert isinstance(job.paradigm, AllReduceOptions | StanzaOptions)
        super().__init__(job, link, flat, optimizer)
        bucket_bytes = max(1, int(job.paradigm.bucket_mb * 1e6))
        self._reducer = BucketReducer(
            comm, flat, bucket_bytes, at_end_of_backward, overlap=False, transport=link.transport,
            compression=compressor.of_job(job, flat.parameters),
        )  # fmt: skip
        self._may_overlap = job.cluster.compute is None

    def show(self, serial: int) -> bool:
        """The replicas are one model, which is evaluated at the weights of any other synchronous SGD."""
        return self._link.published.publish(self._flat.weights, serial)

    def state(self) -> dict[str, Any]:
        return super().state() | {"reducer": self._reducer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._reducer.restore(state["reducer"])

    def free(self) -> None:
        self._reducer.close()


class AllReducing(Summing):
    """Synchronous SGD: the mean of all gradients, formed while the backward pass runs; after it if they are compressed,
    as the job may say. division: of the samples, where batches are given out.
    """

    def __init__(
        self,
        job: Job,
        link: PeerChannel,
        flat: FlatModel,
        optimizer: OptimizerSpec,
        at_end_of_backward: Callable[[], None],
        division: BatchDivision | None = None,
    ) -> None:
        super().__init__(job, link, flat, optimizer, link.comm, at_end_of_backward)
        self._division = division
        self._outcome: ExchangeResult | None = None

    def begin(self, batch: Any) -> Any:
        self._reducer.overlap = self._may_overlap
        if self._division is not None:
            self._reducer.weight = self._division.weight(self._link.comm.rank)
        return batch

    def end_computation(self, n_samples: int, stop: bool) -> None:
        self._reduce(n_samples, stop)
        self._reducer.overlap = False

    def step(self, lr: float, *, n_samples: int, stop: bool, exchanging: bool) -> None:
        if self._outcome is None:
            self._reduce(n_samples, stop)
        if self.agreed is not None and self.agreed.n_steps:  # also of who has ended: the replicas stay equal
            self.peer.step(self._flat.gradient, lr)

    def exchange(self, round: int) -> ExchangeResult:
        outcome, self._outcome = self._outcome, None
        assert outcome is not None
        return outcome

    def _reduce(self, n_samples: int, stop: bool) -> None:
        self.agreed = self._reducer.finish(n_samples > 0, stop, n_samples, halt=self._link.halt_requested)
        if self._division is not None:
            correction = self._division.correction(self.agreed.n_contributing, self.agreed.n_samples)
            if correction != 1.0:
                self._flat.gradient.mul_(correction)
        cost = self._reducer.reduced
        n_received = max(0, self.agreed.n_contributing - 1)
        self._outcome = ExchangeResult(
            ALL_PEERS, cost.absent_s, cost.waited_s - cost.absent_s, cost.sent_bytes, n_received
        )


class _Rounds(Exchange):
    """Local steps, and every `period` iterations an exchange of all workers. `size`: elements of the vector that the
    workers form the mean of, or agree beside."""

    in_step = True

    def __init__(
        self, job: Job, link: PeerChannel, flat: FlatModel, optimizer: OptimizerSpec, period: int, size: int
    ) -> None:
        super().__init__(job, link, flat, optimizer)
        self.period = period
        self._mean = mean_vector(link.comm, size, flat.weights.dtype, link.transport)
        self._n_steps = self._n_samples = 0  # since the last exchange
        self._agreeing_s = 0.0

    def step(self, lr: float, *, n_samples: int, stop: bool, exchanging: bool) -> None:
        if n_samples:
            self._step(lr)
            self._n_steps += 1
            self._n_samples += n_samples
        if exchanging:
            begin_s = time.perf_counter()
            said = Said(self._n_steps, self._n_samples, stop, self._link.halt_requested)
            self.agreed = self._mean.mean(0, 0, said)
            self._agreeing_s = time.perf_counter() - begin_s

    def exchange(self, round: int) -> ExchangeResult:
        assert self.agreed is not None
        begin_s = time.perf_counter()
        outcome = self._exchange(round) if self.agreed.n_steps else ExchangeResult()
        self._n_steps = self._n_samples = 0
        return outcome._replace(wait_s=self._agreeing_s, comm_s=time.perf_counter() - begin_s)

    @abstractmethod
    def _exchange(self, round: int) -> ExchangeResult:
        """With all the others, who are here too."""

    def free(self) -> None:
        self._mean.free()


class Averaging(_Rounds):
    """Local SGD and DiLoCo: the mean of the weights of those who have made steps becomes, or leads, everybody's."""

    def __init__(self, job: Job, link: PeerChannel, flat: FlatModel, optimizer: OptimizerSpec) -> None:
        paradigm = job.paradigm
        assert isinstance(paradigm, LocalSgdOptions)
        super().__init__(job, link, flat, optimizer, paradigm.steps, flat.size)
        self._outer = Outer(flat.weights, paradigm.outer_lr, paradigm.outer_momentum)

    def _exchange(self, round: int) -> ExchangeResult:
        vector = self._mean.vector
        with self.peer.exchanging() as x:
            vector.copy_(x) if self._n_steps else vector.zero_()
            agreed = self._mean.mean(0, len(vector), Said(self._n_steps))
            x.copy_(vector)
            self._outer.step(x)
        sent = self._mean.sent_bytes
        return ExchangeResult(ALL_PEERS, wire_bytes=sent, n_received=agreed.n_contributing - (self._n_steps > 0))

    def state(self) -> dict[str, Any]:
        return super().state() | {"outer": self._outer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._outer.restore(state["outer"])


class Permuting(_Rounds):
    """Gossip in step: every worker gives its weights to one and averages with those of another, or the same."""

    def __init__(self, job: Job, link: PeerChannel, flat: FlatModel, optimizer: OptimizerSpec) -> None:
        assert isinstance(job.paradigm, GossipOptions)
        super().__init__(job, link, flat, optimizer, job.paradigm.period, 0)
        self._peers = create_peer_selection(job)
        self._given = link.transport.window(link.comm, flat.size, flat.weights.dtype)
        self._token = np.zeros(1)

    def _exchange(self, round: int) -> ExchangeResult:
        comm, permutation = self._link.comm, self._peers.permutation(round)
        to, source = permutation[comm.rank], permutation.index(comm.rank)
        if to == comm.rank:
            return ExchangeResult(to)
        with self.peer.exchanging() as x:
            # All have agreed to make this exchange, so nobody still reads what the last one has given it.
            self._given.put(x, to, 0)
            self._given.flush(to)
            comm.Sendrecv(self._token, to, messages.TAG_MODEL, self._token.copy(), source, messages.TAG_MODEL)
            self._given.acquire(0, self._flat.size)
            average(x, self._given.local)
            self._given.release(0, 0)
        return ExchangeResult(to, wire_bytes=self._n_bytes, n_received=1)

    def free(self) -> None:
        super().free()
        self._given.free()
