"""Common parts of the figures: colours, sizes, labels of traces, and files."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch
from matplotlib.patheffects import Normal, Stroke
from matplotlib.textpath import text_to_path
from matplotlib.ticker import NullFormatter

from hpcsync.config.job import of_any_seed
from hpcsync.paradigms import OPTIONS
from hpcsync.report.variants import LEAST_SEEDS, LEVEL, mean_and_band
from hpcsync.system.atomic_files import whole
from hpcsync.trace.reader import Trace, TraceError
from hpcsync.trace.schema import Rows

PAGE_INCHES = 7.0
NARROW_INCHES = 5.0  # below it panels stand below each other
MARGIN_INCHES = 0.2  # of the figure's width, left free by titles and legends
POINTS = 2000  # points of a scatter plot, at most
LINE_POINTS = 500  # points of a line that is averaged over seeds, at most

# Okabe and Ito's colours (and some of Tol's), which colour-blind readers can tell apart, the same in every figure. No
# figure shows both paradigms and activities.
PARADIGM_COLOURS = {name: options.colour for name, options in OPTIONS.items()}
# Activities are ordered by luminance, so that a print in grey tells them apart.
ACTIVITY_COLOURS = {"load": "#3FA88A", "compute": "#0064A6", "wait": "#F5CE62", "transfer": "#000000"}
GREY = "#767676"
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))  # of the first, second, ... line
MARKERS = ("s", "^", "x", "D", "v", "o")  # of the fifth line and its followers, which have the same dashes again
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")  # of workers

STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "legend.fontsize": 8,
    "legend.title_fontsize": 7,
    "figure.figsize": (PAGE_INCHES, 4.8),  # the width of every figure; each chooses its height
    "savefig.dpi": 300,
    "svg.hashsalt": "hpcsync",
    "text.parse_math": False,  # names of folders may have dollar signs
}
NARROW_STYLE: Any = {"legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7}


def style(width: float = PAGE_INCHES) -> AbstractContextManager[None]:
    """Return a context manager that sets matplotlib's parameters for these figures and restores the caller's.

    Parameters
    ----------
    width
        Width of the figures, in inches.
    """
    smaller = NARROW_STYLE if width < NARROW_INCHES else {}
    return matplotlib.rc_context(STYLE | smaller | {"figure.figsize": (width, 4.8)})


def width_inches() -> float:
    """Return the width of a figure under the current style."""
    return float(matplotlib.rcParams["figure.figsize"][0])


def is_narrow() -> bool:
    """Return True if panels must stand below each other."""
    return width_inches() < NARROW_INCHES


def label(trace: Trace) -> str:
    """Return the paradigm of a trace with its main options, and the status unless it is `finished`."""
    text = trace.job.paradigm.label
    text += ", batches by speed" if trace.job.batches.policy != "equal" else ""
    return text if trace.finished else f"{text} ({trace.status})"


def _crew(trace: Trace) -> str:
    return f"{trace.n_workers} worker{'s' if trace.n_workers != 1 else ''}"


def labels(traces: Sequence[Trace]) -> list[str]:
    """Return a different name for each trace: its label, and as many other attributes as are needed."""
    names = [label(trace) for trace in traces]
    for attribute in (_crew, lambda trace: str(trace.attributes.get("engine"))):
        if len({attribute(trace) for trace in traces}) > 1:
            names = [f"{name}, {attribute(trace)}" for name, trace in zip(names, traces, strict=True)]
    for attribute in (
        lambda trace: trace.job.name,
        lambda trace: f"seed {trace.job.seed}",
        lambda trace: trace.path.parent.name,
        lambda trace: str(trace.path),
    ):
        values: dict[str, set[str]] = {}
        for name, trace in zip(names, traces, strict=True):
            values.setdefault(name, set()).add(attribute(trace))
        names = [
            f"{name}, {attribute(trace)}" if len(values[name]) > 1 else name
            for name, trace in zip(names, traces, strict=True)
        ]
    return names


def of_one_job(traces: Sequence[Trace]) -> list[list[Trace]]:
    """Group traces whose jobs differ only in the seed, that the same engine ran, and that ended alike."""
    groups: dict[tuple[str, str, str], list[Trace]] = {}
    for trace in traces:
        job, engine = repr(of_any_seed(trace.job)), str(trace.attributes.get("engine"))
        groups.setdefault((job, engine, trace.status), []).append(trace)
    return list(groups.values())


def look(n: int, colour: str) -> dict[str, Any]:
    """Return the style of the n-th line of an axis; in a grey print its dashes or markers tell it from the others."""
    found: dict[str, Any] = {"color": colour, "linestyle": DASHES[n % len(DASHES)]}
    if n >= len(DASHES):
        found |= {"marker": MARKERS[(n // len(DASHES) - 1) % len(MARKERS)], "markevery": 0.1, "ms": 3}
    return found


def styles(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Return the line style of each trace: the colour of its paradigm, and dashes or markers of its own."""
    return [look(n, PARADIGM_COLOURS.get(trace.job.paradigm.name, "#000000")) for n, trace in enumerate(traces)]


