"""Training that does not train, under every paradigm: it ends the run or is said, and no audit passes it."""

from __future__ import annotations

import copy
import math
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import hpcsync
from hpcsync.audit.trace_audit import audit
from hpcsync.cli.rank_main import train as run_job
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.core.step_problems import NOT_FINITE, WRONG
from hpcsync.mpi.transport.thread_ranks import run
from hpcsync.paradigms.records import Problem
from hpcsync.system import garbage, launch_output
from hpcsync.trace.reader import load
from hpcsync.workloads.registry import Workload
from tests.unit.jobs import make_job
from tests.unit.mpi.test_buffers import EVERY
from tests.unit.simulator.running import simulate

N_RANKS = 3
STEPS = 8
CHECK = "some contribution is finite"


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(garbage, "freeze", lambda: None)


@pytest.mark.parametrize(
    ("uses", "noted"),
    [
        (lambda batches, losses: losses[-1], True),
        (lambda batches, losses: max(losses), True),
        (lambda batches, losses: batches.nothing, False),
    ],
    ids=["last", "largest", "another mistake"],
)
def test_what_misses_the_batches_of_an_empty_loop_is_told_that_it_is_on_a_server(tmp_path, uses, noted):
    def script(comm: Any) -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with hpcsync.connect(model, optimizer, out=tmp_path / "out", comm=comm) as sync:
            losses, batches = [], sync.shard(torch.ones(8, 3), 4)
            for x in batches:
                loss = model(x).mean()
                loss.backward()
                sync.step(loss)
                losses.append(loss.item())
            if sync.rank == 0:
                uses(batches, losses)

    with pytest.raises(Exception) as found:
        run(2, script)
    notes = "".join(getattr(found.value, "__notes__", []))
    assert ("hpcsync: rank 0 is a server: sync.shard yields no batch there" in notes) == noted


def test_it_is_told_once_after_several_sessions(tmp_path):
    def script(comm: Any) -> list[str]:
        for folder in ("one", "two"):
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with hpcsync.connect(model, optimizer, out=tmp_path / folder, comm=comm) as sync:
                for x in sync.shard(torch.ones(8, 3), 4):
                    model(x).mean().backward()
                    optimizer.step()
        error = NameError("name 'loss' is not defined")
        sys.excepthook(NameError, error, None)
        return getattr(error, "__notes__", [])

    assert [len(notes) for notes in run(2, script)] == [1, 0]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(5, 4)
        self.fc = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x).relu())


def train(paradigm: dict[str, Any], out: Path, mistake: str) -> None:
    """Train with a mistake that is made in every step, or on worker 1 alone, or at step 1."""
    name, options = paradigm["name"], {key: value for key, value in paradigm.items() if key != "name"}

    def script(comm: Any) -> None:
        torch.manual_seed(1)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(200, 5)
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        with hpcsync.connect(model, optimizer, name, out=out, comm=comm, stop={"samples": 200}, **options) as sync:
            if mistake == "frozen above":
                model.fc.requires_grad_(False)
            for step, (inputs, targets) in enumerate(sync.shard(data, batch_size=4, epochs=None)):
                if mistake == "never a step" and step == STEPS:
                    break
                if mistake.startswith("later frozen") and step == 1:
                    (model.fc if mistake.endswith("above") else model.body).requires_grad_(False)
                if mistake == "double" and step == 1:
                    model.double()
                inputs, targets = inputs.to(model.body.weight.dtype), targets.to(model.body.weight.dtype)
                if mistake == "layer" and step == 1:
                    model.fc = torch.nn.Linear(4, 1)
                if mistake == "group" and step == 1:
                    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                if mistake == "nan":
                    loss = loss * float("nan")
                optimizer.zero_grad()
                if mistake != "no backward" and not (mistake == "no backward of worker 1" and sync.worker == 1):
                    loss.backward()
                if mistake != "never a step":
                    sync.step(loss)
                if mistake == "interrupted" and sync.worker == 1:
                    raise KeyboardInterrupt

    run(N_RANKS, script)


