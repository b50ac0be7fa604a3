"""Rank 0 sees what a rank on another host is doing, though that computes and makes no call of MPI."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from hpcsync.system import launcher
from hpcsync.system.namespaces import Hosts, Unavailable

pytestmark = pytest.mark.hosts


@pytest.mark.once
def test_who_computes_is_seen(tmp_path: Path) -> None:
    out = tmp_path / "seen.json"
    try:
        hosts = Hosts(2, rate="1gbit")
    except Unavailable as reason:
        pytest.skip(str(reason))
    with hosts:
        program = [sys.executable, "-m", "mpi4py", str(Path(__file__).with_name("phases.py")), str(out)]
        line = [*hosts.mpiexec([1, 2]), "-n", "2", *program]
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "MPIEXEC": shlex.join(line)}
        result = hosts.run(line, cwd=tmp_path, environ=launcher.environment(environ))
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    with_probe, without, library = json.loads(out.read_text())
    assert with_probe
    assert not without or not library.startswith("Open MPI"), "the probe is for nothing"
