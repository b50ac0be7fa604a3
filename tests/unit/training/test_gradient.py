"""A replica writes the gradient of one batch to the flat gradient."""

import math

import pytest
import torch
from torch import nn

from hpcsync.training.flat_model import FlatModel
from hpcsync.training.gradient import Replica, piece_shares
from hpcsync.workloads.registry import half_squared_error


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


# ---- in pieces ----

MORE_X = torch.randn(10, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MORE_Y = torch.randn(10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize(
    ("n_samples", "n_pieces", "shares"),
    [(8, 4, [0.25, 0.5, 0.75, 1.0]), (10, 4, [0.3, 0.6, 0.8, 1.0]), (2, 4, [0.5, 1.0]), (1, 4, [1.0]), (5, 1, [1.0])],
)
def test_micro_batches_are_as_equal_as_possible(n_samples, n_pieces, shares):
    assert piece_shares(n_samples, n_pieces) == shares


@pytest.mark.parametrize("n_pieces", [1, 2, 3, 4, 10, 99])
def test_all_pieces_are_the_whole_batch(n_pieces):
    whole, pieces, asked = make_flat(), make_flat(), []
    loss = Replica(whole, half_squared_error).compute((MORE_X, MORE_Y))

    def never(share: float) -> bool:
        asked.append(share)
        return False

    assert Replica(pieces, half_squared_error).compute_in_pieces((MORE_X, MORE_Y), n_pieces, never) == pytest.approx(
        loss, rel=1e-14
    )
    assert torch.allclose(pieces.gradient, whole.gradient, rtol=0, atol=1e-14)
    assert asked == piece_shares(10, n_pieces)[:-1], "not after the last one"


def test_a_cancelled_batch_is_left_after_that_piece():
    """The loss is the mean of the samples computed."""
    flat, seen = make_flat(), []

    def loss(model, x, y):
        seen.append(len(x))
        return half_squared_error(model, x, y)

    found = Replica(flat, loss).compute_in_pieces((MORE_X, MORE_Y), 4, lambda share: share >= 0.6)
    assert seen == [3, 3]
    assert found == pytest.approx(Replica(make_flat(), half_squared_error).compute((MORE_X[:6], MORE_Y[:6])), rel=1e-14)


def test_pieces_of_a_loss_that_clears_gradients_itself_are_all_there():
    def loss(model, x, y):
        model.zero_grad(set_to_none=True)
        return half_squared_error(model, x, y)

    plain, clearing = make_flat(), make_flat()
    Replica(plain, half_squared_error).compute((MORE_X, MORE_Y))
    Replica(clearing, loss).compute_in_pieces((MORE_X, MORE_Y), 3, lambda share: False)
    assert torch.allclose(clearing.gradient, plain.gradient, rtol=0, atol=1e-14)


def test_without_arithmetic_pieces_are_asked_about_all_the_same():
    asked = []
    assert math.isnan(Replica(make_flat(), None).compute_in_pieces((), 4, lambda share: bool(asked.append(share))))
    assert asked == [0.25, 0.5, 0.75]
