"""Optimizers by name."""

import pytest
import torch

from hpcsync.training.optimizers import ELEMENTWISE, OptimizerSpec


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_spec_builds_its_optimizer(name):
    optimizer = OptimizerSpec(name, 0.25).build(parameter())
    assert type(optimizer) is ELEMENTWISE[name]
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_building_an_unknown_name_names_those_that_are_allowed():
    with pytest.raises(ValueError, match=r"'lbfgs': .*adam, .*sgd"):
        OptimizerSpec("lbfgs", 0.1).build(parameter())
