"""Optimizers by name."""

import inspect

import pytest
import torch

from hpcsync.training import optimizers
from hpcsync.training.optimizers import ELEMENTWISE, OptimizerSpec, step_flat


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_spec_builds_its_optimizer(name):
    optimizer = OptimizerSpec(name, 0.25).build(parameter())
    assert type(optimizer) is ELEMENTWISE[name]
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert bool(optimizer.param_groups[0].get("fused")) == ("fused" in inspect.signature(type(optimizer)).parameters)


def test_building_an_unknown_name_names_those_that_are_allowed():
    with pytest.raises(ValueError, match=r"'lbfgs': .*adam, .*sgd"):
        OptimizerSpec("lbfgs", 0.1).build(parameter())


STEPPED = [
    ("sgd", {}),
    ("sgd", {"weight_decay": 0.1, "maximize": True}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("sgd", {"momentum": 0.9, "dampening": 0.2}),
    ("adam", {}),
    ("adam", {"betas": (0.5, 0.8), "weight_decay": 0.1, "eps": 1e-3}),
    ("adamw", {"weight_decay": 0.1}),
    ("adamw", {"amsgrad": True, "maximize": True}),
    ("adagrad", {"lr_decay": 0.1}),
    ("rmsprop", {"momentum": 0.5}),
]


def stepped(name, options, dtype, by_torch: bool) -> list[torch.Tensor]:
    """The weights and what the optimizer keeps, after steps whose rate, momentum and memory change."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.nn.Parameter(torch.randn(192, generator=generator, dtype=dtype))
    optimizer = OptimizerSpec(name, 0.1, options).build(weights)
    for step in range(8):
        gradient, lr = torch.randn(192, generator=generator, dtype=dtype), 0.1 / (1 + step)
        if step == 4:
            weights.data = weights.data.clone()  # as when the server changes to another buffer
            if "momentum" in options:
                optimizer.param_groups[0]["momentum"] = 0.4
        if by_torch:
            weights.grad, optimizer.param_groups[0]["lr"] = gradient, lr
            optimizer.step()
        else:
            step_flat(optimizer, weights, gradient, lr)
    kept = optimizer.state_dict()["state"].get(0, {})
    return [weights.data, *(kept[key] for key in sorted(kept) if isinstance(kept[key], torch.Tensor))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "options"), STEPPED)
def test_a_direct_step_is_that_of_torch_to_the_bit(name, options, dtype):
    expected, found = stepped(name, options, dtype, True), stepped(name, options, dtype, False)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("name", "options"), [("sgd", {"momentum": 0.9}), ("adam", {})])
def test_a_wrong_kernel_is_noticed(monkeypatch, name, options):
    kind = ELEMENTWISE[name]
    kernel = optimizers._KERNELS[kind]
    monkeypatch.setitem(
        optimizers._KERNELS, kind, lambda group, *others: kernel({**group, "lr": 2 * group["lr"]}, *others)
    )
    expected, found = (stepped(name, options, torch.float32, by_torch) for by_torch in (True, False))
    assert not torch.equal(found[0], expected[0])
