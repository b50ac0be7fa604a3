"""One rank of two on each host that form means: python -m mpi4py averaging.py OUT.json

The vectors have 4 MB. First one rank of each host forms means, then all ranks do. Rank 0 leaves in OUT.json, for
both and each class of mean, its name, whether all ranks have the right mean with the same bits, how often its host's
cable has brought and taken a large vector for one mean, and the seconds of it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from mpi4py import MPI

from hpcsync.mpi.collectives.allreduce import MeanVector, RingMean, mean_vector
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.tensor_window import HOST
from hpcsync.paradigms.peer_method import StepCounts
from tests.hosts.counted import cable

SIZE, SHORT = 1_000_000, 1000
REPETITIONS = 5


def is_right(comm: MPI.Intracomm, mean: MeanVector, begin: int, end: int) -> bool:
    """Form the mean of a slice; whether it is right, and the rest as before."""
    own = [torch.arange(SIZE) % 1000 * (rank + 1) + 0.1 for rank in range(comm.size)]
    expected = own[comm.rank].clone()
    expected[begin:end] = sum(vector[begin:end] for vector in own) / comm.size
    mean.vector.copy_(own[comm.rank])
    mean.mean(begin, end, StepCounts())
    bits = comm.allgather(mean.vector[begin:end].numpy().tobytes())
    return torch.allclose(mean.vector, expected, rtol=1e-5) and len(set(bits)) == 1


def seen(comm: MPI.Intracomm, mean: MeanVector) -> list:
    slices = [(0, SIZE), (0, 0), (0, SHORT), (SIZE - 1, SIZE), (17, SIZE // 2)]
    right = min([is_right(comm, mean, *part) for part in slices])
    comm.Barrier()
    before, begin_s = cable(), time.perf_counter()
    for _ in range(REPETITIONS):
        mean.mean(0, SIZE, StepCounts())
    took_s = (time.perf_counter() - begin_s) / REPETITIONS
    comm.Barrier()  # what this rank has sent may still be under way
    moved = [(b - a) / (REPETITIONS * mean.vector.nbytes) for a, b in zip(before, cable(), strict=True)]
    comm.Barrier()
    mean.free()
    return [type(mean).__name__, comm.allreduce(right, MPI.LAND), *moved, took_s]


def of_each_class(comm: MPI.Intracomm) -> list:
    found = [seen(comm, mean_vector(comm, SIZE, torch.float32))]
    found.append(seen(comm, RingMean(comm, SIZE, torch.float32, HOST, Backoff(comm))))
    return found


def main(out: str) -> None:
    comm, found = MPI.COMM_WORLD, []
    backoff, one_of_each = Backoff(comm), comm.Split(comm.rank % 2)
    if comm.rank % 2 == 0:
        found.append(of_each_class(one_of_each))
    backoff.barrier()
    found.append(of_each_class(comm))
    if comm.rank == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
