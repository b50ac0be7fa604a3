"""What importing costs, and who may import what."""

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcsync

HEAVY = {"torch", "mpi4py", "h5py", "cupy", "sklearn", "pandas"}
PACKAGE = Path(hpcsync.__file__).parent


def loaded(code: str) -> set[str]:
    """The heavy packages that are loaded after this code, in a fresh interpreter."""
    code += "\nimport sys; print('loaded', *{name.split('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return HEAVY & set(result.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import hpcsync; hpcsync.__version__",
        "import hpcsync.config.job",
        "import hpcsync.system.launcher",
        "import hpcsync.cli.app, contextlib\nwith contextlib.suppress(SystemExit): hpcsync.cli.app.app(['--help'])",
        "import hpcsync.paradigms",
    ],
)
def test_light_imports_stay_light(code: str) -> None:
    assert loaded(code) == set()


ON_A_RANK = """
import sys
import hpcsync.cli.app, hpcsync.cli.rank_main, hpcsync.mpi.server.worker, hpcsync.mpi.peer.rank0_session
import torch
from hpcsync.config.job import Job
from hpcsync.training.optimizers import OptimizerSpec, step_flat
from hpcsync.workloads.registry import build

tables = 'name = "a"\\nworkload = {name = "digits", batch_size = 8}\\noptimizer = {name = "sgd", lr = 0.1}\\n'
job = Job.from_toml(tables + 'stop = {updates = 1}\\nparadigm = {name = "bsp"}\\n')
workload, weights = build(job), torch.nn.Parameter(torch.ones(64))
optimizer = OptimizerSpec.of_job(job).build(weights)
step_flat(optimizer, weights, torch.ones(64), 0.1)
{more}
files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
print(*{name.split(".")[0] for name, file in files.items() if "site-packages" in file})
print("torch._dynamo.symbolic_convert" in sys.modules)
"""
MAY_BE_LOADED = {
    *("torch", "torchgen", "numpy", "h5py", "mpi4py", "tomli_w", "typer", "annotated_doc", "rich", "shellingham"),
    *("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "_distutils_hack"),
}


@pytest.mark.parametrize(("more", "loaded_too"), [("", set()), ("import sklearn", {"sklearn", "scipy", "joblib"})])
def test_what_a_rank_imports_until_its_first_step(more: str, loaded_too: set[str]) -> None:
    """Everything else, such as the compiler of torch, would cost every rank time at its start."""
    code = ON_A_RANK.replace("{more}", more)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert loaded_too <= set(found[-2].split()) - MAY_BE_LOADED
    if not more:
        assert set(found[-2].split()) <= MAY_BE_LOADED and found[-1] == "False"


def test_a_script_gets_what_it_asks_for() -> None:
    assert "torch" in loaded("from hpcsync import connect; assert callable(connect)")
    with pytest.raises(AttributeError, match="module 'hpcsync' has no attribute 'conect'"):
        hpcsync.conect  # noqa: B018


def foreign_imports(source: str) -> set[str]:
    """Modules that this source imports and that are not pure; declared state, planning and the paradigms are."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    allowed = {*sys.stdlib_module_names, "numpy"}
    pure = ("hpcsync.paradigms.", "hpcsync.planning.", "hpcsync.state.")
    return {n for n in names if n.split(".")[0] not in allowed and not f"{n}.".startswith(pure)}


def test_paradigms_and_planning_are_pure() -> None:
    sources = [path for folder in ("paradigms", "planning") for path in (PACKAGE / folder).glob("*.py")]
    assert len(sources) > 12
    limits = {"annotated_types"}  # names of limits, which compute nothing
    sources.append(PACKAGE / "state.py")
    assert {path.name: found for path in sources if (found := foreign_imports(path.read_text()) - limits)} == {}


def test_impure_imports_would_be_found() -> None:
    assert foreign_imports("import numpy as np, os.path\nfrom hpcsync.paradigms import Grant") == set()
    assert foreign_imports("def f():\n    import torch.nn") == {"torch.nn"}
    assert foreign_imports("from hpcsync.trace import schema\nfrom hpcsync.config import job") == {
        "hpcsync.trace",
        "hpcsync.config",
    }


# The distributions of packages that have another name, or that come with another distribution.
DISTRIBUTIONS = {
    "annotated_types": "annotated-types",
    "cupy": "cupy-cuda12x",
    "pydantic_core": "pydantic",
    "sklearn": "scikit-learn",
    "threadpoolctl": "scikit-learn",
}


def test_what_the_package_imports_is_declared() -> None:
    setup = configparser.ConfigParser()
    setup.read(PACKAGE.parent / "setup.cfg")
    lines = [setup["options"]["install_requires"], *dict(setup["options.extras_require"]).values()]
    declared = {re.split("[<>=]", line)[0].strip() for text in lines for line in text.splitlines()}
    names = {name.split(".")[0] for path in PACKAGE.rglob("*.py") for name in foreign_imports(path.read_text())}
    names -= {"hpcsync"}
    assert len(names) > 10
    assert {name for name in names if DISTRIBUTIONS.get(name, name) not in declared} == set()
