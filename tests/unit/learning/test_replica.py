"""A replica leaves the gradient of one batch, and of nothing else, in the flat gradient."""

import math

import pytest
import torch
from torch import nn

from hpcsync.learning.flat import FlatModel
from hpcsync.learning.replica import Replica
from hpcsync.learning.workloads import half_squared_error


def make_flat() -> FlatModel:
    flat = FlatModel(nn.Linear(3, 1, bias=False, dtype=torch.float64))
    flat.weights.copy_(torch.tensor([1.0, -2.0, 0.5]))
    return flat


X = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 4.0]], dtype=torch.float64)
Y = torch.tensor([2.0, -1.0], dtype=torch.float64)


def test_the_gradient_is_the_closed_form():
    flat = make_flat()
    residual = X @ flat.weights - Y
    loss = Replica(flat, half_squared_error).compute((X, Y))
    assert isinstance(loss, float)
    assert loss == pytest.approx(float(residual.square().mean() / 2), rel=1e-15)
    assert torch.allclose(flat.gradient, X.T @ residual / 2, rtol=1e-15, atol=0)


def test_nothing_of_the_last_batch_is_left():
    flat = make_flat()
    replica = Replica(flat, half_squared_error)
    replica.compute((X, Y))
    first = flat.gradient.clone()
    replica.compute((X[:1], Y[:1]))
    assert not torch.equal(flat.gradient, first)
    replica.compute((X, Y))
    assert torch.equal(flat.gradient, first)


def test_a_loss_that_clears_gradients_itself_is_gathered():
    def loss(model, x, y):
        model.zero_grad(set_to_none=True)
        return half_squared_error(model, x, y)

    plain, clearing = make_flat(), make_flat()
    Replica(plain, half_squared_error).compute((X, Y))
    Replica(clearing, loss).compute((X, Y))
    assert torch.equal(clearing.gradient, plain.gradient)


def test_without_arithmetic_the_gradient_stays_as_it_is():
    flat = make_flat()
    flat.gradient.fill_(7.0)
    assert math.isnan(Replica(flat, None).compute(()))
    assert flat.gradient.tolist() == [7.0] * 3
