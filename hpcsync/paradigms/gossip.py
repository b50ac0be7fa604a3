"""Gossiping SGD: selection of the peers that exchange weights, and what they exchange.

Peers are a pure function of seed, worker and round. Rounds count from 1. The selection needs no communication: workers
in different rounds, a simulation and an audit all compute the same peers. The topologies are::

    complete     every worker, with equal probability
    ring         the two neighbours, with equal probability
    exponential  in turn the workers 1, 2, 4, ... places ahead (stochastic gradient push)

In a permutation every worker sends to one worker and receives from one, so that averaging preserves the mean of all.

References
----------
P. H. Jin, Q. Yuan, F. Iandola and K. Keutzer, "How to scale distributed deep learning?", 2016, arXiv:1611.04581. Only
its abstract could be read: pull and push are those of its first author's program, github.com/peterhj/rembrandt.
M. Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019 (exponential topology).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from hpcsync.paradigms.options import Allowed, Count, OptionError, ParadigmOptions, Share, computed, every
from hpcsync.paradigms.papers import ICML, Reference, arxiv, meeting
from hpcsync.paradigms.peer_method import Actions, ExchangeResult, LocalUpdate, PeerMethod, PeerState
from hpcsync.planning.checks import must_be_one_of

if TYPE_CHECKING:
    import numpy as np

TOPOLOGIES = ("complete", "ring", "exponential")

PEERS, PERMUTATIONS = 4, 5  # random streams derived from the job's seed
LEAST_WEIGHT = 2.0**-30
BLOCK = 64  # rounds per call of the generator


@dataclass(frozen=True)
class PeerSelection:
    """Peers that each worker exchanges weights with.

    Parameters
    ----------
    n_workers
        Number of workers.
    seed
        Seed of the job.
    topology
        One of `TOPOLOGIES`.
    include_self
        Whether a worker may select itself; not possible with the exponential topology.
    dead
        Workers that have died. The others close up, as if these had never existed.

    Raises
    ------
    ValueError
        If the topology is unknown, or cannot include the worker itself.
    """

    n_workers: int
    seed: int
    topology: str = "complete"
    include_self: bool = True
    dead: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        must_be_one_of("topology", self.topology, TOPOLOGIES)
        if self.include_self and self.topology == "exponential":
            raise ValueError("include_self must be False with the exponential topology")

    def neighbours(self, worker: int) -> Sequence[int]:
        """Return the peers that the worker may select, in order.

        In a ring of two, the same neighbour occurs twice. The last living worker has only itself.
        """
        living = self._living
        n = len(living)
        if n == 1:
            return [worker]
        at = living.index(worker)
        match self.topology:
            case "complete":
                if self.include_self:
                    return living
                others = [peer for peer in living if peer != worker]
            case "ring":
                others = [living[(at - 1) % n], living[(at + 1) % n]]
            case _:
                others = [living[(at + hop) % n] for hop in self._hops()]
        return sorted([worker, *others]) if self.include_self else others

    def drawn(self, worker: int, round: int, weight: float = 1.0) -> int:
        """Return the peer that the worker selects.

        Parameters
        ----------
        worker
            Number of the worker.
        round
            Round of this worker, from 1.
        weight
            Push-sum weight w of the worker. A worker with less than LEAST_WEIGHT selects itself until it receives some:
            it has sent nearly everything to workers that are much slower or have ended, and floating-point numbers
            underflow.

        Returns
        -------
        int
            Number of the peer, possibly the worker itself.
        """
        if weight < LEAST_WEIGHT:
            return worker
        neighbours = self.neighbours(worker)
        if self.topology == "exponential":
            return neighbours[(round - 1) % len(neighbours)]
        block, at = divmod(round - 1, BLOCK)
        return neighbours[_draws(self.seed, worker, block, len(neighbours))[at]]

    def permutation(self, round: int) -> tuple[int, ...]:
        """Return the peer that each worker sends to in this common round.

        Every worker occurs once. A ring alternates its direction. Without the worker itself, the permutation of the
        complete topology is a single cycle (Sattolo 1986).

        Parameters
        ----------
        round
            Round of all workers, from 1.

        Returns
        -------
        tuple of int
            Shape (n_workers,).
        """
        n = self.n_workers
        assert not self.dead, "all workers take part in a permutation"
        if self.topology == "complete":
            generator = _generator(self.seed, PERMUTATIONS, round)
            return _permutation(generator, n) if self.include_self else _cycle(generator, n)
        hops = self._hops() if self.topology == "exponential" else [1, -1]
        if self.include_self:
            hops = [1, 0, -1, 0]
        hop = hops[(round - 1) % len(hops)]
        return tuple((worker + hop) % n for worker in range(n))

    def _hops(self) -> list[int]:
        return [1 << k for k in range(max(1, (len(self._living) - 1).bit_length()))]

    @property
    def _living(self) -> Sequence[int]:
        workers = range(self.n_workers)
        return [worker for worker in workers if worker not in self.dead] if self.dead else workers


@lru_cache(maxsize=4096)  # the workers of a simulation draw in turn
def _draws(seed: int, worker: int, block: int, n: int) -> list[int]:
    """Return random numbers below n for the rounds of a block.

    A generator for each round would take a tenth as long as a small gradient.
    """
    return _generator(seed, PEERS, worker, block).integers(n, size=BLOCK).tolist()


def _generator(*seeds: int) -> np.random.Generator:
    from numpy.random import default_rng  # NumPy takes longer to load than a job file to be read

    return default_rng(list(seeds))


def _permutation(generator: np.random.Generator, n: int) -> tuple[int, ...]:
    return tuple(generator.permutation(n).tolist())


def _cycle(generator: np.random.Generator, n: int) -> tuple[int, ...]:
    order = list(range(n))
    for last in range(n - 1, 0, -1):
        other = int(generator.integers(last))
        order[last], order[other] = order[other], order[last]
    return tuple(order)


# ---- exchanges ----


class Gossip(PeerMethod):
    """Exchange of every worker with one other worker, every `period` iterations.

    Parameters
    ----------
    peers
        Selection of the peers.
    period
        Iterations from one exchange to the next.
    beta
        Part of the peer's weights in the average of two models.
    """

    synchronous = False

    def __init__(self, peers: PeerSelection, period: int = 1, beta: float = 0.5) -> None:
        self.peers, self.period, self.beta = peers, period, beta

    def forget(self, worker: int) -> None:
        """Exclude a worker from the draws."""
        self.peers = replace(self.peers, dead=(*self.peers.dead, worker))

    def _drawn(self, worker: PeerState, round: int) -> int:
        return self.peers.drawn(worker.worker, round, worker.update.weight)


class Pull(Gossip):
    """Read the peer's published weights and average with them."""

    transport = "published"

    def exchange(self, worker: PeerState, round: int) -> Actions:
        """Exchange, unless the worker has drawn itself."""
        peer, update = self._drawn(worker, round), worker.update
        if peer == worker.worker:
            return ExchangeResult(peer)
        update.mix((yield worker.transport.read(worker.worker, peer)), self.beta)
        return ExchangeResult(peer, update.n_bytes, 1)


