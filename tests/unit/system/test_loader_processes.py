"""Worker processes of data loaders, without MPI."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hpcsync.system.loader_processes import LONGEST

PROGRAM = """
from multiprocessing import forkserver, util
from hpcsync.system import loader_processes
loader_processes.start()
print(util.get_temp_dir())
"""


@pytest.mark.parametrize("more", [0, 1])
def test_the_path_of_a_socket_is_short_enough(tmp_path: Path, more: int) -> None:
    folder = tmp_path / ("x" * (LONGEST - len(str(tmp_path)) - 1 + more))
    folder.mkdir()
    argv = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(argv, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("/tmp/pymp-" if more else f"{folder}/pymp-")


KILLED = """
import multiprocessing, os, time
from multiprocessing import resource_tracker, util
from hpcsync.system import loader_processes
loader_processes.start()
semaphore = multiprocessing.get_context("forkserver").Semaphore()
tracker = resource_tracker._resource_tracker._pid
deadline_s = time.monotonic() + 60
while os.getsid(tracker) == os.getsid(0) and time.monotonic() < deadline_s:
    time.sleep(0.01)
print(semaphore._semlock.name, util.get_temp_dir(), flush=True)
time.sleep(300)
"""


def test_a_rank_whose_process_group_is_killed_leaves_no_files(tmp_path: Path) -> None:
    """As by the launchers of Open MPI and MPICH on hosts on which nothing else removes them."""
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-c", KILLED]
    rank = subprocess.Popen(argv, stdout=subprocess.PIPE, env=environ, text=True, start_new_session=True)
    assert rank.stdout is not None
    semaphore, folder = rank.stdout.readline().split()
    files = [Path(f"/dev/shm/sem.{semaphore.removeprefix('/')}"), Path(folder)]
    assert [file.exists() for file in files] == [True, True]
    os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()
    deadline_s = time.monotonic() + 60
    while any(file.exists() for file in files) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert [file.exists() for file in files] == [False, False]


ORPHANED = """
import os, sys, time, types
from torch.utils.data import DataLoader
from hpcsync.system import loader_processes

class Data(list):
    def __reduce__(self):
        return received, ()

def received():
    server = os.getppid()
    print(os.getpid(), flush=True)
    while os.getppid() == server:
        time.sleep(0.01)
    return Data([0])

loader_processes.start()
sys.modules["mpi4py.MPI"] = types.SimpleNamespace(Is_initialized=lambda: True)
loader = DataLoader(Data([0]), num_workers=1)
next(iter(DataLoader(Data([0]), num_workers=1, **loader_processes.settings(loader, print))))
"""


def test_a_process_that_starts_while_its_rank_is_killed_ends() -> None:
    rank = subprocess.Popen([sys.executable, "-c", ORPHANED], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    process = psutil.Process(int(rank.stdout.readline()))
    rank.kill()
    rank.wait()
    try:
        deadline_s = time.monotonic() + 60
        while (runs := is_running(process)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not runs
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
