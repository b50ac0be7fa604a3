"""Probes that need no MPI; the others run in tests/runs."""

import json
import platform
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from hpcsync.mpi.transport import subprocess_probe
from hpcsync.system.process_cleanup import MEMORY


def test_packages(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    subprocess.run([sys.executable, "-m", "hpcsync.mpi.transport.subprocess_probe", "packages", str(path)], check=True)
    found = json.loads(path.read_text())
    assert (list(found), found["numpy"]) == (["numpy", "h5py", "torch"], np.__version__)


def test_a_probe_that_ends_while_it_writes_keeps_what_it_had_found(tmp_path: Path, monkeypatch) -> None:
    path, write = tmp_path / "result.json", Path.write_text

    def write_in_part(self: Path, text: str) -> None:
        write(self, text[: len(text) if "1" in text else 3])
        if "1" not in text:
            raise OSError

    monkeypatch.setattr(Path, "write_text", write_in_part)
    monkeypatch.delitem(sys.modules, "mpi4py", raising=False)
    monkeypatch.setattr(subprocess_probe.resource, "setrlimit", lambda *limits: None)
    monkeypatch.setitem(subprocess_probe.PROBES, "two", lambda: iter([{"kinds": 1}, {"kinds": 2}]))
    with pytest.raises(OSError):
        subprocess_probe.main("two", str(path))
    assert json.loads(path.read_text()) == {"kinds": 1}


@pytest.mark.skipif(not MEMORY.is_dir(), reason="shared memory is there on Linux only")
def test_segments_that_a_probe_leaves_are_removed(tmp_path: Path) -> None:
    names = [f"sm_segment.{platform.node()}.{uuid.uuid4().hex}" for _ in range(2)]
    earlier, its_own = (MEMORY / name for name in names)
    earlier.touch()
    time.sleep(0.05)  # longer than a tick of the file system's clock
    try:
        with open(tmp_path / "output", "w+b") as output:
            made = f"import pathlib; pathlib.Path({str(its_own)!r}).touch(); print('made')"
            assert subprocess_probe._run([sys.executable, "-c", made], output) == 0
        assert (tmp_path / "output").read_text() == "made\n"
        assert (earlier.exists(), its_own.exists()) == (True, False)
    finally:
        earlier.unlink()
        its_own.unlink(missing_ok=True)
