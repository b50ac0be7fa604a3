"""Command `hpcsync report`: runs as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcsync.cli import finished_runs, grid
from hpcsync.cli.finished_runs import Found
from hpcsync.config.errors import JobError
from hpcsync.system.atomic_files import NotWritten, try_to_write, whole

SUFFIXES = (".html", ".htm")


def main(paths: Sequence[Path], file: Path, *, audited: bool | None = None) -> int:
    """Write the report of these runs; return the exit status.

    One run may have any status. Of several runs, those that have not finished are left out. `audited` is whether all
    or no runs are audited; by default as many as half a minute allows.

    Raises
    ------
    JobError
        For a file that is no HTML or cannot be written, or if there is nothing to report.
    """
    check(file)
    traces = finished_runs.traces(paths)
    if len(traces) > 1:
        found = finished_runs.grouped(traces)
    else:
        run = finished_runs.read(traces[0])
        found = {grid.Variant("", run.job.paradigm.label): {run.job.seed: run}}
    if not found:
        raise JobError("report: no run has finished")
    write_report(found, file, audited=audited)
    return 0


def check(file: Path) -> None:
    """Raise JobError unless the name of the file is that of a page, and it can be written."""
    if file.suffix not in SUFFIXES:
        raise JobError(f"{file}: must end in {' or '.join(SUFFIXES)}")
    check_text(file)


def check_text(file: Path) -> None:
    """Raise JobError if `write_text` cannot write this file, or its name is that of a job file or a trace."""
    if file.suffix in (".toml", ".h5"):
        raise JobError(f"{file}: must not end in .toml or .h5, as a job file or a trace does")
    try:
        try_to_write(file)
    except NotWritten as error:
        raise JobError(str(error)) from None


def write_report(found: Found, file: Path, *, audited: bool | None = None) -> None:
    """Write the report of these runs and print the name of the file. Raises JobError if that is not possible."""
    from hpcsync.html_report.page import render
    from hpcsync.html_report.run_data import RunData, read_all

    one = len({variant.label for variant in found}) == 1
    data: dict[str, dict[str, list[RunData]]] = {}
    given = [(variant, run) for variant, runs in found.items() for run in runs.values()]
    read = read_all(((run.trace, run.summary) for _, run in given), audited=audited)
    for (variant, run), each in zip(given, read, strict=True):
        label = run.job.paradigm.label if one else variant.label
        data.setdefault(variant.condition, {}).setdefault(label, []).append(each)
    write_text(file, render(data))


def write_text(file: Path, text: str) -> None:
    """Write a file and print its name. Raises JobError if that is not possible."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole(file) as path:
            path.write_text(text, encoding="utf-8", errors="backslashreplace")  # of names of files
    except OSError as error:
        raise JobError(f"{error.filename or file}: {error.strerror}") from None
    print(f"written: {file}")
