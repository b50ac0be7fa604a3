"""Claims: the published statement, the result, its 95 % interval over the seeds, and the verdict that follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from hpcsync.report.variants import half_widths

Of = Callable[[pd.DataFrame], pd.Series]  # from the results of all runs a number for each seed

HOLDS, FAILS, UNTOLD = "holds", "does not hold", "cannot be told"  # verdicts


@dataclass(frozen=True)
class Claim:
    """That `low` <= mean of the numbers <= `high`.

    It holds if the whole 95 % interval of the mean lies there, does not hold if none of it does, and cannot be told
    otherwise. Numbers of a seed are ratios or differences within that seed, so the interval is a paired one. It is
    Student's; of positive numbers without a unit, which are ratios, that of their logarithms. With one seed, that of
    something without chance, it is the number. A number that is not known is that of a run that never arrives: it lies
    beyond the limit, and the interval is then the range of the seeds.

    Attributes
    ----------
    says
        The claim in words.
    published
        What the paper prints; empty if nothing.
    number
        Number of each seed.
    low, high
        Limits; without one, the number is only reported.
    unit
        Behind the numbers.
    expected
        What follows from the paper's text but is not printed there, or what we expect; empty if nothing.
    """

    says: str
    published: str
    number: Of
    low: float = -math.inf
    high: float = math.inf
    unit: str = ""
    expected: str = ""

    @property
    def criterion(self) -> str:
        if self.low == -math.inf and self.high == math.inf:
            return ""
        if self.low == -math.inf:
            return f"≤ {self.high:g}{self.unit}"
        if self.high == math.inf:
            return f"≥ {self.low:g}{self.unit}"
        return f"{self.low:g} to {self.high:g}{self.unit}"

    def judge(self, results: pd.DataFrame) -> dict[str, object]:
        """A row: the claim, the mean with its interval, the least and largest number, and the verdict."""
        numbers = self.number(results)
        known = numbers.dropna()
        mean, low, high = self._interval(numbers.to_numpy(float))
        return {
            "claim": self.says,
            "published": self.published,
            "expected": self.expected,
            "ours": self._in_words(known, len(numbers), mean, low, high),
            "criterion": self.criterion,
            "verdict": self._verdict(low, high),
            "mean": mean,
            "low": low,
            "high": high,
            "least": known.min(),
            "largest": known.max(),
            "seeds": len(numbers),
            "unknown": len(numbers) - len(known),
        }

    def _interval(self, numbers: np.ndarray) -> tuple[float, float, float]:
        """Return mean and interval; the mean is NaN if a number is not known."""
        if not len(numbers):
            return math.nan, math.nan, math.nan
        if np.isnan(numbers).any():
            beyond = -math.inf if self.high == math.inf else math.inf
            there = np.where(np.isnan(numbers), beyond, numbers)
            return math.nan, float(there.min()), float(there.max())
        is_ratio = not self.unit and bool((numbers > 0).all())
        values = np.log(numbers) if is_ratio else numbers
        mean, half = float(values.mean()), float(half_widths(values)) if len(values) > 1 else 0.0
        ends = (mean, mean - half, mean + half)
        return tuple(map(math.exp, ends)) if is_ratio else ends  # type: ignore[return-value]

    def _verdict(self, low: float, high: float) -> str:
        if not self.criterion:
            return ""
        if self.low <= low and high <= self.high:
            return HOLDS
        return FAILS if high < self.low or low > self.high else UNTOLD

    def _in_words(self, known: pd.Series, n: int, mean: float, low: float, high: float) -> str:
        missing = f"not reached with {n - len(known)} of {n} seeds" if len(known) < n else ""
        if not len(known):
            return missing or "no runs"
        digits = 0 if pd.api.types.is_integer_dtype(known) and low == high else 2
        if missing:
            return f"{known.min():.{digits}f} to {known.max():.{digits}f}{self.unit}, {missing}"
        between = f" ({low:.{digits}f} to {high:.{digits}f})" if n > 1 else ""
        return f"{mean:.{digits}f}{self.unit}{between}"


def judged(claims: Iterable[Claim], results: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame([claim.judge(results) for claim in claims])


def table(judgements: pd.DataFrame, title: str) -> Table:
    shown = Table(title=title, title_justify="left", title_style="bold")
    for column in ("claim", "published", "expected", "ours", "criterion", "verdict"):
        shown.add_column(column)
    colours = {HOLDS: "green", FAILS: "red", UNTOLD: "yellow"}
    for row in judgements.itertuples():
        verdict = f"[{colours[row.verdict]}]{row.verdict}[/]" if row.verdict else ""
        shown.add_row(row.claim, row.published, row.expected, row.ours, row.criterion, verdict)
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
