"""Errors of the user that end all ranks: one line of rank 0, as the commands print them, and status 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from hpcsync.config.errors import JobError, below
from hpcsync.system import rank_environment
from hpcsync.system.launch_output import let_rank_0_report, print_at_once, wait_until_read
from hpcsync.system.launcher import LaunchError


def print_user_errors_in_one_line() -> None:
    """Install an `excepthook` that prints an uncaught JobError or LaunchError as the commands do."""
    if not isinstance(sys.excepthook, _UserErrorHook):
        sys.excepthook = _UserErrorHook(sys.excepthook)


class _UserErrorHook:
    """Replacement of `sys.excepthook`, which still handles all other exceptions."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, JobError | LaunchError):
            end_refused(error)
        self._before(kind, error, trace)


def end_refused(error: Exception) -> NoReturn:
    """Print the error and end all ranks with status 2.

    Most errors occur on all ranks: rank 0 prints them at once and ends the others, which wait for it. An error that
    rank 0 does not report within `launch_output.SAME_ERROR_S` is that of another rank.
    """
    mpi, rank = sys.modules.get("mpi4py.MPI"), rank_environment.expected_rank()
    comm = mpi.COMM_WORLD if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None
    if comm is None or comm.size == 1:
        if rank_environment.speaks_for_all():
            print_at_once(f"hpcsync: {error}{below(error)}")
        sys.exit(2)
    let_rank_0_report(rank, comm.size)
    print_at_once(f"hpcsync: {error}{below(error)}")
    sys.stdout.flush()
    wait_until_read()
    comm.Abort(2)
    os._exit(2)  # MPICH's abort may return before the launcher ends this rank
