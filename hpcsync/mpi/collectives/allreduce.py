"""All-reduce: the mean of one vector per rank, slice by slice, in place.

On one node the vectors are in memory that all ranks address, and nothing is copied there and back: every rank adds up
its part of all vectors and writes the mean into all of them. Between nodes chunks of the vector travel around a ring
(`ring`) of one rank per node, which adds up the vectors of its node first. MPI's own all-reduce is used for short
slices between nodes, and on a node without room for the memory.

All ranks get the same bits. On one node a sum is formed in the order of ranks. In a ring the parts of a vector begin
with different nodes, so sums differ from those in the order of ranks by rounding, and with the number of nodes and the
slices.

Vectors of a GPU are added up there where ranks open each other's memory by CUDA IPC. Elsewhere their images in host
memory are added up, and slices are copied there and back: MPI's collectives never see a device pointer.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.core.peer_coordinator import ring_bytes
from hpcsync.mpi.collectives.ring import ring_mean
from hpcsync.mpi.transport import cuda, shm_budget
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.node_memory import HostMemory, NodeMemory, node_memory
from hpcsync.mpi.transport.tensor_window import HOST, NodeWindow, Transport
from hpcsync.paradigms.peer_method import Agreed, StepCounts

CHUNK_BYTES = {"cpu": 1 << 19, "cuda": 1 << 25}  # on the CPU a partial sum stays in the core's own cache
LINE_BYTES = 64  # parts begin at a cache line, so that no two ranks write to the same one
SEGMENT_BYTES = 1 << 16  # least segment of a ring: each of its 2 (n - 1) steps costs a latency, and MPI needs fewer
WORD, WORDS = LINE_BYTES // 8, 3 * LINE_BYTES // 8  # a rank's words: one line per counter, and one for its `StepCounts`


def agreed(words: np.ndarray) -> Agreed:
    """Combine the information of all ranks, shape (n_ranks, number of fields of `StepCounts`)."""
    return Agreed.of_sums(int(np.count_nonzero(words[:, 0])), words.sum(0).tolist())


class MeanVector(ABC):
    """Vector of this rank whose mean over all ranks is formed in place.

    `mean` and `free` are collective; one thread at a time calls them.

    Attributes
    ----------
    vector : torch.Tensor
        This rank's vector, shape (size,), on the transport's device.
    n_ranks : int
        Number of ranks.
    absent_s : float
        Total time that this rank has waited for others to arrive at a mean, in seconds.
    between_nodes : bool
        Whether the ranks are on several nodes.
    memory : object
        State that this rank keeps between means; a run that is resumed may replace it.
    """

    vector: torch.Tensor
    n_ranks: int
    absent_s = 0.0
    between_nodes = False
    memory: Any = None

    @property
    def sent_bytes(self) -> int:
        """Bytes that a ring would send from this rank for the latest mean of the whole vector."""
        return ring_bytes(self.vector.nbytes, self.n_ranks)

    @abstractmethod
    def mean(self, begin: int, end: int, own_counts: StepCounts) -> Agreed:
        """Replace a slice of every rank's vector by its sum over ranks divided by the number of contributing ranks.

        Parameters
        ----------
        begin, end
            The slice. With an empty slice ranks only exchange `own_counts`.
        own_counts
            Information of this rank. A rank that contributes no steps has zeros in its vector.

        Returns
        -------
        Agreed
            The same on all ranks.

        Notes
        -----
        Work that fills the vector on a GPU must be on this thread's stream.
        """

    @abstractmethod
    def free(self) -> None:
        """Free all resources; `vector` must not be used afterwards."""


def mean_vector(comm: MPI.Intracomm, size: int, dtype: torch.dtype, transport: Transport = HOST) -> MeanVector:
    """Create a vector of `size` zeros, float32 or float64, with the fastest implementation for `comm`; collective."""
    backoff = Backoff(comm)
    in_shm = 0 if transport.kind == "ipc" else size * dtype.itemsize
    if comm.size > 1 and not shm_budget.lacking(comm, in_shm):
        if backoff.one_node:
            return SharedMean(comm, size, dtype, transport, backoff)
        node: MPI.Intracomm = comm.Split_type(MPI.COMM_TYPE_SHARED)  # type: ignore[assignment]
        if transport.kind != "ipc" and comm.allreduce(node.size, MPI.MAX) > 1:
            return NodesMean(comm, size, dtype, transport, backoff, node)
        node.Free()
    return (MpiMean if backoff.one_node else RingMean)(comm, size, dtype, transport, backoff)


class AgreeingMean(MeanVector):
    """Base class of means whose ranks first exchange `StepCounts` with backoff, on a communicator of their own.

    Once that is complete all ranks have arrived, so the exchange of the vector does not wait long.
    """

    def __init__(self, comm: MPI.Intracomm, backoff: Backoff) -> None:
        self.n_ranks, self._backoff = comm.size, backoff
        self._comm = comm.Dup()

    def mean(self, begin: int, end: int, own_counts: StepCounts) -> Agreed:
        """Exchange `own_counts` by a non-blocking all-reduce, then form the mean of the slice."""
        if self.n_ranks == 1:
            return Agreed.of([own_counts])
        begin_s = time.perf_counter()
        words = np.array([own_counts.n_steps > 0, *own_counts], np.int64)
        self._wait(self._comm.Iallreduce(MPI.IN_PLACE, words))
        self.absent_s += time.perf_counter() - begin_s
        n_contributing, *sums = words.tolist()
        if end > begin:
            self._mean(begin, end, max(1, n_contributing))
        return Agreed.of_sums(n_contributing, sums)

    @abstractmethod
    def _mean(self, begin: int, end: int, divisor: int) -> None:
        """Replace the slice of every rank's vector by the sum over ranks divided by `divisor`."""

    def _mean_of(self, comm: MPI.Intracomm, array: np.ndarray, divisor: int) -> None:
        """Replace the array of every rank of `comm`, in host memory, by the sum over ranks divided by `divisor`."""
        if self.between_nodes and array.nbytes >= SEGMENT_BYTES * comm.size:
            ring_mean(comm, array, divisor, self._wait)
            return
        comm.Allreduce(MPI.IN_PLACE, array)
        if divisor > 1:
            np.divide(array, divisor, out=array)

    def _wait(self, request: Any) -> None:
        self._backoff.complete(request.Test)

    def free(self) -> None:
        """Free the communicator."""
        self._comm.Free()


