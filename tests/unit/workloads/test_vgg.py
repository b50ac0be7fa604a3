"""The small VGG: its shape and its cut."""

import pytest
import torch
from torch import nn

from hpcsync.training.model_split import activation_shape, check_cut, cut, positions
from hpcsync.workloads.registry import build, cross_entropy
from hpcsync.workloads.vgg import Standardise, Vgg
from tests.unit.jobs import make_job


def make(size=16, classes=10, *, width=4, hidden=32, dropout=0.0) -> Vgg:
    return Vgg(size, classes, mean=torch.zeros(3), std=torch.ones(3), width=width, hidden=hidden, dropout=dropout)


def images(n=5, size=16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (n, 3, size, size), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize(("size", "classes", "width", "hidden"), [(8, 2, 1, 3), (16, 10, 4, 32), (32, 100, 8, 16)])
def test_it_is_as_large_as_it_should_be(size, classes, width, hidden):
    model = make(size, classes, width=width, hidden=hidden)
    assert model(images(size=size)).shape == (5, classes)
    n_in = 4 * width * (size // 8) ** 2
    conv = [(3, 1), (1, 2), (2, 2), (2, 4), (4, 4)]
    below = sum(9 * a * b * (width if i == 0 else width * width) + b * width for i, (a, b) in enumerate(conv))
    above = (n_in + 1) * hidden + (hidden + 1) * hidden + (hidden + 1) * classes
    assert [sum(p.numel() for p in half.parameters()) for half in cut(model, "classifier")] == [below, above]


@pytest.mark.parametrize("name", ["images", "cifar10"])
def test_most_parameters_are_in_fully_connected_layers(name):
    table = make_job(workload={"name": name}).workload
    model = make({"images": 16, "cifar10": 32}[name], width=table.width, hidden=table.hidden)
    assert sum(p.numel() for p in model.classifier.parameters()) > 0.8 * sum(p.numel() for p in model.parameters())


def test_at_first_every_class_is_about_as_likely():
    workload = build(make_job(workload={"name": "images", "samples": 100}))
    assert cross_entropy(workload.model, *workload.train.tensors).item() == pytest.approx(2.303, abs=0.2)


def test_pixels_are_standardised_whatever_their_type():
    x = images()
    layer = Standardise(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 8.0]))
    assert torch.equal(layer(x)[:, 2], (x[:, 2].float() - 3.0) / 8.0)
    assert layer(x).dtype == torch.float32
    assert layer.double()(x).dtype == torch.float64
    assert not list(layer.parameters())


def test_it_leaves_nothing_out_unless_asked_to():
    x = images()
    model = make()
    state = torch.random.get_rng_state()
    assert torch.equal(model(x), model(x))
    assert torch.equal(torch.random.get_rng_state(), state)  # not even a draw
    model = make(dropout=0.5)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    assert [type(m) for m in model.classifier] == [*(2 * [nn.Linear, nn.ReLU, nn.Dropout]), nn.Linear]


def test_it_is_cut_into_two_pieces_of_the_flat_vector():
    model, x = make(), images()
    halves = cut(model, "classifier")
    assert activation_shape(halves.below, x) == (64,)
    assert [len(positions(model, half)) for half in halves] == [1, 1]
    check_cut(model, halves, cross_entropy, (x, torch.arange(5)))
