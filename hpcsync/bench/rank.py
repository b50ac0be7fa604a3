"""One rank of a benchmark.

Usage: python -m mpi4py -m hpcsync.bench.rank TARGET RESULT.json [DEVICE KIND]
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from hpcsync.system import gpu_selection


def main(target: str, path: str, device: str = "cpu", kind: str = "") -> None:
    """Measure with all ranks of the world and write the figures, gathered on rank 0.

    Parameters
    ----------
    target
        Module of the benchmark.
    path
        File for the result.
    device, kind
        Device of the tensors and kind of window, for a target that moves tensors.
    """
    claimed = gpu_selection.claim(device)  # before MPI is initialised, which then finds the current GPU
    from mpi4py import MPI

    from hpcsync.mpi.transport.tensor_window import Transport

    comm = MPI.COMM_WORLD
    arguments = (comm, Transport(kind, claimed)) if kind else (comm,)
    gathered = comm.gather(importlib.import_module(f"hpcsync.bench.{target}").measure(*arguments))
    if gathered is not None:
        figures = [asdict(figure) for figures in gathered for figure in figures]
        library = " ".join(MPI.Get_library_version().strip("\0 \n").splitlines()[0].split(",")[0].split())
        Path(path).write_text(json.dumps({"library": library, "figures": figures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
