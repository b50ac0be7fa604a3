"""Command `hpcsync export`: runs in the formats of other tools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from hpcsync.cli import finished_runs
from hpcsync.config.errors import JobError
from hpcsync.system import optional_packages

SUFFIXES = {"perfetto": (".pftrace", ".perfetto-trace"), "csv": (".csv",), "parquet": (".parquet", "")}
MODULES = {"perfetto": "perfetto", "csv": "pipit", "parquet": "parquet"}  # in hpcsync.export
PACKAGES = ("pandas", "perfetto", "pyarrow")  # of the extra `export`
WHOLE = (0.0, math.inf)  # seconds of a run
PART_ROWS = 20_000  # iterations of a part of a run in memory


def main(
    runs: Sequence[Path], out: Path, kind: str | None, from_s: float | None = None, to_s: float | None = None
) -> int:
    """Write the file, or the folder of tables, and print its name; return the exit status.

    Parameters
    ----------
    runs
        Traces, or folders with the traces of runs.
    out
        File to create or replace; for parquet a folder.
    kind
        A key of `SUFFIXES`; None for the one that the suffix of `out` tells.
    from_s, to_s
        Seconds of the runs between which they are exported; None for their begin and end.

    Raises
    ------
    JobError
        For a wrong argument, a trace that cannot be read, a missing package, or a file that cannot be written.
    """
    kind, runs = kind_of(out, kind), finished_runs.traces(runs)
    if kind != "perfetto" and len(runs) > 1:
        raise JobError(f"--format {kind}: takes one RUN; {len(runs)} were given. Only perfetto takes several")
    window = (0.0 if from_s is None else from_s, math.inf if to_s is None else to_s)
    if kind == "parquet" and window != WHOLE:
        raise JobError("--from, --to: must be left out with --format parquet, which has every row")
    if not window[0] < window[1]:
        raise JobError(f"--from {window[0]:g}: must be less than --to {window[1]:g}")
    module = module_of(kind)
    try:
        print(f"written: {write(kind, module, runs, out, window)}")
    except OSError as error:
        raise JobError(f"{error.filename or out}: {error.strerror or error}") from None
    return 0


def kind_of(out: Path, kind: str | None) -> str:
    """Return the format. Raises JobError if the name of the file is not that of one."""
    allowed = ", ".join(SUFFIXES)
    if kind is None:
        kind = next((name for name, suffixes in SUFFIXES.items() if out.suffix in suffixes and out.suffix), None)
        if kind is None:
            raise JobError(
                f"{out}: must end in .pftrace or .perfetto-trace (Perfetto) or .csv, or --format be one of {allowed}"
            )
    if kind not in SUFFIXES:
        raise JobError(f"--format {kind}: must be one of {allowed}")
    if kind == "parquet" and out.exists() and not out.is_dir():
        raise JobError(f"{out}: must be a folder, for one file a table")
    if out.suffix not in SUFFIXES[kind] and not (kind == "parquet" and out.is_dir()):
        raise JobError(f"{out}: must {' or '.join(map(_ending, SUFFIXES[kind]))} for --format {kind}")
    return kind


def _ending(suffix: str) -> str:
    return f"end in {suffix}" if suffix else "have no suffix"


def module_of(kind: str) -> Any:
    """Return the module that writes a format. Raises JobError if a package that it needs cannot be imported."""
    try:
        return import_module(f"hpcsync.export.{MODULES[kind]}")
    except optional_packages.ERRORS as error:
        if (wrong := optional_packages.unusable(error, PACKAGES, "pip install 'hpcsync[export]'")) is None:
            raise
        raise JobError(f"--format {kind}: {wrong}") from None


def write(kind: str, module: Any, runs: Sequence[Path], out: Path, window: tuple[float, float] = WHOLE) -> str:
    """Write the runs, or these seconds of them; return what was written in words. Raises JobError without a row."""
    from hpcsync import figures
    from hpcsync.export.window import last_s
    from hpcsync.trace.reader import opened

    if kind == "parquet":
        with opened(runs[0]) as trace:
            trace.verify()
            return f"{out}, {len(module.write(trace, out))} tables"
    with ExitStack() as open_files:
        traces = [open_files.enter_context(opened(run, PART_ROWS)) for run in figures.files_of(runs)]
        for each in traces:
            each.verify()
        if window[0] > (end_s := max(map(last_s, traces))):
            raise JobError(f"--from {window[0]:g}: must be at most {end_s:.6g}, where the rows of the trace end")
        module.write(traces if kind == "perfetto" else traces[0], out, *window)
    return str(out)
