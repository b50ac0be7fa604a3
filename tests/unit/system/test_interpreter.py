"""Further processes of this Python: what they can import."""

import subprocess
from pathlib import Path

import pytest

from hpcsync.system.interpreter import PACKAGE, python


def test_a_file_in_the_current_folder_takes_the_place_of_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "types.py").write_text("raise RuntimeError('imported')")
    monkeypatch.chdir(tmp_path)
    command = python("-c", "import contextlib")
    assert subprocess.run(command, check=False).returncode == 0
    command.remove("-P")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1, "the control"


def test_hpcsync_is_found_in_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(PACKAGE.parent)
    found = subprocess.run(python("-c", "import hpcsync; print(hpcsync.__file__)"), capture_output=True, text=True)
    assert found.stdout.strip() == str(PACKAGE / "__init__.py")