class Push(Gossip):
    """Send the weights to the peer, and absorb what others have sent; under push-sum half of the pair (x, w)."""

    transport = "inbox"

    def exchange(self, worker: PeerState, round: int) -> Actions:
        """Send unless the worker has drawn itself, and absorb."""
        peer, update = self._drawn(worker, round), worker.update
        drew_itself = peer == worker.worker
        if not drew_itself:
            model = update.give()
            worker.transport.send(worker.worker, peer, model, update.weight)
        received = yield worker.transport.collect(worker.worker)
        if received is not None:
            update.absorb(received, drew_itself=drew_itself)
        return ExchangeResult(peer, 0 if drew_itself else update.n_bytes, 0 if received is None else received.count)


class PushSum(Push):
    """Stochastic gradient push."""

    push_sum = True


def _others(peers: Sequence[int]) -> list[list[int]]:
    """Return the peer of each worker, none if it is the worker itself."""
    return [[] if peer == worker else [peer] for worker, peer in enumerate(peers)]


def _inverted(others: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return for each worker those among whose others it is, in order."""
    found: list[list[int]] = [[] for _ in others]
    for worker, of_worker in enumerate(others):
        for other in of_worker:
            found[other].append(worker)
    return found


class _Together(Gossip):
    """Exchange of all workers in the same round: each receives its models directly from their senders.

    Attributes
    ----------
    reads
        True if a worker receives the model of its peer; otherwise it sends its own there.
    permutes
        True if peers are those of a permutation; otherwise every worker draws its own.
    """

    transport = "swap"
    synchronous = True
    reads = False
    permutes = False
    _round = 0
    _peers: Sequence[int] = ()
    _sources: Sequence[Sequence[int]] = ()
    _targets: Sequence[Sequence[int]] = ()

    def exchange(self, worker: PeerState, round: int) -> Actions:
        """Exchange with the workers that all know to be drawn."""
        if round != self._round:  # once for all workers of a simulation, which are in the same round
            self._round, self._peers = round, self._select(round)
            others = _others(self._peers)
            self._sources = others if self.reads else _inverted(others)
            self._targets = _inverted(self._sources)
        me, update, peer = worker.worker, worker.update, self._peers[worker.worker]
        model, weight = (update.give(), update.weight) if self._targets[me] else (None, 1.0)
        received = yield worker.transport.swap(me, model, weight, self._sources, self._targets)
        if received is not None:
            self._combine(update, received, drew_itself=peer == me)
        count = 0 if received is None else received.count
        return ExchangeResult(peer, 0 if peer == me else update.n_bytes, count)

    def _select(self, round: int) -> Sequence[int]:
        """Return the peer of each worker."""
        if self.permutes:
            return self.peers.permutation(round)
        return [self.peers.drawn(worker, round) for worker in range(self.peers.n_workers)]

    def _combine(self, update: LocalUpdate, received: Any, *, drew_itself: bool) -> None:
        update.mix(received.total, self.beta)


class PullTogether(_Together):
    """Average with the weights of a peer, which sends them to all that have drawn it."""

    reads = True


class PushTogether(_Together):
    """Send the weights to the peer, and absorb all that others send in the same round."""

    def _combine(self, update: LocalUpdate, received: Any, *, drew_itself: bool) -> None:
        update.absorb(received, drew_itself=drew_itself)


class PushSumTogether(PushTogether):
    """Synchronous stochastic gradient push."""

    push_sum = True


class Permutation(_Together):
    """Send the weights to one worker and average with those of the only one that sends to this one."""

    permutes = True


MODES: dict[str, type[Gossip]] = {"pull": Pull, "push": Push, "push-sum": PushSum}
TOGETHER: dict[str, type[Gossip]] = {
    "pull": PullTogether,
    "push": PushTogether,
    "push-sum": PushSumTogether,
    "permutation": Permutation,
}
AVERAGING = ("pull", "permutation")  # modes in which a worker averages two models


# ---- declaration ----

JIN = Reference(
    "jin2016how",
    "article",
    ("Jin, Peter H.", "Yuan, Qiaochu", "Iandola, Forrest", "Keutzer, Kurt"),
    "How to scale distributed deep learning?",
    2016,
    arxiv("1611.04581"),
)

ASSRAN = Reference(
    "assran2019stochastic",
    "inproceedings",
    ("Assran, Mahmoud", "Loizou, Nicolas", "Ballas, Nicolas", "Rabbat, Michael"),
    "Stochastic Gradient Push for Distributed Deep Learning",
    2019,
    meeting(ICML.format("36th"), "344--353", "97"),
)


@dataclass(frozen=True, kw_only=True)
class GossipOptions(ParadigmOptions):
    """Gossip: a worker averages its weights with those of a peer.

    In the mode "pull" it gets the peer's weights, in "push" it sends its own, in "push-sum" it sends half of them and
    half of a weight. In "permutation" each worker is drawn once.

    Parameters
    ----------
    mode
        The exchange.
    synchronous
        All workers exchange in the same round; otherwise no worker waits. Must be `true` with `"permutation"`.
    topology
        Peers of a worker: all, its two neighbours, or in turn those 1, 2, 4, ... places further.
    include_self
        A worker may draw itself. Must be `false` with `"exponential"`.
    period
        Iterations between two exchanges.
    beta
        Part of the peer's weights in the average, in the modes "pull" and "permutation".
    """

    name: Literal["gossip"] = "gossip"
    mode: Annotated[
        Literal["pull", "push", "push-sum", "permutation"],
        Allowed('one of "pull", "push", "push-sum", "permutation"'),
    ]
    synchronous: bool = computed(lambda given: given["mode"] == "permutation", '`false`; `true` with `"permutation"`')
    topology: Literal["complete", "ring", "exponential"] = "complete"
    include_self: bool = computed(
        lambda given: given["topology"] != "exponential", '`true`; `false` with `"exponential"`'
    )
    period: Count = 1
    beta: Share = 0.5

    contribution = "position"
    form_key = "mode"
    place = 140
    colour = "#E69F00"
    waiting = "none (`synchronous`: all)"
    update = "every worker averages its weights with those of one peer"
    source = "Jin et al., 2016; Assran et al., ICML 2019"

    def _check_options(self) -> None:
        if self.mode == "permutation" and not self.synchronous:
            must = 'must be true with paradigm.mode = "permutation", in which all workers are drawn together'
            raise OptionError("paradigm.synchronous", self.synchronous, must)
        if self.include_self and self.topology == "exponential":
            must = 'must be false with paradigm.topology = "exponential", which visits the others in turn'
            raise OptionError("paradigm.include_self", self.include_self, must)
        if self.beta != 0.5 and self.mode not in AVERAGING:
            raise OptionError("paradigm.beta", self.beta, f'must be 0.5 with paradigm.mode = "{self.mode}"')

    def peers(self, n_workers: int, seed: int) -> PeerSelection:
        """Return the selection of peers."""
        return PeerSelection(n_workers, seed, self.topology, self.include_self)

    def method(self, n_workers: int, seed: int) -> Gossip:
        """Return the exchange of this mode."""
        kinds = TOGETHER if self.synchronous else MODES
        return kinds[self.mode](self.peers(n_workers, seed), self.period, self.beta)

    @property
    def needs_all(self) -> bool:
        """True if the run can be resumed only with all of its workers."""
        return self.synchronous

    @property
    def stated_form(self) -> str:
        """The option that makes all workers exchange in the same round, or the mode, for messages."""
        by_choice = self.synchronous and self.mode != "permutation"
        return "paradigm.synchronous = true" if by_choice else super().stated_form

    @property
    def papers(self) -> tuple[Reference, ...]:
        """Papers behind the paradigm."""
        return (ASSRAN, JIN) if self.mode == "push-sum" else (JIN,)

    @property
    def label(self) -> str:
        """Name with the main options, for figures."""
        text = f"gossip, {self.mode}" + ", synchronous" * (self.synchronous and self.mode != "permutation")
        text += f", {self.topology}" if self.topology != "complete" else ""
        text += f", every {self.period}" if self.period > 1 else ""
        return text + (f", beta = {self.beta:g}" if self.beta != 0.5 else "")

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        if self.mode == "permutation":
            each = f"each with a peer drawn by permutation ({self.topology})"
            return f"all workers average their weights at once, {each}"
        does = {
            "pull": "reads the weights of a peer and averages",
            "push": "sends its weights to a peer and averages its own with those received",
            "push-sum": "sends half of its weights to a peer and adds those received to its own",
        }
        waits = "all in the same round" if self.synchronous else "without waiting"
        return f"each worker {does[self.mode]}, {waits}; peers are drawn from the seed ({self.topology})"

    def moves(self, size: str, sent: str, *, compressed: bool) -> tuple[str, str]:
        """Return when bytes move, and which."""
        return every(self.period), f"{size} of weights from one worker to another, for each worker"
