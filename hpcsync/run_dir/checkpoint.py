"""Checkpoints: the complete state of a run on disk, from which the run can resume.

A checkpoint is a folder, `checkpoints/NUMBER` in the run's folder, with one part per rank and one for rank 0's records
of the run (`hpcsync.run_dir.checkpoint_files`). It is written under another name, and rank 0 renames it once every file
has reached the disk. Renaming is atomic: at whatever moment a run is killed, a folder that has a number is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Job, used
from hpcsync.core.coordinator import Coordinator, NoRecorder, coordinate
from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.report.wording import plural
from hpcsync.run_dir import checkpoint_files
from hpcsync.state import StateError, built
from hpcsync.system.atomic_files import naming, sync

FOLDER = "checkpoints"
RUN = "run"  # name of rank 0's records of the run

# Tables of the job that may differ when a run resumes. With other changes its decisions would not follow from the job.
FREE = ("name", "stop", "evaluation", "checkpoint", "cluster", "predicted")


class RunState(NamedTuple):
    """Rank 0's records of a run.

    Attributes
    ----------
    job
        The job, as TOML.
    now_s
        Time of the checkpoint, in seconds.
    starts
        Number of times that the run has started.
    trace_rows
        Rows of each table of the trace, and their checksums.
    coordinator
        State of the coordinator.
    evaluated
        Samples at which the next evaluation is due; None if the workers know it, or there are no evaluations.
    unheard
        Messages that are yet to be handled.
    """

    job: str
    now_s: float
    starts: int
    trace_rows: dict[str, int]
    coordinator: dict[str, Any]
    evaluated: int | None
    unheard: list[tuple[int | float, ...]]


@dataclass(frozen=True)
class Resumed:
    """A run that resumes.

    Parameters
    ----------
    checkpoint
        The checkpoint.
    job
        The job with which the run began.
    active
        Workers that are active in the checkpoint; with servers none if the run was over.
    """

    checkpoint: Path
    job: Job
    active: frozenset[int]

    def refuse_ranks(self, n_ranks: int) -> None:
        """Raise JobError if the run cannot resume with this number of ranks.

        Without servers workers cannot join again. With servers they can while another one is active.
        """
        said = f"--resume: {plural(n_ranks, 'rank')}: must be"
        if not self.job.has_servers:
            if n_ranks > len(self.active):
                raise JobError(f"{said} at most {len(self.active)}, as {self.checkpoint} has workers")
        elif self.active and n_ranks <= (first := self.job.cluster.servers + min(self.active)):
            raise JobError(
                f"{said} at least {first + 1}: in {self.checkpoint} the workers before worker {min(self.active)} "
                "have left, and a run ends without an active worker"
            )


class Checkpoints:
    """Checkpoints of a run, as used by one rank.

    Parameters
    ----------
    folder
        Folder of the run.
    keep
        Number of checkpoints to keep.
    resumed
        Checkpoint from which the run resumes; None for a new run.
    shared
        True if all ranks see the same folder, without which there can be no checkpoints.
    """

    def __init__(self, folder: Path, keep: int, resumed: Path | None, shared: bool) -> None:
        self.folder = folder
        self.resumed = resumed
        self.shared = shared
        self._folder = folder / FOLDER
        self._keep = keep

    def state(self, name: str) -> dict[str, Any] | None:
        """Return a state from the checkpoint from which the run resumes, its tensors on the CPU.

        None if the checkpoint has no state of this name, and for a new run.

        Raises
        ------
        StateError
            If a file is not of its format. `resumed` has refused those that were altered.
        """
        if self.resumed is None or f"{name}.json" not in checkpoint_files.read_manifest(self.resumed).files:
            return None
        state = checkpoint_files.read_part(self.resumed, name)
        return built(RunState, state)._asdict() if name == RUN else state

    @contextmanager
    def restoring(self, name: str) -> Iterator[None]:
        """Name the file in a StateError that restoring the state of this name raises."""
        try:
            yield
        except StateError as error:
            assert self.resumed is not None
            raise StateError(f"{self.resumed / name}.json: {error}") from None

    def begin(self, number: int) -> None:
        """Create the folder of checkpoint `number`; on rank 0, before any rank writes. Raises NotWritten."""
        unfinished = self._unfinished(number)
        shutil.rmtree(unfinished, ignore_errors=True)
        with naming(unfinished):
            with suppress(FileExistsError):
                self._folder.mkdir()  # and none above it: the folder of the run may have been moved
            unfinished.mkdir()

    def write(self, number: int, name: str, state: Mapping[str, Any]) -> None:
        """Write a state of this rank into the checkpoint that has begun; on return it has reached the disk.

        Raises
        ------
        NotWritten
            If it cannot be written.
        """
        checkpoint_files.write_part(self._unfinished(number), name, state)

    def commit(self, number: int) -> Path:
        """Complete the checkpoint and delete older ones; on rank 0, when all ranks have written. Raises NotWritten."""
        unfinished = self._unfinished(number)
        checkpoint_files.write_manifest(unfinished)
        with naming(unfinished):
            sync(unfinished)
            finished = unfinished.rename(self._folder / str(number))
            sync(self._folder)
            for old in _numbered(self._folder)[: -self._keep]:
                old.rename(old.with_suffix(".old"))  # a folder with a number is always complete
        self._sweep("*.old")
        return finished

    def abandon(self) -> None:
        """Delete an unfinished checkpoint; on rank 0, when the run ends."""
        self._sweep("*.unfinished")

    def _sweep(self, names: str) -> None:
        for path in self._folder.glob(names):
            shutil.rmtree(path, ignore_errors=True)

    def _unfinished(self, number: int) -> Path:
        return self._folder / f"{number}.unfinished"


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint of the run in this folder; None if it has none, or they cannot be listed."""
    with suppress(OSError):
        return next(iter(reversed(_numbered(folder / FOLDER))), None)
    return None


