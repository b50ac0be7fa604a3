"""Optimizers by name, and specs of users' optimizers."""

import pytest
import torch

from hpcsync.training.optimizers import ELEMENTWISE, OptimizerSpec


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_spec_builds_its_optimizer_and_is_recovered_from_it(name):
    optimizer = OptimizerSpec(name, 0.25).build(parameter())
    assert type(optimizer) is ELEMENTWISE[name]
    spec = OptimizerSpec.of(optimizer)
    assert (spec.name, spec.lr) == (name, 0.25)
    assert OptimizerSpec.of(spec.build(parameter())) == spec


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD([parameter()], lr=0.5, momentum=0.9, nesterov=True, weight_decay=1e-3, maximize=True),
        torch.optim.Adam([parameter()], lr=0.5, betas=(0.8, 0.9), eps=1e-3, amsgrad=True),
        torch.optim.AdamW([parameter()], lr=torch.tensor(0.5), weight_decay=0.1),
        torch.optim.Rprop([parameter()], lr=0.5, etas=(0.4, 1.3), step_sizes=(1e-5, 2.0)),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_a_users_optimizer_and_its_spec_make_the_same_updates(optimizer):
    mine = optimizer.param_groups[0]["params"][0]
    theirs = parameter()
    built = OptimizerSpec.of(optimizer).build(theirs)
    for gradient in ([1.0, -2.0, 0.5], [0.5, 1.0, 0.25]):
        mine.grad, theirs.grad = torch.tensor(gradient), torch.tensor(gradient)
        optimizer.step()
        built.step()
    assert not torch.equal(mine, torch.ones(3))
    assert torch.allclose(mine, theirs, rtol=1e-6, atol=0)


def test_a_spec_says_nothing_of_the_implementation():
    for settings in ({"foreach": True}, {"fused": True}, {"differentiable": True}):
        options = OptimizerSpec.of(torch.optim.SGD([parameter()], lr=0.1, **settings)).options
        assert not options.keys() & {"foreach", "fused", "capturable", "differentiable", "params", "lr"}


class SGD(torch.optim.SGD):
    """A user's optimizer with the name of one of torch."""


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.LBFGS([parameter()]), "optimizer LBFGS: "),
        (torch.optim.Adafactor([parameter()]), "optimizer Adafactor: "),
        (SGD([parameter()], lr=0.1), "optimizer SGD: "),
        (torch.optim.SGD([{"params": parameter()}, {"params": parameter(), "lr": 1.0}]), "2 parameter groups"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_optimizers_that_cannot_run_on_pieces_are_refused(optimizer, message):
    with pytest.raises(ValueError, match=message):
        OptimizerSpec.of(optimizer)


def test_building_an_unknown_name_names_those_that_are_allowed():
    with pytest.raises(ValueError, match=r"'lbfgs': .*adam, .*sgd"):
        OptimizerSpec("lbfgs", 0.1).build(parameter())
