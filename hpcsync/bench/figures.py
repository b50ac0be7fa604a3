"""What was measured, beside what it is compared with, and how it is shown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Figure:
    """One thing measured, one value per repetition, and what was measured in turn with it.

    what:  with the reason if it could not be measured, and there are no values.
    unit:  of values and limits; one that ends in "/s" is a rate, of which more is better, otherwise less is.
    limit: what it is compared with, in words: mostly what the machine does without us. Its values are `limits`.
    aim:   what the ratio should be: at least so much for a rate, else at most.
    """

    what: str
    unit: str
    values: Sequence[float]
    limit: str = ""
    limits: Sequence[float] = ()
    aim: float | None = None

    @property
    def is_rate(self) -> bool:
        return self.unit.endswith("/s")

    @property
    def ratio(self) -> float | None:
        """Median over median."""
        return statistics.median(self.values) / statistics.median(self.limits) if self.limits else None

    @property
    def reached(self) -> bool | None:
        """Whether the aim is reached; None where there is none."""
        if self.aim is None or self.ratio is None:
            return None
        return self.ratio >= self.aim if self.is_rate else self.ratio <= self.aim

    def best(self, values: Sequence[float]) -> float:
        return max(values) if self.is_rate else min(values)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "reached": self.reached}


def in_turn(repetitions: int, *measure: Callable[[], float]) -> list[list[float]]:
    """The values of each of these, measured in turn so that a disturbance of the machine hits all of them alike.

    The first round warms up (pages are touched, connections made) and does not count.
    """
    rounds = [[one() for one in measure] for _ in range(repetitions + 1)]
    return [list(values) for values in zip(*rounds[1:], strict=True)]


def table(title: str, figures: Sequence[Figure]) -> Table:
    result = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("measured", "median (best)", "beside, in the same job", "median (best)", "ratio", "aim"):
        if column in ("measured", "beside, in the same job"):
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
    """Three significant digits: more would be noise."""
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f}"
