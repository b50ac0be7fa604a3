"""Learning curves of a report: means over seeds in bands, against time and samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from hpcsync.html_report.charts import Figure, Table, series
from hpcsync.html_report.run_data import RunData, evenly
from hpcsync.html_report.svg import Panel, element, limits, number, path, picture, text, title
from hpcsync.report.variants import LEAST_SEEDS, LEVEL, mean_and_band
from hpcsync.trace.schema import Rows

POINTS = 600  # of all lines of a panel together
LEAST_POINTS = 8  # of a line


def learning_curves(runs: Mapping[str, Sequence[RunData]], quantity: str) -> Figure | None:
    """Return an evaluated quantity against time and samples; None if no run has it."""
    panels, rows = [], []
    against = {
        x_label: {
            label: curve
            for label, each in runs.items()
            if (curve := _curve(each, quantity, column, len(runs))) is not None
        }
        for column, x_label in (("now_s", "time (s)"), ("samples", "samples"))
    }
    both = [curve for curves in against.values() for curve in curves.values()]  # both panels have the same y axis
    if not both:
        return None
    targets = {getattr(run.job.stop, f"target_{quantity}") for each in runs.values() for run in each} - {None}
    means = [*np.concatenate([curve[:, 1] for curve in both]).tolist(), *targets]
    log = quantity == "loss" and min(means) > 0 and max(means) > 20 * min(means)
    least = min(means) / 2 if log else 0.0 if min(means) >= 0 else -math.inf
    most = 1.0 if quantity == "accuracy" else math.inf
    values = [*np.concatenate([_band(curve, least, most).ravel() for curve in both]).tolist(), *means]
    for x_label, curves in against.items():
        right = max(float(curve[-1, 0]) for curve in curves.values())
        panel = Panel.of((0.0, 1.02 * right or 1.0), limits(values, log=log), log_y=log)
        parts = panel.axes(x_label, quantity)
        for value in sorted(targets):
            y = panel.y(value)
            line = element("line", x1=panel.x.begin, x2=panel.x.end, y1=y, y2=y, class_="target")
            parts += [element("g", title(f"target: {quantity} {value:g}"), line)]
            parts.append(text(panel.x.begin + 4, y - 4, f"target {value:g}", "tick"))
        for i, label in enumerate(runs):
            if label in curves:
                parts += _drawn(panel, curves[label], (least, most), series(i), label, quantity, x_label)
                rows += [
                    (label, x_label, number(x), f"{mean:.5g}", f"{low:.5g}", f"{high:.5g}")
                    for x, mean, low, high in curves[label].tolist()
                ]
        panels.append(
            (
                f"{quantity} against {x_label.removesuffix(' (s)')}",
                picture(f"{quantity} against {x_label}", 250, *parts),
            )
        )
    drawn = f"At most {_points(len(runs))} evenly spaced points of each line are drawn."
    return Figure(
        caption=f"{quantity.capitalize()} on held-out data",
        panels=panels,
        legend=[(series(i), label) for i, label in enumerate(runs)] if len(runs) > 1 else [],
        table=Table(("variant", "against", "at", "mean", "low", "high"), rows),
        note=f"{_about_bands(runs)}{_about_lost(runs) if quantity == 'loss' else ''}{drawn}",
    )


def _about_bands(runs: Mapping[str, Sequence[RunData]]) -> str:
    """Return in words what lines and bands are; "" if each variant has one seed."""
    sizes = {len(each) for each in runs.values()}
    few, many = any(1 < n < LEAST_SEEDS for n in sizes), max(sizes) >= LEAST_SEEDS
    if not few and not many:
        return ""
    bands = f"the {100 * LEVEL:g} % interval of the mean (Student)" if many else "the range of the two"
    exception = ", with two seeds their range" if few and many else ""
    return f"Lines are means over the seeds, bands {bands}{exception}; a run that has ended keeps its last value. "


def _about_lost(runs: Mapping[str, Sequence[RunData]]) -> str:
    """Return in words how many runs end with a loss that is not finite, which no line shows; "" if none does."""
    n_lost = {
        label: sum(not np.isfinite(run.evaluations["loss"][-1:]).all() for run in of) for label, of in runs.items()
    }
    lost = [f"in {n} of {len(runs[label])} of {label}" for label, n in n_lost.items() if n]
    return f"A loss that is not finite is not drawn: at the end {', '.join(lost)}. " if lost else ""


def _points(n_lines: int) -> int:
    return max(LEAST_POINTS, POINTS // (4 * max(2, n_lines)))


def _curve(runs: Sequence[RunData], quantity: str, column: str, n_lines: int) -> Rows | None:
    """Return x, mean and both ends of the band over the runs, shape (n, 4); an ended run keeps its last value."""
    each = []
    for run in runs:
        rows = run.evaluations[np.isfinite(run.evaluations[quantity])]
        if len(rows):
            order = np.argsort(rows[column], kind="stable")
            each.append((rows[column][order].astype(float), rows[quantity][order]))
    if not each:
        return None
    at = np.unique(np.concatenate([x for x, _ in each]))
    at = evenly(at[at >= max(x[0] for x, _ in each)], _points(n_lines))
    values = np.array([np.interp(at, x, y) for x, y in each])
    return np.stack([at, *mean_and_band(values)], axis=1)


def _band(curve: Rows, least: float, most: float) -> Rows:
    """Return the part of the band that can be drawn: an interval may reach beyond what is possible."""
    return curve[:, 2:].clip(least, most)


def _drawn(
    panel: Panel,
    curve: Rows,
    possible: tuple[float, float],
    class_: str,
    label: str,
    quantity: str,
    x_label: str,
) -> list[Markup]:
    points = [(panel.x(x), panel.y(mean)) for x, mean, _, _ in curve.tolist()]
    parts = []
    if (curve[:, 2] < curve[:, 3]).any():
        lower, upper = (
            [(panel.x(x), panel.y(y)) for x, y in zip(curve[:, 0].tolist(), end.tolist(), strict=True)]
            for end in _band(curve, *possible).T
        )
        parts.append(path([*upper, *reversed(lower)], f"band {class_}", closed=True))
    parts.append(path(points, f"line {class_}"))
    parts.append(element("circle", cx=points[-1][0], cy=points[-1][1], r=3, class_=f"dot {class_}"))
    unit = " s" if x_label.endswith("(s)") else f" {x_label}"
    for (x, y), (at, mean, low, high) in zip(points, curve.tolist(), strict=True):
        spread = f" ({low:.4g} to {high:.4g})" if low < high else ""
        told = title(f"{label}: {quantity} {mean:.4g}{spread} at {number(at)}{unit}")
        parts.append(element("circle", told, cx=x, cy=y, r=5, class_=f"hit {class_}"))
    return parts
