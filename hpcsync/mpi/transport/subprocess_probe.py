"""Probes of MPI, GPUs and packages in processes of their own, because each of them may crash or hang.

Usage: python -m hpcsync.mpi.transport.subprocess_probe NAME RESULT.json ARGUMENT...

`world`, `passive` and `windows` run on two ranks.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from hpcsync.system import gpu_selection, launcher, process_cleanup
from hpcsync.system.interpreter import python

LIMIT_S = 120.0  # two ranks that load torch on busy cores need a minute
BUSY_S = 0.5
ERROR = re.compile(r"(Error|Exception)\b")  # in the last line of a traceback


class ProbeError(Exception):
    """A probe crashed, hung or found nothing; the message is its last error line.

    Attributes
    ----------
    found : dict
        What it had found until then.
    """

    def __init__(self, message: str, found: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.found = found or {}


# ---- the calling process ----


def probe(name: str, *arguments: str, ranks: int = 0) -> dict[str, Any]:
    """Run a probe in a process of its own, or on `ranks` ranks of this node.

    Parameters
    ----------
    name
        Key of `PROBES`.
    *arguments
        Arguments of the probe.
    ranks
        Number of ranks; 0 for a process without MPI launcher.

    Returns
    -------
    dict
        Result of the probe.

    Raises
    ------
    ProbeError
        If the probe fails or exceeds `LIMIT_S`.
    LaunchError
        If there is no launcher.

    Notes
    -----
    A rank may call this too, in its main thread. A signal that would end this process first ends the probe and then
    takes its usual effect.
    """
    with tempfile.TemporaryDirectory(dir=launcher.temporary_folder()) as folder:
        result = Path(folder) / "result.json"
        runner = ["-m", "mpi4py"] if ranks else []  # ends all ranks when one fails
        argv = python(*runner, "-m", "hpcsync.mpi.transport.subprocess_probe", name, str(result), *arguments)
        with open(Path(folder) / "output", "w+b") as output:
            if ranks:
                ended = launcher.launch(ranks, argv, timeout_s=LIMIT_S, output=output)
            else:
                ended = launcher.Ended(_run(argv, output))
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
        if ended.signum is not None:
            signal.raise_signal(ended.signum)
        found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        if ended.status == launcher.TIMED_OUT:
            raise ProbeError(f"hangs: not finished after {LIMIT_S:.0f} s", found)
        if ended.status != 0 or not found:
            last = next(filter(ERROR.search, reversed(lines)), f"ended with status {ended.status}")
            raise ProbeError(last, found)
        return found


def _run(argv: list[str], output: IO[bytes]) -> int:
    try:
        with process_cleanup.removing_segments():  # Open MPI 5 leaves that of a process without launcher
            return subprocess.run(
                argv, env=launcher.environment(), stdout=output, stderr=output, timeout=LIMIT_S, check=False
            ).returncode
    except subprocess.TimeoutExpired:
        return launcher.TIMED_OUT


# ---- the probing process ----


def packages() -> dict[str, Any]:
    """Return the versions of the required packages; importing each shows that it works."""
    return {name: str(importlib.import_module(name).__version__) for name in ("numpy", "h5py", "torch")}


def library() -> dict[str, Any]:
    """Return the version of the MPI library and its level of thread support."""
    from mpi4py import MPI

    levels = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
    level = sorted((getattr(MPI, name.removeprefix("MPI_")), name) for name in levels)
    thread = next(name for value, name in level if value == MPI.Query_thread())
    version = MPI.Get_library_version().strip("\0 \n").splitlines()[0]
    return {"library": " ".join(version.split(",")[0].split()), "thread": thread}


def world() -> dict[str, Any]:
    """Return the number of ranks."""
    from mpi4py import MPI

    return {"size": MPI.COMM_WORLD.size}


def passive() -> dict[str, Any]:
    """Return the time, in seconds, of a 1 MB put to a rank that computes for half a second without calling MPI.

    Also return whether both ranks are on one node.
    """
    import numpy as np
    from mpi4py import MPI

    from hpcsync.mpi.transport.busy_target import while_busy
    from hpcsync.mpi.transport.node_topology import ranks_here
    from hpcsync.mpi.transport.window import Window

    comm = MPI.COMM_WORLD
    values = np.ones(1 << 17)
    with Window(comm, values.size if comm.rank == 1 else 0, values.dtype) as window:

        def put() -> None:
            window.put(values, 1, 0)
            window.flush(1)

        for busy_s in (0.0, BUSY_S):  # the first transfer sets up resources that later ones use
            trial = while_busy(comm, 1, put, lambda: None, busy_s)
    return {"put_s": trial.took_s, "one_node": ranks_here(comm) == comm.size}


def gpu() -> dict[str, Any]:
    """Return the CUDA devices, why they cannot be used, CuPy's version, and whether MPI takes device pointers.

    The version is None if the devices cannot be used.
    """
    found: dict[str, Any] = {**gpu_selection.found()._asdict(), "cupy": None}
    if not found["why"]:
        import cupy

        found["cupy"] = cupy.__version__
    return {**found, "mpi": takes_device_pointers()}


def takes_device_pointers() -> bool | None:
    """Return whether the MPI library claims to take device pointers, or None if it has no such query."""
    from mpi4py import MPI

    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return None


def windows(*kinds: str) -> Iterator[dict[str, Any]]:
    """Run a round trip through each of these kinds of windows, on GPUs if any can be used; yield after every one."""
    device = gpu_selection.claim(gpu_selection.choose("auto", "auto", gpu_selection.found()))
    from mpi4py import MPI

    from hpcsync.mpi.transport.tensor_window import Transport
    from hpcsync.mpi.transport.window_test import WindowTest, attempt

    found = []
    for kind in kinds:
        if kind == "mpi" and device.type == "cuda" and takes_device_pointers() is False:
            made = WindowTest(failure="the MPI library says that it takes no device pointers")
        else:
            made = attempt(MPI.COMM_WORLD, Transport(kind, device))
        found.append((kind, *made))
        MPI.COMM_WORLD.Barrier()  # a rank that dies in this trial does so before its result counts
        yield {"windows": found}


PROBES: dict[str, Callable[..., dict[str, Any] | Iterator[dict[str, Any]]]] = {
    "packages": packages,
    "library": library,
    "world": world,
    "passive": passive,
    "gpu": gpu,
    "windows": windows,
}


def main(name: str, path: str, *arguments: str) -> None:
    """Run a probe and write its result, and every earlier one that it yields, on rank 0 only."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dumps of trials that crash
    results = PROBES[name](*arguments)
    for result in [results] if isinstance(results, dict) else results:
        if "mpi4py" not in sys.modules or sys.modules["mpi4py"].MPI.COMM_WORLD.rank == 0:
            unfinished = Path(f"{path}.unfinished")
            unfinished.write_text(json.dumps(result))
            unfinished.replace(path)  # whole at any time: a rank that crashes ends this one too


if __name__ == "__main__":
    main(*sys.argv[1:])
