from __future__ import annotations

import random
import time

import numpy as np

from hpcsync.config.job import Job
from hpcsync.mpi.transport.clock import Clock
from hpcsync.trace.reader import load
from tests.mpi.training import failures, on_some


def test_ranks_of_one_host_agree_on_the_time(comm):
    clock = Clock(comm)
    assert abs(clock.offset_s) <= clock.uncertainty_s + 1e-9  # their clocks are one clock
    comm.Barrier()
    before = time.perf_counter()
    readings = comm.allgather(clock.now())
    took_s = time.perf_counter() - before
    slack_s = took_s + 2 * max(comm.allgather(clock.uncertainty_s))
    assert max(readings) - min(readings) <= max(comm.allgather(slack_s))


def test_a_clock_that_is_wrong_is_put_right(comm, monkeypatch):
    """The negative control of the test above: without the exchange, these ranks would be a minute apart."""
    wrong_by_s = 60.0 * comm.rank
    real = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + wrong_by_s)
    clock = Clock(comm)
    assert abs(clock.offset_s + wrong_by_s) <= clock.uncertainty_s + 1e-9
    readings = comm.allgather(clock.now())
    assert max(readings) - min(readings) < 30


def test_a_wall_clock_that_steps_back_and_forth_changes_nothing(comm, needs, folder, monkeypatch):
    """The run's times are monotonic, and its weights are the same to the bit."""
    needs(2)
    job = Job.from_table(
        {
            "name": "stepping",
            "workload": {"name": "linear", "batch_size": 8},
            "optimizer": {"name": "sgd", "lr": 0.05},
            "stop": {"updates": 20},
            "paradigm": {"name": "bsp"},
            "cluster": {"workers": comm.size - 1},
        }
    )
    steady = on_some(comm, job, folder / "steady")
    generator = random.Random(comm.rank)
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + generator.uniform(-1e6, 1e6))
    assert min(time.time() - time.time() for _ in range(100)) < 0, "the control: such a clock goes back"
    begin_s = time.perf_counter()
    assert (on_some(comm, job, folder / "stepping") == steady).all()
    if comm.rank == 0:
        trace = load(folder / "stepping" / "trace.h5")
        assert failures(trace) == []
        now_s = trace.tables["pushes"]["now_s"]
        assert (np.diff(now_s) >= 0).all() and 0 < now_s[-1] < time.perf_counter() - begin_s
