"""Update rules: a step along the mean gradient, or a centre that moves towards the workers."""

import numpy as np
import pytest
import torch

from hpcsync.core.roles import Roles
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.parameter_store import Store, row_size
from hpcsync.training.update_rules import Descent, Elastic, of_job, towards
from tests.unit.jobs import make_job


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
    spec = OptimizerSpec("sgd", 0.1)
    assert type(of_job(make_job(), spec)) is Descent
    assert type(of_job(make_job(paradigm={"name": "easgd"}), spec)) is Elastic


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


# ---- gradients ----


def descended(gradients: torch.Tensor, weights: list[float], divisor: float) -> torch.Tensor:
    parameter, rule = torch.nn.Parameter(torch.zeros_like(gradients[0])), Descent(OptimizerSpec("sgd", 9.0))
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
