"""Halves of a model equal the model bit for bit; models that cannot be cut are refused with the reason."""

import contextlib
import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from hpcsync.training.flat_model import trainable
from hpcsync.training.model_split import cut, positions
from hpcsync.workloads.registry import cross_entropy


def seeded(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make()


def chain() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 6), nn.ReLU(), nn.Linear(6, 3)
    )


class Plain(nn.Module):
    """Functional calls on either side of the cut, and dropout by functions too."""

    def __init__(self, p: float = 0.0):
        super().__init__()
        self.p = p
        self.features = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU())
        self.classifier = nn.Sequential(nn.Linear(32, 6), nn.Dropout(p), nn.ReLU(), nn.Linear(6, 5))
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        x = functional.dropout(functional.relu(self.features(x) - 0.1), self.p, training=self.training)
        x = self.classifier(torch.flatten(x, 1).view(x.size(0), -1))
        return self.last(functional.dropout(torch.tanh(x), self.p, self.training))


class Block(nn.Module):
    """A model whose parameter is between two submodules, the first of which is called last."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 6)
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.scale = nn.Parameter(torch.tensor([1.5, -0.5]))
        self.register_buffer("shift", torch.tensor(0.25))

    def forward(self, x, mask=None):
        x = self.conv(x) * self.scale.view(1, -1, 1, 1) + self.shift
        return self.fc(torch.flatten(x, 1) if mask is None else x)


class Nested(nn.Module):
    """A model whose submodules are not in the order of their calls."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.block = Block()
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.stem = nn.Conv2d(1, 1, 1)

    def forward(self, x):
        return self.gain * self.out(torch.relu(self.block(self.stem(x))))


CASES = [(chain, "3"), (chain, "1"), (chain, "5"), (Plain, "classifier"), (Plain, "last"), (Plain, "classifier.2")]
CASES += [(Nested, "block.fc"), (Nested, "out"), (Nested, "block")]


def batch(n: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 1, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in trainable(model)]


# ---- the same model ----


@pytest.mark.parametrize(("make", "name"), CASES)
def test_halves_have_the_model_s_value_and_gradient(make, name):
    model = seeded(make).double()
    x, y = batch()
    loss = cross_entropy(model, x, y)
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    below, above = cut(model, name)
    h = below(x)
    entering = h.detach().requires_grad_()
    of_halves = cross_entropy(above, entering, y)
    of_halves.backward()
    h.backward(entering.grad)
    assert torch.equal(of_halves, loss)
    assert all(map(torch.equal, expected, gradients(model)))


@pytest.mark.parametrize(("make", "name"), CASES)
def test_every_parameter_is_in_one_half_in_the_model_s_order(make, name):
    model = seeded(make)
    halves = cut(model, name)
    below, above = map(trainable, halves)
    assert all(any(p is q for q in (*below, *above)) for p in trainable(model))
    for half in (below, above):
        assert list(map(id, half)) == [id(p) for p in trainable(model) if any(p is q for q in half)]


def test_the_submodule_is_the_first_of_the_upper_half():
    model = chain()
    below, above = cut(model, "3")
    assert [name for name, _ in below.named_children()] == ["0", "1", "2"]
    assert [name for name, _ in above.named_children()] == ["3", "4", "5"]
    assert above.get_submodule("3") is model[3]


@pytest.mark.parametrize(("make", "name"), CASES)
def test_positions_put_half_vectors_into_the_whole(make, name):
    model = seeded(make)
    whole = torch.cat([p.detach().flatten() for p in trainable(model)])
    again = torch.full_like(whole, torch.nan)
    for half in cut(model, name):
        vector, begin = torch.cat([p.detach().flatten() for p in trainable(half)]), 0
        for where in positions(model, half):
            again[where] = vector[begin : (begin := begin + where.stop - where.start)]
        assert begin == len(vector)
    assert torch.equal(again, whole)


def test_neighbours_are_one_slice():
    model = chain()
    assert [positions(model, half) for half in cut(model, "3")] == [[slice(0, 20)], [slice(20, 239)]]
    model = Nested()
    below, above = cut(model, "block.fc")
    assert positions(model, above) == [slice(0, 22), slice(24, 222)]
    assert positions(model, below) == [slice(22, 24), slice(222, 244)]


