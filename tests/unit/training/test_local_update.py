"""Local steps against explicit recurrences; mixing, means and outer steps against NumPy."""

import math

import numpy as np
import pytest
import torch

from hpcsync.training import local_update
from hpcsync.training.local_update import Mean, Outer, Peer, Received, mix
from hpcsync.training.optimizers import LocalOptimizer, OptimizerSpec

SIZE = 7
NESTEROV = {"momentum": 0.9, "nesterov": True}


def vectors(n: int, seed: int = 0, size: int = SIZE, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return list(torch.randn(n, size, dtype=dtype, generator=torch.Generator().manual_seed(seed)))


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().copy()


def peer(weights: torch.Tensor, **options) -> Peer:
    return Peer(weights, OptimizerSpec("sgd", 0.1, options).on_worker(weights))


# ---- steps ----


@pytest.mark.parametrize(
    ("name", "options"),
    [("sgd", {}), ("sgd", NESTEROV), ("sgd", {"momentum": 0.5, "weight_decay": 0.1}), ("adam", {}), ("adamw", {})],
    ids=str,
)
def test_steps_are_those_of_torch(name, options):
    spec = OptimizerSpec(name, 0.1, options)
    mine, theirs = vectors(1)[0], torch.nn.Parameter(vectors(1)[0])
    local, optimizer = LocalOptimizer(mine, spec), spec.build(theirs)
    for step, gradient in enumerate(vectors(6, seed=1)):
        lr = 0.1 / (1 + step)
        local.step(gradient, lr)
        theirs.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        assert torch.equal(mine, theirs.data)


@pytest.mark.parametrize("maximize", [False, True])
def test_without_look_ahead_it_is_nesterovs_theta(maximize):
    """theta' = theta + v', v' = mu v - lr g, where g is the gradient at theta + mu v."""
    lr, mu, sign = 0.1, 0.9, 1.0 if maximize else -1.0
    weights = vectors(1)[0]
    theta, v = numbers(weights), np.zeros(SIZE)
    local = LocalOptimizer(weights, OptimizerSpec("sgd", lr, NESTEROV | {"maximize": maximize}))
    for step in range(20):
        gradient = np.sin(theta + mu * v)  # of something, where torch's parameter is
        local.step(torch.sin(weights), lr)
        v = mu * v + sign * lr * gradient
        theta = theta + v
        np.testing.assert_allclose(numbers(local.without_look_ahead()), theta, rtol=1e-12)
        np.testing.assert_allclose(numbers(weights), theta + mu * v, rtol=1e-12)
        local.drop_look_ahead()
        np.testing.assert_allclose(numbers(weights), theta, rtol=1e-12)
        assert not np.allclose(numbers(weights), theta + mu * v, rtol=1e-9), step
        local.look_ahead()
        np.testing.assert_allclose(numbers(weights), theta + mu * v, rtol=1e-12)


def test_with_another_rate_the_last_steps_look_ahead_is_dropped():
    """The look-ahead uses the rate of the last step, not of the next."""
    weights = vectors(1)[0]
    before = numbers(weights)
    local = LocalOptimizer(weights, OptimizerSpec("sgd", 1.0, NESTEROV))
    first, second = (numbers(g) for g in vectors(2, seed=1))
    local.step(torch.from_numpy(first), 0.5)
    np.testing.assert_allclose(numbers(local.without_look_ahead()), before - 0.5 * first, rtol=1e-12)
    local.step(torch.from_numpy(second), 0.05)
    buffer = 0.9 * first + second
    parameter = before - 0.5 * (first + 0.9 * first) - 0.05 * (second + 0.9 * buffer)
    np.testing.assert_allclose(numbers(weights), parameter, rtol=1e-12)
    np.testing.assert_allclose(numbers(local.without_look_ahead()), parameter + 0.05 * 0.9 * buffer, rtol=1e-12)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}], ids=str)
def test_nothing_to_drop_without_nesterovs_method(options):
    weights = vectors(1)[0]
    local = LocalOptimizer(weights, OptimizerSpec("sgd", 0.1, options))
    for gradient in vectors(3, seed=1):
        local.step(gradient, 0.1)
    before = weights.clone()
    local.drop_look_ahead()
    assert torch.equal(weights, before)
    assert local.without_look_ahead() is weights or torch.equal(local.without_look_ahead(), before)


