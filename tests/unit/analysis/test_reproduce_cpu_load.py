"""The reproduction about CPU load: what a recording says, and that a network which knows the load makes use of it."""

import contextlib
import itertools
import time

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from reproductions import cpu_load


def test_load_that_tells_the_next_speed_is_used():
    draw = np.random.default_rng(1)
    busy = draw.uniform(0.0, 1.0, 401)
    speeds = 10.0 * (1.0 - 0.5 * busy[:-1]) * draw.lognormal(0.0, 0.02, 400)
    recorded = pd.DataFrame({"speed": speeds, "load": 0.5, "running": busy[1:]})  # at an iteration's end, of the next
    errors = cpu_load.errors(recorded, 1)
    assert errors[cpu_load.WITH] < 0.8 * errors[cpu_load.WITHOUT]
    useless = cpu_load.error_with_load(recorded.assign(running=draw.permutation(busy[1:])), 1)
    assert useless > 0.9 * errors[cpu_load.WITHOUT]


class Clocks:
    """The module `time`, and the processor time of the machine, of which nothing passes but what is computed."""

    def __init__(self):
        self.now_s = self.own_s = self.busy_s = 0.0

    def perf_counter(self):
        return self.now_s

    def process_time(self):
        return self.own_s

    def compute(self, products):
        self.now_s += 0.02 * products
        self.own_s += 0.01 * products
        self.busy_s += 0.025 * products


def test_a_recording_has_speeds_and_what_others_use(monkeypatch):
    clocks = Clocks()
    monkeypatch.setattr(cpu_load, "time", clocks)
    monkeypatch.setattr(cpu_load, "machine_busy_s", lambda: clocks.busy_s)
    monkeypatch.setattr(cpu_load, "work", clocks.compute)
    monkeypatch.setattr(cpu_load.multiprocessing, "cpu_count", lambda: 2)
    monkeypatch.setattr(cpu_load, "N_ITERATIONS", 5)
    monkeypatch.setattr(cpu_load, "competitors", lambda *_: contextlib.nullcontext())
    recorded = cpu_load.record(7, 10.0)
    assert cpu_load.ITERATION_S == 0.15  # of its own: 15 products
    np.testing.assert_allclose(recorded["speed"], 5 * [1 / 0.3])
    np.testing.assert_allclose(recorded["load"], 5 * [(0.375 - 0.15) / (2 * 0.3)])
    assert (recorded["running"] >= 0).all()


def test_what_the_machine_has_computed_is_in_seconds():
    begin_s, own_s, busy_s = time.perf_counter(), time.process_time(), cpu_load.machine_busy_s()
    while time.process_time() < own_s + 0.3:
        cpu_load.work(10)
    busy_s, own_s = cpu_load.machine_busy_s() - busy_s, time.process_time() - own_s
    n_cores = cpu_load.multiprocessing.cpu_count()
    within_s = 0.03 * n_cores  # three counters of each core, in steps of 10 ms; a virtual machine may miss some
    assert own_s / 3 < busy_s < (time.perf_counter() - begin_s) * n_cores + within_s


def test_an_interrupted_recording_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_load, "DWELL_S", (10.0,))
    monkeypatch.setattr(cpu_load, "N_ITERATIONS", 60)
    draw = np.random.default_rng(1)
    columns = dict.fromkeys(("speed", "load", "running"), draw.uniform(1.0, 2.0, cpu_load.N_ITERATIONS))
    made = []
    monkeypatch.setattr(cpu_load, "record", lambda seed, dwell_s: made.append(seed) or pd.DataFrame(columns))
    written = pd.DataFrame.to_csv

    def cut(frame, path, **options):
        written(frame.head(3), path, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pd.DataFrame, "to_csv", cut)
        cpu_load.reproduce(tmp_path, 1, Console(quiet=True))
    assert not list(tmp_path.iterdir())
    first = cpu_load.reproduce(tmp_path, 1, Console(quiet=True))
    assert made == 2 * [cpu_load.FIRST_SEED]
    pd.testing.assert_frame_equal(first, cpu_load.reproduce(tmp_path, 1, Console(quiet=True)))
    assert len(made) == 2


def test_all_processes_compute_by_the_same_clock():
    first, second = (list(itertools.islice(cpu_load.schedule(7, 1.0, 100.0), 2000)) for _ in range(2))
    assert first == second
    assert list(itertools.islice(cpu_load.schedule(8, 1.0, 100.0), 2000)) != first
    ends_s, shares = zip(*first, strict=True)
    assert (np.diff([100.0, *ends_s]) >= 0).all()
    assert 0.9 < (ends_s[-1] - 100.0) / 2000 < 1.1
    assert set(shares) == set(cpu_load.OTHERS)
