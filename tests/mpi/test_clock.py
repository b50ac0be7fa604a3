from __future__ import annotations

import time

from hpcsync.mpi.clock import Clock


def test_ranks_of_one_host_agree_on_the_time(comm):
    clock = Clock(comm)
    assert abs(clock.offset_s) <= clock.uncertainty_s + 1e-9  # their clocks are one clock
    comm.Barrier()
    before = time.perf_counter()
    readings = comm.allgather(clock.now())
    took_s = time.perf_counter() - before
    slack_s = took_s + 2 * max(comm.allgather(clock.uncertainty_s))
    assert max(readings) - min(readings) <= max(comm.allgather(slack_s))


def test_a_clock_that_is_wrong_by_seconds_is_put_right(comm, monkeypatch):
    """The negative control of the test above: without the exchange, these ranks would be seconds apart."""
    wrong_by_s = 5.0 * comm.rank
    real = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + wrong_by_s)
    clock = Clock(comm)
    assert abs(clock.offset_s + wrong_by_s) <= clock.uncertainty_s + 1e-9
    readings = comm.allgather(clock.now())
    assert max(readings) - min(readings) < 2.5
