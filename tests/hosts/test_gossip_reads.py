"""A replica is read from, and a vector sent to, a peer on another host that computes: at once, if it has help."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpcsync.system import launcher
from hpcsync.system.namespaces import Hosts
from tests.hosts.processes import PAUSES, left

AT_ONCE_S = 0.8  # 4 MB take 0.03 s at 1 Gbit/s; the rest is for the machine's other business
WAITED_S = 1.0  # of the two seconds that the peer computes

HOSTS = 2

pytestmark = pytest.mark.hosts


def run(hosts: Hosts, folder: Path, *program: str) -> subprocess.CompletedProcess[str]:
    """A rank of this program on either host."""
    line = [*hosts.mpiexec([1, 2]), "-n", "2", sys.executable, "-m", "mpi4py", *program]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "MPIEXEC": shlex.join(line)}
    return hosts.run(line, cwd=folder, environ=launcher.environment(environ))


@PAUSES
def test_with_help_nothing_waits(hosts: Hosts, tmp_path: Path) -> None:
    """With either help, and that one is needed is measured. The control: without help the read waits for the peer. A
    thread that nobody stops does not keep the ranks from ending."""
    out, script = tmp_path / "seen.json", Path(__file__).with_name("reading.py")
    result = run(hosts, tmp_path, str(script), str(out), "auto", "thread", "hooks", "passive")
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    seen = json.loads(out.read_text())
    for found in seen.values():
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()})
        assert found["intact"] and found["serial"] == 1 and found["arrived"] == [1, 2.0, True]
    assert seen["auto"]["kind"] in ("thread", "hooks")
    assert seen["auto"]["choosing_s"] < 5.0  # a second on busy cores
    for kind in ("auto", "thread", "hooks"):
        assert seen[kind]["read_s"] < AT_ONCE_S and seen[kind]["send_s"] < AT_ONCE_S
    assert seen["passive"]["read_s"] > WAITED_S
    assert left(hosts) == []


@pytest.mark.parametrize("ending", ["raise SystemExit(3)", "comm.rank or 1 / 0"])
def test_a_thread_that_nobody_stops_does_not_keep_ranks_from_failing(hosts: Hosts, tmp_path: Path, ending: str) -> None:
    script = tmp_path / "forgetful.py"
    script.write_text(
        "from mpi4py import MPI\nfrom hpcsync.mpi.transport.progress_engine import choose\n"
        f"comm = MPI.COMM_WORLD\nprogression = choose(comm, 'thread')\n{ending}\n"
    )
    assert run(hosts, tmp_path, str(script)).returncode != 0
    assert left(hosts) == []