# ---- several seeds ----


def about_band(groups: Sequence[Sequence[Trace]]) -> str:
    """Return in words what lines and bands of these groups of traces are; "" if each has one seed."""
    sizes = sorted({len(group) for group in groups})
    each_once = all(len({trace.job.seed for trace in group}) == len(group) for group in groups)
    what = "seeds" if each_once else "runs"
    few, many = [n for n in sizes if 1 < n < LEAST_SEEDS], [n for n in sizes if n >= LEAST_SEEDS]
    if not many:
        return f"mean and range of {few[0]} {what}" if few else ""
    exception = f" (range of {few[0]})" if few else ""
    return f"mean and {100 * LEVEL:g}\N{NO-BREAK SPACE}% interval of {' or '.join(map(str, many))} {what}{exception}"


def averaged(runs: Sequence[Rows], *, steps: bool = False) -> pd.DataFrame:
    """Return the mean of several runs and its band at the points of all of them.

    The line begins where all runs have begun and ends with the longest of them: a run that has ended keeps its last
    value.

    Parameters
    ----------
    runs
        x and value of each run, shape (n_points, 2), ordered by x.
    steps
        A value holds until the next one; else values between two points are interpolated linearly.

    Returns
    -------
    pandas.DataFrame
        Columns x, mean, low, high, and runs, the number of runs that have not ended.
    """
    x = np.unique(np.concatenate([run[:, 0] for run in runs]))
    x = x[x >= max(run[0, 0] for run in runs)]
    x = x[pick(range(len(x)), LINE_POINTS)]
    if steps:
        values = np.array([run[np.searchsorted(run[:, 0], x, side="right") - 1, 1] for run in runs])
    else:
        values = np.array([np.interp(x, *run.T) for run in runs])  # beyond the end of a run its last value
    n_running = np.sum([x <= run[-1, 0] for run in runs], axis=0)
    return pd.DataFrame({"x": x, **mean_and_band(values)._asdict(), "runs": n_running})


def draw_mean(axis: Axes, line: pd.DataFrame, look: dict[str, Any], label: str = "", steps: str | None = None) -> None:
    """Draw a mean and its band.

    Parameters
    ----------
    line
        What `averaged` returns. The line is thin where some of the runs have ended.
    look
        The style of the line; the edges of the band have its dashes. A line of one point is a dot.
    label
        Name of the line in a legend; "" if it has none.
    steps
        ``pre``, ``mid`` or ``post``: where the value of a step function changes; None for a line.
    """
    alone = {"marker": "."} if len(line) == 1 else {}
    how = look | alone | {"drawstyle": f"steps-{steps}" if steps else "default"}
    n_complete = int((line["runs"] == line["runs"].max()).sum())
    complete, rest = line.iloc[:n_complete], line.iloc[max(0, n_complete - 1) :]
    axis.plot(complete["x"], complete["mean"], label=label or "_", **how)
    if len(rest) > 1:
        axis.plot(rest["x"], rest["mean"], **how | {"linewidth": 0.7})
    if (line["low"] < line["high"]).any():
        axis.fill_between(line["x"], line["low"], line["high"], step=steps, color=look["color"], alpha=0.15, lw=0)  # type: ignore[arg-type]
        for end in ("low", "high"):
            axis.plot(line["x"], line[end], **how | {"linewidth": 0.4, "marker": ""})


def table(trace: Trace, name: str) -> pd.DataFrame:
    """Return a table of the trace. Raise TraceError if it has no rows."""
    if not len(trace.tables[name]):
        raise TraceError(f"{trace.path}: nothing to draw: /{name} has no rows")
    return trace.frame(name)


