"""Detection and acknowledgement of rank deaths with ULFM, MPI's User-Level Failure Mitigation.

An MPI call that needs a dead rank raises an error. So does a call that receives from any source, until the death is
acknowledged on its communicator: the call then works again, and no message from another rank is lost. Windows know
nothing of deaths: on a node, even a dead rank's window can still be read.

No collective operation is possible on a communicator or window that includes a dead rank, not even freeing it. The
survivors create a new communicator (`survivors`), and the old ones stay until the processes end.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import math
import operator
import os
import shlex
import signal
import sys
import time
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

from mpi4py import MPI

from hpcsync.config.errors import JobError
from hpcsync.mpi.transport.node_topology import on_one_node
from hpcsync.system import launcher
from hpcsync.system.launch_output import print_at_once

DEATH = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


class RankFailed(Exception):
    """Another rank failed or died."""


def tolerable() -> bool:
    """Return whether this MPI can continue after a rank dies: it must support ULFM and have been started with it."""
    able = MPI.ERR_PROC_FAILED != MPI.ERR_UNKNOWN  # mpi4py sets both equal for an MPI without ULFM
    return able and os.environ.get("OMPI_MCA_mpi_ft_enable") in ("1", "true")


def refuse_intolerant(comm: MPI.Intracomm) -> None:
    """Check that the run can continue after a rank dies; collective.

    Raises
    ------
    JobError
        If the MPI does not tolerate deaths, or the ranks are on several hosts.
    """
    if not tolerable():
        raise JobError(
            'cluster.on_death = "continue": must be "end" with this MPI, or this way to start it; "continue" needs '
            f"Open MPI 5 or later, started as hpcsync run does, with mpirun {shlex.join(launcher.TOLERANT)}"
        )
    if not on_one_node(comm):
        raise JobError(
            'cluster.on_death = "continue": must be "end" with ranks on several hosts: transfers between them may hang '
            "when one dies; use --resume to resume from the last checkpoint instead"
        )


class Deaths:
    """Failure detector: the ranks of `comm` that this rank knows to have died.

    Parameters
    ----------
    comm
        Communicator to watch.
    tolerated
        Whether the other ranks continue after a death.
    vital
        Ranks without which the run cannot continue.
    """

    def __init__(self, comm: MPI.Intracomm, *, tolerated: bool = False, vital: Iterable[int] = (0,)) -> None:
        self._comm = comm
        self._known = tolerable()
        self._vital = frozenset(vital if tolerated else range(comm.size))

    def look(self) -> list[int]:
        """Return the ranks that have died, in ascending order; MPI detects deaths while messages are waited for.

        Raises
        ------
        RankFailed
            If one of them is vital.
        """
        if not self._known:
            return []
        failed = self._comm.Get_failed()
        ranks = _ranks(failed, self._comm) if failed.size else []
        failed.Free()
        if lost := self._vital.intersection(ranks):
            raise RankFailed(f"rank {min(lost)} died")
        return ranks

    def heard(self, error: MPI.Exception) -> None:
        """Acknowledge a death after a call on `comm` raised `error`, so that the call can be repeated.

        Raises
        ------
        RankFailed
            If the death cannot be tolerated.
        MPI.Exception
            `error` itself, if it is not about a death.
        """
        if not self._known or error.Get_error_class() not in DEATH:
            raise error
        self._comm.Ack_failed(self._comm.size)
        self.look()


def tell(rank: int) -> None:
    """Print on rank 0 that a rank died and the run continues."""
    print_at_once(f"hpcsync: rank {rank} died; the other ranks continue")


def survivors(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the surviving ranks, in their order; collective over them."""
    shrunk: Any = comm.Shrink()
    return shrunk


class _Run(NamedTuple):
    """A run that has ended: its survivors, and the ranks that they had in it."""

    survivors: MPI.Intracomm
    ranks: list[int]


_runs: list[_Run] = []
_statuses: list[int] = []

OTHERS_END_S = 1.0
_LOST = 256  # beside an exit status: a process has died, so that MPI cannot be finalised


def end_with(comm: MPI.Intracomm, survivors: MPI.Intracomm) -> None:
    """Let the processes of a run end together where MPI tolerates deaths, after the run's last collective operation.

    MPI's finalisation would wait for a rank that dies before it, and `MPI_Abort` ends no other rank. So the processes
    agree at their exit, and all end with a status other than 0 if one has died or failed since. One that failed waits
    `OTHERS_END_S` for the others, in case they fail as well, and is then killed, which they detect.

    After a death during the run no process finalises MPI, and only `python -m mpi4py` knows the argument of `sys.exit`.

    Parameters
    ----------
    comm
        Communicator of the run, whose ranks messages name.
    survivors
        Communicator of the survivors, which nobody frees.
    """
    if not _runs:
        MPI._set_abort_status = _statuses.append  # type: ignore[assignment]  # `python -m mpi4py` calls it
        atexit.register(_end)
    _runs.append(_Run(survivors, _ranks(survivors.Get_group(), comm)))


def _ranks(group: MPI.Group, comm: MPI.Intracomm) -> list[int]:
    """Return the ranks in `comm` of the processes in `group`, in ascending order."""
    return sorted(map(int, group.Translate_ranks(None, comm.Get_group())))


def _end() -> None:
    """End this process: as Python does if all processes agree that none has failed or died, else without MPI."""
    atexit.unregister(_end)
    atexit._run_exitfuncs()  # at once: a process that does not finalise MPI runs nothing after this function
    _flush_files()
    if MPI.Is_finalized():  # by the script
        return
    status = _statuses[-1] & 0xFF if _statuses else int(hasattr(sys, "last_value"))
    end: int | None = status or 1  # if this process cannot agree
    try:
        agreed = _agree(status)
        end = status or agreed & 0xFF if agreed else None
    finally:
        if end is not None:
            os._exit(end)


def _flush_files() -> None:
    """Write out what a script has left in the buffers of open files, as the end of Python does."""
    gc.unfreeze()
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):
            with contextlib.suppress(Exception):
                each.flush()


def _agree(status: int) -> int:
    """Return the exit statuses of all processes, combined by a bitwise or, and `_LOST` if one has died."""
    lost = _LOST if MPI.COMM_WORLD.Get_failed().size else 0
    inverse = [array("i", [~(status | lost)]) for _ in _runs]  # MPI agrees on the bitwise and
    requests = [run.survivors.Iagree(number) for run, number in zip(_runs, inverse, strict=True)]
    killed_s = time.monotonic() + OTHERS_END_S if status else math.inf
    for run, request in zip(_runs, requests, strict=True):
        try:
            while not request.Test():
                if time.monotonic() > killed_s:
                    rank = run.ranks[run.survivors.rank]
                    print_at_once(f"hpcsync: rank {rank} failed after the end of training, with status {status}")
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.002)
        except MPI.Exception:
            _tell_deaths(run)
            return status or 1
    return ~functools.reduce(operator.and_, (number[0] for number in inverse))


def _tell_deaths(run: _Run) -> None:
    """Print on the first of the survivors which ranks have died since the run ended."""
    end_s = time.monotonic() + OTHERS_END_S
    while not (failed := run.survivors.Get_failed()).size and time.monotonic() < end_s:
        run.survivors.Iprobe()  # MPI detects deaths while messages are waited for
    died = _ranks(failed, run.survivors)
    if run.survivors.rank == min({*range(run.survivors.size)} - {*died}):
        ranks = ", ".join(str(run.ranks[rank]) for rank in died)
        print_at_once(f"hpcsync: rank {ranks} died after the end of training")
