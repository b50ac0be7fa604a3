"""Workloads: reproducible from the job alone, and evaluated correctly."""

import math
import sys
from functools import partial
from types import ModuleType

import numpy as np
import psutil
import pytest
import torch

from hpcsync.config.errors import JobError
from hpcsync.training.flat_model import FlatModel
from hpcsync.workloads.registry import (
    Workload,
    aimed,
    build,
    classification,
    cross_entropy,
    evaluated,
    half_squared_error,
)
from tests.unit.jobs import LINEAR, make_job, refusal


def make(name, seed=1, **settings) -> Workload:
    return build(make_job(workload={"name": name, **settings}, seed=seed))


def numbers_of(workload: Workload) -> list[torch.Tensor]:
    data = workload.train.tensors if workload.train is not None else ()
    return [FlatModel(workload.model).weights, *data]


@pytest.mark.parametrize("name", ["digits", "images", "linear", "text", "timing"])
def test_the_same_job_gives_the_same_numbers(name):
    before = torch.random.get_rng_state()
    a, b = numbers_of(make(name)), numbers_of(make(name))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert torch.equal(torch.random.get_rng_state(), before)  # the program's own numbers are left alone


@pytest.mark.parametrize("name", ["digits", "images", "linear", "text"])
def test_another_seed_gives_other_weights(name):
    assert not torch.equal(numbers_of(make(name, seed=1))[0], numbers_of(make(name, seed=2))[0])


def test_linear_has_the_optimum_that_least_squares_finds():
    workload = build(make_job(workload={**LINEAR, "noise": 0.5}))
    x, y = workload.train.tensors
    assert x.shape == (60, 5)
    assert x.dtype == torch.float64
    flat = FlatModel(workload.model)
    optimum = torch.from_numpy(np.linalg.lstsq(x.numpy(), y.numpy(), rcond=None)[0])
    flat.weights.copy_(optimum)
    best, accuracy = workload.evaluate(flat.model)
    assert math.isnan(accuracy)
    assert best == pytest.approx(float((x @ optimum - y).square().mean() / 2), rel=1e-12)
    for direction in torch.eye(5, dtype=torch.float64):
        for step in (-1e-3, 1e-3):
            flat.weights.copy_(optimum + step * direction)
            assert workload.evaluate(flat.model)[0] > best


def test_linear_without_noise_can_be_fitted_exactly():
    x, y = build(make_job(workload={**LINEAR, "noise": 0.0})).train.tensors
    assert np.linalg.lstsq(x.numpy(), y.numpy(), rcond=None)[1] < 1e-20


def test_the_loss_is_half_the_mean_squared_error():
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(2.0)
    assert half_squared_error(model, torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 2.0])).item() == 5.0


def test_digits_are_held_out_of_training():
    workload = make("digits")
    images, labels = workload.train.tensors
    assert images.shape == (1437, 1, 8, 8)
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert labels.unique().tolist() == list(range(10))
    judged = []
    workload.evaluate(Spy(judged))
    (held_out,) = judged
    assert len(held_out) == 360
    together = torch.cat([images, held_out]).flatten(1)
    assert len(together.unique(dim=0)) == 1797  # no image is in both
    assert FlatModel(workload.model).size == 13_706
    assert cross_entropy(workload.model, images, labels).item() == pytest.approx(math.log(10), rel=0.1)


class Spy(torch.nn.Module):
    def __init__(self, judged):
        super().__init__()
        self._judged = judged
        self.where = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        self._judged.append(x)
        return torch.zeros(len(x), 10)


def test_classification_judges_a_model_in_evaluation_mode_and_without_gradients():
    x = torch.eye(4)
    model = torch.nn.Sequential(torch.nn.Dropout(0.99), torch.nn.Linear(4, 4, bias=False))
    model[1].weight.data = 50 * torch.eye(4)
    loss, accuracy = classification(x, torch.tensor([0, 1, 2, 0]))(model)
    assert accuracy == 0.75
    assert loss == pytest.approx(50 / 4, rel=1e-6)
    assert model[1].weight.grad is None


def test_timing_only_has_parameters():
    workload = make("timing", parameters=77)
    assert FlatModel(workload.model).size == 77
    assert (workload.loss, workload.train, workload.evaluate) == (None, None, None)


def test_a_large_timing_model_takes_no_memory_until_it_is_used():
    def resident():
        return psutil.Process().memory_info().rss

    before = resident()
    values = make("timing", parameters=2**28).model.values
    assert resident() - before < 10**8
    values.sum()
    values.data.fill_(1.0)  # the control: a GiB that is used
    assert resident() - before > 2**30 - 10**8


