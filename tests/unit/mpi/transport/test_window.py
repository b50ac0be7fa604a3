"""Windows between nodes: large transfers in pieces, and atomic sums by compare-and-swap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcsync.config.errors import JobError
from hpcsync.mpi.transport import communicator, window
from hpcsync.mpi.transport.in_memory import MemoryWindow, World
from hpcsync.mpi.transport.thread_ranks import run
from hpcsync.mpi.transport.window import Window
from tests.mpi.transport import test_pair_exchange, test_published_replica, test_push_inbox

PIECE_BYTES = 64


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(window, "PIECE_BYTES", PIECE_BYTES)


def on_nodes(n_ranks: int, body: Any, nodes: list[int] | None = None) -> list[Any]:
    """Run each rank on a node of its own."""
    return run(n_ranks, body, world=World(n_ranks, nodes=nodes or list(range(n_ranks))))


@pytest.mark.parametrize(("code", "raised"), [(MPI.ERR_WIN, JobError), (MPI.ERR_OTHER, MPI.Exception)])
def test_an_mpi_that_creates_no_window_is_refused(code: int, raised: type[Exception], monkeypatch) -> None:
    def fail(*_: Any) -> None:
        raise MPI.Exception(code)

    monkeypatch.setattr(communicator, "allocate", fail)
    with pytest.raises(raised) as caught:
        on_nodes(2, lambda comm: Window(comm, 1, np.int64))
    words = "MPI: needs windows over all ranks, which this library cannot create here ("
    assert str(caught.value).startswith(words) is (raised is JobError)


def test_a_rank_that_fails_does_not_wait_for_the_others_to_free_a_window() -> None:
    def body(comm: Any) -> None:
        with Window(comm, 1, np.int64):
            if comm.rank == 1:
                raise ArithmeticError
            comm.Recv(np.zeros(1), 1)  # for ever

    with pytest.raises(ArithmeticError):
        run(2, body, limit_s=20.0)


# ---- pieces ----


class Later:
    """Request that is complete once somebody waits, or at the second test."""

    under_way: list[Later] = []
    most = 0

    def __init__(self) -> None:
        self.tests = 0
        self.under_way.append(self)
        Later.most = max(Later.most, len(self.under_way))

    def Test(self) -> bool:
        self.tests += 1
        if self.tests > 1 and self in self.under_way:
            self.under_way.remove(self)
        return self.tests > 1


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """Numbers of elements of the pieces, which complete later, in their order."""
    found: list[int] = []
    monkeypatch.setattr(Later, "under_way", [])
    monkeypatch.setattr(Later, "most", 0)
    monkeypatch.setattr(communicator, "wait_any", lambda requests: requests[-1].Test())

    def put(self: MemoryWindow, source: Any, rank: int, place: tuple[int, int]) -> Later:
        self.Put(source, rank, place)
        found.append(len(source))
        return Later()

    def get(self: MemoryWindow, into: Any, rank: int, place: tuple[int, int]) -> Later:
        self.Get(into, rank, place)
        found.append(len(into))
        return Later()

    monkeypatch.setattr(MemoryWindow, "Rput", put)
    monkeypatch.setattr(MemoryWindow, "Rget", get)
    return found


def there_and_back(size: int, nodes: list[int]) -> None:
    """Rank 0 puts to all others, and gets back from all of them."""

    def body(comm: Any) -> None:
        with Window(comm, size + 3, np.float64) as own:
            own.local[:] = -1.0
            own.sync()
            comm.Barrier()
            if comm.rank == 0:
                sent = {rank: rank + np.arange(float(size)) for rank in range(1, comm.size)}
                for rank, vector in sent.items():
                    own.put(vector, rank, 2)
                for rank in reversed(sent):
                    own.flush(rank)
                found = {rank: np.zeros(size) for rank in sent}
                for rank, into in found.items():
                    own.get(into, rank, 2)
                for rank in sent:
                    own.flush(rank)
                assert all((found[rank] == sent[rank]).all() for rank in sent)
            comm.Barrier()
            own.sync()
            assert comm.rank == 0 or own.local[[0, 1, -1]].tolist() == [-1.0] * 3

    on_nodes(len(nodes), body, nodes)


def test_between_nodes_a_transfer_is_made_in_pieces_of_which_few_are_under_way(sizes):
    there_and_back(83, [0, 1, 2])  # 664 bytes
    assert sorted(set(sizes)) == [3, 8] and len(sizes) == 2 * 2 * 11
    assert Later.most == 2 * window.PIECES_UNDER_WAY, "with either rank"
    assert Later.under_way == [], "flushed, although it was not complete"


def test_on_a_node_and_of_one_piece_it_is_not(sizes):
    there_and_back(83, [0, 0, 0])
    there_and_back(8, [0, 1, 2])
    assert sizes == []


def test_a_flush_that_does_not_wait_for_pieces_is_noticed(sizes, monkeypatch):
    monkeypatch.setattr(window._Transfer, "advance", lambda self: True)
    with pytest.raises(AssertionError):
        there_and_back(83, [0, 1])


# ---- atomic sums ----


def each_adds(dtype: Any) -> bool:
    """Return whether ranks that add 1 and 2 to a word in turn get all numbers in between, and none twice."""

    def body(comm: Any) -> list[float]:
        with Window(comm, 2, dtype) as words:
            words.local[:] = 0
            words.sync()
            comm.Barrier()
            before = [float(words.fetch_add(1 + turn % 2, 0, 1)) for turn in range(200)]
            comm.Barrier()
            assert words.fetch_add(0, 0, 1) == words.fetch_add(0, 0, 1)
            comm.Barrier()
        return before

    found = on_nodes(3, body)
    steps = sorted((value, 1 + turn % 2) for values in found for turn, value in enumerate(values))
    return [value for value, _ in steps] == list(np.cumsum([0, *(step for _, step in steps[:-1])]))


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_between_nodes_sums_are_atomic(dtype):
    assert each_adds(dtype)


def test_a_swap_that_is_not_atomic_is_noticed(monkeypatch):
    def swap(self: Window, operands: np.ndarray, rank: int, offset: int) -> np.ndarray:
        before = np.zeros(1, operands.dtype)
        self._open.Get(before, rank, (offset, 1))
        self._open.Flush(rank)
        if before[0] == operands[1]:
            self._open.Put(operands[:1], rank, (offset, 1))
            self._open.Flush(rank)
        return before

    monkeypatch.setattr(Window, "_swap", swap)
    assert not each_adds(np.int64)


# ---- the protocols on it ----


@pytest.mark.parametrize("nodes", [[0, 1, 2], [0, 0, 1]])
def test_protocols_between_nodes(monkeypatch, nodes):
    """Their vectors are of many pieces; the tests of a node show what goes wrong without the protocols."""
    monkeypatch.setattr(test_published_replica, "SIZE", 131)

    def body(comm: Any) -> None:
        _, reads, mixed, back = test_published_replica.hammer(comm, torch.float64, until_mixed=False)
        assert reads > 0 and (mixed, back) == (0, 0)
        kept, sent, _ = test_push_inbox.exchange(comm, 131, compute=lambda: None)
        assert kept and sent > 0
        error, made, noticed, whole = test_pair_exchange.exchange(comm, 131)
        assert error < test_pair_exchange.ROUNDING and made == noticed > 0 and whole

    on_nodes(3, body, nodes)
