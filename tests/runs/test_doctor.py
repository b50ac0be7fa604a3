"""`hpcsync doctor` on this machine, with the MPI of this environment and with a launcher that is none."""

import os
import subprocess
import sys

import pytest

from hpcsync.cli import doctor
from hpcsync.cli.doctor import Finding, examine, status
from hpcsync.mpi.transport.window_trials import ON_A_NODE, rehearse
from hpcsync.system import gpu_selection


def test_this_environment_serves() -> None:
    argv = [sys.executable, "-m", "hpcsync", "doctor"]
    result = subprocess.run(argv, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert "two ranks share MPI_COMM_WORLD" in result.stdout
    assert "MPI_THREAD_MULTIPLE" in result.stdout
    assert " bad " not in result.stdout


def bad(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> list[str]:
    """What is bad with this variable, found in this process by real probes, that of packages excepted; it is reason for
    status 1."""
    monkeypatch.setattr(doctor, "packages", lambda: Finding("packages", "ok", ""))
    monkeypatch.setenv(variable, value)
    findings = list(examine())
    assert status(findings) == 1
    return [finding.found for finding in findings if finding.verdict == "bad"]


@pytest.mark.once
def test_a_wrong_launcher_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: [])
    (found,) = bad(monkeypatch, "MPIEXEC", "/no/mpiexec")
    assert "/no/mpiexec: No such file or directory" in found


@pytest.mark.once
def test_a_wrong_library_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = bad(monkeypatch, "MPI4PY_LIBMPI", "/no/lib/libmpi.so")
    assert "cannot load MPI library" in found


def test_windows_are_tried_in_a_child_job() -> None:
    """With host memory in a GPU's place, where there is none; the last one fails, and why is found."""
    *found, nothing = rehearse([*ON_A_NODE, "nothing"])
    assert [one.kind for one in found] == list(ON_A_NODE)
    assert all(one.took_s is not None for one in found if one.kind != "mpi" or gpu_selection.found().why)
    assert nothing.took_s is None and "transport of kind 'nothing'" in nothing.failure
