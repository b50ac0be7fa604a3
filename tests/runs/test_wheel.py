"""The wheel: what it holds, and that it works in an environment of its own, from another folder.

The environment borrows the packages of this one, to save time; with HPCSYNC_WHEEL=install (`make wheel-check`) it gets
those that the wheel asks for, in the pinned versions.
"""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOB = """
name = "small"
workload = {name = "linear", samples = 60, features = 5}
optimizer = {name = "sgd", lr = 0.1}
stop.updates = 40
evaluation.every_samples = 100
paradigm = {name = "dssp", staleness_min = 1, staleness_max = 4}
cluster = {workers = 2, compute = {model = "constant", seconds = [0.1, 0.2]}}
"""

pytestmark = pytest.mark.once


def run(*argv: object, cwd: Path, limit_s: float = 280) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, argv)], cwd=cwd, env=environ, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0 or not listed.stdout:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the files that git knows: what an earlier build has left is not in it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked:
        if name.startswith("hpcsync/") or "/" not in name:
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    run(*pip, "--no-build-isolation", "--wheel-dir", folder, folder / "source", cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment that holds the wheel."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / "bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--quiet"]
    if os.environ.get("HPCSYNC_WHEEL") == "install":
        pinned = ["--constraint", ROOT / "constraints.txt"]
        run(*pip, "--no-compile", *pinned, f"{wheel}[analysis]", cwd=environment, limit_s=1500)
        return environment / "bin"
    run(*pip, "--no-compile", "--no-deps", wheel, cwd=environment)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=environment)
    # A line that is a folder adds the folder alone: the editable hpcsync of this environment stays out.
    (Path(site.strip()) / "lent.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return environment / "bin"


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path, tracked: list[str]) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert package == {name for name in tracked if name.startswith("hpcsync/")}
    assert {"hpcsync/py.typed", "hpcsync/figures/accuracy.py"} <= package
    (licence,) = [name for name in names if name.endswith("/licenses/LICENSE")]
    (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        assert "License: Apache-2.0" in archive.read(metadata).decode().splitlines()


def test_the_wheel_works_from_another_folder(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(JOB)
    hpcsync = programs / "hpcsync"
    where = run(programs / "python", "-c", "import hpcsync; print(hpcsync.__file__, hpcsync.__version__)", cwd=tmp_path)
    file, version = where.split()
    assert Path(file).is_relative_to(programs.parent)
    assert run(hpcsync, "--version", cwd=tmp_path) == f"hpcsync {version}\n"
    assert "dssp, 1 server, 2 workers" in run(hpcsync, "simulate", "small.toml", "--out", "small", cwd=tmp_path)
    assert run(hpcsync, "figure", "accuracy", "small", "--out", "a.png", cwd=tmp_path) == "a.png\n"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "checks passed" in run(hpcsync, "audit", "small", cwd=tmp_path)
    cited = run(hpcsync, "cite", "small", cwd=tmp_path)
    assert "@inproceedings{zhao2019dynamic," in cited and f"note = {{Version {version}" in cited