def test_halves_train_the_model_itself():
    model = seeded(Plain).double()
    halves = cut(model, "classifier")
    x, y = batch()
    before = cross_entropy(model, x, y)
    for half in halves:
        for parameter in half.parameters():
            parameter.data.mul_(0.5)
    assert cross_entropy(model, x, y) != before
    assert torch.equal(halves.above(halves.below(x)), model(x))


def test_a_copy_of_a_half_is_on_its_own():
    model = seeded(lambda: Plain(0.5)).double().eval()
    x, _ = batch()
    halves = cut(model, "classifier")
    expected = model(x)
    below, above = (copy.deepcopy(half) for half in halves)
    model.train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(above(below(x)), expected)
    assert not torch.equal(above.train()(below(x)), expected)
    assert model.training
    assert list(map(len, map(trainable, (below, above)))) == [2, 6]


def remembering(m, x):
    m.remembered = m.low(x)
    m.count.add_(1)
    return m.fc(m.remembered)


@pytest.mark.parametrize("forward", [remembering, lambda m, x: counted(m, x)])
def test_following_leaves_the_model_as_it_was(forward):
    model = Forward(forward)
    model.fc.eval()
    state = [{key: repr(value) for key, value in vars(module).items()} for module in model.modules()]
    with contextlib.suppress(ValueError):
        cut(model, "fc")
    assert [{key: repr(value) for key, value in vars(module).items()} for module in model.modules()] == state


def test_buffers_are_changed_by_the_halves_too():
    model = Forward(remembering)
    below, above = cut(model, "fc")
    assert torch.equal(above(below(torch.ones(2, 4))), model(torch.ones(2, 4)))
    assert model.count == 2


# ---- what cannot be cut ----


class Forward(nn.Module):
    """Two linear layers with a given forward."""

    def __init__(self, forward, **children):
        super().__init__()
        self.low, self.fc = nn.Linear(4, 4), nn.Linear(4, 4)
        self.constant = torch.ones(4)
        self.register_buffer("count", torch.zeros(()))
        for name, child in children.items():
            setattr(self, name, child)
        self._forward = [forward]

    def forward(self, x):
        return self._forward[0](self, x)


def counted(m, x):
    m.count += 1
    return m.fc(m.low(x))


def two_outputs(m, x):
    x = m.fc(m.low(x))
    return x, x


def skipping(m, x):
    low = m.low(x)
    return m.fc(torch.relu(low)) + low


