"""Elastic averaging of the simulator against NumPy: least squares in float64."""

import itertools

import numpy as np
import pytest
import torch

from hpcsync.core.coordinator import UpdateCommand
from hpcsync.simulator.gradients import Work
from hpcsync.simulator.server_numerics import Numerics
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.sampler import batches
from hpcsync.workloads.registry import build
from tests.unit.jobs import LINEAR, make_job
from tests.unit.simulator.running import simulate

SGD = {"name": "sgd", "lr": 0.05}
NESTEROV = {"name": "sgd", "lr": 0.02, "momentum": 0.9, "nesterov": True}


def easgd_job(workers: int = 3, optimizer=SGD, stop=None, events=(), **paradigm):
    compute = {"model": "constant", "seconds": 1.0}
    return make_job(
        workload=LINEAR,
        optimizer=optimizer,
        stop=stop or {"updates": 10},
        paradigm={"name": "easgd", **paradigm},
        cluster={"workers": workers, "compute": compute, "events": list(events)},
    )


class Run:
    """Exchanges in any order; positions and centre as vectors."""

    def __init__(self, job) -> None:
        self.workload = build(job)
        self.numbers = Numerics(job, self.workload)
        self.alpha = job.paradigm.moving_rate(job.cluster.workers)
        self.batch = Work(n_samples=job.workload.batch_size * job.paradigm.period, n_steps=job.paradigm.period)
        for worker in range(job.cluster.workers):
            self.numbers.grant(worker)

    @property
    def centre(self) -> np.ndarray:
        return self.numbers._store.weights.numpy().copy()

    @property
    def positions(self) -> np.ndarray:
        return np.array([trainee.weights.numpy() for trainee in self.numbers.contributions])

    def exchange(self, *workers: int) -> None:
        """Exchange with these workers at once: they compute, read the centre, and then move it."""
        for worker in workers:
            self.numbers.contribute(worker, self.batch)
        for worker in workers:
            self.numbers.grant(worker)
        self.numbers.apply(UpdateCommand(workers, (1.0,) * len(workers), float(len(workers)), self.alpha))


class Reference:
    """The same in a few lines: x, c and v are vectors; the loss is half the mean squared error."""

    def __init__(self, job, n_batches: int = 400) -> None:
        workload, n = build(job), job.cluster.workers
        self.lr, self.mu = job.optimizer.lr, job.optimizer.options.get("momentum", 0.0)
        self.period, self.alpha = job.paradigm.period, job.paradigm.moving_rate(n)
        self.c = FlatModel(workload.model).weights.numpy().copy()
        self.x, self.v = np.tile(self.c, (n, 1)), np.zeros((n, len(self.c)))
        size = job.workload.batch_size
        self.data = [
            batches(workload.train, job.seed, w, n_workers=n, batch_size=size, epochs=range(n_batches))
            for w in range(n)
        ]

    def gradient(self, worker: int) -> np.ndarray:
        features, targets = (t.numpy() for t in next(self.data[worker]))
        ahead = self.x[worker] + self.mu * self.v[worker]
        return features.T @ (features @ ahead - targets.reshape(-1)) / len(features)

    def step(self, worker: int, gradient: np.ndarray) -> None:
        self.v[worker] = self.mu * self.v[worker] - self.lr * gradient
        self.x[worker] = self.x[worker] + self.v[worker]

    def exchange(self, *workers: int) -> None:
        gradients = []
        for worker in workers:
            for _ in range(self.period - 1):
                self.step(worker, self.gradient(worker))
            gradients.append(self.gradient(worker))
        d = [self.alpha * (self.x[worker] - self.c) for worker in workers]
        for worker, move, gradient in zip(workers, d, gradients, strict=True):
            self.x[worker] = self.x[worker] - move
            self.step(worker, gradient)
        self.c = self.c + sum(d)


def alike(run: Run, reference: Reference, tolerance: float = 1e-12) -> bool:
    ahead = reference.x + reference.mu * reference.v  # the weights in a worker's model
    return np.allclose(run.centre, reference.c, rtol=0, atol=tolerance) and np.allclose(
        run.positions, ahead, rtol=0, atol=tolerance
    )


ROUNDS = [(0, 1, 2)] * 6
TURNS = [(0,), (2,), (0,), (1,), (1,), (2,), (0,)]


@pytest.mark.parametrize("optimizer", [SGD, NESTEROV], ids=["EASGD", "EAMSGD"])
@pytest.mark.parametrize("period", [1, 4])
@pytest.mark.parametrize("order", [ROUNDS, TURNS], ids=["synchronous", "asynchronous"])
def test_it_is_what_a_few_lines_of_numpy_give(order, period, optimizer):
    job = easgd_job(3, optimizer, period=period)
    run, reference = Run(job), Reference(job)
    start = run.centre
    for workers in order:
        run.exchange(*workers)
        reference.exchange(*workers)
        assert alike(run, reference)
    assert not np.allclose(run.centre, start, atol=1e-3)


@pytest.mark.parametrize(
    "other",
    [
        {"period": 3},
        {"beta": 0.8},
        {"optimizer": {**NESTEROV, "nesterov": False}},
        {"optimizer": {**NESTEROV, "lr": 0.02001}},
    ],
    ids=str,
)
def test_other_variants_differ(other):
    run = Run(easgd_job(3, **{"optimizer": NESTEROV, "period": 4} | other))
    reference = Reference(easgd_job(3, NESTEROV, period=4))
    for workers in TURNS:
        run.exchange(*workers)
        reference.exchange(*workers)
    assert not alike(run, reference, 1e-7)