def with_part(traces: list[Trace], has: Callable[[Trace], bool], part: str) -> tuple[list[Trace], tuple[str, ...]]:
    """Return the runs that have what a figure shows, and a note on the others. Raise TraceError if all lack it."""
    kept = [trace for trace in traces if has(trace)]
    if not kept:
        raise TraceError(f"{traces[0].path}: nothing to draw: no {part} in this run, {label(traces[0])}")
    lacking = Counter(label(trace) for trace in traces if not has(trace))
    all_runs = Counter(label(trace) for trace in traces)
    return kept, tuple(f"{name}: {n} of {all_runs[name]} left out, no {part}" for name, n in lacking.items())


def with_servers(traces: list[Trace]) -> tuple[list[Trace], tuple[str, ...]]:
    """Return the runs with servers, and a note on the others, which have neither pushes nor grants."""
    return with_part(traces, lambda trace: trace.job.has_servers, "servers and no pushes")


def iterations(trace: Trace) -> pd.DataFrame:
    """Return the pushes of the workers, or their exchanges in a run without servers."""
    return table(trace, "pushes" if trace.job.has_servers else "exchanges")


def of_controller(trace: Trace, name: str) -> pd.DataFrame:
    """Return the decisions of one controller."""
    decisions = trace.frame("decisions")
    return decisions[decisions["controller"] == name]


def pick(items: Sequence[int], most: int) -> list[int]:
    """Return at most `most` evenly spaced items, including the first and the last."""
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, min(most, len(items))).astype(int))]


def thinned(frame: pd.DataFrame, most: int = POINTS) -> pd.DataFrame:
    """Return at most `most` rows, sampled with a fixed seed: every n-th row might belong to the same worker."""
    if len(frame) <= most:
        return frame
    return frame.iloc[np.sort(np.random.default_rng(0).choice(len(frame), most, replace=False))]


def binned(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the mean of `now_s`, and mean and largest value of a column, in bins of consecutive rows.

    There are at most 200 bins of at least ten rows each.
    """
    n_bins = int(np.clip(len(frame) // 10, 1, 200))
    bins = frame.groupby(np.arange(len(frame)) * n_bins // len(frame))
    return pd.DataFrame(
        {"now_s": bins["now_s"].mean(), "mean": bins[column].mean(), "largest": bins[column].max()}
    ).reset_index(drop=True)


def log_bottom(lines: pd.DataFrame) -> float:
    """Return the lower limit of a logarithmic axis: half the smallest mean above 0, or the lowest end of a band."""
    return float(max(lines["mean"][lines["mean"] > 0].min() / 2, 0.95 * lines["low"].min()))


def set_log_scale(axis: Axes, bottom: float) -> None:
    """Make the y axis logarithmic from `bottom` on."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylim(bottom=bottom)
    ratio = axis.get_ylim()[1] / bottom
    axis.yaxis.set_minor_formatter("{x:g}" if ratio < 4 else minor_tick if ratio < 30 else NullFormatter())


def minor_tick(value: float, _: object = None) -> str:
    """Format a tick between powers of ten if its first digit is 2, 3 or 5; else it has no label."""
    return f"{value:g}" if f"{value:e}"[0] in "235" else ""


def draw_whiskers(axis: Axes, at: Any, low: Any, high: Any, rows: Any) -> None:
    """Draw the bands of shares at the ends of horizontal bars, in black with a white rim; nothing if all are empty.

    They are cut at 0 and 1, which no share exceeds.
    """
    ends = np.clip(np.array([at, low, high], float), 0, 1)
    if (ends[1] < ends[2]).any():
        whiskers = axis.errorbar(
            ends[0], rows, xerr=[ends[0] - ends[1], ends[2] - ends[0]], fmt="none", ecolor="black", elinewidth=0.7
        )
        for lines in whiskers.lines[2]:
            lines.set(path_effects=[Stroke(linewidth=1.7, foreground="white"), Normal()], clip_on=False, zorder=4)


# ---- the page ----


def panels(n_rows: int, n_columns: int = 1, *, height: float, **how: Any) -> Any:
    """Return a figure and its axes, shape (n_rows, n_columns); sizes are in inches, and the style has the width."""
    figure = Figure(figsize=(width_inches(), height), layout="constrained")
    return figure, figure.subplots(n_rows, n_columns, squeeze=False, **how)


def text_inches(text: str, points: float = 8, weight: str = "normal") -> float:
    """Return the width of a line of text."""
    font = FontProperties(size=points, weight=weight)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]) / 72


def wrapped(text: str, inches: float, points: float = 8, weight: str = "normal") -> str:
    """Return a text in lines of at most this width."""
    whole = text_inches(text, points, weight)
    if whole <= inches:
        return text
    lines = [text]
    for n_characters in range(int(1.5 * len(text) * inches / whole) + 1, 4, -1):
        lines = textwrap.wrap(text, n_characters)
        if all(text_inches(line, points, weight) <= inches for line in lines):
            break
    return "\n".join(lines)


