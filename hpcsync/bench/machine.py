"""Description of the machine and the versions that figures depend on."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections import Counter
from importlib import metadata
from pathlib import Path


def machine(device: str = "cpu") -> str:
    """Return CPU, cores and memory in one line, with "cuda" also the GPUs."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{_cpu()}, {_cores()} cores, {gib:.0f} GiB" + (_gpus() if device == "cuda" else "")


def versions(device: str = "cpu") -> str:
    """Return the versions of Python and packages in one line, with "cuda" also those related to CUDA."""
    packages = ["numpy", "torch", *(["mpi4py"] if importlib.util.find_spec("mpi4py") else []), "h5py"]
    named = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    return f"Python {platform.python_version()}, {named}" + (_cuda() if device == "cuda" else "")


def _gpus() -> str:
    from cupy.cuda import runtime

    names = Counter(runtime.getDeviceProperties(i)["name"].decode() for i in range(runtime.getDeviceCount()))
    return "".join(f", {n} x {name}" for name, n in names.items())


def _cuda() -> str:
    import cupy
    import torch

    runtime = cupy.cuda.runtime
    driver, used = (f"{n // 1000}.{n % 1000 // 10}" for n in (runtime.driverGetVersion(), runtime.runtimeGetVersion()))
    return f", CuPy {cupy.__version__}, CUDA {driver} (driver), {used} (CuPy), {torch.version.cuda} (torch)"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
