"""The folder of a run: `trace.h5`, `job.toml`, `weights.safetensors`, `summary.json`. Nothing in it is replaced."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hpcsync.config import job as jobs
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.config.paradigms import StanzaOptions
from hpcsync.report.summary import summarize, table
from hpcsync.run_dir import checkpoint
from hpcsync.run_dir.checkpoint import Resumed
from hpcsync.system.atomic_files import aside, removing, whole
from hpcsync.trace.reader import opened

if TYPE_CHECKING:
    import torch

TRACE = "trace.h5"
JOB = "job.toml"
WEIGHTS = "weights.safetensors"
SUMMARY = "summary.json"


def choose(job: Job, out: str | Path | None, before: Resumed | None = None) -> Path:
    """`out`, or else runs/NAME-TIME/, with a number behind it when that second is taken. Made if it is missing.

    Raises JobError for a path that is no folder or cannot be written; for a folder that holds a run's files already;
    or, if its run goes on from `before`, for another job than that.
    """
    folder = _make_new(job) if out is None else Path(out)
    with _telling(folder):
        if folder.exists() and not folder.is_dir():
            raise JobError(f"out {folder}: must be a folder")
        if before is not None:
            checkpoint.refuse_other_job(before.job, job)
        else:
            for name in (TRACE, JOB, WEIGHTS, SUMMARY, checkpoint.FOLDER):
                if (folder / name).exists():
                    raise _taken(folder, name)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder


def finished_already(out: str | Path | None, resume: bool) -> bool:
    """Whether there is nothing left to resume. Raises JobError where nobody said what."""
    if resume and out is None:
        raise JobError("--resume: must come with --out DIR, the folder of the run that is to go on")
    return resume and out is not None and (Path(out) / SUMMARY).exists()


def going_on(out: str | Path | None, resume: bool) -> Resumed | None:
    """What goes on in this folder; None where a run begins, perhaps again, because there is no checkpoint.

    Raises JobError for a run that has finished, and where nobody said what is to go on.
    """
    if not resume:
        return None
    if out is None:
        raise JobError("resume: must come with out, the folder of the run that is to go on")
    if finished_already(out, resume):
        raise JobError(f"out {out}: must hold a run that has not finished; this one has")
    return checkpoint.resumed(Path(out))


def put_aside(out: str | Path | None) -> None:
    """What an attempt without a checkpoint has left in the folder gets names of its own; half a checkpoint goes."""
    if out is not None:
        with _telling(Path(out)):
            checkpoint.remove_unfinished(Path(out))
            for path in [Path(out) / name for name in (TRACE, JOB, WEIGHTS) if (Path(out) / name).exists()]:
                path.rename(aside(path))


def job_of(path: str | Path, overrides: Sequence[str], ranks: int | None, before: Resumed | None) -> Job:
    """The job in this file. One that goes on has what was chosen for it when it began, and as many workers, however
    many there are now, unless it needs all of them."""
    if before is None:
        return jobs.load(path, overrides, ranks)
    began = before.job
    job = jobs.load(path, overrides, ranks if began.needs_all else began.cluster.ranks)
    if isinstance(job.paradigm, StanzaOptions) and isinstance(began.paradigm, StanzaOptions):
        open_keys = [key for key in ("fc_share", "fc_workers") if getattr(job.paradigm, key) in (None, "auto")]
        chosen = {key: getattr(began.paradigm, key) for key in open_keys}
        job = job.model_copy(update={"paradigm": job.paradigm.model_copy(update=chosen)})
    return job


def create(folder: Path, job: Job, before: Resumed | None = None) -> None:
    """Write the resolved job into the folder, over that of a run that goes on. Raises JobError when that is not
    possible."""
    with _telling(folder):
        if before is not None:
            with whole(folder / JOB) as path:
                path.write_text(job.to_toml(), encoding="utf-8")
            return
        try:
            with (folder / JOB).open("x", encoding="utf-8") as file, removing(folder / JOB):
                file.write(job.to_toml())
                file.flush()
        except FileExistsError:
            raise _taken(folder, JOB) from None


def withdraw(folder: Path) -> None:
    """Nothing has come of the run: another one may have the folder."""
    with suppress(OSError):
        (folder / JOB).unlink()


def _make_new(job: Job) -> Path:
    """A folder that no other run has, not even one that begins in the same second."""
    runs = Path("runs")
    stem = f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))
    with _telling(runs):
        runs.mkdir(exist_ok=True)
        while True:
            folder = runs / next(names)
            with suppress(FileExistsError):
                folder.mkdir()
                return folder


@contextmanager
def _telling(folder: Path) -> Iterator[None]:
    """What the system refuses is the user's mistake, told in one line."""
    try:
        yield
    except OSError as error:
        raise JobError(f"out {folder}: {error.strerror}") from None


def _taken(folder: Path, name: str) -> JobError:
    return JobError(f"out {folder}: must not hold a {name} already: runs are never overwritten")


def save_weights(folder: Path, model: torch.nn.Module) -> None:
    """Write the model's state into the folder. Raises NotWritten."""
    from safetensors.torch import save_file

    state = {key: value.cpu().contiguous() for key, value in model.state_dict().items()}
    with whole(folder / WEIGHTS) as path:
        save_file(state, path)


def conclude(folder: Path, console: Console) -> None:
    """Sum the finished trace up: into the folder for scripts, onto the terminal for people.

    Raises NotWritten.
    """
    with opened(folder / TRACE) as trace:
        summary = summarize(trace)
    with whole(folder / SUMMARY) as path:
        path.write_text(json.dumps(summary.as_dict(), indent=2) + "\n", encoding="utf-8")
    console.print(table(summary))
    console.print(f"trace: {folder / TRACE}", soft_wrap=True)
