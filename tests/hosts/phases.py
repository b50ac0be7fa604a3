"""One rank of a pair on two hosts: python -m mpi4py phases.py OUT.json

Rank 1 says that it computes, and does so for a second without an MPI call: first with the probe that belongs to a phase
between hosts, then without. Rank 0 leaves in OUT.json whether it saw that, and which MPI it has.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from mpi4py import MPI

from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.worker_state import WorkerStates
from hpcsync.trace.schema import Phase

COMPUTE_S = 1.0


class WithoutProbe:
    """A communicator whose probe does nothing."""

    def Iprobe(self) -> bool:
        return False


def sees(comm: MPI.Intracomm, backoff: Backoff, *, probes: bool) -> bool:
    phases, seen = WorkerStates(comm, one_node=False), False
    if not probes:
        phases._comm = WithoutProbe()  # type: ignore[assignment]
    backoff.barrier()
    begin_s = time.perf_counter()
    if comm.rank == 1:
        phases.enter(Phase.COMPUTING, 7)
        time.sleep(COMPUTE_S)
    while comm.rank == 0 and not seen and time.perf_counter() < begin_s + COMPUTE_S / 2:
        backoff.pause()
        seen = phases.seen()[1] == (7, Phase.COMPUTING)
    backoff.barrier()
    phases.free()
    return seen


def main(out: str) -> None:
    comm = MPI.COMM_WORLD
    backoff = Backoff(comm)
    assert not backoff.one_node
    found = [sees(comm, backoff, probes=probes) for probes in (True, False)]
    if comm.rank == 0:
        Path(out).write_text(json.dumps([*found, MPI.Get_library_version()]))


main(sys.argv[1])
