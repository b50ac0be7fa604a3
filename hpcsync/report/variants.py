"""Comparison of variants of one job over seeds: time to the target with intervals, paired by seed.

Notes
-----
Intervals are Student's 95 % intervals of a mean. Differences to the fastest variant are taken seed by seed, and their
interval is that of the mean difference: what a seed does to all variants alike cancels.

The probability of being the fastest is a paired bootstrap: 10,000 times as many seeds as there are are drawn with
replacement, the same ones for every variant, and the variant with the smallest mean time over them counts; equal means
share.

A run that ended before it reached the target is censored: its time is unknown, but later than its end. No mean is taken
over such runs. A variant with one has no mean, interval or difference, and a bootstrap sample that contains one cannot
make its variant the fastest.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpcsync.report.summary import Summary
from hpcsync.trace.schema import Rows

LEAST_SEEDS = 3  # for an interval or a probability
LEVEL = 0.95
RESAMPLES = 10_000
COLUMNS = 80  # of a terminal


class Estimate(NamedTuple):
    """Mean, and half the width of its interval; None with fewer than `LEAST_SEEDS` values."""

    mean: float
    half_width: float | None


class Row(NamedTuple):
    """One variant.

    Attributes
    ----------
    runs, arrived
        Number of finished runs, and of those that reached the target.
    time_s
        Time to the target, in seconds; None unless all runs arrived.
    behind_s
        Difference to the fastest variant, paired by seed, in seconds; None for that variant itself, without an
        arrival of both at every common seed, and without a fastest variant.
    fastest
        Probability of being the fastest; None with fewer than `LEAST_SEEDS` common seeds, and if none is above 0.
    samples_per_s, wait_share, staleness, wire_bytes, accuracy, loss
        Means over the runs, of the numbers of their summaries; None if a run lacks it. Accuracy and loss are final.
    """

    label: str
    runs: int
    arrived: int
    time_s: Estimate | None
    behind_s: Estimate | None
    fastest: float | None
    samples_per_s: float | None
    wait_share: float | None
    staleness: float | None
    wire_bytes: float | None
    accuracy: float | None
    loss: float | None


class Variants(NamedTuple):
    """Comparison under one condition.

    Attributes
    ----------
    condition
        Task and cluster of these variants, as far as others differ in them; "" if none does.
    rows
        In the order of the variants.
    fastest
        Label of the variant with the smallest mean time to the target; None if none has one.
    target
        Target of the job in words; None without one, or with several.
    """

    condition: str
    rows: tuple[Row, ...]
    fastest: str | None
    target: str | None
    remarks: tuple[str, ...]


def half_widths(values: Rows) -> Rows:
    """Return half the width of Student's 95 % interval of the mean over the first axis, which has at least 2 values."""
    from scipy.special import stdtrit  # quantiles of Student's t; scipy.stats takes a second to import

    errors = np.std(values, axis=0, ddof=1) / math.sqrt(len(values))
    return np.asarray(stdtrit(len(values) - 1, 0.5 + LEVEL / 2) * errors)


class Band(NamedTuple):
    """Means over seeds, and both ends of their bands."""

    mean: Rows
    low: Rows
    high: Rows


def mean_and_band(values: Rows) -> Band:
    """Return the mean over seeds and its band.

    Parameters
    ----------
    values
        Shape (n_seeds, n_points).

    Returns
    -------
    Band
        Each of shape (n_points,). The band is Student's 95 % interval of the mean; with fewer than `LEAST_SEEDS` seeds
        it is the range from the smallest to the largest value.
    """
    mean = values.mean(axis=0)
    if len(values) < LEAST_SEEDS:
        return Band(mean, values.min(axis=0), values.max(axis=0))
    half = half_widths(values)
    return Band(mean, mean - half, mean + half)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of finite values with the half width of Student's 95 % interval."""
    mean = float(np.mean(values))
    return Estimate(mean, None if len(values) < LEAST_SEEDS else float(half_widths(np.array(values, float))))


def paired(times: Mapping[int, float], reference: Mapping[int, float]) -> Estimate | None:
    """Return the mean difference at the seeds that both have; None without one, or if one of these is infinite."""
    differences = [times[seed] - reference[seed] for seed in times if seed in reference]
    return estimate(differences) if differences and all(map(math.isfinite, differences)) else None


def probabilities(times: Rows) -> Rows:
    """Return each variant's probability of being the fastest, by the paired bootstrap.

    Parameters
    ----------
    times : array of shape (variants, seeds)
        Times to the target; infinite for a censored run.

    Returns
    -------
    array of shape (variants,)
        The sum is below 1 if some of the samples contain a censored run of every variant.
    """
    drawn = np.random.default_rng(0).integers(times.shape[1], size=(RESAMPLES, times.shape[1]))
    means = times[:, drawn].mean(axis=2)
    first = (means == means.min(axis=0)) & np.isfinite(means)
    return (first / np.maximum(first.sum(axis=0), 1)).mean(axis=1)


