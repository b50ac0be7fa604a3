"""Flat models: views remain views, whatever a training loop does to the gradients."""

import copy
import math

import pytest
import torch
from torch import nn

from hpcsync.training import flat_model
from hpcsync.training.flat_model import FlatModel, squared_norm


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(8.0).view(2, 4)).square().sum()


def concatenated(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@pytest.fixture
def flat() -> FlatModel:
    return FlatModel(make_model())


@pytest.fixture
def expected() -> torch.Tensor:
    """The gradient of an ordinary model that was never flattened."""
    model = make_model()
    loss_of(model).backward()
    return concatenated(p.grad for p in model.parameters())


def shares_memory(flat: FlatModel) -> bool:
    """Return True if every parameter and gradient is in its buffer, one after the other."""
    offset = 0
    for p in flat.model.parameters():
        at = offset * p.element_size()
        if p.data_ptr() != flat.weights.data_ptr() + at or p.grad.data_ptr() != flat.gradient.data_ptr() + at:
            return False
        offset += p.numel()
    return offset == flat.size


def test_the_buffers_are_the_model(flat):
    assert shares_memory(flat)
    assert torch.equal(flat.weights, concatenated(make_model().parameters()))
    flat.weights.fill_(0.5)
    assert all(bool((p == 0.5).all()) for p in flat.model.parameters())
    with torch.no_grad():
        flat.model[0].weight.add_(1.0)
    assert flat.weights.sum() == 0.5 * flat.size + 12


def test_a_parameter_that_was_rebound_does_not_share_memory(flat):
    flat.model[0].weight.data = flat.model[0].weight.detach().clone()
    assert not shares_memory(flat)


def test_outputs_are_unchanged(flat):
    assert torch.equal(loss_of(flat.model), loss_of(make_model()))


def test_backward_writes_into_the_buffer(flat, expected):
    loss_of(flat.model).backward()
    assert torch.equal(flat.gradient, expected)
    assert shares_memory(flat)
    loss_of(flat.model).backward()
    assert torch.equal(flat.gradient, 2 * expected)  # accumulated
    flat.zero_gradient()
    assert not flat.gradient.any()
    assert shares_memory(flat)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_gradient_survives_the_scripts_zero_grad(flat, expected, set_to_none):
    for _ in range(2):
        flat.model.zero_grad(set_to_none=set_to_none)
        loss_of(flat.model).backward()
        flat.gather_gradient()
        assert torch.equal(flat.gradient, expected)
        assert shares_memory(flat)


def test_a_replaced_gradient_is_gathered(flat, expected):
    loss_of(flat.model).backward()
    weight = flat.model[0].weight
    weight.grad = weight.grad * 3
    assert torch.equal(flat.gradient, expected)  # not yet
    flat.gather_gradient()
    assert torch.equal(flat.gradient, torch.cat([expected[:12] * 3, expected[12:]]))
    assert shares_memory(flat)


def test_a_parameter_without_part_in_the_loss_has_gradient_zero(flat):
    loss_of(flat.model).backward()
    flat.model.zero_grad(set_to_none=True)
    flat.model[2].bias.sum().backward()
    flat.gather_gradient()
    assert flat.gradient[-2:].tolist() == [1.0, 1.0]
    assert not flat.gradient[:-2].any()


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    flat = FlatModel(model)
    assert flat.size == 9
    flat.weights.copy_(torch.eye(3).flatten())
    assert torch.equal(model(torch.ones(1, 3)), torch.ones(1, 3))
    model(torch.ones(1, 3)).sum().backward()
    assert flat.gradient.tolist() == [2.0] * 9  # from both places


def test_frozen_parameters_and_buffers_stay_where_they_are():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model[0].weight.requires_grad = False
    before = model[0].weight.data_ptr(), model[1].running_mean.data_ptr()
    flat = FlatModel(model)
    assert flat.size == 9
    assert (model[0].weight.data_ptr(), model[1].running_mean.data_ptr()) == before
    assert model[0].weight.grad is None


def test_a_deep_copy_is_independent(flat):
    twin = FlatModel(copy.deepcopy(flat.model))
    assert torch.equal(twin.weights, flat.weights)
    twin.weights.zero_()
    loss_of(twin.model).backward()
    assert flat.weights.all()
    assert not flat.gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_buffers_have_the_models_type(dtype):
    flat = FlatModel(nn.Linear(2, 2, dtype=dtype))
    assert flat.weights.dtype == flat.gradient.dtype == dtype


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)), "torch.float32, torch.float64"),
        (nn.Linear(2, 2, dtype=torch.float16), "torch.float16"),
        (nn.Linear(2, 2, dtype=torch.complex64), "torch.complex64"),
        (nn.ReLU(), "no trainable parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameters"),
    ],
)
def test_refused(model, found):
    with pytest.raises(ValueError, match=f"the model has {found}: .* one type for all, float32 or float64"):
        FlatModel(model)


def test_dropped_gradients_are_gathered_one_by_one(flat, expected):
    flat.gradient.fill_(9.0)
    flat.drop_gradient()
    assert all(p.grad is None for p in flat.model.parameters())
    loss_of(flat.model).backward()
    assert not shares_memory(flat)
    for index in range(len(flat.parameters)):
        flat.gather(index)
    assert shares_memory(flat)
    assert torch.equal(flat.gradient, expected)


def test_the_gradient_moves_with_its_values(flat, expected):
    loss_of(flat.model).backward()
    before, buffer = flat.gradient, torch.full_like(flat.gradient, 9.0)
    flat.move_gradient(buffer)
    assert flat.gradient is buffer and torch.equal(buffer, expected)
    assert shares_memory(flat)
    loss_of(flat.model).backward()
    assert torch.equal(buffer, 2 * expected)
    assert torch.equal(before, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 7, 8])
def test_a_squared_norm_is_a_sum_over_parts(dtype, size, monkeypatch):
    vector = torch.arange(1.0, size + 1, dtype=dtype)
    whole = size * (size + 1) * (2 * size + 1) / 6
    assert squared_norm(vector) == whole
    monkeypatch.setattr(flat_model, "DOT_SIZE", 3)
    assert squared_norm(vector) == whole


def test_the_squared_norm_of_what_is_not_finite_is_infinite():
    assert squared_norm(torch.tensor([1.0, math.nan])) == math.inf
    assert squared_norm(torch.tensor([1.0, -math.inf])) == math.inf
    assert squared_norm(torch.tensor([1e30, 1.0])) == math.inf, "the square is not"
