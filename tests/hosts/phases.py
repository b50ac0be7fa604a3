"""One rank of a pair on two hosts: python -m mpi4py phases.py OUT.json

Rank 1 says that it computes, and makes no MPI call until rank 0 has seen it or does not look any more: first with the
probe that belongs to a phase between hosts, then without. Rank 0 leaves in OUT.json whether it saw that, and which MPI
it has.
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

LOOKS_S, CONTROL_S = 60.0, 0.5


class WithoutProbe:
    """A communicator whose probe does nothing."""

    def Iprobe(self) -> bool:
        return False


def sees(comm: MPI.Intracomm, backoff: Backoff, looked: Path, *, probes: bool) -> bool:
    phases, seen = WorkerStates(comm, one_node=False), False
    if not probes:
        phases._comm = WithoutProbe()  # type: ignore[assignment]
    backoff.barrier()
    begin_s = time.perf_counter()
    if comm.rank == 1:
        phases.enter(Phase.COMPUTING, 7)
        while not looked.exists():
            time.sleep(0.001)
    while comm.rank == 0 and not seen and time.perf_counter() < begin_s + (LOOKS_S if probes else CONTROL_S):
        backoff.pause()
        seen = phases.seen()[1] == (7, Phase.COMPUTING)
    if comm.rank == 0:
        looked.touch()
    backoff.barrier()
    phases.free()
    return seen


def main(out: str) -> None:
    comm = MPI.COMM_WORLD
    backoff = Backoff(comm)
    assert not backoff.one_node
    found = [sees(comm, backoff, Path(f"{out}-{probes}"), probes=probes) for probes in (True, False)]
    if comm.rank == 0:
        Path(out).write_text(json.dumps([*found, MPI.Get_library_version()]))


main(sys.argv[1])
