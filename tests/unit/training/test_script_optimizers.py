"""What a script's optimizers leave to hpcsync; whole runs are in tests/unit/mpi/test_script_optimizers.py."""

from __future__ import annotations

import copy

import pytest
import torch

from hpcsync.config.errors import JobError
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.optimizer_groups import lay_out_kept, scaled_rates
from hpcsync.training.piece_optimizer import PieceOptimizer
from hpcsync.training.script_optimizers import ScriptOptimizers, unscale
from tests.counting import Counting


class Scale:
    """Stands for a GradScaler's, in a GPU's memory: to read it is to wait for the GPU."""

    n_read = 0

    def __float__(self) -> float:
        self.n_read += 1
        return 4.0


def test_the_scale_of_a_scaler_is_read_once_for_all_parameters():
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(5)]
    for parameter in parameters[1:]:
        parameter.grad = torch.full((3,), 8.0)
    optimizer = torch.optim.SGD(parameters, 0.1)
    optimizer.grad_scale = scale = Scale()
    unscale(optimizer)
    assert parameters[0].grad is None and all((parameter.grad == 2).all() for parameter in parameters[1:])
    assert scale.n_read == 1


# ---- channels last: the n-th element in memory is not the n-th of the flat vector ----

SHAPE = (4, 3, 2, 2)


def convolution(dtype: torch.dtype) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A layer and its optimizer after a step, which has kept moments."""
    torch.manual_seed(1)
    model = torch.nn.Conv2d(SHAPE[1], SHAPE[0], SHAPE[2], bias=False).to(dtype, memory_format=torch.channels_last)
    adam = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    give_gradient(model, 0)
    adam.step()
    return model, adam


def give_gradient(model: torch.nn.Module, seed: int) -> None:
    gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(model.weight.dtype)
    model.weight.grad = torch.empty_like(model.weight).copy_(gradient)


def expected(dtype: torch.dtype) -> torch.Tensor:
    model, adam = convolution(dtype)
    give_gradient(model, 1)
    adam.step()
    return model.weight.detach()


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_step_is_that_of_the_script_where_channels_are_last(dtype, resumed):
    model, adam = convolution(dtype)
    flat = FlatModel(model, list(model.parameters()))
    script = ScriptOptimizers([adam], flat)
    own = script.on_worker(flat.weights)
    if resumed:  # arrays are contiguous in a checkpoint
        state = copy.deepcopy(own.state())
        state["kept"][0][0]["exp_avg"] = state["kept"][0][0]["exp_avg"].contiguous()
        own.restore(state)
    give_gradient(model, 1)
    flat.gather_gradient()
    own.step(flat.gradient, 1.0)
    assert torch.equal(model.weight.detach(), expected(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_servers_have_kept_is_laid_out_as_the_parameter(dtype):
    model, adam = convolution(dtype)
    moment = adam.state[model.weight]["exp_avg"].clone()
    flat = FlatModel(model, list(model.parameters()))
    script = ScriptOptimizers([adam], flat)
    row = torch.nn.Parameter(flat.weights.clone())
    kept = PieceOptimizer(script, row, slice(0, flat.size)).kept_pieces()
    adam.state.clear()
    script.adopt(kept)
    found = adam.state[model.weight]["exp_avg"]
    assert torch.equal(found, moment) and found.stride() == model.weight.stride()
    assert (dtype == torch.float32) == model.weight.is_contiguous(), "only the flat vector's own type is a view"


def test_what_an_optimizer_keeps_for_all_parameters_stays_as_it_is():
    """Optimizers of other packages keep some of their state under other keys than parameters."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state["k"] = torch.tensor([0])
    lay_out_kept([optimizer])
    assert optimizer.state["k"] == 0


def test_rates_are_the_script_s_own_again_after_a_step_that_failed():
    """A script may catch what its optimizer raises, and go on."""
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    with pytest.raises(ZeroDivisionError), scaled_rates(optimizer, 0.5):
        assert optimizer.param_groups[0]["lr"] == 0.05
        raise ZeroDivisionError
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_rates_that_a_step_changes_stay_changed():
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    for factor, expected in ((1.0, 0.05), (0.5, 0.025), (0.0, 0.025)):
        with scaled_rates(optimizer, factor):
            optimizer.param_groups[0]["lr"] *= 0.5
        assert optimizer.param_groups[0]["lr"] == expected


def test_a_rate_that_the_step_on_a_server_and_a_scheduler_change_is_refused():
    model = torch.nn.Linear(2, 1)
    optimizer = Counting(model.parameters(), lr=0.1, weight_decay=0.1)
    flat = FlatModel(model, list(model.parameters()))
    script = ScriptOptimizers([optimizer], flat)
    piece = PieceOptimizer(script, torch.nn.Parameter(flat.weights.clone()), slice(0, flat.size))
    for key in ("lr", "weight_decay"):  # the step changes the second one
        model(torch.ones(2)).sum().backward()
        stated = script.statement()
        piece.follow([stated])
        piece.step(flat.gradient, 1.0)
        optimizer.param_groups[0][key] *= 0.5
        stated[:] = script.statement()  # in the same memory, as of a worker's slot
        if key == "lr":
            piece.follow([stated])
    with pytest.raises(JobError, match="Counting: changes weight_decay in its step, on the servers"):
        piece.follow([stated])


def test_an_option_that_cannot_be_stated_must_stay():
    model = torch.nn.Linear(2, 1)
    flat = FlatModel(model, list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    script = ScriptOptimizers([optimizer], flat)
    optimizer.param_groups[0]["momentum"] = 0.5
    script.statement()
    optimizer.param_groups[0]["nesterov"] = True
    with pytest.raises(JobError, match="optimizer SGD: nesterov = true: must stay false where servers step"):
        script.statement()
