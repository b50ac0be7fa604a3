"""Files in /dev/shm that killed ranks would leave behind: under MPICH none, once all ranks have started."""

import re
from pathlib import Path

import pytest
from mpi4py import MPI

from hpcsync.api.ranks import world
from hpcsync.system.process_cleanup import ATTACHED


def named() -> list[str]:
    """Return the mapped files in /dev/shm that still have a name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if re.search(r" /dev/shm/\S+$", line)})


@pytest.mark.skipif(MPI.get_vendor()[0] != "MPICH", reason="Open MPI's launcher removes its files itself")
def test_no_segment_of_mpich_keeps_its_name(comm):
    assert all(ATTACHED.search(f" {path}") for path in named()), "files of another kind"
    assert world() == MPI.COMM_WORLD
    comm.Barrier()
    assert named() == []
    window = MPI.Win.Allocate(1 << 16, comm=comm)
    assert named() == []
    window.Free()
