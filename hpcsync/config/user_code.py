"""Code of the user that a job file names: where it is found, from which file, and what it raised."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import TracebackType

from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Job
from hpcsync.config.workloads import Function

CALLERS = (f"{Path(__file__).parents[1]}/", "<frozen ", str(Path(importlib.util.__file__).parent))  # of the user's code
# With these a module may have names that its source does not spell.
ADDING_NAMES = r"import\s*\*|exec|globals|locals|vars|setattr|modules|__getattr__|__dict__"
INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


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
    found = _found(job.workload)
    return f"module {_module(job.workload)}" + (f" ({found.origin})" if found is not None and found.origin else "")


def refuse_missing(job: Job) -> None:
    """Raise JobError if the user's workload function or its module is missing; nothing is imported."""
    if not isinstance(job.workload, Function):
        return
    found, (module, _, function) = _found(job.workload), job.workload.name.partition(":")
    if found is None:
        raise not_importable(job.workload.name, f"No module named {module!r}")
    if found.name == module and found.origin is not None and found.origin.endswith(".py"):
        try:
            source = Path(found.origin).read_text(encoding="utf-8", errors="replace")
        except OSError:  # such as in a zip archive
            return
        if not re.search(rf"\b{function}\b|{ADDING_NAMES}", source):
            raise not_importable(job.workload.name, f"module {module!r} has no attribute {function!r}")


def not_importable(name: str, reason: object) -> JobError:
    """Return what to tell about a workload function that cannot be imported."""
    return JobError(f"workload.name = {shown(name)}: must name a function that can be imported: {reason}")


def _module(workload: Function) -> str:
    return workload.name.partition(":")[0]


def _found(workload: Function) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(_module(workload).partition(".")[0])  # without an import of the package
    except (ImportError, ValueError):
        return None


def of_user(job: Job, error: BaseException) -> BaseException:
    """Return a JobError in place of an exception of the user's workload (`raised`); any other exception as it is."""
    in_user_code = any(_is_user_s(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
    if not isinstance(job.workload, Function) or not isinstance(error, Exception) or not in_user_code:
        return error
    return error if isinstance(error, JobError) else raised(job.workload.name, error)


def raised(name: str, error: Exception) -> JobError:
    """Return what to tell about an exception of a workload.

    Parameters
    ----------
    name
        Name of the workload function.
    error
        The exception.

    Returns
    -------
    JobError
        Its line names the exception and the innermost line of the user's code, its details are the traceback from the
        user's code on.
    """
    trace = error.__traceback__
    while trace is not None and not _is_user_s(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    trace = trace or _after_callers(error.__traceback__)
    places = traceback.extract_tb(trace)
    place = next((each for each in reversed(places) if _is_user_s(each.filename)), places[-1] if places else None)
    at = "" if place is None else f" ({Path(place.filename).name}:{place.lineno})"
    reason = str(error).partition("\n")[0]
    line = f"workload.name = {shown(name)}: raised {type(error).__name__}{reason and f': {reason}'}{at}"
    return JobError(line, "".join(traceback.format_exception(type(error), error, trace)))


def _is_user_s(filename: str) -> bool:
    """Return True for a file that belongs neither to hpcsync nor to the installed packages."""
    return not filename.startswith((*CALLERS, *INSTALLED))


def _after_callers(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback after the frames of `CALLERS`, for a workload that is installed as a package."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(CALLERS):
        trace = trace.tb_next
    return trace
