"""How a rank waits without taking the core from those that compute."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

from hpcsync.mpi.transport.node_topology import on_one_node
from hpcsync.mpi.transport.ulfm import Deaths

T = TypeVar("T")

SPIN_S = 50e-6  # long enough for an answer from an idle peer on the same node
NODE_CEILING_S = 1e-3
NETWORK_CEILING_S = 2e-4
NETWORK_PROBES = 16


class Backoff:
    """Spin briefly, giving the core away each time; then sleep, an eighth of the time waited so far, up to a ceiling.

    So waiting costs little CPU however many ranks share a core, and adds at most an eighth to any wait.

    Between hosts one-sided transfers advance only while the target makes MPI calls, and one call moves little: a rank
    with peers on other hosts therefore sleeps shorter and makes several calls each time it wakes. So does one whose
    windows are not `passive` on its own node either.

    deaths: which of them are tolerated, by default none.
    """

    def __init__(self, comm: MPI.Intracomm, *, passive: bool = True, deaths: Deaths | None = None) -> None:
        self.one_node = on_one_node(comm)
        self._comm = comm
        self._deaths = deaths or Deaths(comm)
        self._helps = not (self.one_node and passive)
        self._ceiling_s = NETWORK_CEILING_S if self._helps else NODE_CEILING_S
        self._since: float | None = None

    def reset(self) -> None:
        """Something happened: the next wait begins with spinning."""
        self._since = None

    def pause(self) -> None:
        """Let others work for a moment."""
        now = time.perf_counter()
        if self._since is None:
            self._since = now
        if self._helps:
            self._help()
        waited_s = now - self._since
        if waited_s < SPIN_S:
            os.sched_yield()
        else:
            time.sleep(min(self._ceiling_s, waited_s / 8))

    def _help(self) -> None:
        try:
            for _ in range(NETWORK_PROBES):
                self._comm.Iprobe()
        except MPI.Exception as error:
            self._deaths.heard(error)

    def barrier(self) -> None:
        """A barrier for ranks that may arrive seconds apart. (MPI's own may spin.)"""
        together = self._comm.Ibarrier()
        self.until(lambda: together.Test() or None)

    def until(self, poll: Callable[[], T | None]) -> T:
        """Wait until `poll` returns something other than None, and return that."""
        self.reset()
        while (found := poll()) is None:
            self.pause()
        return found
