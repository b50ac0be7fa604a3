"""Jobs whose errors only torch can find: one line each with key, value and allowed values."""

import math
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.data import TensorDataset

from hpcsync.config.errors import JobError
from hpcsync.core.job_validation import check, check_model, optimizer_spec
from hpcsync.training.optimizers import ELEMENTWISE, OptimizerSpec
from hpcsync.workloads.registry import Workload
from tests.unit.jobs import LINEAR, make_job, refusal

ALL = ", ".join(sorted(ELEMENTWISE))


def refused(**tables) -> str:
    return refusal(lambda: check(make_job(**tables)))


@pytest.fixture(autouse=True)
def module(monkeypatch) -> ModuleType:
    """Register user workloads under the name `mine`."""

    def judge(model):
        return 0.0, 0.0

    def make(*layers, evaluate=True):
        data = TensorDataset(torch.zeros(10, 2), torch.zeros(10))
        model = torch.nn.Sequential(*layers)
        return Workload(model, lambda model, x, y: model(x).sum(), data, judge if evaluate else None)

    module = ModuleType("mine")
    module.normalised = lambda evaluate: make(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), evaluate=evaluate)
    module.half = lambda: make(torch.nn.Linear(2, 2, dtype=torch.float16))
    module.fixed = lambda: make(torch.nn.ReLU())
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"optimizer": {"name": "adamw", "lr": 0.1, "betas": [0.8, 0.9], "weight_decay": 0.1}},
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}},
        {"cluster": {"servers": 5}},
        {"workload": {**LINEAR, "batch_size": 60}},
        {"workload": {"name": "timing", "batch_size": 10**6}},
        {"stop": {"target_loss": 0.1}},
        {"workload": {"name": "mine:normalised", "batch_size": 4, "options": {"evaluate": False}}},
        {"workload": {"name": "mine:normalised", "batch_size": 4, "options": {"evaluate": True}}},
    ],
)
def test_valid_jobs_pass(tables):
    assert isinstance(check(make_job(**tables)), Workload)


def test_the_spec_is_the_jobs():
    job = make_job(optimizer={"name": "adam", "lr": 0.25, "eps": 0.5, "lr_clock": "updates"})
    assert optimizer_spec(job) == OptimizerSpec("adam", 0.25, {"eps": 0.5})


@pytest.mark.parametrize(
    ("name", "hint"),
    [("adm", "; did you mean adam?"), ("lbfgs", ""), ("muon", ""), ("adafactor", ""), ("SGD", "")],
)
def test_an_unknown_optimizer(name, hint):
    message = refused(optimizer={"name": name, "lr": 0.1})
    expected = f'optimizer.name = "{name}": must be one of {ALL}'
    assert message == expected + hint if hint else message.startswith(expected)


