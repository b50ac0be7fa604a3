"""Buckets of a gradient, by where the ranks are; their means are proved on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from hpcsync.mpi.collectives.bucket_reducer import BucketReducer
from hpcsync.mpi.transport.in_memory import World
from hpcsync.mpi.transport.thread_ranks import run
from hpcsync.training.flat_model import FlatModel

SIZE = 3_000_000  # float32: 12 MB
QUARTERS = [(end - SIZE // 4, end) for end in range(SIZE, 0, -SIZE // 4)]


@pytest.mark.parametrize(
    ("nodes", "bucket_bytes", "buckets"),
    [
        ([0, 0, 0], None, [(0, SIZE)]),
        ([0, 1, 2], None, QUARTERS),
        ([0, 0, 1], None, QUARTERS),
        ([0, 1, 2], 12_000_000, [(0, SIZE)]),
        ([0, 0, 0], 8_000_000, [(1_000_000, SIZE), (0, 1_000_000)]),
    ],
)
def test_buckets_are_smaller_between_nodes(
    nodes: list[int], bucket_bytes: int | None, buckets: list[tuple[int, int]]
) -> None:
    def body(comm: Any) -> list[tuple[int, int]]:
        flat = FlatModel(nn.Linear(SIZE // 3, 3, bias=False))
        formed = []
        with BucketReducer(comm, flat, bucket_bytes) as reducer:
            mean = reducer._mean.mean

            def noted(begin: int, end: int, *own_counts: Any) -> Any:
                formed.append((begin, end))
                return mean(begin, end, *own_counts)

            reducer._mean.mean = noted  # type: ignore[method-assign]
            flat.drop_gradient()
            flat.model.weight.sum().backward()
            reducer.finish()
        return formed

    assert run(len(nodes), body, world=World(len(nodes), nodes)) == [buckets] * len(nodes)
