"""Elements of SVG as escaped text, scales and numbers: pure functions, from which `charts` builds figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from hpcsync.report.wording import rounded

WIDTH = 440  # of every panel, in units of its own; the page scales it
MOST_TICKS = 6  # on a scale
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 12, 42


def element(name: str, *children: str | Markup, **attributes: object) -> Markup:
    """Return an element. ``class_`` is the attribute class, and ``_`` in a name stands for ``-``."""
    words = "".join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _plain(value))
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{words}>{''.join(map(escape, children))}</{name}>")


def _plain(value: object) -> object:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def title(text: str) -> Markup:
    """Return the text that appears when the pointer rests on the parent."""
    return element("title", text)


def text(
    x: float, y: float, words: str, class_: str = "label", anchor: str | None = None, *, turned: bool = False
) -> Markup:
    """Return a text at a point, from below to above if it is turned; `anchor` is ``middle`` or ``end``."""
    turn = f"rotate(-90 {_plain(x)} {_plain(y)})" if turned else None
    return element("text", words, x=x, y=y, class_=class_, text_anchor=anchor, transform=turn)


def picture(label: str, height: float, *children: Markup) -> Markup:
    """Return the outermost element. `label` describes the picture for those who do not see it."""
    box = f"0 0 {WIDTH} {_plain(float(height))}"
    return element("svg", *children, xmlns="http://www.w3.org/2000/svg", viewBox=box, role="img", aria_label=label)


def path(points: Sequence[tuple[float, float]], class_: str, *, closed: bool = False, steps: bool = False) -> Markup:
    """Return a line through points, an area if it is closed; with steps a value holds until the next point."""
    words = [f"M{_plain(points[0][0])} {_plain(points[0][1])}"]
    for x, y in points[1:]:
        words.append(f"H{_plain(x)}V{_plain(y)}" if steps else f"L{_plain(x)} {_plain(y)}")
    return element("path", d="".join(words) + ("Z" if closed else ""), class_=class_)


# ---- numbers ----


def number(value: float, digits: int = 4) -> str:
    """Return a number as `rounded` does, or that it is not known."""
    return rounded(value, digits) if math.isfinite(value) else "not known"


def short(value: float) -> str:
    """Return a number of an axis: 12000 as ``12k``."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}"


# ---- scales ----


class Scale(NamedTuple):
    """Map of the values [low, high] to the positions [begin, end], linear or logarithmic."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of a value."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        part = ((math.log(value) if self.log else value) - low) / (high - low)
        return self.begin + part * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Return a few round values on the scale."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for digits in ((1, 2, 5), (1, 3), (1,)):
                found = [digit * 10.0**decade for decade in decades for digit in digits]
                found = [value for value in found if self.low <= value <= self.high]
                if len(found) <= MOST_TICKS:
                    break
            return found[:: math.ceil(len(found) / MOST_TICKS) or 1]
        step = _round_step((self.high - self.low) / (MOST_TICKS - 1))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def _round_step(least: float) -> float:
    decade = 10.0 ** math.floor(math.log10(least))
    return next(factor * decade for factor in (1, 2, 2.5, 5, 10) if factor * decade >= least * (1 - 1e-9))


def limits(values: Sequence[float], *, zero: bool = False, log: bool = False) -> tuple[float, float]:
    """Return limits around finite values, with a margin; from zero on if wanted."""
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    if log:
        return low / 1.1, high * 1.1
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return (min(0.0, low), high + margin) if zero else (low - margin, high + margin)


class Panel(NamedTuple):
    """Area between two axes."""

    x: Scale
    y: Scale
    height: float

    @classmethod
    def of(cls, x: tuple[float, float], y: tuple[float, float], height: float = 250, *, log_y: bool = False) -> Panel:
        """Return the panel with these limits."""
        return cls(Scale(*x, _LEFT, WIDTH - _RIGHT), Scale(*y, height - _BOTTOM, _TOP, log=log_y), height)

    def axes(self, x_label: str, y_label: str, *, whole_x: bool = False, whole_y: bool = False) -> list[Markup]:
        """Return grid lines, numbers and names of both axes; `whole`: at whole numbers only."""
        left, right, top, bottom = self.x.begin, self.x.end, self.y.end, self.y.begin
        parts = []
        for value in self.y.ticks():
            if not whole_y or value == round(value):
                y = self.y(value)
                parts.append(element("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
                parts.append(text(left - 6, y + 4, short(value), "tick", "end"))
        for value in self.x.ticks():
            if not whole_x or value == round(value):
                parts.append(text(self.x(value), bottom + 17, short(value), "tick", "middle"))
        parts.append(element("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"))
        parts.append(text((left + right) / 2, self.height - 6, x_label, "name", "middle"))
        middle = (top + bottom) / 2
        return [*parts, text(13, middle, y_label, "name", "middle", turned=True)]
