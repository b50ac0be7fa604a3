"""The numbers of all workers in one process equal those of separate ranks."""

import itertools
import math

import pytest
import torch
from torch import nn

from hpcsync.simulator.gradients import Work
from hpcsync.simulator.peer_numerics import (
    NullAllReduce,
    NullReplicas,
    OneReplica,
    Replicas,
    all_reduce_numerics,
    replica_numerics,
)
from hpcsync.training.gradient import worker_seed
from hpcsync.training.sampler import batches, sequence_indices
from hpcsync.workloads.registry import Workload, build
from tests.unit.jobs import make_job
from tests.unit.simulator.running import TIMING
from tests.unit.simulator.test_server_numerics import Noisy

PUSH = {"name": "gossip", "mode": "push"}
PUSH_SUM = {"name": "gossip", "mode": "push-sum"}
LOCAL = {"name": "local-sgd", "steps": 2}


def replicas(paradigm=PUSH, workers=2, **tables) -> tuple[Replicas, Workload]:
    job = make_job(paradigm=paradigm, cluster={"workers": workers}, **tables)
    workload = build(job)
    return Replicas(job, workload), workload


def noisy(paradigm, kind):
    job = make_job(paradigm=paradigm, cluster={"workers": 2})
    workload = Workload(Noisy(), lambda model, x, y: model(x).sum(), build(job).train, None)
    return job, workload, kind(job, workload)


@pytest.mark.parametrize("order", [[0, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0]], ids=str)
def test_every_worker_has_its_own_generator_batches_and_statistics(order):
    for paradigm, kind in (({"name": "allreduce"}, OneReplica), (PUSH, Replicas)):
        job, workload, numbers = noisy(paradigm, kind)
        drawn = {0: [], 1: []}
        for worker in order:
            numbers.contribute(worker) if kind is OneReplica else numbers.learn(worker, 0.1)
            drawn[worker].append(workload.model.drawn[-1])
        for worker in (0, 1):
            torch.manual_seed(worker_seed(job.seed, worker))  # as a rank does
            assert drawn[worker] == [float(torch.rand(1)) for _ in range(2)]
        numbers.finish()
        mine = batches(workload.train, job.seed, 0, n_workers=2, batch_size=4, epochs=range(9))
        of_worker_0 = sum(x.sum() for x, _ in itertools.islice(mine, 2))
        assert torch.allclose(workload.model.seen.double(), of_worker_0, atol=1e-5)


def test_snapshots_and_sent_models_do_not_change():
    for paradigm in (PUSH, PUSH_SUM):
        numbers, _ = replicas(paradigm)
        shown, sent = numbers.snapshot(0), numbers.push(0)
        before = shown.clone(), sent.model.clone()
        numbers.learn(0, 0.1)
        assert torch.equal(shown, before[0]) and torch.equal(sent.model, before[1])
        assert not torch.equal(numbers.snapshot(0), before[0])


def test_a_push_gives_a_copy_and_push_sum_half():
    numbers, workload = replicas(PUSH)
    start = next(workload.model.parameters()).detach().flatten().clone()
    assert torch.equal(numbers.push(0).model, start) and numbers.weight(0) == 1.0
    halved, _ = replicas(PUSH_SUM)
    sent = halved.push(0)
    assert torch.equal(sent.model, 0.5 * start) and sent.weight == halved.weight(0) == 0.5
    assert torch.equal(halved.snapshot(0), start)  # x / w


def test_received_models_are_absorbed_together():
    """Models of two trained workers are absorbed together, and only once."""
    numbers, _ = replicas(PUSH, workers=3)
    for worker in (0, 1, 2):
        numbers.learn(worker, 0.1 * worker)
    models = [numbers.snapshot(worker) for worker in range(3)]
    for worker in (1, 2):
        numbers.arrive(0, numbers.push(worker))
    assert numbers.absorb(0, drew_itself=False) == 2
    assert torch.allclose(numbers.snapshot(0), sum(models) / 3, rtol=1e-14)
    after = numbers.snapshot(0)
    assert numbers.absorb(0, drew_itself=True) == 0
    assert torch.equal(numbers.snapshot(0), after)
    assert [torch.equal(numbers.snapshot(worker), models[worker]) for worker in (1, 2)] == [True, True]


