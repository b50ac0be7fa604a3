"""Runs that ended before they had finished: their status, and how they are resumed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from hpcsync.run_dir import checkpoint, layout, status_file


def close(folder: Path, status: str, *, may_restart: bool = False) -> str | None:
    """Write the status of a run into its trace and status file, if the ranks could not, and print where the trace is.

    Parameters
    ----------
    folder
        Folder of the run.
    status
        "failed" or "interrupted".
    may_restart
        Whether its ranks may be started again: the status file then stays as it is, so that `hpcsync watch` waits.

    Returns
    -------
    str or None
        The status of the trace before; None if it was final already, or there is no trace.
    """
    from hpcsync.trace.reader import TraceError, settle  # not where runs end well: it imports h5py

    trace = folder / layout.TRACE
    if not may_restart:
        status_file.settle(folder, status)
    try:
        if before := settle(trace, status):
            print(f"hpcsync: {status}; the trace so far is {trace}", file=sys.stderr)
            return before
    except TraceError as error:
        print(f"hpcsync: {error}", file=sys.stderr)
    return None


def close_scripts(folders: Iterable[Path], status: str) -> None:
    """Do the same for the runs of a training script that have not finished, and print how each is resumed."""
    for folder in map(layout.shown, folders):
        if (folder / layout.SUMMARY).exists():
            continue
        close(folder, status)
        if (newest := checkpoint.newest(folder)) is not None:
            print(f"hpcsync: use {resumption(folder, is_script=True)} to resume from {newest}", file=sys.stderr)


def resumption(folder: Path, *, is_script: bool) -> str:
    """Return what resumes a run: an option of `hpcsync run`, or arguments in a training script."""
    return f'connect(..., out="{layout.shown(folder)}", resume=True)' if is_script else "--resume"
