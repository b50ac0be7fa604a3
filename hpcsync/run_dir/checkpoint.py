"""Checkpoints: all that a run consists of at one moment, on disk, so that it can go on from there.

A checkpoint is a folder, `checkpoints/NUMBER` in the folder of the run, with a file of each rank's own and one of what
rank 0 knows of the run. It is made under another name. Only when every file has reached the disk rank 0 renames it,
which happens as a whole or not at all: at whatever moment a run is killed, what has a number is complete.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Job
from hpcsync.system.atomic_files import naming, removing, sync
from hpcsync.version import __version__

FOLDER = "checkpoints"
RUN = "run"  # the name of rank 0's knowledge of the run

# What a run that goes on may do otherwise than before. The rest must stay, or its decisions would not follow from it.
FREE = ("name", "stop", "evaluation", "checkpoint", "cluster")


@dataclass(frozen=True)
class Resumed:
    """A run that goes on from this checkpoint, and the job that it began as.

    n_peers: as many workers as it has left, where there are no servers. With servers those that are missing return.
    """

    checkpoint: Path
    job: Job
    n_peers: int | None


class Checkpoints:
    """Of the run in `folder`, as one rank sees it.

    keep: how many stay. resumed: that from which this run goes on; None where it begins. shared: whether all ranks see
    the same folder, without which there can be none.
    """

    def __init__(self, folder: Path, keep: int, resumed: Path | None, shared: bool) -> None:
        self.folder = folder
        self.resumed = resumed
        self.shared = shared
        self._folder = folder / FOLDER
        self._keep = keep

    def state(self, name: str) -> dict[str, Any] | None:
        """What was written under this name into the checkpoint from which the run goes on, its tensors on the CPU; None
        where there is no such file, and where the run begins."""
        if self.resumed is None or not (path := _file(self.resumed, name)).exists():
            return None
        return _load(path)

    def begin(self, number: int) -> None:
        """On rank 0, before anybody writes: make room for checkpoint `number`."""
        unfinished = self._unfinished(number)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)

    def write(self, number: int, name: str, state: Mapping[str, Any]) -> None:
        """Put this rank's state into the checkpoint that has begun; it has reached the disk on return.

        Raises NotWritten.
        """
        import torch

        path = _file(self._unfinished(number), name)
        with naming(path), removing(path), path.open("xb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())

    def commit(self, number: int) -> Path:
        """On rank 0, when everybody has written: from now on the checkpoint is there. Older ones go."""
        unfinished = self._unfinished(number)
        sync(unfinished)
        finished = unfinished.rename(self._folder / str(number))
        sync(self._folder)
        for old in _numbered(self._folder)[: -self._keep]:
            old.rename(old.with_suffix(".old"))  # what has a number is complete
        self._sweep("*.old")
        return finished

    def abandon(self) -> None:
        """On rank 0, when the run ends: nothing comes of what has begun."""
        self._sweep("*.unfinished")

    def _sweep(self, names: str) -> None:
        for path in self._folder.glob(names):
            shutil.rmtree(path, ignore_errors=True)

    def _unfinished(self, number: int) -> Path:
        return self._folder / f"{number}.unfinished"


def newest(folder: Path) -> Path | None:
    """The newest checkpoint of the run in this folder; None where it has none."""
    return next(iter(reversed(_numbered(folder / FOLDER))), None)


def remove_unfinished(folder: Path) -> None:
    """Of a run in this folder that has no finished checkpoint: what it has begun, if anything."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def number_of(checkpoint: Path | None) -> int:
    """A checkpoint's number, from 1; 0 of none."""
    return 0 if checkpoint is None else int(checkpoint.name)


def resumed(folder: Path) -> Resumed | None:
    """The run in this folder, as it goes on from its newest checkpoint; None where it has none.

    Raises JobError for a checkpoint of another version of hpcsync.
    """
    if (checkpoint := newest(folder)) is None:
        return None
    run = _load(_file(checkpoint, RUN))
    if run["hpcsync_version"] != __version__:
        raise JobError(f"--resume: {checkpoint} is of hpcsync {run['hpcsync_version']}; must be of {__version__}")
    job = Job.from_toml(run["job"])
    return Resumed(checkpoint.absolute(), job, None if job.has_servers else len(run["coordinator"]["active"]))


def refuse_other_job(before: Job, job: Job) -> None:
    """Raises JobError where a run that began as one job would go on as another."""
    old, new = (tomllib.loads(each.to_toml()) for each in (before, job))
    for table in sorted((old.keys() | new.keys()) - set(FREE)):
        if old.get(table) != new.get(table):
            key, was, now = _difference(table, old.get(table), new.get(table))
            raise JobError(f"{key} = {shown(now)}: must be {shown(was)}, as it was when the run began")
    for key in ("servers", "workers", "events"):
        if (was := old["cluster"].get(key)) != (now := new["cluster"].get(key)):
            raise JobError(f"cluster.{key} = {shown(now)}: must be {shown(was)}, as it was when the run began")


def _difference(key: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """The first key in which they differ, and what is there."""
    if isinstance(old, dict) and isinstance(new, dict):
        below = next(k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k))
        return _difference(f"{key}.{below}", old.get(below), new.get(below))
    return key, old, new


def _load(path: Path) -> dict[str, Any]:
    import torch

    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)  # it is our own
    return state


def _file(checkpoint: Path, name: str) -> Path:
    return checkpoint / f"{name}.pt"


def _numbered(folder: Path) -> list[Path]:
    """All finished checkpoints, the newest last."""
    return sorted((path for path in folder.glob("[0-9]*") if path.name.isdigit()), key=number_of)
