"""Parameters that no optimizer has: what changes is in a checkpoint, and the rest must be as it was."""

import pytest
import torch

from hpcsync.state import StateError
from hpcsync.training.untrained import UntrainedParameters

MESSAGE = (
    "^parameter fixed.weight: is in no optimizer, and its initial values are not those of the run that is resumed: "
    "initialise it as there, for example after torch.manual_seed$"
)


def created(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in ("trained", "average", "fixed")})
    model["fixed"].seen = torch.nn.Parameter(torch.tensor(0), requires_grad=False)
    model["fixed"].halves = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    return model, UntrainedParameters(model, [*model["trained"].parameters()])


def test_what_has_changed_is_in_the_state_and_restored():
    model, untrained = created()
    assert untrained.state()["changed"] == {}
    average = model["average"].weight
    average.data += 1.0  # of which torch keeps no version
    model["fixed"].seen.data = torch.tensor(3)
    with torch.no_grad():
        model["trained"].weight.zero_()
        model["fixed"].halves[1] = -0.0  # a sum would not notice this
    state = untrained.state()
    assert state["changed"].keys() == {"average.weight", "fixed.seen", "fixed.halves"}
    assert state["same"].keys() == {"fixed.weight"}

    again, untrained = created()
    untrained.restore(state)
    assert torch.equal(again["average"].weight, average)
    assert again["fixed"].seen.item() == 3
    assert again["trained"].weight.any(), "not restored here"
    assert untrained.state()["changed"].keys() == state["changed"].keys(), "in the next checkpoint too"


def test_initial_values_that_differ_from_those_of_the_run_are_refused():
    _, untrained = created()
    state = untrained.state()
    created()[1].restore(state)
    model, _ = created()
    with torch.no_grad():
        model["fixed"].weight[0, 0] += 1.0
    with pytest.raises(StateError, match=MESSAGE):
        UntrainedParameters(model, [*model["trained"].parameters()]).restore(state)
