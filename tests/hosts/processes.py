"""Processes on hosts that are namespaces."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from hpcsync.system.namespaces import Hosts

PAUSES = pytest.mark.flaky(reruns=3)  # a transfer that is timed may wait for a core


def processes(hosts: Hosts, number: int) -> list[psutil.Process]:
    """What runs on host n{number}, besides the host itself; without zombies, which no process there reaps."""
    pid = hosts.pid(f"n{number}")
    here = os.readlink(f"/proc/{pid}/ns/pid")
    found = []
    for process in psutil.process_iter():
        try:
            here_too = process.pid != pid and os.readlink(f"/proc/{process.pid}/ns/pid") == here
            if here_too and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.NoSuchProcess):
            continue
    return found


def left(hosts: Hosts, timeout_s: float = 60.0) -> list[psutil.Process]:
    """Processes on hosts that do not end in this time: MPICH's launcher returns before what it kills is gone."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = [process for number in range(1, hosts.n + 1) for process in processes(hosts, number)]
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(0.05)
