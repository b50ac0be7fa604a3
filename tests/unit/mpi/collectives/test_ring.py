"""Ring all-reduce: the bits that its order of summation says, on all ranks, for every size and chunk."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcsync.mpi.collectives import allreduce, ring
from hpcsync.mpi.collectives.allreduce import NodesMean, RingMean, SharedMean, mean_vector
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.in_memory import World
from hpcsync.mpi.transport.thread_ranks import run
from hpcsync.paradigms.peer_method import Agreed, StepCounts

SIZES = (0, 1, 2, 3, 7, 64, 1001)


def noise(rank, size, dtype=np.float32):
    return np.random.default_rng(rank).standard_normal(size).astype(dtype)


def in_ring_order(arrays, per_segment, divisor):
    """What a ring gives: the sum of segment s begins with rank s."""
    n, size = len(arrays), len(arrays[0])
    result = np.empty_like(arrays[0])
    for i in range(n * per_segment):
        part = slice(size * i // (n * per_segment), size * (i + 1) // (n * per_segment))
        total = arrays[i // per_segment][part]
        for step in range(1, n):
            total = total + arrays[(i // per_segment + step) % n][part]
        result[part] = total / divisor
    return result


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("chunk_bytes", "in_flight"), [(1, 1), (16, 3), (100, 8), (1 << 16, 8)])
def test_the_result_is_the_sum_in_the_order_of_the_ring(comm, needs, monkeypatch, dtype, chunk_bytes, in_flight):
    needs(2)
    monkeypatch.setattr(ring, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(ring, "IN_FLIGHT", in_flight)
    backoff = Backoff(comm)
    for size in SIZES if chunk_bytes > 1 else SIZES[:-1]:
        arrays = [noise(rank, size, dtype) for rank in range(comm.size)]
        mine = arrays[comm.rank].copy()
        ring.ring_mean(comm, mine, 3, lambda request: backoff.complete(request.Test))
        per_segment = max(1, -(-mine.nbytes // (comm.size * chunk_bytes)))
        assert mine.tobytes() == in_ring_order(arrays, per_segment, 3).tobytes()
        if size > 100 and comm.size > 2:
            assert mine.tobytes() != (sum(arrays[1:], arrays[0]) / 3).astype(dtype).tobytes(), "other than of ranks"


@pytest.mark.parametrize("broken", [False, True])
def test_chunks_are_waited_for(comm, needs, monkeypatch, broken):
    """Negative control: a rank that adds before a chunk has arrived."""
    needs(2)
    monkeypatch.setattr(ring, "CHUNK_BYTES", 64)
    mine = np.full(1000, comm.rank + 1.0)
    if broken and comm.rank == 0:
        comm.Barrier()  # the others have ended before this rank sends
    ring.ring_mean(comm, mine, 1, (lambda request: None) if broken else (lambda request: request.Wait()))
    if not broken or comm.rank > 0:
        comm.Barrier()
    wrong = comm.allreduce(int((mine != comm.size * (comm.size + 1) / 2).any()))
    assert (wrong > 0) is broken


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [([0, 0, 0], SharedMean), ([0, 1, 2, 3], RingMean), ([0, 0, 1, 1], NodesMean), ([0, 1, 1, 2, 0, 2, 2], NodesMean)],
    ids=str,
)
@pytest.mark.parametrize("segment_bytes", [0, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_on_any_nodes(monkeypatch, nodes, kind, segment_bytes, dtype):
    monkeypatch.setattr(allreduce, "SEGMENT_BYTES", segment_bytes)
    monkeypatch.setattr(ring, "CHUNK_BYTES", 256)
    n, size = len(nodes), 1000

    def body(comm):
        mean = mean_vector(comm, size, dtype)
        assert type(mean) is kind
        seen = []
        for begin, end in [(0, size), (3, 5), (7, 7), (999, 1000), (100, 900)]:
            mean.vector[:] = torch.arange(size) + 100 * comm.rank
            idle = comm.rank == n - 1 and (begin, end) == (3, 5)
            if idle:
                mean.vector.zero_()
            counts = StepCounts(int(not idle), 2, stop=comm.rank == 1)
            contributing = n - ((begin, end) == (3, 5))
            assert mean.mean(begin, end, counts) == Agreed(contributing, contributing, 2 * n, True)
            expected = torch.zeros(size, dtype=dtype) if idle else (torch.arange(size) + 100 * comm.rank).to(dtype)
            others = sum((torch.arange(size) + 100 * rank).to(dtype) for rank in range(contributing))
            expected[begin:end] = (others / contributing)[begin:end]
            torch.testing.assert_close(mean.vector, expected)
            seen.append(mean.vector[begin:end].clone())
        mean.vector[:] = torch.from_numpy(noise(comm.rank, size))
        mean.mean(0, size, StepCounts())
        seen.append(mean.vector.clone())
        mean.free()
        return torch.cat(seen).numpy().tobytes()

    assert len(set(run(n, body, world=World(n, nodes)))) == 1, "the same bits everywhere"


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_more_nodes_the_longer_a_slice_must_be_for_a_ring(monkeypatch, n):
    rings = []
    monkeypatch.setattr(allreduce, "ring_mean", lambda comm, array, *_: rings.append(array.nbytes))
    least = n * allreduce.SEGMENT_BYTES

    def body(comm):
        mean = mean_vector(comm, least // 4, torch.float32)
        for size in (least // 4, least // 4 - 1):
            mean.mean(0, size, StepCounts())
        mean.free()

    run(n, body, world=World(n, list(range(n))))
    assert rings == [least] * n


@pytest.mark.parametrize("broken", [None, "_arrived", "_left"])
def test_ranks_of_a_node_wait_for_each_other(monkeypatch, broken):
    """Negative control: a rank that does not wait misses what is summed, or takes a result that is not there yet."""
    meet = SharedMean._meet

    def hurried(self, counters):
        if broken and counters is getattr(self, broken):
            counters[self._rank][0] = self._turn
        else:
            meet(self, counters)

    monkeypatch.setattr(SharedMean, "_meet", hurried)

    def body(comm):
        mean = mean_vector(comm, 1000, torch.float64)
        wrong = 0
        for step in range(20):
            comm.Barrier()
            mean.vector[:] = comm.rank + step
            mean.mean(0, 1000, StepCounts())
            wrong += not (mean.vector == step + (comm.size - 1) / 2).all()
        comm.Barrier()
        return wrong

    assert (sum(run(5, body, world=World(5, [0, 1, 0, 1, 1]))) > 0) is (broken is not None)
