"""One thread, as on every rank: the bits of a sum must not depend on how many cores a machine has. And no MPI."""

import functools
import gc
import os
from types import SimpleNamespace

import mpi4py
import pytest
import torch
import typer.testing
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # a time limit of each example would be one of the machine
settings.load_profile("any machine")
mpi4py.rc.initialize = False  # unit tests need the names of MPI only; hpcsync/mpi runs on ranks in memory


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _garbage_is_collected_seldom():
    gc.set_threshold(5_000, 20, 20)


@pytest.fixture(autouse=True, scope="session")
def _disks_are_not_waited_for():
    """No test can see whether a file has reached the disk; a file that is not open still raises."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: os.fstat(file) and None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _command_lines_are_built_once():
    """A runner would build all commands from their signatures at every call, which takes as long as many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.testing._get_command))
        yield


@pytest.fixture(autouse=True, scope="session")
def _seeds_without_stacks():
    """Without a GPU every `torch.manual_seed` keeps the text of the whole stack, three times, for messages about GPUs:
    several milliseconds below pytest."""
    nothing = SimpleNamespace(format_stack=list)
    with pytest.MonkeyPatch.context() as patch:
        for devices in (torch.cuda, torch.xpu, torch.mtia):
            patch.setattr(devices, "traceback", nothing, raising=False)
        yield