def merit(runs: Iterable[Summary], n: int) -> tuple[int, float, float]:
    """Return an order of the settings of one variant; the smallest is the best.

    Most of the runs reach the target, then those soonest, then the final loss is the smallest; without a target only
    the loss counts.

    Parameters
    ----------
    runs : iterable of Summary
        The finished runs of one setting.
    n : int
        Number of runs that were started.
    """
    runs = list(runs)
    arrived = [run.time_to_target_s for run in runs if run.time_to_target_s is not None]
    losses = [math.inf if run.final_loss is None or math.isnan(run.final_loss) else run.final_loss for run in runs]
    losses += [math.inf] * (n - len(runs))
    return n - len(arrived), float(np.mean(arrived or [0.0])), float(np.mean(losses))


def compare(variants: Mapping[str, Mapping[int, Summary]], condition: str = "") -> Variants:
    """Compare the finished runs of variants.

    Parameters
    ----------
    variants : mapping
        Summaries by seed, by the label of the variant; each has at least one.
    condition : str
        Their condition, which is the same for all.
    """
    times = {label: {seed: time_s(run) for seed, run in runs.items()} for label, runs in variants.items()}
    means = {label: np.mean(list(each.values())) for label, each in times.items()}  # infinite if one is censored
    arrived = [label for label in means if math.isfinite(means[label])]
    fastest = min(arrived, key=lambda label: means[label], default=None)
    common = sorted(set.intersection(*(set(each) for each in times.values())))
    chances: dict[str, float] = {}
    if len(common) >= LEAST_SEEDS:
        values = probabilities(np.array([[each[seed] for seed in common] for each in times.values()]))
        if values.any():  # else no run at a common seed has arrived, and nothing is known of any
            chances = dict(zip(times, map(float, values), strict=True))
    rows = []
    for label, runs in variants.items():
        given = list(times[label].values())
        rows.append(
            Row(
                label=label,
                runs=len(given),
                arrived=sum(map(math.isfinite, given)),
                time_s=estimate(given) if label in arrived else None,
                behind_s=paired(times[label], times[fastest]) if fastest not in (None, label) else None,
                fastest=chances.get(label),
                samples_per_s=_mean([run.samples_per_s for run in runs.values()]),
                wait_share=_mean([run.wait_share for run in runs.values()]),
                staleness=_mean([run.staleness_mean for run in runs.values()]),
                wire_bytes=_mean([run.wire_bytes for run in runs.values()]),
                accuracy=_mean([run.final_accuracy for run in runs.values()]),
                loss=_mean([run.final_loss for run in runs.values()]),
            )
        )
    targets = {run.target for runs in variants.values() for run in runs.values()}
    remarks = tuple(_remarks(rows, targets, len(common), {seed for each in times.values() for seed in each}))
    return Variants(condition, tuple(rows), fastest, next(iter(targets)) if len(targets) == 1 else None, remarks)


def time_s(run: Summary) -> float:
    """Return the time to the target; infinite if the run did not reach it."""
    return math.inf if run.time_to_target_s is None else run.time_to_target_s


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def _remarks(rows: Sequence[Row], targets: set[str | None], common: int, seeds: set[int]) -> list[str]:
    lines = []
    if targets == {None}:
        lines.append("no target, so no time to it: set stop.target_accuracy or stop.target_loss")
    elif len(targets) > 1:
        lines.append("the variants have different targets: " + ", ".join(sorted(each or "none" for each in targets)))
    if common < LEAST_SEEDS:
        lines.append(f"no probabilities: {common} common seed{'s' * (common != 1)}, at least {LEAST_SEEDS} are needed")
    if any(row.runs < LEAST_SEEDS for row in rows):
        lines.append(f"no intervals for fewer than {LEAST_SEEDS} seeds")
    if any(row.runs < len(seeds) for row in rows):
        lines.append(f"the variants have different seeds; differences and probabilities use the common ones ({common})")
    if targets != {None} and any(row.arrived < row.runs for row in rows):
        lines.append("n of m: n of the m runs reached the target; the others have no time, and their variant no mean")
    return lines


# ---- output ----------------------------------------------------------------------------------------------------------


