"""Averages of pairs are atomic: none is lost or torn and their sum is kept, while the sharing ranks change vectors."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from hpcsync.mpi.transport.pair_exchange import PairExchange
from hpcsync.mpi.transport.tensor_window import HOST

SIZE = 30_001
BUSY_S = 0.3
ROUNDING = 1e-9


def shares(rank: int) -> bool:
    return rank % 2 == 1


def filled(value: float, size: int = 5) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.float64)


def share(pairs: PairExchange, vector: torch.Tensor, scalar: float = 0.0) -> None:
    with pairs.held():
        pairs.store(vector, scalar)


def exchange(comm, size: int, transport=HOST, *, compute=lambda: None) -> tuple[float, int, int, bool]:
    """Average at random while all ranks add ones to their own vectors.

    Returns
    -------
    tuple
        Error of the sum of all vectors; averages made, and averages that the sharing ranks noticed; whether no vector
        was torn.
    """
    generator = np.random.default_rng(comm.rank)
    sharing = [rank for rank in range(comm.size) if shares(rank)]
    own, scalar = filled(float(comm.rank), size).to(transport.device), float(comm.rank)
    made = noticed = steps = 0
    whole = True
    with PairExchange(comm, size, torch.float64, transport, shares=shares(comm.rank)) as pairs:

        def take() -> int:
            nonlocal scalar, whole
            found = pairs.load()
            own.copy_(found.vector)
            scalar = found.scalar
            whole &= bool((own == scalar).all())
            return found.n_averaged

        if shares(comm.rank):
            share(pairs, own, scalar)
        comm.Barrier()
        end_s = time.monotonic() + BUSY_S
        while time.monotonic() < end_s:
            compute()
            if shares(comm.rank):
                with pairs.held():
                    noticed += take()
                    own.add_(1)
                    pairs.store(own, scalar + 1)
            else:
                scalar = pairs.average(int(generator.choice(sharing)), own, scalar)
                made += 1
                whole &= bool((own == scalar).all())
                own.add_(1)
                scalar += 1
            steps += 1
        comm.Barrier()
        if shares(comm.rank):
            with pairs.held():
                noticed += take()
        comm.Barrier()
    total = comm.allreduce(float(own[0]))
    expected = comm.size * (comm.size - 1) / 2 + comm.allreduce(steps)
    return (
        abs(total - expected) / expected,
        comm.allreduce(made),
        comm.allreduce(noticed),
        comm.allreduce(whole) == comm.size,
    )


@pytest.mark.parametrize("size", [1, SIZE])
def test_no_average_is_lost_or_torn_and_the_sum_is_kept(comm, needs, size, transport):
    needs(2)
    error, made, noticed, whole = exchange(comm, size, transport)
    assert error < ROUNDING and made == noticed > 0 and whole


def test_the_sharing_ranks_may_compute_meanwhile(comm, needs):
    needs(2)
    matrix = np.ones((300, 300))
    error, made, noticed, whole = exchange(comm, SIZE, compute=lambda: matrix @ matrix)
    assert error < ROUNDING and made == noticed > 0 and whole


# ---- the protocol step by step: rank 0 averages with rank 1, whose vector is 3, while that adds 1 to it ----


def between_load_and_store(comm) -> tuple[float, float, int]:
    """Return both vectors, and the averages that rank 1 notices, if rank 0's turn comes while rank 1 changes its."""
    own, n_averaged = filled(1.0 if comm.rank == 0 else 3.0), 0
    with PairExchange(comm, 5, torch.float64, shares=comm.rank == 1) as pairs:
        if comm.rank == 1:
            share(pairs, own)
        comm.Barrier()
        if comm.rank == 1:
            with pairs.held():
                own.copy_(pairs.load().vector)
                comm.send(None, 0)
                comm.recv(source=0) if pairs._acquire.__name__ == "hasty" else time.sleep(0.01)
                pairs.store(own + 1)
        if comm.rank == 0:
            comm.recv(source=1)
            pairs.average(1, own)
            if pairs._acquire.__name__ == "hasty":
                comm.send(None, 1)
        comm.Barrier()
        if comm.rank == 1:
            found = pairs.load()
            own.copy_(found.vector)
            n_averaged = found.n_averaged
        comm.Barrier()
    return comm.bcast(float(own[0]), 0), comm.bcast(float(own[0]), 1), comm.bcast(n_averaged, 1)


