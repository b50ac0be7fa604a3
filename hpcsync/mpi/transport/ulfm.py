"""Ranks that die while the others go on, with an MPI that tolerates that: ULFM, User-Level Failure Mitigation.

A call that needs a rank that has died raises an error. So does one that takes messages from anybody, until somebody has
acknowledged the death on its communicator: then it goes on, and nothing that others have sent is lost. Windows know
nothing of deaths: on a node those of the dead can even be read.

Nothing collective can be done any more with a communicator or a window of which somebody has died, not even free it.
Those who are left make a new communicator of themselves (`survivors`), and the old ones stay until the processes end.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
from collections.abc import Iterable
from typing import Any

from mpi4py import MPI

from hpcsync.config.errors import JobError
from hpcsync.mpi.transport.node_topology import on_one_node
from hpcsync.system import launcher

DEATH = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


class RankFailed(Exception):
    """Another rank cannot go on, or has died."""


def tolerable() -> bool:
    """Whether this MPI goes on without ranks that have died: it has to be able to, and must have been started so."""
    able = MPI.ERR_PROC_FAILED != MPI.ERR_UNKNOWN  # mpi4py's stand-ins for MPIs that are not
    return able and os.environ.get("OMPI_MCA_mpi_ft_enable") in ("1", "true")


def refuse_intolerant(comm: MPI.Intracomm) -> None:
    """Raises JobError where a run cannot go on when ranks die; collective."""
    if not tolerable():
        raise JobError(
            'cluster.on_death = "continue": must be "end" with this MPI, or this way to start it; that takes Open MPI, '
            f"from version 5 on, and mpirun {shlex.join(launcher.TOLERANT)}, as hpcsync run starts it"
        )
    if not on_one_node(comm):
        raise JobError(
            'cluster.on_death = "continue": must be "end" with ranks on several hosts: transfers between them may hang '
            "when one dies; --resume goes on from the last checkpoint"
        )


class Deaths:
    """Those of the ranks of `comm` that this rank has heard of.

    tolerated: whether the others are to go on. vital: ranks without which nobody can.
    """

    def __init__(self, comm: MPI.Intracomm, *, tolerated: bool = False, vital: Iterable[int] = (0,)) -> None:
        self._comm = comm
        self._known = tolerable()
        self._vital = frozenset(vital if tolerated else range(comm.size))

    def look(self) -> list[int]:
        """The ranks that have died, ascending. MPI finds out while messages are waited for.

        Raises RankFailed for one without which nobody can go on.
        """
        if not self._known:
            return []
        failed = self._comm.Get_failed()
        found = failed.Translate_ranks(range(failed.size), self._comm.Get_group()) if failed.size else []
        failed.Free()
        ranks = sorted(map(int, found))
        if lost := self._vital.intersection(ranks):
            raise RankFailed(f"rank {min(lost)} has died")
        return ranks

    def heard(self, error: MPI.Exception) -> None:
        """A call on `comm` has raised this: acknowledge a death, so that the call can be made again.

        Raises what cannot be tolerated: RankFailed for a death, or else the error.
        """
        if not self._known or error.Get_error_class() not in DEATH:
            raise error
        self._comm.Ack_failed(self._comm.size)
        self.look()


def tell(rank: int) -> None:
    """On rank 0: the run goes on, but not as it began."""
    print(f"hpcsync: rank {rank} has died; the others go on", file=sys.stderr, flush=True)


def survivors(comm: MPI.Intracomm) -> MPI.Intracomm:
    """A communicator of those that are left, in their order; collective over them."""
    shrunk: Any = comm.Shrink()
    return shrunk


def leave_with(comm: MPI.Intracomm) -> None:
    """The last that those who are left do together; collective over them.

    From here on they end without telling MPI, whose own end now and then waits for the dead. What a script gives to
    `sys.exit` is then lost, but not that an exception has ended it.
    """
    global _leaving
    comm.Agree(1)
    _leaving = True


_leaving = False


@atexit.register  # first of all, which makes it the last
def _leave() -> None:
    if _leaving:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if hasattr(sys, "last_value") else 0)
