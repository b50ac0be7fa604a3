"""Figures of a report: SVG whose every mark has a title, and the numbers it shows as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from hpcsync.html_report.run_data import DECIDED_WORKERS, PARTS, Decisions, RunData, add, evenly
from hpcsync.html_report.svg import WIDTH, Panel, Scale, element, limits, number, path, picture, short, text, title
from hpcsync.report.variants import Estimate
from hpcsync.report.wording import TO_LAST_ITERATION
from hpcsync.trace.schema import Change, Rows

COLOURS, DASHES = 8, 4  # of the style sheet; later series repeat the colours with other dashes
BARS = 32  # of a histogram
BAR_WORKERS = 32  # workers shown of a run
MATRIX_WORKERS = 16  # in rows and columns
DIGIT = 7.6  # width of a digit beside a matrix, at most
PAIRS = 200  # rows of the table of waiting times of a variant
PART_NAMES = {
    "load": "loading",
    "compute": "compute",
    "wait": "wait",
    "comm": "communication",
    "between": "compression, between iterations",
}


class Table(NamedTuple):
    """Numbers behind a figure."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class Figure(NamedTuple):
    """One figure.

    Attributes
    ----------
    panels
        Their titles and pictures.
    legend
        Classes of the style sheet and names.
    note
        What is left out, or how to read it.
    """

    caption: str
    panels: list[tuple[str, Markup]]
    legend: list[tuple[str, str]]
    table: Table
    note: str = ""


def series(i: int) -> str:
    """Return the class of the i-th series: lines that coincide can be told apart, and so can those of a grey print."""
    return f"s{i % COLOURS} d{(i + i // COLOURS) % DASHES}"


# ---- time to the target ----


def times_to_target(
    times: Mapping[str, Sequence[float]], estimates: Mapping[str, Estimate | None], target: str
) -> Figure:
    """Return each variant's mean time to the target with its interval, and the runs.

    Parameters
    ----------
    times
        Seconds of each run; infinite for a run that did not arrive.
    estimates
        Mean and interval; None if a run did not arrive.
    """
    ends = [time for each in times.values() for time in each]
    ends += [e.mean + (e.half_width or 0.0) for label in times if (e := estimates[label]) is not None]
    row, top = 40, 8
    height = top + row * len(times) + 40
    x = Scale(0.0, limits(ends, zero=True)[1], 12, WIDTH - 12)
    parts = _bottom_axis(x, top, height, f"time to {target} (s)")
    rows = []
    has_interval = any(e is not None and e.half_width is not None for e in (estimates[label] for label in times))
    with_interval = " with their 95 % interval (Student)" if has_interval else ""
    for i, (label, each) in enumerate(times.items()):
        y, estimate = top + row * i + 28, estimates[label]
        arrived = [time for time in each if math.isfinite(time)]
        counted = f"{len(arrived)} of {len(each)} runs arrived"
        parts.append(text(12, y - 12, cut(label), "label"))
        if estimate is None:
            parts.append(text(WIDTH - 12, y - 12, counted, "tick", "end"))
        for time in arrived:
            told = title(f"{label}: one run, {number(time)} s")
            parts.append(element("circle", told, cx=x(time), cy=y, r=4, class_=f"ring {series(i)}"))
        words = interval(estimate)
        if estimate is not None:
            bar = []
            if estimate.half_width is not None:
                low, high = x(max(0.0, estimate.mean - estimate.half_width)), x(estimate.mean + estimate.half_width)
                bar.append(element("line", x1=low, x2=high, y1=y, y2=y, class_=f"whisker {series(i)}"))
            bar.append(element("circle", cx=x(estimate.mean), cy=y, r=5.5, class_=f"dot {series(i)}"))
            parts.append(element("g", title(f"{label}: mean {words} s"), *bar))
        rows.append((label, words, counted, ", ".join(map(number, arrived))))
    return Figure(
        caption=f"Time to {target}",
        panels=[("", picture(f"Time to {target}, by variant", height, *parts))],
        legend=[],
        table=Table(("variant", "mean (s)", "runs", "each run (s)"), rows),
        note=f"Filled dots are means{with_interval}, rings are runs.",
    )


