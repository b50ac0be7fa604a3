"""The folder of a run: `trace.h5`, `job.toml`, `weights.safetensors`, `summary.json`. Runs never overwrite files."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcsync.config import job as jobs
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.run_dir import checkpoint, lock
from hpcsync.run_dir.checkpoint import Resumed
from hpcsync.run_dir.checkpoint_files import apart
from hpcsync.system.atomic_files import aside, whole
from hpcsync.system.standard_output import at_least_80_columns

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from hpcsync.report.summary import Summary

TRACE = "trace.h5"
JOB = "job.toml"
WEIGHTS = "weights.safetensors"
SUMMARY = "summary.json"
LOGGED = ("tensorboard", "wandb.id", "mlflow.id")  # where the run is logged, for one that resumes
RUNS = Path("runs")  # for runs whose folder is not given


def name_of_script(otherwise: str) -> str:
    """Return the script's name without the characters that a job's name must not have; `otherwise` if none is left."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", Path(sys.argv[0]).stem).strip("._+-") or otherwise


def choose(job: Job, out: str | Path | None, before: Resumed | None = None) -> Path:
    """Return the folder of a run, locked for this process; create it if it is missing.

    Parameters
    ----------
    job
        The resolved job.
    out
        The folder; None: runs/NAME-TIME/, with a number appended if another run began in the same second.
    before
        The run that resumes; None for a new run.

    Raises
    ------
    JobError
        If the path is no folder or cannot be written; if a run is under way there; if the folder of a new run holds
        files of a run; if a run would resume with another job.
    """
    folder = _make_new(job) if out is None else Path(out)
    with _as_job_error(folder):
        if before is not None:
            checkpoint.refuse_other_job(before.job, job)
        create_folder(folder)
        lock.hold(folder)
        if before is None:
            try:
                refuse_taken(folder)
            except JobError:
                lock.release(folder)
                raise
        with tempfile.TemporaryFile(dir=folder):
            return folder


