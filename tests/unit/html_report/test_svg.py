"""Scales, ticks, numbers and escaping of the figures."""

from __future__ import annotations

import math
import re

import pytest

from hpcsync.html_report.svg import Panel, Scale, element, limits, number, path, short, text


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 9.95, [0.0, 2.0, 4.0, 6.0, 8.0]),
        (-0.5, 31.5, [0.0, 10.0, 20.0, 30.0]),
        (0.0, 24_000.0, [0.0, 5000.0, 10_000.0, 15_000.0, 20_000.0]),
        (0.301, 0.302, [0.301, 0.3012, 0.3014, 0.3016, 0.3018, 0.302]),
    ],
)
def test_ticks_are_round_and_on_the_scale(low: float, high: float, ticks: list[float]) -> None:
    assert Scale(low, high, 0, 100).ticks() == pytest.approx(ticks)


def test_a_logarithmic_scale() -> None:
    scale = Scale(0.01, 100.0, 0, 400, log=True)
    assert [scale(value) for value in (0.01, 0.1, 1.0, 100.0)] == pytest.approx([0, 100, 200, 400])
    assert scale.ticks() == pytest.approx([0.01, 0.1, 1, 10, 100])
    assert Scale(0.09, 2.5, 0, 1, log=True).ticks() == pytest.approx([0.1, 0.2, 0.5, 1, 2])
    assert Scale(5e-10, 2.0, 0, 1, log=True).ticks() == pytest.approx([1e-9, 1e-7, 1e-5, 1e-3, 0.1])
    assert Scale(2.0, 3.0, 0, 1, log=True).ticks() == pytest.approx([2])
    assert Scale(2.1, 2.9, 0, 1, log=True).ticks() == []


def test_numbers_of_an_axis_end_before_its_name() -> None:
    drawn = "".join(Panel.of((0.0, 1.0), (0.301, 0.302)).axes("time (s)", "loss"))
    numbers = re.findall(r'x="([^"]*)" y="[^"]*" class="tick" text-anchor="end">([^<]*)<', drawn)
    (name,) = re.findall(r'x="([^"]*)"[^>]*rotate', drawn)
    assert max(len(number) for _, number in numbers) == 6
    assert min(float(x) - 7 * len(number) for x, number in numbers) >= float(name) + 3


def test_limits_have_a_margin_also_around_one_value() -> None:
    assert limits([0.0, 1.0]) == pytest.approx((-0.05, 1.05))
    assert limits([2.0, math.inf, math.nan], zero=True) == pytest.approx((0.0, 2.1))
    assert limits([0.0]) == (-1.0, 1.0)
    assert limits([]) == pytest.approx((-0.05, 1.05))
    assert limits([1.0, 10.0], log=True) == pytest.approx((1 / 1.1, 11.0))


def test_numbers() -> None:
    assert [number(value) for value in (3.0, 0.123456, 12345.6, math.nan)] == ["3", "0.1235", "12,346", "not known"]
    assert [number(value, 3) for value in (0.123456, 12.345, 123.45, 12345.6)] == ["0.123", "12.3", "123", "12,346"]
    assert [short(value) for value in (0.0, 0.25, 12_000, 2.5e6, 3e9)] == ["0", "0.25", "12k", "2.5M", "3G"]


def test_elements_escape_names_and_texts() -> None:
    assert str(text(1.0, 2.25, "<b>&")) == '<text x="1" y="2.2" class="label">&lt;b&gt;&amp;</text>'
    assert str(element("g", "a", aria_label='"')) == '<g aria-label="&#34;">a</g>'
    assert 'd="M0 0H1V2"' in path([(0, 0), (1, 2)], "line", steps=True)
    assert 'd="M0 0L1 2Z"' in path([(0, 0), (1, 2)], "band", closed=True)