class MovesFirst(Run):
    """The centre moves before the workers read it."""

    def exchange(self, *workers: int) -> None:
        for worker in workers:
            self.numbers.contribute(worker, self.batch)
        self.numbers.apply(UpdateCommand(workers, (1.0,) * len(workers), float(len(workers)), self.alpha))
        for worker in workers:
            self.numbers.grant(worker)


@pytest.mark.parametrize(("kind", "keeps"), [(Run, True), (MovesFirst, False)])
@pytest.mark.parametrize("order", [ROUNDS, TURNS], ids=["synchronous", "asynchronous"])
def test_the_sum_of_workers_and_centre_is_kept_but_for_the_gradients(monkeypatch, order, kind, keeps):
    """Without gradients (a learning rate near 0), for every exchange."""
    run = kind(easgd_job(3, {"name": "sgd", "lr": 1e-300}, period=1))
    for worker, trainee in enumerate(run.numbers.contributions):
        trainee.weights.add_(worker + 1.0)
    total = run.positions.sum(0) + run.centre
    for workers in order:
        run.exchange(*workers)
        assert np.allclose(run.positions.sum(0) + run.centre, total, rtol=0, atol=1e-13) == keeps


def test_alpha_0_is_training_alone():
    job = easgd_job(3, NESTEROV, period=2, alpha=0.0)
    run, alone = Run(job), [Run(easgd_job(3, NESTEROV, period=10, alpha=0.0)) for _ in range(3)]
    start = run.centre
    for _ in range(5):
        run.exchange(0, 1, 2)
    for worker, other in enumerate(alone):
        other.exchange(worker)
        assert np.allclose(run.positions[worker], other.positions[worker], rtol=0, atol=1e-13)
    assert np.array_equal(run.centre, start)
    positions = run.positions
    assert all(not np.allclose(a, b, atol=1e-3) for a, b in itertools.combinations(positions, 2))


def test_one_worker_and_the_centre_meet_halfway():
    run = Run(easgd_job(1, {"name": "sgd", "lr": 1e-300}, period=1, alpha=0.5))
    run.numbers.contributions[0].weights.add_(2.0)
    centre = run.centre
    run.exchange(0)
    assert np.allclose(run.centre, centre + 1.0, rtol=0, atol=1e-15)
    assert np.allclose(run.positions[0], run.centre, rtol=0, atol=1e-15)


def test_the_centre_starts_at_the_initial_weights_without_an_exchange():
    run = Run(easgd_job(3))
    assert np.array_equal(run.positions, np.tile(run.centre, (3, 1)))
    assert [trainee.steps for trainee in run.numbers.contributions] == [0, 0, 0]


def test_a_workers_schedule_counts_all_workers_samples_at_its_own_progress():
    """Each of 3 workers has 8 samples; the second half is trained on at a tenth of the rate."""
    schedule = {"name": "multistep", "milestones": [12]}
    job = easgd_job(3, {**SGD, "lr": 0.5, "schedule": schedule}, period=1)
    run, constant = Run(job), Run(easgd_job(3, {**SGD, "lr": 0.5}, period=1))
    for this in (run, constant):
        this.exchange(0, 1, 2)
    assert np.array_equal(run.positions, constant.positions)
    before = run.positions
    torch.manual_seed(0)
    for this in (run, constant):
        this.exchange(0, 1, 2)
    pull = before - run.alpha * (before - constant_centre(run, before))
    assert np.allclose(10 * (run.positions - pull), constant.positions - pull, rtol=0, atol=1e-12)


def constant_centre(run: Run, before: np.ndarray) -> np.ndarray:
    """Return the centre before its last move: c' = c + alpha sum(x - c), solved for c."""
    n = len(before)
    return (run.centre - run.alpha * before.sum(0)) / (1 - n * run.alpha)


# ---- a worker that leaves between two exchanges ----


@pytest.mark.parametrize("n_discarded", [3, 0])
def test_steps_that_a_leaving_worker_discards_use_its_batches_and_its_momentum(n_discarded, tmp_path):
    """Worker 1 leaves after 3 of 4 steps and joins again; with alpha = 0 the centre stays where it was."""
    events = [{"worker": 1, "at_s": 2.5, "change": "leave"}, {"worker": 1, "at_s": 6.0, "change": "join"}]
    job = easgd_job(2, NESTEROV, period=4, alpha=0.0, stop={"updates": 8}, events=events)
    pushes = simulate(job, tmp_path / "trace.h5").tables["pushes"]
    reference, losses = Reference(job), []
    for _ in range(n_discarded):
        reference.step(1, reference.gradient(1))
    reference.x[1] = reference.c
    for features, targets in itertools.islice(reference.data[1], 4):
        ahead = reference.x[1] + reference.mu * reference.v[1]
        residuals = features.numpy() @ ahead - targets.numpy().reshape(-1)
        losses.append(0.5 * np.mean(residuals**2))
        reference.step(1, features.numpy().T @ residuals / len(features))
    first = pushes["loss"][(pushes["worker"] == 1) & (pushes["begin_s"] == 6.0)]
    assert (first == pytest.approx(np.mean(losses), rel=1e-12)) == (n_discarded == 3)
