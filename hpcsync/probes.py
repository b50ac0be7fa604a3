"""What `hpcsync doctor` runs in processes of their own, because each of these may crash or hang.

python -m hpcsync.probes NAME RESULT.json       (`world` and `passive` on two ranks)
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from pathlib import Path
from typing import Any

BUSY_S = 0.5


def packages() -> dict[str, Any]:
    """Versions of what is needed; importing each proves more than asking for it."""
    return {name: str(importlib.import_module(name).__version__) for name in ("numpy", "h5py", "torch")}


def library() -> dict[str, Any]:
    from mpi4py import MPI

    levels = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
    level = sorted((getattr(MPI, name.removeprefix("MPI_")), name) for name in levels)
    thread = next(name for value, name in level if value == MPI.Query_thread())
    version = MPI.Get_library_version().strip("\0 \n").splitlines()[0]
    return {"library": " ".join(version.split(",")[0].split()), "thread": thread}


def world() -> dict[str, Any]:
    from mpi4py import MPI

    return {"size": MPI.COMM_WORLD.size}


def passive() -> dict[str, Any]:
    """How long one megabyte takes into the window of a rank that computes for half a second without calling MPI."""
    import numpy as np
    from mpi4py import MPI

    from hpcsync.mpi.trial import while_busy
    from hpcsync.mpi.window import Window

    comm = MPI.COMM_WORLD
    values = np.ones(1 << 17)
    with Window(comm, values.size if comm.rank == 1 else 0, values.dtype) as window:

        def put() -> None:
            window.put(values, 1, 0)
            window.flush(1)

        for busy_s in (0.0, BUSY_S):  # the first transfer sets up what later ones use
            trial = while_busy(comm, 1, put, lambda: None, busy_s)
    return {"put_s": trial.took_s}


def gpu() -> dict[str, Any]:
    """What there is of CUDA: CuPy and devices, and whether the MPI library says it can send from their memory."""
    try:
        import cupy

        found = {"cupy": cupy.__version__, "devices": int(cupy.cuda.runtime.getDeviceCount())}
    except ImportError:
        found = {"cupy": None, "devices": 0}
    except Exception:  # CuPy without a driver
        found = {"cupy": cupy.__version__, "devices": 0}
    from mpi4py import MPI

    try:
        found["mpi"] = bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        found["mpi"] = None  # the library has no way of telling
    return found


def main(name: str, path: str) -> None:
    result = {"packages": packages, "library": library, "world": world, "passive": passive, "gpu": gpu}[name]()
    if "mpi4py" not in sys.modules or sys.modules["mpi4py"].MPI.COMM_WORLD.rank == 0:
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
