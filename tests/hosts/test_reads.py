"""Reads between hosts bring what was promised, and nothing else travels with them; and pushes arrive."""

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

ROOT = Path(__file__).parents[2]
DEFAULT_FLAGS = "send,put,inplace,need-ack,need-csum,hetero-rdma"  # Open MPI's own

HOSTS = 4

pytestmark = pytest.mark.hosts


def run(hosts: Hosts, n: int, folder: Path, *program: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A rank of this program on each of the first n hosts."""
    line = [*hosts.mpiexec(range(1, n + 1)), "-n", str(n), sys.executable, "-m", "mpi4py", *program]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MPIEXEC": shlex.join(line), **more}
    result = hosts.run(line, cwd=folder, environ=launcher.environment(environ))
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result


def counted(hosts: Hosts, n: int, folder: Path, *numbers: int, **more: str) -> list[tuple[float, float]]:
    """Bytes that a worker receives and sends in an iteration, over the model's, for each number of servers."""
    out, moved = folder / "counted.json", []
    run(hosts, n, folder, str(Path(__file__).with_name("counted.py")), str(out), *map(str, numbers), **more)
    for servers, found in zip(numbers, json.loads(out.read_text()), strict=True):
        assert [wrong for wrong, _ in found] == [0] * n, "weights that no update made"
        sums = (sum(each) for each in zip(*(of for _, of in found if of), strict=True))
        received, sent, took_s = (total / (n - servers) for total in sums)
        print(f"{servers} servers: received {received:.3f}, sent {sent:.3f} of the model, in {took_s * 1e3:.1f} ms")
        moved.append((received, sent))
    return moved


def is_open_mpi() -> bool:
    version = subprocess.run([*launcher.mpiexec(), "--version"], capture_output=True, text=True, check=True).stdout
    return "HYDRA" not in version


def test_an_iteration_moves_its_gradients_and_weights_once(hosts: Hosts, tmp_path: Path) -> None:
    for received, sent in counted(hosts, HOSTS, tmp_path, 1, 2):
        assert 1.0 <= received < 1.05 and 1.0 <= sent < 1.05


def test_with_the_flags_of_open_mpi_a_read_sends_its_data_both_ways(hosts: Hosts, tmp_path: Path) -> None:
    """The negative control of the test above; what the user sets is kept."""
    if not is_open_mpi():
        pytest.skip("Open MPI only")
    [(received, sent)] = counted(hosts, 2, tmp_path, 1, OMPI_MCA_btl_tcp_flags=DEFAULT_FLAGS)
    assert received < 1.05 and sent > 1.5


def test_no_read_is_torn_or_stale_and_no_push_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    """The tests of a node, with their negative controls, under updates, publications and pushes without pause."""
    folder = ROOT / "tests" / "mpi" / "transport"
    files = [folder / f"test_{what}.py" for what in ("torn_reads", "published_replica", "push_inbox")]
    result = run(hosts, HOSTS, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "host", *map(str, files))
    print(result.stdout[-200:])
