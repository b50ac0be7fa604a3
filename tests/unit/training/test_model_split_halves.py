"""Properties of halves: modes and statistics, sizes and operations, and losses that they can compute."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from hpcsync.planning.split_cost import Shape
from hpcsync.training.model_split import ModelSplit, activation_shape, check_cut, cut, flops, shape
from hpcsync.workloads.registry import cross_entropy
from tests.unit.training.test_model_split import Forward, Plain, batch, chain, seeded

# ---- modes ----


def test_dropout_is_on_and_off_with_the_model():
    model = seeded(lambda: Plain(0.5)).double()
    halves = cut(model, "classifier")
    x, _ = batch()

    def drawn(compute) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return compute(x)

    def in_halves(x):
        return halves.above(halves.below(x))

    training = drawn(model)
    assert torch.equal(drawn(in_halves), training)
    model.eval()
    assert torch.equal(drawn(in_halves), drawn(model))
    assert not torch.equal(drawn(model), training)
    for half in halves:
        half.train()
    assert torch.equal(drawn(in_halves), training)


def test_one_half_can_be_evaluated_while_the_other_trains():
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4), nn.Dropout()))
    below, above = cut(model, "2")
    below.eval()
    x = torch.ones(8, 4)
    assert torch.equal(below(x), below(x))
    assert not torch.equal(above(x), above(x))


def test_batch_norm_keeps_its_statistics_in_the_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    below, _ = cut(model, "2")
    below(torch.randn(16, 4))
    assert model[1].num_batches_tracked == 1
    mean = model[1].running_mean.clone()
    model.eval()
    below(torch.randn(16, 4))
    assert torch.equal(model[1].running_mean, mean)


# ---- shapes and work ----


def test_the_shape_at_the_cut_is_of_one_sample():
    below, _ = cut(chain(), "3")
    assert activation_shape(below, batch(3)[0].float()) == (32,)
    below, _ = cut(chain(), "1")
    assert activation_shape(below, batch(1)[0].float()) == (2, 4, 4)


def test_a_shape_is_found_without_computing_and_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    below, _ = cut(model, "3")
    state = torch.random.get_rng_state()
    assert activation_shape(below, torch.ones(1, 4)) == (4,)  # one row: BatchNorm would refuse it in training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training
    assert model[1].training
    assert model[1].num_batches_tracked == 0
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (nn.Flatten(0), "must have one row per sample: of 2 samples it has shape (8,)"),
        (nn.LSTM(4, 4), "must be one tensor of floating-point numbers, not tuple"),
        (nn.Linear(5, 4), "must have a shape that can be determined: "),
    ],
)
def test_activations_must_be_rows_of_numbers(between, reason):
    below, _ = cut(nn.Sequential(nn.Linear(4, 4), between, nn.Linear(4, 4)), "2")
    with pytest.raises(ValueError) as caught:
        activation_shape(below, torch.ones(2, 4))
    assert str(caught.value).startswith(f"what enters it {reason}")
    assert "\n" not in str(caught.value)


def test_work_is_counted_in_multiplications_and_additions():
    below, above = cut(chain(), "3")
    x = batch(5)[0].float()
    assert flops(below, x) == 5 * 2 * 16 * 2 * 9
    assert flops(above, torch.empty(5, 32, device="meta")) == 5 * 2 * (32 * 6 + 6 * 3)


def test_the_shape_is_of_one_sample():
    halves, sizes = cut(chain(), "3"), (20, 32 * 6 + 6 + 6 * 3 + 3, 32)
    x, y = batch(5)
    found = shape(halves, (x.float(), y, torch.zeros(5, 2)))
    assert found == Shape(*sizes, label_bytes=8 + 2 * 4, conv_flops=2 * 16 * 2 * 9, fc_flops=2 * (32 * 6 + 6 * 3))
    assert shape(cut(chain().double(), "3"), (x, y)) == found._replace(label_bytes=8, itemsize=8)
    assert [*found.attributes().values()] == [20 * 4, 219 * 4, 32 * 4, 16]


# ---- the loss ----


def twice(model, x, y):
    return cross_entropy(model, x, y) + cross_entropy(model, x.flip(-1), y)


def with_decay(model, x, y):
    return cross_entropy(model, x, y) + 0.1 * sum(p.square().sum() for p in model.parameters())


def by_attribute(model, x, y):
    return functional.cross_entropy(model.classifier(model.features(x).flatten(1)), y)


def test_a_loss_that_calls_the_model_once_is_computed_by_halves():
    model = Plain(0.5).double()
    model.classifier.eval()
    state = torch.random.get_rng_state()
    modes = [module.training for module in model.modules()]
    check_cut(model, cut(model, "classifier"), cross_entropy, batch())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("loss", [twice, with_decay])
def test_a_loss_that_does_more_is_refused(loss):
    model = seeded(Plain).double()
    with pytest.raises(ValueError, match="^the loss of a batch computed in halves must be that of the model"):
        check_cut(model, cut(model, "classifier"), loss, batch())


def test_a_loss_that_looks_into_the_model_is_refused():
    model = seeded(Plain).double()
    with pytest.raises(ValueError, match="^the loss cannot be computed from what enters it: .*has no attribute"):
        check_cut(model, cut(model, "classifier"), by_attribute, batch())


def test_halves_of_another_model_are_refused():
    model = seeded(Plain).double()
    halves = cut(model, "classifier")
    mixed = ModelSplit(halves.below, copy.deepcopy(halves.above))
    check_cut(model, halves, cross_entropy, batch())
    with pytest.raises(ValueError):
        check_cut(model, mixed, cross_entropy, batch())


def test_a_gradient_that_forward_keeps_back_is_missed():
    def forward(m, x):
        with torch.no_grad():  # which torch.fx does not see
            x = m.low(x)
        return m.fc(x)

    model = Forward(forward)
    with pytest.raises(ValueError, match="^the gradient of a batch computed in halves must be that of the model"):
        check_cut(model, cut(model, "fc"), cross_entropy, (torch.ones(2, 4), torch.tensor([0, 1])))


def test_activations_must_not_be_overwritten():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    x, y = torch.ones(2, 4), torch.tensor([0, 1])
    check_cut(model, cut(model, "2"), cross_entropy, (x, y))
    with pytest.raises(ValueError, match="must not change its input in place"):
        check_cut(model, cut(model, "1"), cross_entropy, (x, y))