def create_folder(folder: Path) -> None:
    """Create a folder if it is missing. Raises JobError if that is not possible."""
    with _as_job_error(folder):
        if folder.exists() and not folder.is_dir():
            raise JobError(f"out {folder}: must be a folder")
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Lock the folder of several runs for this process; a folder that is created is deleted again if it is left empty.

    Raises
    ------
    JobError
        If another process has locked it, or it cannot be written.
    """
    is_new = not os.path.exists(folder)
    create_folder(folder)
    with _as_job_error(folder):
        lock.hold(folder)
    try:
        yield
    finally:
        lock.release(folder)
        with suppress(OSError):
            if is_new:
                folder.rmdir()  # if it is empty


def refuse_taken(folder: Path) -> None:
    """Raise JobError if the folder holds files of a run, or cannot be looked into."""
    with _as_job_error(folder):
        for name in (TRACE, JOB, WEIGHTS, SUMMARY, checkpoint.FOLDER):
            if (folder / name).exists():
                raise _taken(folder, name)


def refuse_unwritable(out: str | Path | None) -> None:
    """Raise JobError if the folder of a run could not be written; nothing is created."""
    folder = _would_be(out)
    with _as_job_error(folder):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        tempfile.TemporaryFile(dir=existing).close()


def missing_above(out: str | Path | None) -> list[Path]:
    """Return the folders above that of a run which do not exist yet, the innermost first."""
    return list(itertools.takewhile(lambda above: not os.path.exists(above), _would_be(out).parents))


def _would_be(out: str | Path | None) -> Path:
    """Return the folder of a run, or without one a folder where that would be."""
    return RUNS / "new" if out is None else Path(out)


def finished_already(out: str | Path | None, resume: bool) -> bool:
    """Return True if the run to resume has finished. Raises JobError if no folder is given."""
    if resume and out is None:
        raise JobError("--resume: must come with --out DIR, the folder of the run to resume")
    if not resume or out is None:
        return False
    with _as_job_error(Path(out)):
        return (Path(out) / SUMMARY).exists()


def resuming(out: str | Path | None, resume: bool) -> Resumed | None:
    """Return the run that resumes in this folder; None for a new run, also if there is no checkpoint yet.

    The folder of a run that resumes is locked for this process.

    Raises
    ------
    JobError
        If the run has finished or is under way, or no folder is given.
    """
    if not resume:
        return None
    if out is None:
        raise JobError("resume: must come with out, the folder of the run to resume")
    with _as_job_error(Path(out)):
        _refuse_finished(Path(out))
        if Path(out).is_dir():
            lock.hold(Path(out))
            _refuse_finished(Path(out))
    return checkpoint.resumed(Path(out))


def _refuse_finished(folder: Path) -> None:
    if (folder / SUMMARY).exists():
        raise JobError(f"out {folder}: must hold a run that has not finished; this one has")


def put_aside(out: str | Path | None, job_file: str | Path | None = None) -> None:
    """Rename the files that an attempt without a checkpoint has left, and delete its unfinished checkpoint.

    Raises
    ------
    JobError
        If a run is under way there, or has finished; if the job file that is given would be renamed.
    """
    if out is not None and Path(out).is_dir():
        with _as_job_error(Path(out)):
            if job_file is not None and (own := Path(out) / JOB).exists() and own.samefile(job_file):
                raise JobError(
                    f"out {out}: must be another folder than that of the job file {job_file}: there is no checkpoint "
                    "there, and --resume would start anew and rename it"
                )
            lock.hold(Path(out))
            _refuse_finished(Path(out))
            checkpoint.remove_unfinished(Path(out))
            names = [name for name in (TRACE, JOB, WEIGHTS) if (Path(out) / name).exists()]
            # Those of `LOGGED` first: after an end within this loop the next attempt renames the rest.
            for path in [Path(out) / name for name in (*(LOGGED if names else ()), *names)]:
                if path.exists():
                    path.rename(aside(path))


def cleared(folder: Path) -> bool:
    """Put aside what an unfinished attempt has left; return False if the run has finished meanwhile.

    Raises
    ------
    JobError
        If a run is under way there.
    """
    try:
        put_aside(folder)
    except JobError:
        if not (folder / SUMMARY).exists():
            raise
        return False
    finally:
        lock.release(folder)
    return True


def job_of(path: str | Path, overrides: Sequence[str], ranks: int | None, before: Resumed | None) -> Job:
    """Read the job of a run.

    Parameters
    ----------
    path
        The job file.
    overrides
        KEY=VALUE pairs.
    ranks
        Number of ranks; None: that of the job file.
    before
        The run that resumes. It keeps what was chosen automatically when it began. It also keeps its number of
        workers, however many ranks there are now, unless it needs all of them.
    """
    if before is None:
        return jobs.load(path, overrides, ranks)
    began = before.job
    return as_begun(jobs.load_begun(path, overrides, ranks if began.paradigm.needs_all else began.cluster.ranks), began)


def as_begun(job: Job, began: Job) -> Job:
    """Return the job with what was chosen automatically when its run began."""
    if job.paradigm.name != began.paradigm.name:
        return job
    chosen = {key: getattr(began.paradigm, key) for key in job.paradigm.open_keys}
    return job.model_copy(update={"paradigm": replace(job.paradigm, **chosen)})


def create(folder: Path, job: Job, before: Resumed | None = None) -> None:
    """Write the resolved job into the folder, replacing that of a run that resumes.

    Raises
    ------
    JobError
        If the folder holds a job already, or cannot be written.
    """
    with _as_job_error(folder):
        if before is None and (folder / JOB).exists():
            raise _taken(folder, JOB)
        with whole(folder / JOB) as path:
            path.write_text(job.to_toml(), encoding="utf-8")


def withdraw(folder: Path) -> None:
    """Delete the job of a run that did not start, and release the folder for another run."""
    with suppress(OSError):
        (folder / JOB).unlink()
    lock.release(folder)


def _make_new(job: Job) -> Path:
    """Create a folder that no other run uses, not even one that begins in the same second."""
    stem = f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))
    with _as_job_error(RUNS):
        RUNS.mkdir(exist_ok=True)
        while True:
            folder = RUNS / next(names)
            with suppress(FileExistsError):
                folder.mkdir()
                return folder


@contextmanager
def _as_job_error(folder: Path) -> Iterator[None]:
    """Turn an OSError into a JobError of one line."""
    try:
        yield
    except OSError as error:
        raise JobError(f"out {folder}: {error.strerror}") from None


def _taken(folder: Path, name: str) -> JobError:
    return JobError(f"out {folder}: must not hold a {name} already: runs are never overwritten")


def save_weights(folder: Path, model: torch.nn.Module) -> None:
    """Write the tensors of the model's state dictionary into the folder, tied weights under each of their names.

    Raises
    ------
    NotWritten
        If they cannot be written.
    """
    from safetensors.torch import save_file
    from torch import Tensor

    values = model.state_dict().items()
    state = {key: value for key, value in values if isinstance(value, Tensor)}  # others are of `get_extra_state`
    with whole(folder / WEIGHTS) as path:
        save_file(apart(state), path)


def conclude(folder: Path, console: Console) -> None:
    """Summarise the finished trace: write summary.json, and print a table.

    Raises
    ------
    NotWritten
        If the summary cannot be written.
    """
    summary = _summary(folder / TRACE)
    with whole(folder / SUMMARY) as path:
        path.write_text(json.dumps(summary.as_dict(), indent=2) + "\n", encoding="utf-8")
    _print_summary(summary, shown(folder) / TRACE, console)


def print_summary(trace: Path, console: Console) -> None:
    """Print the table of a trace, as at the end of its run. Raises TraceError if it cannot be read."""
    _print_summary(_summary(trace), trace, console)


def _summary(trace: Path) -> Summary:
    from hpcsync.report.summary import summarize
    from hpcsync.trace.reader import opened

    with opened(trace) as file:
        return summarize(file)


def _print_summary(summary: Summary, trace: Path, console: Console) -> None:
    from hpcsync.report.summary import table

    if console.quiet:
        return  # it would render the table for nobody, a tenth of the time of a short simulation
    at_least_80_columns(console).print(table(summary))
    console.print(f"trace: {trace}", soft_wrap=True, markup=False)


def shown(folder: Path) -> Path:
    """Return a folder relative to the current one if it is below it."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder
