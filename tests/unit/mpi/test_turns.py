"""Which cases run at which number of ranks."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

CASES = """
import pytest


@pytest.mark.parametrize("letter", "ab")
@pytest.mark.parametrize("word", ["one-two", "three", "four"])
def test_several(comm, letter, word): ...


@pytest.mark.parametrize("letter", "ab")
def test_two(comm, letter): ...


def test_one(comm): ...
"""


def test_every_case_runs_at_some_number_of_ranks_and_not_at_all(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_addoption\nfrom tests.unit.mpi.conftest import *\n"
    )
    argv = [sys.executable, "-m", "pytest", "--rootdir", tmp_path, "-c", pytestconfig.rootpath / "setup.cfg"]
    found = subprocess.run(
        [*argv, "--collect-only", "-q", "--take-turns", tmp_path],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [line.partition("::")[2].rstrip("]") for line in found.stdout.splitlines() if "::" in line]
    n_turns = Counter((name.partition("[")[0], name.partition("[")[2].partition("-")[2]) for name in names)
    several = {("test_several", f"{word}-{letter}") for word in ("one-two", "three", "four") for letter in "ab"}
    assert n_turns.keys() == several | {("test_two", "a"), ("test_two", "b"), ("test_one", "")}
    assert {n_turns[case] for case in several} == {1, 2} and n_turns["test_one", ""] == 5