def interval(estimate: Estimate | None) -> str:
    """Return a mean with its interval in words, without the unit."""
    if estimate is None:
        return "not known"
    if estimate.half_width is None:
        return number(estimate.mean)
    low, high = estimate.mean - estimate.half_width, estimate.mean + estimate.half_width
    return f"{number(estimate.mean, 3)} ({number(low, 3)} to {number(high, 3)})"


def cut(label: str, most: int = 54) -> str:
    """Return a label that fits into a panel; the whole one is in the table."""
    return label if len(label) <= most else f"{label[: most - 1]}…"


def _bottom_axis(x: Scale, top: float, height: float, name: str) -> list[Markup]:
    parts = []
    for value in x.ticks():
        at = x(value)
        parts.append(element("line", x1=at, x2=at, y1=top, y2=height - 36, class_="grid"))
        anchor = "start" if at < 20 else "end" if at > WIDTH - 20 else "middle"
        parts.append(text(at, height - 22, short(value), "tick", anchor))
    return [*parts, text(WIDTH / 2, height - 5, name, "name", "middle")]


# ---- time of the workers ----

ABOUT_SHARES = f"Shares {TO_LAST_ITERATION}."


def time_of_variants(runs: Mapping[str, Sequence[RunData]]) -> Figure:
    """Return the shares of the workers' time, over all runs of each variant."""
    sums_s = {label: np.sum([run.parts_s.sum(axis=0) for run in each], axis=0) for label, each in runs.items()}
    drawn, rows = _bars("Time of all workers, by variant", "", sums_s, 40)
    parts = _parts(sums_s.values())
    return Figure("Time of all workers", [("", drawn)], parts, Table(_BAR_COLUMNS, rows), ABOUT_SHARES)


def time_of_workers(runs: Mapping[str, Sequence[RunData]]) -> Figure:
    """Return the shares of each worker's time in the first run of each variant."""
    panels: list[tuple[str, Markup]] = []
    rows: list[tuple[str, ...]] = []
    most = max(len(each[0].parts_s) for each in runs.values())
    for label, each in runs.items():
        run = each[0]
        hosts = run.hosts if len(set(run.hosts)) > 1 else ("",) * len(run.parts_s)
        shown = evenly(range(len(run.parts_s)), BAR_WORKERS)
        names = {w: f"worker {w}" + (f" on {hosts[w]}" if hosts[w] else "") for w in shown}
        drawn, more = _bars(label, label, {names[w]: run.parts_s[w] for w in shown}, 40 if any(hosts) else 20)
        panels.append((label, drawn))
        rows += more
    seeds = sorted({each[0].job.seed for each in runs.values()})
    caption = f"Time of each worker, seed {' or '.join(map(str, seeds))}"
    parts = _parts(row for each in runs.values() for row in each[0].parts_s)
    some = f" At most {BAR_WORKERS} evenly spaced of {most:,} workers." if most > BAR_WORKERS else ""
    return Figure(caption, panels, parts, Table(_BAR_COLUMNS, rows), f"{ABOUT_SHARES}{some}")


_BAR_COLUMNS = ("", *(f"{PART_NAMES[part]} (%)" for part in PARTS), "total (s)")


def _parts(bars: Iterable[Rows]) -> list[tuple[str, str]]:
    """Return the legend of the parts of which any of these bars has more than rounding errors."""
    largest = np.max([bar / (bar.sum() or 1.0) for bar in bars], axis=0)
    return [(f"bar {part}", PART_NAMES[part]) for part, share in zip(PARTS, largest, strict=True) if share > 1e-6]