def test_before_the_first_step_there_is_no_look_ahead():
    weights = vectors(1)[0]
    before = weights.clone()
    local = LocalOptimizer(weights, OptimizerSpec("sgd", 0.1, NESTEROV))
    local.drop_look_ahead()
    local.look_ahead()
    assert torch.equal(weights, before) and torch.equal(local.without_look_ahead(), before)


# ---- a worker ----


def test_others_see_and_change_theta_and_momentum_stays():
    """Mixing moves theta, and the next gradient is taken as far ahead of it as before."""
    mine, other = vectors(1)[0], vectors(1, seed=5)[0]
    worker = peer(mine, **NESTEROV)
    theta, v = numbers(mine), np.zeros(SIZE)
    for gradient in vectors(4, seed=1):
        worker.step(gradient, 0.1)
        v = 0.9 * v - 0.1 * numbers(gradient)
        theta = theta + v
        with worker.exchanging() as x:
            np.testing.assert_allclose(numbers(x), theta, rtol=1e-12)
            mix(x, other)
        theta = (theta + numbers(other)) / 2
        np.testing.assert_allclose(numbers(mine), theta + 0.9 * v, rtol=1e-12)
        np.testing.assert_allclose(numbers(worker.shown()), theta, rtol=1e-12)
        assert not np.allclose(numbers(mine), theta, rtol=1e-3)


def test_showing_touches_nothing():
    """Equal to dropping and adding the look-ahead, up to rounding."""
    weights, alone, rounded = [vectors(1)[0] for _ in range(3)]
    workers = [peer(tensor, **NESTEROV) for tensor in (weights, alone, rounded)]
    for gradient in vectors(20, seed=1):
        for worker in workers:
            worker.step(gradient, 0.1)
        workers[0].shown()
        with workers[2].exchanging():
            pass
    assert torch.equal(weights, alone)
    assert not torch.equal(rounded, alone)


@pytest.mark.parametrize("options", [{}, NESTEROV], ids=str)
def test_push_sum_steps_and_looks_at_x_over_w(options):
    z = vectors(1)[0]
    worker = peer(z, **options)
    theta, v, w, mu = numbers(z), np.zeros(SIZE), 1.0, options.get("momentum", 0.0)
    for gradient, come in zip(vectors(5, seed=1), vectors(5, seed=2), strict=True):
        worker.step(gradient, 0.1)
        v = mu * v - 0.1 * numbers(gradient)
        theta = theta + v
        np.testing.assert_allclose(numbers(z), theta + mu * v, rtol=1e-12)
        with worker.exchanging() as x:
            np.testing.assert_allclose(numbers(x), w * theta, rtol=1e-12)
            x.mul_(0.5).add_(come)
            worker.weight = worker.weight * 0.5 + 0.2
        theta, w = (w * theta / 2 + numbers(come)) / (w / 2 + 0.2), w / 2 + 0.2
        np.testing.assert_allclose(numbers(z), theta + mu * v, rtol=1e-12)
        np.testing.assert_allclose(numbers(worker.shown()), theta, rtol=1e-12)
    assert abs(w - 1.0) > 0.1


# ---- mixing ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_half_of_each(dtype):
    x, other = vectors(2, dtype=dtype)
    expected = (numbers(x) + numbers(other)) / 2
    mix(x, other)
    assert np.array_equal(numbers(x), expected)
    mix(x, x.clone())
    assert np.array_equal(numbers(x), expected)  # consensus is a fixed point, bit for bit


@pytest.mark.parametrize("beta", [0.1, 0.3, 0.8, 1.0])
def test_a_part_of_each(beta):
    x, other = vectors(2)
    expected = (1 - beta) * numbers(x) + beta * numbers(other)
    mix(x, other, beta)
    np.testing.assert_allclose(numbers(x), expected, rtol=1e-12)
    before = numbers(x).copy()
    mix(x, x.clone(), beta)
    assert np.array_equal(numbers(x), before)


