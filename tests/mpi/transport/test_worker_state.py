from __future__ import annotations

import time

import pytest

from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.worker_state import RING, WorkerStates
from hpcsync.trace.schema import Phase


@pytest.fixture(params=[True, False], ids=["one node", "several"])
def phases(comm, request):
    phases = WorkerStates(comm, one_node=request.param)
    yield phases
    phases.free()
    phases.free()


def test_rank_0_sees_what_every_rank_does(comm, phases):
    if comm.rank == 0:
        assert phases.seen() == [(0, Phase.UNKNOWN)] * comm.size
    comm.Barrier()
    for iteration in range(3 * RING + comm.rank):
        phases.enter(Phase.COMPUTING, iteration)
    phases.enter(Phase.PUSHING, 1000 * comm.rank)
    Backoff(comm).barrier()
    if comm.rank == 0:
        assert phases.seen() == [(1000 * rank, Phase.PUSHING) for rank in range(comm.size)]


def test_a_rank_that_computes_is_seen(comm, phases, needs, folder):
    """The rank makes no MPI call until it has been seen."""
    needs(2)
    phases.enter(Phase.PUSHING, 1)
    comm.Barrier()
    if comm.rank == comm.size - 1:
        phases.enter(Phase.COMPUTING, 2**40)
        while not (folder / "seen").exists():
            time.sleep(1e-3)
    elif comm.rank == 0:
        begin_s = time.perf_counter()
        while phases.seen()[-1] != (2**40, Phase.COMPUTING):
            assert time.perf_counter() < begin_s + 60
            time.sleep(1e-3)
        (folder / "seen").touch()
    comm.Barrier()