def _bars(caption: str, of: str, bars: Mapping[str, Rows], row: float) -> tuple[Markup, list[tuple[str, ...]]]:
    """Return bars of shares, with their names above them (row of 40) or left of them, and the rows of a table."""
    above = row == 40
    x = Scale(0.0, 100.0, 12 if above else 78, WIDTH - 14)
    height = 8 + row * len(bars) + 40
    parts = _bottom_axis(x, 8, height, "share of the time (%)")
    rows = []
    for n, (name, bar) in enumerate(bars.items()):
        total_s = float(bar.sum()) or 1.0
        who = f"{of}, {name}" if of else name
        y = 8 + row * n + (20 if above else 2)
        parts.append(text(12, y - 6, cut(name)) if above else text(70, y + 12, name, anchor="end"))
        begin = 0.0
        for part, seconds in zip(PARTS, bar.tolist(), strict=True):
            share = 100 * seconds / total_s
            wide = x(begin + share) - x(begin) - 0.6
            if wide > 0:
                told = title(f"{who}: {PART_NAMES[part]} {share:.1f} %, {number(seconds)} s")
                parts.append(element("rect", told, x=x(begin), y=y, width=wide, height=15, class_=f"bar {part}"))
            begin += share
        rows.append((who, *(f"{100 * seconds / total_s:.2f}" for seconds in bar), number(float(bar.sum()))))
    return picture(caption, height, *parts), rows


# ---- who waited for whom ----


def waiting_matrices(runs: Mapping[str, Sequence[RunData]]) -> Figure | None:
    """Return for how long each worker waited for each other, in the first run of each variant."""
    panels, rows, left_out = [], [], False
    for label, each in runs.items():
        waits_s = each[0].waits_s
        if waits_s is None or not waits_s.any():
            continue
        involved = waits_s.sum(axis=0) + waits_s.sum(axis=1)
        shown = sorted(np.argsort(-involved, kind="stable")[:MATRIX_WORKERS].tolist())
        left_out |= len(shown) < len(waits_s)
        percent = 100 * waits_s / waits_s.sum()
        panels.append((f"{label}: {number(float(waits_s.sum()))} s in all", _matrix(label, waits_s, shown)))
        rows += [
            (label, f"worker {i}", f"worker {j}", number(float(waits_s[i, j])), f"{percent[i, j]:.2f}")
            for i, j in np.argwhere(waits_s)[np.argsort(-waits_s[waits_s != 0], kind="stable")][:PAIRS].tolist()
        ]
    if not panels:
        return None
    seeds = sorted({each[0].job.seed for each in runs.values()})
    note = "Seconds that the worker of a row waited for the worker of a column."
    if left_out:
        note += f" The {MATRIX_WORKERS} workers that waited or were waited for longest."
    columns = ("variant", "waiting", "for", "time (s)", "share (%)")
    return Figure(f"Who waited for whom, seed {' or '.join(map(str, seeds))}", panels, [], Table(columns, rows), note)


def _matrix(label: str, waits_s: Rows, workers: Sequence[int]) -> Markup:
    """Return a matrix of cells, the darker the longer; with numbers if there is room."""
    left = 74
    size = min(44.0, (WIDTH - left - 10) / len(workers))
    longest = DIGIT * len(str(max(workers)))
    turned = longest > size - 2  # the numbers of the columns would run into each other
    top = 20 + longest if turned else 30
    largest, has_numbers = float(waits_s.max()), size >= 36
    parts = [text(left, 11, "for worker", "name")]
    for n, i in enumerate(workers):
        y = top + size * n
        middle = left + size * (n + 0.5)
        parts.append(text(middle + 4 * turned, top - 5, str(i), "tick", None if turned else "middle", turned=turned))
        parts.append(text(left - 6, y + size / 2 + 4, f"worker {i}", "tick", "end"))
        for m, j in enumerate(workers):
            waited_s = float(waits_s[i, j])
            told = title(f"{label}: worker {i} waited {number(waited_s)} s in all for worker {j}")
            x = left + size * m
            shade = f"{(0.55 if has_numbers else 1.0) * waited_s / largest:.3f}"
            box = {"x": x, "y": y, "width": size - 1, "height": size - 1}
            parts.append(element("rect", told, class_="cell", fill_opacity=shade, **box))
            if has_numbers and waited_s >= 0.01 * largest:
                parts.append(text(x + size / 2, y + size / 2 + 4, _in_cell(waited_s, size), "value", "middle"))
    return picture(f"Waiting under {label}", top + size * len(workers) + 6, *parts)


