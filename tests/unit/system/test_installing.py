"""An editable install is found from every current folder."""

import subprocess
import sys
import zipfile
from pathlib import Path

CLONE = Path(__file__).parents[3]
USED = ["setup.cfg", "pyproject.toml", "README.md", "hpcsync/__init__.py", "hpcsync/version.py"]
BUILD = "from setuptools.build_meta import build_editable; build_editable({!r})"
# Without the environment's own packages, among which this one may be installed already.
IMPORT = "import site; site.addsitedir({!r}); import hpcsync; print(hpcsync.__version__, hpcsync.__file__)"


def test_a_clone_in_the_current_folder_is_not_a_namespace_package(tmp_path: Path) -> None:
    clone = tmp_path / "hpcsync"
    for name in USED:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes((CLONE / name).read_bytes())
    subprocess.run([sys.executable, "-c", BUILD.format(str(tmp_path))], cwd=clone, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    argv = [sys.executable, "-S", "-c", IMPORT.format(str(tmp_path / "site"))]
    found = subprocess.run(argv, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
    assert found.stdout.endswith(f"{clone / 'hpcsync' / '__init__.py'}\n"), found.stderr