@pytest.fixture
def module(monkeypatch) -> ModuleType:
    module = ModuleType("a_module")
    monkeypatch.setitem(sys.modules, "a_module", module)
    return module


def test_a_users_function_is_called_with_its_options_and_the_jobs_seed(module):
    module.make = lambda width: Workload(torch.nn.Linear(width, 1), None, None, None)
    a = make("a_module:make", options={"width": 6})
    assert a.model.in_features == 6
    torch.manual_seed(1)
    assert torch.equal(a.model.weight, torch.nn.Linear(6, 1).weight)
    assert not torch.equal(a.model.weight, make("a_module:make", 2, options={"width": 6}).model.weight)


MUST_BE_FOUND = "must name a function that can be imported: "


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_module:make", MUST_BE_FOUND + "No module named 'no_module'"),
        ("a_module:nothing", MUST_BE_FOUND + "module 'a_module' has no attribute 'nothing'"),
        ("a_module:number", "must name a function"),
        ("a_module:other", "must return a hpcsync.Workload"),
    ],
)
def test_a_function_that_serves_not_is_refused(module, name, message):
    module.other = lambda: torch.nn.Linear(1, 1)
    module.number = 3
    assert refusal(make, name) == f'workload.name = "{name}": {message}'


def test_options_that_the_function_does_not_have_are_refused(module):
    module.make = lambda width: None
    message = refusal(make, "a_module:make", options={"height": 6})
    assert message.startswith('workload.options = {"height": 6}: must fit a_module:make: ')


def test_a_script_builds_its_own():
    with pytest.raises(
        JobError, match='workload.name = "script": must be another workload; start the training script itself'
    ):
        make_script = make_job(workload={"name": "script"})
        build(make_script)


@pytest.mark.parametrize("wrong", [0.5, torch.tensor(0.5), (0.5,), (1, 2, 3), None, {"loss": 0.5, "accuracy": 0.2}])
def test_an_evaluation_must_return_loss_and_accuracy(wrong):
    with pytest.raises(JobError, match=r"^evaluate must return \(loss, accuracy\), it returned ") as caught:
        evaluated(lambda model: wrong, torch.nn.Linear(1, 1))
    assert len(str(caught.value)) < 120
    right = evaluated(lambda model: (torch.tensor(0.5), np.float32(0.25)), torch.nn.Linear(1, 1))
    assert right == (0.5, 0.25)


def test_a_target_without_an_accuracy_is_refused_at_the_first_evaluation():
    """Such a run would not end. The control: no target, and a run that diverges."""
    for accuracy, loss, target in ((math.nan, 0.5, None), (math.nan, math.nan, 0.9), (0.1, 0.5, 0.9)):
        aimed(lambda model, result=(loss, accuracy): result, target)(torch.nn.Linear(1, 1))
    diverged, undefined = (math.nan, math.nan), (0.5, math.nan)
    for results in ([undefined], [diverged, undefined]):
        judge = aimed(partial(lambda results, model: next(results), iter(results)), 0.9)
        with pytest.raises(JobError, match=r"^stop.target_accuracy = 0.9: must be omitted: evaluate returns no accura"):
            [judge(torch.nn.Linear(1, 1)) for _ in results]


def test_an_evaluation_that_had_an_accuracy_before_a_resume_needs_none():
    """`test_a_target_without_an_accuracy_is_refused_at_the_first_evaluation` is the control."""
    undefined = aimed(lambda model: (0.5, math.nan), 0.9, has_accuracy=True)(torch.nn.Linear(1, 1))
    np.testing.assert_equal(undefined, (0.5, math.nan))


def test_a_later_evaluation_without_an_accuracy_does_not_end_the_run_and_is_said_once(capsys):
    results = [(0.5, 0.2), (math.inf, math.nan), (0.5, math.nan), (0.4, math.nan), (0.4, 0.3)]
    for target, n_lines in ((0.9, 1), (None, 0)):
        judge = aimed(partial(lambda results, model: next(results), iter(results)), target)
        np.testing.assert_equal([judge(torch.nn.Linear(1, 1)) for _ in results], results)
        lines = capsys.readouterr().err.splitlines()
        told = "hpcsync: stop.target_accuracy = 0.9: an evaluation has no accuracy (NaN), which does not reach it"
        assert lines == [told] * n_lines
