"""How compressed gradients of all workers become their mean, in one process: the numbers of `mpi.compressed_mean`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hpcsync.job import Job
from hpcsync.learning import compressing
from hpcsync.learning.compressed_mean import Factors, has_factors, mean_of_payloads, next_of
from hpcsync.learning.compressing import Compression


class CompressedMean(Protocol):
    """What workers remember from one mean to the next is each one's own."""

    def form(self, workers: Sequence[int], vectors: Sequence[torch.Tensor]) -> Sequence[int]:
        """Let the first of these workers' vectors be their mean. The bytes that each of them gives."""


class GatheredMean:
    def __init__(self, compression: Compression, n_workers: int) -> None:
        self._compression = compression
        self._compressors = [compression.compressor(worker) for worker in range(n_workers)]

    def form(self, workers: Sequence[int], vectors: Sequence[torch.Tensor]) -> Sequence[int]:
        of = zip(workers, vectors, strict=True)
        payloads = [self._compressors[worker].encode(vector, [slice(0, len(vector))])[0] for worker, vector in of]
        mean_of_payloads(self._compression, payloads, vectors[0])
        return [payload.nbytes for payload in payloads]


class FactorsMean:
    def __init__(self, compression: Compression, n_workers: int) -> None:
        self._compression = compression
        self._factors = [Factors(compression) for _ in range(n_workers)]

    def form(self, workers: Sequence[int], vectors: Sequence[torch.Tensor]) -> Sequence[int]:
        parts = [self._factors[worker].averaging(vector) for worker, vector in zip(workers, vectors, strict=True)]
        mean = None
        while given := [tensor for part in parts if (tensor := next_of(part, mean)) is not None]:
            mean = given[0].clone()
            for other in given[1:]:
                mean.add_(other)
            if len(given) > 1:
                mean.div_(len(given))
        return [self._compression.nominal_bytes(slice(0, len(vectors[0])))] * len(workers)


def compressed_mean(job: Job, parameters: Sequence[torch.nn.Parameter]) -> CompressedMean | None:
    """Of this job's gradients; None where they travel as they are."""
    if (compression := compressing.of_job(job, parameters)) is None:
        return None
    return (FactorsMean if has_factors(compression) else GatheredMean)(compression, job.cluster.workers)
