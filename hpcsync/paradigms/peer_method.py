"""Synchronisation without servers: what a worker does at the end of an iteration, as a coroutine.

A method calls its engine's `Transport`, and yields the results of calls that may wait, such as
``model = yield transport.read(worker, peer)``. On ranks a call returns when it is over; in virtual time it returns
`PENDING`, and the simulation resumes the coroutine with the result when its transfers have arrived. A method neither
reads a clock nor touches numbers: it changes a worker's weights through its `LocalUpdate`, whose models it passes on.

A new method is a subclass of `PeerMethod`. It needs a new method of `Transport`, and a transport in each engine, only
if it moves data as no other method does.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hpcsync.paradigms.records import NO_PEER


class StepCounts(NamedTuple):
    """Information that a worker contributes to an agreement.

    Attributes
    ----------
    n_steps : int
        Iterations that the worker contributes.
    n_samples : int
        Samples that the worker contributes.
    stop : bool
        Whether to stop.
    halt : bool
        Whether to halt, for a checkpoint.
    n_absent : int
        Number of parameters for which the worker has no gradient.
    digest, digest_sq : int
        Digest of what else must be alike on all that contribute, at most 24 bits, and its square.
    """

    n_steps: int = 1
    n_samples: int = 0
    stop: bool = False
    halt: bool = False
    n_absent: int = 0
    digest: int = 0
    digest_sq: int = 0


class Agreed(NamedTuple):
    """Information that all workers share after an agreement.

    Attributes
    ----------
    n_contributing : int
        Number of workers that contribute.
    n_steps : int
        Sum of their iterations.
    n_samples : int
        Sum of their samples.
    stop : bool
        Whether any worker requests a stop.
    halt : bool
        Whether any worker requests a halt.
    n_absent : int
        Sum of their numbers of parameters without a gradient.
    alike : bool
        Whether those that contribute have the same digest.
    """

    n_contributing: int
    n_steps: int
    n_samples: int
    stop: bool
    halt: bool = False
    n_absent: int = 0
    alike: bool = True

    @classmethod
    def of(cls, counts: Sequence[StepCounts]) -> Agreed:
        """Combine the information of all workers."""
        return cls.of_sums(sum(of_worker.n_steps > 0 for of_worker in counts), map(sum, zip(*counts, strict=True)))

    @classmethod
    def of_sums(cls, n_contributing: int, sums: Iterable[int]) -> Agreed:
        """Combine the sums of the information of all workers, of which so many contribute."""
        n_steps, n_samples, stop, halt, n_absent, digest, digest_sq = sums
        alike = n_contributing * digest_sq == digest**2  # else it is larger (Cauchy and Schwarz)
        return cls(n_contributing, n_steps, n_samples, stop > 0, halt > 0, n_absent, alike)


class ExchangeResult(NamedTuple):
    """What a step info says about the exchange at the end of an iteration.

    Parameters
    ----------
    peer
        Number of the other worker, or ALL_PEERS or NO_PEER.
    wire_bytes
        Bytes that this worker's transfers moved.
    n_received
        Number of models or gradients of others mixed into its weights.
    weight
        Number recorded with the worker's weights; None: w of push-sum.
    """

    peer: int = NO_PEER
    wire_bytes: int = 0
    n_received: int = 0
    weight: float | None = None


Actions = Generator[Any, Any, ExchangeResult]
NO_EXCHANGE = ExchangeResult()
PENDING = object()  # result of a call that is not over


def without_exchange() -> Actions:
    """End an iteration at once."""
    yield from ()
    return NO_EXCHANGE


class Transport:
    """What an engine does for a worker; a transport implements what its method calls."""

    def step(self, worker: int, lr: float, serial: int = 0) -> None:
        """Make a local step along the worker's gradient; publish the weights under a serial number other than 0."""
        raise NotImplementedError

    def publish_for_evaluation(self, worker: int, serial: int) -> None:
        """Publish the worker's weights; all synchronous workers do, in the same iteration."""
        raise NotImplementedError

    def agree(self, worker: int, counts: StepCounts) -> Any:
        """Return what all workers agree on (`Agreed`); to be yielded."""
        raise NotImplementedError

    def sum(self, worker: int, counts: StepCounts, lr: float) -> Any:
        """Make a step along the mean of all gradients, unless no worker contributes one; to be yielded.

        Returns
        -------
        Agreed, ExchangeResult
            As a tuple.
        """
        raise NotImplementedError

    def average(self, worker: int, contributes: bool) -> Any:
        """Return the weights that all workers continue from, and the bytes that this one has sent; to be yielded.

        They are the mean of the weights of those that contribute, or the result of an outer step towards it.
        """
        raise NotImplementedError

    def swap(
        self,
        worker: int,
        model: Any,
        weight: float,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
    ) -> Any:
        """Exchange models among all workers, once each has called; to be yielded.

        Parameters
        ----------
        worker
            Number of the worker.
        model, weight
            What it sends, which may change afterwards; not used without targets.
        sources
            Workers from which each worker receives a model, in order; none is the worker itself.
        targets
            The same exchange seen from the senders: workers to which each worker sends its model, in order.

        Returns
        -------
        Received or None
            Sum, number and total weight of the worker's models; None without sources.
        """
        raise NotImplementedError

    def read(self, worker: int, peer: int) -> Any:
        """Return a peer's published weights; to be yielded."""
        raise NotImplementedError

    def send(self, worker: int, peer: int, model: Any, weight: float) -> None:
        """Begin to send a model, which may change afterwards, with its weight to a peer's inbox."""
        raise NotImplementedError

    def collect(self, worker: int) -> Any:
        """Wait until what the worker sent has arrived; return the content of its inbox, or None; to be yielded."""
        raise NotImplementedError

    def average_with(self, worker: int, peer: int) -> Any:
        """Set the weights and those that a peer shares to their mean, as one atomic operation; to be yielded.

        Returns
        -------
        bool
            False if nothing has changed because the peer has died.
        """
        raise NotImplementedError

    def step_shared(self, worker: int, lr: float, serial: int) -> Any:
        """Make a local step on the weights as others have left them, as one atomic operation; to be yielded.

        Publish the weights under a serial number other than 0.

        Returns
        -------
        n_averaged : int
            Number of averages that others have made since the last one.
        n_steps : float
            Count of steps, of whatever worker, that the weights contain: it is averaged along with them.
        """
        raise NotImplementedError

    def rest(self, worker: int) -> Any:
        """Return what has arrived since the worker's last iteration, once no worker sends any more (`Received`)."""
        return None