def test_an_average_waits_while_the_vector_is_changed(comm, needs):
    needs(2)
    assert between_load_and_store(comm) == (2.5, 2.5, 1)  # of 1 and 3 + 1


def test_without_the_lock_an_average_is_lost(comm, needs, monkeypatch):
    needs(2)

    def hasty(self: PairExchange, rank: int) -> bool:
        lock = np.zeros(1, np.int64)
        self._locks.get(lock, rank, 0)
        self._locks.flush(rank)
        self._changes = int(lock[0]) // self._holders
        return True

    def careless(self: PairExchange, rank: int, changed: bool) -> None:
        self._locks.put(np.array([(self._changes + changed) * self._holders]), rank, 0)
        self._locks.flush(rank)

    monkeypatch.setattr(PairExchange, "_acquire", hasty)
    monkeypatch.setattr(PairExchange, "_release", careless)
    assert between_load_and_store(comm) == (2.0, 4.0, 0)  # the sum is 6 and not 5


# ---- a rank that dies: it stops in the middle, and does not continue ----


def averaged_after_death(comm, written: bool) -> tuple[float | None, float, float]:
    """Return what rank 0 gets from rank 1, which has 3, after rank 2 took its lock, wrote a row, and died."""
    own = filled(1.0)
    with PairExchange(comm, 5, torch.float64, shares=comm.rank == 1) as pairs:
        if comm.rank == 1:
            share(pairs, filled(3.0))
        comm.Barrier()
        if comm.rank == 2:
            pairs._acquire(1)
            if written:
                pairs._rows.put(filled(100.0), 1, 0)  # the spare row: the vector has changed once
                pairs._rows.flush(1)
        comm.Barrier()
        scalar = None
        if comm.rank == 0:
            learned = iter([None, None, 2])
            pairs._poll = lambda: pairs.forget(next(learned))
            scalar = pairs.average(1, own)
        comm.Barrier()
        theirs = float(pairs.load().vector[0]) if comm.rank == 1 else 0.0
        comm.Barrier()
    return (*comm.bcast((scalar, float(own[0])), 0), comm.bcast(theirs, 1))


@pytest.mark.parametrize("written", [False, True])
def test_the_lock_of_a_dead_rank_is_taken_over_and_its_unfinished_change_is_void(comm, needs, written):
    needs(3)
    assert averaged_after_death(comm, written) == (0.0, 2.0, 2.0)


def test_a_vector_whose_owner_died_while_changing_it_is_left_alone(comm, needs):
    needs(2)
    own = filled(1.0)
    with PairExchange(comm, 5, torch.float64, shares=comm.rank == 1) as pairs:
        if comm.rank == 1:
            share(pairs, filled(3.0))
            pairs._acquire(1)
        comm.Barrier()
        if comm.rank == 0:
            pairs._poll = lambda: pairs.forget(1)
            assert pairs.average(1, own) is None
        comm.Barrier()
        if comm.rank == 1:
            assert pairs.load().n_averaged == 0
        comm.Barrier()
    assert (own == 1.0).all()


# ---- the interface ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_ranks_have_the_mean_to_the_bit(comm, needs, dtype, transport):
    needs(2)
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(2, 7, generator=generator, dtype=dtype)
    own = start[comm.rank].clone() if comm.rank < 2 else None
    with PairExchange(comm, 7, dtype, transport, shares=comm.rank == 1) as pairs:
        if comm.rank == 1:
            share(pairs, own, 3.0)
            found = pairs.load()
            assert (found.vector == own).all() and found[1:] == (3.0, 0)
        comm.Barrier()
        if comm.rank == 0:
            assert pairs.average(1, own, 0.5) == 1.75
        comm.Barrier()
        if comm.rank == 1:
            found = pairs.load()
            own, rest = found.vector.clone(), found[1:]
            assert rest == (1.75, 1)
        comm.Barrier()
    if comm.rank < 2:
        assert torch.equal(own, (start[0] + start[1]) * 0.5)


def test_a_rank_that_shares_may_not_average(comm):
    with PairExchange(comm, 3, torch.float32, shares=True) as pairs, pytest.raises(AssertionError, match="shares"):
        pairs.average(comm.rank, torch.zeros(3))


def test_free_is_idempotent_and_a_freed_exchange_raises(comm):
    pairs = PairExchange(comm, 3, torch.float64, shares=False)
    pairs.free()
    pairs.free()
    with pytest.raises(ValueError, match="freed"):
        pairs.average(0, torch.zeros(3, dtype=torch.float64))
