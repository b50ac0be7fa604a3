"""Transports of the methods without servers (`hpcsync.paradigms.peer_method`) on ranks.

Synchronous workers agree at every exchange on the contributors and on stopping, and block there until all have
arrived. Gossip workers read or write a peer's memory at any time (`hpcsync.mpi.peer.gossip`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.config.job import Job
from hpcsync.config.workloads import Timing
from hpcsync.core.iterations import Iterations
from hpcsync.core.peer_coordinator import BatchDivision
from hpcsync.mpi.collectives.allreduce import mean_vector
from hpcsync.mpi.collectives.bucket_reducer import BucketReducer
from hpcsync.mpi.collectives.model_parts import Layers, share
from hpcsync.mpi.peer.channel import PeerChannel
from hpcsync.mpi.transport import messages
from hpcsync.paradigms.peer_method import Actions, Agreed, ExchangeResult, PeerMethod, StepCounts, Transport
from hpcsync.paradigms.records import ALL_PEERS
from hpcsync.state import Stateful
from hpcsync.trace.schema import Phase
from hpcsync.training import compressor
from hpcsync.training.batch_sources import Source
from hpcsync.training.buffers import Buffers
from hpcsync.training.flat_model import FlatModel, squared_norm
from hpcsync.training.local_update import Outer, Peer, PushSumPeer, Received
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.script_optimizers import ScriptOptimizers


class Setup(NamedTuple):
    """What an exchange is made of.

    Attributes
    ----------
    job
        Job without servers.
    method
        Its method.
    link
        Channel of the run.
    flat
        Flat view of the model.
    optimizer
        Optimizer of the local steps.
    layers
        Layers of this rank.
    overlap, at_end_of_backward
        See `BucketReducer`.
    division
        Division of the samples among workers, if the job allocates batches.
    """

    job: Job
    method: PeerMethod
    link: PeerChannel
    flat: FlatModel
    optimizer: OptimizerSpec | ScriptOptimizers
    layers: Layers
    overlap: Callable[[], bool]
    at_end_of_backward: Callable[[], None]
    division: BatchDivision | None = None


class Exchange(Transport, Stateful):
    """A worker's weights, and transport of its exchanges; gradients are in the model's flat buffer.

    Attributes
    ----------
    one_sided
        True if others put into or get from this worker's windows while it computes.
    phase
        Phase of a worker in an exchange; synchronous ones can only wait for others.
    participates
        True if a synchronous worker whose loop has ended participates, without contributing, until all have ended.
    peer
        The worker's weights.
    wait_s, comm_s
        Seconds blocked by others, and seconds of transfers, at the end of the latest iteration.
    gradients_sq
        Squared norms of the worker's gradient and of the mean of all, of the latest iteration; NaN where there is none.
    on_published
        Called when the workers have published for an evaluation.
    """

    # After an iteration at which all workers have halted; synchronous ones are at an exchange.
    state_types = {"peer": Peer}
    one_sided = False
    phase = Phase.WAITING
    participates = True

    def __init__(self, setup: Setup) -> None:
        self._link, self._flat = setup.link, setup.flat
        self._buffers = Buffers(setup.flat.model)
        self.wait_s = self.comm_s = 0.0
        self.gradients_sq = (math.nan, math.nan)
        self._measures, self._one_model = not isinstance(setup.job.workload, Timing), setup.method.one_model
        weights = setup.flat.weights
        self.peer = (PushSumPeer if setup.method.push_sum else Peer)(weights, setup.optimizer.on_worker(weights))
        self.on_published: Callable[[], None] = lambda: None
        self._began_s = math.inf

    def run(self, actions: Actions) -> ExchangeResult:
        """Carry out the rest of an iteration; return its result."""
        value, self._began_s = None, math.inf
        self.wait_s = self.comm_s = 0.0
        try:
            while True:
                value = actions.send(value)
        except StopIteration as end:
            self._absorbed()
            if self._began_s < math.inf:
                self.comm_s = time.perf_counter() - self._began_s
            result: ExchangeResult = end.value
            return result

    def _absorbed(self) -> None:
        """Release the memory of what was received in this iteration."""

    def _begin_transfer(self) -> None:
        """Count the time from here to the end of the iteration as that of transfers."""
        self._began_s = min(self._began_s, time.perf_counter())

    def step(self, worker: int, lr: float, serial: int = 0) -> None:
        """Apply the local step along the flat gradient; publish under a serial number other than 0."""
        if self._measures:
            self.gradients_sq = (squared_norm(self._flat.gradient), math.nan)
        self.peer.step(self._flat.gradient, lr)
        if serial:
            self.publish(serial)

    def publish_for_evaluation(self, worker: int, serial: int) -> None:
        """Publish the weights, as all workers do."""
        self.publish(serial)
        self.on_published()

    def prepare(self, source: Source | None, iterations: Iterations) -> Mapping[str, int]:
        """Prepare a loop over the batches of a source; the first call is collective.

        Returns
        -------
        Mapping[str, int]
            Attributes to add to the trace, from the first call only.
        """
        return {}

    def begin(self, batch: Any) -> Any:
        """Begin an iteration; return the batch from which the gradient is computed."""
        return batch

    def while_padding(self, pad: Callable[[float], None]) -> None:
        """Begin what overlaps with the rest of a padded computation; `pad` waits for a share of its time."""

    def end_computation(self, n_samples: int) -> None:
        """End the computation of the gradient of `n_samples` samples, padding included."""

    def publish(self, serial: int, buffers: Mapping[str, torch.Tensor] | None = None) -> bool:
        """Publish the worker's weights, with its model's buffers or with those given.

        If all workers have one model, it is evaluated as it is, as in any synchronous SGD.
        Return False if no row is free (see `PublishedReplica.publish`).
        """
        weights = self._flat.weights if self._one_model else self.peer.shown()
        extra = self._buffers.packed(buffers).view(weights.dtype) if self._buffers.n_words else None
        return self._link.published.publish(weights, serial, self.peer.weight, extra)

    def end(self, *, early: bool) -> None:
        """End the loop of this worker, `early` if before the workers agreed on the end of the run."""

    def _learn_of_deaths(self) -> None:
        """Forget workers that have died, while waiting for others; the session removes them afterwards."""
        self._link.poll_commands()
        for worker in self._link.died:
            self.forget(worker)

    def forget(self, worker: int) -> None:
        """Exclude a worker that has died from the transport."""

    def free(self) -> None:
        """Free windows; collective."""


# ---- synchronous ----


class Summing(Exchange):
    """Sum of gradients over the workers that train the same layers, so that their replicas stay equal.

    Parameters
    ----------
    setup
        What it is made of.
    comm
        Communicator of these workers.
    overlap, at_end_of_backward
        See `BucketReducer`.
    """

    state_types = {"_reducer": BucketReducer}

    def __init__(
        self,
        setup: Setup,
        comm: MPI.Intracomm,
        overlap: Callable[[], bool],
        at_end_of_backward: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(setup)
        job, flat = setup.job, setup.flat
        self._reducer = BucketReducer(
            comm, flat, setup.method.bucket_bytes, at_end_of_backward, overlap, setup.link.transport,
            compression=compressor.of_job(job, flat.parameters, flat.weights.dtype),
            measures=self._measures and not job.paradigm.separates_layers,
        )  # fmt: skip
        self._comm = comm
        self._script = setup.optimizer if isinstance(setup.optimizer, ScriptOptimizers) else None

    def _finish(self, counts: StepCounts) -> Agreed:
        """Complete the mean gradient, and compare what must be alike on all workers, so that they make one step."""
        digest = 0 if self._script is None or not counts.n_steps else self._script.digest()
        return self._reducer.finish(counts._replace(digest=digest, digest_sq=digest**2))

    def _step_together(self, agreed: Agreed, lr: float, *, contributes: bool) -> None:
        """Make the same step on all workers, also where their optimizers' numbers differ, or some have ended.

        These do not know what the script has done with the mean gradient, such as clipping: they get it from another.
        """
        if self._script is None or (agreed.alike and agreed.n_contributing == self._comm.size):
            self.peer.step(self._flat.gradient, lr)
            return
        steps = self._comm.allgather(self._script.step_to_make() if contributes else None)
        made = [rank for rank, step in enumerate(steps) if step is not None]
        share([self._flat.gradient], self._comm, root=made[0])
        with self._script.following([steps[rank] for rank in made]):
            self.peer.step(self._flat.gradient, lr)

    def free(self) -> None:
        """Close the reducer; collective."""
        self._reducer.close()


class AllReducing(Summing):
    """All-reduce of gradients during the backward pass, or after it if they are compressed."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, setup.link.comm, setup.overlap, setup.at_end_of_backward)
        self._division = setup.division
        compute = setup.job.cluster.compute
        self._backward_share = 0.0 if compute is None else compute.backward_share
        self._agreed: Agreed | None = None  # from the end of the computation until the step

    def begin(self, batch: Any) -> Any:
        """Set this worker's weight in the mean; return the batch."""
        if self._division is not None:
            self._reducer.weight = self._division.weight(self._link.comm.rank)
        return batch

    def while_padding(self, pad: Callable[[float], None]) -> None:
        """Reduce the buckets that are complete before the end of the backward pass."""
        if self._backward_share:
            self._reducer.launch_padded(lambda complete: pad(1.0 - self._backward_share * (1.0 - complete)))

    def end_computation(self, n_samples: int) -> None:
        """Finish the all-reduce."""
        self._agreed = self._reduce(
            StepCounts(int(n_samples > 0), n_samples, self._link.stop_requested, self._link.halt_requested)
        )

    def _reduce(self, counts: StepCounts) -> Agreed:
        agreed, correction = self._finish(counts), 1.0
        if self._division is not None:
            correction = self._division.correction(agreed.n_contributing, agreed.n_samples)
            if correction != 1.0:
                self._flat.gradient.mul_(correction)
        cost = self._reducer.reduced
        self.gradients_sq = (cost.gradient_sq, cost.mean_sq * correction**2)
        return agreed

    def sum(self, worker: int, counts: StepCounts, lr: float) -> tuple[Agreed, ExchangeResult]:
        """Make the step along the mean gradient; complete the sum if no computation has ended with it."""
        agreed, self._agreed = self._agreed, None
        if agreed is None:  # of a worker whose loop has ended: the replicas stay equal
            agreed = self._reduce(counts)
        if agreed.n_steps:
            self._step_together(agreed, lr, contributes=counts.n_samples > 0)
        cost = self._reducer.reduced
        self.wait_s, self.comm_s = cost.absent_s, cost.waited_s - cost.absent_s
        return agreed, ExchangeResult(ALL_PEERS, cost.sent_bytes, max(0, agreed.n_contributing - 1))


