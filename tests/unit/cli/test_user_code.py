"""A workload function is code: it is imported when a run needs it, and named before; `show` imports it on request."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.processes import hpcsync

JOB = """
name = "own"
workload = {{name = "{name}"}}
optimizer = {{name = "sgd", lr = 0.1}}
stop = {{updates = 2}}
evaluation = {{every_samples = 0}}
paradigm = {{name = "bsp"}}
cluster = {{workers = 1, compute = {{model = "constant", seconds = 0.1}}}}
"""
MINE = """
from pathlib import Path
import sys
import torch
import hpcsync
Path("imported").touch()
def make():
    model = torch.nn.Linear(2, 1)
    return hpcsync.Workload(model, None, None, None)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "job.toml").write_text(JOB.format(name="mine:make"))
    return tmp_path / "job.toml"


def said(job: Path, *arguments: object) -> str:
    done = subprocess.run(hpcsync(*arguments), cwd=job.parent, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_show_imports_nothing_of_the_user_without_load(job: Path) -> None:
    shown = said(job, "show", job)
    assert f"the workload is code in module mine ({job.parent / 'mine.py'}): --load imports it" in shown
    assert 'name = "mine:make"' in shown
    assert not (job.parent / "imported").exists()
    assert "parameters" in said(job, "show", job, "--load")
    assert (job.parent / "imported").exists()


def test_a_simulation_names_the_module_before_it_is_imported(job: Path) -> None:
    assert f"importing the workload from module mine ({job.parent / 'mine.py'})" in said(job, "simulate", job)
    assert (job.parent / "imported").exists()


def test_a_file_beside_the_job_takes_no_package_s_place(job: Path) -> None:
    """Nor one in the current folder, which `python -m` puts first."""
    for name in ("sklearn", "torch", "numpy", "h5py"):
        (job.parent / f"{name}.py").write_text("raise SystemExit(77)")
    assert "importing the workload" in said(job, "simulate", job)
    assert "parameters" in said(job, "show", job, "--load")
    done = subprocess.run([sys.executable, "-c", "import torch"], cwd=job.parent, check=False)
    assert done.returncode == 77, "the files would be found first"
