"""Command `hpcsync figure`: a figure of one or more traces, written to files."""

from __future__ import annotations

from pathlib import Path

from hpcsync import figures

LINES = [f"{name:<12} {about.line}" for name, about in figures.FIGURES.items()]
HELP = (
    "Draw a figure of one or more traces.\n\nIt is written as PNG and SVG, and its data as CSV.\n\n\b\nFigures:\n"
    + "\n".join(f"  {line}" for line in LINES)
    + "\n\nRuns that differ only in the seed are drawn as one line or bar: their mean with its 95 % interval, or with"
    " two seeds their range. controller and timeline show each run separately."
    + "\n\nNeeds matplotlib and pandas: pip install matplotlib pandas."
)
KINDS = (".png", ".svg", ".pdf", ".csv")


def main(
    name: str | None,
    runs: list[Path],
    out: Path | None,
    workers: int | None,
    from_s: float | None,
    to_s: float | None,
    width: float | None,
) -> None:
    """Draw a figure, write its files and print their names.

    Raises
    ------
    JobError
        For a wrong argument, a trace that cannot be read or drawn, or a file that cannot be written.
    """
    from hpcsync.cli import finished_runs
    from hpcsync.system.atomic_files import try_to_write

    _check(name, runs, out)
    if from_s is not None and to_s is not None and not from_s < to_s:
        raise figures.FigureError(f"--from {from_s:g}: must be less than --to {to_s:g}")
    assert name is not None
    try:
        path = Path("figures") / name if out is None else out / name if out.is_dir() else out
        try_to_write(path if path.suffix else path.with_suffix(".csv"))
        window = {"from_s": from_s, "to_s": to_s}
        drawings = figures.draw(
            name, figures.open_traces(finished_runs.traces(runs)), width=width, workers=workers, **window
        )
        from hpcsync.figures.plotting import write

        for drawing in drawings:
            for note in drawing.notes:
                print(note)
            print(*write(drawing, path), sep=", ")
    except OSError as error:
        raise figures.FigureError(f"{error.filename or out}: {error.strerror or error}") from None


def _check(name: str | None, runs: list[Path], out: Path | None) -> None:
    """Raise FigureError unless the arguments name a figure, a run and a kind of file."""
    allowed = ", ".join(figures.FIGURES)
    if name is None:
        raise figures.FigureError(f"figure: NAME is missing; must be one of {allowed}")
    if name not in figures.FIGURES:
        raise figures.FigureError(f"figure {name}: unknown; must be one of {allowed}")
    if not runs:
        raise figures.FigureError(f"figure {name}: RUN is missing; must be at least one trace or folder of a run")
    if out is not None and out.suffix not in ("", *KINDS) and not out.is_dir():
        raise figures.FigureError(f"--out {out}: must end in {', '.join(KINDS[:-1])} or {KINDS[-1]}, or have no suffix")
