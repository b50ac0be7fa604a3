"""Check that a node has room for its ranks' shared windows before MPI creates them.

MPI keeps such a window in a file on an in-memory file system, and memory is taken when a page is first touched. Where
there is no room, Open MPI fails with an error of its own, while MPICH continues: a rank that touches too much, perhaps
much later, dies of a signal. The check therefore counts the sizes of windows, not the memory touched, for the new
window and all existing ones. A rank that is alone on its node has its windows in private memory, which is not checked.
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
MARGIN = 1.05  # Open MPI requires a twentieth more than it takes
SPARE_BYTES = 4 * MIB  # for MPI's own files there, which it creates with the first messages
SIZES_MIB = 64  # proposed sizes are multiples of this
MOVED = ("OMPI_MCA_osc_sm_backing_directory", "OMPI_MCA_osc_rdma_backing_directory")  # on one node, between nodes


class Request(NamedTuple):
    """Shared memory that one rank asks for.

    Attributes
    ----------
    node : tuple of str
        Identity of the shared memory, host name first; equal on ranks that share it.
    n_bytes : int
        Bytes of the new window.
    held_bytes : int
        Bytes of the rank's existing windows.
    free_bytes : int or None
        Free bytes before the ranks of the node had any windows; None if unknown.
    size_bytes : int
        Size of the whole file system, in bytes.
    """

    node: tuple[str, ...]
    n_bytes: int
    held_bytes: int = 0
    free_bytes: int | None = None
    size_bytes: int = 0


class _Account:
    """Windows of this process: their bytes, and the free bytes before the first of them."""

    held_bytes = 0
    free_bytes = 0


def directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where MPI keeps shared windows: on Linux the same for both libraries, unless Open MPI's is configured."""
    return Path(next((environ[name] for name in MOVED if environ.get(name)), "/dev/shm"))


def take(comm: MPI.Intracomm, n_bytes: int) -> int:
    """Reserve room for a window of `n_bytes`, which may differ between ranks; collective.

    Returns
    -------
    int
        Bytes to pass to `give_back`.

    Raises
    ------
    JobError
        On all ranks, if a node has too little room.
    """
    if failure := lacking(comm, n_bytes):
        raise JobError(failure)
    _Account.held_bytes += n_bytes
    return n_bytes


def give_back(n_bytes: int) -> None:
    """Release room reserved by `take`."""
    _Account.held_bytes -= n_bytes


def lacking(comm: MPI.Intracomm, n_bytes: int) -> str:
    """Return why the ranks of a node cannot have windows of `n_bytes` each, or "" if all can; collective."""
    from hpcsync.mpi.transport.communicator import is_in_memory  # here, because doctor runs without an MPI

    return "" if is_in_memory(comm) else verdict(comm.allgather(_ask(n_bytes)))


def verdict(requests: Sequence[Request]) -> str:
    """Return a description of the first node that has too little room, or "" if all have enough."""
    for node in dict.fromkeys(request.node for request in requests):
        there = [request for request in requests if request.node == node]
        free = [request.free_bytes for request in there if request.free_bytes is not None]
        needed = int(MARGIN * sum(request.held_bytes + request.n_bytes for request in there)) + SPARE_BYTES
        if len(there) > 1 and free and needed > min(free):
            size = there[0].size_bytes + needed - min(free)
            size_mib = -(-size // (SIZES_MIB * MIB)) * SIZES_MIB
            return (
                f"shared memory of {node[0]}: the windows of its {len(there)} ranks need {-(-needed // MIB):,} MiB of "
                f"{directory()}, and {min(free) // MIB:,} MiB are free: enlarge it (docker run "
                f"--shm-size={size_mib}m; mount -o remount,size={size_mib}m {directory()}), or start fewer ranks there"
            )
    return ""


def _ask(n_bytes: int) -> Request:
    node = (socket.gethostname(), _kernel())
    try:
        usage, device = shutil.disk_usage(directory()), os.stat(directory()).st_dev
    except OSError:  # no such directory: this MPI uses another
        return Request(node, n_bytes)
    if _Account.held_bytes == 0:
        _Account.free_bytes = usage.free
    return Request((*node, str(device)), n_bytes, _Account.held_bytes, _Account.free_bytes, usage.total)


def _kernel() -> str:
    """Return the boot identifier, which tells apart hosts of the same name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""
