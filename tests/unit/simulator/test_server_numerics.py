"""The numbers of all ranks in one process equal those of separate ranks."""

import itertools
import math

import pytest
import torch
from torch import nn

from hpcsync.core.coordinator import UpdateCommand
from hpcsync.simulator.gradients import NEXT
from hpcsync.simulator.server_numerics import NoNumerics, Numerics
from hpcsync.training.gradient import worker_seed
from hpcsync.training.sampler import batches
from hpcsync.workloads.registry import Workload, build
from tests.unit.jobs import LINEAR, make_job
from tests.unit.simulator.running import TIMING


def linear(workers=2):
    job = make_job(workload=LINEAR, cluster={"workers": workers})
    return job, build(job)


def gradient_alone(job, worker: int, weights: torch.Tensor, iteration: int = 1) -> torch.Tensor:
    """Return the gradient of the worker's iteration at these weights, by plain PyTorch."""
    workload = build(job)
    mine = batches(workload.train, job.seed, worker, n_workers=job.cluster.workers, batch_size=4, epochs=range(100))
    (parameter,) = workload.model.parameters()
    with torch.no_grad():
        parameter.copy_(weights.view(parameter.shape))
    workload.loss(workload.model, *next(itertools.islice(mine, iteration - 1, None))).backward()
    return parameter.grad.flatten()


def weights_of(numbers: Numerics, workload: Workload) -> torch.Tensor:
    numbers.finish(())
    return next(workload.model.parameters()).detach().flatten().clone()


def test_a_gradient_is_of_the_granted_version():
    job, workload = linear()
    numbers = Numerics(job, workload)
    first = weights_of(numbers, workload)
    numbers.grant(0)
    numbers.grant(1)
    numbers.contribute(0, NEXT)
    numbers.apply(UpdateCommand((0,), (1.0,), 1.0, lr=0.5))
    second = weights_of(numbers, workload)
    numbers.contribute(1, NEXT)  # from the first version, although the second is current
    numbers.apply(UpdateCommand((1,), (1.0,), 1.0, lr=0.5))
    third = weights_of(numbers, workload)
    assert torch.allclose(second, first - 0.5 * gradient_alone(job, 0, first), rtol=0, atol=1e-14)
    assert torch.allclose(third, second - 0.5 * gradient_alone(job, 1, first), rtol=0, atol=1e-14)
    assert not torch.allclose(third, second - 0.5 * gradient_alone(job, 1, second), rtol=0, atol=1e-3)


def test_a_worker_goes_through_its_own_batches():
    job, workload = linear()
    numbers = Numerics(job, workload)
    first = weights_of(numbers, workload)
    numbers.grant(1)
    numbers.contribute(1, NEXT)
    numbers.grant(1)
    numbers.contribute(1, NEXT)
    numbers.apply(UpdateCommand((1,), (1.0,), 1.0, lr=1.0))
    step = first - weights_of(numbers, workload)
    assert torch.allclose(step, gradient_alone(job, 1, first, iteration=2), rtol=0, atol=1e-14)
    assert not torch.allclose(step, gradient_alone(job, 1, first, iteration=1), rtol=0, atol=1e-3)


class Noisy(nn.Module):
    """One weight, one random draw per forward pass, and a running statistic."""

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.in_place = in_place
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros(1))
        self.drawn: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drawn.append(float(torch.rand(1)))
        if self.in_place:
            self.seen += x.sum()
        else:
            self.seen = self.seen + x.sum()
        return self.weight * x


def noisy(workers: int, in_place: bool = True):
    job, workload = linear(workers)
    return job, Workload(Noisy(in_place), lambda model, x, y: model(x).sum(), workload.train, None)


@pytest.mark.parametrize("order", [[0, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0]], ids=str)
def test_every_worker_draws_from_its_own_generator(order):
    job, workload = noisy(2)
    numbers = Numerics(job, workload)
    drawn = {0: [], 1: []}
    for worker in order:
        numbers.contribute(worker, NEXT)
        drawn[worker].append(workload.model.drawn[-1])
    for worker in (0, 1):
        torch.manual_seed(worker_seed(job.seed, worker))  # as a rank does
        assert drawn[worker] == [float(torch.rand(1)) for _ in range(2)]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("in_place", [True, False])
def test_running_statistics_end_as_those_of_worker_0s_latest_push(in_place):
    job, workload = noisy(2, in_place)
    numbers = Numerics(job, workload)
    for worker in (0, 1, 1, 0):
        numbers.contribute(worker, NEXT)
        numbers.delivered(worker)
    numbers.contribute(0, NEXT)  # its push does not arrive
    numbers.finish([0, 1])
    mine = batches(workload.train, job.seed, 0, n_workers=2, batch_size=4, epochs=range(9))
    of_worker_0 = sum(x.sum() for x, _ in itertools.islice(mine, 2))
    assert torch.allclose(workload.model.seen.double(), of_worker_0, atol=1e-5)


def test_without_arithmetic_nothing_is_stored():
    job = make_job(workload=TIMING | {"parameters": 10**9}, cluster={"workers": 1000})
    numbers = NoNumerics(job, Workload(nn.Linear(1, 1), None, None, None))
    assert isinstance(numbers, NoNumerics)
    numbers.grant(0)
    contributed = numbers.contribute(0, NEXT)
    assert math.isnan(contributed.loss) and math.isnan(contributed.gradient_sq)
    assert contributed.sizes_bytes == [8], "of that one parameter and its bias"
    numbers.apply(UpdateCommand((0,), (1.0,), 1.0, lr=1.0))
