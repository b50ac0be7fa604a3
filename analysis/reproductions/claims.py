"""Claims: the published statement, the simulated result, and whether all seeds agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

Of = Callable[[pd.DataFrame], pd.Series]  # from the results of all runs a number for each seed


@dataclass(frozen=True)
class Claim:
    """It holds if `low` <= number <= `high` for every seed; a number that is not known lies nowhere.

    says, published: in words. unit: behind the numbers.
    """

    says: str
    published: str
    number: Of
    low: float = -math.inf
    high: float = math.inf
    unit: str = ""

    @property
    def criterion(self) -> str:
        if self.low == -math.inf:
            return f"≤ {self.high:g}{self.unit}"
        if self.high == math.inf:
            return f"≥ {self.low:g}{self.unit}"
        return f"{self.low:g} to {self.high:g}{self.unit}"

    def judge(self, results: pd.DataFrame) -> dict[str, object]:
        """A row: the claim, and the mean, least and largest number."""
        numbers = self.number(results)
        known = numbers.dropna()
        return {
            "claim": self.says,
            "published": self.published,
            "ours": _in_words(known, len(numbers), self.unit),
            "criterion": self.criterion,
            "holds": bool(len(numbers)) and bool(numbers.between(self.low, self.high).all()),
            "mean": known.mean(),
            "least": known.min(),
            "largest": known.max(),
            "seeds": len(numbers),
            "unknown": len(numbers) - len(known),
        }


def _in_words(known: pd.Series, n: int, unit: str) -> str:
    missing = f"not reached with {n - len(known)} of {n} seeds" if len(known) < n else ""
    if not len(known):
        return missing or "no runs"
    digits = 0 if pd.api.types.is_integer_dtype(known) else 2
    mean, least, largest = (f"{x:.{digits}f}" for x in (known.mean(), known.min(), known.max()))
    return f"{mean}{unit} ({least} to {largest})" + (f", {missing}" if missing else "")


def judged(claims: Iterable[Claim], results: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame([claim.judge(results) for claim in claims])


def table(judgements: pd.DataFrame, title: str) -> Table:
    shown = Table(title=title, title_justify="left", title_style="bold")
    for column in ("claim", "published", "ours", "criterion", "holds"):
        shown.add_column(column)
    for row in judgements.itertuples():
        holds = "[green]yes[/]" if row.holds else "[red]no[/]"
        shown.add_row(row.claim, row.published, row.ours, row.criterion, holds)
    return shown


def conclude(claims: Iterable[Claim], results: pd.DataFrame, out: Path, console: Console, title: str) -> pd.DataFrame:
    """Judge the claims, write them and the results to the folder, and print them."""
    verdicts = judged(claims, results)
    results.to_csv(out / "results.csv", index=False)
    verdicts.to_csv(out / "claims.csv", index=False)
    console.print(table(verdicts, title))
    return verdicts


# ---- a number from the evaluations of a run ----


def settled_s(evaluations: pd.DataFrame, target: float) -> float:
    """Return the time from which on the accuracy stays at or above the target; NaN if it never does.

    A single lucky evaluation does not count.
    """
    below = np.flatnonzero(~(evaluations["accuracy"].to_numpy() >= target))
    first = below[-1] + 1 if len(below) else 0
    return float(evaluations["now_s"].iloc[first]) if first < len(evaluations) else np.nan


# ---- numbers from results: a row per run with the columns setting, arm, paradigm and seed ----


def of(column: str, setting: str, arm: str, *paradigms: str) -> Of:
    """A column's mean over these paradigms, not known as soon as it is not known for one of them."""

    def number(results: pd.DataFrame) -> pd.Series:
        runs = results[(results["setting"] == setting) & (results["arm"] == arm) & results["paradigm"].isin(paradigms)]
        return runs.pivot(index="seed", columns="paradigm", values=column).mean(axis=1, skipna=False)

    return number


def ratio(a: Of, b: Of) -> Of:
    return lambda results: a(results) / b(results)


def points(a: Of, b: Of) -> Of:
    """The difference of two shares in percentage points."""
    return lambda results: 100 * (a(results) - b(results))


def apart(*each: Of) -> Of:
    """Percentage points between the largest and the least of some shares."""

    def number(results: pd.DataFrame) -> pd.Series:
        together = pd.concat([one(results) for one in each], axis=1)
        return 100 * (together.max(axis=1) - together.min(axis=1))

    return number


def largest(column: str, paradigm: str) -> Of:
    """Return the table of all settings and arms."""
    return lambda results: results[results["paradigm"] == paradigm].groupby("seed")[column].max()
