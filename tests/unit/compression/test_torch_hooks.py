"""PowerSGD and half precision beside the communication hooks that torch ships: two ranks in threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from hpcsync.compression import TensorLayout, create
from tests.unit.compression.vectors import decoded, vector

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")

RANKS, STEPS = 2, 6
LAYOUT = TensorLayout([(30, 40), (30,), (16, 3, 5, 5), (10, 30), (10,), (2, 3)])


class Bucket:
    """Part of torch's GradBucket that a hook uses."""

    def __init__(self, values):
        self.values = torch.from_numpy(values.copy())

    def buffer(self):
        return self.values

    def gradients(self):
        parts = self.values.split(LAYOUT.sizes)
        return [part.view(shape) for part, shape in zip(parts, LAYOUT.shapes, strict=True)]

    def index(self):
        return 0

    def is_last(self):
        return True


@pytest.fixture(scope="module")
def in_group():
    """Return the results of `run(group)` on each rank of a gloo group.

    The groups outlive the calls: gloo's own threads, which call the hooks back, must not be the last to hold one.
    """
    store = dist.HashStore()

    def join(rank):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=200)
        return dist.ProcessGroupGloo(store, rank, RANKS, options)

    with ThreadPoolExecutor(RANKS) as threads:
        groups = list(threads.map(join, range(RANKS)))
        yield lambda run: list(threads.map(run, groups))


def gradients(rank):
    return [vector(100 * rank + step, np.float64, LAYOUT) for step in range(STEPS)]


def all_mean(group, values):
    summed = torch.from_numpy(values.copy())
    group.allreduce([summed]).wait()
    return summed.numpy() / RANKS


def ours(rank_of_matrices, group):
    codec = create("powersgd", LAYOUT, np.float64, rank=rank_of_matrices, seed=7)
    found = gradients(group.rank())
    for gradient in found:
        left = all_mean(group, codec.left_factors(gradient))
        codec.product(all_mean(group, codec.right_factors(left)), gradient)
    return found


def torchs(rank_of_matrices, group, warm_start=True):
    state = PowerSGDState(group, rank_of_matrices, start_powerSGD_iter=2, warm_start=warm_start)
    state.iter = 2
    q = first_qs(rank_of_matrices)
    state.p_memory_dict[0] = torch.empty(rank_of_matrices * (30 + 16 + 10), dtype=torch.float64)
    state.q_memory_dict[0] = torch.from_numpy(q)
    return [powerSGD_hook(state, Bucket(gradient)).wait().numpy() for gradient in gradients(group.rank())]


def first_qs(rank_of_matrices):
    codec = create("powersgd", LAYOUT, np.float64, rank=rank_of_matrices, seed=7, error_feedback=False)
    qs = [codec._orthonormal_q(tensor, np) for tensor in (0, 2, 3)]
    return np.concatenate([q.reshape(-1) for q in qs])


@pytest.mark.parametrize("rank_of_matrices", [1, 2, 3])
def test_powersgd_is_torchs_step_after_step(rank_of_matrices, in_group):
    found = in_group(partial(ours, rank_of_matrices))
    expected = in_group(partial(torchs, rank_of_matrices))
    for rank in range(RANKS):
        for step in range(STEPS):
            assert found[rank][step].tobytes() == found[0][step].tobytes()
            assert np.abs(found[rank][step] - expected[rank][step]).max() < 1e-11
    first = np.mean([gradients(rank)[0] for rank in range(RANKS)], axis=0)
    assert np.abs(found[0][0] - first).max() > 0.1


def test_a_cold_start_would_be_caught(in_group):
    expected = in_group(partial(torchs, 2, warm_start=False))
    found = in_group(partial(ours, 2))
    assert np.abs(found[0][-1] - expected[0][-1]).max() > 1e-2


def test_the_mean_of_halves_is_torchs_but_for_a_rounding(in_group):
    """torch divides before it rounds and adds halves; we add decoded halves."""

    def hook(group):
        return [fp16_compress_hook(group, Bucket(gradient)).wait().numpy() for gradient in gradients(group.rank())]

    expected = in_group(hook)[0]
    codec = create("fp16", LAYOUT, np.float64)
    for step in range(STEPS):
        found = np.mean([decoded(codec, codec.encode(gradients(rank)[step])) for rank in range(RANKS)], axis=0)
        largest = max(np.abs(gradients(rank)[step]).max() for rank in range(RANKS))
        assert np.abs(found - expected[step]).max() <= 2.0**-11 * 2 * largest
        assert (found != expected[step]).any()