OPTION = (
    "must be an option of torch.optim.SGD (momentum, dampening, weight_decay, nesterov, maximize) or one of lr, "
    "lr_clock, async_lr_scale, schedule"
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentun": 0.9}, f"optimizer.momentun = 0.9: {OPTION}; did you mean momentum?"),
        ({"betas": [0.9, 0.99]}, f"optimizer.betas = [0.9, 0.99]: {OPTION}"),
        ({"params": 1}, f"optimizer.params = 1: {OPTION}"),
        ({"fused": True}, f"optimizer.fused = true: {OPTION}"),
        ({"foreach": True}, f"optimizer.foreach = true: {OPTION}"),
        ({"momentum": -1.0}, 'optimizer = {"momentum": -1.0}: torch says: Invalid momentum value: -1.0'),
    ],
)
def test_options_of_the_optimizer(options, message):
    assert refused(optimizer={"name": "sgd", "lr": 0.1, **options}) == message


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"nesterov": True}),
        ("adam", {"betas": [0.9, 1.5]}),
        ("rprop", {"etas": [1.5, 0.5]}),
        ("asgd", {"lambd": -10.0}),  # with which its first step divides by zero
        ("asgd", {"lambd": -5.0}),  # and its second one
        ("rmsprop", {"alpha": 1e308}),  # more than a float32 holds
    ],
)
def test_values_that_torch_refuses(name, options):
    assert refused(optimizer={"name": name, "lr": 0.1, **options}).startswith("optimizer = {")


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("adam", {"betas": [0.9]}, "betas = [0.9]: must be a list of 2 numbers, such as [0.9, 0.999]"),
        ("adam", {"betas": 0.9}, "betas = 0.9: must be a list of 2 numbers, such as [0.9, 0.999]"),
        ("rprop", {"etas": [0.5, "a"]}, 'etas = [0.5, "a"]: must be a list of 2 numbers, such as [0.5, 1.2]'),
        ("sgd", {"momentum": "high"}, 'momentum = "high": must be a finite number, such as 0'),
        ("sgd", {"momentum": math.nan}, "momentum = NaN: must be a finite number, such as 0"),
        (
            "rprop",
            {"step_sizes": [1e-6, math.nan]},
            "step_sizes = [1e-06, NaN]: must be a list of 2 numbers, such as [1e-06, 50]",
        ),
        ("sgd", {"weight_decay": math.inf}, "weight_decay = inf: must be a finite number, such as 0"),
        ("sgd", {"momentum": -math.inf}, "momentum = -inf: must be a finite number, such as 0"),
        ("sgd", {"dampening": True}, "dampening = true: must be a finite number, such as 0"),
        ("sgd", {"nesterov": 1}, "nesterov = 1: must be true or false"),
    ],
)
def test_options_of_another_kind_than_torch_s_are_told_with_what_is_allowed(name, option, message):
    assert refused(optimizer={"name": name, "lr": 0.1, **option}) == f"optimizer.{message}"


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"cluster": {"servers": 6}}, "cluster.servers = 6: must be at most the model's 5 parameters"),
        (
            {"workload": {**LINEAR, "batch_size": 61}},
            "workload.batch_size = 61: must be 1 to 60, the samples of the data set",
        ),
        (
            {"workload": {"name": "timing"}, "stop": {"target_accuracy": 0.5}},
            'stop.target_accuracy = 0.5: workload.name = "timing" must be one that can be evaluated',
        ),
        (
            {"workload": {"name": "timing"}, "stop": {"updates": 5, "target_loss": 0.5}},
            'stop.target_loss = 0.5: workload.name = "timing" must be one that can be evaluated',
        ),
        (
            {
                "workload": {"name": "mine:normalised", "batch_size": 4, "options": {"evaluate": False}},
                "paradigm": {"name": "adsp", "loss": "evaluation"},
            },
            'paradigm.loss = "evaluation": workload.name = "mine:normalised" must be one that can be evaluated',
        ),
        (
            {"workload": {"name": "mine:half"}},
            'workload.name = "mine:half": the model has torch.float16: allowed is one type for all, float32 or float64',
        ),
        (
            {"workload": {"name": "mine:fixed"}},
            'workload.name = "mine:fixed": the model has no trainable parameters: '
            "allowed is one type for all, float32 or float64",
        ),
    ],
)
def test_impossible_combinations(tables, message):
    assert refused(**tables) == message


def cut_workload(n_samples, calls=1):
    """A model of two layers, whose loss calls it so often."""

    def loss(model, x, y):
        return sum(model(n * x).sum() for n in range(1, calls + 1))

    layers = torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)
    data = TensorDataset(torch.rand(n_samples, 5), torch.zeros(n_samples))
    return Workload(torch.nn.Sequential(*layers), loss, data, None)


def test_a_cut_is_tried_with_the_first_samples(module):
    module.cut = cut_workload

    def tables(**options):
        workload = {"name": "mine:cut", "batch_size": 1, "options": options}
        return {"workload": workload, "paradigm": {"name": "stanza", "cut": "2", "fc_workers": 1}}

    for n_samples in (1, 2, 3):
        check(make_job(**tables(n_samples=n_samples)))
    message = 'paradigm.cut = "2": the loss of a batch computed in halves must be that of the model, but differs'
    assert refused(**tables(n_samples=3, calls=2)).startswith(message)


def test_the_parameters_of_a_script_are_those_that_it_trains():
    model, job = torch.nn.Linear(2, 3), make_job(cluster={"servers": 4})
    check_model(job, model, "mine")
    with pytest.raises(JobError, match="^cluster.servers = 4: must be at most the model's 3 parameters$"):
        check_model(job, model, "mine", parameters=[model.bias])


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ([torch.nn.Linear(2, 3, device="meta")], "meta"),
        ([torch.nn.Linear(2, 3), torch.nn.Linear(3, 1, device="meta")], "cpu, meta"),
    ],
)
def test_a_model_is_on_one_device_that_ranks_can_compute_on(layers, found):
    with pytest.raises(JobError, match=f"mine: must be on the CPU or on one GPU as a whole, not on {found}$"):
        check_model(make_job(), torch.nn.Sequential(*layers), "mine")


def test_a_model_is_not_on_two_gpus(monkeypatch):
    model = torch.nn.Linear(2, 3)
    parameters = [SimpleNamespace(device=f"cuda:{i}") for i in range(2)]
    for on, expected in (
        (parameters[:1], nullcontext()),
        (parameters, pytest.raises(JobError, match="not on cuda:0, ")),
    ):
        monkeypatch.setattr(model, "parameters", lambda on=on: on)
        with expected:
            check_model(make_job(), model, "mine", parameters=[model.weight])


