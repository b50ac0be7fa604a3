from __future__ import annotations

import sys

import pytest

from hpcsync.bench import event_loop


def test_our_loop_is_compared_with_the_heap_and_simpy():
    pytest.importorskip("simpy")
    figures = event_loop.measure(activities=3, rounds=2, repetitions=2)
    assert [figure.limit.split(",")[0].split(":")[0] for figure in figures] == ["a bare heap", "SimPy", "SimPy"]
    assert all(value > 0 for figure in figures for value in (*figure.values, *figure.limits))
    assert not any("not installed" in figure.what for figure in figures)


def test_without_simpy_its_figures_are_left_out_with_a_note(monkeypatch):
    monkeypatch.setitem(sys.modules, "simpy", None)
    (figure,) = event_loop.measure(activities=3, rounds=2, repetitions=2)
    assert figure.limit.startswith("a bare heap")
    assert "SimPy is not installed" in figure.what


@pytest.mark.parametrize("kernel", [event_loop.ours, event_loop.simpy_processes, event_loop.simpy_callbacks])
def test_all_kernels_do_the_same_work(kernel, monkeypatch):
    """As many delays are drawn as events are counted: otherwise their rates could not be compared."""
    if kernel is not event_loop.ours:
        pytest.importorskip("simpy")
    drawn = []

    def counted(delays):
        for delay in delays * 100:
            drawn.append(delay)
            yield delay

    monkeypatch.setattr(event_loop, "cycle", counted)
    kernel([0.5, 0.7], 3, 4)
    assert len(drawn) == 12