def _in_cell(waited_s: float, size: float) -> str:
    """Return the seconds as a number that fits into a cell of this size, such as ``123k``; "" if there is none."""
    forms = (f"{waited_s:.2g}" if waited_s < 10 else f"{waited_s:,.0f}", short(float(f"{waited_s:.3g}")))
    return next((words for words in forms if DIGIT * (len(words) - 0.5 * len(re.findall("[.,]", words))) <= size), "")


# ---- distributions ----


class Counted(NamedTuple):
    """Quantity that is counted, with its unit and of what it is a property."""

    name: str
    unit: str
    of: str
    caption: str


COUNTED = {
    "staleness": Counted("staleness", "updates", "applied pushes", "Staleness of the applied pushes"),
    "leads": Counted(
        "lead", "iterations", "starts of an iteration", "Lead over the slowest worker, when an iteration starts"
    ),
}


def histograms(runs: Mapping[str, Sequence[RunData]], what: str) -> Figure | None:
    """Return the distributions of ``staleness`` or ``leads``, a panel for each variant; None without servers."""
    counted = {label: _total(getattr(run, what) for run in each) for label, each in runs.items()}
    counted = {label: counts for label, counts in counted.items() if counts.sum()}
    if not counted:
        return None
    about = COUNTED[what]
    largest = max(map(len, counted.values()))
    common = largest if largest <= BARS else 0  # values on all scales, if they are the same
    panels, rows = [], []
    for i, label in enumerate(runs):
        if label in counted:
            bound = runs[label][0].job.paradigm.lead_bound if what == "leads" else math.inf
            drawn, more = _histogram(label, counted[label], about, series(i), bound, common)
            of_runs = [getattr(run, what) for run in runs[label]]
            mean = float(np.mean([_mean(counts) for counts in of_runs if counts.sum()]))  # as in the table of variants
            panels.append((f"{label}: mean {number(mean, 3)}, largest {len(counted[label]) - 1:,}", drawn))
            rows += more
    note = "" if common else "Each panel has a scale of its own; a bar may cover several values."
    columns = ("variant", f"{about.name} ({about.unit})", about.of, "share (%)")
    return Figure(about.caption, panels, [], Table(columns, rows), note)


def _total(counts: Iterable[Rows]) -> Rows:
    total = np.zeros(0, np.int64)
    for each in counts:
        total = add(total, each)
    return total


def _mean(counts: Rows) -> float:
    return float(np.average(np.arange(len(counts)), weights=counts))


