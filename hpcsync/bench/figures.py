"""Benchmark figures: values, the limits and earlier values they are compared with, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

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


class Change(NamedTuple):
    """Values over earlier values of the same quantity: of the medians, and the least and largest of two repetitions."""

    ratio: float
    least: float
    largest: float


def change(values: Sequence[float], earlier: Sequence[float]) -> Change | None:
    """Return the change between two measurements; None if one of them has no values."""
    if not (values and earlier):
        return None
    ratio = statistics.median(values) / statistics.median(earlier)
    return Change(ratio, min(values) / max(earlier), max(values) / min(earlier))


def table(title: str, figures: Sequence[Figure], earlier: Sequence[Figure] | None = None) -> Table:
    """Return a table of figures for the console, 80 columns wide: each has the reference in the row below.

    Parameters
    ----------
    title
        Title of the table.
    figures
        The figures.
    earlier
        Figures of an earlier measurement, with which those of the same name and unit are compared; None: there is none.
    """
    result = Table(title=title, title_justify="left", box=None, pad_edge=False)
    result.add_column("measured, and its reference", overflow="fold", ratio=1)
    for column in ["median (best)", "ratio", "aim"] + ["to earlier"] * (earlier is not None):
        result.add_column(column, justify="right", no_wrap=True)
    known = {(figure.what, figure.unit): figure.values for figure in earlier or ()}
    references = {(figure.what, figure.unit, figure.limit): figure.limits for figure in earlier or ()}
    for figure in figures:
        before = known.get((figure.what, figure.unit), ())
        for row in _rows(figure, before, references.get((figure.what, figure.unit, figure.limit), ())):
            result.add_row(*(row if earlier is not None else row[:-1]))
    return result


def _rows(figure: Figure, before: Sequence[float], limits_before: Sequence[float]) -> Iterator[list[str | Text]]:
    """Yield the row of a figure and that of its reference, with the changes since earlier ones."""
    style = {None: "", True: "green", False: "yellow"}[figure.reached]
    ratio = "" if figure.ratio is None else Text(f"{figure.ratio:.2f}", style)
    aim = "" if figure.aim is None else f"{'>=' if figure.is_rate else '<='} {figure.aim:g}"
    yield [figure.what, _shown(figure, figure.values), ratio, aim, _changed(figure.values, before)]
    if figure.limits:
        changed = _changed(figure.limits, limits_before)
        yield [Text(f"  {figure.limit}", "dim"), Text(_shown(figure, figure.limits), "dim"), "", "", changed]


def _changed(values: Sequence[float], earlier: Sequence[float]) -> str:
    found = change(values, earlier)
    return "" if found is None else f"{found.ratio:.2f} ({found.least:.2f}-{found.largest:.2f})"


def _shown(figure: Figure, values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{_digits(statistics.median(values))} ({_digits(figure.best(values))}) {figure.unit}"


def _digits(value: float) -> str:
    """Format a value with three significant digits: more would be noise."""
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f}"
