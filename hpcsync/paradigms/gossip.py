"""Gossiping SGD: who exchanges weights with whom, as pure functions of the seed, the worker and the round.

Jin, Yuan, Iandola and Keutzer 2016, "How to scale distributed deep learning?", section 4. Rounds count from 1. Nobody
has to be asked, so workers that are in different rounds at the same time, a simulation, and an audit all know what was
drawn.

    complete     every worker, with equal chances
    ring         the two neighbours, with equal chances
    exponential  in turn those 1, 2, 4, ... places further on (Assran et al. 2019, stochastic gradient push)

In a permutation every worker gives to one and is given by one, so that averaging keeps the mean of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

TOPOLOGIES = ("complete", "ring", "exponential")

PEERS, PERMUTATIONS = 4, 5  # random streams of a job's seed
LEAST_WEIGHT = 2.0**-30
BLOCK = 64  # rounds that are drawn at a time


@dataclass(frozen=True)
class PeerSelection:
    """Whom workers draw. include_self: whether they may draw themselves; not with the exponential topology.
    dead: workers that there are no more; the others stand closer together, as if these had never been.

    Raises ValueError for an unknown topology, or one that cannot include oneself.
    """

    n_workers: int
    seed: int
    topology: str = "complete"
    include_self: bool = True
    dead: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise ValueError(f"there is no topology {self.topology!r}, only {', '.join(TOPOLOGIES)}")
        if self.include_self and self.topology == "exponential":
            raise ValueError("in the exponential topology workers visit others in turn, never themselves")

    def neighbours(self, worker: int) -> Sequence[int]:
        """Those whom the worker may draw, in order; a ring of two has one neighbour twice. Alone it has itself."""
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
        """Whom the worker draws in this round of its own.

        weight: its w of push-sum. Who has given away nearly all of it draws itself until something comes: other
        workers are much slower, or have ended, and numbers end somewhere.
        """
        if weight < LEAST_WEIGHT:
            return worker
        neighbours = self.neighbours(worker)
        if self.topology == "exponential":
            return neighbours[(round - 1) % len(neighbours)]
        block, at = divmod(round - 1, BLOCK)
        return neighbours[_draws(self.seed, worker, block, len(neighbours))[at]]

    def permutation(self, round: int) -> tuple[int, ...]:
        """Whom each worker gives to in this round of all: shape (n_workers,), every worker once.

        A ring turns one way and the other by turns. Drawing itself excluded, the permutation of the complete topology
        is a single cycle (Sattolo 1986).
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
        everybody = range(self.n_workers)
        return [worker for worker in everybody if worker not in self.dead] if self.dead else everybody


@lru_cache(maxsize=4096)  # workers of a simulation, which draw in turn
def _draws(seed: int, worker: int, block: int, n: int) -> list[int]:
    """Numbers below n for the rounds of a block: a generator for each round would take a tenth as long as a small
    gradient."""
    return np.random.default_rng([seed, PEERS, worker, block]).integers(n, size=BLOCK).tolist()


def _permutation(generator: np.random.Generator, n: int) -> tuple[int, ...]:
    return tuple(generator.permutation(n).tolist())


def _cycle(generator: np.random.Generator, n: int) -> tuple[int, ...]:
    order = list(range(n))
    for last in range(n - 1, 0, -1):
        other = int(generator.integers(last))
        order[last], order[other] = order[other], order[last]
    return tuple(order)
