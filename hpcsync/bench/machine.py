"""The machine that figures come from, in one line: without it they mean nothing."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path


def machine() -> str:
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{_cpu()}, {_cores()} cores, {gib:.0f} GiB"


def versions() -> str:
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("numpy", "torch", "mpi4py", "h5py"))
    return f"Python {platform.python_version()}, {packages}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
