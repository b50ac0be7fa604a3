"""The mean gradient of all ranks: exact, the same bits everywhere, and formed while the backward pass runs."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

from hpcsync.mpi.collectives import allreduce, bucket_reducer, ring
from hpcsync.mpi.collectives.allreduce import MpiMean, NodesMean, RingMean, SharedMean
from hpcsync.mpi.collectives.bucket_reducer import BucketReducer
from hpcsync.mpi.transport import shm_budget
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.tensor_window import Transport
from hpcsync.paradigms.peer_method import Agreed, StepCounts
from hpcsync.training.flat_model import FlatModel

LAYERS = 4
SIZE = LAYERS * (5 * 5 + 5)
TINY, MIDDLE, LARGE = 8, 8 * 17, 1 << 20


@pytest.fixture(
    params=["fastest", "fastest, staged", "mpi", "ring", "ring, staged", "nodes", "nodes, staged"], autouse=True
)
def way(request, monkeypatch):
    """Every test, in shared memory where there is such, by MPI's own all-reduce, around a ring, and as if even and odd
    ranks were on two nodes; from images as well.
    """
    way, _, kind = request.param.partition(", ")

    def make(comm, size, dtype, _):
        of = size, dtype, Transport(kind or "host")
        if way == "fastest":
            return allreduce.mean_vector(comm, *of)
        if way == "nodes":
            return NodesMean(comm, *of, Backoff(comm), comm.Split(comm.rank % 2, comm.rank))
        return {"mpi": MpiMean, "ring": RingMean}[way](comm, *of, Backoff(comm))

    monkeypatch.setattr(allreduce, "SEGMENT_BYTES", 0)
    monkeypatch.setattr(ring, "CHUNK_BYTES", 32)

    monkeypatch.setattr(bucket_reducer, "mean_vector", make)
    return way


def make(dtype=torch.float64):
    torch.manual_seed(1)
    return FlatModel(nn.Sequential(*(nn.Linear(5, 5) for _ in range(LAYERS))).to(dtype))


def known(rank, step=0):
    """The gradient that `backward` gives a rank: integers that no type rounds."""
    return torch.arange(SIZE, dtype=torch.float64) * (rank + 1) + 7 * step


def backward(flat, gradient, used=slice(None)):
    """A backward pass whose gradient is this, exactly."""
    parts = gradient.to(flat.gradient.dtype).split([p.numel() for p in flat.parameters])
    terms = [(p * part.view(p.shape)).sum() for p, part in zip(flat.parameters, parts, strict=True)]
    sum(terms[used]).backward()


def mean_of(gradients):
    return sum(gradients) / len(gradients)


def equal_everywhere(comm, tensor):
    return len(set(comm.allgather(tensor.numpy().tobytes()))) == 1


@pytest.mark.parametrize("bucket_bytes", [TINY, MIDDLE, LARGE])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("clear", [FlatModel.zero_gradient, FlatModel.drop_gradient])
def test_the_mean_is_exact(comm, bucket_bytes, overlap, clear):
    flat = make()
    with BucketReducer(comm, flat, bucket_bytes, overlap=lambda: overlap) as reducer:
        for step in range(3):
            clear(flat)
            backward(flat, known(comm.rank, step))
            assert reducer.finish() == Agreed(comm.size, comm.size, 0, False)
            assert torch.equal(flat.gradient, mean_of([known(rank, step) for rank in range(comm.size)]))
    assert torch.equal(flat.gradient, mean_of([known(rank, 2) for rank in range(comm.size)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bucket_bytes", [MIDDLE, LARGE])
def test_all_ranks_have_the_same_bits_and_have_them_again(comm, dtype, bucket_bytes):
    noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(comm.rank), dtype=torch.float64)
    results = []
    flat = make(dtype)
    with BucketReducer(comm, flat, bucket_bytes) as reducer:
        for _ in range(3):
            flat.drop_gradient()
            backward(flat, noise)
            assert comm.size == 1 or not equal_everywhere(comm, noise)  # the control
            reducer.finish()
            assert equal_everywhere(comm, flat.gradient)
            results.append(flat.gradient.clone())
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("bucket_bytes", [TINY, LARGE])
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_are_weighted_by_their_ranks(comm, bucket_bytes, overlap):
    """Weights are powers of two, so that the result is exact; autograd may have no part in a gradient, and weights may
    change.
    """
    flat = make()
    with BucketReducer(comm, flat, bucket_bytes, overlap=lambda: overlap) as reducer:
        for step in range(4):
            reducer.weight = 1.0 if step == 3 else 2.0 ** (comm.rank - step)
            flat.drop_gradient()
            if step == 1:
                for parameter, part in zip(flat.parameters, known(comm.rank, step).split(parts(flat)), strict=True):
                    parameter.grad = part.view(parameter.shape).clone()
            else:
                backward(flat, known(comm.rank, step))
            reducer.finish()
            weights = [1.0 if step == 3 else 2.0 ** (rank - step) for rank in range(comm.size)]
            assert torch.equal(flat.gradient, mean_of([w * known(rank, step) for rank, w in enumerate(weights)]))
            assert (
                comm.size == 1
                or step == 3
                or not torch.equal(flat.gradient, mean_of([known(rank, step) for rank in range(comm.size)]))
            )


def parts(flat):
    return [p.numel() for p in flat.parameters]


def test_the_gradient_of_a_script_that_replaces_it(comm):
    flat = make()
    with BucketReducer(comm, flat, MIDDLE) as reducer:
        for parameter in flat.parameters:
            parameter.grad = torch.ones_like(parameter)
        backward(flat, known(comm.rank))  # adds to the script's own
        reducer.finish()
        assert torch.equal(flat.gradient, mean_of([known(rank) + 1 for rank in range(comm.size)]))
        assert all(p.grad.untyped_storage().data_ptr() == flat.gradient.untyped_storage().data_ptr()
                   for p in flat.parameters)  # fmt: skip


@pytest.mark.parametrize("used", [slice(0, 3), slice(5, None), slice(2, 4)])
def test_parameters_without_part_in_the_loss(comm, used):
    flat = make()
    with BucketReducer(comm, flat, MIDDLE) as reducer:
        flat.gradient.fill_(9.0)
        flat.drop_gradient()
        backward(flat, known(comm.rank), used)
        reducer.finish()
        expected = torch.zeros(SIZE, dtype=torch.float64)
        sizes = [p.numel() for p in flat.parameters]
        for part, whole in list(
            zip(expected.split(sizes), mean_of([known(rank) for rank in range(comm.size)]).split(sizes), strict=True)
        )[used]:
            part.copy_(whole)
        assert torch.equal(flat.gradient, expected)


def test_ranks_that_use_different_parameters(comm):
    """The order of launches is the same nevertheless."""
    flat = make()
    used = slice(0, 4) if comm.rank % 2 else slice(4, None)
    with BucketReducer(comm, flat, TINY) as reducer:
        flat.drop_gradient()
        backward(flat, torch.ones(SIZE), used)
        reducer.finish()
        odd = comm.size // 2
        assert flat.gradient[0] == odd / comm.size
        assert flat.gradient[-1] == (comm.size - odd) / comm.size


def test_a_second_backward_before_finish_is_refused(comm, needs):
    needs(2)
    flat = make()
    with BucketReducer(comm, flat, MIDDLE) as reducer:
        backward(flat, known(comm.rank))
        with pytest.raises(RuntimeError, match="second backward pass before .* call finish"):
            backward(flat, known(comm.rank))
        reducer.finish()
        flat.zero_gradient()
        backward(flat, known(comm.rank))  # after finish() it is allowed
        reducer.finish()
        assert torch.equal(flat.gradient, mean_of([known(rank) for rank in range(comm.size)]))


def test_without_overlap_backward_passes_add_up(comm):
    flat, passes = make(), []
    with BucketReducer(comm, flat, MIDDLE, overlap=lambda: len(passes) > 0) as reducer:
        flat.zero_gradient()
        backward(flat, known(comm.rank, 1))
        passes.append(1)
        backward(flat, known(comm.rank, 2))
        reducer.finish()
        expected = mean_of([known(rank, 1) + known(rank, 2) for rank in range(comm.size)])
        assert torch.equal(flat.gradient, expected)
        backward(flat, known(comm.rank, 3))  # not cleared: the next mean is added
        reducer.finish()
        assert torch.equal(flat.gradient, expected + mean_of([known(rank, 3) for rank in range(comm.size)]))


@pytest.mark.parametrize("bucket_bytes", [MIDDLE, LARGE])
def test_ranks_without_a_batch_take_part_until_no_rank_has_one(comm, bucket_bytes):
    flat = make()
    with BucketReducer(comm, flat, bucket_bytes) as reducer:
        step = 0
        while True:
            flat.gradient.fill_(5.0)  # an idle rank's gradient must not count
            contributing = step <= comm.rank
            if contributing:
                flat.drop_gradient()
                backward(flat, known(comm.rank, step))
            agreed = reducer.finish(StepCounts(int(contributing)))
            if agreed.n_contributing == 0:
                break
            assert agreed.n_contributing == comm.size - step
            assert torch.equal(flat.gradient, mean_of([known(rank, step) for rank in range(step, comm.size)]))
            step += 1
        assert step == comm.size
        assert not flat.gradient.any()


def test_a_rank_cannot_withdraw_what_it_has_launched(comm, needs):
    needs(2)
    flat = make()
    with BucketReducer(comm, flat, MIDDLE) as reducer:
        backward(flat, known(comm.rank))
        with pytest.raises(RuntimeError, match="launched gradients"):
            reducer.finish(StepCounts(0))
        reducer.finish()


def test_one_rank_stops_all_at_the_same_step(comm):
    flat = make()
    with BucketReducer(comm, flat, MIDDLE) as reducer:
        steps = []
        for step in range(10):
            backward(flat, known(comm.rank))
            if reducer.finish(StepCounts(stop=comm.rank == comm.size - 1 and step == 3)).stop:
                break
            steps.append(step)
    assert steps == [0, 1, 2]


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, during):
        ctx.during = during
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.during()
        return gradient, None


@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_are_reduced_while_the_backward_pass_runs(comm, needs, overlap):
    needs(2)
    flat = make()
    first, *rest = flat.model
    with BucketReducer(comm, flat, 8 * 30, overlap=lambda: overlap) as reducer:
        seen = []

        def during():
            deadline = time.monotonic() + (100 if overlap else 0.2)
            while reducer.n_reduced < LAYERS - 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(reducer.n_reduced)

        nn.Sequential(*rest)(Slow.apply(first(torch.ones(1, 5, dtype=torch.float64)), during)).sum().backward()
        reducer.finish()
        assert seen == [LAYERS - 1 if overlap else 0]
        assert reducer.reduced.comm_s > 0


@pytest.mark.parametrize("padded", [True, False])
def test_buckets_are_reduced_while_a_computation_is_padded(comm, needs, padded):
    """All but the last, each once its share is complete; without a call, none: the control."""
    needs(2)
    flat, shares, seen = make(), [], []
    with BucketReducer(comm, flat, MIDDLE, overlap=lambda: False) as reducer:
        n_early = len(range(flat.size, 0, -(MIDDLE // 8))) - 1
        for step in range(2):
            flat.drop_gradient()
            backward(flat, known(comm.rank, step))
            if padded:
                reducer.launch_padded(shares.append)
            deadline = time.monotonic() + (100 if padded else 0.2)
            while reducer.n_reduced < n_early and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(reducer.n_reduced)
            reducer.finish()
            assert torch.equal(flat.gradient, mean_of([known(rank, step) for rank in range(comm.size)]))
    assert n_early > 0 and seen == [n_early if padded else 0] * 2
    each = [(MIDDLE // 8) * bucket / flat.size for bucket in range(1, n_early + 1)]
    assert shares == (pytest.approx(2 * each) if padded else [])


def test_finish_waits_for_the_slowest_and_measures_it(comm, needs):
    needs(2)
    flat = make()
    with BucketReducer(comm, flat, MIDDLE) as reducer:
        if comm.rank == 0:
            comm.gather(None)
            time.sleep(1)
        backward(flat, known(comm.rank))
        if comm.rank > 0:
            comm.gather(None)
        used_s = time.process_time()
        reducer.finish()
        used_s = time.process_time() - used_s
        if comm.rank > 0:
            assert reducer.reduced.waited_s > 0.1


def test_without_calls_from_several_threads_everything_waits_for_finish(comm, monkeypatch):
    monkeypatch.setattr(bucket_reducer.MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    threads = threading.active_count()
    flat = make()
    with BucketReducer(comm, flat, MIDDLE) as one:
        assert not one._can_overlap and threading.active_count() == threads
        backward(flat, known(comm.rank))
        assert one.n_reduced == 0
        one.finish()
        assert torch.equal(flat.gradient, mean_of([known(rank) for rank in range(comm.size)]))


# ---- at the end of backward ----


def test_the_gradient_may_be_the_mean_when_backward_returns(comm):
    flat, finished = make(), []
    with BucketReducer(comm, flat, MIDDLE, lambda: finished.append(reducer.finish())) as reducer:
        for step in range(3):
            flat.drop_gradient()
            backward(flat, known(comm.rank, step))
            assert len(finished) == step + 1
            assert torch.equal(flat.gradient, mean_of([known(rank, step) for rank in range(comm.size)]))


def test_an_exception_at_the_end_propagates_from_backward(comm):
    flat = make()

    def refuse():
        raise ArithmeticError("not this one")

    calls = [refuse, lambda: reducer.finish()]
    with BucketReducer(comm, flat, MIDDLE, lambda: calls.pop(0)()) as reducer:
        with pytest.raises(ArithmeticError, match="not this one"):
            backward(flat, known(comm.rank))
        reducer.finish()
        flat.zero_gradient()
        backward(flat, known(comm.rank))  # the next one is not affected
        assert calls == []
        assert torch.equal(flat.gradient, mean_of([known(rank) for rank in range(comm.size)]))


# ---- ending ----


def test_closing_without_a_step_and_twice(comm):
    before = threading.active_count()
    flat = make()
    reducer = BucketReducer(comm, flat, MIDDLE)
    reducer.close()
    reducer.close()
    assert threading.active_count() == before
    flat.zero_gradient()
    backward(flat, known(comm.rank))  # no hook is left, and the memory is there
    assert torch.equal(flat.gradient, known(comm.rank))
    with pytest.raises(RuntimeError, match="after close"):
        reducer.finish()


def test_closing_with_launched_buckets(comm):
    flat = make()
    with BucketReducer(comm, flat, TINY):
        backward(flat, known(comm.rank))


def test_a_failure_on_one_rank_propagates_without_waiting_for_others(comm):
    flat = make()
    if comm.rank == 0:
        with pytest.raises(ArithmeticError), BucketReducer(comm, flat, MIDDLE):
            raise ArithmeticError
    else:
        BucketReducer(comm, flat, MIDDLE)


# ---- the implementation ----


def test_shared_memory_is_used_on_one_node_if_there_is_room(comm, monkeypatch):
    mean = allreduce.mean_vector(comm, 10, torch.float32)
    assert type(mean) is (SharedMean if comm.size > 1 else MpiMean)
    mean.free()
    mean = allreduce.mean_vector(comm, 10, torch.float32)
    mean.free()
    monkeypatch.setattr(shm_budget, "SPARE_BYTES", 1 << 60)
    mean = allreduce.mean_vector(comm, 10, torch.float32)
    assert type(mean) is MpiMean
    mean.free()


@pytest.mark.parametrize("broken", [None, "arrived", "left"])
def test_both_synchronisations_are_needed(comm, needs, broken, way, monkeypatch):
    """Negative control: a rank that does not wait reads data that is missing, or uses an incomplete mean."""
    needs(2)
    if way != "fastest":
        pytest.skip("shared memory only")
    meet = SharedMean._meet

    def hurried(self, counters):
        if counters is {"arrived": self._arrived, "left": self._left}.get(broken):
            counters[self._rank][0] = self._turn
        else:
            meet(self, counters)

    monkeypatch.setattr(SharedMean, "_meet", hurried)
    mean = allreduce.mean_vector(comm, 1000, torch.float64)
    wrong = 0
    for step in range(5):
        comm.Barrier()
        mean.vector[:] = -1
        comm.Barrier()
        if comm.rank == 0:
            time.sleep(0.02)
        mean.vector[:] = comm.rank + step
        mean.mean(0, 1000, StepCounts())
        wrong += not (mean.vector == step + (comm.size - 1) / 2).all()
    comm.Barrier()
    assert (comm.allreduce(wrong) > 0) == (broken is not None)
    mean.free()


@pytest.mark.parametrize("broken", [False, True])
def test_every_rank_adds_its_part_in_a_ring(comm, needs, broken, way, monkeypatch):
    """Negative control: one rank passes on what it receives without adding to it."""
    needs(2)
    if way != "ring":
        pytest.skip("around a ring only")
    if broken and comm.rank == 1:
        monkeypatch.setattr(ring.np, "add", lambda part, total, out: np.copyto(out, part))
    mean = RingMean(comm, 1000, torch.float64, Transport("host"), Backoff(comm))
    mean.vector[:] = comm.rank
    mean.mean(0, 1000, StepCounts())
    assert (comm.allreduce(int((mean.vector != (comm.size - 1) / 2).sum())) > 0) == broken
    mean.free()
