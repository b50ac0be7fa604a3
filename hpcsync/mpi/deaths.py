"""Ranks that die while the others go on, with an MPI that tolerates that: ULFM, User-Level Failure Mitigation.

A call that needs a rank that has died raises an error. So does one that takes messages from anybody, until somebody has
acknowledged the death on its communicator: then it goes on, and nothing that others have sent is lost. Windows know
nothing of deaths: on a node those of the dead can even be read.

Nothing collective can be done any more with a communicator or a window of which somebody has died, not even free it.
Those who are left make a new communicator of themselves (`survivors`), and the old ones stay until the processes end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from mpi4py import MPI

DEATH = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


class RankFailed(Exception):
    """Another rank cannot go on, or has died."""


def tolerable() -> bool:
    """Whether this MPI goes on without ranks that have died: it has to be able to, and must have been started so."""
    able = MPI.ERR_PROC_FAILED != MPI.ERR_UNKNOWN  # mpi4py's stand-ins for MPIs that are not
    return able and os.environ.get("OMPI_MCA_mpi_ft_enable") in ("1", "true")


class Deaths:
    """Those of the ranks of `comm` that this rank has heard of.

    tolerated: whether the others are to go on. vital: ranks without which nobody can.
    """

    def __init__(self, comm: MPI.Intracomm, *, tolerated: bool = False, vital: Iterable[int] = (0,)) -> None:
        self._comm = comm
        self._known = tolerable()
        self._vital = frozenset(vital if tolerated else range(comm.size))

    @property
    def ranks(self) -> list[int]:
        """Those that have died, ascending. MPI finds out while messages are waited for."""
        if not self._known:
            return []
        failed = self._comm.Get_failed()
        ranks = failed.Translate_ranks(range(failed.size), self._comm.Get_group())
        failed.Free()
        return sorted(map(int, ranks))

    def heard(self, error: MPI.Exception) -> None:
        """A call on `comm` has raised this: acknowledge a death, so that the call can be made again.

        Raises what cannot be tolerated: RankFailed for a death, or else the error.
        """
        if not self._known or error.Get_error_class() not in DEATH:
            raise error
        self._comm.Ack_failed(self._comm.size)
        if lost := self._vital.intersection(self.ranks):
            raise RankFailed(f"rank {min(lost)} has died") from None


def survivors(comm: MPI.Intracomm) -> MPI.Intracomm:
    """A communicator of those that are left, in their order; collective over them."""
    shrunk: Any = comm.Shrink()
    return shrunk
