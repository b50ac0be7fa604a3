"""The reproduction about CPU load: what a recording says, and that a network which knows the load makes use of it."""

import itertools

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


def test_a_recording_has_speeds_and_what_others_use(monkeypatch):
    monkeypatch.setattr(cpu_load, "ITERATION_S", 0.02)
    monkeypatch.setattr(cpu_load, "N_ITERATIONS", 5)
    monkeypatch.setattr(cpu_load, "OTHERS", (0.0,))  # no process is started
    recorded = cpu_load.record(7, 10.0)
    assert len(recorded) == 5
    assert (recorded["speed"] > 0).all()
    assert (recorded["load"] < 1.5).all()  # counted in steps of 10 ms
    assert (recorded["running"] >= 0).all()


def test_an_interrupted_recording_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_load, "DWELL_S", (10.0,))
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
