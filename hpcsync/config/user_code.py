"""Code of the user that a job file names: where it is found, and from which file."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from hpcsync.config.job import Job
from hpcsync.config.workloads import Function


def import_beside(path: str | Path) -> None:
    """Make workload functions importable from the folder of the job file and from the working directory.

    These come last, so that a file there cannot take the place of an installed package.
    """
    folders = [str(Path(path).parent.resolve()), os.getcwd()]
    sys.path += [folder for folder in folders if folder not in sys.path]


def user_code(job: Job) -> str | None:
    """Return the module of the user's workload function, and the file that would be imported; None without one."""
    if not isinstance(job.workload, Function):
        return None
    module = job.workload.name.partition(":")[0]
    try:
        found = importlib.util.find_spec(module.partition(".")[0])  # of a module within it would import the package
    except (ImportError, ValueError):
        found = None
    return f"module {module}" + (f" ({found.origin})" if found is not None and found.origin else "")
