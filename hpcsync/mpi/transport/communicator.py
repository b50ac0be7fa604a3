"""What hpcsync needs of a communicator and of a window: MPI's, or those of ranks that are threads of one process.

All code above this folder works on a `Communicator`, with the names and the constants (`MPI.SUM`, `MPI.COMM_NULL`) of
mpi4py. What is not an operation of a communicator, such as creating a window, is a function here.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from mpi4py import MPI

from hpcsync.mpi.transport.in_memory import Done, MemoryCommunicator

Communicator: TypeAlias = MPI.Intracomm | MemoryCommunicator
"""Operations in use: ``Dup``, ``Split``, ``Split_type``, ``Free``, ``Abort``; ``Barrier``, ``Ibarrier``, ``bcast``,
``allgather``, ``gather``, ``allreduce``, ``Bcast``, ``Allreduce``, ``Iallreduce``, ``Iallgather``, ``Allgatherv``;
``Send``, ``Isend``, ``Recv``, ``Irecv``, ``Recv_init``, ``Iprobe``."""


class RawWindow(Protocol):
    """Operations of a window that hpcsync uses, as in mpi4py."""

    def tomemory(self) -> Any:
        """Return this rank's memory."""

    def Shared_query(self, rank: int) -> tuple[Any, int]:
        """Return a rank's memory, of a window of shared memory, and the unit of its offsets."""

    def Lock_all(self) -> None:
        """Begin access to all ranks."""

    def Unlock_all(self) -> None:
        """End access to all ranks."""

    def Sync(self) -> None:
        """Order this rank's loads and stores."""

    def Flush(self, rank: int) -> None:
        """Complete this rank's operations on a rank."""

    def Put(self, source: Any, rank: int, place: Any) -> None:
        """Begin to copy to a rank."""

    def Get(self, into: Any, rank: int, place: Any) -> None:
        """Begin to copy from a rank."""

    def Rput(self, source: Any, rank: int, place: Any) -> Any:
        """Begin to copy to a rank; return a request that is complete when `source` may be reused."""

    def Rget(self, into: Any, rank: int, place: Any) -> Any:
        """Begin to copy from a rank; return a request that is complete when the data is there."""

    def Fetch_and_op(self, operand: Any, before: Any, rank: int, offset: int, op: Any) -> None:
        """Begin to add to one element and to copy what it was."""

    def Compare_and_swap(self, value: Any, expected: Any, before: Any, rank: int, offset: int) -> None:
        """Begin to replace one element if it is the expected one, and to copy what it was."""

    def Free(self) -> None:
        """Free the window; collective."""


def is_in_memory(comm: Communicator) -> bool:
    """Return whether the ranks are threads of this process: nothing then needs to be measured or reserved."""
    return isinstance(comm, MemoryCommunicator)


# Operations on an element are of one kind, see `Window.fetch_add`. Without the second key a rank of Open MPI that is
# alone on its host swaps a word of its own by comparing and copying, while another thread of it makes a remote swap.
_ATOMIC = MPI.Info.Create({"accumulate_ops": "same_op", "acc_single_intrinsic": "true"})


def allocate(comm: Communicator, n_bytes: int, unit: int) -> RawWindow:
    """Create a window over allocated memory; collective."""
    if isinstance(comm, MemoryCommunicator):
        return comm.window(n_bytes, unit)
    return MPI.Win.Allocate(n_bytes, unit, _ATOMIC, comm)


def expose(comm: Communicator, memory: Any, unit: int) -> RawWindow:
    """Create a window over a buffer, or over nothing; collective."""
    if isinstance(comm, MemoryCommunicator):
        return comm.expose(memory, unit)
    return MPI.Win.Create(memory, unit, comm=comm)


def allocate_shared(comm: Communicator, n_bytes: int) -> RawWindow:
    """Create a window of octets that the ranks, all of one node, also load and store; collective."""
    if isinstance(comm, MemoryCommunicator):
        return comm.window(n_bytes, 1)
    return MPI.Win.Allocate_shared(n_bytes, 1, comm=comm)


def wait_any(requests: list[Any]) -> None:
    """Wait until one of several requests is complete."""
    if not any(isinstance(request, Done) for request in requests):
        MPI.Request.Waitany(requests)


def takes_several_threads(comm: Communicator) -> bool:
    """Return whether several threads of a rank may communicate at once."""
    return isinstance(comm, MemoryCommunicator) or MPI.Query_thread() >= MPI.THREAD_MULTIPLE
