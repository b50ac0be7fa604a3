"""One rank of a measurement: python -m mpi4py -m hpcsync.bench.rank TARGET RESULT.json"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from mpi4py import MPI


def main(target: str, path: str) -> None:
    """Measure with all ranks of the world; the rank that has the figures writes them down."""
    module = importlib.import_module(f"hpcsync.bench.{target}")
    gathered = MPI.COMM_WORLD.gather(module.measure(MPI.COMM_WORLD))
    if gathered is not None:
        figures = [asdict(figure) for figures in gathered for figure in figures]
        library = " ".join(MPI.Get_library_version().strip("\0 \n").splitlines()[0].split(",")[0].split())
        Path(path).write_text(json.dumps({"library": library, "figures": figures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
