"""End of a worker's iteration without servers: its local step and the exchange with other workers.

There are two kinds. Synchronous workers agree at every exchange on the contributors and on stopping, and block there
until all have arrived. Asynchronous (gossip) workers read or write a peer's memory at any time.
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
from hpcsync.core.iterations import Iterations
from hpcsync.core.peer_coordinator import BatchDivision, create_peer_selection
from hpcsync.mpi.collectives.allreduce import Agreed, StepCounts, mean_vector
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
    """Fields of `core.peer_coordinator.StepInfo` that describe an exchange.

    Parameters
    ----------
    peer
        Number of the other worker, or ALL_PEERS or NO_PEER of `trace.schema`.
    wait_s, comm_s
        Seconds blocked by others, and seconds of transfers.
    wire_bytes
        Bytes that this worker's transfers moved.
    n_received
        Number of models or gradients of others mixed into its weights.
    """

    peer: int = NO_PEER
    wait_s: float = 0.0
    comm_s: float = 0.0
    wire_bytes: int = 0
    n_received: int = 0


class Exchange(ABC):
    """A worker's weights, local steps and exchanges; gradients are in the model's flat buffer.

    Parameters
    ----------
    job
        Job without servers.
    link
        Channel of the run.
    flat
        Flat view of the model.
    optimizer
        Optimizer of the local steps.

    Attributes
    ----------
    in_step
        True if all workers exchange together (synchronous).
    one_sided
        True if others put into or get from this worker's windows while it computes.
    period
        Number of iterations from one exchange to the next.
    phase
        Phase of a worker in an exchange; synchronous ones can only wait for others.
    agreed
        Agreement of synchronous workers at the last exchange; None before the first one.
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
        """Prepare a loop over a data set; the first call is collective.

        Returns
        -------
        Mapping[str, int]
            Attributes to add to the trace, from the first call only.
        """
        return {}

    def loss_here(self, loss: Loss | None) -> Loss | None:
        """Return the loss that the job's loop computes on this rank."""
        return loss

    def begin(self, batch: Any) -> Any:
        """Begin an iteration; return the batch from which the gradient is computed."""
        return batch

    def end_computation(self, n_samples: int, stop: bool) -> None:  # noqa: B027
        """End the computation of the gradient of `n_samples` samples, padding included."""

    @abstractmethod
    def step(self, lr: float, *, n_samples: int, stop: bool, exchanging: bool) -> None:
        """Apply the local step, and agree before an exchange.

        Parameters
        ----------
        lr
            Learning rate.
        n_samples
            Number of samples of the gradient; 0 from a synchronous worker whose loop has ended and which participates
            until all have ended.
        stop
            True if this worker has received a stop command.
        exchanging
            True if an exchange is due.
        """

    @abstractmethod
    def exchange(self, round: int) -> ExchangeResult:
        """Exchange in a round, counted from 1."""

    def publish(self, serial: int) -> bool:
        """Publish the worker's weights; return False if no row is free (see `PublishedReplica.publish`)."""
        return self._link.published.publish(self.peer.shown(), serial, self.peer.weight)

    def end(self, *, early: bool) -> bool:
        """End the loop of this worker.

        Parameters
        ----------
        early
            True if the loop ended before the workers agreed on the end of the run.

        Returns
        -------
        bool
            True if this worker must participate, without contributing, until all have ended.
        """
        return early

    def settle(self) -> int:
        """Absorb received models once no worker sends any more; return their number."""
        return 0

    def state(self) -> dict[str, Any]:
        """Return the worker's state for a checkpoint.

        All workers have halted after an iteration; synchronous ones after an exchange.
        """
        return {"peer": self.peer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint into a new exchange."""
        self.peer.restore(state["peer"])

    def forget(self, worker: int) -> None:  # noqa: B027
        """Exclude a worker that has died from further exchanges."""

    def free(self) -> None:  # noqa: B027
        """Free windows; collective."""

    def _step(self, lr: float) -> None:
        """Apply the local step along the gradient in the model."""
        self._flat.gather_gradient()
        self.peer.step(self._flat.gradient, lr)


# ---- synchronous ----


class Summing(Exchange):
    """Synchronous SGD: every step is along the mean gradient of all ranks of `comm`, so replicas stay equal.

    Parameters
    ----------
    job
        Job with all-reduce or separated layers.
    link
        Channel of the run.
    flat
        Flat view of the model.
    optimizer
        Optimizer of the local steps.
    comm
        Communicator of the ranks that form the mean.
    at_end_of_backward
        See `BucketReducer`. With padded iterations nothing is sent before the padding is over, because for the other
        workers the gradient only exists then.
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

    def publish(self, serial: int) -> bool:
        """Publish the model's weights as they are: all replicas are one model, evaluated as in any synchronous SGD."""
        return self._link.published.publish(self._flat.weights, serial)

    def state(self) -> dict[str, Any]:
        """Return the state, with that of the reducer."""
        return super().state() | {"reducer": self._reducer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state, with that of the reducer."""
        super().restore(state)
        self._reducer.restore(state["reducer"])

    def free(self) -> None:
        """Close the reducer; collective."""
        self._reducer.close()


class AllReducing(Summing):
    """All-reduce of gradients during the backward pass, or after it if they are compressed.

    Parameters
    ----------
    job
        Job with all-reduce.
    link
        Channel of the run.
    flat
        Flat view of the model.
    optimizer
        Optimizer of the local steps.
    at_end_of_backward
        See `BucketReducer`.
    division
        Division of the samples among workers, if the job allocates batches.
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
        """Set this worker's weight in the mean; return the batch."""
        self._reducer.overlap = self._may_overlap
        if self._division is not None:
            self._reducer.weight = self._division.weight(self._link.comm.rank)
        return batch

    def end_computation(self, n_samples: int, stop: bool) -> None:
        """Finish the all-reduce."""
        self._reduce(n_samples, stop)
        self._reducer.overlap = False

    def step(self, lr: float, *, n_samples: int, stop: bool, exchanging: bool) -> None:
        """Apply the step along the mean gradient, if any worker contributed."""
        if self._outcome is None:
            self._reduce(n_samples, stop)
        if self.agreed is not None and self.agreed.n_steps:  # also for workers that have ended: the replicas stay equal
            self.peer.step(self._flat.gradient, lr)

    def exchange(self, round: int) -> ExchangeResult:
        """Return the costs of the all-reduce."""
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
    """Local steps, and an exchange of all workers every `period` iterations.

    Parameters
    ----------
    size
        Number of elements of the vector whose mean the workers form; 0 if they only agree.
    """

    in_step = True

    def __init__(
        self, job: Job, link: PeerChannel, flat: FlatModel, optimizer: OptimizerSpec, period: int, size: int
    ) -> None:
        super().__init__(job, link, flat, optimizer)
        self.period = period
        self._mean = mean_vector(link.comm, size, flat.weights.dtype, link.transport)
        self._n_steps = self._n_samples = 0  # since the last exchange
        self._agreement_s = 0.0

    def step(self, lr: float, *, n_samples: int, stop: bool, exchanging: bool) -> None:
        """Apply the local step; agree before an exchange."""
        if n_samples:
            self._step(lr)
            self._n_steps += 1
            self._n_samples += n_samples
        if exchanging:
            begin_s = time.perf_counter()
            announcement = StepCounts(self._n_steps, self._n_samples, stop, self._link.halt_requested)
            self.agreed = self._mean.mean(0, 0, announcement)
            self._agreement_s = time.perf_counter() - begin_s

    def exchange(self, round: int) -> ExchangeResult:
        """Exchange, unless no worker has made a step."""
        assert self.agreed is not None
        begin_s = time.perf_counter()
        outcome = self._exchange(round) if self.agreed.n_steps else ExchangeResult()
        self._n_steps = self._n_samples = 0
        return outcome._replace(wait_s=self._agreement_s, comm_s=time.perf_counter() - begin_s)

    @abstractmethod
    def _exchange(self, round: int) -> ExchangeResult:
        """Exchange with all other workers, which are in this round too."""

    def free(self) -> None:
        """Free the mean; collective."""
        self._mean.free()


class Averaging(_Rounds):
    """Local SGD and DiLoCo.

    All workers get the mean of the weights of those that made steps, or the result of an outer step towards it.
    """

    def __init__(self, job: Job, link: PeerChannel, flat: FlatModel, optimizer: OptimizerSpec) -> None:
        paradigm = job.paradigm
        assert isinstance(paradigm, LocalSgdOptions)
        super().__init__(job, link, flat, optimizer, paradigm.steps, flat.size)
        self._outer = Outer(flat.weights, paradigm.outer_lr, paradigm.outer_momentum)

    def _exchange(self, round: int) -> ExchangeResult:
        vector = self._mean.vector
        with self.peer.exchanging() as x:
            vector.copy_(x) if self._n_steps else vector.zero_()
            agreed = self._mean.mean(0, len(vector), StepCounts(self._n_steps))
            x.copy_(vector)
            self._outer.step(x)
        sent = self._mean.sent_bytes
        return ExchangeResult(ALL_PEERS, wire_bytes=sent, n_received=agreed.n_contributing - (self._n_steps > 0))

    def state(self) -> dict[str, Any]:
        """Return the state, with that of the outer optimizer."""
        return super().state() | {"outer": self._outer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state, with that of the outer optimizer."""
        super().restore(state)
        self._outer.restore(state["outer"])


class Permuting(_Rounds):
    """Permutation gossip: every worker sends its weights to one worker and averages with those that it receives."""

    def __init__(self, job: Job, link: PeerChannel, flat: FlatModel, optimizer: OptimizerSpec) -> None:
        assert isinstance(job.paradigm, GossipOptions)
        super().__init__(job, link, flat, optimizer, job.paradigm.period, 0)
        self._peers = create_peer_selection(job)
        self._receive_window = link.transport.window(link.comm, flat.size, flat.weights.dtype)
        self._token = np.zeros(1)

    def _exchange(self, round: int) -> ExchangeResult:
        comm, permutation = self._link.comm, self._peers.permutation(round)
        to, source = permutation[comm.rank], permutation.index(comm.rank)
        if to == comm.rank:
            return ExchangeResult(to)
        with self.peer.exchanging() as x:
            # All workers have agreed on this exchange, so none still reads what the last one put.
            self._receive_window.put(x, to, 0)
            self._receive_window.flush(to)
            comm.Sendrecv(self._token, to, messages.TAG_MODEL, self._token.copy(), source, messages.TAG_MODEL)
            self._receive_window.acquire(0, self._flat.size)
            average(x, self._receive_window.local)
            self._receive_window.release(0, 0)
        return ExchangeResult(to, wire_bytes=self._n_bytes, n_received=1)

    def free(self) -> None:
        """Free the windows; collective."""
        super().free()
        self._receive_window.free()