def change_weights(paradigm: dict[str, Any], out: Path, change: str, dtype: torch.dtype) -> None:
    """Train, and change the weights: before the first step ("loaded"), after another one, or to and fro.

    That is as an evaluation of averages does ("swapped"), or sharpness-aware minimisation ("perturbed").
    """
    name, options = paradigm["name"], {key: value for key, value in paradigm.items() if key != "name"}

    def script(comm: Any) -> None:
        torch.manual_seed(1)
        model = Net().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(4 * STEPS * N_RANKS, 5).to(dtype)
        with hpcsync.connect(model, optimizer, name, out=out, comm=comm, **options) as sync:
            if change == "loaded":
                model.load_state_dict({key: value + 1.0 for key, value in model.state_dict().items()})
            for step, inputs in enumerate(sync.shard(x, batch_size=4, epochs=None)):
                if step == STEPS:
                    if change == "clamped at the end":
                        model.fc.weight.data.clamp_(-1e-3, 1e-3)
                    break
                steps_away = [torch.full_like(p, 0.01) for p in model.parameters() if change == "perturbed"]
                for p, away in zip(model.parameters(), steps_away, strict=False):
                    p.data.add_(away)
                loss = model(inputs).square().mean()
                optimizer.zero_grad()
                loss.backward()
                for p, away in zip(model.parameters(), steps_away, strict=False):
                    p.data.sub_(away)
                sync.step(loss)
                if (change, step) in (("clamped", 0), ("clamped later", 2), ("swapped", 0)):
                    before = copy.deepcopy(model.state_dict())
                    for parameter in model.fc.parameters():
                        parameter.data.clamp_(-1e-3, 1e-3)
                    if change == "swapped":
                        model.load_state_dict(before)

    run(N_RANKS, script)


def failed(trace: Path) -> set[str]:
    return {check.name for check in audit(trace) if not check.passed}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["bsp", "asp", "k-sync", "easgd", "allreduce"])
@pytest.mark.parametrize(
    ("change", "iteration"),
    [
        *(("loaded", 1), ("clamped", 2), ("clamped later", 4), ("clamped at the end", 0)),
        *(("swapped", 0), ("perturbed", 0)),
    ],
)
def test_weights_that_servers_replace_must_not_be_changed(tmp_path, name, change, iteration, dtype, capsys):
    lost = iteration > 0 and name not in ("easgd", "allreduce")  # whose workers have weights of their own
    words = f"worker ., iteration {iteration}, version .*: {re.escape(WRONG[Problem.WEIGHTS_CHANGED])}$"
    with pytest.raises(JobError, match=words) if lost else nullcontext():
        change_weights({"name": name, "k": 1} if name == "k-sync" else {"name": name}, tmp_path / "run", change, dtype)
    assert load(tmp_path / "run" / "trace.h5").status == ("failed" if lost else "finished")
    said = capsys.readouterr().err.count(f"hpcsync: after the last step {WRONG[Problem.WEIGHTS_CHANGED]}")
    assert said == (change == "clamped at the end" and name not in ("easgd", "allreduce"))


