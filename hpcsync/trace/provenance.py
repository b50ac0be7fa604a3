"""Provenance of a trace: root attributes that record what ran, with which versions, on which hosts."""

from __future__ import annotations

import platform
import re
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from hpcsync.config.job import Job
from hpcsync.version import __version__

_version = cache(metadata.version)  # it parses a file
_HASH = re.compile("[0-9a-f]{40}([0-9a-f]{24})?")  # SHA-1 or SHA-256


def provenance(job: Job, *, engine: str, mpi_library: str | None, hosts: list[str]) -> dict[str, Any]:
    """Return the root attributes of the trace of a job that starts now.

    Parameters
    ----------
    job
        The resolved job.
    engine
        ``"mpi"``, ``"simulator"``, or ``"ddp"`` for a recorded run of DistributedDataParallel.
    mpi_library
        Version of the MPI library; None in a simulation.
    hosts
        Host of every rank; each is stored once.
    """
    return {
        "engine": engine,
        "paradigm": job.paradigm.name,
        "job": job.to_toml(),
        "n_servers": job.cluster.servers,
        "n_workers": job.cluster.workers,
        "seed": job.seed,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "hpcsync_version": __version__,
        "git_commit": git_commit(Path.cwd()),
        "mpi_library": mpi_library,
        "hosts": ",".join(dict.fromkeys(hosts)),
        "python_version": platform.python_version(),
        "numpy_version": _version("numpy"),
        "torch_version": _version("torch"),
        "h5py_version": _version("h5py"),
    }


def git_commit(folder: Path) -> str:
    """Return the commit checked out in a folder's git repository, or "" outside one or if it cannot be read.

    Reads the repository's files, because a process that has initialised MPI should not fork one for git.
    """
    try:
        commit = _head(folder)
    except (OSError, ValueError):
        return ""
    return commit if _HASH.fullmatch(commit) else ""


def _head(folder: Path) -> str:
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        if git.is_file():  # a linked worktree or a submodule: the file names its folder
            git = parent / git.read_text().strip().removeprefix("gitdir: ")
        if (git / "HEAD").is_file():
            head = (git / "HEAD").read_text().strip()
            return _resolve(git, head.removeprefix("ref: ")) if head.startswith("ref: ") else head
    return ""


def _resolve(git: Path, ref: str) -> str:
    if (git / "commondir").is_file():
        git = git / (git / "commondir").read_text().strip()
    if (git / ref).is_file():
        return (git / ref).read_text().strip()
    packed = git / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {ref}")), "")
