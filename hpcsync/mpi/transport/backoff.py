"""Waiting with backoff: a waiting rank leaves its core to ranks that compute."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

from hpcsync.mpi.transport.in_memory import MemoryCommunicator
from hpcsync.mpi.transport.node_topology import cores_of_rank, on_one_node
from hpcsync.mpi.transport.ulfm import Deaths

T = TypeVar("T")

SPIN_S = 2e-4  # long enough for an answer of a server, where every rank has a core
CROWDED_SPIN_S = 5e-5
NODE_CEILING_S = 1e-3
NETWORK_CEILING_S = 2e-4
NETWORK_PROBES = 16


class Backoff:
    """Spin briefly, yielding the core each time; then sleep for an eighth of the time waited so far, up to a ceiling.

    Waiting thus costs little CPU however many ranks share a core, and adds at most an eighth to any wait.

    Parameters
    ----------
    comm
        Communicator of the ranks that wait for each other. The constructor is collective over it.
    passive
        Whether one-sided transfers on this node complete without MPI calls by their target.
    deaths
        Failure detector that decides which deaths are tolerated; by default none is.

    Attributes
    ----------
    one_node : bool
        Whether all ranks of `comm` share a node.

    Notes
    -----
    Between hosts, one-sided transfers advance only while the target makes MPI calls, and one call moves little. A rank
    with peers on other hosts therefore sleeps for shorter times and makes several calls at each wake-up. So does a rank
    whose windows are not `passive` on its own node.
    """

    def __init__(self, comm: MPI.Intracomm, *, passive: bool = True, deaths: Deaths | None = None) -> None:
        self.one_node = on_one_node(comm)
        self._spin_s = SPIN_S if cores_of_rank(comm) >= 1 else CROWDED_SPIN_S
        self._comm = comm
        self._deaths = deaths or Deaths(comm)
        self._helps = not (self.one_node and passive)
        self._ceiling_s = NETWORK_CEILING_S if self._helps else NODE_CEILING_S
        self._since: float | None = None
        self._pause = comm.pause if isinstance(comm, MemoryCommunicator) else _pause

    def reset(self) -> None:
        """Start the next wait with spinning again, after progress was made."""
        self._since = None

    def pause(self) -> None:
        """Let transfers of others advance if that needs calls; then yield the core, or sleep, for a moment."""
        now = time.perf_counter()
        if self._since is None:
            self._since = now
        if self._helps:
            help_others(self._comm, self._deaths)
        self._rest(now - self._since)

    def _rest(self, waited_s: float) -> None:
        self._pause(0.0 if waited_s < self._spin_s else min(self._ceiling_s, waited_s / 8))

    def barrier(self) -> None:
        """Wait until all ranks have called this; suited to ranks that arrive seconds apart.

        MPI's own `Barrier` may spin.
        """
        self.complete(self._comm.Ibarrier().Test)

    def until(self, poll: Callable[[], T | None]) -> T:
        """Wait until `poll` returns something true, and return that."""
        self.reset()
        while not (found := poll()):
            self.pause()
        return found

    def complete(self, test: Callable[[], T | None]) -> T:
        """Wait as `until` does for `test`, which is one local MPI call, such as the `Test` of a request.

        Between hosts it is repeated in place of probes, which would delay it: transfers of others advance as well.
        """
        if not self._helps:
            return self.until(test)
        began_s = time.perf_counter()
        while True:
            for _ in range(NETWORK_PROBES):
                if found := test():
                    return found
            self._rest(time.perf_counter() - began_s)


def help_others(comm: MPI.Intracomm, deaths: Deaths) -> None:
    """Make MPI calls, during which one-sided transfers of others with this rank advance; one call moves little."""
    try:
        for _ in range(NETWORK_PROBES):
            comm.Iprobe()
    except MPI.Exception as error:
        deaths.heard(error)


def _pause(seconds: float) -> None:
    """Sleep, or yield the core for 0 seconds."""
    if seconds > 0:
        time.sleep(seconds)
    else:
        os.sched_yield()
