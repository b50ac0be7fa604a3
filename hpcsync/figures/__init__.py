"""Figures of traces.

Importing this module loads neither matplotlib nor pandas; `draw` imports them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcsync.config.errors import JobError
from hpcsync.system import optional_packages

if TYPE_CHECKING:
    from hpcsync.figures.plotting import Drawing
    from hpcsync.trace.reader import Trace

EXTRA = ("matplotlib", "pandas")  # packages of the extra `analysis`


class FigureError(JobError):
    """The requested figure cannot be drawn; the message is one line."""


class About(NamedTuple):
    """Description of a figure in one line, and the names of its options."""

    line: str
    options: tuple[str, ...] = ()


FIGURES = {
    "accuracy": About("accuracy and loss on held-out data, against time and samples"),
    "adaptive": About("k and batch sizes, as chosen during the run", ("workers",)),
    "consensus": About("distance between the workers' weights, if each has its own"),
    "controller": About("decisions of DSSP's controller and their inputs", ("workers",)),
    "leads": About("lead of each worker over the slowest, and the paradigm's bound"),
    "staleness": About("staleness of the applied pushes, over time and as a histogram"),
    "timeline": About("compute, wait and transfer of each worker over time, events", ("workers", "from_s", "to_s")),
    "waiting": About("shares of compute, wait and transfer in each worker's time", ("workers",)),
}


WIDTHS_INCHES = (3.0, 50.0)  # smallest and largest of a figure


def draw(name: str, traces: Sequence[Trace], *, width: float | None = None, **options: Any) -> list[Drawing]:
    """Draw a figure of these traces.

    Parameters
    ----------
    name
        A key of `FIGURES`.
    traces
        At least one trace.
    width
        Width of the figure in inches, within `WIDTHS_INCHES`; None: 7. Below 5 panels stand below each other.
    options
        Options that `FIGURES` lists for the figure: ``workers`` (largest number of workers shown), ``from_s`` and
        ``to_s`` (the window, in seconds). None selects the figure's default.

    Returns
    -------
    list of Drawing
        The figures and their data.

    Raises
    ------
    FigureError
        For another width, an option that the figure does not take, or if a package that it needs cannot be imported.
    TraceError
        If a trace has nothing to draw.
    """
    least, most = WIDTHS_INCHES
    if width is not None and not least <= width <= most:
        raise FigureError(f"figure {name}: --width {width:g}: must be {least:g} to {most:g} (inches)")
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if option not in FIGURES[name].options:
            having = ", ".join(other for other, about in FIGURES.items() if option in about.options)
            flag = option.removesuffix("_s")
            raise FigureError(f"figure {name}: --{flag}: must be left out; figures with this option: {having}")
    try:
        module = import_module(f"hpcsync.figures.{name}")
        plotting = import_module("hpcsync.figures.plotting")
    except optional_packages.ERRORS as error:
        if (wrong := optional_packages.unusable(error, EXTRA, "pip install matplotlib pandas")) is None:
            raise
        raise FigureError(f"figure {name}: {wrong}") from None
    with plotting.style(width or plotting.PAGE_INCHES):
        drawings: list[Drawing] = module.draw(list(traces), **given)
    return drawings


def open_traces(paths: Sequence[str | Path]) -> list[Trace]:
    """Return the traces in these files or folders of runs.

    Raises
    ------
    TraceError
        If a file is not a trace, its job cannot be read, or it is given twice; the message names the file.
    """
    from hpcsync.trace.reader import load

    traces = [load(file) for file in files_of(paths)]
    for trace in traces:
        _ = trace.job  # raises TraceError before anything is drawn
    return traces


def files_of(paths: Sequence[str | Path]) -> list[Path]:
    """Return the trace files of these files or folders of runs. Raises TraceError if one is given twice."""
    from hpcsync.trace.reader import TraceError, trace_path

    files = [trace_path(path) for path in paths]
    for n, file in enumerate(files):
        if file.resolve() in [earlier.resolve() for earlier in files[:n]]:
            raise TraceError(f"{file}: given twice")
    return files
