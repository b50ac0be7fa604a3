"""A workload function is code: it is imported when a run needs it, and named before; `show` imports it on request."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpcsync.cli.app import app
from hpcsync.config import user_code
from hpcsync.config.errors import JobError
from hpcsync.config.job import load
from hpcsync.config.user_code import import_beside, raised, refuse_missing
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
TRAINED = """
import torch
import hpcsync
def loss(model, x, y):
    return torch.nn.functional.mse_loss(model(x), y)
def make():
    x = torch.randn(64, 2)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    return hpcsync.Workload(torch.nn.Linear(2, 1), loss, data, None)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "job.toml").write_text(JOB.format(name="mine:make"))
    return tmp_path / "job.toml"


def said(job: Path, *arguments: object) -> str:
    done = subprocess.run(hpcsync(*arguments), cwd=job.parent, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_show_imports_nothing_of_the_user_without_load(job: Path) -> None:
    shown = said(job, "show", job)
    assert f"the workload is code in module mine ({job.parent / 'mine.py'}): --load imports it" in shown
    assert 'name = "mine:make"' in shown
    assert not (job.parent / "imported").exists()


@pytest.mark.parametrize("code", ["def made(): ...", "def make_all(): ...", "from os import path"])
def test_a_function_that_the_module_cannot_have_is_refused_before_anything_is_imported(
    job: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.syspath_prepend(job.parent)
    (job.parent / "mine.py").write_text(code)
    with pytest.raises(
        JobError, match="must name a function that can be imported: module 'mine' has no attribute 'make'"
    ):
        refuse_missing(load(job))
    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    "code",
    [
        "make = 1",
        "from os import *",
        "exec('ma' + 'ke = 1')",
        "globals()['ma' + 'ke'] = 1",
        "locals()['ma' + 'ke'] = 1",
        "vars()['ma' + 'ke'] = 1",
        "import mine; setattr(mine, 'ma' + 'ke', 1)",
        "import sys; sys.modules['mine'] = object()",
        "import mine; mine.__dict__['ma' + 'ke'] = 1",
        "def __getattr__(name): ...",
    ],
)
def test_a_function_that_the_module_may_have_is_left_to_the_import(
    job: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.syspath_prepend(job.parent)
    (job.parent / "mine.py").write_text(code)
    refuse_missing(load(job))


def test_the_source_of_a_package_says_nothing_of_its_modules(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(job.parent)
    (job.parent / "pack").mkdir()
    (job.parent / "pack" / "__init__.py").write_text("")
    job.write_text(JOB.format(name="pack.inner:make"))
    refuse_missing(load(job))
    job.write_text(JOB.format(name="absent:make"))
    with pytest.raises(JobError, match="that can be imported: No module named 'absent'"):
        refuse_missing(load(job))


def test_modules_are_found_last_beside_the_job_file_and_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["first"])
    for _ in range(2):
        import_beside(tmp_path / "jobs" / "job.toml")
    assert sys.path == ["first", str(tmp_path / "jobs"), str(tmp_path)]


def test_an_audit_finds_the_module_in_the_current_folder(job: Path) -> None:
    """Also as the installed command, for which Python does not look there (`-P`)."""
    (job.parent / "mine.py").write_text(TRAINED)
    said(job, "simulate", job, "--out", "run")
    line = [sys.executable, "-P", "-m", "hpcsync", "audit", "run", "--recompute"]
    done = subprocess.run(line, cwd=job.parent, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"importing the workload from module mine ({job.parent / 'mine.py'})" in done.stdout


def test_the_module_is_named_and_imported_and_a_file_beside_it_takes_no_package_s_place(job: Path) -> None:
    """Nor one in the current folder, which `python -m` puts first."""
    for name in ("sklearn", "torch", "numpy", "h5py"):
        (job.parent / f"{name}.py").write_text("raise SystemExit(77)")
    assert f"importing the workload from module mine ({job.parent / 'mine.py'})" in said(job, "simulate", job)
    (job.parent / "imported").unlink()
    assert "parameters" in said(job, "show", job, "--load")
    assert (job.parent / "imported").exists()
    done = subprocess.run([sys.executable, "-c", "import torch"], cwd=job.parent, check=False)
    assert done.returncode == 77, "the files would be found first"


MISTAKEN = """import torch
import hpcsync

def of(loss, evaluate=None):
    data = torch.utils.data.TensorDataset(torch.ones(64, 2))
    return hpcsync.Workload(torch.nn.Linear(2, 1), loss, data, evaluate)

def mean(model, x):
    return model(x).mean()

def right():
    return of(mean, lambda model: (0.5, 0.25))

def boom():
    raise ValueError("cannot read data\\nat all")  # line 15

def one():
    return of(mean, lambda model: 0.5)

def late():
    def loss(model, x):
        return model(x[:, :1]).mean()  # line 22
    return of(loss)
"""
ENDS = {  # status, the line, and whether there is a traceback below it
    "right": (0, None, False),
    "boom": (2, 'hpcsync: workload.name = "mistaken:boom": raised ValueError: cannot read data (mistaken.py:15)', True),
    "one": (1, "hpcsync: failed: evaluate must return (loss, accuracy), it returned 0.5; the trace so far is ", False),
    "late": (1, 'hpcsync: failed: workload.name = "mistaken:late": raised RuntimeError: ', True),
    "syntax": (2, 'hpcsync: workload.name = "unclosed:f": raised SyntaxError: ', True),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_mistake_in_a_workload_is_one_line_with_the_user_s_part_of_the_traceback(
    job: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    status, line, has_trace = ENDS[name]
    (job.parent / "mistaken.py").write_text(MISTAKEN)
    (job.parent / "unclosed.py").write_text("def f(:\n")
    text = JOB.format(name="unclosed:f" if name == "syntax" else f"mistaken:{name}")
    job.write_text(text.replace('"}\nopt', '", batch_size = 4}\nopt').replace("every_samples = 0", "every_samples = 4"))
    if name == "late":
        job.write_text(job.read_text().replace("every_samples = 4", "every_samples = 0"))
    argv = ["simulate", str(job), "--out", "o"]
    if name == "late":  # in a process of its own, as all of them would be
        done = subprocess.run(hpcsync(*argv), cwd=job.parent, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == status, done.stderr
    else:
        monkeypatch.chdir(job.parent)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.delitem(sys.modules, "mistaken", raising=False)  # of the case before
        done = CliRunner().invoke(app, argv)
        assert done.exit_code == status, done.stderr
    first, *below = done.stderr.splitlines() or [None]
    assert first == line if line is None else first is not None and first.startswith(line)
    frames = [each.strip() for each in below if each.startswith("  File ")]
    assert bool(below) == has_trace
    assert all(each.startswith(f'File "{job.parent}') for each in frames[:1])
    assert not [each for each in frames if "/hpcsync/" in each or "typer" in each or "click" in each]
    if name == "late":
        assert "mat1 and mat2 shapes" in first and "(mistaken.py:22); the trace so far is" in first


def test_a_module_beside_the_package_whose_name_begins_with_the_package_s_is_the_user_s() -> None:
    path = f"{Path(user_code.__file__).parents[1]}_models.py"
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("1 / 0", path, "exec"))
    assert str(raised("hpcsync_models:f", caught.value)).endswith(" division by zero (hpcsync_models.py:1)")