def test_a_model_of_more_elements_than_positions_is_not_made_sparse():
    model = torch.nn.Linear(2**16, 2**15, device="meta")
    with pytest.raises(JobError, match="mine: the vector must have fewer than 2147483648 elements, got 2147516416"):
        check_model(make_job(compression={"name": "top-k"}), model, "mine")
    with pytest.raises(JobError, match="not on meta"):
        check_model(make_job(compression={"name": "fp16"}), model, "mine")


def test_buffers_are_dense():
    model = torch.nn.Linear(2, 3)
    check_model(make_job(), model, "mine")
    model.register_buffer("mask", torch.eye(2).to_sparse())
    with pytest.raises(JobError, match="^mine: the buffer mask must be a dense tensor$"):
        check_model(make_job(), model, "mine")


def test_lazy_modules_have_been_called():
    model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d(affine=False))
    for missing, batch in (("0.weight", None), ("1.running_mean", torch.ones(2, 2))):
        if batch is not None:
            model[0](batch)
        with pytest.raises(JobError, match=f"^mine: {missing} must have its shape: call the model once"):
            check_model(make_job(), model, "mine")
    model(torch.ones(2, 2))
    check_model(make_job(), model, "mine")


def test_trained_parameters_share_no_memory():
    """Such as after `decoder.weight.data = encoder.weight.data`: training would untie them."""
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)])
    model.append(model[0])  # the same parameter
    model.register_parameter("none", torch.nn.Parameter(torch.empty(0)))
    check_model(make_job(), model, "mine")
    model[1].weight.data = model[0].weight.data
    with pytest.raises(
        JobError, match="^mine: 1.weight must not share memory with 0.weight: let both be one parameter$"
    ):
        check_model(make_job(), model, "mine")
    model[0].weight.requires_grad_(False)
    with pytest.raises(JobError, match="^mine: 0.weight must not share memory with 1.weight"):
        check_model(make_job(), model, "mine")
    del model[1:]
    model[0].requires_grad_(True)
    model.register_buffer("view", model[0].weight.detach()[0])
    with pytest.raises(JobError, match="^mine: view must not share memory with 0.weight"):
        check_model(make_job(), model, "mine")


def test_a_forward_pass_changes_no_weights_that_workers_share():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.EmbeddingBag(4, 3, max_norm=1.0))
    other = [model[0].weight]
    for paradigm in ({"name": "bsp"}, {"name": "allreduce"}):
        check_model(make_job(paradigm=paradigm, cluster={"workers": 1}), model, "mine")
        several = make_job(paradigm=paradigm, cluster={"workers": 2})
        check_model(several, model, "mine", parameters=other)
        with pytest.raises(
            JobError, match=f'mine: 1 must have no max_norm with paradigm.name = "{paradigm["name"]}": it'
        ):
            check_model(several, model, "mine")
    for paradigm in ({"name": "easgd"}, {"name": "local-sgd", "steps": 2}):
        check_model(make_job(paradigm=paradigm, cluster={"workers": 2}), model, "mine")


def test_what_cannot_be_written_at_the_end_is_refused_before():
    model = torch.nn.Linear(2, 3)
    model.register_buffer("turns", torch.ones(2, dtype=torch.complex128), persistent=False)
    check_model(make_job(), model, "mine")
    model.register_buffer("angles", torch.ones(2, dtype=torch.complex64))
    check_model(make_job(), model, "mine")
    model.register_buffer("waves", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(JobError, match="^mine: waves must not be torch.complex128, which weights.safetensors cannot"):
        check_model(make_job(), model, "mine")


@pytest.mark.parametrize(("choice", "allowed"), [("worker", True), ("mean", False)])
def test_separated_layers_have_no_mean_of_the_buffers(choice, allowed):
    tables = {"paradigm": {"name": "stanza", "cut": "2", "fc_workers": 1}, "evaluation": {"buffers": choice}}
    layers = torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    this = make_job(**tables)
    check_model(this, torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[2]), "mine")
    check_model(make_job(evaluation={"buffers": choice}), torch.nn.Sequential(*layers), "mine")
    if allowed:
        check_model(this, torch.nn.Sequential(*layers), "mine")
    else:
        with pytest.raises(
            JobError, match='^evaluation.buffers = "mean": must be another with paradigm.name = "stanza"'
        ):
            check_model(this, torch.nn.Sequential(*layers), "mine")
