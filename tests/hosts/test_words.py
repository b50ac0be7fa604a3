"""Sums in a word of a rank on another host are atomic, also while two threads of that rank communicate."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from hpcsync.system import launcher
from hpcsync.system.namespaces import Hosts

HOSTS = 2

pytestmark = pytest.mark.hosts


def add(hosts: Hosts, folder: Path, kind: str, rounds: int, ranks: int, per_host: int) -> dict[str, int]:
    """Return how many of the sums were found and how many were lost; see adding.py."""
    out, script = folder / "sums.json", Path(__file__).with_name("adding.py")
    line = [*hosts.mpiexec([1, 2], per_host), "-n", str(ranks), sys.executable, "-m", "mpi4py"]
    line += [str(script), kind, str(rounds), str(out)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "MPIEXEC": shlex.join(line)}
    result = hosts.run(line, cwd=folder, environ=launcher.environment(environ))
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return json.loads(out.read_text())


@pytest.mark.parametrize(("ranks", "per_host"), [(2, 1), (3, 2)])
def test_no_sum_is_lost(hosts: Hosts, tmp_path: Path, ranks: int, per_host: int) -> None:
    """The last rank is alone on its host."""
    sums = add(hosts, tmp_path, "atomic", 4, ranks, per_host)
    assert sums["found"] > 0
    assert sums["lost"] == 0


def test_sums_that_are_read_and_written_apart_are_lost(hosts: Hosts, tmp_path: Path) -> None:
    """The negative control of the test above, which ends with the first sum that is lost."""
    assert add(hosts, tmp_path, "apart", 60, 3, 2)["lost"] > 0