@pytest.mark.parametrize("changes", [False, True])
def test_workers_of_one_model_that_end_with_different_weights_are_told(tmp_path, capsys, changes):
    def script(comm: Any) -> None:
        torch.manual_seed(1)
        model = torch.nn.Linear(5, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with hpcsync.connect(model, optimizer, "allreduce", out=tmp_path / "run", comm=comm) as sync:
            for x in sync.shard(torch.randn(8 * N_RANKS, 5), batch_size=4):
                loss = model(x).square().mean()
                loss.backward()
                sync.step(loss)
                if changes and sync.rank == 0:
                    model.weight.data.mul_(2.0)

    run(N_RANKS, script)
    told = re.findall(r"weights are .* apart at the end; .*", capsys.readouterr().err)
    assert len(told) == changes


every_paradigm = pytest.mark.parametrize("paradigm", EVERY, ids=lambda each: "-".join(map(str, each.values())))


@every_paradigm
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("no backward", re.escape(WRONG[Problem.NO_GRADIENT])),
        ("no backward of worker 1", f"worker 1, iteration .*: {re.escape(WRONG[Problem.NO_GRADIENT])}"),
        ("double", WRONG[Problem.MODEL_CHANGED]),
        ("layer", WRONG[Problem.MODEL_CHANGED]),
        ("group", WRONG[Problem.MODEL_CHANGED]),
    ],
)
def test_a_mistake_of_the_script_ends_the_run(tmp_path, paradigm, mistake, said):
    stanza = paradigm["name"] == "stanza"  # which finds it out earlier: layers above the cut wait for those below
    errors = (JobError, RuntimeError) if stanza else JobError
    earlier = ["separated layers"] + ["Found dtype"] * (mistake == "double" and torch.__version__.startswith("2.6."))
    with pytest.raises(errors, match="|".join([*earlier, said]) if stanza else said) as caught:
        train(paradigm, tmp_path / "run", mistake)
    assert "\n" not in str(caught.value)
    assert load(tmp_path / "run" / "trace.h5").status == "failed"


