"""Checks of a script's steps."""

import math

import pytest
import torch
from torch import nn

from hpcsync.core.step_problems import LOOKED_AT, StepChecks
from hpcsync.paradigms.records import Problem
from hpcsync.training.flat_model import FlatModel
from tests.unit.jobs import make_job

N_STEPS = 4


def make() -> tuple[nn.Module, torch.optim.Optimizer, FlatModel, StepChecks]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat = FlatModel(model, list(model.parameters()))
    return model, optimizer, flat, StepChecks(model, [optimizer], flat)


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 2, dtype=model[0].weight.dtype)).sum().backward()


def replace_head(model, optimizer):
    model[1] = nn.Linear(3, 1)


def add_layer(model, optimizer):
    model.append(nn.Linear(1, 1))


def add_group(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def cast(model, optimizer):
    model.double()


def move(model, optimizer):
    for p in model.parameters():
        p.data = p.data.clone()


def thaw(model, optimizer):
    model.requires_grad_(True)


def nothing(model, optimizer):
    pass


@pytest.mark.parametrize("change", [replace_head, add_layer, add_group, cast, move])
@pytest.mark.parametrize("at", [0, 1, N_STEPS])
def test_a_changed_model_is_noticed_in_the_next_steps_or_at_the_end(change, at):
    model, optimizer, flat, checks = make()
    found = []
    for step in range(N_STEPS):
        if step == at:
            change(model, optimizer)
        backward(model)
        found.append(checks.problem([1.0], flat.gradient))
    if at == N_STEPS:
        change(model, optimizer)
    assert found[:at] == [Problem.NONE] * at
    assert Problem.MODEL_CHANGED in found[at:] or checks.ended()


@pytest.mark.parametrize("change", [thaw, nothing])
def test_what_may_change(change):
    model, optimizer, flat, checks = make()
    for step in range(N_STEPS):
        if step == 1:
            change(model, optimizer)
        backward(model)
        assert checks.problem([1.0], flat.gradient) == Problem.NONE
    assert not checks.ended()


@pytest.mark.parametrize("at", [*range(N_STEPS)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_weights_that_a_script_has_changed_since_they_were_read(at, dtype):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat = FlatModel(model, list(model.parameters()))
    checks = StepChecks(model, [optimizer], flat)
    for step in range(N_STEPS):
        flat.weights.add_(1.0)
        flat.spread()
        checks.weights_were_read()
        if step == at:
            model[1].bias.data[0].mul_(1 + 4 * torch.finfo(dtype).eps)
        backward(model)
        assert checks.problem([1.0], flat.gradient) == (Problem.WEIGHTS_CHANGED if step == at else Problem.NONE)


@pytest.mark.parametrize("away", [1e-3, 0.05, 0.9])
@pytest.mark.parametrize("value", [0.0, 1e-9, 1e-5, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_were_moved_away_and_back_count_as_unchanged(away, value, dtype):
    """As by sharpness-aware minimisation, of weights that begin at 0, such as biases."""
    model = nn.Sequential(nn.Linear(2, 20), nn.Linear(20, 5)).to(dtype)
    flat = FlatModel(model, list(model.parameters()))
    checks = StepChecks(model, [torch.optim.SGD(model.parameters(), lr=0.1)], flat)
    generator = torch.Generator().manual_seed(1)
    flat.weights.copy_(value * torch.randn(flat.size, generator=generator))
    flat.spread()
    checks.weights_were_read()
    for parameter in model.parameters():
        change = (away * (2 * torch.rand(parameter.shape, generator=generator) - 1)).to(dtype)
        parameter.data.add_(change).sub_(change)
    backward(model)
    assert checks.problem([1.0], flat.gradient) == Problem.NONE


def test_a_change_of_few_elements_is_noticed_before_long():
    """As of the row of an embedding that a script sets to 0 after each step."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Embedding(50, 4))
    flat = FlatModel(model, list(model.parameters()))
    checks = StepChecks(model, [torch.optim.SGD(model.parameters(), lr=0.1)], flat)
    noticed = []
    for _ in range(200 // LOOKED_AT):
        checks.weights_were_read()
        model[2].weight.data[17] += 1.0
        noticed.append(checks.weights_changed())
    assert any(noticed) and not all(noticed)


def test_a_thawed_parameter_alone_has_a_new_gradient():
    model, _, flat, checks = make()
    model[0].requires_grad_(True)
    model[1].requires_grad_(False)
    backward(model)
    assert checks.problem([1.0], flat.gradient) == Problem.NONE


def test_a_forgotten_backward_is_noticed():
    model, _, flat, checks = make()
    backward(model)
    assert checks.problem([1.0], flat.gradient) == Problem.NONE
    assert checks.problem([1.0], flat.gradient) == Problem.NO_GRADIENT
    backward(model)
    assert checks.problem([1.0], flat.gradient) == Problem.NONE


@pytest.mark.parametrize(
    ("losses", "gradient", "found"),
    [
        ([1.0, 2.0], 0.0, Problem.NONE),
        ([1.0, math.inf], 0.0, Problem.LOSS_NOT_FINITE),
        ([math.nan], 0.0, Problem.LOSS_NOT_FINITE),
        ([], 0.0, Problem.NONE),
        ([], math.nan, Problem.GRADIENT_NOT_FINITE),
        ([], math.inf, Problem.GRADIENT_NOT_FINITE),
    ],
)
def test_numbers_that_are_not_finite(losses, gradient, found):
    model, _, flat, checks = make()
    backward(model)
    flat.gradient[3] = gradient
    assert checks.problem(losses, flat.gradient) == found


def test_the_loss_of_a_job():
    assert Problem.of_losses(0.5, 1.5) == Problem.NONE
    assert Problem.of_losses(0.5, math.nan) == Problem.LOSS_NOT_FINITE
    cluster = {"cluster": {"workers": 3}}
    assert make_job(**cluster).with_loss == range(3) and not make_job(workload={"name": "timing"}, **cluster).with_loss


def test_every_optimizer_may_step_once_with_a_gradient():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    checks, gradient = StepChecks(model, optimizers), torch.zeros(1)
    backward(model)
    found = [checks.problem([1.0], gradient, stepping) for stepping in (0, 1, 0)]
    assert found == [Problem.NONE, Problem.NONE, Problem.NO_GRADIENT]
