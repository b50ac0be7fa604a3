"""The folder of a run: `trace.h5`, `job.toml`, `weights.safetensors`, `summary.json`. Nothing in it is replaced."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console

from hpcsync.job import Job
from hpcsync.job_errors import JobError
from hpcsync.traces.reading import load
from hpcsync.traces.summary import summarize, table

TRACE = "trace.h5"
JOB = "job.toml"
WEIGHTS = "weights.safetensors"
SUMMARY = "summary.json"


def choose(job: Job, out: str | Path | None) -> Path:
    """`out`, or else runs/NAME-TIME/, with a number behind it when that second is taken. Creates nothing.

    Raises JobError for a folder that holds a trace already, or a path that is no folder.
    """
    if out is not None:
        folder = Path(out)
        if (folder / TRACE).exists():
            raise JobError(f"--out {folder}: must not hold a {TRACE} already: runs are never overwritten")
        if folder.exists() and not folder.is_dir():
            raise JobError(f"--out {folder}: must be a folder")
        return folder
    stem = f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if i == 1 else f"{stem}-{i}" for i in range(1, 1000))
    return next(folder for name in names if not (folder := Path("runs") / name).exists())


def create(folder: Path, job: Job) -> None:
    """Make the folder and write the resolved job into it. Raises JobError when that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JOB).write_text(job.to_toml(), encoding="utf-8")
    except OSError as error:
        raise JobError(f"--out {folder}: {error.strerror}") from None


def conclude(folder: Path, console: Console) -> None:
    """Sum the finished trace up: into the folder for scripts, onto the terminal for people."""
    summary = summarize(load(folder / TRACE))
    (folder / SUMMARY).write_text(json.dumps(summary.as_dict(), indent=2) + "\n", encoding="utf-8")
    console.print(table(summary))
    console.print(f"trace: {folder / TRACE}", soft_wrap=True)