@pytest.mark.parametrize("name", ["bsp", "allreduce"])
def test_a_worker_that_alone_is_interrupted_is_named(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(launch_output, "SAME_ERROR_S", 0.0)  # in which rank 0 would say it
    with pytest.raises(KeyboardInterrupt):
        train({"name": name}, tmp_path / "run", "interrupted")
    assert f"hpcsync: rank {1 + (name == 'bsp')} was interrupted\n" in capsys.readouterr().err


@pytest.mark.parametrize("mistake", ["frozen above", "later frozen above", "later frozen below"])
def test_a_layer_of_each_part_must_be_trained(tmp_path, mistake):
    with pytest.raises(JobError, match=f'^paradigm.cut = "fc": a layer {mistake.split()[-1]} the cut must be trained'):
        train({"name": "stanza", "cut": "fc"}, tmp_path / "run", mistake)


def test_gradients_of_separated_layers_do_not_accumulate(tmp_path):
    def script(comm: Any) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with hpcsync.connect(model, optimizer, "stanza", cut="fc", out=tmp_path / "run", comm=comm) as sync:
            sync.shard(torch.utils.data.TensorDataset(torch.ones(24, 5), torch.ones(24, 1)), 4, accumulate=2)

    with pytest.raises(JobError, match=r'^accumulate = 2: must be 1 with paradigm.name = "stanza"'):
        run(N_RANKS, script)


@every_paradigm
def test_a_loss_that_is_never_finite_is_said_and_fails_the_audit(tmp_path, capsys, paradigm):
    train(paradigm, tmp_path / "run", "nan")
    said = [line for line in capsys.readouterr().err.splitlines() if NOT_FINITE[Problem.LOSS_NOT_FINITE] in line]
    assert len(said) == 1
    assert failed(tmp_path / "run" / "trace.h5") == {CHECK}


@every_paradigm
def test_without_a_mistake_the_audit_passes(tmp_path, paradigm):
    train(paradigm, tmp_path / "run", "none")
    assert failed(tmp_path / "run" / "trace.h5") == set()


@every_paradigm
def test_a_loop_without_a_step_is_said_and_fails_the_audit(tmp_path, capsys, paradigm):
    """Where `backward` itself forms the mean of all workers, the second one ends the run."""
    if paradigm["name"] in ("allreduce", "stanza"):
        with pytest.raises((RuntimeError, JobError), match=r"backward passes in one step|must be computed and stepped"):
            train(paradigm, tmp_path / "run", "never a step")
        return
    train(paradigm, tmp_path / "run", "never a step")
    said = [line for line in capsys.readouterr().err.splitlines() if "no worker has made a step" in line]
    assert len(said) == 1
    assert failed(tmp_path / "run" / "trace.h5") == {CHECK}


@pytest.mark.parametrize("part", ["body", "fc"])
def test_a_gradient_that_is_not_finite_in_the_part_of_one_server_ends_no_run(tmp_path, part):
    """Each of two servers states the norm of its part, and server 0 waits for both."""

    def script(comm: Any) -> None:
        torch.manual_seed(1)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = torch.utils.data.TensorDataset(torch.randn(40, 5), torch.randn(40, 1))
        with hpcsync.connect(model, optimizer, "bsp", out=tmp_path, comm=comm, servers=2) as sync:
            for step, (inputs, targets) in enumerate(sync.shard(data, batch_size=4)):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                if step == 1:
                    getattr(model, part).weight.grad[0, 0] = math.nan
                sync.step(loss)

    run(4, script)
    trace = load(tmp_path / "trace.h5")
    norms = trace.tables["updates"]["gradient_sq"]
    assert np.isfinite(norms[0]) and np.isposinf(norms[1:]).all()
    assert failed(trace.path) == set()


# ---- jobs, in virtual time and on ranks ----


def workload(factor: float, depends: bool) -> Workload:
    """Return a workload whose loss is multiplied with `factor`, or has gradients of another tensor only."""
    x = torch.randn(200, 5)

    def loss(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mean = factor * torch.nn.functional.mse_loss(model(inputs), targets)
        return mean if depends else mean.detach() + torch.zeros((), requires_grad=True)

    return Workload(Net(), loss, torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), None)


@pytest.fixture
def job(monkeypatch):
    module = ModuleType("untrained")
    module.make = workload
    monkeypatch.setitem(sys.modules, "untrained", module)

    def make(paradigm: dict[str, Any], factor: float, depends: bool = True) -> Job:
        return make_job(
            workload={"name": "untrained:make", "batch_size": 4, "options": {"factor": factor, "depends": depends}},
            optimizer={"name": "sgd", "lr": 0.01},
            stop={"samples": 100},
            paradigm=paradigm,
            cluster={"workers": 3, "compute": {"model": "constant", "seconds": [0.01, 0.011, 0.012]}},
        )

    return make


with_any_loss = pytest.mark.parametrize(
    "paradigm", [each for each in EVERY if each["name"] != "stanza"], ids=lambda each: "-".join(map(str, each.values()))
)  # stanza computes the loss in halves before the run, and refuses these


@with_any_loss
@pytest.mark.filterwarnings("error")
def test_in_virtual_time_a_loss_that_is_never_finite_fails_the_audit(tmp_path, capsys, job, paradigm):
    assert failed(simulate(job(paradigm, math.nan), tmp_path / "nan.h5").path) == {CHECK}
    said = [line for line in capsys.readouterr().err.splitlines() if NOT_FINITE[Problem.LOSS_NOT_FINITE] in line]
    assert len(said) == 1
    assert failed(simulate(job(paradigm, 1.0), tmp_path / "trained.h5").path) == set()


@with_any_loss
def test_a_loss_that_depends_on_no_parameter_ends_the_run(tmp_path, job, paradigm):
    with pytest.raises(RuntimeError, match="^the loss depends on none of the model's parameters that are trained$"):
        simulate(job(paradigm, 1.0, depends=False), tmp_path / "trace.h5")


def test_on_ranks_a_loss_that_depends_on_no_parameter_ends_the_run(tmp_path, job):
    untrained = job({"name": "asp"}, 1.0, depends=False)
    with pytest.raises(RuntimeError, match="^the loss depends on none of the model's parameters that are trained$"):
        run(4, lambda comm: run_job(comm, untrained, tmp_path / "run"))


@pytest.mark.parametrize("name", ["bsp", "allreduce"])
def test_gradients_that_are_all_zero_fail_the_audit(tmp_path, job, name):
    assert failed(simulate(job({"name": name}, 0.0), tmp_path / "trace.h5").path) == {"some gradient is not zero"}