CONTROL = "symbolically traced variables cannot be used as inputs to control flow"
FX = "the model's forward cannot be traced by torch.fx: "
# torch 2.6 refuses the assignment itself. (Versions of torch are compared as versions, not as text.)
ASSIGNED = "cannot assign" if torch.__version__ < "2.7" else "it assigns to a buffer, which it may only change in place"
TENSOR = "must be called with one tensor, which comes from the batch, and with nothing else"
BY = "is used after it: the lower half may pass on only the tensor that enters the submodule"
REFUSED = {
    "branch": (lambda m, x: m.fc(m.low(x)) if x.sum() > 0 else x, FX + CONTROL),
    "mode": (lambda m, x: m.fc(m.low(x)) if m.training else x, FX + CONTROL),
    "length": (lambda m, x: m.fc(m.low(x)).view(len(x), -1), FX + "'len' is not supported in symbolic tracing"),
    "constant": (
        lambda m, x: m.fc(m.low(x) + torch.ones(4)),
        FX + "it uses a tensor that is neither a parameter nor a buffer of the model",
    ),
    "attribute": (
        lambda m, x: m.fc(m.low(x) + m.constant),
        FX + "it uses a tensor that is neither a parameter nor a buffer of the model",
    ),
    "buffer": (counted, FX + ASSIGNED),
    "never": (
        lambda m, x: functional.linear(m.low(x), m.fc.weight),
        "must be called once by the model's forward, not 0",
    ),
    "twice": (lambda m, x: m.fc(m.fc(m.low(x))), "must be called once by the model's forward, not 2 times"),
    "keyword": (lambda m, x: m.fc(input=m.low(x)), TENSOR),
    "tuple": (lambda m, x: m.fc((m.low(x), x)), TENSOR),
    "own": (lambda m, x: m.fc(m.low.weight) + x, TENSOR),
    "two outputs": (two_outputs, "the model must return one tensor and nothing else"),
    "a dict": (lambda m, x: {"y": m.fc(m.low(x))}, "the model must return one tensor and nothing else"),
    "input": (lambda m, x: m.fc(m.low(x)) + x, f"the batch itself {BY}"),
    "rows": (lambda m, x: (n := x.size(0), m.fc(m.low(x)).view(n, -1))[1], f"size, which is computed before it, {BY}"),
    "skip": (skipping, f"low, which is computed before it, {BY}"),
    "tied": (
        lambda m, x: functional.linear(m.fc(m.low(x)), m.low.weight),
        "low.weight is used both before it and after it, and can be in one half only",
    ),
    "both": (lambda m, x: m.low(m.fc(m.low(x))), "low.weight is used both before it and after it"),
    "shared buffer": (
        lambda m, x: m.fc(m.low(x) + m.count) + m.count,
        "count is used both before it and after it, and can be in one half only",
    ),
    "below": (lambda m, x: m.fc(torch.relu(x)), "low.weight is not used by the model's forward"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_models_that_cannot_be_cut_are_refused(why):
    forward, reason = REFUSED[why]
    with pytest.raises(ValueError) as caught:
        cut(Forward(forward), "fc")
    assert str(caught.value).startswith(reason)
    assert "\n" not in str(caught.value)


def test_it_is_not_the_model_that_is_refused():
    cut(Forward(lambda m, x: m.fc(m.low(x))), "fc")


def test_an_unknown_submodule_is_reported_with_known_ones():
    model = Plain()
    top = "must be the name of a submodule (at the top: features, classifier, last)"
    for name, hint in (
        ("clasifier", "; did you mean classifier?"),
        ("classifier.9", "; did you mean classifier.3?"),
        ("p", ""),
        ("", ""),
    ):
        with pytest.raises(ValueError) as caught:
            cut(model, name)
        assert str(caught.value).startswith(top)
        assert hint.split(".")[0] in str(caught.value)
    with pytest.raises(ValueError, match="no submodules"):
        cut(nn.Linear(2, 2), "fc")


def test_a_half_without_parameters_is_refused():
    with pytest.raises(ValueError, match=r"^the model has no trainable parameters before it$"):
        cut(chain(), "0")
    frozen = chain()
    frozen[0].requires_grad_(False)
    with pytest.raises(ValueError, match="before it"):
        cut(frozen, "1")
    with pytest.raises(ValueError, match="from it on"):
        cut(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "1")


def test_an_unused_frozen_parameter_is_ignored():
    model = Forward(lambda m, x: m.fc(m.low(x)), unused=nn.Linear(2, 2).requires_grad_(False))
    cut(model, "fc")
    with pytest.raises(ValueError, match=r"^unused.weight is not used"):
        cut(Forward(lambda m, x: m.fc(m.low(x)), unused=nn.Linear(2, 2)), "fc")


def test_tied_parameters_can_be_in_one_half():
    model = Forward(lambda m, x: m.last(m.fc(m.low(x))), last=nn.Linear(4, 4))
    model.last.weight = model.fc.weight
    below, above = cut(model, "fc")
    assert [len(trainable(below)), len(trainable(above))] == [2, 3]
    model.last.weight = model.low.weight
    with pytest.raises(ValueError, match="low.weight is used both"):
        cut(model, "fc")


def test_a_module_without_parameters_may_be_called_on_both_sides():
    model = Forward(lambda m, x: m.relu(m.fc(m.relu(m.low(x)))), relu=nn.ReLU())
    below, above = cut(model, "fc")
    assert torch.equal(above(below(torch.ones(2, 4))), model(torch.ones(2, 4)))


def test_changes_in_place_take_effect():
    def forward(m, x):
        x = m.low(x)
        x.mul_(2.0)
        return m.fc(x)

    model = Forward(forward)
    below, above = cut(model, "fc")
    assert torch.equal(above(below(torch.ones(2, 4))), model(torch.ones(2, 4)))


def test_other_modules_are_not_traced():
    class Moody(nn.Module):
        def forward(self, x):
            return x if random.random() < 2 and x.sum() > 1e9 and self.training else 2 * x

    model = Forward(lambda m, x: m.fc(m.moody(m.low(x))), moody=Moody())
    below, above = cut(model, "fc")
    assert torch.equal(above(below(torch.ones(2, 4))), model(torch.ones(2, 4)))
