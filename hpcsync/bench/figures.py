"""Benchmark figures: values, the limits they are compared with, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Figure:
    """One measured quantity, one value per repetition, and the limit measured alternately with it.

    Attributes
    ----------
    what : str
        Name of the quantity; includes the reason if it could not be measured, in which case there are no values.
    unit : str
        Unit of values and limits. If it ends in "/s", the quantity is a rate, of which more is better; otherwise less
        is.
    values : sequence of float
        One value per repetition.
    limit : str
        Name of the reference, in most cases what the machine achieves without hpcsync.
    limits : sequence of float
        Values of the reference.
    aim : float or None
        Intended ratio: a minimum for a rate, otherwise a maximum.
    """

    what: str
    unit: str
    values: Sequence[float]
    limit: str = ""
    limits: Sequence[float] = ()
    aim: float | None = None

    @property
    def is_rate(self) -> bool:
        """True if larger values are better."""
        return self.unit.endswith("/s")

    @property
    def ratio(self) -> float | None:
        """Median of the values divided by the median of the limits; None without limits."""
        return statistics.median(self.values) / statistics.median(self.limits) if self.limits else None

    @property
    def reached(self) -> bool | None:
        """True if the aim is reached; None without an aim."""
        if self.aim is None or self.ratio is None:
            return None
        return self.ratio >= self.aim if self.is_rate else self.ratio <= self.aim

    def best(self, values: Sequence[float]) -> float:
        """Return the best of these values."""
        return max(values) if self.is_rate else min(values)

    def as_dict(self) -> dict[str, Any]:
        """Return the figure with its ratio and whether the aim is reached, for JSON."""
        return {**asdict(self), "ratio": self.ratio, "reached": self.reached}


def in_turn(repetitions: int, *measure: Callable[[], float]) -> list[list[float]]:
    """Measure these alternately, so that a disturbance of the machine affects all of them alike.

    The first round warms up (pages are touched, connections made) and is not counted.

    Returns
    -------
    list of list of float
        One list of values per measurement.
    """
    rounds = [[one() for one in measure] for _ in range(repetitions + 1)]
    return [list(values) for values in zip(*rounds[1:], strict=True)]


def table(title: str, figures: Sequence[Figure]) -> Table:
    """Return a table of figures for the console."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("measured", "median (best)", "reference, in the same job", "median (best)", "ratio", "aim"):
        if column in ("measured", "reference, in the same job"):
            result.add_column(column, overflow="fold")
        else:
            result.add_column(column, justify="right", no_wrap=True)
    for figure in figures:
        result.add_row(*_row(figure))
    return result


def _row(figure: Figure) -> list[str | Text]:
    row: list[str | Text] = [figure.what, _shown(figure, figure.values)]
    if figure.ratio is None:
        return [*row, figure.limit, "", "", ""]
    style = {None: "", True: "green", False: "yellow"}[figure.reached]
    aim = "" if figure.aim is None else f"{'>=' if figure.is_rate else '<='} {figure.aim:g}"
    return [*row, figure.limit, _shown(figure, figure.limits), Text(f"{figure.ratio:.2f}", style), aim]


def _shown(figure: Figure, values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{_digits(statistics.median(values))} ({_digits(figure.best(values))}) {figure.unit}"


def _digits(value: float) -> str:
    """Format a value with three significant digits: more would be noise."""
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f}"
