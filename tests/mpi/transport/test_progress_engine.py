"""Progress of one-sided transfers is chosen by measurement. Between hosts: tests/hosts/test_gossip_reads.py."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from mpi4py import MPI

from hpcsync.mpi.transport import progress_engine as module
from hpcsync.mpi.transport.backoff import NETWORK_PROBES
from hpcsync.mpi.transport.busy_target import Trial, farthest, while_busy
from hpcsync.mpi.transport.progress_engine import (
    BUSY_S,
    PASSIVE_SHARE,
    POLL_S,
    THREAD_COST_MAX,
    THREAD_GAIN_MIN,
    choose,
    worthwhile,
)
from hpcsync.mpi.transport.ulfm import RankFailed


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "progression"]


class Counting:
    """A communicator that counts the calls that move transfers."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.calls = comm, 0

    def Iprobe(self) -> bool:
        self.calls += 1
        return self.comm.Iprobe()

    def Free(self) -> None:
        self.comm.Free()

    def __eq__(self, other: object) -> bool:
        return self.comm == other


def calls_in(progression, seconds: float, enough: int | None = None) -> int:
    """MPI calls made for others in so many seconds of computing, or until there are enough."""
    before, end_s = progression._comm.calls, time.perf_counter() + seconds
    while time.perf_counter() < end_s and (enough is None or progression._comm.calls < before + enough):
        np.ones(100).sum()
        progression.poll()
    return progression._comm.calls - before


def test_on_one_node_no_help_is_needed(comm):
    for _ in range(20):  # on a busy machine a get may wait for a core
        comm.Barrier()
        begin_s = time.perf_counter()
        progression = choose(comm)
        if progression.kind == "passive":
            break
        progression.close()
    with closing(progression):
        seconds = comm.allreduce(time.perf_counter() - begin_s, MPI.MAX)
        assert progression.kind == "passive" and helpers() == []
        assert progression.get_s_with is None and progression.cost is None
        if comm.size == 1:
            assert progression.get_s_without is None
        else:
            assert progression.get_s_without < BUSY_S
        if comm.rank == 0:
            print(f"chosen in {seconds:.3f} s; a get took {progression.get_s_without} s")
        progression._comm = Counting(progression._comm)
        assert calls_in(progression, 0.02) == 0


@pytest.mark.parametrize("kind", ["passive", "thread", "hooks"])
def test_the_requested_kind_is_active_until_close(comm, kind):
    interval_s = sys.getswitchinterval()
    progression = choose(comm, kind)
    assert progression.kind == kind
    assert len(helpers()) == (kind == "thread")
    if comm.size > 1 and kind != "passive":
        assert progression.get_s_with > 0 and 0 <= progression.cost < 1
    progression._comm = Counting(progression._comm)
    if kind == "passive":
        assert calls_in(progression, 0.02) == 0
    else:
        assert calls_in(progression, 20.0, enough=5 * NETWORK_PROBES) >= 5 * NETWORK_PROBES
    if kind == "hooks":
        assert calls_in(progression, 0.1) <= (0.1 / POLL_S + 2) * NETWORK_PROBES, "rate-limited"
    progression.close()
    progression.close()
    assert helpers() == [] and sys.getswitchinterval() == interval_s
    progression.poll()
    assert calls_in(progression, 0.01) == 0
    comm.Barrier()


def test_the_help_ends_when_the_block_is_left_by_an_exception(comm):
    with pytest.raises(RuntimeError, match="mine"), closing(choose(comm, "thread")):
        raise RuntimeError("mine")
    assert helpers() == []


class Bereaved(Counting):
    """A communicator of which a rank has died: calls raise until the death is acknowledged."""

    def __init__(self, comm: MPI.Intracomm, *, vital: bool) -> None:
        super().__init__(comm)
        self.vital, self.heard_of = vital, 0

    def Iprobe(self) -> bool:
        if self.vital or not self.heard_of:
            raise MPI.Exception(MPI.ERR_OTHER)
        return super().Iprobe()

    def heard(self, error: MPI.Exception) -> None:
        self.heard_of += 1
        if self.vital:
            raise RankFailed("rank 0 died")


@pytest.mark.parametrize("kind", ["thread", "hooks"])
def test_the_help_outlives_a_rank_that_dies(comm, kind):
    with closing(choose(comm, kind)) as progression:
        progression._deaths = progression._comm = Bereaved(progression._comm, vital=False)
        assert calls_in(progression, 20.0, enough=2 * NETWORK_PROBES) >= 2 * NETWORK_PROBES
        assert progression._comm.heard_of == 1