def _histogram(
    label: str, counts: Rows, about: Counted, class_: str, bound: float, common: int
) -> tuple[Markup, list[tuple[str, ...]]]:
    """Return one histogram with the bound, unless that is far away, and the rows of a table."""
    size = max(common or len(counts), 4)
    wide = -(-len(counts) // BARS)  # values of a bar
    bars = np.add.reduceat(counts, range(0, len(counts), wide))
    is_near = bound < 2 * size
    right = max(size, bound + 1.5) if is_near else size
    top = (112 if is_near else 105) * float(bars.max() / bars.sum())
    panel = Panel.of((-0.5, right - 0.5 + (wide > 1)), (0.0, top), 200)
    parts = panel.axes(f"{about.name} ({about.unit})", "share (%)", whole_x=True)
    rows: list[tuple[str, ...]] = []
    for low, n in zip(range(0, len(counts), wide), bars.tolist(), strict=True):
        span = f"{low}" if wide == 1 else f"{low} to {low + wide - 1}"
        share = 100 * n / int(bars.sum())
        rows.append((label, span, f"{n:,}", f"{share:.2f}"))
        if n:
            begin, end = panel.x(low - 0.45), panel.x(low + wide - 0.55)
            told = title(f"{label}: {about.name} of {span}: {n:,} {about.of}, {share:.2f} %")
            high = max(1.0, panel.y.begin - panel.y(share))
            box = {"x": begin, "y": panel.y.begin - high, "width": end - begin, "height": high}
            parts.append(element("rect", told, class_=f"fill {class_}", **box))
    if is_near:
        at = panel.x(bound + 0.5)
        line = element("line", x1=at, x2=at, y1=panel.y.end, y2=panel.y.begin, class_="target")
        parts.append(element("g", title(f"{label}: the paradigm allows a lead of {bound:g}"), line))
        is_right = at > WIDTH - 90
        words = f"bound {bound:g}"
        parts.append(text(at + (-5 if is_right else 5), panel.y.end + 10, words, "tick", "end" if is_right else None))
    return picture(f"{about.name} of {label}", 200, *parts), rows


# ---- decisions ----

CONTROLLERS = {  # what `chosen` is, by controller
    "dssp": "extra iterations granted",
    "k": "contributions per update (k)",
    "batches": "batch size (samples)",
    "stage": "stage",
    "local-steps": "local steps of a push",
    "ratio": "share of the elements sent",
    "share": "share of the data",
    "commits": "commits per period",
    "reward": "commits per period tried",
    "switch": "samples at the switch",
}
EVENTS = ("dssp", "reward")  # a choice for once; others hold until the next one
OF_ALL = ("k", "stage", "commits", "switch", "reward")  # a choice for all workers


def decisions(label: str, run: RunData, controller: str) -> Figure:
    """Return the choices of one controller over time."""
    n, n_workers, rows = run.decisions[controller]
    what = CONTROLLERS.get(controller, "chosen")
    events = controller in EVENTS
    everyone = sorted(set(rows["worker"].tolist()))
    workers = evenly(everyone, DECIDED_WORKERS)
    if controller in OF_ALL or (events and len(everyone) > DECIDED_WORKERS):
        shown = {"": rows}
    else:
        shown = {f"worker {worker}": rows[rows["worker"] == worker] for worker in workers}
    values = rows["chosen"].tolist()
    panel = Panel.of((0.0, 1.02 * run.summary.duration_s or 1.0), limits(values, zero=True), 200)
    parts = panel.axes("time (s)", what, whole_y=all(value == round(value) for value in values))
    for i, (name, own) in enumerate(shown.items()):
        points = [(panel.x(row["now_s"]), panel.y(row["chosen"])) for row in own]
        if not events:
            until_s = _last_s(run, int(own["worker"][-1])) if name else run.summary.duration_s
            end = (panel.x(max(until_s, float(own["now_s"][-1]))), points[-1][1])
            parts.append(path([*points, end], f"line {series(i)}", steps=True))
        for (x, y), row in zip(points, own, strict=True):
            told = f"{number(float(row['chosen']))} at {number(float(row['now_s']))} s, worker {row['worker']}"
            parts.append(element("circle", title(f"{what}: {told}"), cx=x, cy=y, r=3.2, class_=f"mark {series(i)}"))
    notes = [f"{len(rows):,} evenly spaced of {n:,} decisions."] if len(rows) < n else []
    if "" not in shown and len(workers) < n_workers:
        notes.append(f"{len(workers)} of {n_workers:,} workers.")
    table = [(number(float(r["now_s"])), str(r["worker"]), number(float(r["chosen"]))) for r in rows]
    caption = f"{label}: {what}, {n:,} decision{'s' if n != 1 else ''}, seed {run.job.seed}"
    kind = "mark " if events else ""
    legend = [(f"{kind}{series(i)}", name) for i, name in enumerate(shown) if name]
    drawn = picture(f"{what} over time", 200, *parts)
    return Figure(caption, [("", drawn)], legend, Table(("time (s)", "worker", what), table), " ".join(notes))


def _last_s(run: RunData, worker: int) -> float:
    """Return until when a worker took part: until it left for good, or else until the end."""
    changes = run.membership[run.membership["worker"] == worker]
    is_away = len(changes) and changes["change"][-1] != Change.JOINED
    return float(changes["now_s"][-1]) if is_away else run.summary.duration_s


def decided(run: RunData) -> dict[str, Decisions]:
    """Return the decisions worth a figure: without events, which are no choices."""
    return {name: each for name, each in run.decisions.items() if name not in ("elapsed", "evaluated")}
