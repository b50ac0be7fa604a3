"""A run whose checkpoint was altered: refused in one line, and code in it does not run.

Tests of the files are in tests/unit/run_dir; that unaltered ones are resumed is in test_suspending.py.
"""

from __future__ import annotations

import json
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcsync.run_dir import checkpoint
from hpcsync.run_dir.checkpoint_files import MANIFEST, write_manifest
from hpcsync.system.signals import TO_BE_RESUMED
from tests.runs.processes import ended, hpcsync, started

JOB = """
name = "altered"
workload = {name = "linear", batch_size = 4, features = 20, samples = 400}
optimizer = {name = "sgd", lr = 0.01, momentum = 0.9}
stop = {updates = 100_000}
paradigm = {name = "asp"}
cluster = {workers = 1, compute = {model = "constant", seconds = 0.005}}
"""


class Runs:
    """A pickle that runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def change(path: Path, how: Callable[[Any], None]) -> None:
    """Change a part, and let the manifest say that it was always so."""
    content = json.loads(path.read_text())
    how(content["state"])
    path.write_text(json.dumps(content))
    (path.parent / MANIFEST).unlink()
    write_manifest(path.parent)


@pytest.mark.once
def test_an_altered_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    job, out, touched = tmp_path / "job.toml", tmp_path / "out", tmp_path / "touched"
    job.write_text(JOB)
    with started(hpcsync("run", job, "--out", out)) as program:
        program.wait_for(lambda said: " samples/s" in said.out)
        program.process.send_signal(signal.SIGTERM)
        assert program.status == TO_BE_RESUMED, program.err
    saved = checkpoint.newest(out)
    assert saved is not None
    files = {path: path.read_bytes() for path in saved.iterdir()}
    assert {path.suffix for path in files} == {".json", ".safetensors"}

    def resumed() -> tuple[int, str]:
        program = ended(hpcsync("run", job, "--out", out, "--resume"))
        for path, data in files.items():
            path.write_bytes(data)
        return program.status, program.err

    weights = saved / "server-0.safetensors"
    weights.write_bytes(pickle.dumps(Runs(touched)))
    status, said = resumed()
    assert (status, said.count("\n")) == (2, 1) and said.startswith(f"hpcsync: --resume: {weights}: must have "), said

    # The types of a rank's own state are known on the rank only.
    change(saved / "worker-0.json", lambda state: state["iterations"].update(used="x"))
    status, said = resumed()
    line = f"hpcsync: rank 1 failed: {saved / 'worker-0.json'}: used: must be int, got 'x'\n"
    assert status == 1 and line in said and "Traceback" not in said, said

    assert not touched.exists()