class _Agreeing(Exchange):
    """Local steps, and exchanges that all workers agree on.

    Parameters
    ----------
    setup
        What it is made of.
    size
        Number of elements of the vector whose mean the workers form; 0 if they only agree.
    """

    def __init__(self, setup: Setup, size: int = 0) -> None:
        super().__init__(setup)
        self._mean = mean_vector(setup.link.comm, size, setup.flat.weights.dtype, setup.link.transport)

    def agree(self, worker: int, counts: StepCounts) -> Agreed:
        """Agree without blocking in MPI."""
        begin_s = time.perf_counter()
        agreed = self._mean.mean(0, 0, counts)
        self.wait_s = time.perf_counter() - begin_s
        return agreed

    def free(self) -> None:
        """Free the mean; collective."""
        self._mean.free()


class Averaging(_Agreeing):
    """Mean of all workers' weights, or an outer step towards it."""

    state_types = {"_outer": Outer}

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, setup.flat.size)
        assert setup.method.outer is not None
        self._outer = Outer(setup.flat.weights, **setup.method.outer)

    def average(self, worker: int, contributes: bool) -> tuple[torch.Tensor, int]:
        """Form the mean, and make the outer step on every rank alike."""
        self._begin_transfer()
        vector = self._mean.vector
        vector.copy_(self.peer.shown()) if contributes else vector.zero_()
        self._mean.mean(0, len(vector), StepCounts(int(contributes)))
        self._outer.step(vector)
        return vector, self._mean.sent_bytes