def test_an_average_of_given_workers_is_set_on_all():
    numbers, _ = replicas(LOCAL, workers=3)
    for worker in (0, 1, 2):
        numbers.learn(worker, 0.1)
    models = [numbers.snapshot(worker) for worker in range(3)]
    numbers.average([0, 2])
    for worker in range(3):
        assert torch.equal(numbers.snapshot(worker), (models[0] + models[2]) / 2)


def test_all_reduce_steps_along_the_mean_of_the_given_workers():
    job = make_job(paradigm={"name": "allreduce"}, cluster={"workers": 3})
    one, workload = OneReplica(job, build(job)), build(job)
    start = next(workload.model.parameters()).detach().flatten().clone()
    apart_, _ = replicas(PUSH, workers=3)
    for worker in range(3):
        one.contribute(worker)
        apart_.learn(worker, 0.1)
    one.step([0, 2], 0.1)
    loss, accuracy, distance = one.evaluate()
    expected = (apart_.snapshot(0) + apart_.snapshot(2)) / 2  # both a step from the same place
    with torch.no_grad():
        next(workload.model.parameters()).copy_(expected.view(1, -1))
    assert loss == pytest.approx(workload.evaluate(workload.model)[0], rel=1e-12)
    assert math.isnan(accuracy) and distance == 0.0
    assert not torch.allclose(expected, start)


def test_without_arithmetic_models_are_counted_and_weighed():
    job = make_job(paradigm=PUSH_SUM, workload=TIMING | {"parameters": 10**9}, cluster={"workers": 3})
    numbers = replica_numerics(job, Workload(nn.Linear(1, 1), None, None, None))
    assert isinstance(numbers, NullReplicas)
    assert math.isnan(numbers.learn(0, 0.1))
    numbers.arrive(1, numbers.push(0))
    numbers.arrive(1, numbers.push(2))
    assert [numbers.weight(worker) for worker in range(3)] == [0.5, 1.0, 0.5]
    assert numbers.absorb(1, drew_itself=False) == 2
    assert numbers.absorb(1, drew_itself=False) == 0
    assert [numbers.weight(worker) for worker in range(3)] == [0.5, 2.0, 0.5]
    with pytest.raises(RuntimeError, match="cannot be evaluated"):
        numbers.evaluate()
    nothing = all_reduce_numerics(job, Workload(nn.Linear(1, 1), None, None, None))
    assert isinstance(nothing, NullAllReduce) and math.isnan(nothing.contribute(0))


def test_a_gradient_counts_by_its_weight_and_the_mean_is_corrected():
    """Two workers' gradients of allocated samples, against plain autograd."""
    job = make_job(paradigm={"name": "allreduce"})
    workload = build(job)
    numbers, reference = OneReplica(job, workload), build(job)
    size = len(workload.train)
    gradients = []
    for first, n in ((0, 3), (3, 5)):
        indices = torch.from_numpy(sequence_indices(job.seed, first, n, size=size))
        reference.model.zero_grad()
        reference.loss(reference.model, *(tensor[indices] for tensor in reference.train.tensors)).backward()
        gradients.append(next(reference.model.parameters()).grad.flatten().clone())
    numbers.contribute(0, Work(0, 3), 0.75)
    numbers.contribute(1, Work(3, 5), 1.25)
    numbers.step([0, 1], 0.5, 1.5)
    numbers.finish()
    moved = next(workload.model.parameters()) - next(reference.model.parameters())
    expected = -0.5 * 1.5 * (0.75 * gradients[0] + 1.25 * gradients[1]) / 2
    assert torch.allclose(moved.detach().flatten(), expected, rtol=1e-12, atol=1e-15)