# ---- a method, and what it sees of a worker ----


class LocalUpdate(Protocol):
    """A worker's weights between its exchanges.

    Attributes
    ----------
    n_bytes
        Size of the weights in bytes.
    weight
        w of push-sum; 1 without it.
    """

    n_bytes: int
    weight: float

    def mix(self, other: Any, beta: float = 0.5) -> None:
        """Set the weights to 1 - beta of them and beta of another model."""

    def adopt(self, model: Any) -> None:
        """Set the weights to a model."""

    def give(self) -> Any:
        """Return the model to send; under push-sum the worker gives half of x and w away."""

    def absorb(self, received: Any, *, drew_itself: bool) -> None:
        """Mix the content of an inbox into the weights.

        Parameters
        ----------
        received
            The content: sum, number and weight of the models.
        drew_itself
            True if the worker drew itself in this round and sent nothing.
        """


class PeerState(Protocol):
    """A worker as its method sees it.

    Attributes
    ----------
    worker
        Number of the worker.
    update
        Its weights.
    step_serial
        Serial number under which an asynchronous step is published; 0 if it is not, since no rank reads it.
    transport
        Its engine.
    n_steps
        Its steps since the last exchange.
    agreed
        Agreement of synchronous workers about this exchange.
    """

    worker: int
    update: LocalUpdate
    transport: Transport
    n_steps: int
    agreed: Agreed | None

    @property
    def step_serial(self) -> int: ...  # noqa: D102


class PeerMethod:
    """Exchange of workers without servers.

    Attributes
    ----------
    transport
        Name of its transport in each engine's table.
    synchronous
        True if all workers exchange together, after agreeing on the contributors and on stopping.
    one_model
        True if gradients are summed, so that all workers have one model; `sum` then replaces `step` and `agree`.
    push_sum
        True if models are exchanged with a weight.
    outer
        Options of the outer SGD towards the mean of `average`, as `torch.optim.SGD` has them; empty: the mean itself.
        None without that call.
    bucket_bytes
        Bytes of the gradient that `sum` adds up at a time; None if that depends on where the workers are.
    period
        Number of iterations from one exchange to the next.
    evaluated_after
        True if synchronous workers are evaluated after an exchange, which leads elsewhere than to the mean of their
        weights. Others are evaluated before it, where their distances from the mean are known, too.
    """

    transport: str
    synchronous = True
    one_model = False
    push_sum = False
    outer: Mapping[str, Any] | None = None
    bucket_bytes: int | None = None
    period = 1
    evaluated_after = False

    @property
    def peers_read(self) -> bool:
        """True if workers read each other's published weights."""
        return self.transport == "published"

    def exchange(self, worker: PeerState, round: int) -> Actions:
        """Exchange in a round of this worker, counted from 1; not called with `one_model`."""
        raise NotImplementedError

    def iterate(self, worker: PeerState, lr: float, round: int | None) -> Actions:
        """End an asynchronous worker's iteration; `round` is None if no exchange is due."""
        # Published with this step, but without the coming exchange.
        worker.transport.step(worker.worker, lr, worker.step_serial)
        return without_exchange() if round is None else self.exchange(worker, round)

    def absorb_rest(self, update: LocalUpdate, received: Any) -> float:
        """Absorb what has arrived since the last iteration; return the number to record with the weights."""
        update.absorb(received, drew_itself=False)
        return update.weight

    def shares(self, worker: int) -> bool:
        """Return whether others may change this worker's weights (`average_with`)."""
        return False

    def forget(self, worker: int) -> None:
        """Exclude a worker that has died or is missing from further exchanges."""


class SummedGradients(PeerMethod):
    """Synchronous SGD without servers: all-reduce, or layers separated between two groups of workers.

    Parameters
    ----------
    transport
        See `PeerMethod`.
    bucket_mb
        Megabytes of the gradient that are summed at a time; None if that depends on where the workers are.
    """

    one_model = True

    def __init__(self, transport: str, bucket_mb: float | None) -> None:
        self.transport = transport
        self.bucket_bytes = None if bucket_mb is None else max(1, int(bucket_mb * 1e6))