class Swapping(_Agreeing):
    """Models put into the windows of other workers, and received from others one after the other."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        link, flat = setup.link, setup.flat
        self._receive_window = link.transport.window(link.comm, flat.size, flat.weights.dtype)
        self._total = torch.empty_like(flat.weights)  # of several models
        self._free, self._weight = np.zeros(1), np.zeros(1)

    def agree(self, worker: int, counts: StepCounts) -> Agreed:
        """Agree, so that all workers have read what was put in the last exchange."""
        self._receive_window.release(0, 0)
        return super().agree(worker, counts)

    def swap(
        self,
        worker: int,
        model: torch.Tensor | None,
        weight: float,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
    ) -> Received | None:
        """Put the model into the windows of its targets; return what was put into this worker's.

        A window holds one model, so the n-th sources of all workers send in the n-th turn. At first all windows are
        free, because all workers have agreed on this exchange; later each receiver says so to its next source.
        """
        self._begin_transfer()
        comm, window = self._link.comm, self._receive_window
        own, total, sum_of_weights = sources[worker], window.local, 0.0
        for turn in range(max(map(len, sources))):
            due = [target for target in targets[worker] if sources[target][turn : turn + 1] == [worker]]
            requests = []
            if 0 < turn < len(own):
                window.release(0, 0)
                requests.append(comm.Isend(self._free, own[turn], messages.TAG_FREE))
            for target in due:
                assert model is not None
                if turn:
                    comm.Recv(np.zeros(1), target, messages.TAG_FREE)
                window.put(model, target, 0)
                window.flush(target)
                requests.append(comm.Isend(np.array([weight]), target, messages.TAG_MODEL))
            if turn < len(own):
                comm.Recv(self._weight, own[turn], messages.TAG_MODEL)
                window.acquire(0, self._flat.size)
                sum_of_weights += float(self._weight[0])
                if len(own) > 1:
                    total = self._total.add_(window.local) if turn else self._total.copy_(window.local)
            for request in requests:
                request.Wait()
        return Received(total, len(own), sum_of_weights) if own else None

    def free(self) -> None:
        """Free the windows; collective."""
        super().free()
        self._receive_window.free()
