"""Common parts of the figures: colours, sizes, labels of traces, and files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hpcsync.paradigms import OPTIONS
from hpcsync.trace.reader import Trace, TraceError

PAGE_INCHES, COLUMN_INCHES = 7.0, 3.4
POINTS = 2000  # points of a scatter plot, at most

# Okabe and Ito's colours (and some of Tol's), which colour-blind readers can tell apart, the same in every figure. No
# figure shows both paradigms and activities.
PARADIGM_COLOURS = {name: options.colour for name, options in OPTIONS.items()}
# Activities are ordered by luminance, so that a print in grey tells them apart.
ACTIVITY_COLOURS = {"load": "#3FA88A", "compute": "#0064A6", "wait": "#F5CE62", "transfer": "#000000"}
GREY = "#767676"
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))  # for the first, second, ... trace of a paradigm

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
    "savefig.dpi": 300,
    "svg.hashsalt": "hpcsync",
}


def style() -> AbstractContextManager[None]:
    """Return a context manager that sets matplotlib's parameters for these figures and restores the caller's."""
    return matplotlib.rc_context(STYLE)


def label(trace: Trace) -> str:
    """Return the paradigm of a trace with its main options, and the status unless it is `finished`."""
    text = trace.job.paradigm.label
    text += ", batches by speed" if trace.job.batches.policy != "equal" else ""
    return text if trace.finished else f"{text} ({trace.status})"


def labels(traces: Sequence[Trace]) -> list[str]:
    """Return a different name for each trace: its label, and as many other attributes as are needed."""
    names = [label(trace) for trace in traces]
    for attribute in (lambda trace: f"{trace.n_workers} workers", lambda trace: str(trace.attributes.get("engine"))):
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


def styles(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Return the line style of each trace: the colour of its paradigm, and dashes if several traces share it."""
    seen: Counter[str] = Counter()
    found = []
    for trace in traces:
        name = trace.job.paradigm.name
        found.append({"color": PARADIGM_COLOURS.get(name, "#000000"), "linestyle": DASHES[seen[name] % len(DASHES)]})
        seen[name] += 1
    return found


def table(trace: Trace, name: str) -> pd.DataFrame:
    """Return a table of the trace. Raise TraceError if it has no rows."""
    if name == "pushes":
        require_server(trace)
    if not len(trace.tables[name]):
        raise TraceError(f"{trace.path}: nothing to draw: /{name} has no rows")
    return trace.frame(name)


def require_server(trace: Trace) -> None:
    """Raise TraceError for a run without servers, which has neither pushes nor grants."""
    if not trace.job.has_servers:
        raise TraceError(f"{trace.path}: nothing to draw: no servers and no pushes in this run, {label(trace)}")


def iterations(trace: Trace) -> pd.DataFrame:
    """Return the pushes of the workers, or their exchanges in a run without servers."""
    return table(trace, "pushes" if trace.job.has_servers else "exchanges")


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


def panels(n_rows: int, n_columns: int = 1, *, height: float, width: float = PAGE_INCHES, **how: Any) -> Any:
    """Return a figure of this size in inches and its axes, shape (n_rows, n_columns)."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(n_rows, n_columns, squeeze=False, **how)


def legend_of_activities(figure: Figure, drawn: Collection[str], others: Sequence[Line2D] = ()) -> None:
    """Add a legend of the colours of the activities, loading only if it is drawn, and of other marks."""
    shown = {name: colour for name, colour in ACTIVITY_COLOURS.items() if name != "load" or name in drawn}
    patches = [Patch(color=colour, label=activity) for activity, colour in shown.items()]
    handles = [*patches, *others]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), handlelength=1.2)


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
    OSError
        If a file cannot be written.
    """
    kinds = [path.suffix[1:]] if path.suffix else ["png", "svg", "csv"]
    files = [path.with_name(f"{path.stem}{drawing.tail}.{kind}") for kind in kinds]
    path.parent.mkdir(parents=True, exist_ok=True)
    with style():
        for file, kind in zip(files, kinds, strict=True):
            if kind == "csv":
                drawing.data.to_csv(file, index=False, lineterminator="\n")
            else:
                undated = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
                drawing.figure.savefig(file, metadata=undated)
    return files


def save(figure: Figure, frame: pd.DataFrame, folder: Path, stem: str) -> None:
    """Write a figure as PNG and SVG and the data that it shows as CSV into a folder, and print their names."""
    write(Drawing(figure, frame), folder / stem)
    print(f"{folder / stem}.png, .svg, .csv")
