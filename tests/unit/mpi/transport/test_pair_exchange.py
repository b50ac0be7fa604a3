"""Averages of pairs under every order of the ranks' one-sided operations that hypothesis draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hpcsync.audit.averaging_order import Averaged, Changed, unexplained
from hpcsync.mpi.transport import pair_exchange
from hpcsync.mpi.transport.pair_exchange import PairExchange
from tests.unit.mpi.transport.interleaving import Call, FakeTransport, FakeWindow, Memory

SIZE = 2
MOST_STEPS = 5_000


class Standstill(Exception):
    """The ranks make no progress."""


class Spinning:
    """Stands for `Backoff`."""

    def until(self, poll: Callable[[], Any]) -> Any:
        while not (found := poll()):
            pass
        return found


class Death(NamedTuple):
    """Rank 0 dies after so many of its operations; `noticed` if the others learn of it."""

    after_steps: int
    noticed: bool = True


class Ranks:
    """Ranks with an exchange each, whose operations are interleaved as drawn.

    Parameters
    ----------
    n_ranks
        Number of ranks.
    shares
        Returns whether a rank shares its vector.
    draws
        Numbers that choose, one after the other, the rank that makes its next operations.
    """

    def __init__(self, n_ranks: int, shares: Callable[[int], bool], draws: list[int]) -> None:
        self._memory, self._draws, self._turn = Memory(n_ranks), iter(draws), 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pair_exchange, "Window", FakeWindow)
            self.pairs = [
                PairExchange(comm, SIZE, torch.float64, FakeTransport(), shares=shares(comm.rank), backoff=Spinning())
                for comm in self._memory.comms
            ]

    def run(self, programs: dict[int, Callable[[], None]], death: Death | None = None) -> None:
        """Run the programs of ranks to their end, or to their death; raise Standstill after too many operations."""
        calls = [Call(self._memory, rank, program) for rank, program in programs.items()]
        for _ in range(MOST_STEPS):
            if not (calls := [call for call in calls if not call.done]):
                return
            self._turn = self._memory.choice = next(self._draws, self._turn + 1)
            call = calls[self._turn % len(calls)]
            call.step()
            if death is not None and call.rank == 0 and call.n_steps == death.after_steps:
                call.die()
                for pairs in self.pairs if death.noticed else []:
                    pairs.forget(0)
        for call in calls:
            call.die()
        raise Standstill


def is_passive(rank: int) -> bool:
    return rank % 2 == 1


class Training:
    """Active ranks average with passive ones and add 1 to their vectors, and so do passive ranks.

    Attributes
    ----------
    rows
        Rows of each rank, as in a trace.
    averages
        Averages, with the passive rank of each, in the order in which they ended.
    vectors
        Vector of each rank.
    """

    def __init__(
        self, draws: list[int], peers: list[list[int]], n_passive_steps: int, death: Death | None = None
    ) -> None:
        n_ranks = 2 * len(peers)
        self._ranks, self._peers, self._n_passive_steps = Ranks(n_ranks, is_passive, draws), peers, n_passive_steps
        self.rows: list[list[Changed]] = [[] for _ in range(n_ranks)]
        self.averages: list[tuple[int, Averaged]] = []
        self.vectors = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(n_ranks)]
        passive = list(filter(is_passive, range(n_ranks)))
        self._ranks.run({rank: lambda rank=rank: self._share(rank) for rank in passive})
        programs = {rank: self._passive if is_passive(rank) else self._active for rank in range(n_ranks)}
        self._ranks.run(
            {rank: lambda rank=rank, program=program: program(rank) for rank, program in programs.items()}, death
        )
        self._ranks.run({rank: lambda rank=rank: self._take(rank, 0) for rank in passive})

    def _share(self, rank: int) -> None:
        with self._ranks.pairs[rank].held():
            self._ranks.pairs[rank].store(self.vectors[rank])

    def _passive(self, rank: int) -> None:
        for _ in range(self._n_passive_steps):
            self._take(rank, 1)

    def _take(self, rank: int, n_steps: int) -> None:
        pairs, vector = self._ranks.pairs[rank], self.vectors[rank]
        with pairs.held():
            found = pairs.load()
            assert (found.vector == found.scalar).all(), "torn"
            vector.copy_(found.vector).add_(n_steps)
            self.rows[rank].append(Changed(found.n_averaged, n_steps, found.scalar + n_steps))
            pairs.store(vector, found.scalar + n_steps)

    def _active(self, rank: int) -> None:
        number, vector = 0.0, self.vectors[rank]
        for peer in [2 * (choice % len(self._peers)) + 1 for choice in self._peers[rank // 2]]:
            before, mean = number, self._ranks.pairs[rank].average(peer, vector, number)
            assert mean is not None and (vector == mean).all(), "torn"
            number = mean + 1
            vector.add_(1)
            self.averages.append((peer, Averaged(rank, before, number)))


def check(draws: list[int], peers: list[list[int]], n_passive_steps: int) -> None:
    run = Training(draws, peers, n_passive_steps)
    n_steps = sum(map(len, peers)) + n_passive_steps * len(peers)
    assert sum(float(vector[0]) for vector in run.vectors) == pytest.approx(n_steps, abs=1e-12)
    for rank, own in enumerate(run.rows):
        with_it = [average for peer, average in run.averages if peer == rank]
        assert sum(row.n_averaged for row in own) == len(with_it)
        assert unexplained(own, with_it) is None


DRAWN = (
    st.lists(st.integers(0, 5), max_size=300),
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=2),
    st.integers(1, 3),
)


@settings(max_examples=60, deadline=None)
@given(*DRAWN)
def test_averages_are_atomic_and_end_in_any_order_of_operations(draws, peers, n_passive_steps):
    check(draws, peers, n_passive_steps)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), *DRAWN)
def test_after_a_death_the_others_continue_and_no_vector_is_torn(after_steps, draws, peers, n_passive_steps):
    run = Training(draws, peers, n_passive_steps, Death(after_steps))
    noticed = sum(row.n_averaged for own in run.rows for row in own)
    assert len(run.averages) <= noticed <= len(run.averages) + 1  # its last one may be complete


def test_ranks_that_do_not_learn_of_a_death_stand_still():
    assert any(stands_still(Death(after_steps, noticed=False)) for after_steps in range(1, 30))


def stands_still(death: Death) -> bool:
    try:
        Training([], [[0, 0]], 2, death)
    except Standstill:
        return True
    return False


ACQUIRE, RELEASE = PairExchange._acquire, PairExchange._release


def acquire_without_lock(self: PairExchange, rank: int) -> bool:
    lock = np.zeros(1, np.int64)
    self._locks.get(lock, rank, 0)
    self._locks.flush(rank)
    self._changes = int(lock[0]) // self._holders
    return True


def release_without_lock(self: PairExchange, rank: int, changed: bool) -> None:
    self._locks.put(np.array([(self._changes + changed) * self._holders]), rank, 0)
    self._locks.flush(rank)


def only_the_owner(without_lock: Callable[..., Any], locked: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, rank, *args: (without_lock if rank == self._rank else locked)(self, rank, *args)


def write_after_the_count(self: PairExchange, peer: int, vector: torch.Tensor, scalar: float) -> None:
    self._release(peer, True)
    WRITE(self, peer, vector, scalar)


def write_from_a_temporary(self: PairExchange, peer: int, vector: torch.Tensor, scalar: float) -> None:
    row = 1 - self._changes % 2
    self._scalars.put(np.array([scalar]), peer, row)
    self._rows.put(vector, peer, row * self._size)
    self._flush(peer)


WRITE = PairExchange._write


@pytest.mark.parametrize(
    "broken",
    [
        {"_acquire": acquire_without_lock, "_release": release_without_lock},
        {
            "_acquire": only_the_owner(acquire_without_lock, ACQUIRE),
            "_release": only_the_owner(release_without_lock, RELEASE),
        },
        {"_write": write_after_the_count},
        {"_write": write_from_a_temporary},
    ],
)
def test_a_broken_variant_is_caught(broken, monkeypatch):
    for name, method in broken.items():
        monkeypatch.setattr(PairExchange, name, method)

    # `write_after_the_count` is caught by one in three hundred.
    @settings(max_examples=10_000, deadline=None, database=None, phases=[Phase.generate])
    @given(*DRAWN)
    def property_of_all(draws, peers, n_passive_steps):
        check(draws, peers, n_passive_steps)

    with pytest.raises((AssertionError, ExceptionGroup)):
        property_of_all()


def test_ranks_that_lock_their_own_vector_before_the_peers_stand_still():
    """Two ranks that share their vectors and average with each other would need two locks."""
    ranks = Ranks(2, lambda rank: True, [0, 1] * 20)

    def both(rank: int) -> None:
        with ranks.pairs[rank].held():
            ranks.pairs[rank]._acquire(1 - rank)

    with pytest.raises(Standstill):
        ranks.run({0: lambda: both(0), 1: lambda: both(1)})


@contextmanager
def held_for_good_after_an_error(self: PairExchange) -> Iterator[None]:
    self._acquire(self._rank)
    self._changed = False
    yield
    self._release(self._rank, self._changed)


@pytest.mark.parametrize("broken", [False, True])
def test_after_an_error_in_a_step_others_may_average(broken, monkeypatch):
    """The negative control keeps the lock, so that the peer waits for ever."""
    if broken:
        monkeypatch.setattr(PairExchange, "held", held_for_good_after_an_error)
    ranks = Ranks(2, lambda rank: rank == 1, [0, 1] * 20)

    def step() -> None:
        with suppress(ZeroDivisionError), ranks.pairs[1].held():
            raise ZeroDivisionError

    ranks.run({1: step})
    with pytest.raises(Standstill) if broken else nullcontext():
        ranks.run({0: lambda: ranks.pairs[0]._acquire(1)})