@pytest.mark.parametrize("tolerant", [False, True])
def test_only_where_it_is_tolerated_a_death_is_acknowledged(comm, tolerant):
    with closing(choose(comm, "hooks", tolerant=tolerant)) as progression:
        assert progression._deaths._vital == ({0} if tolerant else set(range(comm.size)))


def test_a_death_that_is_not_tolerated_ends_the_help(comm, monkeypatch):
    unhandled = []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    with closing(choose(comm, "thread")) as progression:
        progression._deaths = progression._comm = Bereaved(progression._comm, vital=True)
        progression._thread.join(20.0)
        assert helpers() == [] and unhandled == [], "the thread that trains says so"
    with closing(choose(comm, "hooks")) as progression:
        progression._deaths = progression._comm = Bereaved(progression._comm, vital=True)
        with pytest.raises(RankFailed):
            progression.poll()


def test_all_ranks_have_the_same_figures(comm):
    with closing(choose(comm, "thread")) as progression:
        figures = (progression.kind, progression.get_s_without, progression.get_s_with, progression.cost)
        assert len(set(comm.allgather(figures))) == 1


def test_an_unknown_kind_is_refused(comm):
    with pytest.raises(ValueError, match="'rdma'"):
        choose(comm, "rdma")


def test_a_thread_is_refused_where_mpi_supports_none(comm, monkeypatch):
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    with pytest.raises(ValueError, match="THREAD_MULTIPLE"):
        choose(comm, "thread")


# ---- the choice, from figures ----

WAITED, PROMPT = Trial(BUSY_S, BUSY_S, 1000.0), Trial(0.001, 0.006, 1000.0)
SLOWED = PROMPT._replace(rate=1000 * (1 - 2 * THREAD_COST_MAX))
FIGURES = [  # passive, thread, hooks; does MPI support threads?; what is chosen
    (PROMPT, None, None, True, "passive"),
    (WAITED, PROMPT, None, True, "thread"),
    (WAITED, WAITED, PROMPT, True, "hooks"),
    (WAITED, SLOWED, PROMPT, True, "hooks"),
    (WAITED, None, PROMPT, False, "hooks"),
]


@pytest.mark.parametrize(("passive", "thread", "hooks", "multiple", "kind"), FIGURES)
def test_a_thread_is_chosen_where_it_helps_and_costs_little(
    comm, needs, monkeypatch, passive, thread, hooks, multiple, kind
):
    needs(2)
    found = iter(3 * [passive] + 3 * [thread] * multiple + 3 * [hooks])
    monkeypatch.setattr(module, "while_busy", lambda *arguments: next(found))
    if not multiple:
        monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    with closing(choose(comm)) as progression:
        assert progression.kind == kind
        assert progression.get_s_without == passive.took_s
        assert progression.get_s_with == {"passive": None, "thread": PROMPT.took_s, "hooks": PROMPT.took_s}[kind]
        assert len(helpers()) == (kind == "thread")
    comm.Barrier()


def test_worthwhile():
    assert worthwhile(1.0, 1.0 / THREAD_GAIN_MIN, THREAD_COST_MAX)
    assert not worthwhile(1.0, 1.01 / THREAD_GAIN_MIN, 0.0)
    assert not worthwhile(1.0, 0.0, THREAD_COST_MAX + 0.01)


# ---- the measurement ----


def test_a_trial_tells_a_transfer_that_waits_for_its_target_from_one_that_does_not(comm, needs):
    """A synchronous send waits: its message is matched when the target calls MPI."""
    needs(2)
    target, word = farthest(comm), np.zeros(1)
    assert target == comm.size - 1
    prompt = min(while_busy(comm, target, lambda: time.sleep(0.001), lambda: None, 0.2) for _ in range(5))

    def waiting() -> Trial:
        received = comm.Irecv(word, 0, 3) if comm.rank == target else MPI.REQUEST_NULL
        trial = while_busy(comm, target, lambda: comm.Ssend(np.ones(1), target, 3), lambda: None, 0.2)
        received.Wait()
        return trial

    waited = max((waiting() for _ in range(5)), key=lambda trial: trial.ended_s)
    assert prompt.ended_s < PASSIVE_SHARE * 0.2 < waited.ended_s
    assert 0.001 <= prompt.took_s < prompt.ended_s and 0 < waited.took_s < waited.ended_s
    assert prompt.rate > 0 and waited.rate > 0
