"""The scripts in jobs/scripts on real ranks: they end with status 0, and leave a trace that passes its audit."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hpcsync.audit.trace_audit import audit
from hpcsync.system import launcher
from hpcsync.trace.reader import load
from tests.runs.processes import Program, ended, hpcsync, mpiexec
from tests.scripts_before import FOLDER, Case, plain, resnet

DRIVER = """
import sys
sys.path.insert(0, {root!r})
import torch
from torch.utils.data import DataLoader
from tests.scripts_before import BATCH, RESNET, resnet

torch.set_default_dtype(torch.float64)
(model,), data, others = resnet(RESNET, 2)
loader = DataLoader(data, BATCH, shuffle=True, num_workers=2)
RESNET.train(model, loader, paradigm="{paradigm}", out="out", **others)
"""
PACKAGES = {"fabric": "lightning_fabric", "trainer": "transformers"}
SAMPLES = {  # trained on, in whole batches
    "resnet": 2 * 56 * 32,
    "transformer": 20 * 2 * 4 * 8,
    "finetuning": 56 * 32,
    "iterable": 2400,
    "gan": 2 * 2048,
    "fabric": 50 * 2 * 32,
    "trainer": 30 * 2 * 2 * 8,
}


# On the same ranks, to save starts; first that which loads with processes, forked before MPI is there.
TOGETHER = ("resnet", "gan", "transformer", "finetuning", "iterable")
ONE_BY_ONE = """
import os, runpy, sys
for script in sys.argv[1:]:
    folder = os.path.basename(script).removesuffix(".py")
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    runpy.run_path(script, run_name="__main__")
    os.chdir("..")
"""


@pytest.mark.once
def test_launched_scripts_train_on_three_ranks(tmp_path: Path) -> None:
    (tmp_path / "one_by_one.py").write_text(ONE_BY_ONE)
    scripts = [FOLDER / f"{name}.py" for name in TOGETHER]
    program = ended(hpcsync("launch", "-n", "3", "--", "python", "one_by_one.py", *scripts), tmp_path)
    for name in TOGETHER:
        check(program, tmp_path / name, name)


@pytest.mark.once
@pytest.mark.parametrize("name", PACKAGES)
def test_a_script_with_packages_trains_on_three_ranks(tmp_path: Path, name: str) -> None:
    if find_spec(PACKAGES[name]) is None:
        pytest.skip(f"`make scripts` installs {PACKAGES[name]}")
    check(ended(mpiexec(3, FOLDER / f"{name}.py"), tmp_path, launcher.environment()), tmp_path, name)


def check(program: Program, folder: Path, name: str) -> None:
    assert program.status == 0, program.err
    assert name in PACKAGES or not program.complaints
    (run,) = (folder / "runs").iterdir()
    trace = load(run / "trace.h5")
    assert (trace.status, trace.n_workers) == ("finished", 2)
    assert trace.tables["updates"]["samples"][-1] == SAMPLES[name]
    assert trace.tables["pushes"]["loss"].min() > 0.0
    assert [found for found in audit(trace) if not found.passed] == []


@pytest.fixture
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.once
@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_loading_with_processes_changes_nothing(tmp_path: Path, paradigm: str) -> None:
    """In float64, with images changed as their index says."""
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(root=str(FOLDER.parents[1]), paradigm=paradigm))
    program = ended(mpiexec(2 + (paradigm == "bsp"), driver), cwd=tmp_path, environ=launcher.environment())
    assert (program.status, program.complaints) == (0, [])
    found = load_file(tmp_path / "out" / "weights.safetensors")
    (before,) = plain("resnet", Case(resnet, epochs=2), 2).models
    for key, parameter in before.named_parameters():
        assert torch.allclose(found[key], parameter, rtol=0, atol=1e-10), key


@pytest.mark.once
def test_a_script_trains_alone_and_leaves_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = ended([sys.executable, str(FOLDER / "finetuning.py")], cwd=tmp_path, environ=environ)
    assert (program.status, program.err) == (0, "")
    assert list(tmp_path.iterdir()) == []