def table(conditions: Sequence[Variants]) -> RenderableType:
    """Return a table for each condition, with equal columns, that fits into 80 columns; if need be, without bytes."""
    names = column_names(conditions)
    cells = [[row_cells(row, variants, names[-1]) for row in variants.rows] for variants in conditions]
    widths = _widths(names, cells)
    longest = max((len(word) for rows in cells for row in rows for word in row[0].split()), default=0)
    if longest + sum(widths) + len(widths) > COLUMNS and "MB" in names:
        at = 1 + names.index("MB")
        names, cells = names[: at - 1] + names[at:], [[row[:at] + row[at + 1 :] for row in rows] for rows in cells]
        widths = _widths(names, cells)
    parts: list[RenderableType] = []
    for variants, rows in zip(conditions, cells, strict=True):
        result = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", expand=True)
        result.add_column("variant", overflow="fold", min_width=10, ratio=1)
        for name, width in zip(names, widths, strict=True):
            result.add_column(name, justify="right", no_wrap=True, min_width=width)
        for row in rows:
            result.add_row(*map(Text, row))
        parts += [Text(variants.condition, "bold")] if variants.condition else []
        parts += [result, *(Text(f"note: {line}", "yellow") for line in variants.remarks)]
    targets = ", ".join(dict.fromkeys(each.target for each in conditions if each.target))
    about = f"to target: {targets}, in s, with the 95 % interval; " if targets else ""
    about += "behind: seconds after the fastest, paired by seed; P: probability of being the fastest; "
    about += "wait: of the workers' time; stale: mean, in updates"
    about += "; MB: moved by all workers" * ("MB" in names)
    return Group(*parts, Text(about, "dim"))


def _widths(names: Sequence[str], cells: Sequence[Sequence[Sequence[str]]]) -> list[int]:
    """Return the width of each column after that of the variant."""
    rows = [row[1:] for of_condition in cells for row in of_condition]
    return [max(map(len, column)) for column in zip(names, *rows, strict=True)]


def column_names(conditions: Sequence[Variants]) -> tuple[str, ...]:
    """Return the names of a table's columns after that of the variant."""
    quality = "loss" if all(row.accuracy is None for variants in conditions for row in variants.rows) else "accuracy"
    return ("to target", "behind", "P", "samples/s", "wait", "stale", "MB", quality)


def row_cells(row: Row, variants: Variants, quality: str) -> list[str]:
    """Return the cells of a table's row: the label, then the `column_names`, of which `quality` is the last."""
    final = getattr(row, quality)
    arrived = f"{row.arrived} of {row.runs}" if variants.target or row.arrived else "-"
    return [
        row.label,
        arrived if row.time_s is None else _words(row.time_s),
        "fastest" if row.label == variants.fastest else "-" if row.behind_s is None else _words(row.behind_s, "+"),
        "-" if row.fastest is None else f"{row.fastest:.2f}",
        "-" if row.samples_per_s is None else _number(row.samples_per_s),
        "-" if row.wait_share is None else f"{100 * row.wait_share:.0f} %",
        "-" if row.staleness is None else _number(row.staleness),
        "-" if row.wire_bytes is None else _number(1e-6 * row.wire_bytes),
        "-" if final is None else f"{final:.4g}",
    ]


def _words(value: Estimate, sign: str = "") -> str:
    mean = _number(value.mean, sign)
    return mean if value.half_width is None else f"{mean} ± {_number(value.half_width)}"


def _number(value: float, sign: str = "") -> str:
    """Return a number with three significant digits, or whole from 1,000 on."""
    if abs(value) >= 999.5:
        return f"{value:{sign},.0f}"
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:{sign}.{decimals}f}"


def to_csv(conditions: Sequence[Variants]) -> str:
    """Return the variants as CSV, one line each, with every digit; an empty field is not known."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    pairs = ("time_s", "behind_s")
    names = [name for field in Row._fields for name in ([field, f"{field}_ci95"] if field in pairs else [field])]
    writer.writerow(["condition", *names])
    for variants in conditions:
        for row in variants.rows:
            cells: list[object] = [variants.condition]
            for field in Row._fields:
                value = getattr(row, field)
                cells += (value or (None, None)) if field in pairs else [value]
            writer.writerow(cells)
    return text.getvalue()


_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    **{special: f"\\{special}" for special in "&%$#_{}"},
}


def escaped(text: str) -> str:
    """Return a text as LaTeX prints it literally."""
    return "".join(_ESCAPES.get(character, character) for character in text)


def to_latex(conditions: Sequence[Variants]) -> str:
    """Return the variants as a LaTeX table of the package booktabs."""
    names = column_names(conditions)
    lines = [
        "% needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}",
        f"\\begin{{tabular}}{{l{'r' * len(names)}}}",
        r"\toprule",
        _latex_row(["variant", *names]),
    ]
    for variants in conditions:
        lines.append(r"\midrule")
        if variants.condition:
            lines.append(rf"\multicolumn{{{len(names) + 1}}}{{l}}{{{escaped(variants.condition)}}} \\")
        lines += [_latex_row(row_cells(row, variants, names[-1])) for row in variants.rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(escaped, cells)) + r" \\"
