"""Worker processes of data loaders, without MPI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
