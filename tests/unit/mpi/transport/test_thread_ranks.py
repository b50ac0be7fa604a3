"""Ranks that are threads: what they share, what each has for itself, and how a failure ends them.

A broken transport must be noticed by the runs on it: each fault here is one that only a transport can have.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcsync.cli.rank_main import train
from hpcsync.config.job import Job
from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.mpi import session_base
from hpcsync.mpi.collectives.allreduce import mean_vector
from hpcsync.mpi.transport import in_memory, messages, thread_ranks
from hpcsync.mpi.transport.background_thread import Background
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.in_memory import MemoryWindow, Message, Post, World
from hpcsync.mpi.transport.node_topology import on_one_node
from hpcsync.mpi.transport.published_replica import PublishedReplica
from hpcsync.mpi.transport.thread_ranks import TimeLimit, run
from hpcsync.mpi.transport.turns import ProcessState, Wait
from hpcsync.mpi.transport.window import Window
from hpcsync.paradigms.peer_method import StepCounts
from tests.mpi.training import failures, simulated

SIZES = (1, 2, 3, 5, 8)


# ---- collectives and messages ----


@pytest.mark.parametrize("n_ranks", SIZES)
def test_collectives_give_what_mpi_gives(n_ranks):
    def body(comm: Any) -> None:
        ranks = list(range(comm.size))
        assert comm.allgather([comm.rank]) == [[rank] for rank in ranks]
        assert comm.gather(comm.rank, 0) == (ranks if comm.rank == 0 else None)
        assert comm.bcast(comm.rank, comm.size - 1) == comm.size - 1
        assert comm.allreduce(comm.rank + 1) == sum(ranks) + comm.size
        assert comm.allreduce(comm.rank > 0, MPI.LAND) == (comm.size == 0)
        assert comm.allreduce(comm.rank, MPI.MAX) == ranks[-1]
        array = np.full(3, comm.rank, np.int64)
        comm.Allreduce(MPI.IN_PLACE, array)
        assert array.tolist() == [sum(ranks)] * 3
        own, everybody = np.array([comm.rank, 7.0]), np.empty((comm.size, 2))
        comm.Iallgather(own, everybody).Wait()
        assert everybody.tolist() == [[rank, 7.0] for rank in ranks]
        octets = np.zeros(sum(ranks), np.uint8)
        begins = np.cumsum([0, *ranks[:-1]])
        octets[begins[comm.rank] :][: comm.rank] = comm.rank
        comm.Allgatherv(MPI.IN_PLACE, [octets, np.array(ranks), begins, MPI.BYTE])
        assert octets.tolist() == [rank for rank in ranks for _ in range(rank)]
        shared = np.full(2, comm.rank, np.int32)
        comm.Bcast(shared, 0)
        assert shared.tolist() == [0, 0]

    run(n_ranks, body)


def test_objects_are_copies():
    given: dict[int, list[int]] = {}

    def body(comm: Any) -> None:
        given[comm.rank] = [comm.rank]
        found = comm.allgather(given[comm.rank])
        assert all(value is not given[rank] for rank, value in enumerate(found))
        found[0].append(7)
        assert comm.allgather(None) and given[0] == [0]

    run(2, body)


def test_a_communicator_is_split_and_freed():
    def body(comm: Any) -> None:
        odd = comm.Split(comm.rank % 2, -comm.rank)
        assert odd.allgather(comm.rank) == [rank for rank in (4, 3, 2, 1, 0) if rank % 2 == comm.rank % 2]
        some = comm.Split(0 if comm.rank < 2 else MPI.UNDEFINED)
        assert (some == MPI.COMM_NULL) == (comm.rank >= 2)
        other = comm.Dup()
        assert other != comm and other != MPI.COMM_NULL
        other.Free()
        assert other == MPI.COMM_NULL
        assert on_one_node(comm)

    run(5, body)


def test_ranks_may_be_on_several_nodes():
    def body(comm: Any) -> tuple[bool, int]:
        return on_one_node(comm), comm.Split_type(MPI.COMM_TYPE_SHARED).size

    assert run(3, body, world=World(3, nodes=[0, 0, 1])) == [(False, 2), (False, 2), (False, 1)]


def test_messages_come_in_order_to_the_receives_of_their_tag():
    def body(comm: Any) -> None:
        if comm.rank == 0:
            for number in range(3):
                comm.Send(np.array([number]), 1, tag=5)
                comm.Isend(np.array([10 + number]), 1, tag=6).Wait()
        else:
            into, posted = np.zeros(1, np.int64), np.zeros(1, np.int64)
            receive = comm.Recv_init(posted, MPI.ANY_SOURCE, 6)
            receive.Start()
            found = []
            for _ in range(3):
                comm.Recv(into, 0, 5)
                receive.Wait()
                found.append((int(into[0]), int(posted[0])))
                receive.Start()
            assert found == [(0, 10), (1, 11), (2, 12)]
            assert not receive.Test()
            receive.Cancel()
            receive.Wait()

    run(2, body)


def test_ranks_that_call_different_collectives_are_told():
    with pytest.raises(RuntimeError, match="rank . calls (Barrier|allgather) where another rank calls"):
        run(2, lambda comm: comm.Barrier() if comm.rank else comm.allgather(1))


# ---- windows ----


def test_a_window_is_checked_more_strictly_than_mpi_does():
    def body(comm: Any) -> None:
        window = Window(comm, 4, np.int64)
        assert (window.local != 0).all(), "new memory holds garbage"
        comm.Barrier()
        word = np.full(1, comm.rank)
        window.put(word, (comm.rank + 1) % comm.size, 2)
        window.flush((comm.rank + 1) % comm.size)
        comm.Barrier()
        assert window.local[2] == (comm.rank - 1) % comm.size
        with pytest.raises(IndexError, match="8 bytes at 32 of rank 0, which has 32"):
            window.put(word, 0, 4)
        comm.Barrier()
        window.local[0] = 0
        comm.Barrier()
        before = [int(window.fetch_add(1, 0, 0)) for _ in range(10)]
        everybody = sorted(number for its in comm.allgather(before) for number in its)
        assert everybody == list(range(10 * comm.size)), "sums are atomic"
        window.local[1] = 0
        comm.Barrier()
        found = comm.allgather(window.compare_and_swap(0, 7, 0, 1))
        assert sorted(found) == [0, 7, 7], "one rank finds what it expects"
        window.free()

    run(3, body)


def test_other_ranks_run_between_the_two_parts_of_a_copy():
    """As MPI permits: a reader without protection sees a mixture."""
    torn, deadline_s = threading.Event(), time.monotonic() + 100

    def body(comm: Any) -> None:
        window = Window(comm, 64, np.int64)
        window.local[:] = number = 0
        comm.Barrier()
        while not torn.is_set() and time.monotonic() < deadline_s:
            number += 1
            if comm.rank == 0:
                window.put(np.full(64, number), 1, 0)
            else:
                if len(set(window.local.tolist())) > 1:
                    torn.set()
                window.sync()
        comm.Barrier()
        window.free()

    run(2, body)
    assert torn.is_set()


# ---- each rank has a process of its own, as far as it can tell ----


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


def test_a_rank_draws_as_if_it_were_alone():
    def body(comm: Any) -> list[list[float]]:
        torch.manual_seed(comm.rank)
        np.random.seed(comm.rank)
        random.seed(comm.rank)
        found = []
        for _ in range(5):
            found.append(draws())
            comm.Barrier()
        return found

    before = draws(), torch.get_rng_state()
    several = run(3, body)
    assert torch.equal(torch.get_rng_state(), before[1]), "the process goes on where it was"
    assert several == [run(1, lambda comm, rank=rank: alone(rank))[0] for rank in range(3)]


def alone(rank: int) -> list[list[float]]:
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    return [draws() for _ in range(5)]


def test_without_turns_ranks_would_share_generators(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(ProcessState, "establish", lambda self: None)

    def body(comm: Any) -> list[list[float]]:
        found = []
        for _ in range(5):
            found.append(draws())
            comm.Barrier()
        return found

    first, second = run(2, body)
    assert first != second


def test_hooks_and_settings_are_the_processs_again():
    before = sys.excepthook, sys.getswitchinterval(), torch.get_num_threads(), time.sleep, threading.Thread.join
    environment = dict(os.environ)

    def body(comm: Any) -> None:
        hook = sys.excepthook
        sys.excepthook = mine = lambda *_: None
        sys.setswitchinterval(1e-4)
        comm.Barrier()
        assert sys.excepthook is mine
        sys.excepthook = hook

    run(3, body)
    after = sys.excepthook, sys.getswitchinterval(), torch.get_num_threads(), time.sleep, threading.Thread.join
    assert after == before and dict(os.environ) == environment


def test_ranks_sleep_at_the_same_time():
    world, all_sleep = World(8), threading.Barrier(8)
    world.ended.wait = lambda seconds: all_sleep.wait(60)
    run(8, lambda comm: time.sleep(0.5), world=world)


@pytest.mark.parametrize(("words", "pause_s"), [(True, 20.0), (False, 0.2)])
def test_a_rank_is_woken_by_the_counters_of_a_mean(words, pause_s, monkeypatch):
    """The control: ranks that nobody wakes wait until their pauses are over."""
    monkeypatch.setattr(in_memory, "PAUSE_S", pause_s)
    if not words:
        monkeypatch.setattr(in_memory, "WORDS_BYTES", 0)

    def body(comm: Any) -> None:
        mean = mean_vector(comm, 1000, torch.float64)
        comm.Barrier()
        begin_s = time.perf_counter()
        for _ in range(10):
            mean.mean(0, 1000, StepCounts(1))
        took_s.append(time.perf_counter() - begin_s)
        comm.Barrier()
        mean.free()

    took_s: list[float] = []
    run(2, body)
    assert (min(took_s) < 5 * pause_s) == words, took_s


@pytest.mark.parametrize("ready", [True, False])
def test_a_rank_that_waits_is_woken_once(ready, monkeypatch):
    """The control: ranks that are woken by whatever changes for them take a turn for each of these messages."""

    def body(comm: Any) -> None:
        received = np.zeros(1)
        if comm.rank == 0:
            comm.Recv(received, source=1, tag=2)
            assert received == 100
        else:
            while not comm.world._waits[0]:
                comm.world.sleep(0.01)
            ended.clear()
            for n in range(100):
                comm.Send(np.full(1, float(n)), 0, tag=1)
            comm.Send(np.full(1, 100.0), 0, tag=2)
            n_woken.append(sum(wait.ready is not bool for wait in ended))

    ended: list[Wait] = []
    n_woken: list[int] = []
    world = World(2)
    end = world.turns.end
    monkeypatch.setattr(world.turns, "end", lambda wait: (ended.append(wait), end(wait)))
    if not ready:

        def wait_for_anything(rank: int, ready: Any) -> None:
            while not ready():
                World._wait(world, rank, iter([False, *[True] * 100]).__next__)

        monkeypatch.setattr(world, "wait", wait_for_anything)
    run(2, body, world=world)
    assert (n_woken == [1]) == ready, n_woken


def test_a_rank_may_wait_for_a_thread_that_waits_for_other_ranks():
    def body(comm: Any) -> None:
        background = Background()
        background.submit(comm.Dup().Barrier)
        background.wait()
        background.close()

    run(3, body)


# ---- ends ----


def test_the_first_failure_ends_all_ranks_and_is_raised():
    def body(comm: Any) -> None:
        if comm.rank == 1:
            raise ValueError("rank 1 is broken")
        Backoff(comm).until(lambda: None)

    before = threading.active_count()
    with pytest.raises(ValueError, match="rank 1 is broken"):
        run(3, body)
    assert threading.active_count() == before


def test_ranks_that_wait_for_ever_are_ended_and_said_where(monkeypatch):
    before = threading.active_count()

    def body(comm: Any) -> None:
        if comm.rank:
            comm.Recv(np.zeros(1), 0)

    with pytest.raises(TimeLimit, match=r"(?s)^rank 1, rank 2 after 2 s:\nrank 1:\n.*comm\.Recv"):
        run(3, body, limit_s=2)
    assert threading.active_count() == before


def test_a_run_that_fails_leaves_no_thread(tmp_path, monkeypatch):
    """Neither evaluator nor monitor nor that of the buckets."""
    monkeypatch.setattr(session_base, "FAREWELL_S", 0.1)
    before = threading.active_count()
    this = job({"name": "allreduce"}, 3, servers=0, stop={"updates": 10**6}, evaluation={"every_samples": 8})

    def fail(self: Any, *args: Any, **options: Any) -> None:
        raise ValueError("the trace is broken")

    monkeypatch.setattr(PeerCoordinator, "evaluated", fail)
    with pytest.raises(ValueError, match="the trace is broken"):
        run(3, lambda comm: train(comm, this, tmp_path))
    assert threading.active_count() == before


def test_a_thread_that_outlives_its_rank_is_reported(monkeypatch):
    monkeypatch.setattr(thread_ranks, "ENDING_S", 0.1)
    event = threading.Event()
    with pytest.raises(RuntimeError, match=r"(?s)threads did not end:\nforgotten:.*event\.wait"):
        run(2, lambda comm: threading.Thread(target=lambda: event.wait(), name="forgotten", daemon=True).start())
    event.set()


# ---- runs on a broken transport ----


def job(paradigm: Any, workers: int, servers: int = 1, **tables: Any) -> Job:
    table = {
        "name": "test",
        "seed": 3,
        "workload": {"name": "linear", "batch_size": 8, "features": 40, "samples": 200},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "stop": {"updates": 12},
        "evaluation": {"every_samples": 0},
        "paradigm": paradigm,
        "cluster": {"servers": servers, "workers": workers, "compute": {"model": "constant", "seconds": 0.001}},
    }
    return Job.from_table(table | tables)


class Dropping(World):
    """Loses one message."""

    to_lose = 20

    def deliver(self, post: Post, message: Message) -> None:
        self.to_lose -= message.tag == messages.TAG_GRANT
        if self.to_lose or message.tag != messages.TAG_GRANT:
            super().deliver(post, message)
        else:
            self.to_lose = -1


class Reordering(World):
    """Lets a message of the control plane overtake the one before it, from the same rank to the same rank."""

    def __init__(self, n_ranks: int) -> None:
        super().__init__(n_ranks)
        self.kept: dict[tuple[int, int], Message] = {}

    def deliver(self, post: Post, message: Message) -> None:
        key = id(post), message.source
        if message.tag != messages.TAG_COMMAND:
            super().deliver(post, message)
        elif key in self.kept:
            super().deliver(post, message)
            super().deliver(post, self.kept.pop(key))
        else:
            self.kept[key] = message


class Tearing(World):
    """Copies the second half of a vector as it was at the previous copy from the same place."""

    def __init__(self, n_ranks: int) -> None:
        super().__init__(n_ranks)
        self.previous: dict[int, np.ndarray] = {}

    def copy(self, into: np.ndarray, source: np.ndarray) -> None:
        half = len(source) // 2
        before = self.previous.get(source.ctypes.data, source)
        self.previous[source.ctypes.data] = source.copy()
        super().copy(into, source)
        if half > 8 and len(before) == len(source):
            into[half:] = before[half:]


@pytest.mark.parametrize(
    ("world", "noticed"),
    [(World, False), (Dropping, True), (Reordering, True), (Tearing, True)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_run_notices_a_broken_transport(tmp_path: Path, monkeypatch, world, noticed):
    """By the bits of its weights, by its own checks, or because it does not end."""
    monkeypatch.setattr(session_base, "FAREWELL_S", 0.1)
    this = job({"name": "bsp"}, 3, servers=2)
    try:
        limit_s = 3 if noticed else 60
        weights = run(5, lambda comm: train(comm, this, tmp_path).flat.weights.clone(), world=world(5), limit_s=limit_s)
    except (TimeLimit, RuntimeError):
        assert noticed
    else:
        right = np.array_equal(weights[0].numpy(), simulated(this)) and failures(tmp_path / "trace.h5") == []
        assert right != noticed


def forgetting(self: MemoryWindow, operand: np.ndarray, before: np.ndarray, rank: int, offset: int, op: Any) -> None:
    """Lose what others add to a rank's words, as the claims of a replica's readers."""
    lost = self._comm.rank != rank
    FETCH_AND_OP(self, np.zeros_like(operand) if lost else operand, before, rank, offset, op)


FETCH_AND_OP = MemoryWindow.Fetch_and_op


def test_a_replica_that_is_not_protected_is_read_torn(monkeypatch):
    """The rows of a published replica are read whole; on a transport that loses the claims they are not."""

    def body(comm: Any) -> int:
        torn = 0
        with PublishedReplica(comm, 64, torch.float64) as published:
            published.publish(torch.zeros(64, dtype=torch.float64))
            comm.Barrier()
            into = torch.empty(64, dtype=torch.float64)
            for number in range(1, 300):
                if comm.rank == 0:
                    published.publish(torch.full((64,), float(number), dtype=torch.float64))
                else:
                    published.read(0, into)
                    torn += len(set(into.tolist())) > 1
            comm.Barrier()
        return torn

    assert sum(run(3, body)) == 0
    monkeypatch.setattr(MemoryWindow, "Fetch_and_op", forgetting)
    assert sum(run(3, body)) > 0
