"""How compressed gradients of all workers become their mean, in one process: the numbers of `mpi.compressed_mean`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier, BrokenBarrierError
from typing import Protocol

import torch

from hpcsync.job import Job
from hpcsync.job_compression import Dense
from hpcsync.learning import compressing
from hpcsync.learning.compressed_mean import Factors, has_factors, mean_of_payloads
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
    """Workers meet in the middle of what they compute: each is a thread for as long."""

    def __init__(self, compression: Compression, n_workers: int) -> None:
        self._compression = compression
        self._factors = [Factors(compression) for _ in range(n_workers)]

    def form(self, workers: Sequence[int], vectors: Sequence[torch.Tensor]) -> Sequence[int]:
        meeting = _Meeting(len(workers))

        def part(place: int) -> None:
            try:
                self._factors[workers[place]].mean(vectors[place], partial(meeting.mean, place))
            except BrokenBarrierError:  # because of another one, which says why
                return
            except BaseException:
                meeting.call_off()
                raise

        with ThreadPoolExecutor(len(workers)) as threads:
            list(threads.map(part, range(len(workers))))
        return [self._compression.nominal_bytes(slice(0, len(vectors[0])))] * len(workers)


class _Meeting:
    """Threads that wait for each other, to have the mean of what each of them gives."""

    def __init__(self, n: int) -> None:
        self._given: list[torch.Tensor] = [torch.empty(0)] * n
        self._mean = torch.empty(0)
        self._barrier = Barrier(n, self._form)

    def mean(self, place: int, given: torch.Tensor) -> torch.Tensor:
        self._given[place] = given
        self._barrier.wait()
        return self._mean  # nobody forms the next one before all have this one

    def call_off(self) -> None:
        self._barrier.abort()

    def _form(self) -> None:
        self._mean = self._given[0].clone()
        for other in self._given[1:]:
            self._mean.add_(other)
        if len(self._given) > 1:
            self._mean.div_(len(self._given))


def compressed_mean(job: Job, parameters: Sequence[torch.nn.Parameter]) -> CompressedMean | None:
    """Of this job's gradients; None where they travel as they are."""
    if (compression := compressing.of_job(job, parameters)) is None:
        return None
    return (FactorsMean if has_factors(compression) else GatheredMean)(compression, job.cluster.workers)


def encode_s(job: Job, n_bytes: int) -> float:
    """What a worker takes to compress so many."""
    speed = None if isinstance(job.compression, Dense) else job.compression.gbytes_per_s
    return n_bytes / (1e9 * speed) if speed else 0.0
