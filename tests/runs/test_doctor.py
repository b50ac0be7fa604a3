"""`hpcsync doctor` on this machine, with the MPI of this environment and with a launcher that is none."""

import os
import subprocess
import sys

import pytest

from hpcsync.mpi.transport.window_trials import ON_A_NODE, rehearse
from hpcsync.system import gpu_selection

ENVIRON = {**os.environ, "COLUMNS": "200"}


def doctor(**environ: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "hpcsync", "doctor"]
    return subprocess.run(argv, env={**ENVIRON, **environ}, capture_output=True, text=True, check=False)


def test_this_environment_serves() -> None:
    result = doctor()
    assert result.returncode == 0, result.stdout
    assert "two ranks are one world" in result.stdout
    assert "MPI_THREAD_MULTIPLE" in result.stdout
    assert " bad " not in result.stdout


@pytest.mark.once
def test_a_wrong_launcher_does_not() -> None:
    result = doctor(MPIEXEC="/no/mpiexec")
    assert result.returncode == 1
    assert "/no/mpiexec: No such file or directory" in result.stdout


@pytest.mark.once
def test_a_wrong_library_does_not() -> None:
    result = doctor(MPI4PY_LIBMPI="/no/lib/libmpi.so")
    assert result.returncode == 1
    assert "cannot load MPI library" in result.stdout


@pytest.mark.once
def test_windows_are_tried_in_a_child_job() -> None:
    """With host memory in a GPU's place, where there is none."""
    found = rehearse()
    assert [one.kind for one in found] == list(ON_A_NODE)
    assert all(one.took_s is not None for one in found if one.kind != "mpi" or gpu_selection.found().why)


def test_what_a_child_job_says_of_a_window_that_fails_is_found() -> None:
    (nothing,) = rehearse(["nothing"])
    assert nothing.took_s is None and "transport of kind 'nothing'" in nothing.failure
