"""Update rules: a step along the mean gradient, or a centre that moves towards the workers."""

import math

import numpy as np
import pytest
import torch

from hpcsync.core.roles import Roles
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.parameter_store import Store, row_size
from hpcsync.training.update_rules import DelayedNesterov, Descent, Elastic, of_job, towards
from tests.unit.jobs import LINEAR, make_job


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def updated(centre: torch.Tensor, positions: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return the centre after an update from these positions."""
    parameter, rule = torch.nn.Parameter(centre.clone()), Elastic()
    rule.bind(parameter)
    rule.update(list(positions.clone()), alpha, [1.0] * len(positions), float(len(positions)))
    return parameter.data


def drawn(position: torch.Tensor, centre: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return a position after its move towards the centre."""
    return position + towards(position, centre.clone(), alpha)


def test_servers_descend_or_hold_a_centre():
    spec = OptimizerSpec("sgd", 0.1).on_server
    assert type(of_job(make_job(), spec)) is Descent
    assert type(of_job(make_job(paradigm={"name": "easgd"}), spec)) is Elastic


@pytest.mark.parametrize("paradigm", [{"name": "bsp"}, {"name": "asp", "compensation": "constant", "strength": 0.3}])
@pytest.mark.parametrize(("workload", "known"), [(LINEAR, True), ({"name": "timing", "batch_size": 4}, False)])
def test_norms_are_measured_where_gradients_are_computed(paradigm, workload, known):
    """One that is not finite is infinite, and can be told from one that is not measured."""
    rule = of_job(make_job(workload=workload, paradigm=paradigm), OptimizerSpec("sgd", 0.1).on_server)
    rule.bind(torch.nn.Parameter(torch.ones(3)))
    gradients = torch.tensor([[2.0, 3.0, 6.0], [0.0, math.nan, 1.0]])
    norms = [float(rule.update([gradient], 0.1, [1.0], 1.0)) for gradient in gradients]
    assert np.array_equal(norms, [49.0, math.inf] if known else [math.nan, math.nan], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_two_moves_towards_each_other_are_opposite_to_the_bit(dtype):
    a, b = random(1003, dtype=dtype), random(1004, dtype=dtype)[1:]
    assert torch.equal(towards(a, b.clone(), 0.3), -towards(b, a.clone(), 0.3))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_sum_of_workers_and_centre_is_kept(workers):
    centre, positions, alpha = random(101), random(workers, 101), 0.9 / workers
    together = updated(centre, positions, alpha) + sum(drawn(x, centre, alpha) for x in positions)
    assert torch.allclose(together, centre + positions.sum(0), rtol=0, atol=1e-14)
    one_after_the_other, sums = centre, positions.sum(0) + centre
    for x in positions:
        sums = sums - x + drawn(x, one_after_the_other, alpha)
        moved = updated(one_after_the_other, x[None], alpha)
        sums, one_after_the_other = sums - one_after_the_other + moved, moved
    assert torch.allclose(sums, centre + positions.sum(0), rtol=0, atol=1e-13)


def test_a_worker_that_sees_the_moved_centre_loses_some_of_the_sum():
    centre, position = random(101), random(1, 101)
    moved = updated(centre, position, 0.4)
    together = moved + drawn(position[0], moved, 0.4)
    assert not torch.allclose(together, centre + position[0], rtol=0, atol=1e-3)


def test_all_moves_are_measured_from_where_the_centre_was():
    centre, positions = random(101), random(3, 101)
    after = updated(centre, positions, 0.3)
    assert torch.allclose(after, centre + 0.3 * (positions - centre).sum(0), rtol=0, atol=1e-14)
    in_turn = centre
    for x in positions:
        in_turn = updated(in_turn, x[None], 0.3)
    assert not torch.allclose(after, in_turn, rtol=0, atol=1e-3)


def test_it_is_the_sum_that_workers_could_have_reduced_themselves():
    """Every worker keeps a copy of the centre and adds the sum of all d = alpha (x - c): the same bits."""
    centre, positions = random(101), random(4, 101)
    d = 0.2 * (positions - centre)
    assert torch.equal(updated(centre, positions, 0.2), centre + (d[0] + d[1] + d[2] + d[3]))


def test_every_position_counts_once_whatever_its_batches():
    centre, positions = random(101), random(3, 101)
    parameter, rule = torch.nn.Parameter(centre.clone()), Elastic()
    rule.bind(parameter)
    rule.update(list(positions.clone()), 0.2, [0.5, 2.0, 0.25], 7.0)
    assert torch.equal(parameter.data, updated(centre, positions, 0.2))


def test_a_position_without_weight_does_not_count():
    centre, positions = random(101), random(3, 101)
    positions[1] = float("inf")
    parameter, rule = torch.nn.Parameter(centre.clone()), Elastic()
    rule.bind(parameter)
    rule.update(list(positions.clone()), 0.2, [1.0, 0.0, 1.0], 2.0)
    assert torch.equal(parameter.data, updated(centre, positions[[0, 2]], 0.2))
    rule.update([positions[1].clone()], 0.2, [0.0], 1.0)
    assert torch.equal(parameter.data, updated(centre, positions[[0, 2]], 0.2))


# ---- gradients ----


def descended(gradients: torch.Tensor, weights: list[float], divisor: float) -> torch.Tensor:
    parameter, rule = torch.nn.Parameter(torch.zeros_like(gradients[0])), Descent(OptimizerSpec("sgd", 9.0).on_server)
    rule.bind(parameter)
    rule.update(list(gradients.clone()), 1.0, weights, divisor)
    return parameter.data


def test_a_step_is_along_the_weighted_sum_over_the_divisor():
    gradients = random(3, 101)
    expected = -(2.0 * gradients[0] + 0.5 * gradients[1] + gradients[2]) / 3.5
    assert torch.allclose(descended(gradients, [2.0, 0.5, 1.0], 3.5), expected, rtol=0, atol=1e-15)
    assert not torch.allclose(descended(gradients, [1.0] * 3, 3.0), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_of_1_are_the_mean_to_the_bit(dtype):
    gradients = random(3, 101, dtype=dtype)
    mean = (gradients[0] + gradients[1] + gradients[2]) / 3.0
    assert torch.equal(descended(gradients, [1.0] * 3, 3.0), -mean)
    assert torch.equal(descended(gradients[:1], [1.0], 1.0), -gradients[0])


@pytest.mark.parametrize("sizes", [[12, 12], [1, 23], [5, 7, 12], [24]], ids=str)
def test_means_of_parts_weighted_by_their_samples_are_the_mean_of_all(sizes):
    """The mean over 24 samples, however they are split; weights are batch sizes over the mean batch size."""
    samples, mean_batch = random(24, 101), 24 / len(sizes)
    means = torch.stack([part.mean(0) for part in samples.split(sizes)])
    step = descended(means, [size / mean_batch for size in sizes], sum(size / mean_batch for size in sizes))
    assert torch.allclose(step, -samples.mean(0), rtol=0, atol=1e-15)
    unweighted = descended(means, [1.0] * len(sizes), float(len(sizes)))
    assert torch.allclose(unweighted, -samples.mean(0), rtol=0, atol=1e-3) == (len(set(sizes)) == 1)


def test_half_of_the_way_each_is_the_midpoint():
    centre, position = torch.tensor([1.0, -3.0]), torch.tensor([2.0, 5.0])
    assert updated(centre, position[None], 0.5).tolist() == [1.5, 1.0]
    assert drawn(position, centre, 0.5).tolist() == [1.5, 1.0]


@pytest.mark.parametrize("workers", [1, 3, 5])
def test_equal_positions_do_not_move(workers):
    centre = random(101, dtype=torch.float32)
    assert torch.equal(updated(centre, centre.repeat(workers, 1), 0.9 / workers), centre)
    assert torch.equal(drawn(centre, centre, 0.9 / workers), centre)


def test_alpha_0_moves_nothing():
    centre, positions = random(7), random(2, 7)
    assert torch.equal(updated(centre, positions, 0.0), centre)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_number_of_shards_does_not_change_a_bit(dtype):
    for size in (7, 37, 101, 1003):
        centre, positions = random(size, dtype=dtype), random(3, size, dtype=dtype)
        whole = in_shards(centre, positions, 1)
        assert not torch.equal(whole, centre)
        for n_servers in (2, 3, 7):
            assert torch.equal(in_shards(centre, positions, n_servers), whole), f"{n_servers} shards of {size}"


def in_shards(centre: torch.Tensor, positions: torch.Tensor, n_servers: int) -> torch.Tensor:
    result, (n_workers, size) = torch.empty_like(centre), positions.shape
    for shard in Roles(n_servers, n_workers).shards(size):
        n = shard.stop - shard.start
        buffers, slots = (torch.zeros(k, row_size(n), dtype=centre.dtype) for k in (1, n_workers))
        buffers[0, :n] = centre[shard]
        store = Store(buffers, slots, np.zeros(n_workers + 1, np.int64), Elastic(), n)
        for _ in range(3):
            slots[:, :n] = positions[:, shard]
            store.apply(range(n_workers), 0.3)
        result[shard] = store.weights
    return result


# ---- on a unit quadratic, in one dimension: eta is the learning rate, workers take turns ----


def largest_after(eta: float, alpha: float, workers: int, rounds: int = 400) -> float:
    """Return the largest of |x| and |c| after so many rounds of exchanges and steps from 1."""
    centre, positions = torch.zeros(1, dtype=torch.float64), torch.ones(workers, 1, dtype=torch.float64)
    for _ in range(rounds):
        for x in positions:
            gradient, before = x.clone(), centre
            centre = updated(centre, x[None], alpha)
            x.copy_(drawn(x, before, alpha) - eta * gradient)
    return float(max(positions.abs().max(), centre.abs().max()))


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("eta", [0.1, 1.0, 1.7])
def test_asynchronous_averaging_is_stable_up_to_the_published_limit(eta, workers):
    """0 <= alpha <= (4 - 2 eta) / (4 - eta), whatever the number of workers (Zhang et al. 2015).

    Beyond it one worker diverges, and so does any odd number: by the eigenvalues of a round, an even number is stable a
    little further, two of them with eta = 1 up to 0.7071 instead of 0.6667.
    """
    limit = (4 - 2 * eta) / (4 - eta)
    assert largest_after(eta, 0.93 * limit, workers) < 1e-3
    if workers % 2:
        assert largest_after(eta, 1.07 * limit, workers) > 1e3


def test_two_workers_are_stable_a_little_further():
    assert largest_after(1.0, 0.69, 2) < 1e-3
    assert largest_after(1.0, 0.69, 1) > 1e3
    assert largest_after(1.0, 0.75, 2) > 1e3


# ---- changes of weights ----


def bound(rule, weights):
    rule.bind(parameter := torch.nn.Parameter(weights.clone()))
    return parameter


def stepped(rule, weights, changes, rate=0.7):
    """Return the weights after each update from one of these changes, shape (updates, size)."""
    parameter, after = bound(rule, weights), []
    for change in changes:
        rule.update([change.clone()], rate, [1.0], 1.0)
        after.append(parameter.data.clone())
    return torch.stack(after)


def as_published(weights, changes, rate, beta, period, between):
    """Return the same by Algorithm 3 of Liu et al. in its own terms, in NumPy."""
    theta, m, delta, after = weights.numpy(), 0.0, 0.0, []
    for t, change in enumerate(changes.numpy()):
        g = -change
        delta = delta + g
        if (t + 1) % period == 0:
            m, delta = beta * m + delta / period, 0.0
            theta = theta - rate * ((1 - between * period + between) * beta * m + g / period)
        else:
            theta = theta - rate * (between * beta * m + g / period)
        after.append(theta)
    return torch.from_numpy(np.stack(after))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_with_a_period_of_1_it_is_nesterov_of_torch_to_the_bit(dtype, beta):
    """Along minus the mean change. Heavy-ball momentum is the control."""
    weights, changes = random(101, dtype=dtype), random(12, 3, 101, dtype=dtype)
    rule = DelayedNesterov(beta, 1, 0.3)  # in between there is nothing
    mine = bound(rule, weights)
    theirs, others = torch.nn.Parameter(weights.clone()), torch.nn.Parameter(weights.clone())
    options = {"lr": 0.7, "momentum": beta, "foreach": False, "fused": False}
    nesterov, heavy = torch.optim.SGD([theirs], nesterov=beta > 0, **options), torch.optim.SGD([others], **options)
    for change in changes:
        rule.update(list(change.clone()), 0.7, [1.0] * 3, 3.0)
        theirs.grad = others.grad = -(change[0] + change[1] + change[2]) / 3.0
        nesterov.step()
        heavy.step()
    assert torch.equal(mine, theirs)
    assert torch.equal(mine, others) == (beta == 0)


@pytest.mark.parametrize(("period", "between"), [(1, 0.0), (3, 0.0), (3, 0.2), (3, 1 / 3), (5, 0.1)])
def test_it_is_the_published_algorithm(period, between):
    weights, changes = random(101), random(4 * period + 2, 101)
    after = stepped(DelayedNesterov(0.9, period, between), weights, changes)
    assert torch.allclose(after, as_published(weights, changes, 0.7, 0.9, period, between), rtol=0, atol=1e-12)
    for other in ((0.8, period, between), (0.9, period + 1, between), (0.9, period, between + 0.1)):
        same = torch.allclose(after, as_published(weights, changes, 0.7, *other), rtol=0, atol=1e-3)
        assert same == (period == 1 and other[1:] == (1, 0.1)), "with a period of 1 there is nothing in between"


@pytest.mark.parametrize("period", [2, 3, 8])
def test_the_updates_of_a_period_are_one_nesterov_step_along_their_mean(period):
    weights, changes = random(101), random(5 * period, 101)
    after = stepped(DelayedNesterov(0.9, period), weights, changes)[period - 1 :: period]
    together = stepped(DelayedNesterov(0.9), weights, changes.reshape(5, period, 101).mean(1))
    assert torch.allclose(after, together, rtol=0, atol=1e-12)
    spread = stepped(DelayedNesterov(0.9, period, 1 / period), weights, changes)[period - 1 :: period]
    assert not torch.allclose(spread, together, rtol=0, atol=1e-3), "the momentum that is used early is an older one"


def test_a_rate_of_1_without_momentum_adds_the_mean_change():
    """So the weights become those of a lone worker. Half the rate is the control."""
    weights, changed = random(101), random(4, 101)[0]
    after = stepped(DelayedNesterov(0.0), weights, (changed - weights)[None], rate=1.0)[0]
    assert torch.allclose(after, changed, rtol=0, atol=1e-15)
    half = stepped(DelayedNesterov(0.0), weights, (changed - weights)[None], rate=0.5)[0]
    assert not torch.allclose(half, changed, rtol=0, atol=1e-3)


@pytest.mark.parametrize("servers", [2, 3, 5, 8])
def test_outer_steps_are_the_same_bits_on_any_number_of_servers(servers):
    size, workers = 257, 3
    weights, changes = random(size, dtype=torch.float32), random(7, workers, size, dtype=torch.float32)

    def after(shards):
        done = []
        for shard in shards:
            rows = torch.zeros(workers + 2, row_size(shard.stop - shard.start))
            rows[0, : shard.stop - shard.start] = weights[shard]
            slots = torch.zeros(workers, rows.shape[1])
            rule = DelayedNesterov(0.9, 3, 0.1)
            store = Store(rows, slots, np.zeros(workers + 1, np.int64), rule, shard.stop - shard.start)
            for change in changes:
                slots[:, : shard.stop - shard.start] = change[:, shard]
                store.apply(range(workers), 0.7, (0.5, 1.5, 1.0), 3.0)
            done.append(store.weights.clone())
        return torch.cat(done)

    assert torch.equal(after(Roles(servers, workers).shards(size)), after(Roles(1, workers).shards(size)))


def test_a_restored_rule_continues_with_the_same_bits():
    weights, changes = random(101), random(9, 101)
    expected = stepped(DelayedNesterov(0.9, 3, 0.1), weights, changes)
    for n in range(1, 9):
        first, second, other = (DelayedNesterov(0.9, 3, 0.1) for _ in range(3))
        half = stepped(first, weights, changes[:n])[-1]
        parameter, without = bound(second, half), bound(other, half)
        second.restore(first.state())
        for change in changes[n:]:
            for rule in (second, other):
                rule.update([change.clone()], 0.7, [1.0], 1.0)
        assert torch.equal(parameter.data, expected[-1])
        assert not torch.equal(without.data, expected[-1]), "the state matters"


def test_the_momentum_may_change_between_updates():
    """The momentum buffer stays, and counts as far as the present momentum says."""
    spec, gradients = OptimizerSpec("sgd", 0.5, {"momentum": 0.9}), random(4, 3)
    parameter, rule = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)), Descent(spec.on_server)
    rule.bind(parameter)
    expected, buffer = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for gradient, momentum in zip(gradients, (0.9, 0.9, 0.25, 0.0), strict=True):
        rule.set_momentum(momentum)
        rule.update([gradient.clone()], 0.5, [1.0], 1.0)
        buffer = momentum * buffer + gradient
        expected = expected - 0.5 * buffer
        assert torch.allclose(parameter.data, expected, rtol=0, atol=1e-15)
    with pytest.raises(TypeError, match="Elastic has no momentum"):
        Elastic().set_momentum(0.9)
