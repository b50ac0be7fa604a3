"""Gossiping SGD: selection of the peers that exchange weights, as a pure function of seed, worker and round.

Rounds count from 1. The selection needs no communication: workers in different rounds, a simulation and an audit all
compute the same peers. The topologies are::

    complete     every worker, with equal probability
    ring         the two neighbours, with equal probability
    exponential  in turn the workers 1, 2, 4, ... places ahead (stochastic gradient push)

In a permutation every worker sends to one worker and receives from one, so that averaging preserves the mean of all.

References
----------
P. H. Jin, Q. Yuan, F. Iandola and K. Keutzer, "How to scale distributed deep learning?", 2016, arXiv:1611.04581,
section 4. M. Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019 (exponential topology).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
        if self.topology not in TOPOLOGIES:
            raise ValueError(f"topology must be one of {', '.join(TOPOLOGIES)}, got {self.topology!r}")
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
            generator = np.random.default_rng([self.seed, PERMUTATIONS, round])
            return _permutation(generator, n) if self.include_self else _cycle(generator, n)
        hops = self._hops() if self.topology == "exponential" else [1, -1]
        if self.topology == "ring" and self.include_self:
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
    return np.random.default_rng([seed, PEERS, worker, block]).integers(n, size=BLOCK).tolist()


def _permutation(generator: np.random.Generator, n: int) -> tuple[int, ...]:
    return tuple(generator.permutation(n).tolist())


def _cycle(generator: np.random.Generator, n: int) -> tuple[int, ...]:
    order = list(range(n))
    for last in range(n - 1, 0, -1):
        other = int(generator.integers(last))
        order[last], order[other] = order[other], order[last]
    return tuple(order)
