"""Claims: the published statement, the result, its 95 % interval over the seeds, and the verdict that follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from hpcsync.report.variants import half_widths

# From the results of all runs a number for each seed, or a frame of its bounds, `low` and `high`.
Of = Callable[[pd.DataFrame], "pd.Series | pd.DataFrame"]

HOLDS, FAILS, UNTOLD = "holds", "does not hold", "cannot be told"  # verdicts


class Bounds(NamedTuple):
    """Bounds of the number of each seed, and whether they are equal and finite."""

    least: np.ndarray
    largest: np.ndarray
    known: np.ndarray


@dataclass(frozen=True)
class Claim:
    """That `low` <= mean of the numbers <= `high`.

    It holds if the whole 95 % interval of the mean lies there, does not hold if none of it does, and cannot be told
    otherwise. Numbers of a seed are ratios or differences within that seed, so the interval is a paired one. It is
    Student's; of positive numbers without a unit, which are ratios, that of their logarithms. With one seed, that of
    something without chance, it is the number. Where a run never arrives, a ratio of times is known within bounds only:
    the interval is then the range of all seeds' bounds. What does not exist (NaN) lies beyond the limit.

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
        bounds = self._bounds(self.number(results))
        known = bounds.least[bounds.known]
        mean, low, high = self._interval(bounds, known)
        return {
            "claim": self.says,
            "published": self.published,
            "expected": self.expected,
            "ours": self._in_words(bounds, known, mean, low, high),
            "criterion": self.criterion,
            "verdict": self._verdict(low, high),
            "mean": mean,
            "low": low,
            "high": high,
            "least": known.min() if len(known) else math.nan,
            "largest": known.max() if len(known) else math.nan,
            "seeds": len(bounds.known),
            "unknown": len(bounds.known) - len(known),
        }

    def _bounds(self, numbers: pd.Series | pd.DataFrame) -> Bounds:
        # Arrays, since a frame for each of hundreds of claims takes most of the time of judging them.
        if isinstance(numbers, pd.DataFrame):
            least, largest = _filled(numbers["low"], -math.inf), _filled(numbers["high"], math.inf)
        else:
            least = largest = _filled(numbers, -math.inf if self.high == math.inf else math.inf)
        return Bounds(least, largest, (least == largest) & np.isfinite(least))

    def _interval(self, bounds: Bounds, known: np.ndarray) -> tuple[float, float, float]:
        """Return mean and interval; the mean is NaN unless all numbers are known."""
        if not len(bounds.known):
            return math.nan, math.nan, math.nan
        if len(known) < len(bounds.known):
            return math.nan, float(bounds.least.min()), float(bounds.largest.max())
        is_ratio = not self.unit and bool((known > 0).all())
        values = np.log(known.astype(float)) if is_ratio else known.astype(float)
        mean, half = float(values.mean()), float(half_widths(values)) if len(values) > 1 else 0.0
        ends = (mean, mean - half, mean + half)
        return tuple(map(math.exp, ends)) if is_ratio else ends  # type: ignore[return-value]

    def _verdict(self, low: float, high: float) -> str:
        if not self.criterion:
            return ""
        if self.low <= low and high <= self.high:
            return HOLDS
        return FAILS if high < self.low or low > self.high else UNTOLD

    def _in_words(self, bounds: Bounds, known: np.ndarray, mean: float, low: float, high: float) -> str:
        if not len(bounds.known):
            return "no runs"
        digits = 0 if np.issubdtype(known.dtype, np.integer) and low == high else 2
        if len(known) == len(bounds.known):
            between = f" ({low:.{digits}f} to {high:.{digits}f})" if len(known) > 1 else ""
            return f"{mean:.{digits}f}{self.unit}{between}"
        parts = [f"{known.min():.{digits}f} to {known.max():.{digits}f}{self.unit}"] if len(known) else []
        rest = ~bounds.known
        beyond = _within(bounds.least[rest].min(), bounds.largest[rest].max())
        return ", ".join([*parts, f"{beyond} with {rest.sum()} of {len(rest)} seeds"])


def _filled(numbers: pd.Series, unknown: float) -> np.ndarray:
    values = numbers.to_numpy()
    return np.where(np.isnan(values), unknown, values) if np.issubdtype(values.dtype, np.floating) else values


def _within(low: float, high: float) -> str:
    """Return the bounds of a positive number in words; those of one that does not exist are equal."""
    if low == high:
        return "not reached"
    if math.isinf(high):
        return f"at least {low:.2f}" if low > 0 else "not known"
    return f"at most {high:.2f}" if low <= 0 else f"between {low:.2f} and {high:.2f}"


def judged(claims: Iterable[Claim], results: pd.DataFrame) -> pd.DataFrame:
    names = [name for name in ("setting", "arm", "paradigm") if name in results]
    results = results.astype(dict.fromkeys(names, object))  # which are compared faster, and converted nowhere else
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


def arrives_after_s(time_s: float, duration_s: float) -> float:
    """Return the time, or for NaN, never, how long the run was: it arrives later than that, if at all."""
    return duration_s if math.isnan(time_s) else time_s


def mean_time(times_s: Sequence[float], duration_s: float) -> tuple[float, float]:
    """Return the geometric mean of times to several targets, NaN for never, and what it is at least."""
    least_s = [arrives_after_s(time_s, duration_s) for time_s in times_s]
    time_s, at_least = (float(np.exp(np.mean(np.log(each)))) for each in (times_s, least_s))
    return time_s, at_least


# ---- numbers from results: a row per run with the columns setting, arm, paradigm and seed ----


def of(column: str, setting: str, arm: str, *paradigms: str) -> Of:
    """A column's mean over these paradigms, not known as soon as it is not known for one of them."""

    def number(results: pd.DataFrame) -> pd.Series:
        # Arrays, since masks and pivots of frames take most of the time of judging hundreds of claims.
        there = (results["setting"].to_numpy() == setting) & (results["arm"].to_numpy() == arm)
        names, seeds, values = (results[name].to_numpy() for name in ("paradigm", "seed", column))
        runs = [there & (names == paradigm) for paradigm in paradigms]
        numbers = [pd.Series(values[rows].astype(float), pd.Index(seeds[rows], name="seed")) for rows in runs]
        return numbers[0] if len(numbers) == 1 else pd.concat(numbers, axis=1).mean(axis=1, skipna=False)

    return number


def time_to(target: str, setting: str, arm: str, *paradigms: str) -> Of:
    """Bounds of the time to a target, or of its mean over these paradigms.

    They are columns: TARGET_s, NaN for never, and TARGET_at_least_s, how long a run was that never arrived.
    """
    time_s, at_least_s = (of(f"{target}{end}", setting, arm, *paradigms) for end in ("_s", "_at_least_s"))
    return lambda results: pd.DataFrame({"low": at_least_s(results), "high": time_s(results).fillna(math.inf)})


def ratio(a: Of, b: Of) -> Of:
    """Return the ratio of two numbers, or the bounds of that of two positive ones within bounds."""

    def number(results: pd.DataFrame) -> pd.Series | pd.DataFrame:
        above, below = a(results), b(results)
        if isinstance(above, pd.Series):
            return above / below
        return pd.DataFrame({"low": above["low"] / below["high"], "high": above["high"] / below["low"]})

    return number


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