class MpiMean(AgreeingMean):
    """Mean by MPI's all-reduce, in private host memory."""

    def __init__(
        self, comm: MPI.Intracomm, size: int, dtype: torch.dtype, transport: Transport, backoff: Backoff
    ) -> None:
        super().__init__(comm, backoff)
        self.vector = self._image = torch.zeros(size, dtype=dtype, device=transport.device)
        if transport.kind != "host":
            self._image = torch.zeros(size, dtype=dtype, pin_memory=self.vector.is_cuda)

    def _mean(self, begin: int, end: int, divisor: int) -> None:
        part, image = self.vector[begin:end], self._image[begin:end]
        if self._image is not self.vector:
            cuda.copy(image, part)
        self._mean_of(self._comm, image.numpy(), divisor)
        if self._image is not self.vector:
            cuda.copy(part, image)


class RingMean(MpiMean):
    """Mean around a ring of ranks, in private host memory; of a short slice by MPI's all-reduce."""

    between_nodes = True


class NodesMean(AgreeingMean):
    """Mean of several ranks per node: in the memory of each node, then between one rank of each.

    Parameters
    ----------
    node
        Communicator of this rank's node; freed with this.
    """

    between_nodes = True

    def __init__(
        self,
        comm: MPI.Intracomm,
        size: int,
        dtype: torch.dtype,
        transport: Transport,
        backoff: Backoff,
        node: MPI.Intracomm,
    ) -> None:
        super().__init__(comm, backoff)
        self._node = node
        self._shared = SharedMean(node, size, dtype, transport, Backoff(node))
        self.vector = self._shared.vector
        self._between: Any = comm.Split(0 if node.rank == 0 else MPI.UNDEFINED, comm.rank)

    def _mean(self, begin: int, end: int, divisor: int) -> None:
        def finish(part: torch.Tensor) -> None:
            self._mean_of(self._between, part.numpy(), divisor)

        self._shared.sum_by(begin, end, finish)

    def free(self) -> None:
        """Free the windows and the communicators."""
        self.vector = self.vector.new_empty(0)
        self._shared.free()
        if self._between != MPI.COMM_NULL:
            self._between.Free()
        self._node.Free()
        super().free()


