"""Compressed all-reduce: the mean of one vector per rank, exchanged in compressed form through host memory."""

from __future__ import annotations

import time
from abc import abstractmethod

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.compression import ErrorFeedback
from hpcsync.compression.codec import Array
from hpcsync.core.peer_coordinator import broadcast_bytes, ring_bytes
from hpcsync.mpi.collectives.allreduce import LINE_BYTES, MeanVector, agreed, mean_vector
from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.tensor_window import Transport
from hpcsync.paradigms.peer_method import Agreed, StepCounts
from hpcsync.training.compressor import Compression, as_array, as_tensor, written


class CompressedMean(MeanVector):
    """Base class of compressed means; the slice is the whole vector.

    Ranks first compress, then exchange `StepCounts` with backoff. Once that is complete all ranks have arrived, so the
    exchange of the payloads does not wait long.
    """

    def __init__(
        self, comm: MPI.Intracomm, size: int, dtype: torch.dtype, transport: Transport, compression: Compression
    ) -> None:
        self.n_ranks = comm.size
        self.vector = torch.zeros(size, dtype=dtype, device=transport.device)
        self._compression = compression
        self._comm = comm.Dup()
        self._backoff = Backoff(self._comm)

    def mean(self, begin: int, end: int, own_counts: StepCounts) -> Agreed:
        """Compress the vector, exchange `own_counts`, then form the mean."""
        assert (begin, end) == (0, len(self.vector))
        n_bytes = self._prepare() if own_counts.n_steps else 0
        begin_s = time.perf_counter()
        own, words = np.array([*own_counts, n_bytes], np.int64), np.empty((self.n_ranks, len(own_counts) + 1), np.int64)
        request = self._comm.Iallgather(own, words)
        self._backoff.complete(request.Test)
        self.absent_s += time.perf_counter() - begin_s
        together = agreed(words[:, :-1])
        if together.n_contributing:
            self._form(words[:, -1], own_counts.n_steps > 0)
        return together

    @abstractmethod
    def _prepare(self) -> int:
        """Compress the vector of a contributing rank; return the bytes of its payload."""

    @abstractmethod
    def _form(self, sizes: np.ndarray, contributing: bool) -> None:
        """Replace the vector by the mean. `sizes` are the payload bytes of each rank, shape (n_ranks,)."""

    def free(self) -> None:
        """Free the communicator."""
        self._comm.Free()


class GatheredMean(CompressedMean):
    """Mean by all-gather of the payloads: every rank receives every payload.

    A rank that does not contribute sends nothing, and its compressor is not called.
    """

    def __init__(
        self, comm: MPI.Intracomm, size: int, dtype: torch.dtype, transport: Transport, compression: Compression
    ) -> None:
        super().__init__(comm, size, dtype, transport, compression)
        self.memory = compression.compressor(comm.rank)
        self._payload = torch.empty(0, dtype=torch.uint8)
        self._image = torch.empty(0, dtype=torch.uint8)  # all payloads

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to deliver this rank's payload to every other rank."""
        return broadcast_bytes(self._payload.nbytes, self.n_ranks)

    def _prepare(self) -> int:
        self._payload = self.memory.encode(self.vector, [self._compression.whole])[0]
        return self._payload.nbytes

    def _form(self, sizes: np.ndarray, contributing: bool) -> None:
        if not contributing:
            self._payload = self._payload[:0]
        rooms = sizes + -sizes % LINE_BYTES
        begins = np.cumsum(rooms) - rooms
        if len(self._image) < (end := int(begins[-1] + rooms[-1])):
            self._image = torch.empty(end, dtype=torch.uint8, pin_memory=self.vector.is_cuda)
        own = int(begins[self._comm.rank])
        cuda.copy(self._image[own : own + len(self._payload)], self._payload)
        if self.n_ranks > 1:
            words = self._image.numpy().view(np.int64)  # counts have 32 bits: those of octets would end at 2 GiB
            self._comm.Allgatherv(MPI.IN_PLACE, [words, rooms // words.itemsize, begins // words.itemsize, MPI.INT64_T])
        here = self._image[:end].to(self.vector.device)
        parts = zip(begins.tolist(), sizes.tolist(), strict=True)
        payloads = [here[begin : begin + size] for begin, size in parts if size]
        self._compression.decode_mean(payloads, self.vector)


class FactorsMean(CompressedMean):
    """Mean by PowerSGD: its factors are averaged like uncompressed vectors.

    Notes
    -----
    P is the same on all ranks, and each rank orthonormalises it. Ranks whose linear algebra differs therefore get
    different bits.
    """

    def __init__(
        self, comm: MPI.Intracomm, size: int, dtype: torch.dtype, transport: Transport, compression: Compression
    ) -> None:
        super().__init__(comm, size, dtype, transport, compression)
        self.memory = compression.averager()
        self._means = [mean_vector(self._comm, max(1, n), dtype, transport) for n in self.memory.factor_sizes]

    @property
    def sent_bytes(self) -> int:
        """Bytes that a ring would send for the factors."""
        return ring_bytes(self._compression.nominal_bytes(self._compression.whole), self.n_ranks)

    def _prepare(self) -> int:
        return 0

    def _form(self, sizes: np.ndarray, contributing: bool) -> None:
        """Average the factors; a rank that does not contribute has zeros and keeps its error feedback."""
        codec, vector, own_counts = self.memory, as_array(self.vector), StepCounts(int(contributing))
        if not contributing and isinstance(codec, ErrorFeedback):
            codec = codec.codec
        left, right = self._means
        lefts = _mean_of_factors(left, codec.left_factors(vector), own_counts)
        codec.product(_mean_of_factors(right, codec.right_factors(lefts), own_counts), vector)
        written(self.vector)

    def free(self) -> None:
        """Free the factors' means and the communicator."""
        for mean in self._means:
            mean.free()
        super().free()


def _mean_of_factors(mean: MeanVector, factors: Array, own_counts: StepCounts) -> Array:
    """Return the mean of each rank's factors, which may be empty."""
    n = len(factors)
    mean.vector[:n].copy_(as_tensor(factors))
    mean.mean(0, n, own_counts)
    return as_array(mean.vector[:n].clone())


def compressed_mean(
    comm: MPI.Intracomm, size: int, dtype: torch.dtype, transport: Transport, compression: Compression
) -> CompressedMean:
    """Create a vector of `size` zeros, as `mean_vector`; collective.

    Each rank's compressor starts in its initial state.
    """
    kind = FactorsMean if compression.averages else GatheredMean
    return kind(comm, size, dtype, transport, compression)