def remove_unfinished(folder: Path) -> None:
    """Delete the checkpoints of a run that has no finished one."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def number_of(checkpoint: Path | None) -> int:
    """Return a checkpoint's number, from 1; 0 for None."""
    return 0 if checkpoint is None else int(checkpoint.name)


def resumed(folder: Path) -> Resumed | None:
    """Return the run in this folder at its newest checkpoint; None if it has none.

    Raises
    ------
    JobError
        If the checkpoint is of another format, or a file of it is missing, truncated, altered or cannot be read; if the
        trace has not the rows that it had.
    """
    part, checkpoint = f"{RUN}.json", folder / FOLDER
    try:
        if not (numbered := _numbered(checkpoint)):
            return None
        checkpoint = numbered[-1]
        if part not in checkpoint_files.verified(checkpoint).files:
            raise StateError("missing")
        run: RunState = built(RunState, checkpoint_files.read_part(checkpoint, RUN))
        job = Job.from_toml(run.job)
        coordinator = _coordinator(job)
        coordinator.restore(run.coordinator)
    except StateError as error:
        raise JobError(f"--resume: {checkpoint / part}: {error}") from None
    except OSError as error:
        raise JobError(f"--resume: {error.filename or checkpoint}: {error.strerror}") from None
    _refuse_shorter_trace(folder, checkpoint, run.trace_rows)
    active = () if job.has_servers and coordinator.stopping else coordinator.active
    return Resumed(checkpoint.absolute(), job, frozenset(active))


def _refuse_shorter_trace(folder: Path, checkpoint: Path, n_rows: Mapping[str, int]) -> None:
    """Raise JobError if the trace in this folder has not at least so many rows of each table."""
    if not any(n_rows.values()):
        return
    from hpcsync.trace.reader import TraceError, opened  # not where runs begin: it imports h5py

    try:
        with opened(folder) as trace:
            for table, stored in trace.stored.items():
                if stored.n_rows < (least := n_rows.get(table, 0)):
                    wrong = f"{stored.n_rows} rows of /{table}; there must be at least the {least} of {checkpoint}"
                    raise JobError(f"--resume: {trace.path}: {wrong}")
    except TraceError as error:
        raise JobError(f"--resume: {error}") from None


def refuse_other_job(before: Job, job: Job) -> None:
    """Raise JobError if a run that began with one job cannot resume with another."""
    old, new = used(before), used(job)
    for table in sorted((old.keys() | new.keys()) - set(FREE)):
        if old.get(table) != new.get(table):
            key, was, now = _difference(table, old.get(table), new.get(table))
            raise JobError(f"{key} = {shown(now)}: must be {shown(was)}, as it was when the run began")
    kept = [("cluster", key) for key in ("servers", "workers", "events")]
    for table, key in kept + [("stop", key) for key in job.paradigm.depends_on]:
        if (was := old[table].get(key)) != (now := new[table].get(key)):
            raise JobError(f"{table}.{key} = {shown(now)}: must be {shown(was)}, as it was when the run began")


def _difference(key: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """Return the first key in which two values differ, and its values; `name` decides which other keys there are."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys(), key=lambda key: (key != "name", key))
        below = next(k for k in keys if old.get(k) != new.get(k))
        return _difference(f"{key}.{below}", old.get(below), new.get(below))
    return key, old, new


def _coordinator(job: Job) -> Coordinator | PeerCoordinator:
    """Return a new coordinator of the job that records nothing."""
    trace = NoRecorder()
    return coordinate(job, trace) if job.has_servers else PeerCoordinator(job, trace)


def _numbered(folder: Path) -> list[Path]:
    """Return all finished checkpoints, the newest last."""
    with suppress(FileNotFoundError, NotADirectoryError):  # no others: a run would start anew
        return sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=number_of)
    return []