class SharedMean(MeanVector):
    """Mean by loads and stores in memory that all ranks of one node address.

    Ranks synchronise twice for every mean, by counters that each rank writes for itself: once all have arrived, the
    slices may be read and written; once all have left, they are complete. A waiting rank yields its core.
    """

    def __init__(
        self, comm: MPI.Intracomm, size: int, dtype: torch.dtype, transport: Transport, backoff: Backoff
    ) -> None:
        self._rank, self.n_ranks = comm.rank, comm.size
        self._backoff = backoff
        self._memory, local = _memory(comm, size, dtype, transport)
        self._window = NodeWindow(comm, self._memory, local)
        self.vector = self._window.local.zero_()
        device = self._memory.of[comm.rank].device
        self._line = LINE_BYTES // dtype.itemsize
        chunk = max(1, min(CHUNK_BYTES[device.type] // dtype.itemsize, size))
        self._partial = torch.empty(chunk, dtype=dtype, device=device)
        self._divisor = torch.ones((), dtype=dtype, device=device)
        self._views: dict[tuple[int, int], list[tuple[torch.Tensor, list[torch.Tensor]]]] = {}
        self._counters = HostMemory(comm, WORDS, torch.int64)
        words = [tensor.numpy() for tensor in self._counters.of]
        self._arrived = [word[:1] for word in words]
        self._left = [word[WORD:][:1] for word in words]
        self._own_counts = [word[2 * WORD :][: len(StepCounts._fields)] for word in words]
        self._turn = 0
        words[comm.rank][:] = 0
        self._window.release(0, size)
        self._counters.sync()
        comm.Barrier()

    def mean(self, begin: int, end: int, own_counts: StepCounts) -> Agreed:
        """Compute this rank's part of the mean and write it to all vectors."""
        self._turn += 1
        self._window.release(begin, end)
        begin_s = time.perf_counter()
        self._own_counts[self._rank][:] = own_counts
        self._meet(self._arrived)
        self.absent_s += time.perf_counter() - begin_s
        together = agreed(np.array(self._own_counts))
        self._mean_part(begin, end, together.n_contributing)
        self._meet(self._left)
        self._window.acquire(begin, end)
        return together

    def sum_by(self, begin: int, end: int, finish: Callable[[torch.Tensor], None]) -> None:
        """Form the sum of a slice on rank 0, let that `finish` it, and copy the result to all vectors.

        Ranks meet three times: when all have arrived, when the sum is complete, and when the result is; no rank leaves
        before all have copied that.

        Parameters
        ----------
        begin, end
            The slice.
        finish
            Called on rank 0 with the sum, in host memory, which it may change.
        """
        self._turn += 1
        self._window.release(begin, end)
        self._meet(self._arrived)
        if self.n_ranks > 1:
            for total, parts in self._chunks(begin, end):
                _add(parts, total)
                parts[0].copy_(total)
        self._meet(self._left)
        self._turn += 1
        result = self._memory.of[0][begin:end]
        if self._rank == 0:
            finish(result)
        self._meet(self._arrived)
        if self._rank > 0:
            self._memory.of[self._rank][begin:end].copy_(result)
        self._meet(self._left)
        self._window.acquire(begin, end)

    def _bound(self, rank: int, begin: int, end: int) -> int:
        """Return the first element of a rank's part of a slice."""
        lines = -(-(end - begin) // self._line)
        return min(begin + self._line * (lines * rank // self.n_ranks), end)

    def _meet(self, counters: list[np.ndarray]) -> None:
        """Raise this rank's counter to the current turn, and wait until all ranks have done so.

        No rank can be a turn ahead: no rank arrives again before all have left, nor leaves before all have arrived.
        """
        self._counters.sync()  # a fence: this rank's writes, to any memory, become visible before the counter does
        counters[self._rank][0] = self._turn

        def poll() -> bool:
            self._counters.sync()
            return all(counter[0] >= self._turn for counter in counters)

        self._backoff.until(poll)
        self._counters.sync()

    def _mean_part(self, begin: int, end: int, n_contributing: int) -> None:
        """Compute the mean of this rank's part of a slice, summed in rank order whichever rank computes it."""
        n = max(1, n_contributing)
        exact = n & (n - 1) == 0  # for a power of two, multiplying by the reciprocal is exact, and faster
        self._divisor.fill_(n)
        for total, parts in self._chunks(begin, end):
            _add(parts, total)
            if exact:
                total.mul_(1 / n)
            else:
                total.div_(self._divisor)  # for a Python scalar, a GPU would multiply by the reciprocal
            for part in parts:
                part.copy_(total)
        cuda.ready(self._partial)

    def _chunks(self, begin: int, end: int) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Return (partial sum, every rank's chunk) as views of this rank's part of a slice; created once per slice."""
        if (found := self._views.get((begin, end))) is None:
            first, last = (self._bound(rank, begin, end) for rank in (self._rank, self._rank + 1))
            step, found = len(self._partial), []
            for at in range(first, last, step):
                parts = [vector[at : min(at + step, last)] for vector in self._memory.of]
                found.append((self._partial[: len(parts[0])], parts))
            self._views[begin, end] = found
        return found

    def free(self) -> None:
        """Free the windows."""
        self._arrived, self._left, self._own_counts = [], [], []
        self._views.clear()
        self.vector = self.vector.new_empty(0)
        self._counters.free()
        self._window.free()


def _add(parts: list[torch.Tensor], total: torch.Tensor) -> None:
    """Add up the parts of several ranks, in their order."""
    # torch may attribute another GPU's memory to that GPU; it is then copied to this one first.
    here = [part if part.device == total.device else part.to(total.device) for part in parts]
    torch.add(here[0], here[1], out=total)
    for part in here[2:]:
        total.add_(part)


def _memory(
    comm: MPI.Intracomm, size: int, dtype: torch.dtype, transport: Transport
) -> tuple[NodeMemory, torch.Tensor | None]:
    """Return the memory that all ranks address, and the vector if it is elsewhere."""
    if transport.kind in ("host", "ipc"):
        return node_memory(comm, size, dtype, transport.device), None
    vector = torch.zeros(size, dtype=dtype, device=transport.device)
    return HostMemory(comm, size, dtype, page_lock=vector.is_cuda), vector
