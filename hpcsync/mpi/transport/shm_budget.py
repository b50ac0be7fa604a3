"""Room for the windows that the ranks of a node share, looked at before MPI makes them.

MPI keeps such a window in a file, in a file system in memory, and memory is taken when somebody touches it. Where there
is no room Open MPI fails with an error of its own, while MPICH goes on: a rank that touches too much, perhaps much
later, dies of a signal. So what counts here is the size of a window, not what will be touched of it, for this one and
all that are there. A rank that is alone on its node has its windows in memory of its own, which is not looked at.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcsync.config.errors import JobError

if TYPE_CHECKING:
    from mpi4py import MPI

MIB = 1 << 20
MARGIN = 1.05  # Open MPI wants a twentieth more than it takes
SPARE_BYTES = 4 * MIB  # for what MPI itself keeps there: it takes that when messages begin to travel
SIZES_MIB = 64  # sizes are proposed in multiples of it
MOVED = ("OMPI_MCA_osc_sm_backing_directory", "OMPI_MCA_osc_rdma_backing_directory")  # on one node, between nodes


class Request(NamedTuple):
    """What one rank asks for. node: the same for those that share memory, the host's name first.

    held_bytes: of its windows so far. free_bytes: as if it and its neighbours had none; None where nobody can tell.
    size_bytes: of the whole file system.
    """

    node: tuple[str, ...]
    n_bytes: int
    held_bytes: int = 0
    free_bytes: int | None = None
    size_bytes: int = 0


class _Account:
    """Of this process: how many windows it has and their bytes, and what was free before it had any."""

    n_windows = 0
    held_bytes = 0
    free_bytes = 0


def directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where MPI keeps shared windows: both libraries in the same place on Linux, unless Open MPI is told another."""
    return Path(next((environ[name] for name in MOVED if environ.get(name)), "/dev/shm"))


def take(comm: MPI.Intracomm, n_bytes: int) -> int:
    """Reserve room for so many bytes, which may differ between ranks; what is to be given to `give_back`. Collective.

    Raises JobError, on all ranks, where there is none.
    """
    if words := lacking(comm, n_bytes):
        raise JobError(words)
    _Account.n_windows += 1
    _Account.held_bytes += n_bytes
    return n_bytes


def give_back(n_bytes: int) -> None:
    _Account.n_windows -= 1
    _Account.held_bytes -= n_bytes


def lacking(comm: MPI.Intracomm, n_bytes: int) -> str:
    """Why the ranks of a node cannot have so many bytes each; "" if those of all nodes can. Collective."""
    return verdict(comm.allgather(_ask(n_bytes)))


def verdict(everybody: Sequence[Request]) -> str:
    """The first node that has too little room, in words; "" if all have enough."""
    for node in dict.fromkeys(asked.node for asked in everybody):
        there = [asked for asked in everybody if asked.node == node]
        free = [asked.free_bytes for asked in there if asked.free_bytes is not None]
        needed = int(MARGIN * sum(asked.held_bytes + asked.n_bytes for asked in there)) + SPARE_BYTES
        if len(there) > 1 and free and needed > min(free):
            size = there[0].size_bytes + needed - min(free)
            size_mib = -(-size // (SIZES_MIB * MIB)) * SIZES_MIB
            return (
                f"shared memory of {node[0]}: the windows of its {len(there)} ranks need {needed / MIB:,.0f} MiB of "
                f"{directory()}, and {min(free) / MIB:,.0f} MiB are free: enlarge it (docker run "
                f"--shm-size={size_mib}m; mount -o remount,size={size_mib}m {directory()}), or start fewer ranks there"
            )
    return ""


def _ask(n_bytes: int) -> Request:
    node = (socket.gethostname(), _kernel())
    try:
        usage, device = shutil.disk_usage(directory()), os.stat(directory()).st_dev
    except OSError:  # no such place: this MPI has another
        return Request(node, n_bytes)
    if _Account.n_windows == 0:
        _Account.free_bytes = usage.free
    return Request((*node, str(device)), n_bytes, _Account.held_bytes, _Account.free_bytes, usage.total)


def _kernel() -> str:
    """Hosts may have the same name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""
