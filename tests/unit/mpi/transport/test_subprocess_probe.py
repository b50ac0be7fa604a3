"""Probes that need no MPI; the others run in tests/runs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np


def test_packages(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    subprocess.run([sys.executable, "-m", "hpcsync.mpi.transport.subprocess_probe", "packages", str(path)], check=True)
    found = json.loads(path.read_text())
    assert (list(found), found["numpy"]) == (["numpy", "h5py", "torch"], np.__version__)
