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


START = """
from hpcsync.cli import app, run
from pathlib import Path
from hpcsync.system import launcher
launcher.launch = lambda n, argv, **options: print("starting", n) or launcher.Ended(2)
Path("job.toml").write_text({job!r})
run.run(Path("job.toml"), [], None, {out})
"""
JOB = """
name = "a"
workload = {name = "digits", batch_size = 8}
optimizer = {name = "sgd", lr = 0.1}
stop = {updates = 1}
paradigm = {name = "bsp"}
cluster = {servers = 2}
"""


@pytest.mark.parametrize("out", ["None", "Path('missing'), True", "Path('saved'), True"])
def test_the_process_that_starts_ranks_leaves_torch_to_them(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a new run, one that may resume, and one that resumes."""
    monkeypatch.chdir(tmp_path)
    save(Path("saved"), Job.from_toml(JOB))
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert loaded(START.replace("{job!r}", repr(JOB)).replace("{out}", out)) == set()


ON_A_RANK = """
import sys
import hpcsync.cli.app, hpcsync.cli.rank_main
import torch
from hpcsync.api.connect import _session_class
from hpcsync.config.job import Job
from hpcsync.training.optimizers import OptimizerSpec, step_flat
from hpcsync.workloads.registry import build

job = Job.from_toml({job!r})
_session_class(job, {rank})
workload, weights = build(job), torch.nn.Parameter(torch.ones(64))
optimizer = OptimizerSpec.of_job(job).build(weights)
step_flat(optimizer, weights, torch.ones(64), 0.1)
{more}
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


def loaded_on_a_rank(rank: int, paradigm: str, more: str = "") -> tuple[set[str], str, set[str]]:
    """Return packages, whether torch's compiler is loaded, and modules of hpcsync on this rank at its first step."""
    job = JOB if paradigm == "bsp" else JOB.replace('"bsp"', f'"{paradigm}"').replace("servers = 2", "")
    code = ON_A_RANK.replace("{more}", more).replace("{job!r}", repr(job)).replace("{rank}", str(rank))
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    return set(found[-3].split()), found[-2], set(found[-1].split())


def test_what_rank_0_imports_until_its_first_step() -> None:
    """Everything else, such as the compiler of torch, would cost every rank time at its start."""
    packages, has_compiler, _ = loaded_on_a_rank(0, "bsp")
    assert packages <= MAY_BE_LOADED | {"h5py", "rich"} and has_compiler == "False"


@pytest.mark.parametrize(("rank", "paradigm"), [(1, "bsp"), (2, "bsp"), (1, "allreduce")])
def test_other_ranks_do_not_import_what_records_the_run(rank: int, paradigm: str) -> None:
    packages, has_compiler, modules = loaded_on_a_rank(rank, paradigm)
    assert packages <= MAY_BE_LOADED and has_compiler == "False"
    assert not {name for name in modules if name.startswith(("hpcsync.mpi.rank0", "hpcsync.trace.writer"))}


def test_what_a_rank_does_not_need_would_be_seen() -> None:
    packages, _, modules = loaded_on_a_rank(0, "bsp", "import sklearn")
    assert {"sklearn", "scipy", "joblib", "h5py"} <= packages - MAY_BE_LOADED
    assert "hpcsync.mpi.rank0.run_recorder" in modules


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
