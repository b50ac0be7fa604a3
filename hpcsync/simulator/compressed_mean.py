"""How compressed gradients of all workers become their mean, in one process: the numbers of `mpi.compressed_mean`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hpcsync.compression.codec import Array
from hpcsync.config.job import Job
from hpcsync.training import compressor
from hpcsync.training.compressor import Compression, as_array


class MeanInOneProcess(Protocol):
    """What workers remember from one mean to the next is each one's own."""

    def form(self, workers: Sequence[int], vectors: Sequence[torch.Tensor]) -> Sequence[int]:
        """Let the first of these workers' vectors be their mean. The bytes that each of them gives."""


class PayloadsInOneProcess:
    def __init__(self, compression: Compression, n_workers: int) -> None:
        self._compression = compression
        self._compressors = [compression.compressor(worker) for worker in range(n_workers)]

    def form(self, workers: Sequence[int], vectors: Sequence[torch.Tensor]) -> Sequence[int]:
        of, whole = zip(workers, vectors, strict=True), [self._compression.whole]
        payloads = [self._compressors[worker].encode(vector, whole)[0] for worker, vector in of]
        self._compression.decode_mean(payloads, vectors[0])
        return [payload.nbytes for payload in payloads]


class FactorsInOneProcess:
    def __init__(self, compression: Compression, n_workers: int) -> None:
        self._codecs = [compression.averager() for _ in range(n_workers)]
        self._n_bytes = compression.nominal_bytes(compression.whole)

    def form(self, workers: Sequence[int], vectors: Sequence[torch.Tensor]) -> Sequence[int]:
        of = [(self._codecs[worker], as_array(vector)) for worker, vector in zip(workers, vectors, strict=True)]
        left = _mean([codec.left_factors(vector) for codec, vector in of])
        right = _mean([codec.right_factors(left) for codec, _ in of])
        for codec, vector in of:
            codec.product(right, vector)
        return [self._n_bytes] * len(workers)


def _mean(arrays: Sequence[Array]) -> Array:
    """Added up in this order."""
    return sum(arrays[1:], arrays[0]) / len(arrays)


def compressed_mean(job: Job, parameters: Sequence[torch.nn.Parameter]) -> MeanInOneProcess | None:
    """Of this job's gradients; None where they travel as they are."""
    if (compression := compressor.of_job(job, parameters)) is None:
        return None
    return (FactorsInOneProcess if compression.averages else PayloadsInOneProcess)(compression, job.cluster.workers)
