from __future__ import annotations

from hpcsync.bench import tracing


def test_figures_are_positive():
    figures = tracing.measure(rows=10, repetitions=2)
    assert len(figures) == 2
    assert all(value > 0 for figure in figures for value in (*figure.values, *figure.limits))
