"""Mean of all workers' compressed gradients in one process.

Computes the numbers of `hpcsync.mpi.collectives.compressed_allreduce`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hpcsync.compression.codec import Array
from hpcsync.config.job import Job
from hpcsync.training import compressor
from hpcsync.training.compressor import Compression, as_array


class MeanInOneProcess(Protocol):
    """Mean of compressed vectors; error feedback is kept per worker between calls."""

    def form(self, workers: Sequence[int], vectors: Sequence[torch.Tensor]) -> Sequence[int]:
        """Write the mean of the vectors into the first of them.

        Parameters
        ----------
        workers
            Numbers of the contributing workers.
        vectors
            Their vectors, each of shape (size,); the first is overwritten by the mean.

        Returns
        -------
        Sequence[int]
            Bytes that each of these workers contributes.
        """


class PayloadsInOneProcess:
    """Mean of payloads that are all-gathered."""

    def __init__(self, compression: Compression, n_workers: int) -> None:
        self._compression = compression
        self._compressors = [compression.compressor(worker) for worker in range(n_workers)]

    def form(self, workers: Sequence[int], vectors: Sequence[torch.Tensor]) -> Sequence[int]:
        """Decode all payloads into their mean."""
        contributions, whole = zip(workers, vectors, strict=True), [self._compression.whole]
        payloads = [self._compressors[worker].encode(vector, whole)[0] for worker, vector in contributions]
        self._compression.decode_mean(payloads, vectors[0])
        return [payload.nbytes for payload in payloads]


class FactorsInOneProcess:
    """Mean by two all-reduced low-rank factors (PowerSGD)."""

    def __init__(self, compression: Compression, n_workers: int) -> None:
        self._codecs = [compression.averager() for _ in range(n_workers)]
        self._n_bytes = compression.nominal_bytes(compression.whole)

    def form(self, workers: Sequence[int], vectors: Sequence[torch.Tensor]) -> Sequence[int]:
        """Form the mean from the means of the left and the right factors."""
        contributions = [
            (self._codecs[worker], as_array(vector)) for worker, vector in zip(workers, vectors, strict=True)
        ]
        left = _mean([codec.left_factors(vector) for codec, vector in contributions])
        right = _mean([codec.right_factors(left) for codec, _ in contributions])
        for codec, vector in contributions:
            codec.product(right, vector)
        return [self._n_bytes] * len(workers)


def _mean(arrays: Sequence[Array]) -> Array:
    """Return the mean, summed in this order."""
    return sum(arrays[1:], arrays[0]) / len(arrays)


def compressed_mean(job: Job, parameters: Sequence[torch.nn.Parameter]) -> MeanInOneProcess | None:
    """Return the mean of this job's gradients, or None if they are not compressed."""
    if (compression := compressor.of_job(job, parameters)) is None:
        return None
    return (FactorsInOneProcess if compression.averages else PayloadsInOneProcess)(compression, job.cluster.workers)
