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


def test_no_sum_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    """The last of three ranks is alone on its host. The negative control is of sums that are read and written apart."""
    out, script = tmp_path / "sums.json", Path(__file__).with_name("adding.py")
    line = [*hosts.mpiexec([1, 2], per_host=2), "-n", "3", sys.executable, "-m", "mpi4py", str(script), str(out)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "MPIEXEC": shlex.join(line)}
    result = hosts.run(line, cwd=tmp_path, environ=launcher.environment(environ))
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    sums = json.loads(out.read_text())
    for whose in ("one of each host", "all"):
        assert sums[whose]["found"] > 0
        assert sums[whose]["lost"] == 0
    assert sums["apart"]["lost"] > 0
