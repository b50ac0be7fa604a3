from __future__ import annotations

import os
import time

import pytest

from hpcsync.mpi.transport.backoff import CROWDED_SPIN_S, NETWORK_PROBES, NODE_CEILING_S, SPIN_S, Backoff


@pytest.fixture
def slept_s(monkeypatch):
    """What is slept is written down instead, and passes on the clock; a look at the clock takes a microsecond."""
    now_s, naps_s = [0.0], []

    def look() -> float:
        now_s[0] += 1e-6
        return now_s[0]

    def sleep(nap_s: float) -> None:
        naps_s.append(nap_s)
        now_s[0] += nap_s

    monkeypatch.setattr(time, "perf_counter", look)
    monkeypatch.setattr(time, "sleep", sleep)
    return naps_s


@pytest.mark.parametrize(("n_cores", "spin_s"), [(64, SPIN_S), (0, CROWDED_SPIN_S)])
def test_it_spins_first_and_then_sleeps_an_eighth_of_the_wait_up_to_the_ceiling(
    comm, slept_s, monkeypatch, n_cores, spin_s
):
    """It spins longer if every rank has a core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(n_cores)))
    backoff = Backoff(comm)
    polls = iter(range(1000))
    assert backoff.until(lambda: 7 if next(polls) == 400 else None) == 7
    assert slept_s and spin_s / 8 <= slept_s[0] < spin_s / 4
    assert slept_s == sorted(slept_s) and slept_s[-1] == NODE_CEILING_S


def test_every_wait_begins_with_spinning(comm, slept_s):
    backoff = Backoff(comm)
    for _ in range(3):
        polls = iter(range(100))
        backoff.until(lambda polls=polls: True if next(polls) == 20 else None)
    assert slept_s == []


@pytest.mark.parametrize(
    ("one_node", "passive", "calls"), [(True, True, 0), (True, False, NETWORK_PROBES), (False, True, NETWORK_PROBES)]
)
def test_it_makes_mpi_calls_when_it_pauses_where_transfers_need_them(
    comm, slept_s, monkeypatch, one_node, passive, calls
):
    monkeypatch.setattr("hpcsync.mpi.transport.backoff.on_one_node", lambda comm: one_node)
    backoff = Backoff(comm, passive=passive)
    probes = []
    backoff._comm = type("Probed", (), {"Iprobe": lambda self: probes.append(1)})()
    backoff.pause()
    assert len(probes) == calls


@pytest.mark.parametrize("one_node", [True, False])
def test_what_a_call_of_its_own_tells_is_not_late_by_other_calls(comm, slept_s, monkeypatch, one_node):
    monkeypatch.setattr("hpcsync.mpi.transport.backoff.on_one_node", lambda comm: one_node)
    backoff, made, rests = Backoff(comm), [], []
    backoff._comm = type("Probed", (), {"Iprobe": lambda self: made.append("probe")})()
    backoff._pause = lambda seconds: rests.append(len(made))

    def test() -> bool:
        made.append("test")
        return len(made) == 40

    assert backoff.complete(test)
    assert made == ["test"] * 40
    assert rests == (list(range(1, 40)) if one_node else [NETWORK_PROBES, 2 * NETWORK_PROBES])
