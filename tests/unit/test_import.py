"""What importing costs, and who may import what."""

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcsync
from hpcsync.config.job import Job
from tests.unit.cli.test_run import save

HEAVY = {"torch", "mpi4py", "h5py", "cupy", "sklearn", "pandas"}
PACKAGE = Path(hpcsync.__file__).parent


def loaded(code: str) -> set[str]:
    """The heavy packages that are loaded after this code, in a fresh interpreter."""
    code += "\nimport sys; print('loaded', *{name.split('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return HEAVY & set(result.stdout.splitlines()[-1].split())


def test_light_imports_stay_light() -> None:
    code = """
import contextlib
import hpcsync; hpcsync.__version__
import hpcsync.config.job, hpcsync.paradigms, hpcsync.system.launcher
import hpcsync.cli.app
with contextlib.suppress(SystemExit): hpcsync.cli.app.app(['--help'])
"""
    assert loaded(code) == set()


START = """
from hpcsync.cli import app, run
from pathlib import Path
from hpcsync.system import launcher
started = []
launcher.launch = lambda n, argv, **options: started.append(n) or launcher.Ended(2)
Path("job.toml").write_text({job!r})
run.run(Path("job.toml"), [], None, None)
run.run(Path("job.toml"), [], None, Path("missing"), True)
run.run(Path("job.toml"), [], None, Path("saved"), True)
assert len(started) == 3
"""
JOB = """
name = "a"
workload = {name = "digits", batch_size = 8}
optimizer = {name = "sgd", lr = 0.1}
stop = {updates = 1}
paradigm = {name = "bsp"}
cluster = {servers = 2}
"""


def test_the_process_that_starts_ranks_leaves_torch_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a new run, one that may resume, and one that resumes."""
    monkeypatch.chdir(tmp_path)
    save(Path("saved"), Job.from_toml(JOB))
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert loaded(START.replace("{job!r}", repr(JOB))) == set()


ON_A_RANK = """
import sys
import hpcsync.cli.app, hpcsync.cli.rank_main
import torch
from hpcsync.api.ranks import _session_class
from hpcsync.config.job import Job
from hpcsync.training.optimizers import OptimizerSpec, step_flat
from hpcsync.workloads.registry import build

def take_a_step(job, rank):
    _session_class(job, rank)
    workload, weights = build(job), torch.nn.Parameter(torch.ones(64))
    optimizer = OptimizerSpec.of_job(job).build(weights)
    step_flat(optimizer, weights, torch.ones(64), 0.1)

def report():
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    print(*{name.split(".")[0] for name, file in files.items() if "site-packages" in file})
    print("torch._dynamo.symbolic_convert" in sys.modules)
    print(*(name for name in sys.modules if name.startswith("hpcsync.")))

"""
MAY_BE_LOADED = {
    *("torch", "torchgen", "numpy", "mpi4py", "tomli_w", "typer", "annotated_doc", "shellingham"),
    *("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "_distutils_hack"),
    "cuda",  # by a torch that is built for it
}


def loaded_on_ranks(code: str) -> list[tuple[set[str], str, set[str]]]:
    """Return packages, whether torch's compiler is loaded, and modules of hpcsync at each report of one process."""
    code = f"{ON_A_RANK}served = Job.from_toml({JOB!r})\n{code}"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    return [(set(found[i].split()), found[i + 1], set(found[i + 2].split())) for i in range(0, len(found), 3)]


def test_what_rank_0_imports_until_its_first_step() -> None:
    """Everything else, such as the compiler of torch, would cost every rank time at its start."""
    before, after = loaded_on_ranks("take_a_step(served, 0); report()\nimport sklearn; report()")
    packages, has_compiler, modules = before
    assert packages <= MAY_BE_LOADED | {"h5py", "rich"} and has_compiler == "False"
    assert "h5py" in packages and "hpcsync.mpi.rank0.run_recorder" in modules
    assert {"sklearn", "scipy", "joblib"} <= after[0] - MAY_BE_LOADED, "control"


def test_other_ranks_do_not_import_what_records_the_run() -> None:
    """A server, a worker and a peer: what none of them may load, all of them in one process have not loaded."""
    peers = JOB.replace('"bsp"', '"allreduce"').replace("servers = 2", "")
    code = f"take_a_step(served, 1); take_a_step(served, 2); take_a_step(Job.from_toml({peers!r}), 1); report()"
    ((packages, has_compiler, modules),) = loaded_on_ranks(code)
    assert packages <= MAY_BE_LOADED and has_compiler == "False"
    assert not {name for name in modules if name.startswith(("hpcsync.mpi.rank0", "hpcsync.trace.writer"))}
    assert {f"hpcsync.mpi.{name}" for name in ("server.session", "server.worker", "peer.session")} <= modules


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
    assert foreign_imports("import numpy as np, os.path\nfrom hpcsync.paradigms.events import Grant") == set()
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