def add_title(axis: Axes, text: str, inches: float | None = None) -> None:
    """Set the title of an axis, in lines that fit; without a width these may be as long as a figure of one panel."""
    axis.set_title(wrapped(text, (inches or width_inches()) - 0.7, weight="bold"))


def add_legend(
    figure: Figure,
    handles: Sequence[Any],
    title: str = "",
    *,
    loc: Any = "outside upper center",
    handlelength: float = 2.2,
) -> None:
    """Add a legend in as many columns as fit, and make the figure higher by it."""
    points = FontProperties(size=matplotlib.rcParams["legend.fontsize"]).get_size_in_points()
    inches = figure.get_figwidth() - MARGIN_INCHES
    beside = (handlelength + 0.8 + 2.0) * points / 72  # the handle and the space between columns
    names = [wrapped(str(handle.get_label()), inches - beside, points) for handle in handles]
    lines = [line for name in names for line in name.split("\n")]
    n_columns = int(np.clip(inches / (beside + max(text_inches(line, points) for line in lines)), 1, len(names)))
    n_rows = -(-len(lines) // n_columns)
    n_columns = -(-len(names) // n_rows)
    above = wrapped(title, inches, 7)
    figure.set_figheight(figure.get_figheight() + 0.1 + 0.17 * n_rows + 0.14 * len(above.splitlines()))
    figure.legend(handles, names, loc=loc, ncols=n_columns, handlelength=handlelength, title=above or None)


def add_note(figure: Figure, text: str) -> None:
    """Add a line above the panels of a figure without a legend, and make the figure higher by it; "" adds nothing."""
    if text:
        above = wrapped(text, figure.get_figwidth() - MARGIN_INCHES, 7)
        figure.set_figheight(figure.get_figheight() + 0.14 * len(above.splitlines()))
        figure.suptitle(above, fontsize=7)


def legend_of_activities(figure: Figure, drawn: Collection[str], others: Sequence[Any] = (), title: str = "") -> None:
    """Add a legend of the colours of the activities, loading only if it is drawn, and of other marks."""
    shown = {name: colour for name, colour in ACTIVITY_COLOURS.items() if name != "load" or name in drawn}
    patches = [Patch(color=colour, label=activity) for activity, colour in shown.items()]
    add_legend(figure, [*patches, *others], title, handlelength=1.2)


def percent(share: float, _: object = None) -> str:
    """Format a share in percent; also the formatter of an axis."""
    return f"{100 * share:g} %"


class Drawing(NamedTuple):
    """A figure and its data.

    Attributes
    ----------
    figure
        The figure.
    data
        The data that it shows.
    tail
        End of the file name, which distinguishes several figures of the same traces.
    notes
        Lines to print on the terminal.
    """

    figure: Figure
    data: pd.DataFrame
    tail: str = ""
    notes: tuple[str, ...] = ()


KINDS = ("png", "svg", "pdf", "csv")  # suffixes of a file; without one `write` makes png, svg and csv


def write(drawing: Drawing, path: Path) -> list[Path]:
    """Write a figure and the data that it shows. The same data give the same bytes.

    Parameters
    ----------
    drawing
        The figure. Its tail is appended to the name of the file.
    path
        A file that ends in one of `KINDS`; without a suffix the figure is written as PNG and SVG and its data as CSV.
        The folder is created if it is missing.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    NotWritten
        If a file cannot be written; it is then as it was before.
    """
    kinds = [path.suffix[1:]] if path.suffix else ["png", "svg", "csv"]
    files = [path.with_name(f"{path.stem}{drawing.tail}.{kind}") for kind in kinds]
    path.parent.mkdir(parents=True, exist_ok=True)
    with style(drawing.figure.get_figwidth()):
        for file, kind in zip(files, kinds, strict=True):
            with whole(file) as unfinished:
                if kind == "csv":
                    drawing.data.to_csv(unfinished, index=False, lineterminator="\n")
                else:
                    undated = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
                    drawing.figure.savefig(unfinished, format=kind, metadata=undated)
    return files


def save(figure: Figure, frame: pd.DataFrame, folder: Path, stem: str) -> None:
    """Write a figure as PNG and SVG and the data that it shows as CSV into a folder, and print their names."""
    write(Drawing(figure, frame), folder / stem)
    print(f"{folder / stem}.png, .svg, .csv")