@pytest.mark.parametrize(("drew_itself", "own"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_mean_of_received_models(count, drew_itself, own):
    x, *come = vectors(1 + count)
    expected = np.mean([numbers(model) for model in [x] * own + come], 0)
    peer(x).absorb(Received(torch.stack(come).sum(0), count, count), drew_itself=drew_itself)
    np.testing.assert_allclose(numbers(x), expected, rtol=1e-12)


@pytest.mark.parametrize("drew_itself", [False, True])
def test_nothing_pushed_here_changes_nothing(drew_itself):
    x = vectors(1, dtype=torch.float32)[0]
    before = x.clone()
    peer(x).absorb(Received(torch.zeros_like(x), 0, 0.0), drew_itself=drew_itself)
    assert torch.equal(x, before)


# ---- the mean of all ----


def mean_of(replicas: list[torch.Tensor]) -> Mean:
    mean = Mean(torch.full_like(replicas[0], 7.0))
    for replica in replicas:
        mean.add(replica)
    return mean


@pytest.mark.parametrize("n", [1, 2, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_of_replicas_and_their_distance_from_it(n, dtype):
    replicas = [1000.0 + vector for vector in vectors(n, dtype=dtype, size=50)]
    mean = mean_of(replicas)
    expected = np.mean(replicas, 0, dtype=np.float64)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-14
    np.testing.assert_allclose(numbers(mean.values), expected, rtol=tolerance)
    distances = [np.linalg.norm(numbers(replica).astype(np.float64) - expected) for replica in replicas]
    root = np.sqrt(np.mean(np.square(distances)))
    assert mean.distance == pytest.approx(root, rel=1e-4 if dtype is torch.float32 else 1e-9, abs=1e-12)
    assert (n == 1) == (mean.distance == 0.0)


def test_a_distance_is_summed_in_parts_of_what_a_dot_product_takes_on_a_gpu(monkeypatch):
    replicas, sizes, dot = vectors(3, size=50), [], torch.dot
    whole = mean_of(replicas)
    monkeypatch.setattr(torch, "dot", lambda a, b: sizes.append(len(a)) or dot(a, b))
    monkeypatch.setattr(local_update, "DOT_SIZE", 20)
    in_parts = mean_of(replicas)
    assert sizes == [20, 20, 10] * 3
    assert torch.equal(in_parts.values, whole.values)
    assert in_parts.distance == pytest.approx(whole.distance, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_equal_replicas_are_their_mean_bit_for_bit(n):
    replica = vectors(1, size=1000, dtype=torch.float32)[0]
    mean = mean_of([replica.clone() for _ in range(n)])
    assert torch.equal(mean.values, replica)
    assert mean.distance == 0.0


def test_a_sum_divided_would_not_be():
    replica = vectors(1, size=1000, dtype=torch.float32)[0]
    assert not torch.equal(sum(replica for _ in range(7)) / 7, replica)


# ---- outer steps ----


def test_local_sgd_takes_the_mean_itself():
    outer = Outer(vectors(1)[0])
    for mean in vectors(3, seed=1):
        before = mean.clone()
        outer.step(mean)
        assert torch.equal(mean, before)
    assert outer.state() == {"weights": None, "optimizer_state": None}
    outer.restore({"weights": vectors(1)[0], "optimizer_state": None})  # of a checkpoint up to format 7
    assert outer.state()["weights"] is None


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.5, 0.0), (1.0, 0.9)])
def test_an_outer_step_is_torchs(lr, momentum, nesterov):
    """b = mu b + d, where d is theta minus the mean; theta - lr (d + mu b), with a heavy ball (SlowMo) theta - lr b."""
    start = vectors(1)[0]
    outer = Outer(start, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)
    theta, buffer = numbers(start), np.zeros(SIZE)
    for mean in vectors(6, seed=1):
        d = theta - numbers(mean)
        buffer = momentum * buffer + d
        theta = theta - lr * (d + momentum * buffer if nesterov else buffer)
        outer.step(mean)
        np.testing.assert_allclose(numbers(mean), theta, rtol=1e-12)
    assert torch.equal(start, vectors(1)[0])  # the weights that it was made from are not its own
    assert outer._parameter.grad is None  # so it holds weights and momentum only


def test_an_outer_step_leads_towards_the_mean():
    """The outer gradient is the old weights minus the mean, not the negative."""
    start, mean = vectors(2)
    target = mean.clone()
    Outer(start, lr=0.5).step(mean)
    np.testing.assert_allclose(numbers(mean), (numbers(start) + numbers(target)) / 2, rtol=1e-12)
    assert float((mean - target).norm()) < float((start - target).norm())


def test_the_distance_of_replicas_that_are_no_numbers_is_none():
    mean = Mean(torch.empty(2))
    for replica in ([1.0, 2.0], [float("nan"), 2.0]):
        mean.add(torch.tensor(replica))
    assert math.isnan(mean.distance)
