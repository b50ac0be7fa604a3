from __future__ import annotations

import pytest

from hpcsync.bench import simulation


def test_figures_are_positive_and_beside_their_limits():
    figures = simulation.measure(workers=4, iterations=3, gradients=8, repetitions=2, scale=(2, 5))
    assert [figure.unit for figure in figures] == ["k/s", "k/s", "k/s", "k/s", "ms", "ms", "ms"]
    assert all(value > 0 for figure in figures for value in (*figure.values, *figure.limits))


def test_an_iteration_is_three_events_without_a_network():
    """Granted and read, computed, put and pushed; plus the first grants and the leaves."""
    job = simulation._job({"name": "timing"}, 2, 100)
    n_events, took_s = simulation.simulate(job)
    assert n_events / 100 == pytest.approx(3.0, abs=0.2)
    assert took_s > 0
