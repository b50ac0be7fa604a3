"""Optimizers of a job file: their options are those of torch, and a wrong key is told without importing it."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from hpcsync.config import torch_optimizers
from hpcsync.config.job import load
from hpcsync.config.torch_optimizers import CLASSES, IMPLEMENTATION, options
from tests.unit.jobs import refusal

JOB = """
name = "x"
workload.name = "timing"
optimizer = {name = "sgd", lr = 1}
stop.updates = 3
paradigm.name = "asp"
"""
OF_SGD = "an option of torch.optim.SGD (momentum, dampening, weight_decay, nesterov, maximize) or one of lr, lr_clock"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "x.toml").write_text(JOB)
    return tmp_path / "x.toml"


@pytest.mark.parametrize("name", CLASSES)
def test_the_source_shows_what_the_signature_does(name: str) -> None:
    import torch

    parameters = list(inspect.signature(getattr(torch.optim, CLASSES[name])).parameters)[2:]
    assert options(name) == [each for each in parameters if each not in IMPLEMENTATION]
    assert not {"lr", "foreach", "fused", "capturable", "differentiable"} & {*options(name)}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=3", f"optimizer.lrr = 3: must be {OF_SGD}, async_lr_scale, schedule; did you mean lr?"),
        ("optimizer.momentun=1", "did you mean momentum?"),
        ("optimizer.betas=[1, 2]", "optimizer.betas = [1, 2]: must be an option of torch.optim.SGD"),
        ("optimizer.name=sdg", 'optimizer.name = "sdg": must be one of adadelta, adagrad,'),
    ],
)
def test_a_wrong_key_is_told_when_the_file_is_read(path: Path, override: str, message: str) -> None:
    assert message in refusal(load, path, [override])
    assert load(path, ["optimizer.momentum=0.5"]).optimizer.options == {"momentum": 0.5}, "control"


def test_without_the_source_of_torch_the_ranks_check(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_optimizers.importlib.util, "find_spec", lambda _: None)
    assert options("sgd") is None
    assert load(path, ["optimizer.lrr=3"]).optimizer.options == {"lrr": 3}


def test_torch_is_not_imported(path: Path) -> None:
    code = "import sys; from hpcsync.config.job import load; load(sys.argv[1], ['optimizer.momentum=1']); "
    code += "print('torch' in sys.modules); import torch; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True, timeout=200)
    assert ended.stdout.split() == ["False", "True"]
