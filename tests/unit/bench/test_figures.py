from __future__ import annotations

import io

import pytest
from rich.console import Console

from hpcsync.bench.figures import Change, Figure, change, in_turn, table


def test_the_ratio_is_median_over_median():
    assert Figure("x", "ms", [1.0, 3.0, 100.0], "y", [2.0, 2.0, 50.0]).ratio == 1.5


def test_without_a_limit_there_is_no_ratio_and_no_verdict():
    figure = Figure("x", "ms", [1.0], aim=1.5)
    assert figure.ratio is None
    assert figure.reached is None


@pytest.mark.parametrize(
    ("unit", "value", "reached"),
    [("GB/s", 0.9, True), ("GB/s", 0.7, False), ("ms", 0.9, False), ("ms", 0.7, True)],
)
def test_a_rate_must_reach_its_aim_and_a_time_must_not_exceed_it(unit, value, reached):
    assert Figure("x", unit, [value], "y", [1.0], aim=0.8).reached is reached


def test_the_best_is_the_fastest():
    values = [2.0, 1.0, 3.0]
    assert Figure("x", "/s", values).best(values) == 3.0
    assert Figure("x", "us", values).best(values) == 1.0


def test_in_turn_alternates_and_leaves_out_the_first_round():
    calls = []

    def record(name):
        calls.append(name)
        return len(calls)

    first, second = in_turn(3, lambda: record("a"), lambda: record("b"))
    assert calls == ["a", "b"] * 4
    assert (first, second) == ([3, 5, 7], [4, 6, 8])


def test_the_table_shows_figure_limit_ratio_and_aim():
    console = Console(width=80, file=io.StringIO())
    figures = [
        Figure("put of 16 MB", "GB/s", [8.0, 10.0, 9.0], "numpy.copyto", [12.0, 10.0, 11.0], aim=0.8),
        Figure("alone", "us", [1234.0]),
        Figure("too large: no room", "us", []),
    ]
    console.print(table("transfers", figures))
    title, _, put, copy, alone, too_large = (" ".join(line.split()) for line in console.file.getvalue().splitlines())
    assert title == "transfers"
    assert put == "put of 16 MB 9.00 (10.0) GB/s 0.82 >= 0.8"
    assert copy == "numpy.copyto 11.0 (12.0) GB/s"
    assert alone == "alone 1,234 (1,234) us"
    assert too_large == "too large: no room"


def test_a_change_has_the_spread_of_the_repetitions():
    assert change([2.0, 4.0, 3.0], [1.0, 2.0, 1.5]) == Change(2.0, 1.0, 4.0)
    assert change([1.0], []) is None


def test_the_table_compares_figures_and_references_of_the_same_name_and_unit():
    console = Console(width=80, file=io.StringIO())
    figures = [Figure("put", "GB/s", [8.0], "copy", [10.0]), Figure("get", "GB/s", [8.0])]
    earlier = [Figure("put", "GB/s", [4.0], "copy", [10.0]), Figure("get", "ms", [4.0])]
    console.print(table("transfers", figures, earlier))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    _, _, put, copy, get = (" ".join(line.split()) for line in lines)
    assert put == "put 8.00 (8.00) GB/s 0.80 2.00 (2.00-2.00)"
    assert copy == "copy 10.0 (10.0) GB/s 1.00 (1.00-1.00)"
    assert get == "get 8.00 (8.00) GB/s"


def test_the_table_compares_each_of_several_references_of_one_figure():
    console = Console(width=80, file=io.StringIO())
    figures = [Figure("events", "k/s", [8.0], reference, [10.0]) for reference in ("a heap", "a copy")]
    earlier = [Figure("events", "k/s", [4.0], "a heap", [5.0]), Figure("events", "k/s", [4.0], "a copy", [10.0])]
    console.print(table("events", figures, earlier))
    changes = [line.split()[-2:] for line in console.file.getvalue().splitlines()[2:]]
    assert changes == [[found, f"({found}-{found})"] for found in ("2.00", "2.00", "2.00", "1.00")]
