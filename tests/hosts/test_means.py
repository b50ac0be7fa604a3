"""Means of ranks on several hosts: right, the same bits everywhere, and no byte more on a cable than a ring needs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from hpcsync.system import launcher
from hpcsync.system.namespaces import Hosts

HOSTS = 3
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.hosts


def test_means_between_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """Of one rank on each host, then of two. The control is one ring of all ranks: with two on a host, more than the
    sum of each host is on its cable."""
    out = tmp_path / "seen.json"
    line = [*hosts.mpiexec(range(1, HOSTS + 1), per_host=2), "-n", str(2 * HOSTS)]
    line += [sys.executable, "-m", "mpi4py", str(Path(__file__).with_name("averaging.py")), str(out)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MPIEXEC": shlex.join(line)}
    result = hosts.run(line, cwd=tmp_path, environ=launcher.environment(environ))
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    found = json.loads(out.read_text())
    print(found)
    assert [means[0][0] for means in found] == ["RingMean", "NodesMean"]
    for n_ranks, means in zip((HOSTS, 2 * HOSTS), found, strict=True):
        (_, right, received, sent, _), (_, control_right, control_received, control_sent, _) = means
        assert right and control_right
        needed = 2 * (HOSTS - 1) / HOSTS
        assert needed <= received < 1.05 * needed and needed <= sent < 1.05 * needed
        of_all = 2 * (n_ranks - 1) / n_ranks
        assert of_all <= control_received < 1.05 * of_all and of_all <= control_sent < 1.05 * of_all
