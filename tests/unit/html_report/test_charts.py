"""Figures: every mark is where the ticks of its axes say."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcsync.html_report import charts
from hpcsync.html_report.run_data import Decisions, RunData
from hpcsync.html_report.svg import WIDTH
from hpcsync.report.variants import Estimate
from hpcsync.trace.schema import TABLES

Attributes = dict[str, Any]


def run(**fields: object) -> RunData:
    job = SimpleNamespace(seed=3, paradigm=SimpleNamespace(lead_bound=math.inf))
    given = dict.fromkeys(RunData._fields) | {"job": job, "membership": np.zeros(0, TABLES["membership"])}
    given["summary"] = SimpleNamespace(duration_s=10.0)
    return RunData(**{**given, **fields})  # type: ignore[arg-type]


def marks(drawn: str, tag: str, class_: str) -> list[Attributes]:
    """Return class and numbers of the elements with this tag whose class begins so."""
    found = re.findall(rf'<{tag} ([^>]*class="({class_}[^"]*)"[^>]*)>', drawn)
    return [
        {name: float(value) for name, value in re.findall(r'([a-z]+\d?)="(-?[\d.]+)"', words)} | {"class": whole}
        for words, whole in found
    ]


def axis(drawn: str, name: str) -> Callable[[float], float]:
    """Return the value at a position on the axis x or y, of which all ticks must be right."""
    found = re.findall(r'<text x="([^"]*)" y="([^"]*)" class="tick" text-anchor="\w+">([\d.]+)<', drawn)
    ticks = np.array(found, float)
    is_lowest = ticks[:, 1] == ticks[:, 1].max()
    at = ticks[is_lowest, 0] if name == "x" else ticks[~is_lowest, 1] - 4
    values = ticks[is_lowest == (name == "x"), 2]
    line = np.polyfit(at, values, 1)
    assert len(at) > 2
    assert np.abs(np.polyval(line, at) - values).max() < 0.005 * np.ptp(values)
    return lambda position: float(np.polyval(line, position))


def test_times_to_the_target() -> None:
    times = {"a": [4.0, 8.0], "b": [6.0, math.inf], "c": [2.0, 3.0, 4.0]}
    estimates = {"a": Estimate(6.0, None), "b": None, "c": Estimate(3.0, 5.0)}
    figure = charts.times_to_target(times, estimates, "loss 0.3")
    drawn = figure.panels[0][1]
    x = axis(drawn, "x")
    rings, dots = marks(drawn, "circle", "ring"), marks(drawn, "circle", "dot")
    assert [x(ring["cx"]) for ring in rings] == pytest.approx([4, 8, 6, 2, 3, 4], abs=0.05)
    assert [x(dot["cx"]) for dot in dots] == pytest.approx([6, 3], abs=0.05)
    assert [mark["class"][-5:] for mark in (*rings, *dots)] == ["s0 d0"] * 2 + ["s1 d1"] + ["s2 d2"] * 3 + [
        "s0 d0",
        "s2 d2",
    ]
    rows = [ring["cy"] for ring in rings]
    assert rows[0] == rows[1] == dots[0]["cy"] < rows[2] < rows[3] == rows[4] == rows[5] == dots[1]["cy"]
    (whisker,) = marks(drawn, "line", "whisker")
    assert [x(whisker[end]) for end in ("x1", "x2")] == pytest.approx([0, 8], abs=0.05)
    assert whisker["y1"] == whisker["y2"] == dots[1]["cy"]
    assert re.findall(r">([^<]* arrived)<", drawn) == ["1 of 2 runs arrived"]
    assert figure.table.rows == [
        ("a", "6", "2 of 2 runs arrived", "4, 8"),
        ("b", "not known", "1 of 2 runs arrived", "6"),
        ("c", "3 (-2 to 8)", "3 of 3 runs arrived", "2, 3, 4"),
    ]


def test_a_long_label_is_cut() -> None:
    assert charts.cut("a" * 54) == "a" * 54
    assert charts.cut("a" * 55) == f"{'a' * 53}…"


def bars(drawn: str) -> list[tuple[str, int, int]]:
    """Return part, begin and end in percent of every bar."""
    x = axis(drawn, "x")
    return [
        (bar["class"].removeprefix("bar "), round(x(bar["x"])), round(x(bar["x"] + bar["width"] + 0.6)))
        for bar in marks(drawn, "rect", "bar")
    ]


def test_times_of_workers_and_variants() -> None:
    parts_s = np.array([[1, 2, 1, 0, 0], [0, 0, 0, 0, 4], [0, 0, 0, 0, 0]], float)
    one = run(parts_s=parts_s, hosts=("a", "b", "a"))
    figure = charts.time_of_workers({"bsp": [one]})
    shares = [("load", 0, 25), ("compute", 25, 75), ("wait", 75, 100), ("between", 0, 100)]
    assert bars(figure.panels[0][1]) == shares
    assert re.findall(r'"tick" text-anchor="(\w+)"', figure.panels[0][1]) == ["start", *["middle"] * 4, "end"]
    assert [mark["y"] for mark in marks(figure.panels[0][1], "rect", "bar")] == [28, 28, 28, 68]
    assert re.findall(r'class="label">([^<]*)<', figure.panels[0][1]) == [
        "worker 0 on a",
        "worker 1 on b",
        "worker 2 on a",
    ]
    assert figure.table.rows[0] == ("bsp, worker 0 on a", "25.00", "50.00", "25.00", "0.00", "0.00", "4")
    assert figure.table.rows[2][1:] == (*["0.00"] * 5, "0")
    named = charts.time_of_workers({"bsp": [one._replace(hosts=("a", "a", "a"))]})
    assert bars(named.panels[0][1]) == shares
    assert [mark["y"] for mark in marks(named.panels[0][1], "rect", "bar")] == [10, 10, 10, 30]
    assert re.findall(r'class="label" text-anchor="end">([^<]*)<', named.panels[0][1])[0] == "worker 0"
    of_all = charts.time_of_variants({"bsp": [one, one._replace(parts_s=np.array([[3.0, 2, 3, 0, 4]]))]})
    assert bars(of_all.panels[0][1]) == [("load", 0, 20), ("compute", 20, 40), ("wait", 40, 60), ("between", 60, 100)]
    assert of_all.table.rows == [("bsp", "20.00", "20.00", "20.00", "0.00", "40.00", "20")]


@pytest.mark.parametrize(("bound", "is_drawn"), [(4.0, True), (9.0, True), (10.0, False), (math.inf, False)])
def test_a_histogram_and_its_bound(bound: float, is_drawn: bool) -> None:
    job = SimpleNamespace(seed=3, paradigm=SimpleNamespace(lead_bound=bound))
    figure = charts.histograms({"a": [run(leads=np.array([10, 0, 30, 20, 40]), job=job)]}, "leads")
    assert figure is not None
    ((name, drawn),) = figure.panels
    assert name == "a: mean 2.8, largest 4"
    x, y = axis(drawn, "x"), axis(drawn, "y")
    found = marks(drawn, "rect", "fill")
    assert [x(bar["x"] + bar["width"] / 2) for bar in found] == pytest.approx([0, 2, 3, 4], abs=0.05)
    assert [y(bar["y"]) for bar in found] == pytest.approx([10, 30, 20, 40], abs=0.3)
    assert [y(bar["y"] + bar["height"]) for bar in found] == pytest.approx([0] * 4, abs=0.3)
    targets = marks(drawn, "line", "target")
    assert [x(line["x1"]) for line in targets] == ([pytest.approx(bound + 0.5, abs=0.05)] if is_drawn else [])
    assert (f"the paradigm allows a lead of {bound:g}" in drawn) == is_drawn
    assert all(line["x1"] == line["x2"] < WIDTH - 14 for line in targets)
    assert figure.table.rows[0] == ("a", "0", "10", "10.00")
    assert figure.note == ""
    staleness = charts.histograms({"a": [run(staleness=np.array([1, 2]), job=job)]}, "staleness")
    assert staleness is not None and "bound" not in staleness.panels[0][1]
    assert charts.histograms({"a": [run(leads=np.zeros(0, int))]}, "leads") is None


def test_histograms_have_one_scale() -> None:
    figure = charts.histograms({"a": [run(leads=np.ones(3, int))], "b": [run(leads=np.ones(32, int))]}, "leads")
    assert figure is not None
    few, many = (marks(drawn, "rect", "fill") for _, drawn in figure.panels)
    assert [bar["x"] for bar in few] == [bar["x"] for bar in many[:3]]
    assert figure.note == ""


def test_a_histogram_of_many_values() -> None:
    counts = np.ones(70, int)
    figure = charts.histograms({"a": [run(staleness=counts)], "b": [run(staleness=counts[:1])]}, "staleness")
    assert figure is not None
    assert figure.note == "Each panel has a scale of its own; a bar may cover several values."
    drawn = figure.panels[0][1]
    x, found = axis(drawn, "x"), marks(drawn, "rect", "fill")
    assert len(found) == 24
    assert [x(bar["x"]) for bar in found] == pytest.approx(3.0 * np.arange(24) - 0.45, abs=0.3)
    assert x(found[0]["x"] + found[0]["width"]) == pytest.approx(2.45, abs=0.3)
    assert WIDTH - 40 < found[-1]["x"] + found[-1]["width"] < WIDTH
    assert [row[1:] for row in figure.table.rows if row[0] == "a"][-1] == ("69 to 71", "1", "1.43")
    assert [row for row in figure.table.rows if row[0] == "b"] == [("b", "0", "1", "100.00")]


ROWS = np.array([(1.0, 0, 2.0), (2.0, 1, 4.0), (5.0, 0, 6.0)], [("now_s", "f8"), ("worker", "i4"), ("chosen", "f8")])


def test_decisions() -> None:
    def drawn(controller: str, n: int = 3, n_workers: int = 2) -> charts.Figure:
        return charts.decisions("a", run(decisions={controller: Decisions(n, n_workers, ROWS)}), controller)

    for controller, of_each in (("batches", [(0, 2), (0, 6), (1, 4)]), ("k", [(0, 2), (0, 4), (0, 6)]), ("dssp", None)):
        figure = drawn(controller)
        picture = figure.panels[0][1]
        x, y = axis(picture, "x"), axis(picture, "y")
        found = marks(picture, "circle", "mark")
        at = sorted((round(x(mark["cx"])), round(y(mark["cy"]))) for mark in found)
        assert at == [(1, 2), (2, 4), (5, 6)]
        if of_each is not None:
            assert [(int(mark["class"][6]), round(y(mark["cy"]))) for mark in found] == of_each
        ends = [round(x(float(end))) for end in re.findall(r'<path d="[^"]*H([\d.]+)V[\d.]+"', picture)]
        assert ends == {"batches": [10, 10], "k": [10], "dssp": []}[controller]
        names = [name for _, name in figure.legend]
        assert names == ([] if controller == "k" else ["worker 0", "worker 1"])
        assert figure.table.rows[1] == ("2", "1", "4")
    assert drawn("k").caption == "a: contributions per update (k), 3 decisions, seed 3"
    assert drawn("batches", 9, 8).note == "3 evenly spaced of 9 decisions. 2 of 8 workers."
    assert drawn("k", 3, 8).note == ""


def test_names_of_axes_fit_beside_them() -> None:
    assert max(map(len, charts.CONTROLLERS.values())) <= 28  # 170 units, of which a letter has 6


def test_the_longer_a_worker_waited_the_darker_is_its_cell() -> None:
    waits_s = np.array([[0.0, 1.0], [4.0, 2.0]])
    figure = charts.waiting_matrices({"a": [run(waits_s=waits_s)], "b": [run(waits_s=None)]})
    assert figure is not None
    ((_, drawn),) = figure.panels
    cells = marks(drawn, "rect", "cell")
    assert [cell["opacity"] for cell in cells] == pytest.approx([0, 0.1375, 0.55, 0.275], abs=1e-3)
    assert [(cell["x"], cell["y"]) for cell in cells] == [(74, 30), (118, 30), (74, 74), (118, 74)]
    assert {(cell["width"], cell["height"]) for cell in cells} == {(43, 43)}
    many = charts.waiting_matrices({"a": [run(waits_s=np.eye(20) * np.arange(20))]})
    assert many is not None
    assert re.findall(r'"end">worker (\d+)<', many.panels[0][1]) == [str(worker) for worker in range(4, 20)]
    assert max(cell["opacity"] for cell in marks(many.panels[0][1], "rect", "cell")) == 1
