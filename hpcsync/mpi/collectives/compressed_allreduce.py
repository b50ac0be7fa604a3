"""The mean of one vector of every rank, of which only what a codec makes of them travels, through host memory."""

from __future__ import annotations

import time
from abc import abstractmethod

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.compression import ErrorFeedback
from hpcsync.compression.codec import Array
from hpcsync.core.peer_coordinator import broadcast_bytes, ring_bytes
from hpcsync.mpi.collectives.allreduce import LINE_BYTES, Agreed, MeanVector, Said, agreed, mean_vector
from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.tensor_window import Transport
from hpcsync.training.compressor import Compression, as_array, as_tensor


class CompressedMean(MeanVector):
    """Its slices are the whole vector or empty.

    Ranks wait for each other with what they say, patiently, when they have compressed what they give; when that is
    there all are, and nobody waits long.
    """

    def __init__(
        self, comm: MPI.Intracomm, size: int, dtype: torch.dtype, transport: Transport, compression: Compression
    ) -> None:
        self.n_ranks = comm.size
        self.vector = torch.zeros(size, dtype=dtype, device=transport.device)
        self._compression = compression
        self._comm = comm.Dup()
        self._backoff = Backoff(self._comm)

    def mean(self, begin: int, end: int, said: Said) -> Agreed:
        forming = end > begin
        n_bytes = self._prepare() if forming and said.n_steps else 0
        begin_s = time.perf_counter()
        own, words = np.array([*said, n_bytes], np.int64), np.empty((self.n_ranks, len(said) + 1), np.int64)
        saying = self._comm.Iallgather(own, words)
        self._backoff.until(lambda: saying.Test() or None)
        self.absent_s += time.perf_counter() - begin_s
        together = agreed(words[:, :-1])
        if forming and together.n_contributing:
            self._form(words[:, -1], said.n_steps > 0)
        return together

    @abstractmethod
    def _prepare(self) -> int:
        """Of a rank that contributes: compress its vector; bytes that it gives."""

    @abstractmethod
    def _form(self, sizes: np.ndarray, contributing: bool) -> None:
        """Let the vector be the mean. sizes: bytes that each rank gives, shape (n_ranks,)."""

    def free(self) -> None:
        self._comm.Free()


class GatheredMean(CompressedMean):
    """Every rank is given what every one sends. One that does not contribute sends nothing, and its compressor does not
    hear of it."""

    def __init__(
        self, comm: MPI.Intracomm, size: int, dtype: torch.dtype, transport: Transport, compression: Compression
    ) -> None:
        super().__init__(comm, size, dtype, transport, compression)
        self.memory = compression.compressor(comm.rank)
        self._payload = torch.empty(0, dtype=torch.uint8)
        self._image = torch.empty(0, dtype=torch.uint8)  # of all payloads

    @property
    def sent_bytes(self) -> int:
        return broadcast_bytes(self._payload.nbytes, self.n_ranks)

    def _prepare(self) -> int:
        self._payload = self.memory.encode(self.vector, [self._compression.whole])[0]
        return self._payload.nbytes

    def _form(self, sizes: np.ndarray, contributing: bool) -> None:
        if not contributing:
            self._payload = self._payload[:0]
        rooms = sizes + -sizes % LINE_BYTES
        begins = np.cumsum(rooms) - rooms
        if len(self._image) < (end := int(begins[-1] + sizes[-1])):
            self._image = torch.empty(end, dtype=torch.uint8, pin_memory=self.vector.is_cuda)
        own = int(begins[self._comm.rank])
        cuda.copy(self._image[own : own + len(self._payload)], self._payload)
        if self.n_ranks > 1:
            self._comm.Allgatherv(MPI.IN_PLACE, [self._image.numpy(), sizes, begins, MPI.BYTE])
        here = self._image[:end].to(self.vector.device)
        parts = zip(begins.tolist(), sizes.tolist(), strict=True)
        payloads = [here[begin : begin + size] for begin, size in parts if size]
        self._compression.decode_mean(payloads, self.vector)


class FactorsMean(CompressedMean):
    """PowerSGD's factors are averaged as vectors are that are not compressed.

    Where ranks' linear algebra differs so do their bits: P is the same for all, and each makes it orthonormal.
    """

    def __init__(
        self, comm: MPI.Intracomm, size: int, dtype: torch.dtype, transport: Transport, compression: Compression
    ) -> None:
        super().__init__(comm, size, dtype, transport, compression)
        self.memory = compression.averager()
        self._means = [mean_vector(self._comm, max(1, n), dtype, transport) for n in self.memory.factor_sizes]

    @property
    def sent_bytes(self) -> int:
        return ring_bytes(self._compression.nominal_bytes(self._compression.whole), self.n_ranks)

    def _prepare(self) -> int:
        return 0

    def _form(self, sizes: np.ndarray, contributing: bool) -> None:
        """A rank that does not contribute has zeros, and keeps what it has kept."""
        codec, vector, said = self.memory, as_array(self.vector), Said(int(contributing))
        if not contributing and isinstance(codec, ErrorFeedback):
            codec = codec.codec
        left, right = self._means
        lefts = _formed(left, codec.left_factors(vector), said)
        codec.product(_formed(right, codec.right_factors(lefts), said), vector)

    def free(self) -> None:
        for of in self._means:
            of.free()
        super().free()


def _formed(mean: MeanVector, factors: Array, said: Said) -> Array:
    """Of what each rank has, which may be nothing."""
    n = len(factors)
    mean.vector[:n].copy_(as_tensor(factors))
    mean.mean(0, n, said)
    return as_array(mean.vector[:n].clone())


def compressed_mean(
    comm: MPI.Intracomm, size: int, dtype: torch.dtype, transport: Transport, compression: Compression
) -> CompressedMean:
    """Of `size` zeros on every rank, as `mean_vector`; collective. Each rank's compressor begins with it."""
    kind = FactorsMean if compression.averages else GatheredMean
    return kind(comm, size, dtype, transport, compression)
